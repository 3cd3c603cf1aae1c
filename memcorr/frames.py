"""What a camera and a robot report at one instant: the boundary between world and policy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .camera import Array, Camera


@dataclass(frozen=True)
class Frame:
    """O = (I, D, M, s, g) with the calibration that lifts it. Holds nothing privileged."""

    rgb: NDArray[np.uint8]  # I (H, W, 3)
    depth: NDArray[np.float32]  # D (H, W), metres along the optical axis; 0 = no return
    mask: NDArray[np.bool_]  # M (H, W), visible pixels of the object
    camera: Camera
    robot_state: Array  # s (9): end effector, right and left fingertip; metres, world frame
    gripper: Array  # g (3): midpoint of the fingertips; metres, world frame
