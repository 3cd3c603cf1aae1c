"""The Door world as a Gymnasium environment.

    gymnasium.make("memcorr.gym_env:memcorr/Door-v0", task="open", condition="combined")

`reset(seed=n)` draws a scene of the condition from seed n; `reset(options={"scene": scene})`
takes a given one. An episode ends at the first success or after 200 steps.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from .frames import Frame
from .protocol import PROTOCOL, TASKS, Condition, Task
from .scenes import evaluation_scenes
from .sim import DoorWorld

SIZE = PROTOCOL.image_size
OBSERVED = ("rgb", "depth", "mask", "robot_state", "gripper")


class DoorEnv(gymnasium.Env):
    metadata = {"render_modes": ["rgb_array"], "render_fps": 80}  # noqa: RUF012

    def __init__(self, task: Task = "open", condition: Condition = "combined", render_mode: str | None = None) -> None:
        if task not in TASKS:
            raise ValueError(f"unknown task {task!r}: choose one of {', '.join(TASKS)}")
        self.task, self.condition, self.render_mode = task, condition, render_mode
        self.world = DoorWorld()
        self.action_space = spaces.Box(-1.0, 1.0, (PROTOCOL.action_dim,), np.float32)
        self.observation_space = spaces.Dict(
            {
                "rgb": spaces.Box(0, 255, (SIZE, SIZE, 3), np.uint8),
                "depth": spaces.Box(0.0, np.inf, (SIZE, SIZE), np.float32),
                "mask": spaces.Box(0, 1, (SIZE, SIZE), np.bool_),
                "robot_state": spaces.Box(-np.inf, np.inf, (PROTOCOL.state_dim,), np.float64),
                "gripper": spaces.Box(-np.inf, np.inf, (3,), np.float64),
            }
        )
        self._steps = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, NDArray], dict[str, Any]]:
        super().reset(seed=seed)
        scene = (options or {}).get("scene")
        if scene is None:
            scenes = evaluation_scenes(self.condition, int(self.np_random.integers(2**31)))
            scene = scenes[int(self.np_random.integers(len(scenes)))]
        self.world.reset(scene)
        self._steps = 0
        return self._observation(), {"scene": scene, "success": False}

    def step(self, action: NDArray) -> tuple[dict[str, NDArray], float, bool, bool, dict[str, Any]]:
        self.world.step(action)
        self._steps += 1
        success = self.world.success(self.task)
        truncated = not success and self._steps >= PROTOCOL.episode_steps
        return self._observation(), float(success), success, truncated, {"success": success}

    def _observation(self) -> dict[str, NDArray]:
        self._frame: Frame = self.world.observe()
        return {key: getattr(self._frame, key) for key in OBSERVED}

    def render(self) -> NDArray | None:
        return self._frame.rgb if self.render_mode == "rgb_array" else None


gymnasium.register("memcorr/Door-v0", entry_point="memcorr.gym_env:DoorEnv")
