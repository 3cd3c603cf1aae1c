"""The correspondence cache of the mixed training stage: what a real matcher saw on real rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .camera import Array
from .matches import Matches


@dataclass(frozen=True)
class Cache:
    """R = 10,000 training rows with their measured matches.

    Rows are (demonstration, anchor) pairs: `demonstration` indexes `store.demonstrations(range(80))`
    (pair-major, open before close), `anchor` is the query frame, `reference_frame` the frame of the
    reference demonstration (same task, next pair).
    """

    demonstration: NDArray[np.int64]  # (R,)
    anchor: NDArray[np.int64]  # (R,)
    reference_frame: NDArray[np.int64]  # (R,)
    matches: Matches  # (R, 16, ...)
    residual: Array  # (R, 16, 3) measured minus true live point, metres; meaningful where valid
    p_live_true: Array  # (R, 16, 3) the reference points carried by the door's true motion
