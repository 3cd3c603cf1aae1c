"""Sixteen point pairs between a reference frame and the live scene, in one world frame.

Whatever produced them (a matcher, the simulator's ground truth, a corruption), everything
downstream sees only `Matches`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ..demos.course import Course, Progress, carried, seen_phase
from ..spec import SPEC, Array
from .rigid import fit_motion


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


def retimed(matches: Matches, course: Course, frame: int, other: int) -> Matches:
    """Matches (16, ...) with one frame of the reference as if it had been another: its points move along."""
    T = course.motion[other] @ np.linalg.inv(course.motion[frame])
    p_ref = np.where(matches.valid[:, None], carried(T, matches.p_ref), matches.p_ref)
    return replace(matches, p_ref=p_ref)


def located(
    matches: Matches, course: Course, j: int, gripper: Array, before: Progress | None, elapsed: int
) -> tuple[Progress, Matches]:
    """Where in its reference a live scene is that was matched (16, ...) to frame j, and the matches as if the frame
    found had been looked at. Where too little is seen, the clock goes on."""
    motion = motion_of(matches)
    if motion is None:
        return Progress(j, np.zeros(3) if before is None else before.displacement, elapsed), matches
    progress = seen_phase(course, motion @ course.motion[j], gripper, before, elapsed)
    return progress, retimed(matches, course, j, progress.phase)


def motion_of(matches: Matches) -> Array | None:
    """The rigid motion (4, 4) from reference to live points; None with fewer than four of them."""
    valid = matches.valid
    if valid.sum() < SPEC.min_valid:
        return None
    R, t = fit_motion(matches.p_ref[valid], matches.p_live[valid], np.maximum(matches.confidence[valid], 0.02))
    T = np.eye(4)
    T[:3, :3], T[:3, 3] = R, t
    return T
