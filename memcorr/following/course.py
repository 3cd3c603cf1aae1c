"""Where in its reference is the live scene? The phase from what is seen, beside the clock of the paper.

A reference is a *course*: how its object moved, and where the gripper was. The live scene is told by the
motion that carries the object's points from the reference's first frame to where they are now, and by the
live gripper. Three things are compared with every frame of the course:

  relation     the gripper as seen from the object: knows nothing of where the object stands
  articulation how the object is turned, and how far it has moved since the episode began
  time         as many steps onward as were made since the last look; what breaks ties while things stand still

Each is a squared distance in units of its usual error; displacement and time are cut off where they have said
all they can, so that a scene that was set back can carry the phase back. Where a low hand fits no frame at all
(it stands on the wrong side of what it should push, or was pushed away), the phase returns to the *gate*, where the
reference's hand came down to the object, and stays there until the hand is back on course.
No simulator truth is needed: motions come from matched points.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ..correspondence.rigid import carried
from ..demos.phase import last_phase
from ..spec import SPEC, Array

RELATION_M = 0.012  # usual error of the gripper as seen from the object
TURN_M = 0.006  # of a point of the object, after the displacement of all was taken out
SHIFT_M, SHIFT_LIMIT = 0.010, 4.0  # of the displacement since the start; a base may be moved in mid-episode
PACE, BACK_LIMIT, AHEAD_LIMIT = 8.0, 12.0, 9.0  # frames; what going back or ahead costs at most
LOST_M, ON_COURSE_M = 0.03, 0.02  # the hand from every frame: where it is lost, and where it is back
LOW_M, MOVED_M = 0.0, 0.008  # a hand that is low: this far below the gate; an object that was moved


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
    def gate(self) -> int:
        """Where the hand comes down before the object moves: half-way from the highest frame to the lowest after it."""
        shift = np.linalg.norm(carried(self.motion, self.points) - self.points, axis=-1).mean(axis=-1)
        still = int(np.argmax(shift > MOVED_M)) if (shift > MOVED_M).any() else len(shift)
        height = self.gripper[: max(still, 1), 2]
        top = int(height.argmax())
        down = top + int(np.argmax(height[top:] <= (height[top] + height[top:].min()) / 2))
        return min(down, last_phase(len(self.motion)))

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
    returning: bool = False  # to the gate, because no frame fits


@dataclass(frozen=True)
class Looks:
    """K live scenes against the T frames of a course."""

    cost: Array  # (K, T) of relation and turn
    displacement: Array  # (K, T, 3) of the object, metres
    relation: Array  # (K, T) the hand as seen from the object, from where the reference's was, metres
    below: Array  # (K,) how far the hand is below the reference's at the gate, metres
    gate: int


def compare(course: Course, motion: Array, gripper: Array) -> Looks:
    """`motion` (K, 4, 4) carries the points of the course's first frame to where they are in each scene, `gripper`
    (K, 3) are the live ones."""
    frames = np.arange(last_phase(len(course.motion)) + 1)
    live = np.einsum("kji,kj->ki", motion[:, :3, :3], gripper - motion[:, :3, 3])
    relation = np.linalg.norm(course.relation[frames] - live[:, None], axis=-1)
    now, (middle, then) = carried(motion, course.points), course.places  # (K, n, 3)
    displacement = now.mean(axis=1)[:, None] - middle[frames]
    below = course.gripper[course.gate, 2] + displacement[:, course.gate, 2] - gripper[:, 2]
    now = now - now.mean(axis=1, keepdims=True)
    turned_squared = ((now[:, None] - then[frames]) ** 2).sum(axis=-1).mean(axis=-1)
    cost = (relation / RELATION_M) ** 2 + turned_squared / TURN_M**2
    return Looks(cost, displacement, relation, below, course.gate)


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


def seen_phases(
    course: Course, motion: Array, gripper: Array, every: int, begun: Array | None = None
) -> NDArray[np.int64]:
    """The phase (K,) of each frame of a recording, had it been followed with a look at it and at every so many
    frames before. `begun` (3,) is the object's displacement when the episode began, if that was before."""
    looks = compare(course, motion, gripper)
    phases = np.zeros(len(motion), np.int64)
    for first in range(min(every, len(motion))):
        progress = None if begun is None else Progress(0, begun, first)
        for k in range(first, len(motion), every):
            progress = _next(looks, k, progress, k)
            phases[k] = progress.phase
    return phases


def _next(looks: Looks, k: int, before: Progress | None, elapsed: int) -> Progress:
    cost, displacement = looks.cost[k], looks.displacement[k]
    frames = np.arange(len(cost))
    if before is None:
        phase = int((cost + np.minimum((frames / PACE) ** 2, AHEAD_LIMIT)).argmin())
        begun = displacement[phase]
    else:
        begun = before.displacement
        moved = np.linalg.norm(displacement - begun, axis=-1)
        late = frames - (before.phase + elapsed - before.elapsed)
        cost = cost + np.minimum((moved / SHIFT_M) ** 2, SHIFT_LIMIT**2)
        cost += np.minimum((late / PACE) ** 2, np.where(late < 0, BACK_LIMIT, AHEAD_LIMIT))
        phase = int(cost.argmin())
    if before is not None and before.returning:
        returning = looks.relation[k].min() > ON_COURSE_M and looks.relation[k, looks.gate] > 1.5 * ON_COURSE_M
    else:
        returning = phase > looks.gate and looks.relation[k, phase] > LOST_M and looks.below[k] > LOW_M
    return Progress(looks.gate if returning else phase, begun, elapsed, bool(returning))
