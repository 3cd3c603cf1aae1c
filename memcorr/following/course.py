"""Where in its reference is the live scene? The phase from what is seen, beside the clock of the paper.

A reference is a *course*: how its object moved, and where the gripper was. The live scene is told by the
motion that carries the object's points from the reference's first frame to where they are now, and by the
live gripper. Three things are compared with every frame of the course:

  relation     the gripper as seen from the object: knows nothing of where the object stands
  articulation how the object is turned, and how far it has moved since the episode began
  time         as many steps onward as were made since the last observation; what breaks ties while things stand still

Each is a squared distance in units of its usual error (`PhaseCosts`); displacement and time are cut off where they
have said all they can, so that a scene that was set back can carry the phase back. Where a low hand fits no frame at
all (it stands on the wrong side of what it should push, or was pushed away), it is *off-track*: the phase returns to
the *pre-contact frame*, where the reference's hand came down to the object, and stays there until the hand is back.
No simulator truth is needed: motions come from matched points.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ..correspondence.rigid import carried
from ..demos.pace import USUAL_PACE, Pace
from ..demos.phase import last_phase
from ..spec import SPEC, Array


@dataclass(frozen=True)
class PhaseCosts:
    """How the phase is found by what is seen. Costs are squared distances in units of these usual errors."""

    relation_m: float = 0.012  # usual error of the gripper's place as seen from the object
    turn_m: float = 0.006  # of a point of the object, after the mean displacement was taken out
    shift_m: float = 0.010  # of the object's displacement since the episode began
    shift_limit: float = 4.0  # usual errors, at most: an object's base may be moved in mid-episode
    pace_frames: float = 8.0  # usual error of the steps made since the last observation
    back_limit: float = 12.0  # cost of going back, at most
    ahead_limit: float = 9.0  # cost of going ahead, at most
    off_track_m: float = 0.03  # a hand this far from where every frame has it is off-track
    back_on_track_m: float = 0.02  # and as near as this it is back
    low_m: float = 0.0  # only a hand this far below the pre-contact frame's can be off-track
    moved_m: float = 0.008  # an object whose points moved by so much on average was moved
    contact_m: float = 0.10  # a hand this far from where it will touch the object is still on its way there
    most_returns: int = 3  # to the pre-contact frame, in an episode
    longest_stand: int = 64  # control steps without progress, then it is stuck
    pace: Pace = USUAL_PACE  # at which references are followed


USUAL = PhaseCosts()


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
    def moved(self) -> Array:
        """(T,) mean distance of the points from where they were in the first frame, metres."""
        return np.linalg.norm(carried(self.motion, self.points) - self.points, axis=-1).mean(axis=-1)

    def pre_contact_frame(self, costs: PhaseCosts = USUAL) -> int:
        """Where the hand comes down before the object moves: half-way from the highest frame to the lowest after it;
        or later, where it then still has a way to go."""
        moving = self.moved > costs.moved_m
        still = int(np.argmax(moving)) if moving.any() else len(moving)
        height = self.gripper[: max(still, 1), 2]
        top = int(height.argmax())
        down = top + int(np.argmax(height[top:] <= (height[top] + height[top:].min()) / 2))
        touch = self.relation[min(still, len(moving) - 1)]
        far = np.flatnonzero(np.linalg.norm(self.relation[:still] - touch, axis=1) > costs.contact_m)
        return min(max(down, int(far[-1]) if len(far) else 0), last_phase(len(self.motion)))

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
    """What is remembered from one observation to the next."""

    phase: int
    displacement: Array | None  # (3,) of the object when it was first seen, against the reference, metres
    elapsed: int = 0  # control steps made by then
    returning: bool = False  # off-track: on the way back to the pre-contact frame
    returns: int = 0  # how often it was off-track
    furthest: int = 0  # phase since the last return or set-back,
    since: int = 0  # and when it was reached
    began: int = 0  # control steps made at the first look
    set_backs: int = 0  # how often the object was back where it had been, so that there is way to be made again

    def stuck(self, costs: PhaseCosts = USUAL) -> str:
        """Why nothing more is to be expected; "" while there is progress. The last return is waited for: only a hand
        that is off-track again after it is lost."""
        if self.returns > costs.most_returns + 1:
            return f"the hand was off its track {self.returns} times"
        if self.elapsed - self.since > costs.longest_stand:
            return f"no progress for {self.elapsed - self.since} steps, since frame {self.furthest} of the reference"
        return ""


@dataclass(frozen=True)
class Comparison:
    """K live scenes against the T frames of a course."""

    cost: Array  # (K, T) of relation and turn
    displacement: Array  # (K, T, 3) of the object, metres
    relation: Array  # (K, T) the hand as seen from the object, from where the reference's was, metres
    below: Array  # (K,) how far the hand is below the reference's at the pre-contact frame, metres
    moved: Array  # (T,) of the course
    pre_contact: int


def compare(course: Course, motion: Array, gripper: Array, costs: PhaseCosts = USUAL) -> Comparison:
    """`motion` (K, 4, 4) carries the points of the course's first frame to where they are in each scene, `gripper`
    (K, 3) are the live ones."""
    frames = np.arange(last_phase(len(course.motion)) + 1)
    live = np.einsum("kji,kj->ki", motion[:, :3, :3], gripper - motion[:, :3, 3])
    relation = np.linalg.norm(course.relation[frames] - live[:, None], axis=-1)
    now, (middle, then) = carried(motion, course.points), course.places  # (K, n, 3)
    displacement = now.mean(axis=1)[:, None] - middle[frames]
    before = course.pre_contact_frame(costs)
    below = course.gripper[before, 2] + displacement[:, before, 2] - gripper[:, 2]
    now = now - now.mean(axis=1, keepdims=True)
    turned_squared = ((now[:, None] - then[frames]) ** 2).sum(axis=-1).mean(axis=-1)
    cost = (relation / costs.relation_m) ** 2 + turned_squared / costs.turn_m**2
    return Comparison(cost, displacement, relation, below, course.moved, before)


def expected_phase(before: Progress | None, elapsed: int, length: int) -> int:
    """The frame to look at: about as many on as steps were made since the last observation; the first at the first.

    Always one of every eighth, so that a reference is prepared once and a live step costs one match.
    """
    if before is None:
        return 0
    frame = min(before.phase + max(elapsed - before.elapsed, 0), last_phase(length))
    return min(SPEC.executed * round(frame / SPEC.executed), last_phase(length) // SPEC.executed * SPEC.executed)


def seen_phase(
    course: Course,
    motion: Array,
    gripper: Array,
    before: Progress | None,
    elapsed: int,
    costs: PhaseCosts = USUAL,
) -> Progress:
    """The frame of the course that looks most like the live scene.

    `motion` (4, 4) and `gripper` (3) as in `compare`; `elapsed` steps have been made; `before` is None at the first
    observation.
    """
    return _next(compare(course, motion[None], gripper[None], costs), 0, before, elapsed, costs)


def seen_phases(
    course: Course,
    motion: Array,
    gripper: Array,
    every: int,
    begun: Array | None = None,
    costs: PhaseCosts = USUAL,
) -> NDArray[np.int64]:
    """The phase (K,) of each frame of a recording, had it been followed with an observation there and at every so many
    frames before. `begun` (3,) is the object's displacement when the episode began, if that was before."""
    seen = compare(course, motion, gripper, costs)
    phases = np.zeros(len(motion), np.int64)
    for first in range(min(every, len(motion))):
        progress = None if begun is None else Progress(0, begun, first)
        for k in range(first, len(motion), every):
            progress = _next(seen, k, progress, k, costs)
            phases[k] = progress.phase
    return phases


def _next(seen: Comparison, k: int, before: Progress | None, elapsed: int, costs: PhaseCosts) -> Progress:
    cost, displacement, relation = seen.cost[k], seen.displacement[k], seen.relation[k]
    frames = np.arange(len(cost))
    if before is None:
        before = Progress(0, None, elapsed, since=elapsed, began=elapsed)
        # Where the hand begins says little of an object that stands elsewhere: only a frame that fits says something.
        fits = np.minimum(relation, costs.back_on_track_m)
        cost = cost + (fits**2 - relation**2) / costs.relation_m**2
        cost = cost + np.minimum((frames / costs.pace_frames) ** 2, costs.ahead_limit)
    else:
        if before.displacement is not None:
            moved = np.linalg.norm(displacement - before.displacement, axis=-1)
            cost = cost + np.minimum((moved / costs.shift_m) ** 2, costs.shift_limit**2)
        late = frames - (before.phase + elapsed - before.elapsed)
        most = np.where(late < 0, costs.back_limit, costs.ahead_limit)
        cost = cost + np.minimum((late / costs.pace_frames) ** 2, most)
    phase = int(cost.argmin())
    begun = displacement[phase] if before.displacement is None else before.displacement
    if before.returning:
        near = costs.back_on_track_m
        off_track, returning = False, relation.min() > near and relation[seen.pre_contact] > 1.5 * near
    else:
        off_track = relation[phase] > costs.off_track_m and seen.below[k] > costs.low_m and phase > seen.pre_contact
        returning = off_track and before.returns <= costs.most_returns
    gone = off_track and before.returns == costs.most_returns + 1  # after the last return
    returns = before.returns + int(gone or (returning and not before.returning))
    phase = seen.pre_contact if returning else phase
    progress = replace(before, phase=phase, displacement=begun, elapsed=elapsed, returning=bool(returning))
    return _onwards(replace(progress, returns=returns), before, seen.moved, costs)


def _onwards(now: Progress, before: Progress, moved: Array, costs: PhaseCosts) -> Progress:
    """With how far it has come, which is counted anew where a return begins or ends, and where the object was set
    back: what had been reached has to be reached again."""
    lost = moved[now.furthest] - moved[now.phase] > costs.moved_m and now.furthest - now.phase > SPEC.chunk
    set_back = bool(lost and not now.returning and now.set_backs < costs.most_returns)
    if set_back or now.returning != before.returning or now.phase > now.furthest:
        return replace(now, furthest=now.phase, since=now.elapsed, set_backs=now.set_backs + set_back)
    return now
