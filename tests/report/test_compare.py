"""`memcorr compare`: the report's paired intervals, on anybody's rows, and how many more rollouts would tell."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from memcorr.cli import main
from memcorr.errors import UserError
from memcorr.evaluation.episodes import find_episodes
from memcorr.report.compare import compare, lacking
from memcorr.report.lookup import Lookup
from memcorr.report.statistics import bootstrap_interval, difference
from memcorr.report.tables import all_tables

RESULTS = Path(__file__).parents[2] / "results"
PLAIN = ("stage=final", "matcher=embedded", "lifting=paper", "pairing=kept", "phase_offset=0", "phase_speed=1.0")
LITERAL = ("reference=correct", *PLAIN)
PAIRS = {
    "memcorr-literal − Visual Transformer, boundary extrapolation": ("visual-transformer-42", "boundary", LITERAL, ()),
    "memcorr-literal − Visual Transformer, combined shift": ("visual-transformer-42", "combined", LITERAL, ()),
    "memcorr-literal − Visual U-Net, boundary extrapolation": ("visual-unet-42", "boundary", LITERAL, ()),
    "Correct − opposite reference, final memcorr-literal": (
        "memcorr-literal-42",
        "boundary",
        LITERAL,
        ("reference=opposite", *PLAIN),
    ),
}


@pytest.mark.parametrize("label", PAIRS)
def test_committed_runs_differ_as_in_the_report(label: str) -> None:
    other, condition, of_a, of_b = PAIRS[label]
    places = list(dict.fromkeys((RESULTS / "memcorr-literal-42", RESULTS / other)))
    tables, _ = all_tables(Lookup(find_episodes(places)))
    lines = "\n".join(table.markdown() for table in tables).splitlines()
    (line,) = (line for line in lines if line.startswith(f"| {label} |"))
    points, low, high = map(float, re.findall(r"([+-]?\d+\.\d+)", line.split("|")[3]))
    n = int(line.split("|")[5])
    (found,) = compare(RESULTS / "memcorr-literal-42", RESULTS / other, [f"condition={condition}"], of_a, of_b)
    d = found.difference
    assert (round(d.points, 2), round(d.low, 2), round(d.high, 2), d.n) == (points, low, high, n)
    assert found.verdict == ("better" if low > 0 else "worse")


def test_policies_that_never_fail_are_not_told_apart_but_large_differences_are_ruled_out() -> None:
    """Their training seeds differ (none, and 42): scenes and tasks are paired all the same."""
    boundary, *_ = compare(
        RESULTS / "memcorr-42",
        RESULTS / "servo",
        of_a=["matcher=embedded", "reference=correct", "phase_offset=0", "phase_speed=1.0"],
    )
    assert boundary.difference.n == 100 and boundary.verdict == "cannot tell" and boundary.ruled_out
    assert boundary.difference.low == pytest.approx(-7.11, abs=0.01)
    assert "10 points or more are ruled out" in boundary.line()


def lerobots(path: Path, successes: dict[str, list[bool]]) -> Path:
    """As lerobot-eval 0.6 writes it; what is not needed here is left in."""
    per_task = [
        {"task_group": "door", "task_id": n, "metrics": {"sum_rewards": [0.0], "successes": flags, "video_paths": []}}
        for n, flags in enumerate(successes.values())
    ]
    path.write_text(json.dumps({"per_task": per_task, "per_group": {}, "overall": {"pc_success": 1.0}}))
    return path


def test_lerobots_rows_are_compared_episode_by_episode(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    b = {task: [bool(x) for x in rng.random(40) < 0.5] for task in ("open", "close")}
    a = {task: [flag or n % 4 == 0 for n, flag in enumerate(flags)] for task, flags in b.items()}
    first, second = lerobots(tmp_path / "a.json", a), tmp_path / "b"
    second.mkdir()
    lerobots(second / "eval_info.json", b)
    (found,) = compare(first, second)
    gained = [100.0 * (x - y) for task in a for x, y in zip(a[task], b[task], strict=True)]
    assert (found.place, found.verdict, found.difference.n) == ("door", "better", 80)
    assert found.difference.points == pytest.approx(np.mean(gained))
    assert (found.difference.low, found.difference.high) == bootstrap_interval(np.array(gained))
    (back,) = compare(second, first)
    assert back.verdict == "worse" and back.difference.points == -found.difference.points


def test_lerobots_rows_of_one_task_are_read_too(tmp_path: Path) -> None:
    for name, flags in (("a", [True] * 8), ("b", [True] * 8 + [False])):
        rows = [{"episode_ix": n, "success": flag, "seed": n} for n, flag in enumerate(flags)]
        (tmp_path / f"{name}.json").write_text(json.dumps({"per_episode": rows, "aggregated": {}}))
    (found,) = compare(tmp_path / "a.json", tmp_path / "b.json")
    assert (found.difference.n, found.difference.unmatched, found.verdict) == (8, 1, "cannot tell")


def test_as_many_more_rollouts_as_it_says_do_tell() -> None:
    """Two policies that truly differ by 20 points; from 30 scenes it says how many would tell, and with so many the
    interval leaves out zero about four times in five."""
    rng = np.random.default_rng(3)

    def rolled(scenes: int) -> dict[str, dict[tuple, float]]:
        hard = rng.random(scenes)
        return {
            name: {((n,), task): float(rng.random() < p - 0.3 * hard[n]) for n in range(scenes) for task in ("x", "y")}
            for name, p in (("a", 0.85), ("b", 0.65))
        }

    named = []
    for _ in range(50):
        first = difference(**dict(zip(("ours", "theirs"), rolled(30).values(), strict=True)))
        assert first is not None
        named.append(first.n + lacking(first, 20.0))
    scenes = round(float(np.median(named)) / 2)
    told = 0
    for _ in range(200):
        sides = rolled(scenes)
        means = [np.mean([sides["a"][(n,), t] - sides["b"][(n,), t] for t in ("x", "y")]) for n in range(scenes)]
        told += bootstrap_interval(np.array(means), resamples=1000)[0] > 0
    assert 0.7 < told / 200 < 0.92, (scenes, told)


def test_more_than_one_kind_of_rollouts_is_asked_about() -> None:
    with pytest.raises(UserError, match=r"--of-b: .*reference=correct\|empty\|opposite, matcher="):
        compare(RESULTS / "servo", RESULTS / "memcorr-literal-42")
    with pytest.raises(UserError, match="no rollout of the same scene"):
        compare(RESULTS / "servo", RESULTS / "replay", of_a=["task=open"], of_b=["task=close"])
    with pytest.raises(UserError, match="has close, open"):
        compare(RESULTS / "servo", RESULTS / "replay", ["task=fly"])


def test_one_line_for_each_place_and_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(
        sys, "argv", ["memcorr", "compare", *(str(RESULTS / name) for name in ("servo", "zeros")), "--json"]
    )
    main()
    found = json.loads(capsys.readouterr().out)
    assert [one["place"] for one in found] == [f"door, {c}" for c in ("boundary", "extreme", "camera", "combined")] + [
        "all"
    ]
    assert all(one["verdict"] == "better" for one in found)
