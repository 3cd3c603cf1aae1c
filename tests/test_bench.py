"""`memcorr bench`: turns, times per item."""

from __future__ import annotations

import time

from memcorr.bench.run import Case, measure


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
