"""The limit for tests that are not marked `long` (tests/costs.py): slow ones fail, on a busy machine, too."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import costs

TESTS = """
import time
import pytest

def burn(seconds):
    begun = time.process_time()
    while time.process_time() - begun < seconds:
        pass

@pytest.fixture(scope="module")
def shared():
    burn(0.5)

@pytest.fixture
def own():
    burn(0.5)

def test_quick(shared): pass
def test_slow(): burn(0.5)
def test_slow_fixture(own): pass
def test_asleep(): time.sleep(1.5)
@pytest.mark.long
def test_long(): burn(0.5)
"""


def test_a_slow_test_fails_and_a_quick_one_does_not(tmp_path: Path) -> None:
    """With a fiftieth of the limit: a tenth of a second, on a machine up to five times as slow as an idle one."""
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "conftest.py").write_text("from tests.costs import *\n")
    environment = {**os.environ, "MEMCORR_TEST_PATIENCE": "0.02", "PYTHONPATH": str(costs.ROOT)}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-rA",
        "-p",
        "no:cacheprovider",
        "-c",
        "/dev/null",
        "--rootdir",
        ".",
    ]
    said = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True).stdout
    failed = {line.split("::")[1].split()[0] for line in said.splitlines() if line.startswith("FAILED")}
    assert failed == {"test_slow", "test_slow_fixture", "test_asleep"}, said
    assert "more than" in said and "pytest.mark.long" in said


@pytest.mark.parametrize(("now", "before", "seconds"), [(1.0, 1.0, 5.0), (2.4, 1.0, 12.0), (1.0, 2.4, 12.0)])
def test_the_limit_grows_with_what_other_programs_take(
    now: float, before: float, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(costs, "slowness", lambda: now)
    monkeypatch.setattr(costs, "AT_THE_BEGINNING", [before])
    monkeypatch.delenv("MEMCORR_TEST_PATIENCE", raising=False)
    assert costs.allowed() == pytest.approx(seconds)


def test_slowness_is_that_of_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three times the work: a machine three times as slow."""
    once = costs.slowness()
    plain = costs.work
    monkeypatch.setattr(costs, "YARDSTICK", costs.YARDSTICK * once)
    monkeypatch.setattr(costs, "work", lambda: plain() + plain() + plain())
    assert 2.0 < costs.slowness() < 4.5
