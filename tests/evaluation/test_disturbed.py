"""Disturbed rollouts: the same rows whatever the slots, sensors that lie in known ways, and the tape recorder."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from memcorr.correspondence.rigid import carried
from memcorr.demos.collect import collect
from memcorr.demos.store import Store
from memcorr.errors import UserError
from memcorr.evaluation.evaluate import evaluate, list_jobs
from memcorr.evaluation.intervention import Intervention
from memcorr.evaluation.rollout import Decision, Response, roll_out
from memcorr.evaluation.sensors import degraded
from memcorr.frames import Frame
from memcorr.policy.plan import Plan
from memcorr.spec import SPEC
from memcorr.training.dataset import load_dataset
from memcorr.training.experiments import Experiment
from memcorr.worlds.disturbances import KINDS, Disturbance
from memcorr.worlds.pairs import find_pair
from memcorr.worlds.scenes import Scene, disturb, evaluation_scenes
from memcorr.worlds.world import World

SET_BACK = [Disturbance.parse("set-back")]


def test_replay_plays_the_reference_and_never_looks_again(store: Store, tmp_path: Path) -> None:
    """Undisturbed it succeeds everywhere; with the opposite tape, or after a disturbance, it does not."""
    truth = evaluate("replay-truth", tmp_path, conditions=["combined"], scenes=[0, 1, 2], data=store.root)
    assert all(row.success and row.shown.matcher == "ground-truth" for row in truth)
    seen = evaluate("replay", tmp_path, conditions=["combined"], scenes=[0, 1], data=store.root)
    assert all(row.success and row.mean_match_error_mm is not None for row in seen)
    opposite = evaluate("replay", tmp_path, shown=Intervention(reference="opposite"), scenes=[0], data=store.root)
    assert not any(row.success for row in opposite)
    set_back = evaluate("replay-truth", tmp_path, scenes=[0, 1], disturbances=SET_BACK, data=store.root)
    assert not any(row.success for row in set_back)
    with pytest.raises(UserError, match="plays a reference as it is"):
        evaluate("replay", tmp_path, shown=Intervention(reference="empty"), data=store.root)


class Reacts:
    """Moves by what it sees, so that whatever is seen differently is done differently."""

    sees = True

    def decide(self, decisions: Sequence[Decision]) -> list[Response]:
        answers = []
        for decision in decisions:
            frame = decision.frame
            assert frame is not None
            numbers = [frame.mask.mean() * 50, frame.depth.mean() / 5, frame.camera.T_world_cam[0, 3], 0.2]
            answers.append(Response(Plan(np.tile(np.sin(np.array(numbers) * 7), (SPEC.chunk, 1)))))
        return answers


def test_disturbed_rollouts_do_not_depend_on_their_company(world: World) -> None:
    """Base moved, hand pushed, masks late, depth noisy: in slots side by side or one by one, the same outcome."""
    wrong = [Disturbance.parse(t) for t in ("shift", "bump", "mask-late", "depth-noise", "action-noise", "extrinsics")]
    jobs = list_jobs(["disturbed"], 0, scenes=[0, 5], disturbances=wrong)
    results = []
    for slots in (4, 1):
        found = dict(roll_out(world, Reacts(), iter(jobs), slots))
        results.append([dataclasses.replace(found[job], seconds=0.0) for job in jobs])
    assert results[0] == results[1] and len({o.final_joint for o in results[0]}) > 1


@pytest.mark.long
def test_another_world_from_recording_to_rows(checkpoints: dict[str, str], tmp_path: Path) -> None:
    """A drawer: recorded, followed by a policy, judged by its own flags; never mixed up with the door."""
    drawer = tmp_path / "drawer"
    collect(drawer, pairs=1, workers=1, world="drawer")
    store = Store.open(drawer)
    assert (store.world, store.demonstration(0, "close").world) == ("drawer", "drawer")
    dataset = load_dataset(store, range(1), Experiment())
    first = dataset.own_matches(np.array([0]))
    assert np.allclose(first.p_ref, carried(dataset.object_pose[:1, 0], find_pair("drawer").points))
    rows = evaluate(
        checkpoints["memcorr"],
        tmp_path,
        shown=Intervention(matcher="ground-truth"),
        scenes=[0],
        world="drawer",
        data=drawer,
    )
    assert {(row.world, row.task) for row in rows} == {("drawer", "open"), ("drawer", "close")}
    assert all(row.mean_match_error_mm == 0 and row.final_progress is not None for row in rows)
    with pytest.raises(UserError, match="demonstrations of drawer, not of door"):
        evaluate(checkpoints["memcorr"], tmp_path, shown=Intervention(matcher="ground-truth"), data=drawer)
    with pytest.raises(UserError, match="with world drawer, not door"):
        collect(drawer, pairs=1, workers=1)
    with pytest.raises(UserError, match="the tasks of plate are slide and back"):
        evaluate("expert", tmp_path, world="plate", tasks=["open"])
    with pytest.raises(UserError, match="unknown world 'cupboard'"):
        evaluate("expert", tmp_path, world="cupboard")


@pytest.fixture(scope="module")
def seen(world: World) -> tuple[Frame, Scene]:
    scene = evaluation_scenes("disturbed")[0]
    world.reset(scene)
    return world.observe(), scene


def faulty(seen: tuple[Frame, Scene], text: str, elapsed: int = 8) -> Frame:
    frame, scene = seen
    return degraded(frame, disturb(scene, Disturbance.parse(text)), elapsed)


def test_depth_noise_is_as_large_as_it_says(seen: tuple[Frame, Scene]) -> None:
    frame = seen[0]
    moved = faulty(seen, "depth-noise=2").depth[frame.mask] - frame.depth[frame.mask]
    expected = 2 * (0.0012 + 0.0019 * (frame.depth[frame.mask] - 0.4) ** 2)
    assert moved.std() == pytest.approx(expected.mean(), rel=0.15) and abs(moved.mean()) < expected.mean() / 5
    again, later = faulty(seen, "depth-noise=2"), faulty(seen, "depth-noise=2", elapsed=16)
    assert np.array_equal(again.depth[frame.mask] - frame.depth[frame.mask], moved)
    assert not np.array_equal(later.depth, again.depth), "another frame has other noise"


def test_holes_have_the_share_they_say_and_prefer_edges(seen: tuple[Frame, Scene]) -> None:
    frame = seen[0]
    holes = (faulty(seen, "depth-holes=0.2").depth == 0) & (frame.depth > 0)
    assert holes.sum() / (frame.depth > 0).sum() == pytest.approx(0.2, abs=0.03)
    step = np.abs(np.diff(frame.depth, axis=1, prepend=frame.depth[:, :1])) > 0.05
    assert holes[step].mean() > 2 * holes.mean()


def test_masks_shrink_grow_and_lag(seen: tuple[Frame, Scene]) -> None:
    frame, scene = seen
    eroded, dilated = faulty(seen, "mask-erode").mask, faulty(seen, "mask-dilate=1").mask
    assert eroded.sum() < frame.mask.sum() < dilated.sum()
    assert not (eroded & ~frame.mask).any() and not (frame.mask & ~dilated).any()
    old = np.zeros_like(frame.mask)
    assert not degraded(frame, disturb(scene, Disturbance.parse("mask-late")), 8, old).mask.any()


def test_a_mistaken_camera_is_off_by_what_it_says(seen: tuple[Frame, Scene]) -> None:
    frame = seen[0]
    camera = faulty(seen, "extrinsics=2").camera
    T = np.linalg.inv(frame.camera.T_world_cam) @ camera.T_world_cam
    angle = np.degrees(np.arccos((np.trace(T[:3, :3]) - 1) / 2))
    assert angle == pytest.approx(2.0, abs=1e-6)
    assert np.linalg.norm(camera.T_world_cam[:3, 3] - frame.camera.T_world_cam[:3, 3]) == pytest.approx(0.01)
    assert np.array_equal(camera.K, frame.camera.K)


def test_cameras_are_really_turned_and_raised(world: World) -> None:
    scene = evaluation_scenes("disturbed")[0]
    poses = {}
    for text in ("azimuth=20", "elevation=10"):
        world.reset(disturb(scene, Disturbance.parse(text)))
        poses[text] = world.observe().camera.T_world_cam
    world.reset(scene)
    usual, target = world.observe().camera.T_world_cam, np.array(world.pair.look_at)
    for T in poses.values():
        assert np.linalg.norm(T[:3, 3] - target) == pytest.approx(np.linalg.norm(usual[:3, 3] - target))
    assert poses["azimuth=20"][2, 3] == pytest.approx(usual[2, 3])
    rays = [(T[:3, 3] - target) / np.linalg.norm(T[:3, 3] - target) for T in (usual, poses["elevation=10"])]
    assert np.degrees(np.arccos(rays[0] @ rays[1])) == pytest.approx(10.0)


def test_a_camera_on_an_orbit_sees_the_objects_base_where_it_was(world: World) -> None:
    """The other way to turn it moves that point; both go to the same side."""
    cameras = {}
    for size in ("azimuth=0", "azimuth=15", "orbit=15"):
        world.reset(disturb(evaluation_scenes("disturbed")[0], Disturbance.parse(size)))
        cameras[size] = world.observe().camera
    pixels = {size: camera.project(world.place[None])[0][0] for size, camera in cameras.items()}
    usual, turned, orbiting = pixels.values()
    assert orbiting == pytest.approx(usual) and np.linalg.norm(turned - usual) > 3
    headings = [np.arctan2(*camera.T_world_cam[1::-1, 2]) for camera in cameras.values()]
    assert np.degrees(headings[2] - headings[0]) == pytest.approx(np.degrees(headings[1] - headings[0]))


@pytest.mark.parametrize("text", ["nonsense", "bump=x", "bump=-1", "bump=nan", "delay=1.5", "azimuth=1e9"])
def test_bad_disturbances_are_named(text: str) -> None:
    with pytest.raises(UserError, match="--disturb"):
        Disturbance.parse(text)
    assert all(str(Disturbance.parse(kind)) for kind in KINDS)
