"""Physical configurations: where the door stands and how the camera is turned.

Training and validation positions are one Latin hypercube in [0.2, 0.8]^2. The four test
distributions follow the table "Training and test distributions": the active coordinate
alternates between the axes and between the lower and the upper band, the other stays in the
training band. Every set is drawn from a seed; the paper's fixed sets are seed 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from scipy.stats import qmc

from .errors import UserError
from .protocol import PROTOCOL, Condition

CONDITIONS: tuple[Condition, ...] = get_args(Condition)
EVALUATION_COUNTS: dict[Condition, int] = {
    "validation": PROTOCOL.pairs - PROTOCOL.train_pairs,
    "boundary": 50,
    "extreme": 25,
    "camera": 25,
    "combined": 25,
}


@dataclass(frozen=True)
class Scene:
    """One physical configuration. The task is not part of it: both start from here."""

    condition: Literal["demonstrations"] | Condition
    index: int  # position within its set; for demonstrations and validation the pair number
    seed: int  # what the set was drawn with
    u: tuple[float, float]  # normalised door position, [0, 1]^2
    camera_azimuth_deg: float = 0.0  # query camera, about the vertical axis

    @property
    def door_position(self) -> np.ndarray:
        """Position of the body `door`, metres, world frame."""
        x, y = (lo + u * (hi - lo) for u, (lo, hi) in zip(self.u, (PROTOCOL.door_x, PROTOCOL.door_y), strict=True))
        return np.array([x, y, PROTOCOL.door_z])


def demonstration_scenes(seed: int = 0, pairs: int = PROTOCOL.pairs) -> list[Scene]:
    """The paired configurations, a Latin hypercube over all `PROTOCOL.pairs` of them.

    A smaller `pairs` gives the first ones of the same hypercube, so a short collection is a
    prefix of the full one.
    """
    if not 1 <= pairs <= PROTOCOL.pairs:
        raise UserError(f"--pairs {pairs}: give a number from 1 to {PROTOCOL.pairs}")
    sampler = qmc.LatinHypercube(d=2, rng=np.random.default_rng([seed, 0]))
    lo, hi = PROTOCOL.band_train
    positions = lo + sampler.random(PROTOCOL.pairs) * (hi - lo)
    return [Scene("demonstrations", i, seed, (float(u[0]), float(u[1]))) for i, u in enumerate(positions[:pairs])]


def evaluation_scenes(condition: Condition, seed: int = 0, count: int | None = None) -> list[Scene]:
    """The evaluation set of one condition. `validation` are demonstration pairs 80-99."""
    if condition not in CONDITIONS:
        raise UserError(f"unknown condition {condition!r}: choose one of {', '.join(CONDITIONS)}")
    count = EVALUATION_COUNTS[condition] if count is None else count
    if condition == "validation":
        held_out = demonstration_scenes(seed)[PROTOCOL.train_pairs :][:count]
        return [Scene(condition, s.index, seed, s.u) for s in held_out]
    rng = np.random.default_rng([seed, 1 + CONDITIONS.index(condition)])
    scenes = []
    for i in range(count):
        u = rng.uniform(*PROTOCOL.band_train, size=2)
        if condition != "camera":
            bands = PROTOCOL.band_boundary if condition == "boundary" else PROTOCOL.band_extreme
            axis, side = i % 2, (i // 2) % 2
            u[axis] = rng.uniform(*bands[side])
        azimuth = 0.0
        if condition in ("camera", "combined"):
            # The sign must not be tied to one axis or side of the position bands, which repeat
            # every four scenes; it flips within and between those blocks of four.
            azimuth = PROTOCOL.camera_shift_deg * (-1) ** (i // 4 + i)
        scenes.append(Scene(condition, i, seed, (float(u[0]), float(u[1])), azimuth))
    return scenes
