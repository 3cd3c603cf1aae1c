"""`memcorr demo`: counts, a video, and a page whose data is what happened."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest

from memcorr.demos.store import Store
from memcorr.errors import UserError
from memcorr.evaluation.episodes import EPISODES, read_episodes
from memcorr.evaluation.evaluate import evaluate
from memcorr.evaluation.intervention import Intervention, Pairing
from memcorr.show import demo as module
from memcorr.show.demo import CHAPTERS, demo, goal
from memcorr.show.story import watch
from memcorr.spec import TASKS
from memcorr.worlds.scenes import evaluation_scenes
from memcorr.worlds.world import World


def test_goal_band_is_where_the_flag_is_true(world: World) -> None:
    world.reset(evaluation_scenes("combined")[0])
    for task in TASKS:
        low, high = goal("door", task)
        for joint in np.arange(-1.7, 0.0, 0.01):
            world.data.joint("doorjoint").qpos[:] = joint
            world.step(np.zeros(4))
            settled = world.progress
            if min(abs(settled - low), abs(settled - high)) > 0.02:
                assert world.success(task) == (low < settled < high), (task, settled)


@pytest.mark.long
def test_page_tells_the_rollouts(
    checkpoints: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    swapped = dataclasses.replace(CHAPTERS[3], world="door", condition="combined", policy="")
    monkeypatch.setattr(module, "CHAPTERS", (dataclasses.replace(CHAPTERS[0], references=("opposite",)), swapped))
    page = demo(tmp_path, checkpoints["memcorr"], scenes=1, scene_seed=3, workers=1)
    assert len(re.findall(r"done \d/1", caplog.text)) == 4
    data = json.loads(re.search(r'type="application/json">(.*?)</script>', page.read_text(), re.S)[1])  # type: ignore[index]
    (row,) = [r for r in read_episodes(tmp_path / EPISODES) if (r.task, r.shown.reference) == ("open", "opposite")]
    story, exchanged = data["stories"]
    assert story["task"] == "open" and {d["reference"] for d in story["decisions"]} == {"close"}
    assert [d["reference"] for d in exchanged["decisions"][4:8]] == ["close", "close", "open", "open"]
    assert [d["frame"] for d in exchanged["decisions"][4:8]] == [32, 40, 0, 8]
    assert len(story["progress"]) == row.steps + 1 and len(story["decisions"]) == row.replans
    assert row.final_progress is not None
    assert story["progress"][-1] == pytest.approx(100 * row.final_progress, abs=0.1)
    errors = [d["error_mm"] for d in story["decisions"] if d["error_mm"] is not None]
    assert np.mean(errors) == pytest.approx(row.mean_match_error_mm, abs=1e-3)
    first = story["decisions"][0]
    assert first["path"][0] == first["gripper_live"] and first["future"][0] == first["gripper_reference"]
    assert first["live_image"].startswith("data:image/png;base64,iVBOR")
    assert story["video"].startswith("data:video/mp4;base64,")


@pytest.mark.long
def test_what_is_drawn_is_what_was_shown(checkpoints: dict[str, str], store: Store, tmp_path: Path) -> None:
    """Permuted pairs are told as permuted: the same live points, with other partners."""
    stories = {}
    pairings: tuple[Pairing, ...] = ("kept", "permuted")
    for pairing in pairings:
        shown = Intervention(matcher="ground-truth", pairing=pairing)
        out = tmp_path / pairing
        (row,) = evaluate(checkpoints["memcorr"], out, shown=shown, scenes=[0], tasks=["open"], data=store.root)
        stories[pairing] = watch(checkpoints["memcorr"], shown, row, store.root)
    plans = [stories[pairing].answers[0].plan for pairing in pairings]
    kept, exchanged = (plan.matches if plan else None for plan in plans)
    assert kept is not None and exchanged is not None
    np.testing.assert_array_equal(np.sort(kept.p_live, axis=0), np.sort(exchanged.p_live, axis=0))
    np.testing.assert_array_equal(kept.p_ref, exchanged.p_ref)
    assert not np.array_equal(kept.p_live, exchanged.p_live)


def test_too_many_scenes(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="give 1 to 25"):
        demo(tmp_path, "expert", scenes=26, scene_seed=0, workers=1)
