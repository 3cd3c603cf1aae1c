"""A matcher of your own: two methods, and any policy follows references with it.

    python examples/own_matcher.py

This one compares small patches by normalised cross-correlation. It is measured beside the shipped matcher on
one recording; `memcorr.load_policy().follow(reference, matcher=PatchMatcher())` uses it live.
"""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import tyro
from numpy.typing import NDArray

import memcorr
from memcorr.correspondence.cache import error_table
from memcorr.correspondence.lift import match_frames, prepare_references
from memcorr.correspondence.matcher import load_matcher
from memcorr.correspondence.matches import residuals
from memcorr.spec import Array

RADIUS = 10  # of a patch, pixels of the 128 x 128 crop


class PatchMatcher(memcorr.Matcher):
    name = "patches"

    def encode(self, crops: NDArray[np.uint8]) -> list[NDArray[np.uint8]]:
        """What is kept of a reference: here the image itself, with a border for patches at the edge."""
        return [np.pad(crop, ((RADIUS, RADIUS), (RADIUS, RADIUS), (0, 0)), "reflect") for crop in crops]

    def match(
        self, references: list[NDArray[np.uint8]], pixels: NDArray[np.floating], queries: NDArray[np.uint8]
    ) -> tuple[Array, Array]:
        """Where each pixel's patch correlates best, and how well."""
        located, trusted = np.zeros(pixels.shape), np.zeros(pixels.shape[:2])
        for b, query in enumerate(self.encode(queries)):
            for n, (u, v) in enumerate(np.rint(pixels[b]).astype(int)):
                patch = references[b][v : v + 2 * RADIUS + 1, u : u + 2 * RADIUS + 1]
                score = cv2.matchTemplate(query, patch, cv2.TM_CCOEFF_NORMED)
                _, best, _, place = cv2.minMaxLoc(score)
                located[b, n], trusted[b, n] = place, max(best, 0.0)
        return located, trusted


def main(data: Path = Path("demo/demos"), gap: int = 12, every: int = 8) -> None:
    """Where are the points of frame t - gap in frame t? The door moves in between, and the hand hides parts of it.

    Args:
        data: Store of demonstrations.
        gap: Frames between reference and query.
        every: Use one frame of so many.
    """
    demonstration = memcorr.Store.open(data).demonstration(pair=0, task="open")
    poses = demonstration.object_pose
    assert poses is not None, "the error is judged by simulator truth"
    later = np.arange(gap, len(demonstration), every)
    for matcher in (PatchMatcher(), load_matcher("embedded")):
        references = prepare_references(matcher, demonstration.frames(later - gap))
        matches = match_frames(matcher, references, demonstration.frames(later))
        table = error_table(matcher.name, residuals(matches, poses[later - gap], poses[later]), matches.valid)
        print(
            f"{matcher.name:10} {table['valid_points']:4} valid points, median error {table['median_mm']:6.2f} mm, "
            f"95 % within {table['p95_mm']:7.2f} mm"
        )


if __name__ == "__main__":
    tyro.cli(main)
