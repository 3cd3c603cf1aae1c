"""`memcorr matcher evaluate`: 3D error on live scenes, where the policy will need it.

The scripted expert executes both tasks; every eight steps, as at a replan, the live frame is matched
against the reference of training pair 0 at the elapsed-time phase. Errors are judged with simulator
truth afterwards. Beside the paper's conditions: cameras turned by 25 degrees, scenes in other colours
(reference and live alike) and live scenes in another light than the reference.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from tqdm import tqdm

from ..demos.phase import reference_phase
from ..errors import UserError
from ..frames import Frame
from ..spec import SPEC, TASKS, Array, Lifting, Task
from ..worlds.expert import act
from ..worlds.scenes import Scene, demonstration_scenes, evaluation_scenes
from ..worlds.world import World
from .cache import error_table
from .embedded.practice import randomise_light, randomise_look
from .lift import match_frames, prepare_references
from .matcher import Matcher
from .matches import residuals


def wide_scenes(seed: int) -> list[Scene]:
    return [replace(s, camera_azimuth_deg=s.camera_azimuth_deg / 15 * 25) for s in evaluation_scenes("camera", seed)]


SETTINGS = {
    "validation": lambda seed: evaluation_scenes("validation", seed),
    "boundary": lambda seed: evaluation_scenes("boundary", seed),
    "extreme": lambda seed: evaluation_scenes("extreme", seed),
    "camera": lambda seed: evaluation_scenes("camera", seed),
    "combined": lambda seed: evaluation_scenes("combined", seed),
    "camera-25": wide_scenes,
    "recoloured": lambda seed: evaluation_scenes("camera", seed),
    "relit": lambda seed: evaluation_scenes("camera", seed),
}


@dataclass(frozen=True)
class View:
    frame: Frame
    T_world_object: Array


def views(world: World, scene: Scene, task: Task, every: int) -> Iterator[View]:
    """What the expert's rollout shows at every replan, until the task is done."""
    world.reset(scene)
    for t in range(SPEC.episode_steps):
        if t % every == 0:
            yield View(world.observe(), world.T_world_object)
        if every > 1 and world.success(task):
            return
        world.step(act(world, task))


def evaluate(
    matcher: Matcher, setting: str, *, seed: int = 0, count: int | None = None, lifting: Lifting = "rigid"
) -> dict[str, Any]:
    """Error table of one setting, with the paper's online mean (over decisions, then pooled)."""
    if setting not in SETTINGS:
        raise UserError(f"unknown setting {setting!r}: choose from {', '.join(SETTINGS)}")
    world = World()
    stock = copy(world.renderer.model)
    rng = np.random.default_rng([seed, 99])
    scenes = SETTINGS[setting](seed)[:count]
    if setting == "recoloured":
        recolour(world, stock, rng)
    references = {task: list(views(world, demonstration_scenes()[0], task, 1)) for task in TASKS}
    prepared: dict[tuple[Task, int], Any] = {}
    frames, encoded, ref_poses, live_poses = [], [], [], []
    for scene in tqdm(scenes, f"{matcher.name} {setting}", leave=False):
        for task in TASKS:
            if setting == "relit":
                randomise_light(world.renderer.model, stock, rng)
                world.model.light_dir[:] = world.renderer.model.light_dir
            for k, view in enumerate(views(world, scene, task, SPEC.executed)):
                j = reference_phase(k * SPEC.executed, len(references[task]))
                if (task, j) not in prepared:
                    (prepared[task, j],) = prepare_references(matcher, [references[task][j].frame])
                frames.append(view.frame)
                encoded.append(prepared[task, j])
                ref_poses.append(references[task][j].T_world_object)
                live_poses.append(view.T_world_object)
    matches = match_frames(matcher, encoded, frames, lifting)
    residual = residuals(matches, np.stack(ref_poses), np.stack(live_poses))
    error = 1e3 * np.linalg.norm(residual, axis=-1)
    usable = matches.valid.any(axis=1)
    per_decision = [error[i][matches.valid[i]].mean() for i in np.flatnonzero(usable)]
    return {
        "setting": setting,
        "scene_seed": seed,
        **error_table(matcher.name, residual, matches.valid),
        "mean_over_decisions_mm": round(float(np.mean(per_decision)), 3),
        "fallback_decisions": int((matches.valid.sum(axis=1) < SPEC.min_valid).sum()),
    }


def recolour(world: World, stock: Any, rng: np.random.Generator) -> None:
    """New colours that certainly differ: `randomise_look` keeps the stock look now and then."""
    model = world.renderer.model
    while np.array_equal(model.mat_rgba, stock.mat_rgba):
        randomise_look(model, stock, rng)
