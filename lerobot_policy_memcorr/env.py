"""MemCorr's worlds for LeRobot's EnvHub: one file with `make_env`. It needs this package installed.

MEMCORR_ENV='{"world": "drawer", "condition": "camera"}'     # any of --env.*; the door's combined shift if not set
"""

from __future__ import annotations

import json
import os
from typing import Any

from lerobot_policy_memcorr.environment import MemCorrEnvConfig


def make_env(n_envs: int = 1, use_async_envs: bool = False, cfg: Any = None) -> dict[str, dict[int, Any]]:
    """{world: {number of the task: environments}}."""
    if not isinstance(cfg, MemCorrEnvConfig):
        cfg = MemCorrEnvConfig(**json.loads(os.environ.get("MEMCORR_ENV", "{}")))
    return cfg.create_envs(n_envs, use_async_envs)
