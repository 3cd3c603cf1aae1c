"""Some of the torture in every run of the tests; `make torture` is the rest."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from .counts import summed

ROOT = Path(__file__).parents[2]
SOME = {
    "files": (["--times", "0.05"], "damaged files", 100),
    "frames": (["--times", "0.04"], "wrong frames", 40),
    "commands": (["--times", "0.04"], "bad command lines told in one line", 40),
    "kills": (["--times", "0.02", "--verbs", "train", "report"], "kill -9", 4),
    "writes": (["--times", "0.04", "--verbs", "train"], "refused writes", 2),
    "races": (["--times", "0.02", "--verbs", "train"], "races", 1),
}


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks for processes in /proc")
@pytest.mark.parametrize("part", SOME)
def test_nothing_breaks_it(part: str, tmp_path: Path) -> None:
    options, what, least = SOME[part]
    command = [sys.executable, "-m", "tests.torture", part, *options, "--seed", "1", "--add", str(tmp_path / "counts")]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert summed(tmp_path / "counts")[part][what] >= least
