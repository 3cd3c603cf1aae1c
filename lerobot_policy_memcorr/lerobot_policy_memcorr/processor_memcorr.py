"""Nothing to normalise: frames, calibration and state go to the policy as they are."""

from __future__ import annotations

from typing import Any

import torch
from lerobot.processor import PolicyAction, PolicyProcessorPipeline, make_default_pre_post_processors

from .configuration_memcorr import MemCorrConfig

EXACT = "observation.robot_state"  # of our environments: nested, and so left alone on its way


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


def make_memcorr_pre_post_processors(
    config: MemCorrConfig, dataset_stats: dict[str, dict[str, Any]] | None = None
) -> tuple[
    PolicyProcessorPipeline[dict[str, Any], dict[str, Any]], PolicyProcessorPipeline[PolicyAction, PolicyAction]
]:
    return make_default_pre_post_processors(config, dataset_stats)
