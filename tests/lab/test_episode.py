"""The lab without its page: slots, interference, what the 3D scene is made of, what is recorded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from memcorr.demos.store import Store
from memcorr.errors import UserError
from memcorr.evaluation.controllers import PolicyController, ReplayController, ZerosController
from memcorr.evaluation.evaluate import usual
from memcorr.evaluation.intervention import Intervention
from memcorr.evaluation.rollout import Job, roll_out
from memcorr.policy.policy import load_policy
from memcorr.show.video import is_whole
from memcorr.worlds.scenes import evaluation_scenes
from memcorr.worlds.world import World, shared_world
from tests.test_folders import taken

pytest.importorskip("viser", reason="memcorr[lab] is not installed")

from memcorr.lab.episode import Episode, Guide, usual_share
from memcorr.lab.record import record
from memcorr.lab.shapes import ARROWS, arrows, shapes

SCENE = evaluation_scenes("combined")[0]


def still(store: Store, task: str = "open") -> Guide:
    """Two slots that never move."""
    return Guide(store.demonstration(0, task), {"a": ZerosController(), "b": ZerosController()})


def following(store: Store, task: str) -> Guide:
    """The shipped policy beside replay, as the lab has them."""
    one = {task: store.demonstration(0, task)}
    policy = PolicyController(load_policy("shipped", "cpu"), one, usual("shipped"), slots=1)
    return Guide(one[task], {"memcorr": policy, "replay": ReplayController(one, Intervention())})


def test_nobody_interfering_it_is_the_rollout_that_evaluation_judges(store: Store, world: World) -> None:
    guide = following(store, "close")
    job = Job(SCENE, "close")
    episode = Episode(world, SCENE, guide)
    while not episode.now.over:
        episode.advance()
    done = {slot.name: (slot.first_success, slot.state) for slot in episode.now.slots}
    for name, controller in guide.controllers.items():
        ((_, outcome),) = roll_out(world, controller, iter([job]), slots=1)
        assert (outcome.success, outcome.steps) == (done[name][0] is not None, done[name][0])
    assert [slot.success for slot in episode.now.slots] == [True, True]


@pytest.mark.long
def test_a_reference_swapped_in_mid_episode_is_followed_from_its_start(store: Store, world: World) -> None:
    """And an answer is for the slot that asked: matches, phase and error are there for the policy."""
    first, other = following(store, "open"), following(store, "close")
    episode = Episode(world, SCENE, first)
    for _ in range(11):
        episode.advance()
    assert [slot.since for slot in episode.now.slots] == [3, 3]
    episode.follow(other)
    assert (episode.now.begun, episode.now.elapsed, episode.now.events) == (11, 0, ("reference: close, pair 0",))
    assert all(sight.supplied is not None and sight.supplied.task == "close" for sight in episode.see())
    episode.look()
    policy, replay = episode.see()
    for sight in (policy, replay):
        assert sight.slot.answer is not None and sight.slot.answer.plan is not None
        assert (sight.slot.answer.plan.phase, sight.slot.since, sight.slot.looks) == (0, 0, 1)
        assert sight.supplied is not None and sight.supplied.task == "close"
    assert policy.match_error_mm is not None and 0 < policy.match_error_mm < 30
    assert policy.slot.answer is not None and policy.slot.answer.plan is not None
    matches = policy.slot.answer.plan.matches
    assert matches is not None
    found = arrows(policy)
    assert (
        list(found) == list(ARROWS) and [len(found[words]) for words in list(ARROWS)[:2]] == [matches.valid.sum()] * 2
    )
    green = found["live point to gripper"]
    assert np.allclose(green[:, 0], matches.p_live[matches.valid]) and np.allclose(green[:, 1], policy.frame.gripper)


def test_what_a_person_does_happens_in_every_slot(store: Store, world: World) -> None:
    episode = Episode(world, SCENE, still(store))
    episode.advance()
    before = [slot.place for slot in episode.now.slots]
    episode.interfere(lambda world: world.move_base(np.array([0.02, 0.0, 0.0])), "base moved +x")
    episode.put_joint(0.9)
    for azimuth in (5.0, 15.0, 25.0):  # a slider on its way
        episode.turn_camera(azimuth)
    q = world.pair.start_at(0.9)
    assert episode.now.events == ("base moved +x", f"joint to {q:.3f}", "camera to 25 degrees")
    sights = episode.see()
    for slot, place, sight in zip(episode.now.slots, before, sights, strict=True):
        assert np.allclose(slot.place - place, [0.02, 0, 0])
        assert sight.progress == pytest.approx(world.pair.progress(q), abs=1e-6)
        assert np.allclose(sight.frame.camera.T_world_cam, sights[0].frame.camera.T_world_cam)
    assert sights[0].frame.mask.sum() > 100
    episode.advance()
    assert episode.now.events == () and len(episode.past[-1].events) == 3
    assert [len(episode.past), episode.now.step] == [2, 2]
    episode.place((0.1, 0.9))
    assert np.allclose(episode.now.slots[1].place, world.pair.place((0.1, 0.9))) and np.allclose(episode.u, (0.1, 0.9))


def test_before_the_first_step_a_slider_chooses_the_scene(store: Store, world: World) -> None:
    episode = Episode(world, SCENE, still(store))
    episode.place((0.3, 0.6))
    episode.put_joint(0.2)
    episode.turn_camera(-10.0)
    assert not episode.now.events and not episode.past
    wanted = replace(SCENE, u=(0.3, 0.6), start=0.2, camera_azimuth_deg=-10.0)
    assert episode.scene == wanted
    world.reset(wanted)
    assert np.array_equal(world.snapshot(), episode.now.slots[0].state)
    assert world.pair.start_at(usual_share(world)) == pytest.approx(world.pair.start)


def test_the_past_is_seen_as_it_was(store: Store, world: World) -> None:
    episode = Episode(world, SCENE, still(store))
    then = episode.see()[0]
    episode.advance()
    episode.turn_camera(40.0)
    episode.interfere(lambda world: world.move_base(np.array([0.0, 0.03, 0.0])), "base moved +y")
    episode.advance()
    assert not np.array_equal(episode.see()[0].frame.rgb, then.frame.rgb)
    again = episode.see(episode.past[0])[0]
    assert np.array_equal(again.frame.rgb, then.frame.rgb) and np.array_equal(again.positions, then.positions)


@pytest.mark.parametrize("name", ["door", "coffee"])
def test_shapes_are_where_the_camera_sees_them(name: str) -> None:
    """Nothing stands in front of what is rendered, and the object's silhouette is that of its mask."""
    world = shared_world(name)
    world.reset(replace(SCENE, world=name, u=(0.5, 0.5), camera_azimuth_deg=0.0))
    frame = world.observe()
    seen = []
    for solid in shapes(world.model):
        R, t = world.data.xmat[solid.body].reshape(3, 3), world.data.xpos[solid.body]
        uv, z = frame.camera.project(solid.vertices @ R.T + t)
        row, column = (np.round(uv).astype(int)[:, ::-1]).T
        inside = (row >= 1) & (row < 127) & (column >= 1) & (column < 127) & (z > 0)
        row, column, z = row[inside], column[inside], z[inside]
        around = np.stack([frame.depth[row + i, column + j] for i in (-1, 0, 1) for j in (-1, 0, 1)])
        nearest = np.where(around > 0, around, np.inf).min(axis=0)  # an edge lies between two pixels
        assert (z < nearest - 0.012).sum() <= 0.01 * len(z), solid.body
        if solid.body == world._body:
            seen += [uv[inside]]
    corners = np.concatenate(seen)
    rows, columns = np.nonzero(frame.mask)
    box = np.array([columns.min(), rows.min(), columns.max(), rows.max()])
    assert np.abs(np.concatenate([corners.min(axis=0), corners.max(axis=0)]) - box).max() < 3


def test_an_episode_becomes_a_video_and_an_rrd(store: Store, world: World, tmp_path: Path) -> None:
    from rerun.chunk import RrdReader

    episode = Episode(world, SCENE, still(store))
    for _ in range(3):
        episode.advance()
    episode.interfere(lambda world: world.push_hand(np.array([0.0, 0.05, 0.0])), "hand pushed +y")
    shares: list[float] = []
    film, rrd = record(episode, tmp_path, shares.append)
    assert (film.name, rrd.name) == ("door-001.mp4", "door-001.rrd") and shares == [0.25, 0.5, 0.75, 1.0]
    assert is_whole(film.read_bytes()) and len(list(tmp_path.iterdir())) == 2
    chunks = RrdReader(rrd).stream().to_chunks()
    rows: dict[str, int] = {}
    for chunk in chunks:
        rows[chunk.entity_path] = rows.get(chunk.entity_path, 0) + chunk.num_rows
    assert rows["/a/progress"] == rows["/b/progress"] == 4 and rows["/events"] == 1
    assert any(path.startswith("/world/a/body-") for path in rows) and "/world/b/camera/rgb" in rows
    assert record(episode, tmp_path, shares.append)[0].name == "door-002.mp4"


def test_two_labs_do_not_record_into_one_folder_at_once(store: Store, world: World, tmp_path: Path) -> None:
    """They would take the same number, and clear away each other's half."""
    with taken(tmp_path), pytest.raises(UserError, match="another memcorr"):
        record(Episode(world, SCENE, still(store)), tmp_path, lambda share: None)


@pytest.mark.long
def test_a_task_of_metaworld_is_an_episode_like_any_other() -> None:
    """Two slots with states of their own; another placement is another scene; the servo presses the button."""
    name = "metaworld/button-press"
    store = Store.open(Path(__file__).parents[2] / "results/references/metaworld/button-press")
    world, one = shared_world(name), {"button-press": store.demonstration(0, "button-press")}
    servo = PolicyController(load_policy("servo"), one, usual("servo"), slots=1)
    guide = Guide(one["button-press"], {"servo": servo, "still": ZerosController()})
    scene = evaluation_scenes("validation", world=name)[0]
    episode = Episode(world, scene, guide)
    assert episode.where == "placement 0"
    while episode.now.slots[0].first_success is None and episode.now.step < 300:
        episode.advance()
    done, still = episode.now.slots
    assert done.success and still.first_success is None
    moved = [sight.progress for sight in episode.see()]
    assert moved[0] > 0.02 and moved[1] < 0.005
    episode.begin(replace(scene, index=3), guide)
    assert episode.where == "placement 3" and episode.now.step == 0
