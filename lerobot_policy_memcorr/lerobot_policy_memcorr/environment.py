"""`--env.type=memcorr`: MemCorr's worlds, scene by scene.

`--seed=0` makes episode n scene n of the condition, as `memcorr evaluate --scenes n` does. LeRobot turns whatever an
environment observes into float32; what has to keep its bits travels inside "robot_state", which it leaves alone, and
`MemCorrEnvProcessorStep` puts it where a dataset of `memcorr export lerobot` has it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium import spaces
from lerobot.configs import FeatureType, PolicyFeature
from lerobot.envs import EnvConfig
from lerobot.envs.utils import freeze_after_episode_end
from lerobot.processor import ObservationProcessorStep, PolicyProcessorPipeline, ProcessorStepRegistry
from lerobot.utils.constants import ACTION, OBS_ENV_STATE, OBS_STATE

from memcorr.errors import UserError
from memcorr.evaluation.controllers import NOISE
from memcorr.spec import SPEC, WORLD_TASKS, opposite
from memcorr.worlds.gl import mujoco as mujoco  # the renderer is chosen before anything else loads MuJoCo
from memcorr.worlds.scenes import evaluation_scenes
from memcorr.worlds.world import shared_world

from .configuration_memcorr import unpacked

SIZE = SPEC.image_size
SHOWN = ("correct", "empty", "opposite")


def anything(*shape: int, dtype: type = np.float64) -> spaces.Box:
    return spaces.Box(-np.inf, np.inf, shape, dtype)


class WorldEnv(gymnasium.Env):
    """One world with one task. All of a process share its renderer: a turn begins by restoring the physics."""

    metadata: ClassVar = {"render_modes": ["rgb_array"], "render_fps": 80}
    render_mode = "rgb_array"
    _max_episode_steps = SPEC.episode_steps

    def __init__(self, world: str, task: str, condition: str, scene_seed: int, shown: str, look_every: int = 1) -> None:
        self.name, self.task, self.shown, self.look_every = world, task, shown, look_every
        self.scenes = evaluation_scenes(condition, scene_seed, world=world)
        if any(scene.disturbances for scene in self.scenes):
            raise UserError("--env.condition=disturbed: what goes wrong there is for `memcorr evaluate` alone")
        told = {"correct": task, "opposite": opposite(task, world), "empty": ""}[shown]
        self.task_description = told
        self.code = np.array([float(told == t) for t in WORLD_TASKS[world]], np.float32)
        self.action_space = spaces.Box(-1.0, 1.0, (SPEC.action_dim,), np.float64)
        self.observation_space = spaces.Dict(
            {
                "pixels": spaces.Dict({"rgb": spaces.Box(0, 255, (SIZE, SIZE, 3), np.uint8)}),
                "agent_pos": anything(SPEC.state_dim),
                "environment_state": anything(len(self.code), dtype=np.float32),
                "robot_state": spaces.Dict(
                    {
                        "depth": anything(SIZE, SIZE, dtype=np.float32),
                        "mask": spaces.Box(0, 1, (SIZE, SIZE), np.uint8),
                        "K": anything(9),
                        "T_world_cam": anything(16),
                        "state": anything(SPEC.state_dim),
                        "gripper": anything(3),
                        "elapsed": spaces.Box(0, 2**31, (1,), np.int64),
                        "noise_key": spaces.Box(0, 2**62, (4,), np.int64),
                    }
                ),
            }
        )
        self.scene = self.scenes[0]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[dict, dict]:
        super().reset(seed=seed)
        if seed is not None:
            if seed >= len(self.scenes):
                raise UserError(f"--seed: the condition has {len(self.scenes)} scenes, episode {seed} would be none")
            self.scene = self.scenes[seed]
        world = shared_world(self.name)
        world.reset(self.scene)
        self.state, self.place, self.elapsed = world.snapshot(), world.place, 0
        return self.observe(), {"is_success": False}

    def step(self, action: np.ndarray) -> tuple[dict, float, bool, bool, dict]:
        world = shared_world(self.name)
        world.restore(self.scene, self.state, self.place)
        if finite := bool(np.isfinite(action).all()):
            world.step(np.asarray(action, np.float64))
        self.state, self.place, self.elapsed = world.snapshot(), world.place, self.elapsed + 1
        success = finite and world.success(self.task) and not world.diverged
        over = success or not finite or world.diverged
        truncated = not over and self.elapsed >= SPEC.episode_steps
        return self.observe(), float(success), over, truncated, {"is_success": success}

    def observe(self) -> dict[str, Any]:
        """Of the world as this environment left it, which is as it stands after reset and step."""
        if self.elapsed % self.look_every == 0:
            self.frame = shared_world(self.name).observe()
        frame = self.frame
        scene, number = self.scene, WORLD_TASKS[self.name].index(self.task)
        exact = {
            "depth": frame.depth,
            "mask": frame.mask.astype(np.uint8),
            "K": frame.camera.K.ravel(),
            "T_world_cam": frame.camera.T_world_cam.ravel(),
            "state": frame.robot_state,
            "gripper": frame.gripper,
            "elapsed": np.array([self.elapsed]),
            "noise_key": np.array([NOISE[scene.condition], scene.seed, scene.index, number]),
        }
        return {
            "pixels": {"rgb": frame.rgb},
            "agent_pos": frame.robot_state,
            "environment_state": self.code,
            "robot_state": exact,
        }

    def render(self) -> np.ndarray:
        return self.frame.rgb


@dataclass
@ProcessorStepRegistry.register(name="memcorr_env_processor")
class MemCorrEnvProcessorStep(ObservationProcessorStep):
    """What travelled nested, under the names of a dataset."""

    def observation(self, observation: dict[str, Any]) -> dict[str, Any]:
        return unpacked(observation)

    def transform_features(self, features: Any) -> Any:
        return features


@EnvConfig.register_subclass("memcorr")
@dataclass
class MemCorrEnvConfig(EnvConfig):
    world: str = "door"
    task: str = "all"  # or one of the world's two
    condition: str = "combined"
    scene_seed: int = 0
    shown: str = "correct"  # what any policy is told: the task, nothing, or the opposite task
    look_every: int = 1  # control steps between two pictures; a policy that plans eight steps needs no more than 8
    fps: int = 80
    features: dict[str, PolicyFeature] = field(
        default_factory=lambda: {
            ACTION: PolicyFeature(FeatureType.ACTION, (SPEC.action_dim,)),
            "pixels/rgb": PolicyFeature(FeatureType.VISUAL, (SIZE, SIZE, 3)),
            "agent_pos": PolicyFeature(FeatureType.STATE, (SPEC.state_dim,)),
            "environment_state": PolicyFeature(FeatureType.ENV, (2,)),
        }
    )
    features_map: dict[str, str] = field(
        default_factory=lambda: {
            ACTION: ACTION,
            "pixels/rgb": "observation.images.rgb",
            "agent_pos": OBS_STATE,
            "environment_state": OBS_ENV_STATE,
        }
    )

    def __post_init__(self) -> None:
        tasks = WORLD_TASKS.get(self.world, ())
        if not tasks:
            raise ValueError(f"--env.world={self.world}: choose one of {', '.join(WORLD_TASKS)}")
        if self.task not in ("all", *tasks):
            raise ValueError(f"--env.task={self.task}: choose {', '.join(tasks)} or all")
        if self.shown not in SHOWN:
            raise ValueError(f"--env.shown={self.shown}: choose {', '.join(SHOWN)}")

    @property
    def gym_kwargs(self) -> dict[str, Any]:
        return {}

    def create_envs(
        self, n_envs: int, use_async_envs: bool = False
    ) -> dict[str, dict[int, gymnasium.vector.VectorEnv]]:
        tasks = WORLD_TASKS[self.world] if self.task == "all" else (self.task,)
        made: dict[int, Any] = {}
        for number, task in enumerate(tasks):
            make = partial(WorldEnv, self.world, task, self.condition, self.scene_seed, self.shown, self.look_every)
            makers = [freeze_after_episode_end(make)] * n_envs
            kind: Any = gymnasium.vector.SyncVectorEnv
            extra: dict[str, Any] = {}
            if use_async_envs and n_envs > 1:
                kind, extra = gymnasium.vector.AsyncVectorEnv, {"context": "forkserver"}
            made[number] = kind(makers, autoreset_mode=gymnasium.vector.AutoresetMode.NEXT_STEP, **extra)
        return {self.world: made}

    def get_env_processors(self) -> tuple[PolicyProcessorPipeline, PolicyProcessorPipeline]:
        return PolicyProcessorPipeline(steps=[MemCorrEnvProcessorStep()]), PolicyProcessorPipeline(steps=[])
