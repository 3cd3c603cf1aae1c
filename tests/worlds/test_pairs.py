"""Ten paired worlds: Meta-World's own flags, one start for both tasks, experts that reach, hold and recover."""

from __future__ import annotations

import warnings
from functools import cache

import gymnasium
import numpy as np
import pytest

from memcorr.spec import SPEC, WORLD_TASKS
from memcorr.worlds.disturbances import KINDS, SENSORS, Disturbance, Events
from memcorr.worlds.expert import SPEED, act
from memcorr.worlds.pairs import PAIRS
from memcorr.worlds.scenes import SUITE, Scene, disturb, evaluation_scenes
from memcorr.worlds.world import GRIPPER_COMMAND, World
from tests.worlds import stock

WORLDS = list(PAIRS)
BOTH = [(name, task) for name, pair in PAIRS.items() for task in pair.tasks]
MOVING = [kind for kind in SUITE if kind and kind.partition("=")[0] not in SENSORS]


@cache
def a_world(name: str) -> World:
    return World(name)


def scene(name: str, u: tuple[float, float] = (0.5, 0.5), index: int = 0) -> Scene:
    return Scene("camera", index, 0, u, world=name)


@pytest.mark.long
@pytest.mark.parametrize(("name", "task"), BOTH)
def test_the_flags_are_meta_worlds_own(name: str, task: str) -> None:
    """Two hundred states over the joint's whole range and a little beyond, in five places."""
    world, rng = a_world(name), np.random.default_rng(0)
    low, high = world.model.joint(world.pair.joint).range
    low, high = (low, high) if high > low else (-0.3, 0.1)  # the mug is free
    beyond = 0.005 * (high - low)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        env = stock.make(world, task)
        flags = []
        for u in rng.uniform(0, 1, (5, 2)):
            stock.begin(env, world, scene(name, (float(u[0]), float(u[1]))), task)
            for q in (*rng.uniform(low, high, 36), low - beyond, low, high, high + beyond):
                world.set_joint(float(q))
                stock.follow(env, world)
                flags.append((world.success(task), stock.stock_success(env)))
        env.close()
    assert len(flags) == 200 and all(ours == theirs for ours, theirs in flags)
    assert 0 < sum(ours for ours, _ in flags) < 200


@pytest.mark.parametrize("name", WORLDS)
def test_both_tasks_start_from_the_same_bits_and_touch_nothing(name: str) -> None:
    world = a_world(name)
    for x in (0.0, 0.5, 1.0):
        for y in (0.0, 0.5, 1.0):
            world.reset(scene(name, (x, y)))
            state, frame = world.snapshot(), world.observe()
            assert not stock.touching(world) and not any(map(world.success, world.pair.tasks))
            assert abs(world.progress) < 1e-9 and frame.mask.sum() > 80
            for _ in range(5):
                world.step(np.array([0.5, 0.5, -0.5, 1.0]))
            world.reset(scene(name, (x, y)))
            np.testing.assert_array_equal(world.snapshot(), state)
            again = world.observe()
            for key in ("rgb", "depth", "mask", "robot_state"):
                np.testing.assert_array_equal(getattr(again, key), getattr(frame, key))


@pytest.mark.parametrize("name", WORLDS)
def test_nothing_moves_by_itself_towards_a_goal(name: str) -> None:
    world = a_world(name)
    world.reset(scene(name))
    for _ in range(SPEC.episode_steps):
        world.step(np.array([0.0, 0.0, 0.0, GRIPPER_COMMAND]))
    assert abs(world.progress) < 0.15 and not any(map(world.success, world.pair.tasks))


@pytest.mark.long
@pytest.mark.parametrize("name", WORLDS)
def test_the_expert_reaches_and_holds_everywhere(name: str) -> None:
    """A grid of five by five places, and five scenes that nothing was chosen on, both tasks."""
    world, sides = a_world(name), np.linspace(0, 1, 5)
    grid = [scene(name, (float(x), float(y))) for x in sides for y in sides]
    for place in (*grid, *evaluation_scenes("extreme", 20261117, world=name)[::5]):
        world.reset(place)
        assert not stock.touching(world), place
        for task in world.pair.tasks:
            flags = stock.run_expert(world, place, task)
            assert flags[-1] and flags == sorted(flags), (task, place)


@pytest.mark.long
@pytest.mark.parametrize("name", WORLDS)
def test_the_expert_reaches_its_goals_under_action_noise(name: str) -> None:
    world, noise = a_world(name), Disturbance.parse("action-noise=0.3")
    scenes = [disturb(s, noise) for s in evaluation_scenes("extreme", 20261117, world=name)][::2]
    reached = [recovers(world, s, task) for s in scenes for task in world.pair.tasks]
    assert np.mean(reached) >= 0.95


@pytest.mark.parametrize("name", WORLDS)
def test_the_expert_is_slow_enough_and_its_tasks_differ_from_the_start(name: str) -> None:
    world, chunks = a_world(name), []
    for task in world.pair.tasks:
        world.reset(scene(name))
        actions = []
        for _ in range(SPEC.episode_steps):
            actions.append(act(world, task))
            world.step(actions[-1])
        moves = np.stack(actions)[:, :3]
        assert np.linalg.norm(moves, axis=1).max() <= SPEED + 1e-9
        assert 0.8 < world.progress * (1 if task == world.pair.tasks[0] else -1) < 1.4
        chunks.append(moves[: SPEC.chunk].ravel())
    assert chunks[0] @ chunks[1] / np.linalg.norm(chunks[0]) / np.linalg.norm(chunks[1]) < 0.5


def recovers(world: World, scene: Scene, task: str) -> bool:
    """Whether the expert succeeds in time in a disturbed scene."""
    world.reset(scene)
    events, sent = Events(scene), list[np.ndarray]()
    for _ in range(SPEC.episode_steps):
        action = act(world, task)
        world.step(events.action(sent, action, len(sent)))
        sent.append(action)
        if world.success(task):
            return True
        events.after(world, len(sent))
    return False


@pytest.mark.long
@pytest.mark.parametrize("name", WORLDS)
def test_the_expert_recovers_from_every_disturbance(name: str) -> None:
    world, failures = a_world(name), []
    for kind in MOVING:
        for index, u in enumerate(((0.3, 0.6), (0.7, 0.4))):
            disturbed = disturb(scene(name, u, index), Disturbance.parse(kind))
            failures += [(kind, task, u) for task in world.pair.tasks if not recovers(world, disturbed, task)]
    # A window that is set back into the fingers may keep them in its handle: two thirds of such cases end well.
    assert len(failures) <= (2 if name == "window" else 1), failures


def test_the_door_is_one_of_ten_and_the_suite_knows_every_kind() -> None:
    assert list(WORLD_TASKS) == WORLDS and WORLDS[0] == "door"
    kinds = set(KINDS) - {"other-task", "orbit"}  # for recordings, and beside azimuth
    assert {kind.partition("=")[0] for kind in SUITE if kind} == kinds
    scenes = evaluation_scenes("disturbed", world="plate")
    assert [str(d) for d in scenes[1].disturbances] == ["start=0.2"] and scenes[1].start == 0.2
    counts = [sum(bool(s.disturbances) and str(s.disturbances[0]).startswith(k) for s in scenes) for k in kinds]
    assert min(counts) >= 12 and {s.world for s in scenes} == {"plate"}
    turned = {s.camera_azimuth_deg for s in scenes}
    assert turned == {-20.0, 0.0, 20.0}


def test_another_disturbance_takes_the_place_of_the_suites_own() -> None:
    """A curve over the suite's scenes has only its own fault in them."""
    for own in evaluation_scenes("disturbed")[: len(SUITE)]:
        other = disturb(own, Disturbance.parse("extrinsics=2"))
        assert (other.start, other.camera_azimuth_deg, other.camera_elevation_deg) == (None, 0.0, 0.0)
        assert list(map(str, other.disturbances)) == ["extrinsics=2"] and other.u == own.u


def test_a_disturbance_is_the_same_every_time_and_elsewhere_another() -> None:
    world, positions = a_world("drawer"), []
    for index in (0, 0, 1):
        disturbed = disturb(scene("drawer", index=index), Disturbance.parse("bump"), Disturbance.parse("shift"))
        world.reset(disturbed)
        events = Events(disturbed)
        for step in range(1, 70):
            world.step(np.zeros(4))
            events.after(world, step)
        positions.append(np.concatenate([world.hand, world.place]))
    assert np.array_equal(positions[0], positions[1]) and not np.allclose(positions[0], positions[2], atol=1e-3)
    assert np.linalg.norm(positions[0][3:] - world.pair.place((0.5, 0.5))) == pytest.approx(0.03)


def test_a_delayed_robot_does_what_it_was_told_before() -> None:
    events = Events(disturb(scene("door"), Disturbance.parse("delay=2")))
    sent = [np.full(4, float(k)) for k in range(1, 5)]
    assert np.array_equal(events.action([], sent[0], 0), [0, 0, 0, 1])
    assert np.array_equal(events.action(sent[:2], sent[2], 2), sent[0])
    assert np.array_equal(events.action(sent[:3], sent[3], 3), sent[1])


@pytest.mark.parametrize("name", WORLDS)
def test_every_world_is_a_gymnasium_environment(name: str) -> None:
    words = "".join(word.title() for word in name.split("-"))
    env = gymnasium.make(f"memcorr.worlds.gym_env:memcorr/{words}-v0")
    assert env.unwrapped.world.pair.name == name  # type: ignore[attr-defined]
    assert env.unwrapped.task == PAIRS[name].tasks[0]  # type: ignore[attr-defined]
