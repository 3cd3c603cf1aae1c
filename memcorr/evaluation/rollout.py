"""Receding-horizon rollouts: decide on 16 actions, execute eight, look again.

Many rollouts ("slots") advance together in one process. They share one world and so one GL context:
a slot is a snapshot of the physics, restored for its turn. The `Controller` sees all
slots at once and may batch its work, but must answer for each slot as if it were alone.
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

SLOTS = 8  # decided together, always: batches are padded to it, so that rounding never depends on company


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
    """What is known when a slot replans."""

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
class Response:
    """What a controller answers: a plan, or None to let the scripted expert act step by step."""

    plan: Plan | None
    match_error_mm: float | None = None  # mean over the valid points, from simulator truth; None without any
    memory: Memory = field(default_factory=Memory)  # for the next decision of the same episode


class Controller(Protocol):
    sees: bool  # whether decisions need a rendered frame

    def decide(self, decisions: Sequence[Decision]) -> list[Response]:
        """One answer per decision, at most SLOTS; an answer never depends on the other decisions."""
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
class Slot:
    """A rollout under way."""

    job: Job
    state: Array
    place: Array  # where the object's base is now
    decision: Decision
    started: float
    events: Events
    executed: list[Array] = field(default_factory=list)
    answers: list[Response] = field(default_factory=list)  # without their memory
    late_mask: NDArray[np.bool_] | None = None  # for a mask that is always some steps old
    success: bool = False
    over: bool = False


def roll_out(
    world: World,
    controller: Controller,
    jobs: Iterator[Job],
    slots: int = SLOTS,
    watch: Stopwatch | None = None,
) -> Iterator[tuple[Job, Outcome]]:
    """Runs `jobs`, up to `slots` at a time; a finished slot takes the next job at once."""
    watch = watch or Stopwatch()
    active: list[Slot] = []
    while True:
        while len(active) < slots and (job := next(jobs, None)) is not None:
            begin(world, job.scene, job.task)
            first = _look(world, controller, job, 0, 0, None, watch)
            events = Events(job.scene)
            active.append(Slot(job, world.snapshot(), world.place, first, time.perf_counter(), events))
        if not active:
            return
        answers = controller.decide([slot.decision for slot in active])
        for slot, answer in zip(active, answers, strict=True):
            world.restore(slot.job.scene, slot.state, slot.place)
            with watch("physics"):
                execute(world, slot, answer)
            if slot.over:
                yield slot.job, conclude(world, slot)
            else:
                slot.state, slot.place = world.snapshot(), world.place
                done = len(slot.answers), len(slot.executed)
                decision = _look(world, controller, slot.job, *done, slot.late_mask, watch)
                slot.decision = replace(decision, memory=answer.memory)
        active = [slot for slot in active if not slot.over]


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
        frame = degraded(world.observe(), job.scene, elapsed, late_mask) if controller.sees else None
    return Decision(job, replan, elapsed, frame, world.T_world_object, world.robot_state)


def execute(world: World, slot: Slot, answer: Response) -> None:
    """The first eight actions; ends at the first success, at the last step (200; 500 in Meta-World's own tasks), when
    physics breaks down or when an action is no number."""
    slot.answers.append(replace(answer, memory=Memory()))
    events, late = slot.events, int(slot.events.sizes.get("mask-late", 0))
    for i in range(SPEC.executed):
        action = np.asarray(act(world, slot.job.task) if answer.plan is None else answer.plan.actions[i])
        if not np.isfinite(action).all():
            slot.executed.append(action)
            slot.over = True
            return
        world.step(events.action(slot.executed, action, len(slot.executed)) if events.sizes else action)
        slot.executed.append(action)
        slot.success = world.success(slot.job.task) and not world.diverged
        slot.over = slot.success or world.diverged or len(slot.executed) == world.steps
        if slot.over:
            return
        if events.sizes:
            events.after(world, len(slot.executed))
        if late and i == SPEC.executed - 1 - late:
            slot.late_mask = world.observe().mask


def conclude(world: World, slot: Slot) -> Outcome:
    seconds, joint, progress = time.perf_counter() - slot.started, world.joint, world.progress
    errors = [answer.match_error_mm for answer in slot.answers if answer.match_error_mm is not None]
    return Outcome(
        success=slot.success,
        steps=len(slot.executed),
        replans=len(slot.answers),
        fallback_replans=sum(answer.plan is not None and answer.plan.unmatched for answer in slot.answers),
        stuck_replans=sum(answer.plan is not None and bool(answer.plan.stuck) for answer in slot.answers),
        matched_replans=len(errors),
        mean_match_error_mm=round(float(np.mean(errors)), 4) if errors else None,
        first_chunk_direction=first_chunk_direction(world, slot.job, np.stack(slot.executed)),
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
