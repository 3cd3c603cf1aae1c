"""What the visual policies see: RGB, depth and mask at 64 x 64, the same for training and live use."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .networks import IMAGE_SIZE

DEPTH_LIMIT = 5.0  # standardised depth is clipped to +-5


@dataclass(frozen=True)
class Images:
    """Shrunk observations with any leading axes."""

    rgb: NDArray[np.uint8]  # (..., 64, 64, 3)
    depth: NDArray[np.float32]  # (..., 64, 64) metres, 0 where nothing was seen
    mask: NDArray[np.bool_]  # (..., 64, 64)

    def __getitem__(self, index: NDArray[np.int64] | int) -> Images:
        return Images(self.rgb[index], self.depth[index], self.mask[index])


def shrink(rgb: NDArray[np.uint8], depth: NDArray[np.float32], mask: NDArray[np.bool_]) -> Images:
    """From 128 x 128: colours are averaged; depth and mask keep one pixel of each block, so that
    the mask stays binary, depth never mixes two surfaces and the two agree."""
    k = rgb.shape[-2] // IMAGE_SIZE
    *lead, _, _, _ = rgb.shape
    blocks = rgb.reshape(*lead, IMAGE_SIZE, k, IMAGE_SIZE, k, 3)
    mean = blocks.sum(axis=(-4, -2), dtype=np.uint16) // np.uint16(k * k)
    return Images(mean.astype(np.uint8), depth[..., ::k, ::k].copy(), mask[..., ::k, ::k].copy())


def network_image(images: Images, depth_mean: float, depth_std: float) -> NDArray[np.float32]:
    """(B, 5, 64, 64): RGB in [-1, 1], standardised and clipped depth, binary mask."""
    x = np.empty((*images.mask.shape[:-2], 5, IMAGE_SIZE, IMAGE_SIZE), np.float32)
    x[..., :3, :, :] = np.moveaxis(images.rgb, -1, -3) / np.float32(127.5) - np.float32(1)
    x[..., 3, :, :] = np.clip((images.depth - depth_mean) / depth_std, -DEPTH_LIMIT, DEPTH_LIMIT)
    x[..., 4, :, :] = images.mask
    return x
