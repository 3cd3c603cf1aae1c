"""A recording at a speed that can be followed: fast motion slowed, pauses cut, the end held.

A follower lags behind commands near its limit, and a phase that is found by what is seen stands still where nothing
moves. So a reference is retimed once, when it is taken up. `Demonstration.recorded` maps each frame to the file's.
Only displacements can be made longer or shorter: actions that are not four numbers (three of the hand, the gripper's)
are left as they are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ..spec import SPEC, Array
from .store import Demonstration


@dataclass(frozen=True)
class Pace:
    """At which speed a recording is followed, and what counts as a pause."""

    fastest: float = 0.6  # longest displacement per step, in units of action
    tolerated: float = 1.05  # times that is left as it is
    pause: int = 12  # frames of a pause that stay
    idle: float = 0.05  # commanded displacement per step, in units of action, that counts as none
    idle_m: float = 0.0005  # and made
    creep_m: float = 0.003  # that the hand moves in all of them together, and it is no pause
    fingers_m: float = 0.0005  # by which the fingers move in a step in which the gripper works
    under_way: float = 0.1  # commanded displacement in the last frames of a recording that was cut in mid-motion
    decay: float = 0.8  # per step, of the motion that it was cut in


USUAL_PACE = Pace()


def speeds(d: Demonstration) -> Array:
    """(T,) how far the hand was sent in each step, in units of action; centimetres that it went, where that is not
    known."""
    if not displaces(d):
        return np.asarray(np.linalg.norm(100 * np.diff(d.gripper, axis=0, append=d.gripper[-1:]), axis=1))
    return np.asarray(np.linalg.norm(d.action[:, :3], axis=1))


def displaces(d: Demonstration) -> bool:
    """Whether its actions are displacements of the hand, and the gripper's command."""
    return d.action.shape[1] == SPEC.action_dim


def pauses(d: Demonstration, pace: Pace = USUAL_PACE) -> NDArray[np.bool_]:
    """(T,) whether nothing happens in a step: the hand stands, and the gripper does not work."""
    made = np.linalg.norm(np.diff(d.gripper, axis=0, append=d.gripper[-1:]), axis=1)
    still = (speeds(d) < pace.idle) & (made < pace.idle_m)
    if displaces(d):
        still &= np.diff(d.action[:, 3], prepend=d.action[0, 3]) == 0
    if d.robot_state.shape[1] == SPEC.state_dim:
        opening = np.linalg.norm(d.robot_state[:, 3:6] - d.robot_state[:, 6:9], axis=1)
        still &= np.abs(np.diff(opening, append=opening[-1:])) < pace.fingers_m
    return np.asarray(still, np.bool_)


def durations(d: Demonstration, pace: Pace = USUAL_PACE) -> Array:
    """(T,) new steps that each recorded step takes: more than one where it is fast, none within a pause."""
    if not displaces(d):
        return np.ones(len(d))
    wanted = np.maximum(speeds(d) / pace.fastest, 1.0)
    wanted[wanted <= pace.tolerated] = 1.0
    still = pauses(d, pace)
    edges = np.flatnonzero(np.diff(np.concatenate([[False], still, [False]]).astype(np.int8)))
    for first, end in zip(edges[::2], edges[1::2], strict=True):
        crept = np.linalg.norm(d.gripper[first:end] - d.gripper[first], axis=1).max()
        if end < len(still) and crept < pace.creep_m:  # what is still at the end is the end
            wanted[first + pace.pause : end] = 0.0
    return wanted


def is_cut(d: Demonstration, pace: Pace = USUAL_PACE) -> bool:
    """Whether the hand is still under way in the last frames."""
    return bool(speeds(d)[-pace.pause :].max() > pace.under_way)


def paced(d: Demonstration, pace: Pace = USUAL_PACE) -> Demonstration:
    """The recording as it is followed; itself where nothing is to be changed."""
    taken, cut = durations(d, pace), is_cut(d, pace)
    if not displaces(d) or ((taken == 1.0).all() and not cut):
        return d
    ends = np.cumsum(taken)
    at = np.interp(np.arange(math.ceil(ends[-1])), np.concatenate([[0.0], ends]), np.arange(len(d) + 1.0))
    at = np.minimum(at, len(d) - 1.0)
    action = d.action[at.astype(np.int64)].copy()
    sent = np.where(taken[:, None] > 0, d.action[:, :3], 0.0)
    travelled = np.concatenate([np.zeros((1, 3)), np.cumsum(sent, axis=0)])
    where = np.append(at, len(d))
    path = np.stack([np.interp(where, np.arange(len(d) + 1.0), column) for column in travelled.T], axis=1)
    action[:, :3] = np.diff(path, axis=0)
    if cut:  # the last chunk needs frames to plan from
        at = np.append(at, np.full(SPEC.chunk, len(d) - 1.0))
        tail = np.repeat(action[-1:], SPEC.chunk, axis=0)
        tail[:, :3] *= pace.decay ** np.arange(1, SPEC.chunk + 1)[:, None]
        action = np.concatenate([action, tail])
    nearest = np.rint(at).astype(np.int64)

    def between(values: Array) -> Array:
        frames = np.arange(len(values))
        return np.stack([np.interp(at, frames, column) for column in values.T], axis=1)

    def there(values: Array | None) -> Array | None:
        return None if values is None else values[nearest]

    return replace(
        d,
        K=d.K[nearest],
        T_world_cam=d.T_world_cam[nearest],
        robot_state=between(d.robot_state),
        gripper=between(d.gripper),
        action=action,
        recorded=nearest if d.recorded is None else d.recorded[nearest],
        recorded_joint=there(d.recorded_joint),
        object_pose=there(d.object_pose),
        time=there(d.time),
    )
