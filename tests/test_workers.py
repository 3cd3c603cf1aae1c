"""Several processes at one job: the same results for any number of them, and none is left behind.

Workers import this file, so what is slow to load is imported by the test that needs it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from memcorr.errors import UserError
from memcorr.workers import Answering, NoAnswer, spread
from tests.test_folders import Raise, linux, processes, until


@contextlib.contextmanager
def within(seconds: int) -> Iterator[None]:
    """What hangs fails."""

    def late(number: int, frame: object) -> None:
        raise AssertionError(f"still not done after {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def workers_of(mark: str) -> list[int]:
    return [number for number, command in processes(mark).items() if "spawn_main" in command]


def children() -> set[int]:
    """This process's own, dead but not buried ones among them; multiprocessing's tracker stays for the next pool."""
    mine = set()
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = (place / "stat").read_text().rpartition(")")[2].split()[1]
            if int(parent) == os.getpid() and b"resource_tracker" not in (place / "cmdline").read_bytes():
                mine.add(int(place.name))
    return mine


def squares(jobs: Iterator[int]) -> Iterator[tuple[int, int]]:
    for job in jobs:
        yield job, job * job


@dataclass(frozen=True)
class Striking:
    """Works, but not on job 2."""

    blow: Callable[[], object]

    def __call__(self, jobs: Iterator[int]) -> Iterator[int]:
        for job in jobs:
            if job == 2:
                self.blow()
            yield job


def kill_myself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def leave_quietly() -> None:
    os._exit(0)


def kill_myself_soon() -> None:
    threading.Timer(0.3, kill_myself).start()


def large_results(jobs: Iterator[int]) -> Iterator[bytes]:
    """The second is larger than any pipe; its worker is killed before anyone has read it."""
    for job in jobs:
        if job:
            kill_myself_soon()
        yield bytes(10_000_000 if job else 1)


def unspeakable(jobs: Iterator[int]) -> Iterator[object]:
    for _ in jobs:
        yield lambda: None


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_the_results_are_the_same_for_any_number_of_workers(workers: int) -> None:
    with within(60):
        assert sorted(spread(squares, range(20), workers)) == [(n, n * n) for n in range(20)]
        assert list(spread(squares, [7], workers)) == [(7, 49)]
        assert list(spread(squares, [], workers)) == []


@linux
@pytest.mark.parametrize(("blow", "cause"), [(kill_myself, "killed"), (leave_quietly, "exit code 0")])
def test_a_worker_that_dies_is_told_in_one_line_and_none_is_left(blow: Callable[[], None], cause: str) -> None:
    """The system kills the largest process when memory runs out; whoever waits for its result waits for ever."""
    before = children()
    with within(60), pytest.raises(UserError, match=rf"^a worker process died \({cause}.*the same command continues$"):
        list(spread(Striking(blow), range(50), 2))
    assert children() == before


@linux
def test_a_worker_that_dies_in_the_middle_of_its_words_is_told_too() -> None:
    before = children()
    with within(60), pytest.raises(UserError, match="a worker process died"):
        for _ in spread(large_results, range(2), 2):
            time.sleep(1)
    assert children() == before


@linux
@pytest.mark.parametrize(
    "problem",
    [UserError("give another"), OSError(errno.ENOSPC, "No space left on device", "/data"), MemoryError("a lot")],
    ids=lambda problem: type(problem).__name__,
)
def test_a_workers_error_is_passed_on_as_it_is(problem: Exception) -> None:
    before = children()
    with within(60), pytest.raises(type(problem)) as raised:
        list(spread(Striking(Raise(problem)), range(50), 2))
    assert (type(raised.value), str(raised.value)) == (type(problem), str(problem))
    if isinstance(problem, OSError):
        assert isinstance(raised.value, OSError) and raised.value.filename == "/data"
    assert children() <= before


@linux
def test_a_worker_that_crashes_shows_its_traceback() -> None:
    before = children()
    with within(60):
        with pytest.raises(RuntimeError, match=r"(?s)in a worker process:.*in __call__.*ZeroDivisionError: division"):
            list(spread(Striking(Raise(ZeroDivisionError("division"))), range(50), 2))
        with pytest.raises(RuntimeError, match=r"(?s)in a worker process:.*pickle"):
            list(spread(unspeakable, range(2), 2))
    assert children() == before


@linux
def test_whoever_stops_listening_leaves_no_worker_behind() -> None:
    before = children()
    with within(60):
        results = spread(squares, range(50), 2)
        next(results)
        assert len(children() - before) == 2
        results.close()
    assert children() == before


@linux
def test_what_hangs_or_dies_over_a_question_is_told_and_ended() -> None:
    before = children()
    process = Answering()
    with within(60):
        assert process.ask(divmod, 7, 2, seconds=30) == (3, 1)
        with pytest.raises(ZeroDivisionError):
            process.ask(divmod, 7, 0, seconds=30)
        assert len(process.ask(bytes, 10_000_000, seconds=30)) == 10_000_000
        with pytest.raises(NoAnswer, match=r"^no answer within 0\.5 s$"):
            process.ask(time.sleep, 1000, seconds=0.5)
        assert children() == before
        with pytest.raises(NoAnswer, match="died, SIGABRT"):
            Answering().ask(os.abort, seconds=30)
        with pytest.raises(NoAnswer, match="died, exit code 3"):
            Answering().ask(os._exit, 3, seconds=30)
    assert children() == before


@linux
def test_a_program_that_asks_is_not_run_again_by_who_answers(tmp_path: Path) -> None:
    """A script without a guard for `__main__`."""
    script = tmp_path / "script.py"
    script.write_text(
        "print('once'); from memcorr.workers import Answering; print(Answering().ask(abs, -2, seconds=30))"
    )
    found = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=os.environ, timeout=60)
    assert found.stdout.split() == ["once", "2"], found.stderr


POOL = """
import os, sys, time
from memcorr.errors import UserError
from memcorr.workers import Answering, NoAnswer, spread

def busy(jobs):
    for _ in jobs:
        open(os.path.join(sys.argv[2], str(os.getpid())), "w").close()
        while True:
            pass

def asleep(jobs):
    for _ in jobs:
        open(os.path.join(sys.argv[2], str(os.getpid())), "w").close()
        time.sleep(1000)

def unheard(jobs):
    for job in jobs:
        open(os.path.join(sys.argv[2], str(os.getpid())), "w").close()
        yield bytes(10_000_000)

def refusing(jobs):
    for job in jobs:
        raise UserError("no")
    yield

def work(jobs):
    yield from globals()[sys.argv[1]](jobs) or ()

if __name__ == "__main__":
    try:
        for _ in spread(work, [bytes(2000)] * 500, 2):
            time.sleep(1000)
    except UserError:
        print("refused", flush=True)
"""


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Starts a program with two workers; what is left of it at the end is killed."""
    mark, started = f"MEMCORR_TEST={tmp_path}", []
    (tmp_path / "pool.py").write_text(POOL)

    def start(kind: str) -> subprocess.Popen[str]:
        (tmp_path / "seen").mkdir()
        command = [sys.executable, str(tmp_path / "pool.py"), kind, str(tmp_path / "seen")]
        environment = {**os.environ, "MEMCORR_TEST": str(tmp_path)}
        started.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for number in processes(mark):
        with contextlib.suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)
    for process in started:
        process.communicate()


@linux
@pytest.mark.parametrize("kind", ["busy", "asleep", "unheard", "starting"])
def test_kill_9_of_the_parent_leaves_no_worker_behind(
    kind: str, pool: Callable[[str], subprocess.Popen[str]], tmp_path: Path
) -> None:
    """Workers that nobody hears would keep cores, memory and the graphics card until the machine is restarted."""
    mark = f"MEMCORR_TEST={tmp_path}"
    parent = pool("asleep" if kind == "starting" else kind)
    at_work = {"busy": 2, "asleep": 2, "unheard": 1, "starting": 0}[kind]  # the other one may be waiting for a job
    assert until(lambda: len(workers_of(mark)) == 2 and len(list((tmp_path / "seen").iterdir())) >= at_work, 30)
    parent.kill()
    parent.wait()
    assert until(lambda: not processes(mark), 5), processes(mark)


@linux
def test_jobs_that_nobody_took_do_not_keep_the_program_from_ending(
    pool: Callable[[str], subprocess.Popen[str]],
) -> None:
    """Here a megabyte of them, more than fits into a pipe."""
    parent = pool("refusing")
    assert parent.stdout is not None and parent.stdout.readline() == "refused\n"
    parent.wait(timeout=10)
    assert parent.returncode == 0
