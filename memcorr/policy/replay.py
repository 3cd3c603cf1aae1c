"""Replay: the recording's hand path, moved once by how far the object stood from where it was recorded.

Nothing in it is learned, and what happens after the first look it never learns of. `load_policy("replay")` gives it
behind the interface of a learned policy; `memcorr evaluate replay` rolls out the same path.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..spec import SPEC, Array
from .checkpoint import Design
from .plan import Follows, Plan, Request

REPLAY = "replay"


def tracked(recorded: Array, t: int, missing: Array) -> Array:
    """Sixteen of the recorded actions (T, A) from step t on; `missing` (3,) is the way that the hand is behind, in
    units of action, and is made up for during the eight steps to come."""
    actions = recorded[np.minimum(t + np.arange(SPEC.chunk), len(recorded) - 1)].copy()
    actions[:, :3] += missing / SPEC.executed
    actions[:, :3] /= np.maximum(np.linalg.norm(actions[:, :3], axis=1, keepdims=True), 1.0)
    return actions


class Replay(Follows):
    """The path as a policy: it samples nothing, so noise and seeds change nothing."""

    def __init__(self) -> None:
        self.design = Design(name=REPLAY, phase="seen")
        self.seed, self.digest = 0, ""

    def plan(self, requests: Sequence[Request], slots: int = 1) -> list[Plan]:
        return [self._plan(request) for request in requests]

    def _plan(self, request: Request) -> Plan:
        r, d = request.relation, self.design
        if request.empty or r.reference is None or r.progress is None or r.progress.displacement is None:
            return Plan(np.zeros((SPEC.chunk, d.action_dim)), None, r.matches, r.progress)
        t = min(r.progress.elapsed - r.progress.began, len(r.reference) - 1)
        missing = r.reference.gripper[t] + r.progress.displacement - r.frame.gripper
        actions = tracked(r.reference.action, t, 100 * missing / d.action_cm)
        return Plan(np.clip(actions, -d.action_limit, d.action_limit), t, r.matches, r.progress)
