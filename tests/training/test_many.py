"""One policy for many objects: recordings that recover, turned rows, resampled errors, phases as they are seen live."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from memcorr.correspondence.cache import Cache, build_cache
from memcorr.correspondence.matches import Matches, ground_truth_matches
from memcorr.demos.collect import collect
from memcorr.demos.store import Store
from memcorr.errors import UserError
from memcorr.evaluation.evaluate import evaluate, usual
from memcorr.evaluation.intervention import Intervention
from memcorr.files import write_json
from memcorr.following.course import Course, Progress, seen_phase, seen_phases
from memcorr.policy.checkpoint import read_tensors
from memcorr.policy.condition import own_state
from memcorr.policy.relations import build_relations, turned
from memcorr.policy.servo import continued
from memcorr.spec import SPEC
from memcorr.training.batches import Batches, draw, draw_turns
from memcorr.training.dataset import Simulated, load_dataset, measure
from memcorr.training.experiments import EXPERIMENTS
from memcorr.training.loop import train
from memcorr.training.mixture import Resampled, SensorErrors
from memcorr.worlds.disturbances import Disturbance
from memcorr.worlds.expert import act, begin
from memcorr.worlds.scenes import demonstration_scenes, disturb, disturbed_scenes
from memcorr.worlds.world import shared_world
from tests.costs import kept

MANY = EXPERIMENTS["memcorr-many"]
SMALL = dataclasses.replace(MANY, train_pairs=2, worlds=("door", "drawer"), batch=8, references=1)


@pytest.fixture(scope="module")
def folders(store: Store) -> dict[str, Path]:
    """Two worlds: demonstrations, recordings that recover, and what a real matcher measured. Not to be written to."""

    def build(root: Path) -> None:
        worlds = root / "worlds"
        shutil.copytree(store.root, worlds / "door")
        collect(worlds / "drawer", pairs=2, workers=1, world="drawer")
        for world in ("door", "drawer"):
            collect(root / "disturbed" / world, pairs=2, workers=1, world=world, disturbed=True)
            build_cache(Store.open(worlds / world), root / "cache" / world, "embedded", pairs=2, rows=12, workers=1)

    made = kept("many", "memcorr.correspondence", build)
    return {path.name: path for path in made.iterdir()}


@pytest.fixture(scope="module")
def door(folders: dict[str, Path]) -> Simulated:
    store, disturbed = Store.open(folders["worlds"] / "door"), Store.open(folders["disturbed"] / "door")
    return load_dataset(store, range(2), SMALL, disturbed=disturbed)


def test_recordings_that_recover_are_marked_and_differ_from_the_plain_ones(folders: dict[str, Path]) -> None:
    plain, disturbed = (Store.open(folders[name] / "door") for name in ("worlds", "disturbed"))
    assert disturbed.manifest.disturbed and not plain.manifest.disturbed
    scenes = disturbed_scenes(0, 2)
    for scene in scenes:
        opening, closing = (disturbed.demonstration(scene.index, task) for task in ("open", "close"))
        assert opening.disturbances == " ".join(map(str, scene.disturbances))
        assert np.array_equal(opening.robot_state[0], closing.robot_state[0])  # still a counterfactual pair
        assert opening.u == scene.u
    assert plain.demonstration(0, "open").disturbances == ""
    with pytest.raises(UserError, match="disturbed"):  # another kind of recording in the same folder
        collect(disturbed.root, pairs=2, workers=1)


def test_most_recordings_are_disturbed_in_every_way_and_stand_elsewhere() -> None:
    scenes = disturbed_scenes(0, 100)
    kinds = [d.kind for scene in scenes for d in scene.disturbances]
    assert all(kinds.count(kind) > 10 for kind in ("start", "action-noise", "set-back", "bump", "shift"))
    assert 3 <= sum(not scene.disturbances for scene in scenes) <= 25
    left_off = [[str(d) for d in scene.disturbances] for scene in scenes[SPEC.train_pairs :]]
    assert all(len(only) == 1 and only[0].startswith("other-task=") for only in left_off) and len(left_off) == 20
    assert all(0.2 <= x <= 0.8 for scene in scenes for x in scene.u)
    assert not {scene.u for scene in scenes} & {scene.u for scene in demonstration_scenes(0, 100)}
    assert scenes[:7] == disturbed_scenes(0, 7)


def test_an_episode_may_begin_where_the_other_task_was_left_off() -> None:
    world, scene = shared_world(), disturb(demonstration_scenes(0, 1)[0], Disturbance("other-task", 48))
    begin(world, scene, "close")
    behind = world.hand
    begin(world, scene, "open")
    assert world.progress < -0.05 and np.linalg.norm(world.hand - behind) > 0.05
    for task in world.pair.tasks:  # and the expert turns back
        begin(world, scene, task)
        for _ in range(SPEC.episode_steps):
            world.step(act(world, task))
        assert world.success(task)


def test_paired_rows_are_of_pairs_that_start_together(door: Simulated) -> None:
    state = door.windows.state.copy()
    state[door.first_rows(np.array([2]))[1]] += 0.01  # the third pair's closing starts elsewhere
    apart = dataclasses.replace(door, windows=dataclasses.replace(door.windows, state=state))
    assert list(door.paired) == [0, 1, 2, 3] and list(apart.paired) == [0, 1, 3]
    with pytest.raises(UserError, match="same robot state"):
        apart.check_starts(4)


def test_other_recipes_refuse_recordings_that_recover(folders: dict[str, Path], tmp_path: Path) -> None:
    tiny = dataclasses.replace(EXPERIMENTS["debug"], updates=(1, 0))
    with pytest.raises(UserError, match="never trains on disturbed"):
        train(tiny, folders["worlds"] / "door", 42, tmp_path / "a", disturbed=folders["disturbed"] / "door")
    with pytest.raises(UserError, match="--disturbed"):
        train(tiny, folders["disturbed"] / "door", 42, tmp_path / "b")
    with pytest.raises(UserError, match="--disturbed"):
        train(SMALL, folders["worlds"], 42, tmp_path / "c", folders["cache"])


def test_recordings_of_another_kind_or_world_are_refused_before_anything_is_read(tmp_path: Path) -> None:
    """They would be trained on with the points of an object that is not in them."""
    for name, worlds, disturbed in (
        ("plain", ("door", "drawer"), False),
        ("exchanged", ("drawer", "door"), False),
        ("recovering", ("door", "drawer"), True),
        ("others", ("window", "door"), True),
    ):
        for folder, world in zip(SMALL.worlds, worlds, strict=True):
            (tmp_path / name / folder).mkdir(parents=True)
            about = {"layout": 1, "pairs": 2, "world": world, "disturbed": disturbed}
            write_json(tmp_path / name / folder / "collection.json", about)
    for data, recovering, words in (
        ("exchanged", "recovering", "exchanged/door holds demonstrations of drawer, not of door"),
        ("plain", "others", "others/door holds disturbed recordings of window, not disturbed ones of door"),
        ("plain", "plain", "plain/door holds undisturbed recordings of door"),
        ("plain", "nowhere", "nowhere/door holds no demonstrations"),
        ("plain", "recovering", "pair-000-open.h5 does not exist"),
    ):
        with pytest.raises(UserError, match=words):
            train(SMALL, tmp_path / data, 42, tmp_path / "run", tmp_path / "cache", disturbed=tmp_path / recovering)
    assert not (tmp_path / "run").exists()


def test_rows_are_of_both_kinds_and_references_are_plain(door: Simulated, folders: dict[str, Path]) -> None:
    recorded = Store.open(folders["disturbed"] / "door").demonstration(1, "close")
    assert len(door) == (2 + 2) * 2 * 185 and list(door.reference) == [2, 3, 0, 1, 2, 3, 0, 1]
    assert np.array_equal(door.windows.chunk[-1], recorded.action[184:200])


def test_phases_in_training_are_those_of_a_rollout(door: Simulated) -> None:
    """The last recording, looked at every eight steps from its start, as a controller does."""
    d = len(door.reference) - 1
    r = door.reference[d]
    course = Course.of_poses(door.points, door.object_pose[r], door.gripper[r])
    motion = door.object_pose[d] @ np.linalg.inv(door.object_pose[r, 0])
    before: Progress | None = None
    live = []
    for t in range(0, SPEC.windows_per_episode, SPEC.executed):
        before = seen_phase(course, motion[t], door.gripper[d, t], before, t)
        live.append(before.phase)
    trained = door.reference_frame.reshape(-1, SPEC.windows_per_episode)[d]
    assert list(trained[:: SPEC.executed]) == live
    assert np.array_equal(trained, seen_phases(course, motion[: len(trained)], door.gripper[d, : len(trained)], 8))


def test_turning_the_world_turns_the_tokens(door: Simulated) -> None:
    """Tokens of a scene that is turned and mirrored as a whole are the turned tokens."""
    rows, rng = np.array([0, 400, 900]), np.random.default_rng(0)
    turn = draw_turns(rng, 3)
    assert np.allclose(np.abs(np.linalg.det(turn)), 1) and np.allclose(turn @ turn.swapaxes(1, 2), np.eye(2))
    whole = np.tile(np.eye(3), (3, 1, 1))
    whole[:, :2, :2] = turn
    matches, j = door.own_matches(rows), door.reference_frame[rows]
    d, anchor = door.windows.demonstration[rows], door.windows.anchor[rows]

    def tokens(by: np.ndarray) -> np.ndarray:
        def moved(p: np.ndarray) -> np.ndarray:
            return np.einsum("bij,b...j->b...i", by, p)

        seen = dataclasses.replace(matches, p_ref=moved(matches.p_ref), p_live=moved(matches.p_live))
        return build_relations(
            seen,
            moved(door.gripper[d, anchor]),
            moved(door.gripper[door.reference[d]]),
            j,
            "tracking",
            np.concatenate(
                [moved(door.command[door.reference[d]][..., :3]), door.command[door.reference[d]][..., 3:]], axis=-1
            ),
        ).tokens

    upright = door.relations(rows, matches, j, MANY)
    assert np.allclose(turned(upright, turn).tokens, tokens(whole), atol=1e-5)
    assert not np.allclose(upright.tokens, tokens(whole), atol=1e-2)


def test_tracking_tokens_say_how_far_the_hand_is_from_where_it_should_be(door: Simulated) -> None:
    rows = np.array([100])
    full, tracking = (
        door.relations(rows, door.own_matches(rows), door.reference_frame[rows], recipe).tokens[0]
        for recipe in (EXPERIMENTS["memcorr"], MANY)
    )
    d, j = int(door.windows.demonstration[100]), int(door.reference_frame[100])
    commands = door.command[door.reference[d], j + np.array([0, 5, 10, 15])]
    assert np.allclose(tracking[:, :9], full[:, :9] / 0.1, atol=1e-5)
    assert np.allclose(tracking[:, 9:12], np.tile(commands[:, :3] / 0.3, (16, 1)), atol=1e-5)
    assert np.array_equal(tracking[:, 12:14], full[:, 12:14])
    assert np.allclose(tracking[:, 14:17], (full[:, 6:9] - full[:, 0:3]) / 0.02, atol=1e-4)
    assert np.allclose(tracking[:, 17], np.tile(commands[:, 3], 16)), "and the gripper's command"


def test_the_relative_state_knows_neither_place_nor_direction() -> None:
    rng = np.random.default_rng(0)
    state = rng.normal(size=(5, 3, 3))
    c, s = np.cos(1.0), np.sin(1.0)
    R = np.array([[c, -s, 0], [s, c, 0], [0, 0, 1]])
    elsewhere = state @ R.T + np.array([0.3, -0.2, 0.1])
    a, b = own_state(state.reshape(5, 9), "relative"), own_state(elsewhere.reshape(5, 9), "relative")
    assert np.allclose(a, b) and a.any()
    assert not np.allclose(a, own_state((2 * state).reshape(5, 9), "relative"))
    assert own_state(a, "absolute") is a


def test_resampled_errors_give_back_what_was_measured(dataset: Simulated, cache: Cache) -> None:
    """Put on the rows they were measured on, once: the cache's own matches."""
    resampled = Resampled.of(dataset, cache, largest=2.0)
    enough = cache.matches.valid.sum(axis=1) >= SPEC.min_valid
    rows = dataset.rows(cache.demonstration, cache.anchor)[enough]
    T_ref, T_live = dataset.poses(rows, cache.reference_frame[enough])
    index = np.arange(len(rows))
    measured, valid = cache.matches[np.flatnonzero(enough)], cache.matches.valid[enough]
    once = resampled.matches(T_ref, T_live, index, np.ones(len(rows)))
    assert np.allclose(once.p_ref[valid], measured.p_ref[valid]) and np.allclose(
        once.p_live[valid], measured.p_live[valid]
    )
    never = resampled.matches(T_ref, T_live, index, np.zeros(len(rows)))
    assert np.allclose(never.p_live[valid], cache.p_live_true[enough][valid])
    sources, factor = resampled.draw(np.random.default_rng(0), 4000)
    assert 0.2 < (factor == 0).mean() < 0.3 and 1.9 < factor.max() <= 2.0 and len(set(sources)) > 100


def test_bad_sensors_move_all_points_of_a_row_together_and_take_the_rim_of_its_mask() -> None:
    rng, size = np.random.default_rng(3), 400
    p = rng.normal(scale=0.1, size=(size, SPEC.points, 3)) + np.array([0.0, 0.7, 0.2])
    matches = Matches(p.copy(), p, np.ones(p.shape[:2]), rng.random(p.shape[:2]) < 0.9)
    eye = np.tile([0.75, 0.1, 0.85], (size, 1))
    unharmed = SensorErrors.draw(rng, size, 0.0).on(matches, eye)
    assert np.allclose(unharmed.p_live, p) and np.array_equal(unharmed.valid, matches.valid)
    sensors = SensorErrors.draw(rng, size, 1.0)
    seen = sensors.on(matches, eye)
    moved = np.linalg.norm(sensors.turn, axis=1) > 0
    assert 0.65 < moved.mean() < 0.85 and np.degrees(np.linalg.norm(sensors.turn, axis=1)).max() <= 4
    assert np.linalg.norm(sensors.shift, axis=1).max() <= 0.02
    assert np.allclose(seen.p_live[~moved], p[~moved]) and np.array_equal(seen.p_ref, p)
    apart, before = (np.linalg.norm(x[:, 1:] - x[:, :1], axis=-1) for x in (seen.p_live, p))
    assert np.allclose(apart, before)  # as one rigid body,
    still = SensorErrors(sensors.turn, np.zeros_like(sensors.shift), sensors.left).on(matches, eye).p_live
    assert np.allclose(np.linalg.norm(still - eye[:, None], axis=-1), np.linalg.norm(p - eye[:, None], axis=-1))
    left = np.minimum(sensors.left, matches.valid.sum(axis=1))
    assert np.array_equal(seen.valid.sum(axis=1), left) and not (seen.valid & ~matches.valid).any()
    row = int(np.flatnonzero(left == 6)[0])
    far = np.linalg.norm(p[row] - p[row][matches.valid[row]].mean(axis=0), axis=1)
    assert far[seen.valid[row]].max() < far[matches.valid[row] & ~seen.valid[row]].min()
    both = sensors.twice()
    assert np.array_equal(both.turn[:size], both.turn[size:]) and len(both.left) == 2 * size


def test_a_batch_holds_equal_parts_of_every_world_and_turns_them(folders: dict[str, Path]) -> None:
    rows = {}
    for world in SMALL.worlds:
        store, disturbed = (Store.open(folders[name] / world) for name in ("worlds", "disturbed"))
        rows[world] = load_dataset(store, range(2), SMALL, disturbed=disturbed)
    n = measure(list(rows.values()), SMALL)
    assert (n.action_mean[:2] == 0).all() and n.action_std[0] == n.action_std[1]
    worlds = [Batches(d, n, SMALL, resampled=_resampled(d, folders, world)) for world, d in rows.items()]
    for update in (0, 1):
        batch = draw(worlds, 42, update)
        assert len(batch.condition) == SMALL.batch and len(batch.z_t) == SMALL.batch * SMALL.noises
        again = draw(worlds, 42, update)
        assert torch.equal(batch.z_t, again.z_t)
        assert batch.condition.tokens is not None and again.condition.tokens is not None
        assert torch.equal(batch.condition.tokens, again.condition.tokens)


def _resampled(dataset: Simulated, folders: dict[str, Path], world: str) -> Resampled:
    from memcorr.correspondence.cache import read_cache

    found = read_cache(folders["cache"] / world, Store.open(folders["worlds"] / world))
    return Resampled.of(dataset, found, SMALL.resampled_errors)


def test_several_noises_of_one_context_are_as_good_as_one_each(door: Simulated, folders: dict[str, Path]) -> None:
    batch = Batches(door, measure([door], SMALL), SMALL, resampled=_resampled(door, folders, "door")).draw(42, 0)
    torch.manual_seed(0)
    network = MANY.build().eval()
    with torch.no_grad():
        together = network(batch.z_t, batch.t, batch.condition)
        context = torch.arange(SMALL.batch).repeat_interleave(SMALL.noises)
        apart = network(batch.z_t, batch.t, batch.condition[context])
    assert torch.allclose(together, apart, atol=1e-5)


def test_the_recipe_trains_and_validates_per_world(folders: dict[str, Path], tmp_path: Path) -> None:
    recipe = dataclasses.replace(SMALL, train_pairs=1, updates=(4, 2))
    with pytest.raises(UserError, match="other data"):  # measured with two pairs, whose references differ
        train(recipe, folders["worlds"], 42, tmp_path / "no", folders["cache"], disturbed=folders["disturbed"])
    recipe = dataclasses.replace(recipe, train_pairs=2)
    train(recipe, folders["worlds"], 42, tmp_path / "run", folders["cache"], disturbed=folders["disturbed"])
    assert read_tensors(tmp_path / "run/model.safetensors")[1]["update"] == "6"


def test_a_reference_is_continued_by_its_commands_and_the_way_back(door: Simulated) -> None:
    """Where the hand is where the reference's was: its commands. Beside it: the way back; far beside it: up first."""
    rows = np.array([100])
    d, j = int(door.windows.demonstration[100]), door.reference_frame[rows]
    r = int(door.reference[d])
    same = ground_truth_matches(door.points, door.object_pose[[r], j], door.object_pose[[r], j])
    told, hand = door.command[r, j[0] : j[0] + 16, :3], door.gripper[r, j]

    def plan(gripper: np.ndarray) -> np.ndarray:
        return continued(same, gripper, door.gripper[[r]], j, door.command[[r]])[0]

    assert np.allclose(plan(hand), told)
    aside = np.array([0.01, -0.02, 0.0])
    assert np.allclose(plan(hand + aside)[0] - told[0], -8 * aside)
    assert np.all(np.abs(plan(hand + aside)[15] - told[15]) < 8 * np.abs(aside) + 1e-9)  # the nearer, the less
    lost = plan(hand + 5 * aside)
    assert np.allclose(lost[0], [0, 0, 0.6])  # straight up, as fast as the expert's hand moves
    above = door.gripper[r, : j[0] + 1, 2].max() - hand[0, 2]
    high = plan(hand + 5 * aside + [0, 0, above])
    across = (high[0] - told[0])[:2]
    assert np.allclose(across / -np.linalg.norm(across), aside[:2] / np.linalg.norm(aside))
    assert 0.6 - 1e-9 <= np.linalg.norm(across) < 0.65  # what it was told the other way is left out
    assert abs(high[0, 2]) < 0.02  # across, and not down yet
    blind = dataclasses.replace(same, valid=np.zeros_like(same.valid))
    assert not continued(blind, hand, door.gripper[[r]], j, door.command[[r]]).any()


def test_the_servo_reacts_without_having_learned(store: Store, tmp_path: Path) -> None:
    shown = usual("servo", Intervention(matcher="ground-truth"))
    assert shown.phase_from == "seen"
    rows = evaluate("servo", tmp_path, conditions=["boundary"], shown=shown, scenes=[0], data=store.root)
    assert [row.success for row in rows] == [True, True]
    with pytest.raises(UserError, match="servo"):
        evaluate("servo", tmp_path, shown=dataclasses.replace(shown, pairing="permuted"), data=store.root)
