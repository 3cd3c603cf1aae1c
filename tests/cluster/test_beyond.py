"""docs/cluster.md: all of its lines, as they stand."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from memcorr.evaluation.episodes import EPISODES, read_episodes
from tests.cluster.conftest import BIN, ROOT, Cluster


@pytest.mark.long
def test_the_lines_of_the_page_run(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    (block,) = re.findall(r"```bash\n(.*?)```", (ROOT / "docs/cluster.md").read_text(), re.DOTALL)
    assert block.count("\n") == 10
    cluster = Cluster(Path(f"/tmp/memcorr-readme-{os.getpid()}"))
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("RAY_")},
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "MEMCORR_RAYLETS": str(cluster.folder),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    try:
        script = f"set -eu\n{block}"
        result = subprocess.run(["bash", "-c", script], env=environment, cwd=tmp_path, capture_output=True, text=True)
        if "timed out during startup" in result.stderr:  # Ray's agents have but 15 s
            pytest.skip("this machine is too busy to start Ray")
        assert result.returncode == 0, result.stdout + result.stderr
    finally:
        cluster.end()
    places = {path.parent.name: len(read_episodes(path)) for path in tmp_path.rglob(EPISODES)}
    assert places == {"debug-1": 2, "debug-2": 2, "debug-3": 2, "more": 2}
    assert (tmp_path / "runs/debug-4/stage-one/model.safetensors").exists()
    assert (tmp_path / "report/REPORT.md").exists()
