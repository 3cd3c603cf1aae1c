"""A calibrated pinhole camera: project and lift with pixel centres.

Frames and units. World: metres, z up. Camera: OpenCV axes (x right, y down, z forward).
Pixels: (u, v) are *array* coordinates, so the integer pair (column, row) names the centre of
that pixel; the continuous image plane has the same point at (u + 0.5, v + 0.5).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Camera:
    """Intrinsics and pose of one image.

    `K` is 3x3 in the continuous image plane (the centre of a 128 pixel image is 64.0);
    `T_world_cam` is 4x4 and maps OpenCV camera coordinates to world coordinates.
    """

    K: Array
    T_world_cam: Array

    @staticmethod
    def from_fovy(fovy_deg: float, size: int, T_world_cam: Array) -> Camera:
        """Square pixels, principal point in the centre, vertical field of view in degrees."""
        f = 0.5 * size / np.tan(np.radians(fovy_deg) / 2)
        K = np.array([[f, 0.0, size / 2], [0.0, f, size / 2], [0.0, 0.0, 1.0]])
        return Camera(K=K, T_world_cam=T_world_cam)

    def lift(self, uv: NDArray, depth: NDArray[np.floating]) -> Array:
        """Pi^-1: pixels (..., 2) with metric z-depth (...) to world points (..., 3)."""
        uv = np.asarray(uv, np.float64)
        z = np.asarray(depth, np.float64)
        x = (uv[..., 0] + 0.5 - self.K[0, 2]) / self.K[0, 0] * z
        y = (uv[..., 1] + 0.5 - self.K[1, 2]) / self.K[1, 1] * z
        p_cam = np.stack([x, y, z], axis=-1)
        return p_cam @ self.T_world_cam[:3, :3].T + self.T_world_cam[:3, 3]

    def project(self, p_world: NDArray[np.floating]) -> tuple[Array, Array]:
        """Pi: world points (..., 3) to pixels (..., 2) and metric z-depth (...)."""
        p_cam = (np.asarray(p_world, np.float64) - self.T_world_cam[:3, 3]) @ self.T_world_cam[:3, :3]
        z = p_cam[..., 2]
        uv = p_cam[..., :2] / z[..., None] * np.array([self.K[0, 0], self.K[1, 1]]) + self.K[:2, 2] - 0.5
        return uv, z


def look_at(position: Array, target: Array) -> Array:
    """`T_world_cam` (OpenCV axes) of an upright camera at `position` that faces `target`."""
    forward = (target - position) / np.linalg.norm(target - position)
    right = np.cross(forward, [0.0, 0.0, 1.0])
    right /= np.linalg.norm(right)
    down = np.cross(forward, right)
    T = np.eye(4)
    T[:3, :3] = np.stack([right, down, forward], axis=1)
    T[:3, 3] = position
    return T
