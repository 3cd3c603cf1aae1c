"""MemCorr-DP: a diffusion policy that follows a selected reference demonstration."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .policy import Policy


def load_policy(policy: str | Path = "shipped", device: str = "auto") -> Policy:
    """The shipped policy, or one from its folder; see `memcorr.policy`."""
    from .policy import load_policy as load  # torch takes a second to import; other commands do without

    return load(policy, device)
