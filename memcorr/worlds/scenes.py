"""Physical configurations: where the door stands, how the camera is turned, which points are its truth.

Training and validation positions are one Latin hypercube in [0.2, 0.8]^2. The four test
distributions follow the table "Training and test distributions": the active coordinate
alternates between the axes and between the lower and the upper band, the other stays in the
training band. Every set is drawn from a seed; the paper's fixed sets are seed 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.stats import qmc

from ..errors import UserError
from ..spec import SPEC, TEST_SETS, Array, TestSet

SCENE_COUNTS: dict[TestSet, int] = {
    "validation": SPEC.pairs - SPEC.train_pairs,
    "boundary": SPEC.boundary_scenes,
    "extreme": SPEC.shifted_scenes,
    "camera": SPEC.shifted_scenes,
    "combined": SPEC.shifted_scenes,
}

# The ground truth's sixteen fixed points in the door's frame (x along the door from the hinge, y behind
# it, z up): the bar, the stem and the base of the handle, metres.
HANDLE_POINTS: Array = np.array(
    [(x, -0.12 + dy, dz) for x in (0.31, 0.35, 0.40, 0.45) for dy, dz in ((0.0, 0.019), (-0.019, 0.0))]
    + [(0.325, y, dz) for y in (-0.10, -0.06, -0.03) for dz in (0.013, -0.013)]
    + [(0.30, -0.018, 0.0), (0.35, -0.018, 0.0)]
)
assert HANDLE_POINTS.shape == (SPEC.points, 3)


@dataclass(frozen=True)
class Scene:
    """One physical configuration. The task is not part of it: both start from here."""

    condition: Literal["demonstrations"] | TestSet
    index: int  # position within its set; for demonstrations and validation the pair number
    seed: int  # what the set was drawn with
    u: tuple[float, float]  # normalised door position, [0, 1]^2
    camera_azimuth_deg: float = 0.0  # query camera, about the vertical axis

    @property
    def door_position(self) -> np.ndarray:
        """Position of the body `door`, metres, world frame."""
        x, y = (lo + u * (hi - lo) for u, (lo, hi) in zip(self.u, (SPEC.door_x, SPEC.door_y), strict=True))
        return np.array([x, y, SPEC.door_z])


def demonstration_scenes(seed: int = 0, pairs: int = SPEC.pairs) -> list[Scene]:
    """The paired configurations, a Latin hypercube over all `SPEC.pairs` of them.

    A smaller `pairs` gives the first ones of the same hypercube, so a short collection is a
    prefix of the full one.
    """
    if not 1 <= pairs <= SPEC.pairs:
        raise UserError(f"--pairs {pairs}: give a number from 1 to {SPEC.pairs}")
    sampler = qmc.LatinHypercube(d=2, rng=np.random.default_rng([seed, 0]))
    lo, hi = SPEC.band_train
    positions = lo + sampler.random(SPEC.pairs) * (hi - lo)
    return [Scene("demonstrations", i, seed, (float(u[0]), float(u[1]))) for i, u in enumerate(positions[:pairs])]


def evaluation_scenes(condition: TestSet, seed: int = 0, count: int | None = None) -> list[Scene]:
    """The evaluation set of one condition. `validation` are demonstration pairs 80-99."""
    if condition not in TEST_SETS:
        raise UserError(f"unknown condition {condition!r}: choose one of {', '.join(TEST_SETS)}")
    count = SCENE_COUNTS[condition] if count is None else count
    if condition == "validation":
        held_out = demonstration_scenes(seed)[SPEC.train_pairs :][:count]
        return [Scene(condition, s.index, seed, s.u) for s in held_out]
    rng = np.random.default_rng([seed, 1 + TEST_SETS.index(condition)])
    scenes = []
    for i in range(count):
        u = rng.uniform(*SPEC.band_train, size=2)
        if condition != "camera":
            bands = SPEC.band_boundary if condition == "boundary" else SPEC.band_extreme
            axis, side = i % 2, (i // 2) % 2
            u[axis] = rng.uniform(*bands[side])
        azimuth = 0.0
        if condition in ("camera", "combined"):
            # The sign must not be tied to one axis or side of the position bands, which repeat
            # every four scenes; it flips within and between those blocks of four.
            azimuth = SPEC.camera_shift_deg * (-1) ** (i // 4 + i)
        scenes.append(Scene(condition, i, seed, (float(u[0]), float(u[1])), azimuth))
    return scenes
