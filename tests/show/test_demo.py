"""`memcorr demo`: every rollout once, a page whose data is what happened, counts that come from results/."""

from __future__ import annotations

import base64
import dataclasses
import json
import re
from pathlib import Path

import cv2
import numpy as np
import pytest

from memcorr.demos.store import Store
from memcorr.errors import UserError
from memcorr.evaluation.evaluate import evaluate, usual
from memcorr.evaluation.intervention import Intervention, Pairing
from memcorr.show import demo as module
from memcorr.show.counts import COUNTS, counted
from memcorr.show.demo import CHAPTERS, EVERY, LEARNED, demo, goal
from memcorr.show.story import watch
from memcorr.spec import HELD_OUT_WORLDS, TASKS
from memcorr.worlds.scenes import evaluation_scenes
from memcorr.worlds.world import PICTURE, World

ROOT = Path(__file__).parents[2]


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
    """What the page shows of a learned policy is the rollout that `memcorr evaluate` judges, bit for bit."""
    caplog.set_level("INFO")
    both = dataclasses.replace(CHAPTERS[0], policies=(LEARNED,))
    swapped = dataclasses.replace(both, name="exchange", tasks=("open",), swap=48)
    monkeypatch.setattr(module, "CHAPTERS", (both, swapped))
    policy = checkpoints["memcorr"]
    page = demo(tmp_path / "demo", policy, scene=2, scene_seed=3, workers=1)
    assert len(re.findall(r"done after \d+ steps|not done in \d+ steps", caplog.text)) == 3
    data = json.loads(re.search(r'type="application/json">(.*?)</script>', page.read_text(), re.S)[1])  # type: ignore[index]
    rows = evaluate(
        policy,
        tmp_path / "rows",
        conditions=["combined"],
        shown=usual(policy),
        scene_seed=3,
        scenes=[2],
        data=tmp_path / "demo/demos",
    )
    first, second = data["chapters"]
    assert [story["task"] for story in first["stories"]] == [row.task for row in rows] == ["open", "close"]
    for story, row in zip(first["stories"], rows, strict=True):
        assert story["steps"] == row.steps and story["success"] == row.success and story["shown"] == [row.task]
        assert len(story["progress"]) == row.steps + 1 and len(story["decisions"]) == row.replans
        assert row.final_progress is not None
        assert story["progress"][-1] == pytest.approx(100 * row.final_progress, abs=0.1)
        errors = [d["error_mm"] for d in story["decisions"] if d["error_mm"] is not None]
        assert np.mean(errors) == pytest.approx(row.mean_match_error_mm, abs=1e-4)
        assert len(story["pictures"]) == row.steps // EVERY + 1
        assert (page.parent / story["video"]).is_file()
    (exchanged,) = second["stories"]
    assert exchanged["shown"] == ["close", "open"]
    assert [d["reference"] for d in exchanged["decisions"][4:8]] == ["close", "close", "open", "open"]
    assert [d["frame"] for d in exchanged["decisions"][4:8]] == [32, 40, 0, 8]
    plan = exchanged["decisions"][0]
    assert plan["path"][0] == plan["gripper_live"] and plan["future"][0] == plan["gripper_reference"]
    small = Store.open(tmp_path / "demo/demos").demonstration(0, "close").frame(0).rgb
    large = cv2.imdecode(
        np.frombuffer(base64.b64decode(exchanged["references"][plan["picture"]].split(",")[1]), np.uint8), 1
    )
    assert large is not None and large.shape == (PICTURE, PICTURE, 3)  # the recording, repeated: not the recorded image
    shrunk = cv2.resize(large, small.shape[:2], interpolation=cv2.INTER_AREA)[..., ::-1]
    assert np.abs(shrunk.astype(float) - small).mean() < 6


def test_a_demonstration_is_eight_rollouts_each_once() -> None:
    assert sum(len(chapter.policies) * len(chapter.tasks) for chapter in CHAPTERS) == 8
    door, *others = CHAPTERS
    assert door.world == "door" and set(door.policies) == {LEARNED, "servo"}
    assert any(chapter.world in HELD_OUT_WORLDS for chapter in others)
    assert any(chapter.disturbance for chapter in others) and any(chapter.swap for chapter in others)


def test_counts_on_the_page_are_those_of_the_results() -> None:
    """If rows were added: `python -m memcorr.show.counts results`."""
    cited = json.loads(COUNTS.read_text())
    assert cited == counted(ROOT / "results")
    assert all(re.search(r" [1-9]\d*/[1-9]\d*$", text) for texts in cited.values() for text in texts)


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


def test_a_scene_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="give 0 to 24"):
        demo(tmp_path, "expert", scene=25, scene_seed=0, workers=1)
