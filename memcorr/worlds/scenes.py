"""Physical configurations: where the object stands and how the camera is turned.

Training and validation positions are one Latin hypercube in [0.2, 0.8]^2. The four test
distributions follow the table "Training and test distributions": the active coordinate
alternates between the axes and between the lower and the upper band, the other stays in the
training band. Every set is drawn from a seed; the paper's fixed sets are seed 0. "disturbed" is ours: training
positions, and something goes wrong in each scene.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from scipy.stats import qmc

from ..errors import UserError
from ..spec import DOOR, SPEC, TEST_SETS, TestSet, stock_task
from .disturbances import VIEWPOINTS, Disturbance, drawn

SCENE_COUNTS: dict[TestSet, int] = {
    "validation": SPEC.pairs - SPEC.train_pairs,
    "boundary": SPEC.boundary_scenes,
    "extreme": SPEC.shifted_scenes,
    "camera": SPEC.shifted_scenes,
    "combined": SPEC.shifted_scenes,
    "disturbed": 192,  # twelve of each kind
}


@dataclass(frozen=True)
class Scene:
    """One physical configuration. The task is not part of it: both start from here."""

    condition: Literal["demonstrations"] | TestSet
    index: int  # position within its set; for demonstrations and validation the pair number
    seed: int  # what the set was drawn with
    u: tuple[float, float]  # normalised position, [0, 1]^2; 0, 0 where Meta-World draws its own
    camera_azimuth_deg: float = 0.0  # query camera, about the vertical axis
    camera_elevation_deg: float = 0.0
    camera_orbit_deg: float = 0.0  # about the vertical axis through the object's base
    world: str = DOOR
    start: float | None = None  # share of the neutral range at which the joint starts instead; None: as always
    disturbances: tuple[Disturbance, ...] = ()  # what happens in it, and to what is seen of it


# Sizes of what happens in recordings that recover, and what sets their positions apart from the others'.
RECORDED = {"start": (0.02, 0.98), "action-noise": (0.1, 0.5), "set-back": (0.2, 0.9), "bump": (0.02, 0.1)}
RECORDED["shift"] = (0.01, 0.05)
LEFT_OFF = (8, 52)  # steps of the other task before recordings that begin there; a closed door leaves no way back
DISTURBED_SEED = 1_000_003

# One after the other in the condition "disturbed": what moves the object, the hand or the controls, then the sensors.
SUITE = (
    "",  # nothing, to compare with
    *("start=0.2", "start=0.8", "set-back", "bump", "shift", "action-noise", "delay"),
    *("depth-noise", "depth-holes", "mask-erode", "mask-dilate", "mask-late", "extrinsics", "azimuth", "elevation"),
)


def disturb(scene: Scene, *disturbances: Disturbance) -> Scene:
    """The same scene with this going wrong in it, and nothing that went wrong in it before."""
    changes: dict[str, Any] = {"start": None, "camera_elevation_deg": 0.0, "camera_orbit_deg": 0.0}
    if any(d.kind == "azimuth" for d in scene.disturbances):
        changes["camera_azimuth_deg"] = 0.0
    for d in disturbances:
        if d.kind == "start":
            changes["start"] = d.size
        elif d.kind in VIEWPOINTS:  # both ways to turn it go to the same side
            side = 1 if drawn(scene, "azimuth" if d.kind == "orbit" else d.kind).random() < 0.5 else -1
            changes[f"camera_{d.kind}_deg"] = side * d.size
    return replace(scene, disturbances=disturbances, **changes)


def demonstration_scenes(seed: int = 0, pairs: int = SPEC.pairs, world: str = DOOR) -> list[Scene]:
    """The paired configurations, a Latin hypercube over all `SPEC.pairs` of them, the same in every world.

    A smaller `pairs` gives the first ones of the same hypercube, so a short collection is a
    prefix of the full one.
    """
    if not 1 <= pairs <= SPEC.pairs:
        raise UserError(f"--pairs {pairs}: give a number from 1 to {SPEC.pairs}")
    sampler = qmc.LatinHypercube(d=2, rng=np.random.default_rng([seed, 0]))
    lo, hi = SPEC.band_train
    positions = (lo + sampler.random(SPEC.pairs) * (hi - lo))[:pairs]
    return [Scene("demonstrations", i, seed, (float(x), float(y)), world=world) for i, (x, y) in enumerate(positions)]


def disturbed_scenes(seed: int = 0, pairs: int = SPEC.pairs, world: str = DOOR) -> list[Scene]:
    """Configurations to learn recovering from: training positions, most of them disturbed in one way or in several.

    Half of them start somewhere else in the neutral range, half have noise on what the robot executes, and three in
    four are interfered with on the way: the object set back, the hand pushed, or the base moved. The last twenty of a
    hundred begin where the other task was left off instead, so that the two tasks of a pair start apart.
    """
    scenes = []
    for scene in demonstration_scenes(seed + DISTURBED_SEED, pairs, world):
        rng = drawn(scene, "recording")
        if scene.index >= SPEC.train_pairs:
            scenes.append(disturb(scene, Disturbance("other-task", int(rng.integers(*LEFT_OFF)))))
            continue
        sizes = {kind: float(rng.uniform(*band)) for kind, band in RECORDED.items()}
        wanted = rng.choice(["", "set-back", "bump", "shift"])
        chosen = [kind for kind in ("start", "action-noise") if rng.random() < 0.5] + [str(wanted)] * bool(wanted)
        scenes.append(disturb(scene, *(Disturbance(kind, round(sizes[kind], 4)) for kind in chosen)))
    return scenes


def _stock_scenes(condition: TestSet, seed: int, count: int, world: str) -> list[Scene]:
    """Placements of a task of Meta-World; it draws them itself, and has no bands."""
    if condition not in ("validation", "camera"):
        raise UserError(f"--condition {condition}: {world} has its own placements: give validation or camera")
    turns = [SPEC.camera_shift_deg * (-1) ** i if condition == "camera" else 0.0 for i in range(count)]
    return [Scene(condition, i, seed, (0.0, 0.0), turn, world=world) for i, turn in enumerate(turns)]


def usual_condition(world: str) -> TestSet:
    return "validation" if stock_task(world) else "combined"


def evaluation_scenes(condition: TestSet, seed: int = 0, count: int | None = None, world: str = DOOR) -> list[Scene]:
    """The evaluation set of one condition. `validation` are demonstration pairs 80-99."""
    if condition not in TEST_SETS:
        raise UserError(f"unknown condition {condition!r}: choose one of {', '.join(TEST_SETS)}")
    count = SCENE_COUNTS[condition] if count is None else count
    if stock_task(world):
        return _stock_scenes(condition, seed, count, world)
    if condition == "validation":
        held_out = demonstration_scenes(seed, world=world)[SPEC.train_pairs :][:count]
        return [replace(scene, condition=condition) for scene in held_out]
    rng = np.random.default_rng([seed, 1 + TEST_SETS.index(condition)])
    scenes = []
    for i in range(count):
        u = rng.uniform(*SPEC.band_train, size=2)
        if condition not in ("camera", "disturbed"):
            bands = SPEC.band_boundary if condition == "boundary" else SPEC.band_extreme
            axis, side = i % 2, (i // 2) % 2
            u[axis] = rng.uniform(*bands[side])
        azimuth = 0.0
        if condition in ("camera", "combined"):
            # The sign must not be tied to one axis or side of the position bands, which repeat
            # every four scenes; it flips within and between those blocks of four.
            azimuth = SPEC.camera_shift_deg * (-1) ** (i // 4 + i)
        scene = Scene(condition, i, seed, (float(u[0]), float(u[1])), azimuth, world=world)
        if condition == "disturbed":
            kind = SUITE[i % len(SUITE)]
            scene = disturb(scene, Disturbance.parse(kind)) if kind else scene
        scenes.append(scene)
    return scenes
