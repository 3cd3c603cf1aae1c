"""Does a policy of your own listen to its condition? Right, empty and opposite reference, paired, with intervals.

    python examples/own_policy_audit.py --scenes 5

A policy is any callable (observation, condition) -> actions. Two are judged here, both tape recorders that play back
recorded actions: one plays the reference it is given, the other always plays the opening. Both open doors; only one
of them listens. `memcorr audit MODULE:CALLABLE` does the same and draws a page.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro

import memcorr
from memcorr.audit.evidence import of_trials, verdict
from memcorr.audit.online import WorldEnvironment, audit_online
from memcorr.spec import SPEC, TASKS, Array


@dataclass
class TapeRecorder:
    """Plays recorded actions and stands still without a reference; `always` makes it deaf."""

    always: memcorr.Demonstration | None = None

    def __call__(self, observation: Mapping[str, Any], condition: memcorr.Demonstration | None) -> Array:
        tape = self.always or condition
        if tape is None:
            return np.zeros((SPEC.executed, SPEC.action_dim))
        steps = np.minimum(observation["elapsed"] + np.arange(SPEC.chunk), len(tape) - 1)
        return tape.action[steps]


def main(data: Path = Path("demo/demos"), scenes: int = 5) -> None:
    store = memcorr.Store.open(data)
    tapes = {task: store.demonstration(0, task) for task in TASKS}
    environment = WorldEnvironment("door", "validation", scenes=range(80, 80 + scenes))
    for name, policy in (("attentive", TapeRecorder()), ("deaf", TapeRecorder(always=tapes["open"]))):
        findings = of_trials(list(audit_online(policy, environment, tapes)), "the door")
        word, because = verdict([findings])
        print(f"{name}: {word} ({because})")


if __name__ == "__main__":
    tyro.cli(main)
