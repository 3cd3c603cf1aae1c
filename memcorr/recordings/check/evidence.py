"""What a check looks at in one demonstration, and what it finds.

A finding names one field and one cause. Causes hide each other (with depth in millimetres nothing fits anywhere), so
checks run in the order of `report.examine`, and each hands on the evidence with what it found put right.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import h5py
import numpy as np
from numpy.typing import NDArray

from ...demos.store import CHUNK, Demonstration, opened
from ...frames import Camera, Frame
from ...spec import Array

LOOKED_AT = 16  # frames of a demonstration, evenly spaced


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong with one field of one demonstration."""

    demonstration: str
    field: str  # name of the dataset in the file
    fault: str  # short name of the cause
    wrong: str  # what was measured
    right: str  # what is expected, or would mend it

    def line(self, others: int = 0) -> str:
        whose = self.demonstration + (f" and {others} more" if others else "")
        return f"{whose}: {self.field}: {self.wrong}; {self.right}"


@dataclass(frozen=True)
class Evidence:
    """Some frames of one demonstration, with the mistakes found so far undone."""

    demonstration: Demonstration
    rows: NDArray[np.int64]
    frames: tuple[Frame, ...]

    @staticmethod
    def of(demonstration: Demonstration, count: int = LOOKED_AT) -> Evidence:
        rows = np.unique(np.linspace(0, len(demonstration) - 1, count).round().astype(np.int64))
        return Evidence(demonstration, rows, tuple(demonstration.frames(rows)))

    @property
    def size(self) -> tuple[int, int]:
        """Height and width, pixels."""
        height, width = self.frames[0].depth.shape
        return height, width

    @property
    def gripper(self) -> Array:
        return np.stack([frame.gripper for frame in self.frames])

    def finding(self, field: str, fault: str, wrong: str, right: str) -> Finding:
        return Finding(self.demonstration.name, field, fault, wrong, right)

    def with_depth(self, factor: float) -> Evidence:
        return replace(self, frames=tuple(replace(f, depth=f.depth * np.float32(factor)) for f in self.frames))

    def with_intrinsics(self, factors: Array) -> Evidence:
        """First and second row of K times these."""
        scale = np.diag([*factors, 1.0])
        frames = (replace(f, camera=Camera(scale @ f.camera.K, f.camera.T_world_cam)) for f in self.frames)
        return replace(self, frames=tuple(frames))

    def with_poses(self, poses: list[Array]) -> Evidence:
        pairs = zip(self.frames, poses, strict=True)
        return replace(self, frames=tuple(replace(f, camera=Camera(f.camera.K, T)) for f, T in pairs))

    def with_gripper(self, gripper: Array) -> Evidence:
        pairs = zip(self.frames, gripper, strict=True)
        return replace(self, frames=tuple(replace(f, gripper=g) for f, g in pairs))

    def with_images(self, turned: slice, mirrored: slice) -> Evidence:
        """Rows and columns of every image in another order."""
        return replace(
            self,
            frames=tuple(
                replace(f, rgb=f.rgb[turned, mirrored], depth=f.depth[turned, mirrored], mask=f.mask[turned, mirrored])
                for f in self.frames
            ),
        )


def returned(depth: NDArray[np.floating]) -> NDArray[np.bool_]:
    """Where something returned."""
    return np.isfinite(depth) & (depth > 0)


def in_blocks(dataset: h5py.Dataset) -> Iterator[NDArray]:
    """All rows, a few at a time: recordings may be larger than memory."""
    for first in range(0, len(dataset), CHUNK):
        yield from dataset[first : first + CHUNK]


def repeated(demonstration: Demonstration, name: str) -> NDArray[np.bool_]:
    """(T - 1): row t + 1 of the images `name` is row t, to the bit."""
    same, before = [], None
    with opened(demonstration.path) as f:
        for image in in_blocks(f[name]):
            if before is not None:
                same.append(np.array_equal(image, before))
            before = image
    return np.array(same, bool)
