"""What sensors do to a frame: noise and holes in depth, masks that are wrong or late, a camera believed elsewhere.

Every fault is a function of the true frame and of the scene alone, so that a rollout sees the same faults
every time. What is seen may be wrong; what success is judged by never is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray
from scipy.spatial.transform import Rotation

from ..correspondence.rigid import inverse
from ..errors import UserError
from ..frames import Camera, Frame
from ..recordings.sidecars import read_calibration
from ..spec import Array
from ..worlds.disturbances import CAMERA_ERROR_DEG, CAMERA_ERROR_M, drawn
from ..worlds.scenes import Scene
from ..worlds.world import View

EDGE = 0.03  # metres between neighbouring pixels: where an RGB-D camera loses depth first
CROSS = cv2.getStructuringElement(cv2.MORPH_CROSS, (3, 3))


def calibrated_view(path: Path) -> View:
    """The camera of a `calibration.json`, to be drawn with."""
    found = read_calibration(path, path)
    if found is None:
        raise UserError(f"--camera {path}: there is no such file")
    return View.of(found.camera, found.height, found.width)


def degraded(frame: Frame, scene: Scene, elapsed: int, late_mask: NDArray[np.bool_] | None = None) -> Frame:
    """`frame` as the scene's sensor faults show it, `elapsed` steps after the start."""
    for d in scene.disturbances:
        rng = np.random.default_rng([*drawn(scene, d.kind).integers(2**31, size=2), elapsed])
        if d.kind == "depth-noise":
            frame = replace(frame, depth=noisy(frame.depth, d.size, rng))
        elif d.kind == "depth-holes":
            frame = replace(frame, depth=with_holes(frame.depth, d.size, rng))
        elif d.kind == "mask-erode":
            frame = replace(frame, mask=cv2.erode(frame.mask.astype(np.uint8), CROSS, iterations=int(d.size)) > 0)
        elif d.kind == "mask-dilate":
            frame = replace(frame, mask=cv2.dilate(frame.mask.astype(np.uint8), CROSS, iterations=int(d.size)) > 0)
        elif d.kind == "mask-late" and late_mask is not None:
            frame = replace(frame, mask=late_mask)
        elif d.kind == "extrinsics":
            frame = replace(frame, camera=mistaken(frame.camera, d.size, drawn(scene, d.kind)))
    return frame


def noisy(depth: NDArray[np.float32], size: float, rng: np.random.Generator) -> NDArray[np.float32]:
    """Axial noise of a structured-light camera: its deviation is 1.2 mm + 1.9 mm (z / m - 0.4)^2, times `size`."""
    sigma = size * (0.0012 + 0.0019 * (depth - 0.4) ** 2)
    moved = depth + sigma * rng.standard_normal(depth.shape)
    return np.where(depth > 0, np.maximum(moved, 0.01), 0.0).astype(np.float32)


def with_holes(depth: NDArray[np.float32], share: float, rng: np.random.Generator) -> NDArray[np.float32]:
    """No return at a share of the pixels; beside a step in depth a hole is five times as likely."""
    largest, smallest = cv2.dilate(depth, CROSS), cv2.erode(depth, CROSS)
    odds = np.where(largest - smallest > EDGE, 5.0, 1.0)
    odds *= share / odds.mean()
    return np.where(rng.random(depth.shape) < odds, 0.0, depth).astype(np.float32)


def mistaken(camera: Camera, size: float, rng: np.random.Generator) -> Camera:
    """Turned by 1 degree and moved by 5 mm, times `size`, about and along drawn axes."""
    axis, way = (v / np.linalg.norm(v) for v in rng.normal(size=(2, 3)))
    T = camera.T_world_cam.copy()
    T[:3, :3] = Rotation.from_rotvec(np.radians(CAMERA_ERROR_DEG) * size * axis).as_matrix() @ T[:3, :3]
    T[:3, 3] += CAMERA_ERROR_M * size * way
    return Camera(camera.K, T)


def recalibrated(frame: Frame, change: Callable[[Array], Array]) -> Frame:
    """With another T_world_cam."""
    return replace(frame, camera=Camera(frame.camera.K, change(frame.camera.T_world_cam.copy())))


def _transposed(T: Array) -> Array:
    T[:3, :3] = T[:3, :3].T
    return T


def _moved(axis: int, by: float) -> Callable[[Frame], Frame]:
    def change(T: Array) -> Array:
        T[axis, 3] += by
        return T

    return lambda frame: recalibrated(frame, change)


# How a robot is set up wrongly, the same in every frame; `following/doubts.py` is to notice it at the first.
WRONG_SETUPS: dict[str, Callable[[Frame], Frame]] = {
    "extrinsics inverted": lambda f: recalibrated(f, inverse),
    "extrinsics transposed": lambda f: recalibrated(f, _transposed),
    "extrinsics 10 cm off in x": _moved(0, 0.1),
    "extrinsics 10 cm off in y": _moved(1, 0.1),
    "extrinsics 10 cm too high": _moved(2, 0.1),
    "extrinsics 10 cm too low": _moved(2, -0.1),
    "intrinsics of another size": lambda f: replace(  # 640 x 480
        f, camera=Camera(f.camera.K * [[5], [3.75], [1]], f.camera.T_world_cam)
    ),
    "blue before red": lambda f: replace(f, rgb=f.rgb[..., ::-1].copy()),
    "depth constant": lambda f: replace(f, depth=np.ones_like(f.depth)),
    "no depth": lambda f: replace(f, depth=np.zeros_like(f.depth)),
}
