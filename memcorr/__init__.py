"""MemCorr-DP: a diffusion policy that follows a selected reference demonstration.

import memcorr

reference = memcorr.Store.open("demo/demos").demonstration(pair=0, task="close")
follower = memcorr.load_policy().follow(reference)
plan = follower.plan(frame, elapsed)
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .correspondence.matcher import Matcher as Matcher
    from .demos.store import Demonstration as Demonstration
    from .demos.store import Store as Store
    from .demos.store import read_demonstration as read_demonstration
    from .demos.store import write_demonstration as write_demonstration
    from .errors import UserError as UserError
    from .frames import Camera as Camera
    from .frames import Frame as Frame
    from .policy.plan import Plan as Plan
    from .policy.policy import Policy as Policy
    from .policy.policy import load_policy as load_policy
    from .worlds.world import World as World

# Imported when asked for: torch and MuJoCo take seconds, and not everybody needs both.
_PLACES = {
    "Camera": "frames",
    "Demonstration": "demos.store",
    "Frame": "frames",
    "Matcher": "correspondence.matcher",
    "Plan": "policy.plan",
    "Policy": "policy.policy",
    "Store": "demos.store",
    "UserError": "errors",
    "World": "worlds.world",
    "load_policy": "policy.policy",
    "read_demonstration": "demos.store",
    "write_demonstration": "demos.store",
}
__all__ = [*sorted(_PLACES), "__version__"]

try:
    __version__ = version("memcorr")
except PackageNotFoundError:  # run from a folder that was never installed
    __version__ = "0"


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'memcorr' has no attribute {name!r}")
    return getattr(import_module(f".{_PLACES[name]}", __name__), name)


def __dir__() -> list[str]:
    return __all__
