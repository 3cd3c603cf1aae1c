"""How work is done on this machine: whole files, one lock per folder, one pool of workers, one device.

Files appear whole or not at all (`written_whole`). A folder that is written to belongs to one process
at a time (`claimed`). Whatever runs in parallel goes through `spread`: the same results for any number
of workers, one line when a worker dies, no process left behind; `memcorr/cluster/` is another way of
running the same pool. Batches have one shape (`padded`).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import logging
import multiprocessing
import os
import platform
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from multiprocessing import connection, resource_tracker
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from .errors import UserError

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.context import SpawnProcess

    import torch

log = logging.getLogger(__name__)
TEMPORARY, LOCK = ".memcorr-tmp", ".memcorr-lock"
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
Job = TypeVar("Job")
Result = TypeVar("Result")


class InUse(UserError):
    """Another process has claimed the folder."""


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


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Yields a new, empty file beside `path`; on success it becomes `path`, on any error it is removed.

    The name says whose it is, so that `claimed` can clear what a killed process left and nothing else.
    It never existed before: a link of that name cannot lead elsewhere. The user's umask applies, even if
    a library puts a file of its own in its place.
    """
    temporary = path.with_name(f".{path.name}.{platform.node()}-{os.getpid()}{TEMPORARY}")
    temporary.unlink(missing_ok=True)  # of an earlier process with our number
    try:
        os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
        mode = temporary.stat().st_mode
        yield temporary
        temporary.chmod(mode)
        with open(temporary, "rb") as f:
            os.fsync(f.fileno())
        os.replace(temporary, path)
    except BaseException as problem:
        temporary.unlink(missing_ok=True)
        if isinstance(problem, OSError) and problem.filename is None:  # a refused write says not where
            why = f"could not be written ({problem.strerror or problem}); is the disk full?"
            raise OSError(problem.errno or errno.EIO, why, str(path)) from problem
        raise


def write_text(path: Path, text: str) -> None:
    with written_whole(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


_CLAIMED: set[tuple[int, int, Path]] = set()  # process, thread, folder: a forked child has claimed nothing


@contextmanager
def claimed(folder: Path, *inside: str) -> Iterator[Path]:
    """`folder`, made if need be, with its folders `inside`, for this process alone; what killed processes left
    half-written is removed. Who has claimed it may call somebody who claims it, too: a verb keeps its folder until
    its last file is there."""
    owner = os.getpid(), threading.get_ident(), folder.resolve()
    if owner in _CLAIMED:
        yield folder
        return
    lock, places = _lock(folder), (folder, *(folder / name for name in inside))
    _CLAIMED.add(owner)
    try:
        _sweep(places)
        yield folder
    finally:
        try:
            _sweep(places)  # of workers that had to be ended
            (folder / LOCK).unlink(missing_ok=True)  # while it is still ours
        finally:
            _CLAIMED.discard(owner)
            os.close(lock)


def _sweep(places: Sequence[Path]) -> None:
    for place in places:
        for leftover in place.glob(f".*{TEMPORARY}"):
            leftover.unlink(missing_ok=True)


def _lock(folder: Path) -> int:
    """An open file that holds the folder's lock; the system frees it, also after kill -9."""
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = os.open(folder / LOCK, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o666)
        except OSError as problem:
            raise UserError(f"cannot write to folder {folder} ({problem.strerror}); choose another --out") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(lock), os.stat(folder / LOCK)):
                    return lock
            os.close(lock)  # its owner removed the file just now: once more
        except OSError as problem:
            os.close(lock)
            taken = problem.errno in (errno.EAGAIN, errno.EACCES)
            why = "is being written by another memcorr; wait" if taken else f"cannot be locked ({problem.strerror})"
            kind = InUse if taken else UserError
            raise kind(f"{folder} {why}, or choose another --out") from None


def padded(count: int, size: int) -> Iterator[NDArray[np.int64]]:
    """Indices 0 .. count - 1 in batches of exactly `size`; the last one repeats its last index.

    Matrix products of another shape round differently, so whoever wants the same bits for one row and
    for many computes in batches of one shape, and drops what was repeated.
    """
    for first in range(0, count, size):
        yield np.minimum(np.arange(first, first + size), count - 1)


def slots(workers: Workers) -> int:
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


def choose_device(name: str) -> torch.device:
    """CUDA when there is one, unless `name` says otherwise."""
    import torch

    if name not in ("auto", "cpu", "cuda"):
        raise UserError(f"--device {name}: choose auto, cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: this machine has no CUDA device that torch can use; give --device cpu")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Torch computes with `count` threads meanwhile: another number rounds differently."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def keep_freed_memory() -> None:
    """Stops glibc from handing large freed blocks back to the system, only to fault them in again
    at the next update or decision (some 9,000 page faults per update). Other C libraries are left alone.
    For processes that are ours alone: the command line's and its workers'."""
    mmap_threshold, trim_threshold = -3, -1  # <malloc.h>
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return
    mallopt(mmap_threshold, 2**30)
    mallopt(trim_threshold, 2**31 - 1)


def provenance() -> dict[str, str]:
    """What made a file: versions of this package and of what it stands on, the commit, the processor."""
    found = {}
    for package in ("memcorr", "torch", "mujoco", "metaworld", "numpy"):
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found | {"python": platform.python_version(), "commit": _commit(), "cpu": _cpu()}


def _commit() -> str:
    """Of the checkout that this package is run from, with a plus sign if it was changed; '' elsewhere."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run([*git, "status", "--porcelain", "."], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "")


def _cpu() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
