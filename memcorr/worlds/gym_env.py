"""The worlds as Gymnasium environments: memcorr/Door-v0, Drawer-v0, HandleSide-v0 and so on.

    gymnasium.make("memcorr.worlds.gym_env:memcorr/Door-v0", task="open", condition="combined")
    gymnasium.make("memcorr.worlds.gym_env:memcorr/World-v0", world="metaworld/button-press")

`reset(seed=n)` draws a scene of the condition from seed n; `reset(options={"scene": scene})`
takes a given one. An episode ends at the first success, after 200 steps (500 in a task of Meta-World), or when physics
breaks down.
The observation holds all that a policy may see, the camera included: `frame_of(observation)` is the
`Frame` that `memcorr`'s own policies plan from.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from ..frames import Camera, Frame
from ..spec import DOOR, SPEC, Task, TestSet
from .pairs import PAIRS, find_tasks
from .scenes import evaluation_scenes, usual_condition
from .world import make_world

SIZE = SPEC.image_size
Observation = dict[str, NDArray]


def observation_of(frame: Frame) -> Observation:
    return {
        "rgb": frame.rgb,
        "depth": frame.depth,
        "mask": frame.mask,
        "K": frame.camera.K,
        "T_world_cam": frame.camera.T_world_cam,
        "robot_state": frame.robot_state,
        "gripper": frame.gripper,
    }


def frame_of(observation: Observation) -> Frame:
    o = observation
    camera = Camera(o["K"], o["T_world_cam"])
    return Frame(o["rgb"], o["depth"], o["mask"], camera, o["robot_state"], o["gripper"])


def anything(*shape: int) -> spaces.Box:
    return spaces.Box(-np.inf, np.inf, shape, np.float64)


class PairEnv(gymnasium.Env):
    metadata = {"render_modes": ["rgb_array"], "render_fps": 80}  # noqa: RUF012

    def __init__(
        self,
        world: str = DOOR,
        task: Task | None = None,
        condition: TestSet | None = None,
        render_mode: str | None = None,
    ) -> None:
        """Without a condition: the combined shift, or the placements of a task of Meta-World."""
        tasks = find_tasks(world)
        if task is not None and task not in tasks:
            raise ValueError(f"unknown task {task!r}: choose one of {', '.join(tasks)}")
        self.task, self.render_mode = task or tasks[0], render_mode
        self.condition: TestSet = condition or usual_condition(world)
        self.world = make_world(world)
        self.action_space = spaces.Box(-1.0, 1.0, (SPEC.action_dim,), np.float32)
        self.observation_space = spaces.Dict(
            {
                "rgb": spaces.Box(0, 255, (SIZE, SIZE, 3), np.uint8),
                "depth": spaces.Box(0.0, np.inf, (SIZE, SIZE), np.float32),
                "mask": spaces.Box(0, 1, (SIZE, SIZE), np.bool_),
                "K": anything(3, 3),
                "T_world_cam": anything(4, 4),
                "robot_state": anything(SPEC.state_dim),
                "gripper": anything(3),
            }
        )
        self._steps = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        super().reset(seed=seed)
        scene = (options or {}).get("scene")
        if scene is None:
            scenes = evaluation_scenes(self.condition, int(self.np_random.integers(2**31)), world=self.world.pair.name)
            scene = scenes[int(self.np_random.integers(len(scenes)))]
        self.world.reset(scene)
        self._steps = 0
        return self._observation(), {"scene": scene, "success": False}

    def step(self, action: NDArray) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """An action that is not four finite numbers is a ValueError; a breakdown ends the episode unsuccessfully."""
        self.world.step(action)
        self._steps += 1
        diverged = self.world.diverged
        success = self.world.success(self.task) and not diverged
        over = success or diverged
        truncated = not over and self._steps >= self.world.steps
        return self._observation(), float(success), over, truncated, {"success": success, "diverged": diverged}

    def _observation(self) -> Observation:
        self._frame = self.world.observe()
        return observation_of(self._frame)

    def render(self) -> NDArray | None:
        return self._frame.rgb if self.render_mode == "rgb_array" else None


for name in PAIRS:
    words = "".join(word.title() for word in name.split("-"))
    gymnasium.register(f"memcorr/{words}-v0", entry_point="memcorr.worlds.gym_env:PairEnv", kwargs={"world": name})
gymnasium.register("memcorr/World-v0", entry_point="memcorr.worlds.gym_env:PairEnv")
