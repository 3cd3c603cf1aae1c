"""MemCorr-DP: a diffusion policy that follows a selected reference demonstration."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .policy import Policy


def load_policy(path: str | Path, device: str = "auto") -> Policy:
    """A trained policy from its folder; see `memcorr.policy`."""
    from .policy import load_policy as load  # torch takes a second to import; other commands do without

    return load(path, device)
