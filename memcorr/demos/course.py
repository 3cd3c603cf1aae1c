"""Where in its reference is the live scene? The phase from what is seen, beside the clock of the paper.

A reference is a *course*: how its object moved, and where the gripper was. The live scene is told by the
motion that carries the object's points from the reference's first frame to where they are now, and by the
live gripper. Three things are compared with every frame of the course:

  relation     the gripper as seen from the object: knows nothing of where the object stands
  articulation how the object is turned, and how far it has moved since the episode began
  time         as many steps onward as were made since the last look; what breaks ties while things stand still

Each is a squared distance in units of its usual error; displacement and time are cut off where they have said
all they can, so that a scene that was set back can carry the phase back. No simulator truth is needed: motions
come from matched points.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from scipy.spatial.transform import Rotation, Slerp

from ..spec import SPEC, Array
from .phase import last_phase

RELATION_M = 0.012  # usual error of the gripper as seen from the object
TURN_M = 0.006  # of a point of the object, after the displacement of all was taken out
SHIFT_M, SHIFT_LIMIT = 0.010, 4.0  # of the displacement since the start; a base may be moved in mid-episode
PACE, BACK_LIMIT, AHEAD_LIMIT = 8.0, 12.0, 9.0  # frames; what going back or ahead costs at most


def carried(T: NDArray[np.floating], p: Array) -> Array:
    """Points (n, 3) after the motions (..., 4, 4)."""
    return np.asarray(p @ np.swapaxes(T[..., :3, :3], -1, -2) + T[..., None, :3, 3])


def inverse(T: Array) -> Array:
    """Of motions (..., 4, 4)."""
    return np.asarray(np.linalg.inv(T), np.float64)


@dataclass(frozen=True)
class Course:
    """A reference of T frames, as its object and gripper moved."""

    points: Array  # (n, 3) of the object in the first frame, metres, world
    motion: Array  # (T, 4, 4) carries them to each frame
    gripper: Array  # (T, 3)

    @cached_property
    def relation(self) -> Array:
        """(T, 3) the gripper in the frame of the object as it stood first."""
        R, t = self.motion[:, :3, :3], self.motion[:, :3, 3]
        return np.einsum("tji,tj->ti", R, self.gripper - t)

    @cached_property
    def places(self) -> tuple[Array, Array]:
        """The middle (T, 3) of the points in each frame, and the points (T, n, 3) as seen from there."""
        p = carried(self.motion, self.points)
        middle = p.mean(axis=1)
        return middle, p - middle[:, None]

    @staticmethod
    def of_poses(points: Array, poses: Array, gripper: Array) -> Course:
        """From the object's poses (T, 4, 4); `points` (n, 3) in its own frame."""
        return Course(carried(poses[0], points), poses @ np.linalg.inv(poses[0]), gripper)


@dataclass(frozen=True)
class Progress:
    """What is remembered from one look to the next."""

    phase: int
    displacement: Array  # (3,) of the object against the reference, metres, when the episode began
    elapsed: int = 0  # control steps made by then


def interpolated(frames: Sequence[int], motions: Sequence[Array], length: int) -> Array:
    """Motions (T, 4, 4) of every frame from those of some, the first and in order; after the last it stands still."""
    path = Slerp(frames, Rotation.from_matrix([T[:3, :3] for T in motions])) if len(frames) > 1 else None
    every = np.minimum(np.arange(length), frames[-1])
    whole = np.tile(np.eye(4), (length, 1, 1))
    whole[:, :3, :3] = np.eye(3) if path is None else path(every).as_matrix()
    shifts = np.stack([T[:3, 3] for T in motions])
    whole[:, :3, 3] = np.stack([np.interp(every, frames, shifts[:, axis]) for axis in range(3)], axis=-1)
    return whole


@dataclass(frozen=True)
class Looks:
    """K live scenes against the T frames of a course."""

    cost: Array  # (K, T) of relation and turn
    displacement: Array  # (K, T, 3) of the object, metres


def compare(course: Course, motion: Array, gripper: Array) -> Looks:
    """`motion` (K, 4, 4) carries the points of the course's first frame to where they are in each scene, `gripper`
    (K, 3) are the live ones."""
    frames = np.arange(last_phase(len(course.motion)) + 1)
    live = np.einsum("kji,kj->ki", motion[:, :3, :3], gripper - motion[:, :3, 3])
    relation = np.linalg.norm(course.relation[frames] - live[:, None], axis=-1)
    now, (middle, then) = carried(motion, course.points), course.places  # (K, n, 3)
    displacement = now.mean(axis=1)[:, None] - middle[frames]
    now = now - now.mean(axis=1, keepdims=True)
    turned_squared = ((now[:, None] - then[frames]) ** 2).sum(axis=-1).mean(axis=-1)
    return Looks((relation / RELATION_M) ** 2 + turned_squared / TURN_M**2, displacement)


def expected_phase(before: Progress | None, elapsed: int, length: int) -> int:
    """The frame to look at: about as many on as steps were made since the last look; the first at the first.

    Always one of every eighth, so that a reference is prepared once and a live step costs one match.
    """
    if before is None:
        return 0
    frame = min(before.phase + max(elapsed - before.elapsed, 0), last_phase(length))
    return min(SPEC.executed * round(frame / SPEC.executed), last_phase(length) // SPEC.executed * SPEC.executed)


def seen_phase(course: Course, motion: Array, gripper: Array, before: Progress | None, elapsed: int) -> Progress:
    """The frame of the course that looks most like the live scene.

    `motion` (4, 4) and `gripper` (3) as in `compare`; `elapsed` steps have been made; `before` is None at the first
    look.
    """
    return _next(compare(course, motion[None], gripper[None]), 0, before, elapsed)


def seen_phases(course: Course, motion: Array, gripper: Array, every: int) -> NDArray[np.int64]:
    """The phase (K,) of each frame of a recording, had it been followed with a look at it and at every so many
    frames before."""
    looks = compare(course, motion, gripper)
    phases = np.zeros(len(motion), np.int64)
    for first in range(min(every, len(motion))):
        progress = None
        for k in range(first, len(motion), every):
            progress = _next(looks, k, progress, k)
            phases[k] = progress.phase
    return phases


def _next(looks: Looks, k: int, before: Progress | None, elapsed: int) -> Progress:
    cost, displacement = looks.cost[k], looks.displacement[k]
    frames = np.arange(len(cost))
    if before is None:
        phase = int((cost + np.minimum((frames / PACE) ** 2, AHEAD_LIMIT)).argmin())
        return Progress(phase, displacement[phase], elapsed)
    moved = np.linalg.norm(displacement - before.displacement, axis=-1)
    late = frames - (before.phase + elapsed - before.elapsed)
    cost = cost + np.minimum((moved / SHIFT_M) ** 2, SHIFT_LIMIT**2)
    cost += np.minimum((late / PACE) ** 2, np.where(late < 0, BACK_LIMIT, AHEAD_LIMIT))
    return Progress(int(cost.argmin()), before.displacement, elapsed)
