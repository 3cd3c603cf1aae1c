"""`--cluster`: what `spread` (memcorr/workers.py) does when the workers are not this machine's processes.

Jobs go out in units: a demonstration, the match rows of one, a batch of rollouts, a training run. A unit's
results arrive together or not at all, and a unit whose process or machine was lost is done again elsewhere,
so nothing is lost or doubled. Machines share the file system and have the same versions installed; then the
bytes are those of a local run.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import platform
import traceback
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from ..errors import UserError
from ..machine import keep_freed_memory, provenance
from ..workers import Workers

log = logging.getLogger(__name__)
TRIES = 5  # of one unit; what kills its worker each time is the work, not the machines
LOCAL_JOBS, SLURM = "local-jobs", "slurm"


class Lost(Exception):
    """A unit's process or machine is gone; says how."""


@dataclass(frozen=True)
class Report:
    """How a unit ended."""

    kind: str  # results, failed (with an error for the user) or crashed (with a traceback)
    content: Any
    cpu: str  # rounding depends on it


@dataclass(eq=False)
class Unit:
    """Some jobs of one `spread`, run by calling it elsewhere."""

    work: Callable[[Iterator[Any]], Iterator[Any]]
    jobs: Sequence[Any]
    made_with: dict[str, str]
    folder: str = field(default_factory=os.getcwd)
    tries: int = 0

    def __call__(self) -> Report:
        cpu = ""
        try:
            cpu = prepared(self.folder, tuple(self.made_with.items()))
            return Report("results", list(self.work(iter(self.jobs))), cpu)
        except (UserError, OSError, MemoryError) as problem:
            return Report("failed", problem, cpu)
        except Exception:
            return Report("crashed", traceback.format_exc(), cpu)


def program() -> dict[str, str]:
    """What decides the bytes: versions, processor, and our own source (a commit may be of documents alone)."""
    digest, package = hashlib.sha256(), Path(__file__).parents[1]
    for file in sorted(package.rglob("*.py")):
        digest.update(str(file.relative_to(package)).encode() + b"\0" + file.read_bytes())
    versions = {name: value for name, value in provenance().items() if name != "commit"}
    return versions | {"memcorr": digest.hexdigest()[:12]}


@functools.cache
def prepared(folder: str, made_with: tuple[tuple[str, str], ...]) -> str:
    """Puts this worker process where the command was given, if it is the same program there; returns its processor."""
    node, here = platform.node(), program()
    for name, wanted in made_with:
        if name != "cpu" and here.get(name, "") != wanted:
            other = f"{name} {here.get(name) or 'unknown'} instead of {wanted or 'unknown'}"
            raise UserError(f"{node} has {other}: results would differ; install the same there")
    try:
        os.chdir(folder)
    except OSError:
        raise UserError(f"{node} has no folder {folder}: a cluster's machines must share it") from None
    keep_freed_memory()
    return here["cpu"]


class Elsewhere(ABC):
    """A pool that begins units somewhere and hears how they end."""

    @property
    @abstractmethod
    def slots(self) -> int: ...

    @abstractmethod
    def needing(self, threads: int, gpus: int) -> Self: ...

    @abstractmethod
    def begin(self, unit: Unit) -> Any:
        """A handle of the unit, which is now under way or waits for room."""

    @abstractmethod
    def ended(self, handles: Sequence[Any]) -> Sequence[Any]:
        """Waits until some have ended, and says which."""

    @abstractmethod
    def answer(self, handle: Any) -> Report:
        """Of a unit that has ended; Lost if there is none."""

    @abstractmethod
    def end(self, handles: Sequence[Any]) -> None:
        """These are no longer wanted; when this returns, they write no more."""

    @property
    def most(self) -> int:
        """Units handed over at a time: all, where the cluster keeps the queue."""
        return 10_000

    def spread(
        self, work: Callable[[Iterator[Any]], Iterator[Any]], jobs: Sequence[Any], unit: int
    ) -> Generator[Any, None, None]:
        if not jobs:
            return
        ours = program()
        cpus = {ours["cpu"], ""}
        parts = [jobs[k : k + unit] for k in range(0, len(jobs), unit)]
        waiting = deque(Unit(work, part, ours) for part in parts)
        under_way: dict[Any, Unit] = {}
        try:
            while waiting or under_way:
                while waiting and len(under_way) < self.most:
                    under_way[self.begin(waiting[0])] = waiting[0]
                    waiting.popleft()
                for handle in self.ended(list(under_way)):
                    try:
                        answer = self.answer(handle)
                    except Lost as loss:
                        waiting.append(again(under_way.pop(handle), loss))
                        continue
                    del under_way[handle]
                    if answer.cpu not in cpus:
                        cpus.add(answer.cpu)
                        log.warning(
                            f"note: some work ran on another processor ({answer.cpu}): it may round differently"
                        )
                    if answer.kind == "failed":
                        raise answer.content
                    if answer.kind == "crashed":
                        raise RuntimeError(f"in a worker process:\n{answer.content}")
                    yield from answer.content
        finally:
            self.end(list(under_way))


def again(unit: Unit, loss: Lost) -> Unit:
    unit.tries += 1
    if unit.tries >= TRIES:
        raise UserError(f"the same work was lost {TRIES} times ({loss}): out of memory? the same command continues")
    log.warning(f"note: a worker was lost ({loss}); what it did is done again")
    return unit


def find_workers(cluster: str | None, workers: int) -> Workers:
    """What `--cluster` and `--workers` ask for."""
    if cluster is None:
        return workers
    if cluster in (LOCAL_JOBS, SLURM):
        from .jobs import Jobs

        return Jobs.of(cluster, workers)
    from .raylets import Raylets

    return Raylets.join(cluster)
