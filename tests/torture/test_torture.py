"""Some of the torture in every run of the tests; `make torture` is the rest."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_files import damaged, told_or_harmless
from tests.torture.counts import summed
from tests.torture.kinds import real_kinds

ROOT = Path(__file__).parents[2]
TIMES = 6
SOME = {
    "files": (["--times", "0.05"], "damaged files", 100),
    "frames": (["--times", "0.04"], "wrong frames", 40),
    "commands": (["--times", "0.04"], "bad command lines told in one line", 40),
    "kills": (["--times", "0.02", "--verbs", "train", "report"], "kill -9", 4),
    "writes": (["--times", "0.04", "--verbs", "train"], "refused writes", 2),
    "races": (["--times", "0.02", "--verbs", "train"], "races", 1),
}


def test_a_flipped_bit_is_noticed_in_files_of_every_kind(tmp_path: Path) -> None:
    """Once a model, a state of training, a matcher and most caches were believed with one."""
    rng, refused = random.Random(0), 0
    for number, kind in enumerate(kinds := real_kinds(tmp_path)):
        path = tmp_path / f"kind-{number}" / kind.name
        path.parent.mkdir(parents=True)
        kind.write(path)
        good, undamaged = path.read_bytes(), kind.read(path)
        for _ in range(TIMES):
            content = damaged(good, 0, rng.random(), rng.randrange(8))
            refused += told_or_harmless(kind, path, content, undamaged) == "refused"
    assert refused > 0.9 * TIMES * len(kinds), refused


@pytest.mark.long
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks for processes in /proc")
@pytest.mark.parametrize("part", SOME)
def test_nothing_breaks_it(part: str, tmp_path: Path) -> None:
    options, what, least = SOME[part]
    command = [sys.executable, "-m", "tests.torture", part, *options, "--seed", "1", "--add", str(tmp_path / "counts")]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert summed(tmp_path / "counts")[part][what] >= least
