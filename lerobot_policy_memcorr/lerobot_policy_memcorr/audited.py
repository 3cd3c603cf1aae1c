"""A trained LeRobot policy as the callable that `memcorr audit` asks: (observation, condition) -> actions.

    memcorr audit lerobot_policy_memcorr.audited:pretrained --given outputs/train/checkpoints/last/pretrained_model

The condition is told as text ("task") and as `observation.environment_state`; None is "" and zeros.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from lerobot.configs import PreTrainedConfig
from lerobot.policies import make_pre_post_processors
from lerobot.policies.factory import get_policy_class

from memcorr.spec import WORLD_TASKS

from . import MemCorrConfig as MemCorrConfig  # registers


class Audited:
    def __init__(self, path: str) -> None:
        config = PreTrainedConfig.from_pretrained(path)
        config.pretrained_path = path
        config.device = "cpu"
        self.policy = get_policy_class(config.type).from_pretrained(path, config=config).eval()
        self.before, self.after = make_pre_post_processors(
            config, pretrained_path=path, preprocessor_overrides={"device_processor": {"device": "cpu"}}
        )

    def reset(self, seed: int) -> None:
        self.policy.reset()
        self.before.reset()
        self.after.reset()

    def __call__(self, observation: dict[str, Any], condition: Any) -> np.ndarray:
        """All actions of one plan. A policy that keeps a history is given this look as all of it: between two looks
        of an audit nothing is seen."""
        self.policy.reset()
        batch = self.before(self.told(observation, condition))
        with torch.inference_mode():
            actions = [self.after(self.policy.select_action(dict(batch)))[0]]
            for _ in range(self.steps - 1):
                actions.append(self.after(self.policy.select_action(dict(batch)))[0])
        return torch.stack(actions).double().numpy()

    @property
    def steps(self) -> int:
        return int(getattr(self.policy.config, "n_action_steps", 1))

    @staticmethod
    def told(observation: dict[str, Any], condition: Any) -> dict[str, Any]:
        task = "" if condition is None else condition.task
        tasks = WORLD_TASKS[condition.world] if condition is not None else ("", "")
        code = np.array([float(bool(task) and task == t) for t in tasks], np.float32)
        rgb = torch.from_numpy(np.ascontiguousarray(observation["rgb"])).permute(2, 0, 1).float() / 255
        return {
            "observation.images.rgb": rgb,
            "observation.state": torch.from_numpy(np.asarray(observation["robot_state"], np.float32)),
            "observation.environment_state": torch.from_numpy(code),
            "task": task,
        }


def pretrained(path: str) -> Audited:
    return Audited(path)
