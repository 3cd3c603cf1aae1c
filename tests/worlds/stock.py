"""Meta-World's own environments in one of our scenes, what flags are compared with; and how ours are looked at."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np

from memcorr.spec import SPEC, Array, Task
from memcorr.worlds.expert import act
from memcorr.worlds.gl import mujoco
from memcorr.worlds.scenes import Scene
from memcorr.worlds.world import MOCAP_QUAT, World

# The classes by world and task: module sawyer_NAME_v3, class Sawyer...EnvV3.
NAMES: dict[str, dict[Task, str]] = {
    "door": {"open": "door", "close": "door_close"},
    "drawer": {"open": "drawer_open", "close": "drawer_close"},
    "window": {"open": "window_open", "close": "window_close"},
    "faucet": {"open": "faucet_open", "close": "faucet_close"},
    "lock": {"unlock": "door_unlock", "lock": "door_lock"},
    "handle": {"pull": "handle_pull", "press": "handle_press"},
    "handle-side": {"pull": "handle_pull_side", "press": "handle_press_side"},
    "plate": {"slide": "plate_slide", "back": "plate_slide_back"},
    "plate-side": {"slide": "plate_slide_side", "back": "plate_slide_back_side"},
    "coffee": {"push": "coffee_push", "pull": "coffee_pull"},
}


def random_vector(world: str, task: Task, place: Array) -> Array:
    """What Meta-World draws at a reset, so that object and goal are where ours are."""
    goals = {
        ("plate", "slide"): ((0, 0, 0), (0, 0.30, 0)),
        ("plate", "back"): ((0, 0.25, 0), (0, 0, 0.015)),
        ("plate-side", "slide"): ((0, 0, 0), (-0.25, 0, 0)),
        ("plate-side", "back"): ((-0.25, 0, 0), (0.1, 0, 0.015)),
        ("coffee", "push"): ((0, -0.20, 0), (0, 0, 0)),
        ("coffee", "pull"): ((0, 0, 0), (0, -0.20, 0)),
    }
    both = goals.get((world, task))
    return place if both is None else np.concatenate([place + np.array(offset) for offset in both])


def stock_env(world: World, scene: Scene, task: Task) -> Any:
    """The stock environment of `task` in the state that `world.reset(scene)` gives ours."""
    env = make(world, task)
    begin(env, world, scene, task)
    return env


def make(world: World, task: Task) -> Any:
    name = NAMES[world.pair.name][task]
    module = import_module(f"metaworld.envs.sawyer_{name}_v3")
    env = getattr(module, f"Sawyer{name.title().replace('_', '')}EnvV3")()
    env._set_task_called = True
    env._freeze_rand_vec = True
    env._partially_observable = False
    return env


def begin(env: Any, world: World, scene: Scene, task: Task) -> None:
    """Both worlds at the start of `scene`."""
    world.reset(scene)
    env._last_rand_vec = random_vector(world.pair.name, task, world.place)
    env.hand_init_pos = np.array(world.pair.hand)
    env.reset()
    for body in world.pair.placed:
        env.model.body(body).pos[:] = world.model.body(body).pos
    env.data.mocap_pos[0], env.data.mocap_quat[0] = world.data.mocap_pos[0], MOCAP_QUAT
    follow(env, world)


def follow(env: Any, world: World) -> None:
    """Puts the stock environment into our world's state, at rest."""
    env.data.qpos[:], env.data.qvel[:] = world.data.qpos, 0.0
    mujoco.mj_forward(env.model, env.data)


def stock_success(env: Any) -> bool:
    """The official flag in the current state."""
    _, info = env.evaluate_state(env._get_obs(), np.zeros(4, np.float32))
    return bool(info["success"])


# What our worlds are looked at with, beside the stock ones.


def run_expert(world: World, scene: Scene, task: Task) -> list[bool]:
    """The flag after every step of the expert."""
    world.reset(scene)
    flags = []
    for _ in range(SPEC.episode_steps):
        world.step(act(world, task))
        flags.append(world.success(task))
    return flags


def touching(world: World) -> bool:
    """Whether the robot touches the object or its base in the current state."""
    model, data = world.model, world.data
    mujoco.mj_forward(model, data)
    touched = model.body_rootid[model.geom_bodyid[data.contact.geom]].reshape(-1, 2)
    objects = [model.body_rootid[world._body], *(body for body, _ in world._placed)]
    robot = model.body("base").id
    return bool((np.isin(touched, objects).any(axis=1) & (touched == robot).any(axis=1)).any())
