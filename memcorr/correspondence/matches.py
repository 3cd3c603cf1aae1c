"""Sixteen point pairs between a reference frame and the live scene, in one world frame.

Whatever produced them (a matcher, the simulator's ground truth, a corruption), everything
downstream sees only `Matches`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ..spec import SPEC, Array
from .rigid import carried, fit_motion


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


def ground_truth_matches(points: Array, T_world_object_ref: Array, T_world_object_live: Array) -> Matches:
    """Fixed points (16, 3) of the object's own frame, carried by its pose in both scenes (confidence 1)."""
    p_ref = carried(T_world_object_ref, points)
    p_live = carried(T_world_object_live, points)
    return Matches(p_ref, p_live, np.ones(p_ref.shape[:-1]), np.ones(p_ref.shape[:-1], bool))


def residuals(matches: Matches, T_world_object_ref: Array, T_world_object_live: Array) -> Array:
    """Error diagnostic: estimated live point minus the estimated reference point carried by the
    object's motion, metres, world frame (..., 16, 3). Uses simulator truth; never a policy input."""
    T_live_ref = T_world_object_live @ np.linalg.inv(T_world_object_ref)
    return matches.p_live - carried(T_live_ref, matches.p_ref)


def retimed(matches: Matches, T: Array) -> Matches:
    """Matches (16, ...) as if the reference's object had moved by T (4, 4) when it was looked at."""
    p_ref = np.where(matches.valid[:, None], carried(T, matches.p_ref), matches.p_ref)
    return replace(matches, p_ref=p_ref)


def motion_of(matches: Matches) -> Array | None:
    """The rigid motion (4, 4) from reference to live points; None with fewer than four of them."""
    valid = matches.valid
    if valid.sum() < SPEC.min_valid:
        return None
    R, t = fit_motion(matches.p_ref[valid], matches.p_live[valid], np.maximum(matches.confidence[valid], 0.02))
    T = np.eye(4)
    T[:3, :3], T[:3, 3] = R, t
    return T
