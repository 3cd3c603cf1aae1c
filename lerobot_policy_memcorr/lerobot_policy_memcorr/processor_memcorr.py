"""Nothing to normalise: frames, calibration and state go to the policy as they are."""

from __future__ import annotations

from typing import Any

from lerobot.processor import PolicyAction, PolicyProcessorPipeline, make_default_pre_post_processors

from .configuration_memcorr import MemCorrConfig


def make_memcorr_pre_post_processors(
    config: MemCorrConfig, dataset_stats: dict[str, dict[str, Any]] | None = None
) -> tuple[
    PolicyProcessorPipeline[dict[str, Any], dict[str, Any]], PolicyProcessorPipeline[PolicyAction, PolicyAction]
]:
    return make_default_pre_post_processors(config, dataset_stats)
