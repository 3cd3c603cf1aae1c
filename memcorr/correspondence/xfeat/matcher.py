"""`xfeat`: the published XFeat (CVPR 2024), pretrained on photographs, asked for sixteen points instead of keypoints.

    matcher = load_matcher("xfeat")

XFeat gives one descriptor per 8 x 8 pixels; crops are enlarged three times, so one per 2.7 crop pixels. Each asked-for
pixel is first looked for in the whole query. The affine map that most answers agree on then warps the query onto the
reference, and the same pixels are looked for again, near where they should be. Descriptors are not made for objects
that are seen turned; after the warp they need not be. The peak of similarity is found between descriptors; what it is
off by on the reference itself is taken away. At last the answer is looked for in the reference.

Confidence comes from that last distance, the similarity, how far it stands out, and the distance from the affine map,
by constants that `memcorr.correspondence.xfeat.calibrate` computes on practice objects of no evaluated world.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import cv2
import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from ...spec import SPEC, Array
from ..embedded.matcher import trust_evidence
from ..matcher import Doubt, Matcher
from .package import STRIDE, Descriptors

SIZE = SPEC.image_size
ENLARGED = 3  # times, before the network
CELL = STRIDE / ENLARGED  # crop pixels between descriptors
GRID = SIZE * ENLARGED // STRIDE  # descriptors per side
SHARPNESS = 30.0  # of the soft maximum over similarities around the peak
REACH = 13.0  # crop pixels from where the affine map says, in the warped query
NEARNESS = 8.0  # crop pixels: similarity loses up to `PULL` with the distance from there
PULL = 0.3
DRAWS = 200  # pairs of points, each of which proposes a motion
AGREES = 4.0  # crop pixels: a point this far from the affine map counts a quarter

# By `python -m memcorr.correspondence.xfeat.calibrate`, on the objects held out for the embedded matcher.
LOCATED = (-9.95, 12.498, 0.821, -0.272, -0.655)
LIFTED = (0.81, 0.437, -4.078, 0.558, -0.439, -0.147, -2.657, 0.729)


@dataclass(frozen=True)
class Located:
    uv: Array  # (N, 2) query-crop pixels
    evidence: Array  # (N, 5): 1, similarity, how far it stands out, log distances (pixels) back and from the affine map

    @property
    def confidence(self) -> Array:
        return logistic(self.evidence, LOCATED)


class XFeatMatcher(Matcher):
    name = "xfeat"
    abstains_below = 0.15  # the point is probably hidden

    def __init__(self) -> None:
        self.descriptors = Descriptors()

    def encode(self, crops: NDArray[np.uint8]) -> list[Tensor]:
        """Descriptors (64, GRID, GRID) of unit length each."""
        return [self.describe(crop) for crop in crops]

    def match(
        self, references: list[Tensor], pixels: NDArray[np.floating], queries: NDArray[np.uint8]
    ) -> tuple[Array, Array]:
        """One pair at a time: no result depends on its neighbours."""
        located = [
            self.locate(reference, np.asarray(uv, np.float64), query)
            for reference, uv, query in zip(references, pixels, queries, strict=True)
        ]
        return np.stack([each.uv for each in located]), np.stack([each.confidence for each in located])

    def lifted_confidence(self, confidence: Array, doubt: Doubt) -> Array:
        """Estimates the probability that the lifted point is within 10 mm of the truth."""
        return logistic(trust_evidence(confidence, doubt), LIFTED)

    def describe(self, crop: NDArray[np.uint8], affine: Array | None = None) -> Tensor:
        """Descriptors of the crop, or of the crop as it would be if pixel p of it were where `affine` maps p."""
        picture = enlarged(crop, np.eye(2, 3) if affine is None else affine)
        return F.normalize(self.descriptors(torch.from_numpy(picture)[None, None])[0], dim=0)

    @torch.inference_mode()
    def locate(self, reference: Tensor, uv: Array, query: NDArray[np.uint8]) -> Located:
        asked = sampled(reference, uv[:, None])[:, 0]  # (N, 64)
        affine, stands_out = self.overview(asked, uv, self.describe(query))
        turned = self.describe(query, affine)
        bias = peak(asked, reference, uv)[0] - uv
        there, similarity = peak(asked, turned, uv)
        there -= bias
        back, _ = peak(sampled(turned, there[:, None])[:, 0], reference, uv)
        returned = np.linalg.norm(back - bias - uv, axis=-1)
        moved = np.linalg.norm(there - uv, axis=-1)
        evidence = [np.ones(len(uv)), similarity, stands_out, np.log(returned + 0.3), np.log(moved + 0.5)]
        return Located(carried(affine, there), np.stack(evidence, axis=-1))

    def overview(self, asked: Tensor, uv: Array, query: Tensor) -> tuple[Array, Array]:
        """The affine map (2, 3) from reference to query pixels that most points agree on, and by how much (N,) the
        best similarity of each exceeds that of any other place."""
        similarity = (asked @ query.flatten(1)).numpy()  # (N, cells)
        cells = centres()
        best = cells[similarity.argmax(axis=1)]
        elsewhere = np.abs(cells - best[:, None]).max(axis=-1) >= 3 * CELL
        stands_out = similarity.max(axis=1) - np.where(elsewhere, similarity, -1.0).max(axis=1)
        once = shares(uv)
        affine = agreed_affine(uv, best, once * np.maximum(stands_out, 0.01))
        for width in (2 * NEARNESS, NEARNESS):
            away = ((cells - carried(affine, uv)[:, None]) ** 2).sum(axis=-1) / (2 * width**2)
            chosen = (similarity - PULL * away / (1 + away)).argmax(axis=1)
            trust = np.maximum(similarity[np.arange(len(uv)), chosen] - 0.3, 0.02)
            affine = agreed_affine(uv, cells[chosen], once * trust)
        return affine, stands_out


@cache
def centres() -> Array:
    """Crop pixels (cells, 2) that the descriptors lie on, row-major."""
    rows, columns = np.mgrid[:GRID, :GRID]
    return np.stack([columns.ravel(), rows.ravel()], axis=-1) * CELL + (CELL - 1) / 2


@cache
def window() -> Array:
    """(25, 2) crop pixels: offsets of two cells each way."""
    steps = np.arange(-2, 3) * CELL
    rows, columns = np.meshgrid(steps, steps, indexing="ij")
    return np.stack([columns.ravel(), rows.ravel()], axis=-1)


def peak(asked: Tensor, descriptors: Tensor, near: Array) -> tuple[Array, Array]:
    """Where the similarity with asked (N, 64) peaks within `REACH` of `near` (N, 2), between cells too; its height."""
    cells = centres()
    away = ((cells - near[:, None]) ** 2).sum(axis=-1)
    similarity = (asked @ descriptors.flatten(1)).numpy()
    allowed = (away <= REACH**2) | (away <= away.min(axis=1, keepdims=True))  # `near` may lie outside
    pulled = similarity - PULL / 6 * away / NEARNESS**2
    at = cells[np.where(allowed, pulled, -np.inf).argmax(axis=1)]
    for _ in range(2):  # the second time around where the first ended: a window off its peak pulls to its middle
        around = torch.einsum("nc,nwc->nw", asked, sampled(descriptors, at[:, None] + window()))
        at = at + (around * SHARPNESS).softmax(dim=1).double().numpy() @ window()
    return at, around.amax(dim=1).double().numpy()


def sampled(descriptors: Tensor, uv: Array) -> Tensor:
    """Descriptors (N, K, 64) of unit length at crop pixels (N, K, 2), bicubic, border padding."""
    grid = torch.from_numpy(2 * (uv + 0.5) / SIZE - 1).float()
    found = F.grid_sample(descriptors[None], grid[None], "bicubic", "border", align_corners=False)[0]
    return F.normalize(found.permute(1, 2, 0), dim=-1)


def enlarged(crop: NDArray[np.uint8], affine: Array) -> NDArray[np.float32]:
    """Grey picture, `ENLARGED` times as large, in [0, 1]: what it shows at p the crop shows at `affine` p."""
    smaller = np.array([[1 / ENLARGED, 0, 0.5 / ENLARGED - 0.5], [0, 1 / ENLARGED, 0.5 / ENLARGED - 0.5], [0, 0, 1]])
    grey = crop.astype(np.float32).mean(axis=-1) / 255
    flags = cv2.INTER_CUBIC | cv2.WARP_INVERSE_MAP
    size = (SIZE * ENLARGED, SIZE * ENLARGED)
    picture = cv2.warpAffine(grey, affine @ smaller, size, flags=flags, borderMode=cv2.BORDER_REPLICATE)
    return np.asarray(picture, np.float32)


def carried(affine: Array, uv: Array) -> Array:
    return np.asarray(uv @ affine[:, :2].T + affine[:, 2])


def shares(uv: Array) -> Array:
    """(N,) 1 for a pixel that is asked for once, less for each that is repeated, 0 outside the crop: placeholders."""
    _, which, count = np.unique(uv, axis=0, return_inverse=True, return_counts=True)
    inside = ((uv >= -0.5) & (uv <= SIZE - 0.5)).all(axis=-1)
    return np.where(inside, 1 / count[which.ravel()], 0.0)


@cache
def _two_of(n: int) -> NDArray[np.int64]:
    """Always the same draws of two different ones of n points."""
    return np.random.default_rng(n).random((DRAWS, n)).argsort(axis=1)[:, :2]


def agreed_affine(uv: Array, to: Array, weight: Array) -> Array:
    """The affine map (2, 3) that explains most of uv (N, 2) -> to (N, 2): a shift, a turn of up to 45 degrees and a
    zoom through two of the points first, then reweighted least squares, held near a shift where points say little."""
    used = np.flatnonzero(weight > 0)
    if len(used) < SPEC.min_valid:
        return np.eye(2, 3)
    p, q, w = uv[used] @ [1, 1j], to[used] @ [1, 1j], weight[used]  # complex: a turn and a zoom are one factor
    a, b = _two_of(len(used)).T
    apart = np.abs(p[b] - p[a]) > 3
    factor = np.where(apart, (q[b] - q[a]) / np.where(apart, p[b] - p[a], 1), 1)
    sensible = (np.abs(factor) > 0.5) & (np.abs(factor) < 2) & (np.abs(np.angle(factor)) < np.pi / 4)
    factor = np.where(sensible, factor, 1)
    shift = (q[a] + q[b]) / 2 - factor * (p[a] + p[b]) / 2
    missed = np.abs(factor[:, None] * p + shift[:, None] - q) / AGREES
    best = (w / (1 + missed**2)).sum(axis=1).argmax()
    c, s = factor[best].real, factor[best].imag
    affine = np.array([[c, -s, shift[best].real], [s, c, shift[best].imag]])
    for _ in range(10):
        missed = np.linalg.norm(carried(affine, uv[used]) - to[used], axis=-1) / AGREES
        g = w / (1 + missed**2) ** 2
        g = (g / g.sum())[:, None]
        x, y = uv[used] - (g * uv[used]).sum(axis=0), to[used] - (g * to[used]).sum(axis=0)
        held = (0.02 * (g * x**2).sum() + 4) * np.eye(2)
        turn = ((g * y).T @ x + held) @ np.linalg.inv((g * x).T @ x + held)
        affine = np.column_stack([turn, (g * to[used]).sum(axis=0) - turn @ (g * uv[used]).sum(axis=0)])
    return affine


def logistic(evidence: Array, weights: tuple[float, ...]) -> Array:
    return np.asarray(1 / (1 + np.exp(-evidence @ np.array(weights))))
