"""`memcorr reproduce --tier smoke`: every verb, end to end, and again without repeating anything."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from memcorr.evaluation.episodes import EPISODES, read_episodes
from memcorr.evaluation.evaluate import Subject, normalised
from memcorr.evaluation.intervention import Intervention
from memcorr.evaluation.rounds import Round
from memcorr.reproduce import TIERS, Generalist, cost_of, generalise, matched_by, plan_text, reproduce
from memcorr.show.story import watch
from memcorr.show.video import write_video
from memcorr.training.experiments import EXPERIMENTS


@pytest.mark.long
def test_smoke_runs_every_verb_and_resumes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    page = reproduce("smoke", tmp_path, matcher="flow", workers=1)
    first = page.read_text()
    assert "about 0.0 hours" in caplog.messages[0]
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "smoke").rglob("*.safetensors")}
    episodes = tmp_path / "smoke" / "results" / "memcorr-42" / EPISODES
    rows = read_episodes(episodes)
    assert {row.stage for row in rows} == {"final", "stage-one"}
    assert page.read_text() == first and reproduce("smoke", tmp_path, matcher="flow", workers=1) == page
    assert page.read_text() == first and read_episodes(episodes) == rows
    assert all(path.stat().st_mtime_ns == time for path, time in files.items())
    (row,) = [
        row
        for row in read_episodes(tmp_path / "smoke/results/expert" / EPISODES)
        if row.scene == 0 and (row.condition, row.task) == ("combined", "close")
    ]
    video = write_video(watch("expert", Intervention(), row, tmp_path / "smoke/demos"), tmp_path)
    assert video.read_bytes()[4:8] == b"ftyp" and video.stat().st_size > 20_000


def test_the_cost_of_the_whole_paper_counts_a_shared_stage_one_once() -> None:
    entries = TIERS["full"].entries()
    costs = {e.name: cost_of(e, entries) for e in entries}
    assert (costs["memcorr-literal-43"].updates, costs["memcorr-43"].updates) == (30_000, 10_000)
    assert (costs["standard-literal-44"].updates, costs["visual-unet-42"].updates) == (20_000, 30_000)
    assert "memcorr-cosine-43" not in costs and costs["memcorr-cosine-42"].updates == 20_000
    assert costs["visual-transformer-42"].rollouts == 150 and costs["standard-literal-42"].rollouts == 300
    printed = plan_text("full", 2)
    assert printed.count("\n") == len(entries) + 2 and f"{sum(c.updates for c in costs.values()):,}" in printed


@pytest.mark.parametrize("tier", TIERS)
def test_every_evaluation_of_a_tier_makes_sense(tier: str) -> None:
    plan = TIERS[tier]  # type: ignore[index]
    for name, evaluations in plan.evaluations.items():
        subject = Subject("x", name, 42, "final", "", plan.recipe(name))
        for evaluation in evaluations:
            normalised(subject, matched_by(evaluation, "embedded").shown)


@pytest.mark.long
def test_the_policy_for_many_objects_is_one_command(tmp_path: Path) -> None:
    """Recordings, caches, training and contest of two worlds; fresh weights stand beside what was trained."""
    recipe = replace(
        EXPERIMENTS["memcorr-many"], worlds=("door", "drawer"), train_pairs=2, batch=8, updates=(4, 2), noises=1
    )
    rounds = tuple(Round("", ("drawer",), range(1), swap=swap) for swap in (0, 48))
    plan = Generalist(recipe, recovering=2, rows=8, beside=("servo", "expert"), rounds=rounds)
    page = generalise(plan, tmp_path, "flow", workers=2, threads=1)
    rows = {
        name: read_episodes(tmp_path / "results" / name / EPISODES) for name in ("servo", "expert", "fresh-weights")
    }
    assert [len(found) for found in rows.values()] == [4, 2, 4]
    assert {row.stage for row in rows["fresh-weights"]} == {"unfinished"}
    (learned,) = {row.checkpoint for row in read_episodes(tmp_path / "results/memcorr-many-42" / EPISODES)}
    assert learned not in {row.checkpoint for row in rows["fresh-weights"]}
    assert "The contest" in page.read_text() and "memcorr-many, fresh weights" in page.read_text()
    times = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")}
    assert generalise(plan, tmp_path, "flow", workers=2, threads=1) == page
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")} == times
