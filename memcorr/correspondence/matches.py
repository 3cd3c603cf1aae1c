"""Sixteen point pairs between a reference frame and the live scene, in one world frame.

Whatever produced them (a matcher, the simulator's ground truth, a corruption), everything
downstream sees only `Matches`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..spec import Array


@dataclass(frozen=True)
class Matches:
    """Point pairs of one replanning decision, or of a batch of them (leading axes)."""

    p_ref: Array  # (..., 16, 3) metres, world frame; finite also where invalid
    p_live: Array  # (..., 16, 3) metres, world frame; finite also where invalid
    confidence: Array  # (..., 16) in [0, 1]
    valid: NDArray[np.bool_]  # (..., 16)

    def __getitem__(self, index: int | slice | NDArray[np.int64]) -> Matches:
        """Some decisions of a batch, or one."""
        return Matches(self.p_ref[index], self.p_live[index], self.confidence[index], self.valid[index])


def join_matches(*parts: Matches) -> Matches:
    """Batches one after the other."""
    return Matches(*(np.concatenate([getattr(p, name) for p in parts]) for name in Matches.__dataclass_fields__))


def transform(T: Array, p: Array) -> Array:
    """Applies 4x4 transforms (..., 4, 4) to points (..., n, 3)."""
    return p @ np.swapaxes(T[..., :3, :3], -1, -2) + T[..., None, :3, 3]


def ground_truth_matches(points: Array, T_world_object_ref: Array, T_world_object_live: Array) -> Matches:
    """Fixed points (16, 3) of the object's own frame, carried by its pose in both scenes (confidence 1)."""
    p_ref = transform(T_world_object_ref, points)
    p_live = transform(T_world_object_live, points)
    return Matches(p_ref, p_live, np.ones(p_ref.shape[:-1]), np.ones(p_ref.shape[:-1], bool))


def residuals(matches: Matches, T_world_object_ref: Array, T_world_object_live: Array) -> Array:
    """Error diagnostic: estimated live point minus the estimated reference point carried by the
    object's motion, metres, world frame (..., 16, 3). Uses simulator truth; never a policy input."""
    T_live_ref = T_world_object_live @ np.linalg.inv(T_world_object_ref)
    return matches.p_live - transform(T_live_ref, matches.p_ref)
