"""Collecting, whatever happens: a full disk, Ctrl-C, files exchanged or lost. Nothing half-made is ever published,
and the same command then ends with the same bytes.

Most of these collect made-up pictures through the real command line, because what is tested is how they get to the
disk. Workers import this file, so what is slow to load is imported by the test that needs it.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memcorr.cli import main
from memcorr.demos.collect import collect
from memcorr.demos.manner import PLAINLY, Manner
from memcorr.demos.store import Store, demonstration_path, read_demonstration, write_demonstration
from memcorr.errors import UserError
from memcorr.folders import TEMPORARY
from memcorr.frames import Camera, Frame
from memcorr.spec import SPEC, TASKS, Task
from memcorr.worlds.scenes import DISTURBED_SEED, Scene

DISK = Path(__file__).parents[1] / "torture/disk.c"


@pytest.fixture(scope="module")
def full_disk(tmp_path_factory: pytest.TempPathFactory) -> str:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("needs Linux and a C compiler")
    folder = tmp_path_factory.mktemp("disk")
    command = [compiler, "-shared", "-fPIC", "-O1", str(DISK), "-o", "disk.so", "-ldl"]
    subprocess.run(command, cwd=folder, check=True)
    return str(folder / "disk.so")


def made_up(pair: int, task: Task, steps: int = 60, size: int = 32) -> dict[str, Any]:
    """Arguments of `write_demonstration`: noise, so that it does not shrink, and of both tasks the same first frame."""
    frames = []
    for t in range(steps):
        rng = np.random.default_rng([pair, t, TASKS.index(task) if t else 0])
        rgb = rng.integers(0, 256, (size, size, 3)).astype(np.uint8)
        depth = rng.uniform(1, 2, (size, size)).astype(np.float32)
        camera = Camera(np.eye(3), np.eye(4))
        frames.append(Frame(rgb, depth, rng.random((size, size)) < 0.5, camera, rng.normal(size=9), rng.normal(size=3)))
    rng = np.random.default_rng([pair, TASKS.index(task)])
    return {
        "frames": frames,
        "action": rng.uniform(-0.9, 0.9, (steps, 4)),
        "joint": rng.uniform(-1.5, 0, steps),
        "object_pose": np.eye(4) + np.pad(rng.normal(size=(steps, 3, 1)), ((0, 0), (0, 1), (3, 0))),
        "pair": pair,
        "task": task,
    }


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


# A full disk


def write_on_full_disks(library: str, folder: str) -> None:
    """Runs where `library` is preloaded. At whichever write or byte the disk is full: the same bytes or none."""
    disk, out = ctypes.CDLL(library), Path(folder)
    disk.disk.argtypes = [ctypes.c_long] * 3
    path, given = out / "pair-000-open.h5", made_up(0, "open")
    write_demonstration(path, u=(0.1, 0.2), **given)
    whole, writes = path.read_bytes(), disk.written()
    moments = [(-1, nth, alone) for nth in range(1, writes + 2) for alone in (0, 1)]
    moments += [(size, -1, 0) for size in range(0, len(whole) + 20_000, 20_000)]
    told = 0
    for moment in moments:
        path.unlink(missing_ok=True)
        disk.disk(*moment)
        try:
            write_demonstration(path, u=(0.1, 0.2), **given)
        except OSError as problem:
            told += 1
            assert "No space left on device" in str(problem) and str(path) in str(problem), (moment, problem)
            assert not os.listdir(out), (moment, os.listdir(out))
        else:
            assert os.listdir(out) == [path.name] and path.read_bytes() == whole, moment
    disk.disk(-1, -1, 0)
    assert told >= len(whole) // 20_000 > 20, (told, len(whole))


def test_a_demonstration_is_whole_or_absent_whichever_write_the_disk_refuses(full_disk: str, tmp_path: Path) -> None:
    """HDF5 itself would publish a file without some chunks, say nothing, and crash at the end of the process."""
    here = str(Path(__file__).parent)
    code = f"import sys; sys.path.insert(0, {here!r}); import test_collect as t; t.write_on_full_disks(*sys.argv[1:])"
    command = [sys.executable, "-c", code, full_disk, str(tmp_path)]
    result = subprocess.run(command, env={**os.environ, "LD_PRELOAD": full_disk}, capture_output=True, text=True)
    assert result.returncode == 0 and not result.stderr, result.stderr


def test_missing_depth_is_no_full_disk(tmp_path: Path) -> None:
    """Some cameras say NaN where nothing came back."""
    given = made_up(0, "open", steps=3)
    given["frames"][1].depth[:] = np.nan
    write_demonstration(tmp_path / "x.h5", u=(0.1, 0.2), **given)
    assert np.isnan(read_demonstration(tmp_path / "x.h5").frame(1).depth).all()


# The command line, with made-up pictures


FAKE = """
import os, sys, time
sys.path.insert(0, {here!r})
import memcorr.demos.collect as real
from test_collect import fake_record

real.record = fake_record  # in workers, too: they import this file

if __name__ == "__main__":
    from memcorr.cli import main

    main()
"""


def fake_record(
    root: Path, scene: Scene, task: Task, manner: Manner = PLAINLY, steps: int = 60, size: int = 32
) -> None:
    time.sleep(float(os.environ.get("RECORDING_SECONDS", "0")))
    arrays, wrong = made_up(scene.index, task, steps, size), " ".join(map(str, scene.disturbances))
    write_demonstration(demonstration_path(root, scene.index, task), u=scene.u, disturbances=wrong, **arrays)


@dataclasses.dataclass(frozen=True)
class Collector:
    """`memcorr collect --pairs 2 --workers 2` into `out`, in a process group of its own."""

    script: list[str]
    out: Path

    def start(self, **environment: str) -> subprocess.Popen[str]:
        arguments = ["collect", "--out", str(self.out), "--pairs", "2", "--workers", "2"]
        return subprocess.Popen(
            [sys.executable, *self.script, *arguments],
            env={**os.environ, "MEMCORR_TEST": str(self.out), **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def end(self, process: subprocess.Popen[str], code: int) -> str:
        """What it said on standard error apart from its progress; it must have ended with `code`, leaving nothing."""
        _, errors = process.communicate(timeout=60)
        assert process.returncode == code, errors
        assert not self.processes(), self.processes()
        lines = errors.replace("\r", "\n").splitlines()
        assert not list(self.out.glob(f".*{TEMPORARY}"))
        return "\n".join(line for line in lines if line and not line.startswith("collect door: "))

    def processes(self) -> dict[int, str]:
        found = {}
        for place in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if f"MEMCORR_TEST={self.out}".encode() in (place / "environ").read_bytes():
                    found[int(place.name)] = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        return found

    def workers(self) -> int:
        return sum("spawn_main" in command for command in self.processes().values())

    def published(self) -> list[Path]:
        return list(self.out.glob("pair-*.h5"))


def wait_for(condition: Callable[[], object], process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert process.poll() is None and time.monotonic() < end, process.communicate()
        time.sleep(0.1)


@pytest.fixture
def collector(tmp_path: Path) -> Iterator[Collector]:
    (tmp_path / "fake.py").write_text(FAKE.format(here=str(Path(__file__).parent)))
    collector = Collector([str(tmp_path / "fake.py")], tmp_path / "demos")
    yield collector
    for number in collector.processes():  # of a test that failed
        with contextlib.suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)


@pytest.fixture
def faking(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process makes its pictures up, too, as long as it is the only worker."""
    monkeypatch.setattr("memcorr.demos.collect.record", fake_record)


@pytest.fixture
def undisturbed(faking: None, tmp_path: Path) -> dict[str, bytes]:
    """What a collection ends with when nothing happens."""
    collect(tmp_path / "undisturbed", pairs=2, workers=1)
    return contents(tmp_path / "undisturbed")


@pytest.mark.long
def test_a_full_disk_is_told_in_one_line_and_nothing_is_published(
    full_disk: str, collector: Collector, undisturbed: dict[str, bytes]
) -> None:
    room = "200000"  # up to the middle of the first demonstration's pictures
    line = collector.end(collector.start(LD_PRELOAD=full_disk, DISK_BYTES=room), 2)
    assert line.startswith(f"memcorr: {collector.out}/pair-000-"), line
    assert line.endswith(".h5: could not be written (No space left on device); is the disk full?"), line
    assert os.listdir(collector.out) == ["collection.json"]
    collect(collector.out, pairs=2, workers=1)
    assert contents(collector.out) == undisturbed


def test_so_it_is_with_one_worker(
    undisturbed: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And without a C compiler: here the system refuses large files."""
    out, before = tmp_path / "demos", resource.getrlimit(resource.RLIMIT_FSIZE)
    monkeypatch.setattr(sys, "argv", ["memcorr", "collect", "--out", str(out), "--pairs", "2", "--workers", "1"])
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, before[1]))
        with pytest.raises(SystemExit) as stop:
            main()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert stop.value.code == 2
    (line,) = (x for x in capsys.readouterr().err.replace("\r", "\n").splitlines() if x and "collect door: " not in x)
    path = demonstration_path(out, 0, "open")
    assert line == f"memcorr: {path}: could not be written (File too large); is the disk full?"
    assert os.listdir(out) == ["collection.json"]
    main()
    assert contents(out) == undisturbed


def test_ctrl_c_is_one_line_and_the_same_command_continues(collector: Collector, undisturbed: dict[str, bytes]) -> None:
    """The whole process group hears it, also the workers, which are still importing or only half started."""
    process = collector.start()
    wait_for(lambda: collector.workers() == 2, process)
    os.killpg(process.pid, signal.SIGINT)
    assert collector.end(process, 130) == "memcorr: interrupted; the same command continues"
    collect(collector.out, pairs=2, workers=1)
    assert contents(collector.out) == undisturbed


def test_sigterm_of_the_parent_alone_is_one_line_and_ends_its_workers(collector: Collector) -> None:
    """As a job scheduler sends it: no worker hears it."""
    process = collector.start(RECORDING_SECONDS="30")
    wait_for(lambda: collector.workers() == 2, process)
    process.send_signal(signal.SIGTERM)
    assert collector.end(process, 143) == "memcorr: terminated; the same command continues"


def test_a_second_ctrl_c_right_after_the_first_does_not_hang(collector: Collector) -> None:
    process = collector.start(RECORDING_SECONDS="30")
    wait_for(lambda: collector.workers() == 2, process)
    os.killpg(process.pid, signal.SIGINT)
    time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=10)
    assert process.returncode in (130, -signal.SIGINT)
    assert not collector.processes()


@pytest.mark.long
def test_the_real_thing_continues_after_sigterm_with_the_same_bytes(store: Store, tmp_path: Path) -> None:
    """`python -m memcorr`, with the simulator and a GL context in each worker, in the middle of its work."""
    collector = Collector(["-m", "memcorr"], tmp_path / "demos")
    process = collector.start()
    wait_for(collector.published, process)
    os.killpg(process.pid, signal.SIGTERM)
    assert collector.end(process, 143) == "memcorr: terminated; the same command continues"
    assert 1 <= len(collector.published()) < 4
    assert collector.end(collector.start(), 0) == ""
    assert contents(collector.out) == contents(store.root)


# What is there already


@pytest.fixture(scope="module")
def fakes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two pairs as long as real ones, of very small pictures."""
    root = tmp_path_factory.mktemp("fakes") / "demos"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("memcorr.demos.collect.record", partial(fake_record, steps=SPEC.episode_steps, size=8))
        collect(root, pairs=2, workers=1)
    return root


@pytest.fixture
def copy(fakes: Path, tmp_path: Path) -> Path:
    return shutil.copytree(fakes, tmp_path / "copy")


USERS = ("notes.tmp", "lock", ".hidden.tmp", "sub/x.tmp", "sub/lock", "stage-one/notes.tmp", "stage-one/lock")


def test_collect_and_train_leave_the_users_files_alone(copy: Path, tmp_path: Path) -> None:
    """Once, every *.tmp in the folder was taken for our own, and `lock` for the lock."""
    from memcorr.training.experiments import EXPERIMENTS
    from memcorr.training.loop import train

    run = tmp_path / "run"
    for folder in (copy, run):
        for name in USERS:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(f"mine: {name}")
        for name in ("", "stage-one/"):
            (folder / f"{name}.x.1234{TEMPORARY}").write_text("half a file of a killed process")
    collect(copy, pairs=2, workers=1)
    tiny = dataclasses.replace(EXPERIMENTS["debug"], train_pairs=1, batch=4, updates=(1, 1))
    train(tiny, copy, 42, run)
    for folder in (copy, run):
        assert all((folder / name).read_text() == f"mine: {name}" for name in USERS)
        assert not (folder / f".x.1234{TEMPORARY}").exists()
    assert not (run / f"stage-one/.x.1234{TEMPORARY}").exists()
    assert (copy / f"stage-one/.x.1234{TEMPORARY}").exists(), "a folder that collect has no business in"


@pytest.mark.parametrize(
    ("one", "other"), [((0, "open"), (0, "close")), ((0, "open"), (1, "open")), ((0, "close"), (1, "open"))]
)
def test_exchanged_demonstrations_are_refused_by_name(
    one: tuple[int, Task], other: tuple[int, Task], copy: Path, tmp_path: Path
) -> None:
    """A policy trained on them would open where it was asked to close."""
    from memcorr.correspondence.cache import build_cache
    from memcorr.training.loop import train

    a, b = demonstration_path(copy, *one), demonstration_path(copy, *other)
    a.rename(tmp_path / "between")
    b.rename(a)
    (tmp_path / "between").rename(b)
    before = contents(copy)
    for use in (
        lambda: Store.open(copy).demonstrations(range(2)),
        lambda: collect(copy, pairs=2, workers=1),
        lambda: train("debug", copy, 42, tmp_path / "run"),
        lambda: build_cache(Store.open(copy), tmp_path / "cache", "flow", pairs=2, rows=8, workers=1),
    ):
        with pytest.raises(
            UserError, match=rf"({a.name}|{b.name}) holds door, pair \d, (open|close): files were exchanged"
        ):
            use()
    assert contents(copy) == before
    assert not (tmp_path / "run").exists() and not (tmp_path / "cache").exists()


def test_a_lost_manifest_does_not_let_files_be_relabelled(copy: Path) -> None:
    """Pairs of two hypercubes in one folder would be evaluated on positions that were trained on."""
    before = contents(copy)
    (copy / "collection.json").unlink()
    for pairs in (1, 2):
        with pytest.raises(UserError, match=r"pair-000-open\.h5 was recorded with another seed than 5"):
            collect(copy, pairs=pairs, seed=5, workers=1)
    assert not (copy / "collection.json").exists()
    collect(copy, pairs=2, workers=1)
    assert contents(copy) == before


def test_nor_recordings_that_recover_as_plain_ones(faking: None, tmp_path: Path) -> None:
    """They stand where the plain ones of another seed stand; as references they would show how to be pushed about."""
    collect(tmp_path, pairs=3, workers=1, disturbed=True)
    before = contents(tmp_path)
    (tmp_path / "collection.json").unlink()
    with pytest.raises(UserError, match=r"\.h5 was recorded with .*=.* out of the ordinary; choose another --out"):
        collect(tmp_path, pairs=3, seed=DISTURBED_SEED, workers=1)
    assert not (tmp_path / "collection.json").exists()
    collect(tmp_path, pairs=3, workers=1, disturbed=True)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("content", ["[]", "{}", '{"layout": 1, "seed": 0}', '{"layout": 1, "seed": 0, "pairs": "2"}'])
def test_a_manifest_that_makes_no_sense_is_named(content: str, copy: Path) -> None:
    (copy / "collection.json").write_text(content)
    with pytest.raises(UserError, match=r"collection\.json|choose another --out"):
        collect(copy, pairs=2, workers=1)
    with pytest.raises(UserError):
        len(Store.open(copy))
    assert (copy / "collection.json").read_text() == content
