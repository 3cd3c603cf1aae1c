"""`memcorr matcher evaluate`: 3D error on live scenes of any world, where the policy will need it.

The scripted expert executes both tasks; every eight steps, as at a replan, the live frame is matched
against the reference of training pair 0 at the elapsed-time phase. Errors are judged with simulator
truth afterwards. Beside the paper's conditions: cameras turned by 25 degrees, scenes in other colours
(reference and live alike) and live scenes in another light than the reference.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from ..demos.phase import reference_phase
from ..errors import UserError
from ..files import converted, read_json, refuse, write_json
from ..folders import claimed
from ..frames import Frame
from ..machine import threads
from ..spec import DOOR, SPEC, WORLD_TASKS, Array, Lifting, Task, TestSet, stock_task
from ..workers import Workers, spread
from ..worlds.expert import act
from ..worlds.pairs import find_pair
from ..worlds.scenes import Scene, demonstration_scenes, evaluation_scenes
from ..worlds.world import World, shared_world
from .cache import error_table
from .embedded.practice import randomise_light, randomise_look
from .lift import match_frames, prepare_references
from .matcher import Matcher, load_matcher, matcher_label, weights_digest
from .matches import residuals

MATCHING = "matching.json"


SETTINGS: dict[str, TestSet] = {  # and the condition that their scenes are of
    **{"validation": "validation", "boundary": "boundary", "extreme": "extreme", "camera": "camera"},
    **{"combined": "combined", "camera-25": "camera", "recoloured": "camera", "relit": "camera"},
}


def scenes_of(setting: str, seed: int, world: str) -> list[Scene]:
    scenes = evaluation_scenes(SETTINGS[setting], seed, world=world)
    if setting != "camera-25":
        return scenes
    return [replace(s, camera_azimuth_deg=s.camera_azimuth_deg / 15 * 25) for s in scenes]


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


@dataclass(frozen=True)
class Measuring:
    """What a worker does with a stream of (world, setting)."""

    matcher: str
    lifting: Lifting
    scene_seed: int

    def __call__(self, jobs: Iterator[tuple[str, str]]) -> Iterator[dict[str, Any]]:
        with threads(1):
            matcher = load_matcher(self.matcher)
            for world, setting in jobs:
                table = evaluate(matcher, setting, world=world, seed=self.scene_seed, lifting=self.lifting)
                yield table | {"matcher": matcher_label(self.matcher), "weights": weights_digest(self.matcher)}


def measure_all(
    settings: Sequence[str], world: str, matcher: str, lifting: Lifting, scene_seed: int, out: Path, workers: Workers
) -> Iterator[dict[str, Any]]:
    """Tables of every setting in the worlds asked for, as they come; each goes into `out`/matching.json."""
    if unknown := [setting for setting in settings if setting not in SETTINGS]:
        raise UserError(f"unknown setting {unknown[0]!r}: choose from {', '.join(SETTINGS)}")
    if stock_task(world):
        raise UserError(
            f"{world} has no joint to be put anywhere: rows of `memcorr evaluate` hold the matcher's error there"
        )
    worlds = list(WORLD_TASKS) if world == "all" else [find_pair(world).name]
    jobs = [(name, setting) for name in worlds for setting in settings or SETTINGS]
    load_matcher(matcher)  # complains before anything is written
    with claimed(out), closing(spread(Measuring(matcher, lifting, scene_seed), jobs, workers)) as tables:
        for table in tqdm(tables, f"{matcher_label(matcher)} {lifting}", total=len(jobs), unit="setting"):
            kept = {_identity(t): t for t in _present(out / MATCHING)} | {_identity(table): table}
            write_json(out / MATCHING, {"tables": [kept[key] for key in sorted(kept)]})
            yield table


@dataclass(frozen=True, order=True)
class Identity:
    """What a table in matching.json is about."""

    matcher: str
    lifting: str
    world: str
    setting: str
    scene_seed: int


def _present(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    kind = dict[str, list[dict[str, Any]]]
    tables = read_json(path, kind, "a list of error tables", "delete it").get("tables", [])
    try:
        [_identity(table) for table in tables]
    except ValueError as problem:
        refuse(path, problem, "delete it")
    return tables


def _identity(table: dict[str, Any]) -> Identity:
    return converted(table, Identity)


def evaluate(
    matcher: Matcher,
    setting: str,
    *,
    world: str = DOOR,
    seed: int = 0,
    count: int | None = None,
    lifting: Lifting = "rigid",
) -> dict[str, Any]:
    """Error tables of one setting, over all decisions and over the first ones alone (`first_frame`), with the
    paper's online mean (over decisions, then pooled)."""
    place = World(world) if setting in ("recoloured", "relit") else shared_world(world)  # theirs are not put back
    stock = copy(place.renderer.model)
    rng = np.random.default_rng([seed, 99])
    scenes = scenes_of(setting, seed, world)[:count]
    if setting == "recoloured":
        recolour(place, stock, rng)
    first = demonstration_scenes(world=world)[0]
    references = {task: list(views(place, first, task, 1)) for task in place.pair.tasks}
    prepared: dict[tuple[Task, int], Any] = {}
    frames, encoded, ref_poses, live_poses, replans = [], [], [], [], []
    for scene in tqdm(scenes, f"{matcher.name} {world} {setting}", leave=False):
        for task in place.pair.tasks:
            if setting == "relit":
                randomise_light(place.renderer.model, stock, rng)
                place.model.light_dir[:] = place.renderer.model.light_dir
            for k, view in enumerate(views(place, scene, task, SPEC.executed)):
                j = reference_phase(k * SPEC.executed, len(references[task]))
                if (task, j) not in prepared:
                    (prepared[task, j],) = prepare_references(matcher, [references[task][j].frame])
                frames.append(view.frame)
                encoded.append(prepared[task, j])
                ref_poses.append(references[task][j].T_world_object)
                live_poses.append(view.T_world_object)
                replans.append(k)
    matches = match_frames(matcher, encoded, frames, lifting)
    residual = residuals(matches, np.stack(ref_poses), np.stack(live_poses))
    error = 1e3 * np.linalg.norm(residual, axis=-1)
    usable = matches.valid.any(axis=1)
    per_decision = [error[i][matches.valid[i]].mean() for i in np.flatnonzero(usable)]
    at_first = np.array(replans) == 0
    return {
        "world": world,
        "setting": setting,
        "scene_seed": seed,
        "lifting": lifting,
        **error_table(matcher.name, residual, matches.valid),
        "mean_over_decisions_mm": round(float(np.mean(per_decision)), 3),
        "fallback_decisions": int((matches.valid.sum(axis=1) < SPEC.min_valid).sum()),
        "first_frame": error_table(matcher.name, residual[at_first], matches.valid[at_first]),
    }


def recolour(world: World, stock: Any, rng: np.random.Generator) -> None:
    """New colours that certainly differ: `randomise_look` keeps the stock look now and then."""
    model = world.renderer.model
    while np.array_equal(model.mat_rgba, stock.mat_rgba):
        randomise_look(model, stock, rng)
