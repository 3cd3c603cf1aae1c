"""A rollout step by step: what the policy saw, which reference it was given, what it planned.

The rollout is run like any other, and watched, and then repeated action by action with
the camera on. Videos and the demonstration page are drawn from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..evaluation.controllers import PolicyController, make_controller
from ..evaluation.episodes import Episode
from ..evaluation.evaluate import find_subject, list_jobs, normalised
from ..evaluation.intervention import Intervention
from ..evaluation.rollout import Controller, Decision, Response, roll_out
from ..frames import Frame
from ..spec import SPEC, Array, Task, TestSet
from ..worlds.disturbances import Disturbance, Events
from ..worlds.expert import act, begin
from ..worlds.world import shared_world


@dataclass(frozen=True)
class Supplied:
    """The reference as it was supplied at one decision."""

    task: Task
    frame: Frame
    j: int  # its number in the demonstration
    future: Array  # (4, 3) the reference gripper at the four offsets, metres, world frame


@dataclass(frozen=True)
class Moment:
    """One control step; the last one shows how it ended."""

    decision: int  # number of the plan in force
    live: Frame
    progress: float  # 0 start, 1 and -1 the two goals; for the reader, the policy never sees it
    success: bool


@dataclass(frozen=True)
class Story:
    row: Episode
    reference_task: Task  # the task of the supplied reference, in the end
    references: list[Supplied | None]  # one per decision; None if none is shown
    answers: list[Response]
    moments: list[Moment]

    @property
    def name(self) -> str:
        row = self.row
        what = [f"swap={row.shown.swap}"] * bool(row.shown.swap) + [row.disturbance] * bool(row.disturbance)
        return "-".join(
            (row.experiment, row.world, row.condition, str(row.scene), row.task, row.shown.reference, *what)
        )


class Watcher:
    """Stands between rollout and controller and remembers."""

    sees = True

    def __init__(self, controller: Controller) -> None:
        self.controller = controller
        self.seen: list[tuple[Decision, Response]] = []

    def decide(self, decisions: Sequence[Decision]) -> list[Response]:
        answers = self.controller.decide(decisions)
        self.seen += zip(decisions, answers, strict=True)
        return answers


def watch(policy: str, shown: Intervention, row: Episode, data: Path) -> Story:
    """The rollout of `row`, once more."""
    subject = find_subject(policy)
    shown = normalised(subject, shown)
    given = [Disturbance.parse(text) for text in row.disturbance.split("+") if text and row.condition != "disturbed"]
    sets: list[TestSet] = [row.condition]  # type: ignore[list-item]
    (job,) = list_jobs(sets, row.scene_seed, [row.task], [row.scene], row.world, given)
    world, watcher = shared_world(row.world), Watcher(make_controller(subject.policy, data, shown))
    for _ in roll_out(world, watcher, iter([job])):
        pass
    decisions, answers = zip(*watcher.seen, strict=True)

    task = shown.supplied(job.task, row.world)
    references: list[Supplied | None] = [None] * len(answers)
    if isinstance(watcher.controller, PolicyController) and watcher.controller.references:
        for k, (decision, answer) in enumerate(zip(decisions, answers, strict=True)):
            now = shown.supplied(job.task, row.world, decision.elapsed)
            demonstration = watcher.controller.references[now].demonstration
            assert answer.plan is not None and answer.plan.phase is not None
            j = answer.plan.phase
            future = demonstration.gripper[np.minimum(j + np.array(SPEC.future_offsets), len(demonstration) - 1)]
            references[k] = Supplied(now, demonstration.frame(j), j, future)

    begin(world, job.scene, job.task)
    moments: list[Moment] = []
    events, sent = Events(job.scene), list[Array]()

    def look(k: int) -> bool:
        done = world.success(job.task)
        moments.append(Moment(k, world.observe(), world.progress, done))
        return done

    for k, answer in enumerate(answers):
        for i in range(SPEC.executed):
            if look(k):
                return Story(row, task, references, list(answers), moments)
            action = act(world, job.task) if answer.plan is None else answer.plan.actions[i]
            world.step(events.action(sent, action, len(sent)))
            sent.append(action)
            events.after(world, len(sent))
    look(len(answers) - 1)
    return Story(row, task, references, list(answers), moments)
