"""The pool elsewhere keeps the promises of the pool here; submitit's jobs stand for every cluster.

Jobs import this file, so what is slow to load is imported by the test that needs it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from memcorr.cluster import pool
from memcorr.cluster.pool import LOCAL_JOBS, find_workers
from memcorr.errors import UserError
from memcorr.workers import Workers, spread
from tests.test_folders import processes

if TYPE_CHECKING:
    from memcorr.demos.store import Store

pytest.importorskip("submitit")
ROOT = Path(__file__).parents[2]


def squares(jobs: Iterator[int]) -> Iterator[tuple[int, int, str]]:
    for job in jobs:
        yield job, job**2, os.getcwd()


def refusing(jobs: Iterator[int]) -> Iterator[int]:
    raise UserError(f"no {next(jobs)}")
    yield


def crashing(jobs: Iterator[int]) -> Iterator[float]:
    for job in jobs:
        yield 1 / job


def dying(jobs: Iterator[int]) -> Iterator[int]:
    os.kill(os.getpid(), signal.SIGKILL)
    yield from jobs


def sleeping(jobs: Iterator[int]) -> Iterator[int]:
    for job in jobs:
        yield job
        time.sleep(600 * job)


@pytest.fixture
def jobs_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workers:
    """Two jobs at a time, given from a folder of their own."""
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{Path(__file__).parent}")
    monkeypatch.setenv("MEMCORR_JOBS", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return find_workers(LOCAL_JOBS, 2)


@pytest.mark.long
def test_results_come_in_units_and_nothing_is_left(jobs_of_ours: Workers, tmp_path: Path) -> None:
    assert sorted(spread(squares, range(5), jobs_of_ours, 2)) == [(n, n * n, str(tmp_path)) for n in range(5)]
    assert list(spread(squares, [], jobs_of_ours)) == []
    assert not list(tmp_path.rglob("runs/jobs"))


@pytest.mark.long
def test_errors_are_those_of_a_local_run(jobs_of_ours: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"^no 3$"):
        list(spread(refusing, [3], jobs_of_ours))
    with pytest.raises(RuntimeError, match=r"(?s)in a worker process:.*crashing.*ZeroDivisionError"):
        list(spread(crashing, [0], jobs_of_ours))
    monkeypatch.setattr(pool, "TRIES", 2)
    with pytest.raises(UserError, match=r"^the same work was lost 2 times \(job \d+.*the same command continues$"):
        list(spread(dying, [0], jobs_of_ours))


@pytest.mark.long
def test_another_version_elsewhere_is_refused(jobs_of_ours: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = pool.program()
    monkeypatch.setattr(pool, "program", lambda: {**ours, "torch": "1.0"})
    with pytest.raises(UserError, match=r"has torch .* instead of 1\.0: results would differ; install the same there"):
        list(spread(squares, [1], jobs_of_ours))


@pytest.mark.long
def test_whoever_stops_listening_leaves_no_job_behind(jobs_of_ours: Workers, tmp_path: Path) -> None:
    results = spread(sleeping, [0, 1], jobs_of_ours)
    assert next(results) == 0
    results.close()
    lines = processes(f"MEMCORR_JOBS={tmp_path}").values()
    assert not [line for line in lines if "submitit" in line]


@pytest.mark.long
def test_demonstrations_and_matches_are_the_same_bytes(jobs_of_ours: Workers, store: Store, tmp_path: Path) -> None:
    from memcorr.correspondence.cache import build_cache
    from memcorr.demos.collect import collect

    collect("demos", pairs=1, workers=jobs_of_ours)
    for file in Path("demos").glob("*.h5"):
        assert file.read_bytes() == (store.root / file.name).read_bytes()
    build_cache(store, Path("here"), "flow", pairs=2, rows=8, workers=1)
    build_cache(store, Path("there"), "flow", pairs=2, rows=8, workers=jobs_of_ours)
    for file in Path("here").iterdir():
        assert file.read_bytes() == Path("there", file.name).read_bytes()


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("nonsense", "give HOST:PORT of a Ray cluster, slurm or local-jobs"),
        ("127.0.0.1:1", "nothing answers there"),
        ("slurm", "there is no sbatch here"),
    ],
)
def test_a_cluster_that_is_not_there_is_one_line(address: str, words: str, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": str(tmp_path)}
    command = [sys.executable, "-m", "memcorr", "collect", "--pairs", "1", "--cluster", address]
    result = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 2 and result.stderr.count("\n") == 1 and words in result.stderr, result.stderr
    assert not list(tmp_path.iterdir())
