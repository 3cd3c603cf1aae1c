"""Object-centred matching and 3D lifting, to the letter of the paper's appendix.

Crop both frames around the object, choose sixteen visible reference pixels, ask a matcher where
they are in the query, lift both ends into the world, and say which of them
are valid. Nothing here knows which matcher it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from ..frames import Frame
from ..machine import padded
from ..spec import SPEC, Array, Lifting
from .matcher import Doubt, Matcher, sample_bilinear
from .matches import Matches, join_matches
from .rigid import refined

BATCH = 8  # frames encoded or matched together, always: rounding must not depend on how many are left
SUPPORT = 32  # further points that vote on the motion of a rigid object, and are then forgotten
SIZE = SPEC.image_size


@dataclass(frozen=True)
class Crop:
    """A box of the original image, resized to 128x128 for matching."""

    left: int
    top: int
    width: int
    height: int
    rgb: NDArray[np.uint8]  # (128, 128, 3)

    @property
    def scale(self) -> Array:
        """Original pixels per crop pixel, (x, y)."""
        return np.array([self.width / SIZE, self.height / SIZE])

    def to_original(self, uv: NDArray[np.floating]) -> Array:
        """Crop pixels -> original pixels, pixel centre to pixel centre."""
        return (np.asarray(uv) + 0.5) * self.scale - 0.5 + np.array([self.left, self.top])

    def from_original(self, uv: NDArray) -> Array:
        return (np.asarray(uv) - np.array([self.left, self.top]) + 0.5) / self.scale - 0.5


def crop_object(frame: Frame, padding: tuple[int, int, int, int] | None = None) -> Crop:
    """The tight mask box padded (left, top, right, bottom) by 12 pixels of 128, and clipped.

    The whole image if there is no mask.
    """
    rows, columns = np.nonzero(frame.mask)
    H, W = frame.mask.shape
    if padding is None:
        padding = (round(SPEC.crop_padding * max(H, W) / SIZE),) * 4
    if len(rows) == 0:
        left, top, right, bottom = 0, 0, W - 1, H - 1
    else:
        left, right = max(columns.min() - padding[0], 0), min(columns.max() + padding[2], W - 1)
        top, bottom = max(rows.min() - padding[1], 0), min(rows.max() + padding[3], H - 1)
    box = frame.rgb[top : bottom + 1, left : right + 1]
    rgb = np.asarray(cv2.resize(box, (SIZE, SIZE), interpolation=cv2.INTER_LINEAR), np.uint8)
    return Crop(int(left), int(top), int(right - left + 1), int(bottom - top + 1), rgb)


def choose_pixels(mask: NDArray[np.bool_]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Sixteen visible pixels (16, 2), evenly spaced over the row-major list, and which are real.

    With fewer than sixteen, the last one is repeated and the repeats are not real; with none, all
    are placeholders.
    """
    rows, columns = np.nonzero(mask)  # row-major
    n, wanted = len(rows), SPEC.points
    if n == 0:
        return np.zeros((wanted, 2), np.int64), np.zeros(wanted, bool)
    if n >= wanted:
        index = np.linspace(0, n - 1, wanted).round().astype(np.int64)
    else:
        index = np.minimum(np.arange(wanted), n - 1)
    return np.stack([columns[index], rows[index]], axis=-1), np.arange(wanted) < n


def support_pixels(mask: NDArray[np.bool_]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """`SUPPORT` further visible pixels, between those of `choose_pixels`, and which are real."""
    rows, columns = np.nonzero(mask)
    n = len(rows)
    if n < SPEC.points + SUPPORT:  # too few to be others
        return np.zeros((SUPPORT, 2), np.int64), np.zeros(SUPPORT, bool)
    index = ((np.arange(SUPPORT) + 0.5) * n / SUPPORT).astype(np.int64)
    return np.stack([columns[index], rows[index]], axis=-1), np.ones(SUPPORT, bool)


def lift(frame: Frame, uv: Array, depth: Array) -> tuple[Array, NDArray[np.bool_]]:
    """World points of pixels and which are valid: inside the image, depth finite and positive."""
    H, W = frame.depth.shape
    with np.errstate(invalid="ignore"):
        inside = (uv[..., 0] >= 0) & (uv[..., 0] <= W - 1) & (uv[..., 1] >= 0) & (uv[..., 1] <= H - 1)
        valid = inside & np.isfinite(depth) & (depth > 0)
        points = frame.camera.lift(uv, depth)
    valid &= np.isfinite(points).all(axis=-1)
    return np.where(valid[..., None], points, 0.0), valid


@dataclass(frozen=True)
class ReferenceFrame:
    """A reference frame made ready once: its encoding, its pixels, their world points.

    Sixteen pixels and then those that only vote on the object's motion: n = 48.
    """

    encoding: Any
    pixels: Array  # (n, 2) in the crop
    p_ref: Array  # (n, 3) metres, world; zeros where invalid
    valid: NDArray[np.bool_]  # (n,)


def prepare_references(matcher: Matcher, frames: Sequence[Frame], batch: int = BATCH) -> list[ReferenceFrame]:
    """Any number of reference frames, encoded in batches of one shape."""
    crops = [crop_object(frame) for frame in frames]
    encodings: list[Any] = []
    for index in padded(len(frames), batch):
        encodings += matcher.encode(np.stack([crops[i].rgb for i in index]))
    references = []
    for frame, crop, encoding in zip(frames, crops, encodings, strict=False):  # without what padding repeated
        uv, real = (np.concatenate(x) for x in zip(choose_pixels(frame.mask), support_pixels(frame.mask), strict=True))
        depth = frame.depth[uv[:, 1], uv[:, 0]].astype(np.float64)
        p_ref, valid = lift(frame, uv.astype(np.float64), depth)
        references.append(ReferenceFrame(encoding, crop.from_original(uv), p_ref, valid & real))
    return references


def match_frames(
    matcher: Matcher,
    references: Sequence[ReferenceFrame],
    frames: Sequence[Frame],
    lifting: Lifting = "rigid",
    batch: int = BATCH,
) -> Matches:
    """Matches (B, 16, ...) of prepared references against live frames, one to one, in batches of one shape."""
    parts = [
        _match_batch(matcher, [references[i] for i in index], [frames[i] for i in index], lifting)
        for index in padded(len(frames), batch)
    ]
    return join_matches(*parts)[: len(frames)]


def _match_batch(
    matcher: Matcher, references: Sequence[ReferenceFrame], frames: Sequence[Frame], lifting: Lifting
) -> Matches:
    matches, doubt = measure(matcher, references, frames, lifting)
    if lifting == "paper":
        return matches
    confidence = np.clip(matcher.lifted_confidence(matches.confidence, doubt), 0.0, 1.0)
    return replace(matches, confidence=np.where(matches.valid, confidence, 0.0))


def measure(
    matcher: Matcher, references: Sequence[ReferenceFrame], frames: Sequence[Frame], lifting: Lifting
) -> tuple[Matches, Doubt]:
    """Matches (B, 16, ...) with the matcher's confidence in the locations, and what may make the points worse.

    "paper" lifts with bilinear depth whatever the matcher answers. "object" takes depth from the object's own
    pixels and leaves out what the matcher does not trust; "rigid" asks for further points and puts all where the
    motion that most of them agree on carries their references.
    """
    crops = [crop_object(frame) for frame in frames]
    asked = slice(SPEC.points + SUPPORT if lifting == "rigid" else SPEC.points)
    uv_crop, confidence = matcher.match(
        [r.encoding for r in references],
        np.stack([r.pixels[asked] for r in references]),
        np.stack([crop.rgb for crop in crops]),
    )
    if lifting != "paper":
        uv_crop = np.where((confidence < matcher.abstains_below)[..., None], np.nan, uv_crop)
    located = list(zip(frames, crops, uv_crop, strict=True))
    lifted = [lift_query(frame, crop, uv, lifting) for frame, crop, uv in located]
    around = np.stack([relief(frame, crop.to_original(uv)) for frame, crop, uv in located])
    p_ref = np.stack([r.p_ref[asked] for r in references])
    p_live = np.stack([points for points, _ in lifted])
    valid = np.stack([ok for _, ok in lifted]) & np.isfinite(confidence)
    valid &= np.stack([r.valid[asked] for r in references])
    confidence = np.where(valid, np.clip(confidence, 0.0, 1.0), 0.0)
    misfit, spread = np.zeros(valid.shape), np.zeros(valid.shape)
    if lifting == "rigid":
        for i, frame in enumerate(frames):
            weight = np.where(valid[i], np.maximum(confidence[i], 0.02), 0.0)
            coarse = max(1.0, float(crops[i].scale.max()))  # no finer than the pixels that were matched
            found = refined(p_ref[i], p_live[i], weight, coarse * pixel_size(frame, p_live[i]))
            p_live[i], misfit[i], spread[i] = found.p_live, found.misfit, found.spread
    k = SPEC.points
    matches = Matches(p_ref[:, :k], p_live[:, :k], confidence[:, :k], valid[:, :k])
    return matches, Doubt(around[:, :k], misfit[:, :k], spread[:, :k])


def pixel_size(frame: Frame, p: Array) -> Array:
    """How far apart neighbouring pixels are at points (N, 3): metres."""
    return np.maximum(frame.camera.project(p)[1], 1e-3) / frame.camera.K[0, 0]


def sample_depth(frame: Frame, uv: Array, lifting: Lifting) -> Array:
    """Query depth at sub-pixel locations (N, 2).

    The paper's is bilinear: at the object's outline it blends the object with what lies behind
    it, so that even perfect matches lift to 50 mm of error at the 95th percentile. Ours is
    bilinear over the object's own pixels, which leaves 7 mm (LOG.md).
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        depth = frame.depth.astype(np.float64)
        if lifting == "paper":
            return sample_bilinear(depth, uv)
        own = frame.mask & np.isfinite(depth) & (depth > 0)  # a hole is no depth, not depth zero
        return sample_bilinear(np.where(own, depth, 0.0), uv) / sample_bilinear(own.astype(float), uv)


def relief(frame: Frame, uv: Array) -> Array:
    """Range of the object's depth over the 2x2 and the 3x3 pixels around locations (N, 2) -> (N, 2), metres.

    Where it is large, a small miss in the image is a large one in space.
    """
    H, W = frame.mask.shape
    uv = np.nan_to_num(uv)
    ranges = []
    for first, steps in ((np.floor(uv), range(2)), (np.rint(uv), range(-1, 2))):
        offsets = np.array([(x, y) for y in steps for x in steps])
        near = np.clip(first[:, None] + offsets, 0, [W - 1, H - 1]).astype(np.int64)
        columns, rows = near[..., 0], near[..., 1]
        depth, on = frame.depth[rows, columns].astype(np.float64), frame.mask[rows, columns]
        on &= np.isfinite(depth) & (depth > 0)
        span = np.where(on, depth, -np.inf).max(axis=1) - np.where(on, depth, np.inf).min(axis=1)
        ranges.append(np.where(on.any(axis=1), span, 0.0))
    return np.stack(ranges, axis=-1)


def lift_query(
    frame: Frame, crop: Crop, uv_crop: Array, lifting: Lifting = "object"
) -> tuple[Array, NDArray[np.bool_]]:
    """World points of matched locations (16, 2) in the query crop, and their validity."""
    in_range: NDArray[np.bool_] = np.isfinite(uv_crop[:, 0]) & np.isfinite(uv_crop[:, 1])
    uv = crop.to_original(np.where(in_range[:, None], uv_crop, 0.0))
    H, W = frame.mask.shape
    nearest = np.rint(uv)
    in_range = in_range & (nearest >= 0).all(axis=-1) & (nearest[:, 0] <= W - 1) & (nearest[:, 1] <= H - 1)
    uv = np.where(in_range[:, None], uv, 0.0)
    columns, rows = np.rint(uv).astype(np.int64).T
    depth = sample_depth(frame, uv, lifting)
    p_live, lifted = lift(frame, np.clip(uv, 0, [W - 1, H - 1]), depth)
    valid = in_range & lifted & frame.mask[rows, columns]
    return np.where(valid[:, None], p_live, 0.0), valid
