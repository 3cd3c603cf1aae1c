"""Recordings of one's own: no simulator truth, any length, any width, images that are not square, pairs or none."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from memcorr.correspondence.matcher import load_matcher
from memcorr.demos.phase import next_of_same_task, windows
from memcorr.demos.store import LAYOUT, Demonstration, Store, demonstration_path, write_demonstration
from memcorr.errors import UserError
from memcorr.files import write_json
from memcorr.following.measured import (
    Measured,
    build_measured,
    chosen,
    disagreement,
    in_words,
    read_measured,
)
from memcorr.following.reference import Reference
from memcorr.following.step import Following, MatcherSource, Observation, Query
from memcorr.frames import Frame
from memcorr.policy.checkpoint import read_tensors
from memcorr.policy.policy import load_policy
from memcorr.report.matching import Measured as Errors
from memcorr.spec import SPEC
from memcorr.training.batches import Batches
from memcorr.training.dataset import Dataset, measure
from memcorr.training.experiments import EXPERIMENTS, Config
from memcorr.training.loop import train
from memcorr.training.measured import centimetres, declared_pairs, fitted, load_measured
from memcorr.training.mixture import Resampled

RECIPE = dataclasses.replace(EXPERIMENTS["memcorr-measured"], batch=8, updates=(3, 1))
ROWS = 120  # of 128: images that are not square


def cut(frame: Frame) -> Frame:
    return dataclasses.replace(frame, rgb=frame.rgb[:ROWS], depth=frame.depth[:ROWS], mask=frame.mask[:ROWS])


def rewritten(
    demonstrations: list[Demonstration],
    root: Path,
    lengths: list[int],
    change: Callable[[Demonstration, list[Frame]], tuple[list[Frame], np.ndarray]] | None = None,
    names: list[tuple[int, str]] | None = None,
) -> Store:
    """Without truth: the first so many frames of each, and pairs and tasks as given."""
    root.mkdir()
    tasks = []
    for i, (d, length) in enumerate(zip(demonstrations, lengths, strict=True)):
        pair, task = names[i] if names else (d.pair, d.task)
        frames, action = [cut(frame) for frame in d.frames(range(length))], d.action[:length]
        if change is not None:
            frames, action = change(d, frames)
        nowhere = (math.nan, math.nan)
        path = demonstration_path(root, pair, task)
        write_demonstration(path, frames, action, None, None, pair=pair, task=task, u=nowhere, world="mine")
        tasks += [task] * (task not in tasks)
    pairs = 1 + max(pair for pair, _ in names or [(d.pair, d.task) for d in demonstrations])
    write_json(root / "collection.json", {"layout": LAYOUT, "pairs": pairs, "world": "mine", "tasks": tasks})
    return Store.open(root)


@pytest.fixture(scope="module")
def recorded(store: Store, tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Two pairs, every recording of another length."""
    return rewritten(store.demonstrations(range(2)), tmp_path_factory.mktemp("mine") / "store", [33, 40, 29, 36])


@pytest.fixture(scope="module")
def matched(recorded: Store, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("matched") / "cache"
    build_measured(recorded, out, "embedded", workers=1)
    return out


@pytest.fixture(scope="module")
def seen(recorded: Store, matched: Path) -> Measured:
    return read_measured(matched, recorded)


@pytest.fixture(scope="module")
def rows(recorded: Store, seen: Measured) -> Dataset:
    demonstrations = chosen(recorded, None, "seen")
    recipe, both, _ = fitted(RECIPE, demonstrations)
    return load_measured(demonstrations, seen, recipe, both)


def test_every_row_is_matched_as_in_a_rollout(recorded: Store, seen: Measured) -> None:
    """The second recording of opening, followed by a policy's own planner with a look every eight steps."""
    demonstrations = chosen(recorded, None, "seen")
    lengths = [len(d) for d in demonstrations]
    assert len(seen.reference_frame) == sum(windows(n) for n in lengths) == sum(n - 15 for n in lengths)
    query, reference = demonstrations[2], Reference(demonstrations[0], load_matcher("embedded"))
    assert (query.task, list(next_of_same_task([d.task for d in demonstrations]))) == ("open", [2, 3, 0, 1])
    first = windows(lengths[0]) + windows(lengths[1])
    before, following = None, Following(MatcherSource(load_matcher("embedded")), "seen")
    for k in range(0, windows(len(query)), SPEC.executed):
        (relation,) = following.step([Query(Observation(query.frame(k)), reference, k, before)])
        before, matches = relation.progress, relation.matches
        assert seen.reference_frame[first + k] == relation.phase and matches is not None
        assert np.allclose(seen.matches.p_live[first + k], matches.p_live, atol=1e-6)
        assert np.allclose(seen.matches.p_ref[first + k], matches.p_ref, atol=1e-6)


@pytest.mark.long
def test_the_matcher_disagrees_with_itself_by_about_its_error(store: Store, tmp_path: Path) -> None:
    """Where a simulator knows the truth, the sizes can be compared: the true error is never a training input."""
    root = tmp_path / "known"
    root.mkdir()
    for d in store.demonstrations(range(2)):
        about = {"pair": d.pair, "task": d.task, "u": d.u}
        truth = d.joint[:24], d.object_pose[:24] if d.object_pose is not None else None
        write_demonstration(root / d.path.name, d.frames(range(24)), d.action[:24], *truth, **about)  # type: ignore[arg-type]
    write_json(root / "collection.json", {"layout": LAYOUT, "pairs": 2})
    table = build_measured(Store.open(root), tmp_path / "cache", "embedded", workers=1)
    ratio = table["disagreement"]["median_mm"] / table["true_error"]["median_mm"]
    assert 1 / 3 < ratio < 3, table
    assert "forward against backward" in in_words(table) and "true 3D error" in in_words(table)


def test_two_ways_that_agree_add_nothing(seen: Measured) -> None:
    there = seen.matches[0]
    back = dataclasses.replace(there, p_ref=there.p_live, p_live=there.p_ref)
    gap = disagreement(there, back)
    assert gap is not None and np.abs(gap).max() < 1e-6
    moved = dataclasses.replace(back, p_live=back.p_live + np.array([0.0, 0.0, 0.01]))
    gap = disagreement(there, moved)
    assert gap is not None and np.allclose(np.linalg.norm(gap[there.valid], axis=1), 0.01 / math.sqrt(2), atol=1e-6)


def test_matches_belong_to_their_recordings(recorded: Store, matched: Path, store: Store, tmp_path: Path) -> None:
    before = (matched / "measured.safetensors").read_bytes()
    build_measured(recorded, matched, "embedded", workers=1)  # nothing is left to do
    assert (matched / "measured.safetensors").read_bytes() == before
    with pytest.raises(UserError, match="other settings"):
        build_measured(recorded, matched, "embedded", phase="elapsed", workers=1)
    with pytest.raises(UserError, match="other demonstrations"):
        read_measured(matched, store)
    with pytest.raises(UserError, match="memcorr match --measured"):
        read_measured(tmp_path, recorded)
    assert not Errors.find([matched]).cache, "how two ways agree is no error table, which a report would take it for"


def test_rows_keep_their_own_points_and_borrow_errors(rows: Dataset, seen: Measured) -> None:
    resampled = Resampled.measured(rows, seen.disagreement, 2.0)
    some = np.array([0, 7, 20, 40])
    poses = rows.poses(some, rows.reference_frame[some])
    exact = resampled.matches(*poses, np.zeros(4, np.int64), np.zeros(4), some)
    valid = exact.valid
    assert np.allclose(exact.p_ref[valid], seen.matches.p_ref[some][valid], atol=1e-9)
    assert np.allclose(exact.p_live[valid], seen.matches.p_live[some][valid], atol=2e-3)  # one motion carries all
    moved = resampled.matches(*poses, np.zeros(4, np.int64), np.full(4, 2.0), some)
    assert np.allclose((moved.p_live - exact.p_live)[valid], 2 * np.tile(seen.disagreement[0], (4, 1, 1))[valid])
    later = np.minimum(rows.reference_frame[some] + 5, rows.last_frames(some))
    assert (
        rows.last_frames(some)[0] == 29
    )  # the first recording follows the third, which was cut: sixteen frames are added
    assert np.isfinite(
        resampled.matches(*rows.poses(some, later), np.zeros(4, np.int64), np.zeros(4), some).p_ref
    ).all()


def test_paired_rows_are_those_that_start_together(recorded: Store, rows: Dataset, seen: Measured) -> None:
    recipe, both, said = fitted(RECIPE, chosen(recorded, None, "seen"))
    assert both.tolist() == [[0, 1], [2, 3]] and any("2 pairs" in line and "0.0 mm" in line for line in said)
    batches = Batches(rows, measure([rows], recipe), recipe, resampled=Resampled.measured(rows, seen.disagreement, 2.5))
    batch = batches.paired(np.random.default_rng(0), 4)
    first, second = batch.z_t.chunk(2)
    assert (first == second).all() and not (batch.eps.chunk(2)[0] == batch.eps.chunk(2)[1]).all()
    elsewhere = [
        dataclasses.replace(d, gripper=d.gripper + 0.02 * (d.task == "open")) for d in chosen(recorded, None, "seen")
    ]
    kept, apart, _ = declared_pairs(elsewhere)
    assert (len(kept), apart) == (0, 2)


def test_an_action_moves_the_hand_as_far_as_it_was_seen_to(recorded: Store) -> None:
    demonstrations = chosen(recorded, None, "seen")
    cm, share = centimetres(demonstrations)
    assert 0.9 < cm < 1.1 and share > 0.9
    doubled = [dataclasses.replace(d, action=2 * d.action) for d in demonstrations]
    assert centimetres(doubled)[0] == pytest.approx(cm / 2, abs=1e-3)
    rng = np.random.default_rng(0)
    noise = [dataclasses.replace(d, action=rng.normal(size=d.action.shape)) for d in demonstrations]
    assert centimetres(noise)[0] == 0
    recipe, _, said = fitted(RECIPE, noise)
    assert (recipe.turned, recipe.action_limit > 1) == (False, True)
    assert any("no displacements" in line for line in said)


def test_recordings_train_a_policy_that_follows_them(
    recorded: Store, matched: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "memcorr"):
        train(RECIPE, recorded.root, 42, tmp_path / "run", matched)
    assert "paired" in caplog.text and "an action of 1 moves the hand" in caplog.text
    train(RECIPE, recorded.root, 42, tmp_path / "run", matched)  # nothing is left to do
    train(RECIPE, recorded.root, 42, tmp_path / "again", matched)
    a, b = (read_tensors(tmp_path / name / "model.safetensors")[0] for name in ("run", "again"))
    assert all((a[name] == b[name]).all() for name in a)
    reference, live = recorded.demonstration(0, "open"), recorded.demonstration(1, "open")
    follower = load_policy(tmp_path / "run").follow(reference)
    plan = follower.plan(live.frame(0), 0)
    assert plan.actions.shape == (16, 4) and not plan.fallback and plan.progress is not None
    with pytest.raises(UserError, match="object_pose"):  # what needs truth says so
        train(dataclasses.replace(EXPERIMENTS["debug"], updates=(1, 0)), recorded.root, 42, tmp_path / "no")
    with pytest.raises(UserError, match="memcorr match"):
        train(RECIPE, recorded.root, 42, tmp_path / "no")
    with pytest.raises(UserError, match="another lifting or phase"):
        train(dataclasses.replace(RECIPE, phase="elapsed"), recorded.root, 42, tmp_path / "no", matched)


@pytest.mark.long
def test_other_widths_more_tasks_and_no_pairs_train_too(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Three tasks with one recording each, a state of 12 numbers, actions of 7 that are no displacements."""
    rng = np.random.default_rng(0)

    def change(d: Demonstration, frames: list[Frame]) -> tuple[list[Frame], np.ndarray]:
        wide = [dataclasses.replace(f, robot_state=np.append(f.robot_state, [1.0, 2.0, 3.0])) for f in frames]
        return wide, 3 * rng.normal(size=(len(frames), 7))

    names = [(0, "open"), (1, "close"), (2, "nudge")]
    odd = rewritten(
        [*store.demonstrations([0]), store.demonstration(1, "open")], tmp_path / "odd", [20] * 3, change, names
    )
    build_measured(odd, tmp_path / "cache", "embedded", phase="elapsed", workers=1)
    recipe = dataclasses.replace(RECIPE, phase="elapsed", schedule="linear")
    with caplog.at_level(logging.INFO, "memcorr"):
        train(recipe, odd.root, 42, tmp_path / "run", tmp_path / "cache")
    assert "no pairs" in caplog.text and "cosine" in caplog.text and "follow themselves" in caplog.text
    made = Config.read(tmp_path / "run").experiment
    assert (made.state_dim, made.action_dim, made.paired, made.schedule) == (12, 7, False, "cosine")
    assert (made.state, made.turned, made.action_cm) == ("absolute", False, 0.0)
    plan = (
        load_policy(tmp_path / "run")
        .follow(odd.demonstration(2, "nudge"), action_limit=made.action_limit)
        .plan(odd.demonstration(0, "open").frame(3), 0)
    )
    assert plan.actions.shape == (16, 7) and np.abs(plan.actions).max() <= made.action_limit
    with pytest.raises(ValueError, match="robot_state must have shape"):
        load_policy(tmp_path / "run").follow(odd.demonstration(2, "nudge"), action_limit=99.0).plan(
            store.demonstration(0, "open").frame(3), 0
        )


def test_what_cannot_be_learned_from_is_named(store: Store, tmp_path: Path) -> None:
    short = rewritten(store.demonstrations([0]), tmp_path / "short", [16, 20])
    with pytest.raises(UserError, match="at least 17"):
        build_measured(short, tmp_path / "a", "embedded", workers=1)

    def blank(d: Demonstration, frames: list[Frame]) -> tuple[list[Frame], np.ndarray]:
        return [dataclasses.replace(f, mask=np.zeros_like(f.mask)) for f in frames], d.action[: len(frames)]

    bare = rewritten(store.demonstrations([0]), tmp_path / "bare", [20, 20], blank)
    with pytest.raises(UserError, match="memcorr data mask"):
        build_measured(bare, tmp_path / "b", "embedded", workers=1)
