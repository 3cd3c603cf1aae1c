"""Receding-horizon rollouts: decide on 16 actions, execute eight, look again.

Many rollouts ("lanes") advance together in one process. They share one world and so one GL context:
a lane is a snapshot of the physics, restored for its turn. Whoever decides (`Controller`) sees all
lanes at once and may batch its work, but must answer for each lane as if it were alone.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ..following.course import Progress
from ..following.masks import Tracked
from ..following.reference import Reference
from ..following.step import Observation
from ..frames import Frame
from ..policy.plan import Plan
from ..spec import SPEC, Array, Task
from ..worlds.disturbances import Events
from ..worlds.expert import act, begin
from ..worlds.scenes import Scene
from ..worlds.world import World
from .episodes import Outcome
from .sensors import degraded

LANES = 8  # decided together, always: batches are padded to it, so that rounding never depends on company


@dataclass(frozen=True)
class Job:
    """One rollout to be done."""

    scene: Scene
    task: Task  # what success is judged by


@dataclass(frozen=True)
class Memory:
    """What a controller remembers of one episode, and no longer."""

    began: Observation | None = None  # the first of the episode
    progress: Mapping[Reference, Progress | None] = field(default_factory=dict)  # in each reference, where it is seen
    shifts: Mapping[Reference, Array] = field(default_factory=dict)  # (3,) of the object, metres
    tracked: Tracked | None = None  # where masks are carried


@dataclass(frozen=True)
class Decision:
    """What is known when a lane replans."""

    job: Job
    replan: int  # 0 for the first chunk
    elapsed: int  # e_k, environment steps executed so far
    frame: Frame | None  # None if the controller said that it does not look
    T_world_object: Array  # simulator truth: for ground-truth relations and diagnostics only
    robot_state: Array  # s (9), known without looking
    memory: Memory = field(default_factory=Memory)  # of the last answer

    @property
    def observation(self) -> Observation:
        assert self.frame is not None, "a policy looks"
        return Observation(self.frame, self.T_world_object)


@dataclass(frozen=True)
class Answer:
    """What a controller answers: a plan, or None to let the scripted expert act step by step."""

    plan: Plan | None
    match_error_mm: float | None = None  # mean over the valid points, from simulator truth; None without any
    memory: Memory = field(default_factory=Memory)  # for the next decision of the same episode


class Controller(Protocol):
    looks: bool  # whether decisions need a rendered frame

    def decide(self, decisions: Sequence[Decision]) -> list[Answer]:
        """One answer per decision, at most LANES; an answer never depends on the other decisions."""
        ...


class Stopwatch:
    """Where the time goes, by name, seconds."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - start


@dataclass
class Lane:
    """A rollout under way."""

    job: Job
    state: Array
    place: Array  # where the object's base is now
    decision: Decision
    started: float
    events: Events
    executed: list[Array] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)  # without their memory
    late_mask: NDArray[np.bool_] | None = None  # for a mask that is always some steps old
    success: bool = False
    over: bool = False


def roll_out(
    world: World,
    controller: Controller,
    jobs: Iterator[Job],
    lanes: int = LANES,
    watch: Stopwatch | None = None,
) -> Iterator[tuple[Job, Outcome]]:
    """Runs `jobs`, up to `lanes` at a time; a finished lane takes the next job at once."""
    watch = watch or Stopwatch()
    active: list[Lane] = []
    while True:
        while len(active) < lanes and (job := next(jobs, None)) is not None:
            begin(world, job.scene, job.task)
            first = _look(world, controller, job, 0, 0, None, watch)
            events = Events(job.scene)
            active.append(Lane(job, world.snapshot(), world.place, first, time.perf_counter(), events))
        if not active:
            return
        answers = controller.decide([lane.decision for lane in active])
        for lane, answer in zip(active, answers, strict=True):
            world.restore(lane.job.scene, lane.state, lane.place)
            with watch("physics"):
                execute(world, lane, answer)
            if lane.over:
                yield lane.job, conclude(world, lane)
            else:
                lane.state, lane.place = world.snapshot(), world.place
                done = len(lane.answers), len(lane.executed)
                decision = _look(world, controller, lane.job, *done, lane.late_mask, watch)
                lane.decision = replace(decision, memory=answer.memory)
        active = [lane for lane in active if not lane.over]


def _look(
    world: World,
    controller: Controller,
    job: Job,
    replan: int,
    elapsed: int,
    late_mask: NDArray[np.bool_] | None,
    watch: Stopwatch,
) -> Decision:
    with watch("render"):
        frame = degraded(world.observe(), job.scene, elapsed, late_mask) if controller.looks else None
    return Decision(job, replan, elapsed, frame, world.T_world_object, world.robot_state)


def execute(world: World, lane: Lane, answer: Answer) -> None:
    """The first eight actions; ends at the first success, at the last step (200; 500 in Meta-World's own tasks), when
    physics breaks down or when an action is no number."""
    lane.answers.append(replace(answer, memory=Memory()))
    events, late = lane.events, int(lane.events.sizes.get("mask-late", 0))
    for i in range(SPEC.executed):
        action = np.asarray(act(world, lane.job.task) if answer.plan is None else answer.plan.actions[i])
        if not np.isfinite(action).all():
            lane.executed.append(action)
            lane.over = True
            return
        world.step(events.action(lane.executed, action, len(lane.executed)) if events.sizes else action)
        lane.executed.append(action)
        lane.success = world.success(lane.job.task) and not world.diverged
        lane.over = lane.success or world.diverged or len(lane.executed) == world.steps
        if lane.over:
            return
        if events.sizes:
            events.after(world, len(lane.executed))
        if late and i == SPEC.executed - 1 - late:
            lane.late_mask = world.observe().mask


def conclude(world: World, lane: Lane) -> Outcome:
    seconds, joint, progress = time.perf_counter() - lane.started, world.joint, world.progress
    errors = [answer.match_error_mm for answer in lane.answers if answer.match_error_mm is not None]
    return Outcome(
        success=lane.success,
        steps=len(lane.executed),
        replans=len(lane.answers),
        fallback_replans=sum(answer.plan is not None and answer.plan.unmatched for answer in lane.answers),
        stuck_replans=sum(answer.plan is not None and bool(answer.plan.stuck) for answer in lane.answers),
        matched_replans=len(errors),
        mean_match_error_mm=round(float(np.mean(errors)), 4) if errors else None,
        first_chunk_direction=first_chunk_direction(world, lane.job, np.stack(lane.executed)),
        final_joint=round(float(np.nan_to_num(joint)), 6),
        final_progress=round(float(np.nan_to_num(progress)), 4),
        seconds=round(seconds, 3),
    )


def first_chunk_direction(world: World, job: Job, executed: Array) -> Task:
    """Which of the expert's two first chunks in this very scene the executed one resembles, by cosine.

    The first eight executed displacements against the first eight that the scripted expert executes
    from the same start for either task; '' when nothing moved, or where there is one task. The paper does not define
    its measure.
    """
    chunk = executed[: SPEC.executed, :3].ravel()
    if not np.isfinite(chunk).all() or not chunk.any() or len(world.pair.tasks) < 2:
        return ""
    cosine = {}
    for task in world.pair.tasks:
        begin(world, job.scene, job.task)
        expert = []
        for _ in range(len(chunk) // 3):
            expert.append(act(world, task)[:3])
            world.step(np.append(expert[-1], executed[0, 3]))
        theirs = np.concatenate(expert)
        cosine[task] = float(chunk @ theirs / np.linalg.norm(theirs))
    return max(world.pair.tasks, key=cosine.__getitem__)
