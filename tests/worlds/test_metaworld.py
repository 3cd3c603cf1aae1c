"""Any of Meta-World's tasks is a world, and Meta-World is as it was."""

from __future__ import annotations

from pathlib import Path

import gymnasium
import numpy as np
import pytest
from metaworld.env_dict import ALL_V3_ENVIRONMENTS

from memcorr.demos.store import Store
from memcorr.errors import UserError
from memcorr.evaluation.evaluate import evaluate, find_references
from memcorr.policy.policy import load_policy
from memcorr.worlds.gym_env import frame_of
from memcorr.worlds.scenes import evaluation_scenes
from memcorr.worlds.stock import StockWorld, environment
from memcorr.worlds.world import World, shared_world

BUTTON, PUSH = "metaworld/button-press", "metaworld/push-along"
# Seen from their objects, the goals of these stand elsewhere each time, and nothing can be moved along.
UNTELLABLE = (
    *("assembly", "bin-picking", "box-close", "hammer", "pick-out-of-hole", "reach", "reach-wall", "sweep"),
    "sweep-into",
)


def scenes(world: str, seed: int = 0) -> list:
    return evaluation_scenes("validation", seed, world=world)


def acted(world: World, steps: int) -> np.ndarray:
    """Where the hand and everything else went under the scripted policy."""
    assert isinstance(world, StockWorld)
    way = []
    for _ in range(steps):
        world.step(world.expert())
        way.append(np.concatenate([world.data.qpos, world.data.mocap_pos[0], [world.success(world.pair.tasks[0])]]))
    return np.stack(way)


def test_an_episode_is_metaworlds_own() -> None:
    """The same placement in Meta-World's environment: the same motion, reward flag for reward flag."""
    world = shared_world(BUTTON)
    assert isinstance(world, StockWorld)
    world.reset(scenes(BUTTON)[3])
    placed = world.env._last_rand_vec.copy()
    ours = acted(world, 80)
    env, policy, _ = environment(BUTTON)
    env._freeze_rand_vec, env._last_rand_vec = True, placed
    env.reset()
    for t in range(80):
        *_, info = env.step(np.clip(policy.get_action(env._get_obs().copy()), -1.0, 1.0))
        assert np.allclose(env.data.qpos, ours[t, : len(env.data.qpos)], atol=1e-6)
        assert bool(info["success"]) == ours[t, -1]


@pytest.mark.parametrize("name", [BUTTON, PUSH])
def test_a_snapshot_brings_everything_back(name: str) -> None:
    world, scene = shared_world(name), scenes(name)[1]
    world.reset(scene)
    acted(world, 20)
    state = world.snapshot()
    once, seen = acted(world, 20), world.observe()
    world.reset(scenes(name)[2])  # somebody else's turn
    acted(world, 5)
    world.restore(scene, state)
    assert np.array_equal(acted(world, 20), once)
    assert np.array_equal(world.observe().rgb, seen.rgb)


def test_a_scene_is_the_same_whoever_was_there_before() -> None:
    world = shared_world(BUTTON)
    places = []
    for order in ((0, 1), (1, 0)):
        for n in order:
            world.reset(scenes(BUTTON)[n])
            if n == 0:
                places.append(world.T_world_object)
    assert np.array_equal(places[0], places[1])
    world.reset(scenes(BUTTON, seed=5)[0])
    assert not np.allclose(world.T_world_object, places[0])


def test_the_mask_is_what_the_hand_moves() -> None:
    world = shared_world(BUTTON)
    world.reset(scenes(BUTTON)[0])
    before = world.observe()
    acted(world, 60)
    after = world.observe()
    assert 50 < before.mask.sum() < 3000
    pressed = world.T_world_object[1, 3] - world._stood[1, 3]  # type: ignore[attr-defined]
    assert pressed > 0.02 and world.joint > 0.02
    assert after.mask.sum() != before.mask.sum()


def test_a_goal_that_is_moved_along_stands_in_the_same_way_to_its_object() -> None:
    world = shared_world(PUSH)
    assert isinstance(world, StockWorld)
    apart = []
    for scene in scenes(PUSH)[:4]:
        world.reset(scene)
        apart.append(world.env._target_pos - world.T_world_object[:3, 3])
    assert np.ptp(apart, axis=0).max() < 0.02 and np.linalg.norm(apart[0]) > 0.05


def test_where_one_recording_cannot_tell_the_goal_it_is_said() -> None:
    with pytest.raises(UserError, match=r"one recording cannot tell.*push-along moves the goal along"):
        StockWorld("metaworld/push")
    with pytest.raises(UserError, match=r"moves nothing but the robot, so one recording cannot tell"):
        StockWorld("metaworld/reach")
    with pytest.raises(UserError, match=r"unknown world 'metaworld/pull-tooth'.*button-press"):
        StockWorld("metaworld/pull-tooth")


@pytest.mark.long
def test_every_task_is_a_world_or_says_why_not() -> None:
    refused = []
    for key in ALL_V3_ENVIRONMENTS:
        name = f"metaworld/{key.removesuffix('-v3')}"
        try:
            StockWorld(name)
        except UserError as problem:
            if "-along moves" in str(problem):
                StockWorld(f"{name}-along")
            else:
                refused.append(name.removeprefix("metaworld/"))
    assert tuple(sorted(refused)) == UNTELLABLE


def test_gymnasium_takes_it() -> None:
    env = gymnasium.make("memcorr.worlds.gym_env:memcorr/World-v0", world=BUTTON)
    observation, info = env.reset(seed=1)
    assert info["scene"].world == BUTTON and info["scene"].condition == "validation"
    observation, reward, over, truncated, info = env.step(np.zeros(4, np.float32))
    assert not over and not truncated and reward == 0.0
    assert frame_of(observation).mask.any()


@pytest.mark.long
@pytest.mark.parametrize("name", [BUTTON, PUSH])
def test_one_recording_is_followed_elsewhere(name: str, tmp_path: Path) -> None:
    """From nothing: the reference is recorded, the servo follows it in placements that it was not recorded in."""
    rows = evaluate("servo", tmp_path / "rows", world=name, scenes=(0, 1, 2), workers=2)
    assert [row.success for row in rows] == [True] * 3
    assert {row.world for row in rows} == {name} and rows[0].recording == ""
    expert = evaluate("expert", tmp_path / "expert", world=name, scenes=(0, 1, 2), workers=2)
    assert [row.success for row in expert] == [True] * 3


@pytest.mark.long
def test_replay_is_followed_like_any_policy(tmp_path: Path) -> None:
    """Its rows are made by evaluation's own controller; by hand it goes the same way."""
    store, world = Store.open(find_references(tmp_path, BUTTON)), shared_world(BUTTON)
    follower = load_policy("replay").follow(store.demonstration(0, "button-press"))
    world.reset(scenes(BUTTON)[0])
    for elapsed in range(0, 240, 8):
        plan = follower.plan(world.observe(), elapsed)
        assert plan.phase == min(elapsed, len(follower.reference.at_pace(follower.planner.following.costs.pace)) - 1)
        for action in plan.actions[:8]:
            world.step(action)
        if world.success("button-press"):
            return
    raise AssertionError("replay did not press the button")
