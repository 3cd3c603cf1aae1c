"""`memcorr bench`: turns, times per item."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from memcorr.bench import readers
from memcorr.bench.rollouts import replan
from memcorr.bench.run import Case, find_case, measure, run
from memcorr.errors import UserError


def test_ours_and_the_baseline_take_turns_and_times_are_per_item() -> None:
    turns = []

    def ours() -> None:
        turns.append("ours")
        time.sleep(0.04)

    def baseline() -> None:
        turns.append("baseline")
        time.sleep(0.04)

    result = measure("naps", Case(ours, baseline, "longer naps", rounds=3, ours_items=4, baseline_items=2))
    assert turns == ["ours", "baseline"] * 4  # the first turn warms up
    assert 10 <= result.ours_ms < 20 <= result.baseline_ms < 40  # naps may last longer, never shorter
    assert result.ratio == result.baseline_ms / result.ours_ms


@pytest.mark.long
def test_a_decision_is_the_plain_ways_for_any_policy_that_is_named() -> None:
    case = replan(str(Path(__file__).parents[1] / "results/memcorr-literal-42/stage-one"))  # compares the plans itself
    result = measure("replan", Case(case.ours, case.baseline, case.baseline_name, rounds=1))
    assert "40 evaluations of the policy's" in result.baseline and result.ours_ms > 0
    assert case.note is not None and "matching and lifting" in case.note(result)
    with pytest.raises(UserError, match="holds no policy"):
        run(["replan:nowhere"])
    for wrong in ("step:shipped", "sleep"):
        with pytest.raises(UserError, match=f"unknown benchmark '{wrong}'"):
            run([wrong])


@pytest.mark.parametrize("name", ["load-policy", "load-cache", "load-episodes"])
def test_readers_are_measured_on_what_they_accept(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache was once one that its reader had come to refuse."""
    monkeypatch.setattr(readers, "ROWS", 300)
    case = find_case(name)
    case.ours()
    case.baseline()
