"""A rollout told step by step: what the policy saw, what it was shown, what it planned.

The rollout is run like any other, with somebody watching, and then repeated action by action with
the camera on. Videos and the demonstration page are drawn from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .camera import Array
from .controllers import Intervention, PolicyController, make_controller, phase
from .episodes import Episode
from .evaluation import find_subject, list_jobs, settle
from .expert import act
from .frames import Frame
from .protocol import PROTOCOL, Task, opposite
from .rollout import Controller, Decision, Plan, roll_out
from .sim import shared_world


@dataclass(frozen=True)
class Reference:
    """What was supplied at one decision."""

    frame: Frame
    j: int  # its number in the demonstration
    future: Array  # (4, 3) the reference gripper at the four offsets, metres, world frame


@dataclass(frozen=True)
class Moment:
    """One control step; the last one shows how it ended."""

    decision: int  # number of the plan in force
    live: Frame
    door_joint: float  # rad; for the reader, the policy never sees it
    success: bool


@dataclass(frozen=True)
class Story:
    row: Episode
    reference_task: Task  # the task of the supplied reference
    references: list[Reference | None]  # one per decision; None if none is shown
    plans: list[Plan]
    moments: list[Moment]

    @property
    def name(self) -> str:
        row = self.row
        return f"{row.experiment}-{row.condition}-{row.scene}-{row.task}-{row.reference}"


class Watcher:
    """Stands between rollout and controller and remembers."""

    looks = True

    def __init__(self, controller: Controller) -> None:
        self.controller = controller
        self.seen: list[tuple[Decision, Plan]] = []

    def decide(self, decisions: Sequence[Decision]) -> list[Plan]:
        plans = self.controller.decide(decisions)
        self.seen += zip(decisions, plans, strict=True)
        return plans


def watch(policy: str, shown: Intervention, row: Episode, data: Path) -> Story:
    """The rollout of `row`, once more."""
    subject = find_subject(policy)
    shown = settle(subject, shown)
    (job,) = list_jobs([row.condition], row.scene_seed, [row.task], [row.scene])  # type: ignore[list-item]
    world, watcher = shared_world(), Watcher(make_controller(subject.policy, data, shown))
    for _ in roll_out(world, watcher, iter([job])):
        pass
    decisions, plans = zip(*watcher.seen, strict=True)

    task = opposite(job.task) if shown.reference == "opposite" else job.task
    references: list[Reference | None] = [None] * len(plans)
    if isinstance(watcher.controller, PolicyController) and watcher.controller.demonstrations:
        demonstration = watcher.controller.demonstrations[task]
        for k, decision in enumerate(decisions):
            j = phase(decision.elapsed, shown)
            future = demonstration.gripper[j + np.array(PROTOCOL.future_offsets)]
            references[k] = Reference(demonstration.frame(j), j, future)

    world.reset(job.scene)
    moments = []

    def look(k: int) -> bool:
        done = world.success(job.task)
        moments.append(Moment(k, world.observe(), world.door_joint, done))
        return done

    for k, plan in enumerate(plans):
        for i in range(PROTOCOL.executed):
            if look(k):
                return Story(row, task, references, list(plans), moments)
            world.step(act(world, job.task) if plan.actions is None else plan.actions[i])
    look(len(plans) - 1)
    return Story(row, task, references, list(plans), moments)
