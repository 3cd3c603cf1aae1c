"""Mixture of ground truth and visual conditions: what stage two trains on.

Every batch holds exactly 25 % ground truth, 50 % raw cache rows and 25 % residual bootstrap.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.spatial.transform import Rotation

from ..correspondence.cache import Cache
from ..correspondence.matches import Matches, residuals
from ..correspondence.rigid import carried
from ..errors import UserError
from ..spec import SPEC, TASKS, Array
from ..worlds.disturbances import CAMERA_ERROR_DEG, CAMERA_ERROR_M
from .dataset import Dataset, Rows

RESIDUAL_PERCENTILE = 95.0  # unless a limit is given; the paper's 20.034 mm is this percentile of its RoMa v2 cache
LARGEST_MISTAKE = 4.0  # of a camera that is believed elsewhere, times the error of a usual calibration
SAME_DATA = 1e-3  # metres by which the cache's true points may miss ours


def source_counts(batch: int) -> tuple[int, int, int]:
    """Ground truth, raw cache, residual bootstrap."""
    if batch % 4:
        raise UserError(f"a batch of {batch} cannot hold exactly 25 % / 50 % / 25 %; give a multiple of 4")
    return batch // 4, batch // 2, batch // 4


@dataclass(frozen=True)
class Mixture:
    """A cache joined to the rows it was measured on."""

    cache: Cache
    rows: Rows  # (R,) dataset row of each cache row
    first: Rows  # (pairs,) cache row of each pair's opening frame 0
    pool: Array  # (P, 3) residuals kept for the bootstrap, metres

    @staticmethod
    def join(dataset: Dataset, cache: Cache, residual_limit_mm: float | None = None) -> Mixture:
        rows = _checked_rows(dataset, cache)
        norm = np.linalg.norm(cache.residual, axis=-1)[cache.matches.valid]
        if not len(norm):
            raise UserError("the cache holds no valid point; make it again with `memcorr match`")
        limit = np.percentile(norm, RESIDUAL_PERCENTILE) if residual_limit_mm is None else residual_limit_mm / 1e3
        pool = cache.residual[cache.matches.valid][norm <= limit]
        if not len(pool):
            raise UserError(f"the cache holds no residual below {1e3 * limit:g} mm")
        order = {int(row): i for i, row in enumerate(rows)}
        opening, closing = dataset.first_rows(np.arange(dataset.pairs))
        if missing := [int(row) for row in (*opening, *closing) if int(row) not in order]:
            raise UserError(f"the cache lacks {len(missing)} rows at frame 0; make it again with `memcorr match`")
        return Mixture(cache, rows, np.array([order[int(row)] for row in opening]), pool)

    def raw(self, index: Rows) -> Matches:
        """The matches as measured."""
        return self.cache.matches[index]

    def bootstrap(self, index: Rows, draws: NDArray[np.int64]) -> Matches:
        """Residual bootstrap: true live points plus resampled residuals; the rest as measured.

        `draws` (B, 16) indexes the pool. Points that were invalid stay invalid.
        """
        return replace(self.raw(index), p_live=self.cache.p_live_true[index] + self.pool[draws])

    def fingerprint(self) -> str:
        digest = hashlib.sha256(np.ascontiguousarray(self.rows).tobytes())
        digest.update(np.ascontiguousarray(self.cache.matches.p_live).tobytes())
        return digest.hexdigest()[:16]


@dataclass(frozen=True)
class SensorErrors:
    """What all points of a row have in common when sensors are wrong: the camera is believed elsewhere, the mask lost
    its rim. Half of the rows that err have one of them alone."""

    turn: Array  # (B, 3) rotation vector about the camera, radians
    shift: Array  # (B, 3) metres
    left: Rows  # (B,) points that the mask still holds, those nearest to its middle

    @staticmethod
    def draw(rng: np.random.Generator, size: int, share: float) -> SensorErrors:
        wrong = rng.random(size) < share
        kind = rng.integers(0, 4, size)  # camera, mask, and twice both
        axis, way = rng.normal(size=(2, size, 3))
        far = rng.uniform(0.0, LARGEST_MISTAKE, size) * (wrong & (kind != 1))
        axis, way = (far[:, None] * v / np.linalg.norm(v, axis=-1, keepdims=True) for v in (axis, way))
        left = np.where(wrong & (kind != 0), rng.integers(SPEC.min_valid, SPEC.points + 1, size), SPEC.points)
        return SensorErrors(np.radians(CAMERA_ERROR_DEG) * axis, CAMERA_ERROR_M * way, left)

    def twice(self) -> SensorErrors:
        """For both directions of a pair."""
        return SensorErrors(np.tile(self.turn, (2, 1)), np.tile(self.shift, (2, 1)), np.tile(self.left, 2))

    def on(self, matches: Matches, eye: Array) -> Matches:
        """`matches` (B, 16, ...) as these sensors show them to a camera at `eye` (B, 3)."""
        R = Rotation.from_rotvec(self.turn).as_matrix()
        p_live = np.einsum("bij,bnj->bni", R, matches.p_live - eye[:, None]) + (eye + self.shift)[:, None]
        weight = matches.valid / np.maximum(matches.valid.sum(axis=1), 1)[:, None]
        middle = np.einsum("bn,bnj->bj", weight, matches.p_live)[:, None]
        distance = np.where(matches.valid, np.linalg.norm(matches.p_live - middle, axis=-1), np.inf)
        rank = distance.argsort(axis=1).argsort(axis=1)
        return replace(matches, p_live=p_live, valid=matches.valid & (rank < self.left[:, None]))


@dataclass(frozen=True)
class Resampled:
    """Points that a matcher chose and the errors it made, put on other rows of the same object: what was measured on
    some rows then teaches on all of them, disturbed ones and any phase included."""

    points: Array  # (R, 16, 3) in the moving body's frame
    error: Array  # (R, 16, 3) of the live points, metres, world frame
    confidence: Array  # (R, 16)
    valid: NDArray[np.bool_]  # (R, 16)
    largest: float  # errors are taken up to so many times
    own_points: bool = False  # each row keeps its points: without truth it is unknown where another's would belong

    @staticmethod
    def of(dataset: Dataset, cache: Cache, largest: float) -> Resampled:
        d, matches = cache.demonstration, cache.matches
        T_ref = dataset.object_pose[dataset.reference[d], cache.reference_frame]
        gap = np.linalg.norm(
            cache.p_live_true - carried(dataset.object_pose[d, cache.anchor] @ np.linalg.inv(T_ref), matches.p_ref),
            axis=-1,
        )
        if gap[matches.valid].size == 0 or gap[matches.valid].max() > SAME_DATA:
            raise UserError("the cache was made for other data; make one for this data with `memcorr match`")
        enough = matches.valid.sum(axis=1) >= SPEC.min_valid
        points = carried(np.asarray(np.linalg.inv(T_ref), np.float64), matches.p_ref)[enough]
        return Resampled(points, cache.residual[enough], matches.confidence[enough], matches.valid[enough], largest)

    @staticmethod
    def measured(dataset: Dataset, errors: Array, largest: float) -> Resampled:
        """Each row keeps its own points; errors (E, 16, 3) are what the matcher disagrees with itself by."""
        d, own = dataset.windows.demonstration, dataset.own_matches(np.arange(len(dataset)))
        T_ref = dataset.object_pose[dataset.reference[d], dataset.reference_frame]
        points = carried(np.asarray(np.linalg.inv(T_ref), np.float64), own.p_ref)
        return Resampled(points, errors, own.confidence, own.valid, largest, own_points=True)

    def draw(self, rng: np.random.Generator, size: int) -> tuple[Rows, Array]:
        """Whose errors, and how many times as large; a quarter are free of error."""
        factor = rng.uniform(0.0, self.largest, size) * (rng.random(size) < 0.75)
        return rng.integers(0, len(self.error), size), factor

    def matches(self, T_ref: Array, T_live: Array, sources: Rows, factor: Array, rows: Rows | None = None) -> Matches:
        """Of `rows`, with their references and live scenes posed like this; `sources` have the points and errors."""
        whose = rows if self.own_points and rows is not None else sources
        points, valid = self.points[whose], self.valid[whose]
        p_live = carried(T_live, points) + factor[:, None, None] * np.where(valid[..., None], self.error[sources], 0.0)
        return Matches(carried(T_ref, points), p_live, self.confidence[whose], valid)


def _checked_rows(dataset: Dataset, cache: Cache) -> Rows:
    """Dataset rows of the cache, or a complaint when it was measured on something else."""
    if cache.demonstration.max() >= len(TASKS) * dataset.pairs:
        raise UserError(
            f"the cache was made for {cache.demonstration.max() // len(TASKS) + 1} or more training pairs, "
            f"this run trains on {dataset.pairs}; make one for this data with `memcorr match`"
        )
    rows = dataset.rows(cache.demonstration, cache.anchor)
    other = "the cache was made for other data; make one for this data with `memcorr match`"
    if not np.array_equal(dataset.reference_frame[rows], cache.reference_frame):
        raise UserError(f"{other} (its reference frames differ: another collection or tie-breaking rule)")
    d = cache.demonstration
    T_ref = dataset.object_pose[dataset.reference[d], cache.reference_frame]
    T_live = dataset.object_pose[d, cache.anchor]
    truth = Matches(cache.matches.p_ref, cache.p_live_true, cache.matches.confidence, cache.matches.valid)
    gap = np.linalg.norm(residuals(truth, T_ref, T_live), axis=-1)[cache.matches.valid]
    if gap.size and gap.max() > SAME_DATA:
        raise UserError(f"{other} (its true points are {1000 * gap.max():.0f} mm off)")
    return rows
