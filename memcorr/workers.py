"""Work in several processes of this machine.

Whatever runs in parallel goes through `spread`: the same results for any number of workers, one line when a worker
dies, no process left behind. `memcorr/cluster/` is another way of running the same pool. What may hang or crash, like
the reading of a stranger's file, goes to an `Answering`.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import connection, resource_tracker
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from .errors import UserError

if TYPE_CHECKING:
    from multiprocessing.context import SpawnProcess


from .machine import keep_freed_memory

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


Job = TypeVar("Job")


Result = TypeVar("Result")


class Pool(Protocol):
    """Workers elsewhere, which `spread` may use instead of this machine's processes."""

    @property
    def slots(self) -> int:
        """Units that can be under way together."""
        ...

    def needing(self, threads: int, gpus: int) -> Pool:
        """The same for units that need so much each."""
        ...

    def spread(
        self, work: Callable[[Iterator[Any]], Iterator[Any]], jobs: Sequence[Any], unit: int
    ) -> Generator[Any, None, None]: ...


Workers = int | Pool  # processes of this machine, or another one's


def processes_of(workers: Workers) -> int:
    """How much can be under way together."""
    return workers if isinstance(workers, int) else workers.slots


def needing(workers: Workers, threads: int, gpus: int = 0) -> Workers:
    """As many of the workers as there is room for when each needs so much."""
    return max(1, workers // threads) if isinstance(workers, int) else workers.needing(threads, gpus)


def spread(
    work: Callable[[Iterator[Job]], Iterator[Result]], jobs: Sequence[Job], workers: Workers, unit: int = 1
) -> Generator[Result, None, None]:
    """Results of `work` over `jobs`, as they come.

    `work` takes a stream of jobs and yields results; each worker runs one such stream and fetches a job
    when it is ready for it. One worker is this very process; more are spawned (a forked child would
    inherit GL state), each with one GL context of its own, and `work` must then be picklable.

    Each worker has a line of its own to this process, and nothing else holds its ends: whichever side
    dies, in the middle of a word or before the first, the other one hears it. Workers get their next job
    when the caller asks for the next result, and end with this generator: who may leave it early closes it.
    A cluster is handed `unit` jobs at a time, and their results arrive together.
    """
    if not isinstance(workers, int):
        yield from workers.spread(work, jobs, unit)
        return
    workers = min(workers, len(jobs))
    if workers <= 1:
        if jobs:
            yield from work(iter(jobs))
        return
    waiting = iter(jobs)
    lines: dict[Connection, SpawnProcess] = {}
    try:
        with _undisturbed():
            for _ in range(workers):
                line, process = _start(work)
                lines[line] = process
        busy = set(lines)
        while busy:
            for line in cast("list[Connection]", connection.wait(busy)):
                try:
                    kind, content = line.recv()
                    if kind == "ready":
                        line.send(next(waiting, None))
                except (EOFError, OSError):
                    cause = _cause_of_death(lines[line])
                    raise UserError(f"a worker process died ({cause}); the same command continues") from None
                if kind == "failed":
                    raise content
                if kind == "crashed":
                    raise RuntimeError(f"in a worker process:\n{content}")
                if kind == "finished":
                    busy.remove(line)
                if kind == "result":
                    yield content
    finally:
        for process in lines.values():
            process.terminate()
        for line, process in lines.items():
            process.join(timeout=5)
            if process.exitcode is None:
                process.kill()
            line.close()


def _start(work: Callable[[Iterator[Any]], Iterator[Any]]) -> tuple[Connection, SpawnProcess]:
    """Our end of a new worker's line, and the worker."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(work, theirs), daemon=True)
    process.start()
    theirs.close()
    return ours, process


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Ctrl-C and SIGTERM wait meanwhile: a process half started is nobody's. One that is started here never
    hears Ctrl-C, which a terminal sends to it as well: not even while it is still importing."""
    heard: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
    resource_tracker.ensure_running()  # would unblock the signals when it starts
    handlers = {n: signal.signal(n, lambda number, frame: heard.append(number)) for n in numbers}
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # inherited by what is started
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        for number, handler in handlers.items():
            signal.signal(number, handler)
    for late in heard:
        signal.raise_signal(late)


def _cause_of_death(process: SpawnProcess) -> str:
    process.join(timeout=5)
    code = process.exitcode
    if code == -signal.SIGKILL:
        return "killed: out of memory?"
    return signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"


def _serve(work: Callable[[Iterator[Any]], Iterator[Any]], line: Connection) -> None:
    """A worker's whole life."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its workers
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _die_with_parent()
    keep_freed_memory()
    last: tuple[str, Any] = ("finished", None)
    try:
        for result in work(_fetched(line)):
            line.send(("result", result))
    except (UserError, OSError, MemoryError) as problem:
        last = ("failed", problem)
    except Exception:
        last = ("crashed", traceback.format_exc())
    with contextlib.suppress(ConnectionError):  # the parent has gone
        line.send(last)


def _fetched(line: Connection) -> Iterator[Any]:
    """Jobs, each asked for when it is wanted."""
    while True:
        line.send(("ready", None))
        if (job := line.recv()) is None:
            return
        yield job


def _die_with_parent() -> None:
    """On Linux the kernel ends this process when its parent dies, even by kill -9."""
    if sys.platform.startswith("linux"):
        with contextlib.suppress(AttributeError, OSError):
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


class NoAnswer(Exception):
    """A process that answers questions took too long, or died."""


class Answering:
    """A process that answers questions, one after the other, and is ended when an answer takes too long.

    It is no child of `multiprocessing`: that would import the user's program again.
    """

    def __init__(self) -> None:
        self._line, theirs = multiprocessing.Pipe()
        number, path = theirs.fileno(), os.pathsep.join(place or os.getcwd() for place in sys.path)
        with _undisturbed():
            self._process = subprocess.Popen(
                [sys.executable, "-c", f"from {__name__} import _answer; _answer({number})"],
                pass_fds=[number],
                env={**os.environ, "PYTHONPATH": path},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        theirs.close()
        try:
            self._line.recv()  # it has begun; from here on time counts
        except (EOFError, OSError):
            self.close()
            raise UserError(f"a process of {sys.executable} does not start; the same command tries again") from None

    def ask(self, question: Callable[..., Result], *arguments: Any, seconds: float) -> Result:
        """`question(*arguments)`, a function of a module, or what it raises; `NoAnswer` after so many seconds."""
        try:
            self._line.send((question, arguments))
            if not self._line.poll(seconds):
                self.close()
                raise NoAnswer(f"no answer within {seconds:.3g} s")
            raised, content = self._line.recv()
        except (EOFError, OSError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(5)
            code = self.close()
            cause = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            raise NoAnswer(f"the process that reads it died, {cause}") from None
        except BaseException:
            self.close()
            raise
        if raised:
            raise content
        return cast(Result, content)

    def close(self) -> int:
        """How the process was ended, or had ended itself."""
        self._line.close()
        self._process.kill()
        return self._process.wait()


def _answer(number: int) -> None:
    """Its whole life."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # its parent ends it
    _die_with_parent()
    line = Connection(number)
    line.send("begun")
    with contextlib.suppress(EOFError, ConnectionError):  # its parent is gone
        while True:
            question, arguments = line.recv()
            try:
                answer = False, question(*arguments)
            except Exception as problem:
                answer = True, _spoken(problem)
            line.send(answer)


def _spoken(problem: Exception) -> Exception:
    """As it is, if it can be sent."""
    try:
        return cast(Exception, pickle.loads(pickle.dumps(problem)))
    except Exception:
        return RuntimeError(f"{type(problem).__name__}: {problem}")
