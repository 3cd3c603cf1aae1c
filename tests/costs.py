"""What tests cost: a limit for those that are not marked `long`, and recordings that are made once.

A test that is not marked `long` fails if it takes more than five seconds, whatever else it found. Counted is the
time of the processor, of this process and of the children that it has waited for, not the clock on the wall. A test
that only sleeps uses no processor, so a third of the clock counts too. Beside other programs the processor's seconds
are longer as well, two and a half times beside two trainings. So before a test fails, a fixed piece of work is timed,
and the limit grows with it: seconds are those of an idle machine. A test is charged for its call and its own fixtures.
Fixtures of a module or a session serve others as well, and are charged to nobody. `MEMCORR_TEST_PATIENCE=2` doubles
the limit.
"""

from __future__ import annotations

import fcntl
import hashlib
import inspect
import json
import os
import platform
import shutil
import statistics
import tempfile
import time
import tomllib
from collections.abc import Callable, Generator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
LIMIT = 5.0  # seconds of the processor of an idle machine
YARDSTICK = 0.041  # seconds that `work` takes there: two cores, two test processes, nothing beside them
WAITING = 3.0  # seconds by the clock that count as one of the processor
KEPT = ROOT / ".pytest_cache" / "kept"
UNUSED = 7 * 24 * 3600.0  # seconds after which what was kept for other sources is removed
LIBRARIES = ("mujoco", "metaworld", "gymnasium", "numpy", "scipy", "h5py", "hdf5plugin", "torch")

Step = Generator[None, object, object]


# The limit


class Meter:
    """Seconds charged to the test at hand."""

    def __init__(self) -> None:
        self.processor = self.clock = 0.0
        self.shared = 0  # fixtures of a module or a session that are being made, one within the other

    def charge(self, sign: int) -> None:
        times = os.times()
        self.processor += sign * (times.user + times.system + times.children_user + times.children_system)
        self.clock += sign * time.monotonic()

    @property
    def seconds(self) -> float:
        return max(self.processor, self.clock / WAITING)


METER = Meter()


def work() -> float:
    """A little of what tests do: objects, memory, products."""
    words = {str(i): i for i in range(60_000)}
    numbers = np.arange(2_000_000, dtype=np.float64)
    for _ in range(6):
        numbers = np.sqrt(numbers + 1.0)
    square = np.ones((256, 256), np.float32)
    for _ in range(8):
        square = square @ square / np.float32(256)
    return float(numbers[-1] + square[0, 0] + len(words))


class Slowness(NamedTuple):
    """How many times longer than on an idle machine something takes now; 1 on a faster one."""

    processor: float  # in seconds of the processor: others use its caches and its other half
    clock: float  # by the clock: others have their turns


def slowness(times: int = 5) -> Slowness:
    seconds, begun = [], time.monotonic()
    for _ in range(times):
        at = time.thread_time()
        work()
        seconds.append(time.thread_time() - at)
    clock = (time.monotonic() - begun) / times
    return Slowness(max(1.0, statistics.median(seconds) / YARDSTICK), max(1.0, clock / YARDSTICK))


AT_THE_BEGINNING: list[Slowness] = []  # of this test process: the machine may be idle again when a test is judged


def too_slow(meter: Meter) -> str:
    """What is said of a test that took too long for this machine as it is now; '' of any other."""
    limit = LIMIT * float(os.environ.get("MEMCORR_TEST_PATIENCE", "1"))
    if meter.seconds <= limit:
        return ""
    now = [slowness(), *AT_THE_BEGINNING]
    processor, waiting = limit * max(s.processor for s in now), limit * max(s.clock for s in now)
    if meter.processor <= processor and meter.clock / WAITING <= waiting:
        return ""
    return (
        f"took {meter.processor:.1f} s of the processor and {meter.clock:.1f} s by the clock, more than "
        f"{processor:.2g} s and {WAITING * waiting:.2g} s: make it quicker, or mark it with pytest.mark.long"
    )


def charged() -> Step:
    METER.charge(-1)
    try:
        return (yield)
    finally:
        METER.charge(1)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Step:
    METER.__init__()  # type: ignore[misc]
    return (yield from charged())


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Step:
    return (yield from charged())


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any]) -> Step:
    if fixturedef.scope == "function":
        return (yield)
    if METER.shared == 0:
        METER.charge(1)
    METER.shared += 1
    try:
        return (yield)
    finally:
        METER.shared -= 1
        if METER.shared == 0:
            METER.charge(-1)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    report = yield
    if not AT_THE_BEGINNING:
        AT_THE_BEGINNING.append(slowness())
    judged = report.when == "call" and report.passed and not item.get_closest_marker("long")
    if judged and (words := too_slow(METER)):
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} {words}"
    return report


# What is made once


def kept(name: str, room: str, build: Callable[[Path], object]) -> Path:
    """The folder that `build` makes, from an earlier test run if nothing that makes it has changed since.

    That is: the files of `room` and of the rooms it may know (see the layers in pyproject.toml), the source of `build`,
    Python, the libraries and the choice of OpenGL. Another graphics driver is not noticed: remove `.pytest_cache` then.
    Test processes that need it at the same time wait for the one that makes it. It appears whole, with a digest of
    every file; if a file has changed since, it is made anew. Nobody may write to it.
    """
    place = KEPT / f"{name}-{_sources(room, build)}"
    KEPT.mkdir(parents=True, exist_ok=True)
    with (KEPT / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not _whole(place):
            shutil.rmtree(place, ignore_errors=True)
            with tempfile.TemporaryDirectory(dir=KEPT, prefix=".") as temporary:
                begun = Path(temporary) / name
                build(begun / "made")
                (begun / "digests.json").write_text(json.dumps(_digests(begun / "made")))
                begun.rename(place)
        os.utime(place)
        for other in KEPT.glob(f"{name}-*"):
            if time.time() - other.stat().st_mtime > UNUSED:
                shutil.rmtree(other)
    return place / "made"


def _sources(room: str, build: Callable[[Path], object]) -> str:
    layers = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]["layers"]
    rooms = [one for layer in layers[layers.index(room) :] for one in layer.split(" | ")]
    paths = [ROOT / one.replace(".", "/") for one in rooms]
    files = [file for path in paths for file in (path.rglob("*") if path.is_dir() else [path.with_suffix(".py")])]
    digest = hashlib.sha256()
    for file in sorted(file for file in files if file.is_file() and "__pycache__" not in file.parts):
        digest.update(f"{file.relative_to(ROOT)} {hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    about = [inspect.getsource(build), platform.python_version(), os.environ.get("MUJOCO_GL", "")]
    digest.update(repr(about + [_version(library) for library in LIBRARIES]).encode())
    return digest.hexdigest()[:16]


def _version(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:
        return "absent"


def _digests(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def _whole(place: Path) -> bool:
    try:
        return bool(json.loads((place / "digests.json").read_text()) == _digests(place / "made"))
    except (OSError, ValueError):
        return False
