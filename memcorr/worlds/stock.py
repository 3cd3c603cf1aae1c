"""Meta-World's own environments in one of our scenes: what we compare against."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..spec import SPEC, Task
from .gl import mujoco
from .scenes import Scene
from .world import HAND_START, MOCAP_QUAT


def stock_env(task: Task, scene: Scene) -> Any:
    """`SawyerDoorEnvV3` or `SawyerDoorCloseEnvV3` with the door of `scene`, half open, hand at our start."""
    from metaworld.envs.sawyer_door_close_v3 import SawyerDoorCloseEnvV3
    from metaworld.envs.sawyer_door_v3 import SawyerDoorEnvV3

    env = (SawyerDoorEnvV3 if task == "open" else SawyerDoorCloseEnvV3)()
    env._set_task_called = True
    env._freeze_rand_vec = True
    env._partially_observable = False
    env._last_rand_vec = scene.door_position
    env.hand_init_pos = HAND_START
    env.reset()
    env.data.mocap_pos[0], env.data.mocap_quat[0] = HAND_START, MOCAP_QUAT
    env._set_obj_xyz(np.array(SPEC.door_start))
    mujoco.mj_forward(env.model, env.data)
    return env
