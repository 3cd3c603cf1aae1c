"""Dense matchers behind one small interface.

    matcher = load_matcher("embedded")
    reference = matcher.encode(crops)                    # once per reference frame
    uv, confidence = matcher.match(reference, pixels, queries)

Crops are 128x128 RGB. Pixels are array coordinates: (column, row), integers name pixel centres.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from ..errors import UserError, imported
from ..files import digest_of
from ..spec import Array


@dataclass(frozen=True)
class Doubt:
    """What lifting knows against points (..., N), metres."""

    relief: Array  # (..., N, 2) range of the object's depth over the 2x2 and 3x3 pixels around them
    misfit: Array  # (..., N) between measured and fitted to a rigid motion; 0 where nothing was fitted
    spread: Array  # (..., N) expected error of the fitted motion there; 0 where nothing was fitted


class Matcher(Protocol):
    """A frozen matcher. Batches have a leading axis B; one result never depends on its neighbours'."""

    name: str
    abstains_below: float = 0.0  # confidence below which it has no answer; the paper's lifting asks all the same

    def encode(self, crops: NDArray[np.uint8]) -> list[Any]:
        """Reference crops (B, 128, 128, 3) -> one opaque encoding each, to be kept and reused."""
        ...

    def match(
        self, references: list[Any], pixels: NDArray[np.floating], queries: NDArray[np.uint8]
    ) -> tuple[Array, Array]:
        """Where reference pixels (B, N, 2) lie in the query crops (B, 128, 128, 3).

        Returns locations (B, N, 2) in query-crop pixels (sub-pixel; may be outside or NaN where
        the matcher has no answer) and confidence (B, N) in [0, 1].
        """
        ...

    def lifted_confidence(self, confidence: Array, doubt: Doubt) -> Array:
        """Confidence in the lifted points: that in the locations (..., N), unless the matcher has learned
        what `doubt` does to it."""
        return confidence


# Imported when asked for: no matcher costs anything until it is used.
MATCHERS: dict[str, str] = {
    "embedded": "memcorr.correspondence.embedded.matcher:EmbeddedMatcher",
    "xfeat": "memcorr.correspondence.xfeat.matcher:XFeatMatcher",
    "romav2": "memcorr.correspondence.romav2:RomaV2Matcher",
    "flow": "memcorr.correspondence.flow:FlowMatcher",
}


def load_matcher(name: str) -> Matcher:
    """By name, the embedded one with other weights by their path, or somebody's own by MODULE:CLASS."""
    if is_weights(name):
        from .embedded.matcher import EmbeddedMatcher

        return EmbeddedMatcher(Path(name))
    if is_own(name):
        return _own(name)
    if name not in MATCHERS:
        raise UserError(f"unknown matcher {name!r}: choose one of {', '.join(MATCHERS)}, or MODULE:CLASS")
    module, _, attribute = MATCHERS[name].partition(":")
    factory: Callable[[], Matcher] = getattr(import_module(module), attribute)
    return factory()


def _own(name: str) -> Matcher:
    """What the class of this name makes without arguments; its module may lie in the working directory."""
    wanted = "MODULE:CLASS, such as mine:Matcher for the class Matcher in mine.py"
    factory = imported(name, wanted, f"--matcher {name}")
    made = factory() if callable(factory) else factory
    if missing := [
        method for method in ("encode", "match", "lifted_confidence") if not callable(getattr(made, method, None))
    ]:
        raise UserError(f"--matcher {name}: it has no method {missing[0]}; derive it from memcorr.Matcher")
    return cast(Matcher, made)


def is_own(name: str) -> bool:
    """MODULE:CLASS."""
    return ":" in name


def is_weights(name: str) -> bool:
    return name.endswith(".safetensors")


def matcher_label(name: str) -> str:
    """What rows call it: its name, or that of the file of weights with the first digits of their digest."""
    return f"{Path(name).stem}-{weights_digest(name)[:6]}" if is_weights(name) else name


def weights_digest(name: str) -> str:
    """Tells the embedded matcher's weights and somebody's own code apart, which change under one name; '' for the
    others."""
    if is_own(name):  # its code, as far as it is in its module
        found = getattr(sys.modules[type(load_matcher(name)).__module__], "__file__", None)
        return "" if found is None else digest_of(Path(found))[:12]
    if name != "embedded" and not is_weights(name):
        return ""
    from .embedded.matcher import WEIGHTS

    return digest_of(Path(name) if is_weights(name) else WEIGHTS, "there are no such weights")[:12]


def sample_bilinear(field: NDArray, uv: NDArray[np.floating]) -> Array:
    """Bilinear samples of `field` (H, W, ...) at pixels `uv` (..., 2), border padding."""
    H, W = field.shape[:2]
    x = np.clip(uv[..., 0], 0, W - 1)
    y = np.clip(uv[..., 1], 0, H - 1)
    x0, y0 = np.minimum(x.astype(int), W - 2), np.minimum(y.astype(int), H - 2)
    extra = (None,) * (field.ndim - 2)
    fx, fy = (x - x0)[(..., *extra)], (y - y0)[(..., *extra)]
    top = field[y0, x0] * (1 - fx) + field[y0, x0 + 1] * fx
    bottom = field[y0 + 1, x0] * (1 - fx) + field[y0 + 1, x0 + 1] * fx
    return top * (1 - fy) + bottom * fy
