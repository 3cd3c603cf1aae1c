"""A mask by clicking: points on the object in the 3D scene, its mask on the live picture, used when somebody says so.

With Ctrl held a click is on the object, with Shift beside it. Used, the mask takes the place of the simulator's: the
policy's slot carries it from look to look, as on a real robot.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from ..errors import UserError
from ..following.clicks import Point, clicked_mask, overlay
from ..following.masks import SMALLEST, Mask
from ..frames import Frame
from ..show.video import Image
from ..spec import Array

CLICKS: dict[Literal["cmd/ctrl", "shift"], str] = {"cmd/ctrl": "on the object", "shift": "beside it"}
FARTHEST, STEP = 6.0, 0.002  # metres along a click's ray
NEAR = 0.01  # metres behind a surface that still are on it


@dataclass
class Clicks:
    """Of the episode's first picture."""

    on: list[Point] = field(default_factory=list)
    beside: list[Point] = field(default_factory=list)

    def add(self, what: str, ray: tuple[Array, Array], frame: Frame) -> None:
        point = met(ray, frame)
        if point is None:
            raise UserError("the camera does not see that; click on what is in its picture, in the left scene")
        (self.on if what == CLICKS["cmd/ctrl"] else self.beside).append(point)

    def mask(self, frame: Frame) -> Mask:
        return clicked_mask([frame], self.on, self.beside)

    def usable(self, frame: Frame) -> Mask:
        if not self.on or (mask := self.mask(frame)).sum() < SMALLEST:
            raise UserError("no mask yet: hold Ctrl and click on the object")
        return mask

    def picture(self, frame: Frame) -> Image:
        """The live picture with the mask, or without one."""
        mask = self.mask(frame) if self.on else np.zeros_like(frame.mask)
        return overlay(frame, mask, self.on, self.beside)


def met(ray: tuple[Array, Array], frame: Frame) -> Point | None:
    """Column and row of the surface that a ray meets first, as far as the camera sees it."""
    origin, direction = ray
    p = origin + np.arange(STEP, FARTHEST, STEP)[:, None] * direction / np.linalg.norm(direction)
    uv, z = frame.camera.project(p)
    H, W = frame.depth.shape
    column, row = np.rint(np.nan_to_num(uv, nan=-1e6)).clip(-1e6, 1e6).astype(np.int64).T
    inside = (z > 1e-6) & (column >= 0) & (column < W) & (row >= 0) & (row < H)
    depth = np.where(inside, frame.depth[row.clip(0, H - 1), column.clip(0, W - 1)], np.inf)
    hits = np.flatnonzero(inside & (z >= depth) & (z <= depth + NEAR))
    return None if not len(hits) else (int(column[hits[0]]), int(row[hits[0]]))
