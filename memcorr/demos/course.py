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

import numpy as np
from scipy.spatial.transform import Rotation, Slerp

from ..spec import Array
from .phase import last_phase

RELATION_M = 0.012  # usual error of the gripper as seen from the object
TURN_M = 0.006  # of a point of the object, after the displacement of all was taken out
SHIFT_M, SHIFT_LIMIT = 0.010, 4.0  # of the displacement since the start; a base may be moved in mid-episode
PACE, BACK_LIMIT, AHEAD_LIMIT = 8.0, 12.0, 9.0  # frames; what going back or ahead costs at most


def carried(T: Array, p: Array) -> Array:
    """Points (n, 3) after the motions (..., 4, 4)."""
    return p @ np.swapaxes(T[..., :3, :3], -1, -2) + T[..., None, :3, 3]


@dataclass(frozen=True)
class Course:
    """A reference of T frames, as its object and gripper moved."""

    points: Array  # (n, 3) of the object in the first frame, metres, world
    motion: Array  # (T, 4, 4) carries them to each frame
    gripper: Array  # (T, 3)

    @property
    def relation(self) -> Array:
        """(T, 3) the gripper in the frame of the object as it stood first."""
        R, t = self.motion[:, :3, :3], self.motion[:, :3, 3]
        return np.einsum("tji,tj->ti", R, self.gripper - t)

    @staticmethod
    def of_poses(points: Array, poses: Array, gripper: Array) -> Course:
        """From the object's poses (T, 4, 4); `points` (n, 3) in its own frame."""
        return Course(carried(poses[0], points), poses @ np.linalg.inv(poses[0]), gripper)


@dataclass(frozen=True)
class Progress:
    """What is remembered from one look to the next."""

    phase: int
    displacement: Array  # (3,) of the object against the reference, metres, when the episode began


def interpolated(frames: Sequence[int], motions: Sequence[Array], length: int) -> Array:
    """Motions (T, 4, 4) of every frame from those of some, the first and in order; after the last it stands still."""
    path = Slerp(frames, Rotation.from_matrix([T[:3, :3] for T in motions])) if len(frames) > 1 else None
    every = np.minimum(np.arange(length), frames[-1])
    whole = np.tile(np.eye(4), (length, 1, 1))
    whole[:, :3, :3] = np.eye(3) if path is None else path(every).as_matrix()
    shifts = np.stack([T[:3, 3] for T in motions])
    whole[:, :3, 3] = np.stack([np.interp(every, frames, shifts[:, axis]) for axis in range(3)], axis=-1)
    return whole


def seen_phase(course: Course, motion: Array, gripper: Array, before: Progress | None, steps: int) -> Progress:
    """The frame of the course that looks most like the live scene.

    `motion` (4, 4) carries the points of the course's first frame to where they are now, `gripper` (3) is the
    live one, `steps` were made since `before`, which is None at the first look.
    """
    frames = np.arange(last_phase(len(course.motion)) + 1)
    relation = np.linalg.norm(course.relation[frames] - motion[:3, :3].T @ (gripper - motion[:3, 3]), axis=-1)
    gap = carried(motion, course.points) - carried(course.motion[frames], course.points)  # (T, n, 3)
    displacement = gap.mean(axis=1)
    turned = np.sqrt(((gap - displacement[:, None]) ** 2).sum(axis=-1).mean(axis=-1))
    cost = (relation / RELATION_M) ** 2 + (turned / TURN_M) ** 2
    if before is None:
        phase = int((cost + np.minimum((frames / PACE) ** 2, AHEAD_LIMIT)).argmin())
        return Progress(phase, displacement[phase])
    moved = np.linalg.norm(displacement - before.displacement, axis=-1)
    cost += np.minimum((moved / SHIFT_M) ** 2, SHIFT_LIMIT**2)
    late = frames - (before.phase + steps)
    cost += np.minimum((late / PACE) ** 2, np.where(late < 0, BACK_LIMIT, AHEAD_LIMIT))
    return Progress(int(cost.argmin()), before.displacement)
