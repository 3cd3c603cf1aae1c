"""A rollout step by step: what the policy saw, which reference it was given, what it planned.

Rollouts are run like any others, and watched, and then repeated action by action with
the camera on. Videos and the demonstration page are drawn from it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..evaluation.controllers import PolicyController, make_controller
from ..evaluation.episodes import Episode
from ..evaluation.evaluate import Sources, episode, find_subject, list_jobs, normalised
from ..evaluation.intervention import Intervention
from ..evaluation.rollout import Controller, Decision, Job, Response, roll_out
from ..frames import Frame
from ..machine import threads
from ..spec import SPEC, Array, Task, TestSet
from ..worlds.disturbances import Disturbance, Events
from ..worlds.expert import act, begin
from ..worlds.world import World, shared_world


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
    picture: NDArray[np.uint8] | None = None  # the live view with more pixels, if it was asked for


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
    given = [Disturbance.parse(text) for text in row.disturbance.split("+") if text and row.condition != "disturbed"]
    sets: list[TestSet] = [row.condition]  # type: ignore[list-item]
    jobs = list_jobs(sets, row.scene_seed, [row.task], [row.scene], row.world, given)
    (story,) = tell(policy, shown, jobs, data)
    return replace(story, row=row)


def tell(policy: str, shown: Intervention, jobs: Sequence[Job], data: Path, every: int = 0) -> Iterator[Story]:
    """What `memcorr evaluate` does with `jobs`, all of one world; every so many steps with a larger picture."""
    subject = find_subject(policy)
    shown, world = normalised(subject, shown), shared_world(jobs[0].scene.world)
    sources = Sources.find(subject, shown, data, jobs[0].scene.world)
    with threads(1):  # as `evaluate`: more would round differently
        controller = make_controller(subject.policy, data, shown, subject.checkpoint)
        watcher = Watcher(controller)
        outcomes = dict(roll_out(world, watcher, iter(jobs)))
    for job in jobs:
        seen = [(decision, answer) for decision, answer in watcher.seen if decision.job == job]
        references = [supplied(controller, shown, *both) for both in seen]
        answers = [answer for _, answer in seen]
        row = episode(subject, shown, job, sources, outcomes[job])
        yield Story(row, shown.supplied(job.task, row.world), references, answers, relive(world, job, answers, every))


def supplied(controller: Controller, shown: Intervention, decision: Decision, answer: Response) -> Supplied | None:
    """The reference behind one answer."""
    if not isinstance(controller, PolicyController) or not controller.references:
        return None
    task = shown.supplied(decision.job.task, decision.job.scene.world, decision.elapsed)
    demonstration = controller.references[task].demonstration
    assert answer.plan is not None and answer.plan.phase is not None
    j = answer.plan.phase
    future = demonstration.gripper[np.minimum(j + np.array(SPEC.future_offsets), len(demonstration) - 1)]
    return Supplied(task, demonstration.frame(j), j, future)


def relive(world: World, job: Job, answers: Sequence[Response], every: int = 0) -> list[Moment]:
    """The rollout that gave these answers, step by step with the camera on."""
    begin(world, job.scene, job.task)
    moments: list[Moment] = []
    events, sent = Events(job.scene), list[Array]()

    def look(k: int) -> bool:
        done = world.success(job.task)
        wanted = every and (done or len(moments) % every == 0)
        picture = world.picture() if wanted else None
        moments.append(Moment(k, world.observe(), world.progress, done, picture))
        return done

    for k, answer in enumerate(answers):
        for i in range(SPEC.executed):
            if look(k):
                return moments
            action = act(world, job.task) if answer.plan is None else answer.plan.actions[i]
            world.step(events.action(sent, action, len(sent)))
            sent.append(action)
            events.after(world, len(sent))
    look(len(answers) - 1)
    return moments
