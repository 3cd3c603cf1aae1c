"""The examples do what their first lines say, run as a person runs them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from memcorr.demos.store import Store

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(name: str, *arguments: str) -> str:
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.long
def test_the_policy_runs_on_the_packages_own_environment(store: Store) -> None:
    out = run("follow_reference.py", "--show", "close", "--seed", "7", "--references", str(store.root))
    assert "done after" in out.splitlines()[-1] and "points matched" in out


@pytest.mark.long
def test_a_matcher_of_ones_own(store: Store) -> None:
    lines = run("own_matcher.py", "--data", str(store.root), "--every", "60").splitlines()
    assert [line.split()[0] for line in lines] == ["patches", "embedded"]


@pytest.mark.long
def test_an_audit_tells_a_deaf_policy_from_an_attentive_one(store: Store) -> None:
    attentive, deaf = run("own_policy_audit.py", "--data", str(store.root), "--scenes", "5").splitlines()
    assert attentive.startswith("attentive: listens (online: success, correct minus opposite +100")
    assert deaf.startswith("deaf: cannot tell (online: success, correct minus opposite +0")  # five scenes are few
