"""How work is done on this machine: files whole or absent, one process per folder.

Workers import this file, so what is slow to load is imported by the test that needs it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import platform
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from memcorr.errors import UserError
from memcorr.folders import LOCK, TEMPORARY, _lock, claimed, write_text, written_whole
from memcorr.machine import padded

if TYPE_CHECKING:
    from memcorr.demos.store import Store

ROOT = Path(__file__).parents[1]
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks for processes in /proc")


def until(condition: Callable[[], object], seconds: float) -> bool:
    """Whether `condition` came true in time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def processes(mark: str) -> dict[int, str]:
    """Command lines of the processes that were started with `mark` in their environment, orphans among them."""
    found = {}
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark.encode() in (place / "environ").read_bytes():
                found[int(place.name)] = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    return found


@dataclass(frozen=True)
class Raise:
    problem: BaseException

    def __call__(self, *_: object) -> None:
        raise self.problem


# Whole files


@contextlib.contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """A file system that refuses a file's bytes beyond `size`; Python ignores the signal that comes with it."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "episodes.jsonl"
    write_text(path, "old")
    with pytest.raises(KeyboardInterrupt), written_whole(path) as temporary:
        temporary.write_text("half of the n")
        raise KeyboardInterrupt
    assert path.read_text() == "old" and os.listdir(tmp_path) == [path.name]
    write_text(path, "new")
    assert path.read_text() == "new" and os.listdir(tmp_path) == [path.name]


def test_a_refused_write_names_the_file_and_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system's own error of a write says neither where nor what; some disks refuse only when they are asked
    to make sure."""
    path = tmp_path / "model"
    with files_up_to(1000), pytest.raises(OSError, match="disk") as refused:
        write_text(path, "x" * 2000)
    assert refused.value.filename == str(path) and "File too large" in str(refused.value)
    monkeypatch.setattr(os, "fsync", Raise(OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(OSError, match=r"No space left on device.*disk") as refused:
        write_text(path, "x")
    assert refused.value.filename == str(path) and refused.value.errno == errno.ENOSPC
    assert not os.listdir(tmp_path)


def test_a_link_at_the_temporary_name_is_not_written_through(tmp_path: Path) -> None:
    """Who can guess the name could otherwise have any file of ours overwritten."""
    victim, path = tmp_path / "victim", tmp_path / "model"
    victim.write_text("precious")
    (tmp_path / f".{path.name}.{platform.node()}-{os.getpid()}{TEMPORARY}").symlink_to(victim)
    write_text(path, "weights")
    assert victim.read_text() == "precious"
    assert path.read_text() == "weights" and not path.is_symlink()
    assert sorted(os.listdir(tmp_path)) == ["model", "victim"]


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640)])
def test_files_get_the_users_umask(umask: int, mode: int, tmp_path: Path) -> None:
    """Colleagues can read what the user lets them read, whoever wrote the file: safetensors makes its own, 0600."""
    from safetensors.numpy import save_file

    before = os.umask(umask)
    try:
        write_text(tmp_path / "text", "x")
        with written_whole(tmp_path / "tensors") as temporary:
            save_file({"x": np.zeros(3)}, temporary)
        with claimed(tmp_path):
            assert (tmp_path / LOCK).stat().st_mode & 0o777 == mode
    finally:
        os.umask(before)
    assert {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {"text": mode, "tensors": mode}


# One process per folder


@contextlib.contextmanager
def taken(folder: Path) -> Iterator[None]:
    """A folder that somebody else writes to."""
    lock = _lock(folder)
    try:
        yield
    finally:
        (folder / LOCK).unlink()
        os.close(lock)


def test_only_what_killed_processes_left_is_removed(tmp_path: Path) -> None:
    """Also what a worker leaves that is ended while we hold the folder."""
    (tmp_path / "stage-one").mkdir()
    names = ("notes.tmp", "lock", ".hidden", "a.memcorr-tmp.txt", "stage-one/x.tmp", "stage-one/lock")
    for name in names:
        (tmp_path / name).write_text(name)
    left = [tmp_path / f".model.1234{TEMPORARY}", tmp_path / f"stage-one/.model.1234{TEMPORARY}"]
    for file in left:
        file.write_text("half")
    with claimed(tmp_path, "stage-one"):
        assert not any(file.exists() for file in left)
        for file in left:
            file.write_text("half")
    assert {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*")} == {*names, "stage-one"}
    assert all((tmp_path / name).read_text() == name for name in names)


def test_the_lock_is_gone_after_a_clean_end_and_after_an_error(tmp_path: Path) -> None:
    for _ in range(2):
        with claimed(tmp_path / "run") as folder:
            assert os.listdir(folder) == [LOCK]
        with pytest.raises(KeyboardInterrupt), claimed(tmp_path / "run"):
            raise KeyboardInterrupt
        assert not os.listdir(tmp_path / "run")


VERBS = {
    "collect": ["collect", "--pairs", "1"],
    "match": ["match", "--data", "STORE", "--pairs", "2", "--rows", "8", "--matcher", "flow"],
    "train": ["train", "debug", "--data", "STORE"],
    "evaluate": ["evaluate", "expert"],
    "report": ["report", str(ROOT / "results/zeros")],
    "demo": ["demo"],
    "matcher train": ["matcher", "train"],
    "matcher evaluate": ["matcher", "evaluate", "validation", "--matcher", "flow"],
}


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_refuses_a_folder_in_use(
    verb: str, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from memcorr.cli import main

    out = tmp_path / "out"
    arguments = [str(store.root) if word == "STORE" else word for word in VERBS[verb]]
    monkeypatch.setattr(sys, "argv", ["memcorr", *arguments, "--out", str(out)])
    with taken(out):
        with pytest.raises(SystemExit) as stop:
            main()
        assert stop.value.code == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line == f"memcorr: {out} is being written by another memcorr; wait, or choose another --out"
        assert os.listdir(out) == [LOCK]


def test_a_folder_is_kept_until_its_last_claim_ends_and_nobody_else_gets_in(tmp_path: Path) -> None:
    """A verb calls other verbs on its folder; whoever came in between would clear away what it is just writing."""
    half = tmp_path / f".video.1{TEMPORARY}"
    with claimed(tmp_path):
        half.write_text("on its way")
        with claimed(tmp_path):
            pass
        assert half.exists() and (tmp_path / LOCK).exists()
        refused: list[BaseException] = []

        def another() -> None:
            try:
                with claimed(tmp_path):
                    pass
            except UserError as problem:
                refused.append(problem)

        thread = threading.Thread(target=another)
        thread.start()
        thread.join()
        assert len(refused) == 1
        child = os.fork()
        if not child:  # has inherited the open lock, but not the claim
            another()
            os._exit(len(refused))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
    assert not os.listdir(tmp_path)


def test_after_kill_9_the_next_process_gets_in(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path; from memcorr.folders import claimed\n"
        "with claimed(Path(sys.argv[1])): os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)]).returncode == -signal.SIGKILL
    assert os.listdir(tmp_path) == [LOCK]
    with claimed(tmp_path):
        pass
    assert not os.listdir(tmp_path)


def test_a_lock_that_is_a_link_is_refused_in_one_line(tmp_path: Path) -> None:
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    run.mkdir()
    (run / LOCK).symlink_to(elsewhere)
    with pytest.raises(UserError, match=r"^cannot write to folder .*run .*choose another --out$"), claimed(run):
        pass
    assert (run / LOCK).is_symlink() and not elsewhere.exists()


def test_a_folder_that_may_not_be_written_is_refused_in_one_line() -> None:
    folder = Path(tempfile.mkdtemp(prefix="memcorr-"))  # not below pytest's, which nobody else may enter
    folder.chmod(0o555)
    root = os.geteuid() == 0
    try:
        if root:  # may write anywhere: be nobody for a moment
            os.seteuid(65534)
        for place in (folder, folder / "new"):
            with pytest.raises(UserError, match=r"cannot write to folder .*Permission denied.* --out$"), claimed(place):
                pass
    finally:
        if root:
            os.seteuid(0)
        folder.rmdir()


@pytest.mark.parametrize("moment", [1, 2])
def test_a_lock_that_its_owner_removes_meanwhile_is_made_anew(
    moment: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """We open the file, its owner removes it and ends, we lock it: now nobody else can see our lock. The owner
    may be at it whenever we look."""
    look, looks = os.stat, 0

    def stat(path: Any, *args: Any, **kwargs: Any) -> os.stat_result:
        nonlocal looks
        if str(path).endswith(LOCK):
            looks += 1
            if looks == moment:
                os.unlink(path)
        return look(path, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", stat)
        with claimed(tmp_path), pytest.raises(UserError, match="another memcorr"), taken(tmp_path):
            pass


RACE = """
import os, sys, time
from pathlib import Path
from memcorr.errors import UserError
from memcorr.folders import claimed
folder = Path(sys.argv[1])
for _ in range(12):
    if os.fork() == 0:
        end = time.monotonic() + 1
        while time.monotonic() < end:
            try:
                with claimed(folder):
                    os.close(os.open(folder / "alone", os.O_CREAT | os.O_EXCL))
                    os.unlink(folder / "alone")
            except UserError as problem:
                if "another memcorr" not in str(problem):
                    raise
        os._exit(0)
sys.exit(any(os.wait()[1] for _ in range(12)))
"""


def test_twelve_processes_are_never_in_one_folder_together(tmp_path: Path) -> None:
    result = subprocess.run([sys.executable, "-c", RACE, str(tmp_path)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert not os.listdir(tmp_path)


# Loaded once, then twelve processes that start together: each is a `memcorr match`.
MATCH = """
import os, sys
from pathlib import Path
from memcorr.correspondence.cache import build_cache
from memcorr.demos.store import Store
from memcorr.errors import UserError
store, out = Store.open(sys.argv[1]), Path(sys.argv[2])
gate, opener = os.pipe()
for _ in range(12):
    if os.fork() == 0:
        os.close(opener)
        os.read(gate, 1)
        try:
            build_cache(store, out, "flow", pairs=2, rows=8, workers=1)
        except UserError as problem:
            os.write(2, f"{problem}\\n".encode())
            os._exit(2)
        os._exit(0)
os.close(opener)
print(sorted(os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(12)))
"""


@pytest.mark.parametrize("verb", ["collect", "match", "practice"])
def test_the_workers_are_ended_before_the_folder_is_free(
    verb: str, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C may also come between two results: the next process must not meet workers of the last one."""
    from memcorr.correspondence import cache
    from memcorr.correspondence.embedded import practice
    from memcorr.demos import collect

    ended: list[bool] = []

    def still_working(work: object, jobs: list[object], workers: int) -> Iterator[None]:
        try:
            for _ in jobs:
                yield
        finally:
            ended.append((tmp_path / LOCK).exists())

    def interrupted(results: Iterator[None], *_: object, **__: object) -> Iterator[None]:
        yield next(results)
        raise KeyboardInterrupt

    verbs: dict[str, tuple[object, Callable[[], object]]] = {
        "collect": (collect, lambda: collect.collect(tmp_path, pairs=2)),
        "match": (cache, lambda: cache.build_cache(store, tmp_path, "flow", pairs=2, rows=8)),
        "practice": (practice, lambda: practice.render_practice(tmp_path, {"a": 1, "b": 1}, 0, 2)),
    }
    module, call = verbs[verb]
    monkeypatch.setattr(practice, "robot_postures", lambda count, seed: None)
    monkeypatch.setattr(module, "spread", still_working)
    monkeypatch.setattr(module, "tqdm", interrupted)
    with pytest.raises(KeyboardInterrupt):
        call()
    assert ended == [True]


def test_what_a_sweep_puts_beside_its_rows_it_puts_there_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from memcorr.evaluation import sweep
    from memcorr.training.experiments import EXPERIMENTS

    entry = sweep.Entry(EXPERIMENTS["debug"], 42, (sweep.Evaluation(),))
    run, rows = (tmp_path / name / entry.name for name in ("runs", "results"))
    for folder in (run, rows):
        folder.mkdir(parents=True)
    for name in (sweep.CONFIG, sweep.METRICS):
        (run / name).write_text(name)
    monkeypatch.setattr(sweep, "spread", lambda work, jobs, workers: (entry for entry, _ in jobs))
    monkeypatch.setattr(sweep, "evaluate_once", lambda *_: None)
    with taken(rows), pytest.raises(UserError, match="another memcorr"):
        list(sweep.sweep([entry], tmp_path, tmp_path))
    assert list(sweep.sweep([entry], tmp_path, tmp_path)) == [entry]
    assert {path.name for path in rows.iterdir()} == {sweep.CONFIG, sweep.METRICS}


@pytest.mark.long
def test_many_simultaneous_matches_leave_one_whole_cache(store: Store, tmp_path: Path) -> None:
    from memcorr.correspondence.cache import build_cache, read_cache

    build_cache(store, tmp_path / "alone", "flow", pairs=2, rows=8, workers=1)
    command = [sys.executable, "-c", MATCH, str(store.root), str(tmp_path / "cache")]
    result = subprocess.run(command, capture_output=True, text=True)
    codes = json.loads(result.stdout)
    assert codes[0] == 0 and set(codes) <= {0, 2}, result.stderr
    assert result.stderr.count("is being written by another memcorr") == codes.count(2)
    files = {path.name: path.read_bytes() for path in (tmp_path / "cache").iterdir()}
    assert files == {path.name: path.read_bytes() for path in (tmp_path / "alone").iterdir()}
    assert len(read_cache(tmp_path / "cache", store).anchor) == 8


def test_a_cache_that_contradicts_its_own_numbers_is_refused(store: Store, tmp_path: Path) -> None:
    """Rows of other demonstrations than `cache.json` says would be trained on as if they were these."""
    from safetensors.numpy import load_file, save_file

    from memcorr.correspondence.cache import build_cache, read_cache
    from memcorr.files import write_json

    out = tmp_path / "cache"
    build_cache(store, out, "flow", pairs=2, rows=8, workers=1)
    manifest, arrays = json.loads((out / "cache.json").read_text()), load_file(out / "cache.safetensors")
    for rows in (7, 9, "8", None):
        write_json(out / "cache.json", manifest | {"rows": rows})
        with pytest.raises(UserError, match=r"the rows that its cache\.json speaks of|not a description of a cache"):
            read_cache(out, store)
    write_json(out / "cache.json", manifest)
    for name in arrays:
        save_file({**arrays, name: arrays[name][:7].copy()}, out / "cache.safetensors")
        with pytest.raises(UserError, match=r"cache\.safetensors is damaged \(\w+ is \w+ \("):
            read_cache(out, store)
        save_file({k: v for k, v in arrays.items() if k != name}, out / "cache.safetensors")
        with pytest.raises(UserError, match=rf"cache\.safetensors is damaged \({name} is missing"):
            read_cache(out, store)
    save_file({k: v[:7].copy() for k, v in arrays.items()}, out / "cache.safetensors")
    with pytest.raises(UserError, match="does not hold the rows"):
        read_cache(out, store)
    save_file(arrays, out / "cache.safetensors")
    assert len(read_cache(out, store).anchor) == 8


@pytest.mark.parametrize("part", ["cache.safetensors", "shard-000.safetensors"])
def test_a_cache_without_its_cache_json_is_not_given_another(part: str, store: Store, tmp_path: Path) -> None:
    """Matches of one matcher would be called another's."""
    from memcorr.correspondence.cache import build_cache

    (tmp_path / part).write_bytes(b"made with who knows what")
    with pytest.raises(UserError, match=r"without its cache\.json; choose another --out"):
        build_cache(store, tmp_path, "flow", pairs=2, rows=8, workers=1)
    assert os.listdir(tmp_path) == [part]


@pytest.mark.parametrize(
    ("number", "code", "word"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")]
)
def test_training_stops_and_saves_and_says_which_signal_it_heard(
    number: int,
    code: int,
    word: str,
    store: Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Whoever sent it (a job scheduler, a shell) tells the two apart by the exit code."""
    from memcorr.cli import main
    from memcorr.policy.checkpoint import read_tensors
    from memcorr.training.loop import Run

    advance = Run.advance

    def disturbed(run: Run) -> None:
        if run.update == 2:
            os.kill(os.getpid(), number)
        advance(run)

    monkeypatch.setattr(Run, "advance", disturbed)
    monkeypatch.setattr(
        sys, "argv", ["memcorr", "train", "debug", "--data", str(store.root), "--out", str(tmp_path / "run")]
    )
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit) as stop:
            main()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert stop.value.code == code
    assert capsys.readouterr().err.splitlines()[-1] == f"memcorr: {word}; the same command continues"
    assert read_tensors(tmp_path / "run/state.safetensors")[1]["update"] == "3"


FULL = {
    "match": (VERBS["match"] + ["--workers", "1"], "cache.safetensors"),
    "train": (VERBS["train"] + ["--set", "batch=8", "updates=[2,0]"], "state.safetensors"),
}


@pytest.mark.parametrize("verb", FULL)
def test_a_full_disk_is_one_line_and_the_same_command_then_makes_the_same(
    verb: str, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from memcorr.cli import main

    line, file = FULL[verb]
    arguments = [str(store.root) if word == "STORE" else word for word in line]

    def made(name: str) -> Path:
        monkeypatch.setattr(sys, "argv", ["memcorr", *arguments, "--out", str(tmp_path / name)])
        main()
        return tmp_path / name / file

    whole = made("whole").read_bytes()
    for size in (300, len(whole) // 2):
        capsys.readouterr()
        with files_up_to(size), pytest.raises(SystemExit) as stop:
            made("full")
        lines = [x for x in capsys.readouterr().err.replace("\r", "\n").splitlines() if x.strip() and "%|" not in x]
        assert stop.value.code == 2 and len(lines) == 1 and "is the disk full?" in lines[0], lines
        assert not (tmp_path / "full" / file).exists() and not list((tmp_path / "full").rglob(f".*{TEMPORARY}"))
    assert made("full").read_bytes() == whole


# Batches


def test_padded_batches_have_one_shape_and_lose_nothing() -> None:
    for count in range(41):
        for size in range(1, 10):
            batches = list(padded(count, size))
            assert all(batch.shape == (size,) for batch in batches)
            indices = [int(i) for batch in batches for i in batch]
            assert indices[:count] == list(range(count)), "in order, each once"
            assert len(indices) - count < size and set(indices[count:]) <= {count - 1}


# Practice scenes: several renderers in one process, one after the other


PRACTICE = """
import sys
from pathlib import Path
from memcorr.correspondence.embedded import practice

if __name__ == "__main__":
    few = practice.robot_postures(3, 0)
    practice.robot_postures = lambda count, seed: few
    for workers, scenes in enumerate((("sawyer_drawer", "sawyer_faucet"), ("sawyer_faucet", "sawyer_drawer")), 1):
        practice.render_practice(Path(sys.argv[1]) / str(workers), dict.fromkeys(scenes, 1), 0, workers)
"""


@pytest.mark.long
def test_practice_scenes_are_the_same_after_another_one_in_the_same_process(tmp_path: Path) -> None:
    """One worker frees a scene's GL context and makes the next. Two have a process for each scene, or, if one of
    them comes late, the other order."""
    (tmp_path / "render.py").write_text(PRACTICE)
    subprocess.run([sys.executable, str(tmp_path / "render.py"), str(tmp_path)], check=True, capture_output=True)
    one, two = ({p.name: p.read_bytes() for p in (tmp_path / name).iterdir()} for name in ("1", "2"))
    assert len(one) == 2 and all(len(content) > 100_000 for content in one.values())
    assert one == two
