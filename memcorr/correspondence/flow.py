"""`flow`: OpenCV's dense inverse search, upsampled twice. No weights: the baseline to beat."""

from __future__ import annotations

import cv2
import numpy as np
from numpy.typing import NDArray

from ..spec import Array
from .matcher import Matcher, sample_bilinear

UPSAMPLE = 2


class FlowMatcher(Matcher):
    name = "flow"

    def __init__(self) -> None:
        cv2.setNumThreads(1)
        self._flow = cv2.DISOpticalFlow.create(cv2.DISOPTICAL_FLOW_PRESET_MEDIUM)

    def encode(self, crops: NDArray[np.uint8]) -> list[NDArray[np.uint8]]:
        return [grey(crop) for crop in crops]

    def match(
        self, references: list[NDArray[np.uint8]], pixels: NDArray[np.floating], queries: NDArray[np.uint8]
    ) -> tuple[Array, Array]:
        """Confidence: forward and backward flow agree, exp(-disagreement in pixels)."""
        located, confidence = [], []
        for reference, uv, query in zip(references, pixels, queries, strict=True):
            target = grey(query)
            forward = self._flow.calc(reference, target, np.zeros((*target.shape, 2), np.float32))
            backward = self._flow.calc(target, reference, np.zeros((*target.shape, 2), np.float32))
            up = (uv + 0.5) * UPSAMPLE - 0.5
            shift = sample_bilinear(forward, up)
            back = sample_bilinear(backward, up + shift)
            located.append((up + shift + 0.5) / UPSAMPLE - 0.5)
            confidence.append(np.exp(-np.linalg.norm(shift + back, axis=-1) / UPSAMPLE))
        return np.stack(located).astype(np.float64), np.stack(confidence).astype(np.float64)


def grey(crop: NDArray[np.uint8]) -> NDArray[np.uint8]:
    image = cv2.cvtColor(crop, cv2.COLOR_RGB2GRAY)
    return np.asarray(cv2.resize(image, None, fx=UPSAMPLE, fy=UPSAMPLE, interpolation=cv2.INTER_CUBIC), np.uint8)
