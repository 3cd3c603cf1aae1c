"""Does a policy of your own listen to its condition? Right and opposite reference, paired, with an interval.

    python examples/own_policy_audit.py --scenes 5

A policy is anything that answers decisions with plans. Two are judged here, both tape recorders that play
back recorded actions: one plays the reference it is given, the other always plays the opening. Both open
doors; only one of them listens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro

import memcorr
from memcorr.evaluation.episodes import Episode
from memcorr.evaluation.evaluate import list_jobs
from memcorr.evaluation.intervention import Intervention, ReferenceChoice
from memcorr.evaluation.rollout import Answer, Decision, roll_out
from memcorr.policy.policy import Plan
from memcorr.report.statistics import paired_difference, share
from memcorr.spec import SPEC, TASKS, Task


@dataclass
class TapeRecorder:
    """Plays recorded actions; `always` makes it deaf."""

    tapes: dict[Task, memcorr.Demonstration]
    shown: Intervention
    always: Task | None = None
    looks: bool = False  # it needs no images

    def decide(self, decisions: Sequence[Decision]) -> list[Answer]:
        answers = []
        for decision in decisions:
            tape = self.tapes[self.always or self.shown.supplied(decision.job.task, decision.job.scene.world)].action
            steps = np.minimum(decision.elapsed + np.arange(SPEC.chunk), len(tape) - 1)
            answers.append(Answer(Plan(tape[steps])))
        return answers


def audit(name: str, tapes: dict[Task, memcorr.Demonstration], always: Task | None, scenes: int) -> None:
    choices: tuple[ReferenceChoice, ReferenceChoice] = ("correct", "opposite")
    rows: dict[str, list[Episode]] = {}
    for choice in choices:
        shown = Intervention(reference=choice, matcher="none")
        jobs = list_jobs(["validation"], 0, TASKS, range(80, 80 + scenes))
        rows[choice] = [
            Episode(
                experiment=name,
                train_seed=None,
                condition=job.scene.condition,
                scene=job.scene.index,
                scene_seed=job.scene.seed,
                u=job.scene.u,
                camera_azimuth_deg=0.0,
                task=job.task,
                shown=shown,
                **vars(outcome),
            )
            for job, outcome in roll_out(memcorr.World(), TapeRecorder(tapes, shown, always), iter(jobs))
        ]
    right, gap = share(rows["correct"]), paired_difference(rows["correct"], rows["opposite"])
    assert right is not None and gap is not None
    verdict = "listens" if gap.low > 0 else "does not listen"
    print(
        f"{name:9} right reference {right.successes}/{right.n}, "
        f"right minus opposite {gap.points:+.0f} points [{gap.low:.0f}, {gap.high:.0f}]: it {verdict}"
    )


def main(data: Path = Path("demo/demos"), scenes: int = 5) -> None:
    store = memcorr.Store.open(data)
    tapes = {task: store.demonstration(0, task) for task in TASKS}
    audit("attentive", tapes, None, scenes)
    audit("deaf", tapes, "open", scenes)


if __name__ == "__main__":
    tyro.cli(main)
