"""The world: Meta-World's physics and flags, one shared start, nothing that tells the task."""

from __future__ import annotations

from copy import copy
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from memcorr.errors import UserError
from memcorr.frames import Camera, check_frame, look_at
from memcorr.spec import SPEC, TASKS, Task
from memcorr.worlds.expert import act
from memcorr.worlds.gl import mujoco
from memcorr.worlds.gym_env import frame_of, observation_of
from memcorr.worlds.render import OBJECT_GROUP
from memcorr.worlds.scenes import Scene, demonstration_scenes
from memcorr.worlds.world import CAMERA_NAME, GRIPPER_COMMAND, View, World, build_model, shared_world
from tests.worlds.stock import stock_env, touching

CENTRE = Scene("camera", 0, 0, (0.5, 0.5))
STATE = mujoco.mjtState.mjSTATE_INTEGRATION


def full_state(world: World) -> np.ndarray:
    state = np.empty(mujoco.mj_stateSize(world.model, STATE))
    mujoco.mj_getState(world.model, world.data, state, STATE)
    return state


@pytest.mark.parametrize("task", TASKS)
def test_lean_step_follows_meta_world(world: World, task: Task) -> None:
    """From the same state, under the expert's and random actions: same poses, same success flags."""
    rng = np.random.default_rng(0)
    for scene in (CENTRE, Scene("extreme", 0, 0, (0.02, 0.97))):
        world.reset(scene)
        env = stock_env(world, scene, task)
        mujoco.mj_setState(env.model, env.data, full_state(world), STATE)
        mujoco.mj_forward(env.model, env.data)
        for t in range(120):
            action = act(world, task) if t % 4 else rng.uniform(-1.2, 1.2, 4)
            world.step(action)
            observation, _, _, _, info = env.step(action)
            np.testing.assert_allclose(world.hand, observation[:3], atol=1e-4)
            np.testing.assert_allclose(world.data.geom("handle").xpos, observation[4:7], atol=1e-4)
            assert world.success(task) == bool(info["success"]), t
        env.close()


def test_both_tasks_start_from_the_same_bits(world: World) -> None:
    """The task is no argument of `reset`; two resets give the same state and the same images."""
    world.reset(CENTRE)
    state, frame = full_state(world), world.observe()
    for _ in range(20):
        world.step(np.array([0.5, 0.5, -0.5, 1.0]))
    world.reset(CENTRE)
    np.testing.assert_array_equal(full_state(world), state)
    again = world.observe()
    for key in ("rgb", "depth", "mask", "robot_state", "gripper"):
        np.testing.assert_array_equal(getattr(again, key), getattr(frame, key))


def test_the_goal_site_is_not_drawn(world: World) -> None:
    world.reset(CENTRE)
    before = world.observe().rgb
    site = world.model.site("goal")
    original = site.pos.copy()
    site.pos[:] = [0.0, 0.6, 0.15]  # in the middle of the picture
    mujoco.mj_kinematics(world.model, world.data)
    try:
        np.testing.assert_array_equal(world.observe().rgb, before)
    finally:
        site.pos[:] = original


def test_nothing_touches_at_the_shared_start(world: World) -> None:
    for x in np.linspace(0, 1, 11):
        for y in np.linspace(0, 1, 11):
            world.reset(Scene("extreme", 0, 0, (x, y)))
            assert not touching(world), (x, y)
            for _ in range(3):
                world.step(np.array([0, 0, 0, GRIPPER_COMMAND]))
            assert world.joint == SPEC.door_start


def test_touching_can_be_true(world: World) -> None:
    world.reset(CENTRE)
    touched = False
    for _ in range(80):  # the door yields, so contact comes and goes while the hand pushes
        world.step(act(world, "close"))
        touched |= touching(world)
    assert touched


def test_success_windows(world: World) -> None:
    """Opening succeeds only around -1.6 rad (overshooting un-solves it), closing near 0."""
    flags: dict[float, tuple[bool, bool]] = {}
    for joint in (0.0, -0.17, -0.19, -0.7854, -1.37, -1.39, -1.81, -1.83):
        world.reset(CENTRE)
        world.set_joint(joint)
        flags[joint] = (world.success("open"), world.success("close"))
    assert [q for q, (opened, _) in flags.items() if opened] == [-1.39, -1.81]
    assert [q for q, (_, closed) in flags.items() if closed] == [0.0, -0.17]


def test_two_passes_equal_the_stock_renderers_three(world: World) -> None:
    """Our two passes against the stock renderer's three, without its
    multisampling, shadows and reflections."""
    world.observe()
    model = copy(world.renderer.model)
    model.geom_group[model.geom_group == OBJECT_GROUP] = 1
    stock = mujoco.Renderer(model, 128, 128)
    data = mujoco.MjData(model)
    door = model.body("door_link").id
    no_sites = mujoco.MjvOption()
    no_sites.sitegroup[:] = 0
    for azimuth, task in ((-15.0, "open"), (0.0, "close"), (15.0, "open")):
        world.reset(Scene("camera", 0, 0, (0.3, 0.6), azimuth))
        for _ in range(70):
            world.step(act(world, task))
        frame = world.observe()
        model.body_pos[:], model.cam_pos[:], model.cam_quat[:] = (
            world.model.body_pos,
            world.model.cam_pos,
            world.model.cam_quat,
        )
        mujoco.mj_setState(model, data, full_state(world), STATE)
        mujoco.mj_kinematics(model, data)
        mujoco.mj_camlight(model, data)
        stock.update_scene(data, CAMERA_NAME, no_sites)
        for flag in (mujoco.mjtRndFlag.mjRND_SHADOW, mujoco.mjtRndFlag.mjRND_REFLECTION):
            stock.scene.flags[flag] = 0
        np.testing.assert_array_equal(frame.rgb, stock.render())
        stock.enable_depth_rendering()
        metres = stock.render()
        np.testing.assert_allclose(frame.depth, np.where(metres < 100, metres, 0), rtol=1e-4)
        stock.enable_segmentation_rendering()
        ids = stock.render()[..., 0]
        stock.disable_segmentation_rendering()
        expected = (ids >= 0) & (model.geom_bodyid[np.maximum(ids, 0)] == door)
        np.testing.assert_array_equal(frame.mask, expected)
    stock.close()


def test_coarse_robot_looks_the_same(world: World) -> None:
    """Against the full meshes: the visible door changes by a few edge pixels at most."""
    world.reset(CENTRE)
    for _ in range(60):
        world.step(act(world, "open"))
    frame = world.observe()
    model = build_model(world.pair.scene)
    model.vis.quality.offsamples = 0
    stock = mujoco.Renderer(model, 128, 128)
    model.body_pos[:], model.cam_pos[:], model.cam_quat[:] = (
        world.model.body_pos,
        world.model.cam_pos,
        world.model.cam_quat,
    )
    stock.update_scene(world.data, CAMERA_NAME)
    stock.enable_segmentation_rendering()
    geom = stock.render()[..., 0]
    door = (geom >= 0) & (model.geom_bodyid[np.maximum(geom, 0)] == model.body("door_link").id)
    assert (door != frame.mask).sum() < 20
    stock.close()


def test_observation_matches_the_protocol(world: World) -> None:
    world.reset(demonstration_scenes()[0])
    frame = world.observe()
    assert frame.rgb.shape == (128, 128, 3) and frame.rgb.dtype == np.uint8
    assert frame.depth.shape == frame.mask.shape == (128, 128)
    assert frame.robot_state.shape == (SPEC.state_dim,)
    np.testing.assert_allclose(frame.gripper, frame.robot_state[3:].reshape(2, 3).mean(axis=0))


def test_a_process_has_one_world_of_a_name() -> None:
    """A view that is left out is none: else a demonstration, which evaluates and then films, had two."""
    assert shared_world("door") is shared_world() is shared_world("door", None)


def test_gymnasium_environment() -> None:
    env = gymnasium.make("memcorr.worlds.gym_env:memcorr/Door-v0", task="close")
    check_env(env.unwrapped, skip_render_check=True)
    first, info = env.reset(seed=3)
    again, _ = env.reset(seed=3)
    np.testing.assert_array_equal(first["rgb"], again["rgb"])
    world = env.unwrapped.world  # type: ignore[attr-defined]
    env.reset(options={"scene": info["scene"]})
    for _ in range(120):
        _, reward, terminated, truncated, info = env.step(act(world, "close").astype(np.float32))
        if terminated or truncated:
            break
    assert terminated and info["success"] and reward == 1.0


def test_nonsense_is_no_action_and_a_breakdown_no_success(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # MuJoCo logs the breakdown to a file in the working directory
    env = gymnasium.make("memcorr.worlds.gym_env:memcorr/Door-v0", task="close").unwrapped
    env.reset(seed=3)
    for nonsense in (np.full(4, np.nan), np.array([np.inf, 0, 0, 0]), np.zeros(3), np.zeros(())):
        with pytest.raises(ValueError, match="4 finite numbers"):
            env.step(nonsense)
    env.world.data.qvel[:] = 1e12  # type: ignore[attr-defined]
    _, reward, terminated, truncated, info = env.step(np.zeros(4))
    assert (reward, terminated, truncated) == (0.0, True, False) and info == {"success": False, "diverged": True}


def test_an_observation_holds_all_that_a_frame_does(world: World) -> None:
    world.reset(demonstration_scenes()[0])
    frame = world.observe()
    again = frame_of(observation_of(frame))
    for name in ("rgb", "depth", "mask", "robot_state", "gripper"):
        np.testing.assert_array_equal(getattr(again, name), getattr(frame, name))
    np.testing.assert_array_equal(again.camera.T_world_cam, frame.camera.T_world_cam)
    check_frame(again)


def test_another_camera_sees_the_same_world(world: World) -> None:
    """Drawn with its own camera, a world is the same picture; with another, the same points in space."""
    scene = demonstration_scenes()[0]
    world.reset(scene)
    own = world.observe()
    same = World("door", View.of(own.camera, *own.depth.shape))
    same.reset(scene)
    again = same.observe()
    assert np.array_equal(again.rgb, own.rgb) and np.array_equal(again.mask, own.mask)
    wide = Camera.from_fovy(36.0, (120, 160), look_at(np.array([0.92, 0.34, 0.95]), np.array([0.0, 0.64, 0.13])))
    other = World("door", View.of(wide, 120, 160))
    other.reset(scene)
    frame = other.observe()
    assert frame.rgb.shape == (120, 160, 3) and frame.mask.sum() > 300
    assert np.allclose(frame.camera.K, wide.K) and np.allclose(frame.camera.T_world_cam, wide.T_world_cam, atol=1e-6)
    here, there = (f.camera.lift(np.argwhere(f.mask)[:, ::-1], f.depth[f.mask]) for f in (own, frame))
    gap = np.linalg.norm(here[:, None] - there, axis=-1).min(axis=1)
    assert np.median(gap) < 0.006  # metres: neighbouring pixels of the other picture
    other.set_camera(15.0, 10.0)
    turned = other.observe().camera.T_world_cam
    middle = np.array(world.pair.look_at)
    assert np.isclose(np.linalg.norm(turned[:3, 3] - middle), np.linalg.norm(wide.T_world_cam[:3, 3] - middle))
    assert turned[2, 3] > wide.T_world_cam[2, 3]  # up
    with pytest.raises(UserError, match="cannot be drawn"):
        View.of(Camera(wide.K * np.array([[1.1], [1.0], [1.0]]), wide.T_world_cam), 120, 160)
