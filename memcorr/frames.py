"""What a camera and a robot report at one instant, and the geometry that lifts it into the world.

Frames and units. World: metres, z up. Camera: OpenCV axes (x right, y down, z forward).
Pixels: (u, v) are *array* coordinates, so the integer pair (column, row) names the centre of
that pixel; the continuous image plane has the same point at (u + 0.5, v + 0.5).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .spec import SPEC, Array


@dataclass(frozen=True)
class Camera:
    """Intrinsics and pose of one image.

    `K` is 3x3 in the continuous image plane (the centre of a 128 pixel image is 64.0);
    `T_world_cam` is 4x4 and maps OpenCV camera coordinates to world coordinates.
    """

    K: Array
    T_world_cam: Array

    @staticmethod
    def from_fovy(fovy_deg: float, size: int | tuple[int, int], T_world_cam: Array) -> Camera:
        """Square pixels, principal point in the centre, vertical field of view in degrees; `size` is one side of a
        square image, or (height, width)."""
        height, width = (size, size) if isinstance(size, int) else size
        f = 0.5 * height / np.tan(np.radians(fovy_deg) / 2)
        K = np.array([[f, 0.0, width / 2], [0.0, f, height / 2], [0.0, 0.0, 1.0]])
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


@dataclass(frozen=True)
class Frame:
    """O = (I, D, M, s, g) with the calibration that lifts it. Holds nothing privileged."""

    rgb: NDArray[np.uint8]  # I (H, W, 3)
    depth: NDArray[np.float32]  # D (H, W), metres along the optical axis; 0 or not finite = no return
    mask: NDArray[np.bool_]  # M (H, W), visible pixels of the object
    camera: Camera
    robot_state: Array  # s (9): end effector, right and left fingertip; metres, world frame. Own robots: any width
    gripper: Array  # g (3): midpoint of the fingertips; metres, world frame


FARTHEST = 100.0  # metres; depth beyond this is a wrong unit or a code for "no return", a position a wrong unit
FOCAL = (0.01, 1000.0)  # lengths in image sizes, from the widest lens to the longest; outside of it: no pixels


def check_frame(frame: Frame, whose: str = "frame", state_dim: int = SPEC.state_dim) -> None:
    """Raises a ValueError that names the field and the likely cause, before a robot moves on nonsense.

    An empty mask, or no depth on the object, is no error: a plan from it says that it had no reference.
    """
    f, size = frame, np.shape(frame.mask)[:2]
    for name, array, dtype, shape in (
        ("mask", f.mask, np.bool_, size),
        ("rgb", f.rgb, np.uint8, (*size, 3)),
        ("depth", f.depth, np.floating, size),
        ("camera.K", f.camera.K, np.floating, (3, 3)),
        ("camera.T_world_cam", f.camera.T_world_cam, np.floating, (4, 4)),
        ("robot_state", f.robot_state, np.floating, (state_dim,)),
        ("gripper", f.gripper, np.floating, (3,)),
    ):
        if not isinstance(array, np.ndarray) or not np.issubdtype(array.dtype, dtype):
            found = getattr(array, "dtype", type(array).__name__)
            hint = "; scale colours in [0, 1] by 255" if name == "rgb" else ""
            raise ValueError(f"{whose}.{name} must be an array of {dtype.__name__.strip('_')}, not {found}{hint}")
        if array.shape != shape or 0 in shape:
            raise ValueError(f"{whose}.{name} must have shape {shape}, not {array.shape}")
        if name not in ("rgb", "depth", "mask") and not np.isfinite(array).all():
            raise ValueError(f"{whose}.{name} holds NaN or infinity")
    seen = f.depth[np.isfinite(f.depth)]
    if (farthest := seen.max(initial=0.0)) > FARTHEST:
        raise ValueError(f"{whose}.depth reaches {farthest:g}: metres are expected, 0 for no return (millimetres?)")
    if (nearest := seen.min(initial=0.0)) < 0:
        raise ValueError(f"{whose}.depth holds {nearest:g}: metres along the optical axis are never negative")
    positions = (("camera.T_world_cam", f.camera.T_world_cam[:3, 3]), ("robot_state", f.robot_state))
    for name, position in (*positions, ("gripper", f.gripper)):
        if (reach := np.abs(position).max()) > FARTHEST:
            raise ValueError(f"{whose}.{name} reaches {reach:g}: metres are expected (millimetres?)")
    K, R = f.camera.K, f.camera.T_world_cam[:3, :3]
    if not (K[0, 0] > 0 and K[1, 1] > 0):
        raise ValueError(f"{whose}.camera.K has focal lengths {K[0, 0]:g} and {K[1, 1]:g}; they must be positive")
    if min(K[0, 0], K[1, 1]) < FOCAL[0] * max(size) or np.abs(K).max() > FOCAL[1] * max(size):
        raise ValueError(f"{whose}.camera.K has focal lengths {K[0, 0]:g} and {K[1, 1]:g}: pixels are expected")
    if np.abs(R @ R.T - np.eye(3)).max() > 1e-3 or np.linalg.det(R) < 0:
        raise ValueError(f"{whose}.camera.T_world_cam is no rigid transform: its rotation is not orthonormal")
