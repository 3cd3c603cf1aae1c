"""The servo: follows a reference by geometry alone. Nothing in it is learned.

It plays what the reference's hand was commanded, gripper included, and leads the hand back to where the reference's
was, as seen from the object. `load_policy("servo")` gives it behind the interface of a learned policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..correspondence.matches import Matches
from ..correspondence.rigid import fit_motion
from ..demos.store import Demonstration
from ..following.step import Relation
from ..spec import SPEC, Array
from .checkpoint import Design
from .plan import Follows, Plan, Request
from .relations import future

SERVO = "servo"


@dataclass(frozen=True)
class Gains:
    """How the servo moves. Two numbers are where something begins and where it is complete."""

    gain: float = 8.0  # action per metre of distance to the reference's hand
    fastest: float = 0.6  # action, on the way back
    leave_m: tuple[float, float] = (0.03, 0.06)  # how far aside a low hand rises before it crosses
    come_down_m: tuple[float, float] = (0.015, 0.045)  # how far aside a high hand stays high
    opposed_m: tuple[float, float] = (0.025, 0.05)  # how far away a command that leads farther away is left out
    rise_m: tuple[float, float] = (0.04, 0.08)  # how far below the height of travelling the hand only rises
    far_m: tuple[float, float] = (0.03, 0.06)  # from where on the turn of the object counts
    hurry: float = 1.7  # times as fast as planned, through free space


GAINS = Gains()


def continued(
    matches: Matches,
    gripper_live: Array,
    gripper_ref: Array,
    j: NDArray[np.int64] | int,
    command_ref: Array,
    rotation: Array | None = None,
    gains: Gains = GAINS,
) -> Array:
    """Displacements (..., 16, 3) that continue the reference from frame j: its commands, and the way back to where its
    hand was, as seen from the object; nothing with fewer than four valid points.

    Arguments as in `build_relations`; `rotation` (..., 3, 3) is the object's since that frame, fitted here if it is not
    given. The way back is proportional to the distance, up to a largest speed. A hand that is far to the side of its
    place rises first, to the height from which the reference's hand came, then crosses, then comes down. Commands wait
    until that is done, and never undo a long way back.
    """
    frames = np.minimum(np.asarray(j)[..., None] + np.arange(SPEC.chunk), command_ref.shape[-2] - 1)
    commanded = np.take_along_axis(np.asarray(command_ref)[..., :3], frames[..., None], axis=-2)
    there = future(gripper_ref, j)[..., 0, :]
    gap, steps = _way_back(matches, gripper_live, there, rotation, gains), []
    so_far = np.arange(gripper_ref.shape[-2]) <= np.asarray(j)[..., None]
    above = np.where(so_far, gripper_ref[..., 2], -np.inf).max(axis=-1)[..., None] - there[..., 2:]
    for k in range(SPEC.chunk):
        aside = np.linalg.norm(gap[..., :2], axis=-1, keepdims=True)
        low = _smoothstep(gap[..., 2:] + above, *gains.rise_m)
        away = low * _smoothstep(aside, *gains.leave_m) + (1 - low) * _smoothstep(aside, *gains.come_down_m)
        level = 1 - away * low
        back = gains.gain * np.concatenate([level * gap[..., :2], gap[..., 2:] + away * above], axis=-1)
        back = back * np.minimum(1.0, gains.fastest / np.maximum(np.linalg.norm(back, axis=-1, keepdims=True), 1e-9))
        onward = level * commanded[..., k, :]
        onward[..., 2:] *= np.where(onward[..., 2:] < 0, 1 - away, 1.0)
        steps.append(back + _unopposed(onward, back, gains))
        gap = gap - back / 100  # an action of 1 is 1 cm
    enough = matches.valid.sum(axis=-1) >= SPEC.min_valid
    return np.where(enough[..., None, None], np.stack(steps, axis=-2), 0.0)


def _way_back(matches: Matches, here: Array, there: Array, rotation: Array | None, gains: Gains) -> Array:
    """From the live hand to where the reference's was, (..., 3) metres, as seen from the object.

    Near its course a hand sees no more than how far the points are; from farther away, how the object is turned counts
    as well (a door that stands otherwise is approached from elsewhere), which few points tell less exactly.
    """
    share = (np.where(matches.valid, 1.0, 1e-9) / np.maximum(matches.valid.sum(axis=-1, keepdims=True), 1))[..., None]
    p_ref, p_live = (share * matches.p_ref).sum(axis=-2), (share * matches.p_live).sum(axis=-2)
    gap = (there - p_ref) - (here - p_live)
    if rotation is None:
        weight = np.where(matches.valid, np.maximum(matches.confidence, 0.02), 1e-9)
        rotation, _ = fit_motion(matches.p_ref, matches.p_live, weight)
    turned_gap = np.einsum("...ij,...j->...i", rotation, there - p_ref) - (here - p_live)
    return gap + _smoothstep(np.linalg.norm(gap, axis=-1, keepdims=True), *gains.far_m) * (turned_gap - gap)


def _unopposed(onward: Array, back: Array, gains: Gains) -> Array:
    """What the hand was commanded, without what would undo the way back where that is long."""
    length = np.linalg.norm(back, axis=-1, keepdims=True)
    direction = back / np.maximum(length, 1e-9)
    against = np.minimum((onward * direction).sum(axis=-1, keepdims=True), 0.0)
    return np.asarray(onward - _smoothstep(length / gains.gain, *gains.opposed_m) * against * direction)


def _smoothstep(x: Array, low: float, high: float) -> Array:
    t = np.clip((x - low) / (high - low), 0.0, 1.0)
    return np.asarray(t * t * (3 - 2 * t))


def hurried(chunk: Array, limit: float = 1.0, gains: Gains = GAINS) -> Array:
    """A chunk (16, A) through free space, as fast as the robot may: what was lost is time."""
    length = np.linalg.norm(chunk[:, :3], axis=1, keepdims=True)
    factor = np.clip(limit / np.maximum(length, 1e-9), 1.0, gains.hurry)
    return np.concatenate([chunk[:, :3] * factor, chunk[:, 3:]], axis=1)


def commands(demonstration: Demonstration, action_cm: float = 1.0) -> Array:
    """What the hand was commanded (T, A): three displacements, centimetres per step, then the other numbers of the
    action, the gripper's last. Where displacements are unknown, how the hand moved, and nothing more."""
    if not action_cm or demonstration.action.shape[1] < 3:
        return 100 * np.diff(demonstration.gripper, axis=0, append=demonstration.gripper[-1:])
    return np.concatenate([demonstration.action[:, :3] * action_cm, demonstration.action[:, 3:]], axis=1)


def displacements(relation: Relation, action_cm: float = 1.0) -> Array:
    """What continues the reference of a relation, (16, 3) in actions; nothing without one."""
    r = relation
    if r.reference is None or r.phase is None or r.matches is None:
        return np.zeros((SPEC.chunk, 3))
    recorded, rotation = commands(r.reference, action_cm), None if r.motion is None else r.motion[:3, :3]
    return continued(r.matches, r.frame.gripper, r.reference.gripper, r.phase, recorded, rotation) / action_cm


class Servo(Follows):
    """The servo as a policy: it samples nothing, so noise and seeds change nothing."""

    def __init__(self, gains: Gains = GAINS) -> None:
        self.design = Design(name=SERVO, phase="seen")
        self.gains, self.seed, self.digest = gains, 0, ""

    def plan(self, requests: Sequence[Request], slots: int = 1) -> list[Plan]:
        return [self._plan(request) for request in requests]

    def _plan(self, request: Request) -> Plan:
        r, limit = request.relation, self.design.action_limit
        chunk = np.zeros((SPEC.chunk, self.design.action_dim))
        if not request.empty:
            chunk[:, :3] = displacements(r, self.design.action_cm)
            chunk[:, 3:] = self._recorded(r)[:, 3:]
        chunk = np.clip(chunk, -limit, limit)
        return Plan(hurried(chunk, limit, self.gains) if r.returning else chunk, r.recorded, r.matches, r.progress)

    def _recorded(self, relation: Relation) -> NDArray[np.float64]:
        """The reference's commands (16, A) from its current frame on, its last one held."""
        if relation.reference is None or relation.phase is None:
            return np.zeros((SPEC.chunk, self.design.action_dim))
        action = relation.reference.action
        return action[np.minimum(relation.phase + np.arange(SPEC.chunk), len(action) - 1)]
