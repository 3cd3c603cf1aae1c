"""Means and deviations of the training windows; they travel with every checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..spec import Array


@dataclass(frozen=True)
class Normalisation:
    state_mean: Array  # (9,)
    state_std: Array
    action_mean: Array  # (4,)
    action_std: Array
    depth_mean: Array  # () metres; 0 and 1 for policies that see no image
    depth_std: Array

    def state(self, state: Array) -> NDArray[np.float32]:
        return ((state - self.state_mean) / self.state_std).astype(np.float32)

    def action(self, action: Array) -> NDArray[np.float32]:
        return ((action - self.action_mean) / self.action_std).astype(np.float32)

    def original_action(self, x_0: NDArray[np.floating]) -> Array:
        """Back to the units of the robot, clipped to its range [-1, 1]."""
        return np.clip(x_0 * self.action_std + self.action_mean, -1.0, 1.0)
