"""Plans for the clients: one thread, one batch at a time, always of the same number of slots.

Torch computes here and nowhere else, so the event loop goes on answering, and the bits of a plan depend
neither on who else is served nor on when. What fails, fails alone: a batch that raises is computed again one
request at a time, and only the request that raises then gets an error. A second thread makes references ready, one
after the other: the client that chooses one waits for it; the others' plans do not.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Literal
from weakref import WeakKeyDictionary

import numpy as np

from ..correspondence.lift import BATCH
from ..correspondence.matcher import Matcher
from ..demos.pace import Pace
from ..errors import UserError
from ..following.masks import Tracked
from ..following.reference import Reference
from ..following.step import Observation, Query, Relation
from ..frames import Camera, Frame
from ..machine import threads
from ..policy.plan import ACTION_LIMIT, Follows, Plan, Planner, Request, initial_noise
from ..spec import SPEC
from .protocol import Refused

log = logging.getLogger(__name__)
Masks = Literal["sent", "carried"]  # with every frame; or with the first of an episode, and found from there on
KEPT = 32  # prepared frames of a reference, 0.9 MB each with the embedded matcher; an episode looks at 24
PREPARED = 32  # references that have any
LOOKS = 32  # earlier ones that a carried mask is held against


class ServedReference(Reference):
    """A reference whose prepared frames stay few, however long it is followed.

    A matcher encodes eight frames at the price of one (batches are padded), so the looks that will follow are
    prepared along with the one that is asked for.
    """

    ready = False

    def make_ready(self, pace: Pace | None) -> None:
        """What takes longer than a plan: how the object moved, where the phase is by what is seen (`pace` is at which
        it is then followed); the first looks."""
        if pace is not None:
            paced = self.at_pace(pace)
            with _in_own_words():
                _ = paced.course
            for old in list(paced._prepared)[KEPT:]:
                del paced._prepared[old]
        else:
            self.prepare([0])
        self.ready = True

    def prepare(self, phases: Sequence[int]) -> None:
        wanted = phases if len(phases) > 1 else self._ahead(phases[0])
        with _in_own_words():
            super().prepare(wanted)
        for old in list(self._prepared)[:-KEPT]:  # the order of a dictionary: oldest first
            if old not in phases:
                del self._prepared[old]

    def _ahead(self, j: int) -> list[int]:
        if j in self._prepared:
            return [j]
        upcoming = list(range(j % SPEC.executed, len(self), SPEC.executed))
        first = max(min(upcoming.index(j), len(upcoming) - BATCH), 0)
        return upcoming[first : first + BATCH]

    def forget(self) -> None:
        for one in (self, *self._paced.values()):
            one._prepared.clear()


@contextlib.contextmanager
def _in_own_words() -> Iterator[None]:
    """What is wrong with a reference names files of this machine."""
    try:
        yield
    except Refused:
        raise
    except (UserError, ValueError) as problem:
        log.warning(f"{problem}")
        raise Refused("the reference cannot be used; the server's log says why") from None


@dataclass(frozen=True)
class Planned:
    """A plan and what it took."""

    plan: Plan
    wait_ms: float  # before it was begun
    infer_ms: float
    company: int  # clients planned for in the same batch
    tracked: Tracked | None = None  # to carry the mask on from, where masks are carried


@dataclass(frozen=True)
class _Waiting:
    query: Query
    seed: int  # draws the noise of the sample
    since: float
    answer: Future[Planned]
    tracked: Tracked | None  # what carries the mask to this look; None where one was sent


class Inference:
    """The thread, and the queue in front of it."""

    def __init__(
        self,
        policy: Follows,
        matcher: Matcher | None,
        slots: int = 1,
        thread_count: int = 1,
        action_limit: float = ACTION_LIMIT,
        masks: Masks = "sent",
    ) -> None:
        if policy.design.visual:
            raise UserError(f"{policy.design.name} follows no reference: only relation policies are served")
        if (policy.design.state_dim, policy.design.action_dim) != (SPEC.state_dim, SPEC.action_dim):
            raise UserError(f"{policy.design.name} has another robot's state or action: the protocol's have 9 and 4")
        self.matcher = matcher if policy.design.needs_matches else None
        self.planner = Planner(policy, self.matcher, slots, action_limit)
        self.slots, self.thread_count, self.masks = slots, thread_count, masks
        self._recent: WeakKeyDictionary[Reference, None] = WeakKeyDictionary()  # the last used at the end
        self._lock = threading.Lock()  # of these
        self._waiting: queue.SimpleQueue[_Waiting | None] = queue.SimpleQueue()
        self._chosen: queue.SimpleQueue[tuple[ServedReference, Future[None]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="inference", daemon=True)
        self._preparing = threading.Thread(target=self._prepare, name="preparing", daemon=True)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        with threads(self.thread_count):
            if not self.steady():
                log.warning(f"slots: this processor rounds the rows of a batch of {self.slots} differently")
        self._thread.start()
        self._preparing.start()

    def stop(self, timeout: float = 10.0) -> None:
        """After the batch under way; who still waits is never answered."""
        self._waiting.put(None)
        self._chosen.put(None)
        self._thread.join(timeout)
        self._preparing.join(timeout)

    def submit(self, query: Query, seed: int = 0, tracked: Tracked | None = None) -> Future[Planned]:
        waiting = _Waiting(query, seed, time.perf_counter(), Future(), tracked)
        self._waiting.put(waiting)
        return waiting.answer

    def make_ready(self, reference: ServedReference) -> Future[None]:
        """Done when the reference is prepared; a plan before that would be late."""
        done: Future[None] = Future()
        if reference.ready:
            done.set_result(None)
        else:
            self._chosen.put((reference, done))
        return done

    def _prepare(self) -> None:
        with threads(self.thread_count):
            while (chosen := self._chosen.get()) is not None:
                reference, done = chosen
                if not done.set_running_or_notify_cancel():  # the client that chose it is gone
                    continue
                try:
                    if not reference.ready:
                        self._use([reference])
                        following = self.planner.following
                        reference.make_ready(following.costs.pace if following.seen else None)
                except Exception as problem:
                    done.set_exception(problem)
                else:
                    done.set_result(None)

    def _use(self, references: Sequence[Reference]) -> None:
        """Of those that were not used for longest the prepared frames are forgotten."""
        with self._lock:
            for reference in references:
                self._recent.pop(reference, None)
                self._recent[reference] = None
            for old in list(self._recent)[:-PREPARED]:
                del self._recent[old]
                if isinstance(old, ServedReference):
                    old.forget()

    def _run(self) -> None:
        with threads(self.thread_count):  # torch counts threads per calling thread
            while (first := self._waiting.get()) is not None:
                batch, last = self._collected(first)
                batch = [w for w in batch if w.answer.set_running_or_notify_cancel()]
                if batch:
                    self._settle(batch)
                if last:
                    return

    def steady(self) -> bool:
        """Whether every row of a batch is computed alike. A batch's shape is constant, but a matrix product may still
        round its last rows differently: two slots do on the processor that this was written on, four and more not."""
        size, camera = SPEC.image_size, Camera.from_fovy(45.0, SPEC.image_size, np.eye(4))
        blank = np.zeros((size, size))
        images = (np.zeros((size, size, 3), np.uint8), blank.astype(np.float32), blank.astype(bool))
        nothing = Relation(Frame(*images, camera, np.zeros(SPEC.state_dim), np.zeros(3)))
        plans = self.planner.policy.plan([Request(nothing, initial_noise(0))] * self.slots, self.slots)
        rows = [plan.actions for plan in plans]
        return all(np.array_equal(row, rows[0]) for row in rows)

    def _collected(self, first: _Waiting) -> tuple[list[_Waiting], bool]:
        """The requests that wait already, up to the number of slots, and whether the queue is empty after them. Nothing
        waits for others to come: they come while a batch is computed."""
        batch = [first]
        while len(batch) < self.slots:
            try:
                waiting = self._waiting.get_nowait()
            except queue.Empty:
                break
            if waiting is None:
                return batch, True
            batch.append(waiting)
        return batch, False

    def _settle(self, batch: Sequence[_Waiting]) -> None:
        """Answers every request of the batch, also after an error."""
        began = time.perf_counter()
        try:
            seen = [self._masked(w) for w in batch]
            plans = self.plan([query for query, _ in seen], [w.seed for w in batch])
        except Exception as problem:
            if len(batch) > 1:
                for waiting in batch:
                    self._settle([waiting])
                return
            batch[0].answer.set_exception(problem)
            return
        took = 1e3 * (time.perf_counter() - began)
        for waiting, plan, (_, tracked) in zip(batch, plans, seen, strict=True):
            if np.isfinite(plan.actions).all():
                waiting.answer.set_result(Planned(plan, 1e3 * (began - waiting.since), took, len(batch), tracked))
            else:
                waiting.answer.set_exception(Refused("no finite plan: are robot_state and T_world_cam in metres?"))

    def _masked(self, waiting: _Waiting) -> tuple[Query, Tracked | None]:
        """With the mask carried from the look before, if none was sent. What carries it is copied: a plan that fails
        has changed nothing."""
        query, frame = waiting.query, waiting.query.observation.frame
        if self.masks == "sent" or self.matcher is None:
            return query, None
        if waiting.tracked is None:
            return query, Tracked(self.matcher, frame, frame.mask)
        tracked = copy.copy(waiting.tracked)
        tracked.history = [*tracked.history[:1], *tracked.history[1:][-LOOKS:]]
        return replace(query, observation=Observation(replace(frame, mask=tracked.look(frame)))), tracked

    def plan(self, queries: Sequence[Query], seeds: Sequence[int]) -> list[Plan]:
        """What `Follower.plan` gives with as many slots, for each query, bit for bit."""
        self._use([query.reference for query in queries])
        noises = [initial_noise(seed, query.elapsed) for query, seed in zip(queries, seeds, strict=True)]
        return self.planner.plan(queries, noises)
