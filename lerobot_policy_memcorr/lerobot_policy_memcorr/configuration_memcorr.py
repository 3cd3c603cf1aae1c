"""`--policy.type=memcorr`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from lerobot.configs import FeatureType, NormalizationMode, PolicyFeature, PreTrainedConfig
from lerobot.optim import AdamWConfig
from lerobot.utils.constants import ACTION, OBS_STATE

from memcorr.spec import SPEC

RGB = "observation.images.rgb"
EXACT = "observation.robot_state"  # of our environments: nested, and so left alone on its way


@PreTrainedConfig.register_subclass("memcorr")
@dataclass
class MemCorrConfig(PreTrainedConfig):
    """MemCorr-DP: follows the reference that it is shown."""

    weights: str = "shipped"  # or the folder of a run, or org/name; "" for fresh ones. Not with --policy.path
    references: str = ""  # store whose pair 0 is followed, for the task that is told
    reference: str = ""  # or one recording that is followed whatever is told
    matcher: str = "embedded"
    design: str = ""  # JSON; filled in, so that weights can be read back
    train_seed: int = 0  # of the weights; part of the noise

    n_action_steps: int = SPEC.executed  # at most the horizon
    horizon: int = SPEC.chunk
    slots: int = 8  # planned for together; less is padded, so that nobody's bits depend on company

    fps: float = 80.0  # rows per second of the dataset it learns from; filled in
    learning_rate: float = SPEC.learning_rate[0]
    condition_dropout: float = SPEC.condition_dropout

    # It standardises by itself, with what travels with its weights.
    normalization_mapping: dict[str, NormalizationMode] = field(
        default_factory=lambda: dict.fromkeys(("VISUAL", "STATE", "ACTION", "ENV"), NormalizationMode.IDENTITY)
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.horizon != SPEC.chunk or not 1 <= self.n_action_steps <= SPEC.chunk:
            given = f"--policy.horizon={self.horizon} --policy.n_action_steps={self.n_action_steps}"
            raise ValueError(f"{given}: a plan has {SPEC.chunk} actions")
        self.input_features = self.input_features or {
            RGB: PolicyFeature(FeatureType.VISUAL, (3, SPEC.image_size, SPEC.image_size)),
            OBS_STATE: PolicyFeature(FeatureType.STATE, (SPEC.state_dim,)),
        }
        self.output_features = self.output_features or {ACTION: PolicyFeature(FeatureType.ACTION, (SPEC.action_dim,))}

    def get_optimizer_preset(self) -> AdamWConfig:
        return AdamWConfig(
            lr=self.learning_rate,
            betas=SPEC.betas,
            eps=SPEC.epsilon,
            weight_decay=SPEC.weight_decay,
            grad_clip_norm=SPEC.gradient_norm,
        )

    def get_scheduler_preset(self) -> None:
        return None

    def validate_features(self) -> None:
        if RGB not in self.image_features:
            raise ValueError(f"memcorr looks at {RGB}; --rename_map can give another camera that name")

    @property
    def observation_delta_indices(self) -> None:
        return None

    @property
    def action_delta_indices(self) -> list[int]:
        return list(range(self.horizon))

    @property
    def reward_delta_indices(self) -> None:
        return None


def unpacked(observation: dict[str, Any]) -> dict[str, Any]:
    """What travelled nested, under the names of a dataset of `memcorr export lerobot`."""
    found = dict(observation)
    exact = found.pop(EXACT)
    found["observation.images.depth"] = exact["depth"][:, None]
    found["observation.images.mask"] = exact["mask"][:, None].float()
    found["observation.camera.K"], found["observation.camera.T_world_cam"] = exact["K"], exact["T_world_cam"]
    found["observation.gripper"], found["observation.state_exact"] = exact["gripper"], exact["state"]
    found["observation.elapsed"], found["observation.noise_key"] = exact["elapsed"], exact["noise_key"]
    return {
        key: value if torch.is_tensor(value) or key == "task" else torch.as_tensor(value)
        for key, value in found.items()
    }
