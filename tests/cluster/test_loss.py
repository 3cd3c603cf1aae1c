"""A node is lost, a job is killed: rows and weights are those of a local run, none lost, none doubled."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from memcorr.folders import LOCK
from tests.cluster.conftest import PATIENCE, ROOT, Cluster, contents, waited
from tests.test_folders import processes

in_full = pytest.mark.skipif(not os.environ.get("MEMCORR_FULL"), reason="two minutes each: MEMCORR_FULL=1")
VERBS = ["evaluate", pytest.param("sweep", marks=in_full)]
Command = Callable[[str], list[str]]
Alone = Callable[[str], Path]


def training(out: Path) -> int:
    """Runs that are under way."""
    return len(list(out.glob(f"runs/*/{LOCK}")))


@pytest.mark.long
@pytest.mark.parametrize("verb", VERBS)
def test_a_node_killed_on_the_way_changes_nothing(
    verb: str, cluster: Cluster, command: Command, alone: Alone, tmp_path: Path
) -> None:
    wanted, out = contents(alone(verb)), tmp_path / "out"
    cluster.start(1)
    words = [*command(verb), "--out", str(out), "--cluster", cluster.address]
    process = subprocess.Popen(words, env=cluster.environment, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    waited(lambda: process.poll() is not None or (cluster.tasks(1) and (verb == "evaluate" or training(out) == 2)))
    assert process.poll() is None, process.communicate()[1]
    assert cluster.tasks(1)
    cluster.kill({cluster.raylet(1)})
    _, told = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, told
    assert "note: a worker was lost (Ray: " in told
    assert contents(out) == wanted and wanted
    assert not list(out.rglob(LOCK))


@pytest.mark.long
@pytest.mark.parametrize("verb", VERBS)
def test_a_job_killed_on_the_way_changes_nothing(verb: str, command: Command, alone: Alone, tmp_path: Path) -> None:
    pytest.importorskip("submitit")
    wanted, out = contents(alone(verb)), tmp_path / "out"
    words = [*command(verb), "--out", str(out), "--cluster", "local-jobs", "--workers", "2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MEMCORR_JOBS": str(tmp_path)}
    process = subprocess.Popen(words, env=environment, cwd=tmp_path, stderr=subprocess.PIPE, text=True)

    def jobs() -> list[int]:
        lines = processes(f"MEMCORR_JOBS={tmp_path}").items()
        return [number for number, line in lines if "submitit.core._submit" in line]

    waited(lambda: process.poll() is not None or (jobs() and (verb == "evaluate" or training(out) == 2)))
    assert process.poll() is None, process.communicate()[1]
    os.kill(jobs()[-1], signal.SIGKILL)
    _, told = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, told
    assert "note: a worker was lost (job " in told
    assert contents(out) == wanted and wanted
    assert not list(out.rglob(LOCK)) and not jobs()
