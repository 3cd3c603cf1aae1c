"""The object is rigid: one motion carries all of its points, and what disagrees with it was mismeasured.

A located point is off by about half a pixel, and at the outline of a thin part the depth of half a pixel beside
it may be that of the panel behind. Both hardly move the motion that most points agree on. So the motion is
fitted to the lifted points, robustly, and each point is put where the motion carries its reference.
Where no motion explains most of them (a matcher gone wrong, an object that bends), they stay as measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray
from scipy.spatial.transform import Rotation, Slerp

from ..spec import SPEC, Array

TRIPLES = 120  # motions that are tried, each from three points
ROUNDS = 8  # of reweighted least squares, from the best of them on
PIXELS = 2.0  # a point this far from where the motion carries it counts a quarter
EXPLAINED = 0.35  # share of the weight that must be explained for the motion to be believed


@dataclass(frozen=True)
class Refined:
    """n points after the fit."""

    p_live: Array  # (n, 3) metres, world
    misfit: Array  # (n,) metres between measured and fitted; 0 where nothing was fitted
    spread: Array  # (n,) metres, expected error of the fitted point; 0 where nothing was fitted


@cache
def _triples(n: int) -> NDArray[np.int64]:
    """Always the same draws of three different ones of n points."""
    return np.random.default_rng(n).random((TRIPLES, n)).argsort(axis=1)[:, :3]


def carried(T: NDArray[np.floating], p: Array) -> Array:
    """Points (n, 3) after the motions (..., 4, 4)."""
    return np.asarray(p @ np.swapaxes(T[..., :3, :3], -1, -2) + T[..., None, :3, 3])


def inverse(T: Array) -> Array:
    """Of motions (..., 4, 4)."""
    return np.asarray(np.linalg.inv(T), np.float64)


def interpolated(frames: Sequence[int], motions: Sequence[Array], length: int) -> Array:
    """Motions (T, 4, 4) of every frame from those of some, in order; before the first and after the last it stands
    still."""
    path = Slerp(frames, Rotation.from_matrix([T[:3, :3] for T in motions])) if len(frames) > 1 else None
    every = np.clip(np.arange(length), frames[0], frames[-1])
    whole = np.tile(np.eye(4), (length, 1, 1))
    whole[:, :3, :3] = np.eye(3) if path is None else path(every).as_matrix()
    shifts = np.stack([T[:3, 3] for T in motions])
    whole[:, :3, 3] = np.stack([np.interp(every, frames, shifts[:, axis]) for axis in range(3)], axis=-1)
    return whole


def fit_motion(p: Array, q: Array, weight: Array) -> tuple[Array, Array]:
    """R (..., 3, 3) and t (..., 3) that minimise sum_i w_i |R p_i + t - q_i|^2; p, q (..., n, 3), weight (..., n)."""
    w = weight[..., None] / weight.sum(axis=-1)[..., None, None]
    p_mean, q_mean = (w * p).sum(axis=-2, keepdims=True), (w * q).sum(axis=-2, keepdims=True)
    U, _, Vt = np.linalg.svd(np.swapaxes(w * (p - p_mean), -1, -2) @ (q - q_mean))
    V, Ut = np.swapaxes(Vt, -1, -2), np.swapaxes(U, -1, -2)
    V[..., 2] *= np.linalg.det(V @ Ut)[..., None]
    R = V @ Ut
    return R, (q_mean - p_mean @ np.swapaxes(R, -1, -2))[..., 0, :]


def refined(p_ref: Array, p_live: Array, weight: Array, scale: Array) -> Refined:
    """Moves measured points (n, 3) to where the motion that explains most of them carries their references.

    `weight` (n) is trust in each, 0 where invalid; `scale` (n) the size of a pixel at each, metres.
    """
    used = np.flatnonzero(weight > 0)
    untouched = Refined(p_live, np.zeros(len(p_live)), np.zeros(len(p_live)))
    if len(used) < SPEC.min_valid:
        return untouched
    p, q, w, tau = p_ref[used], p_live[used], weight[used], PIXELS * scale[used]
    chosen = _triples(len(used))
    R, t = fit_motion(p[chosen], q[chosen], np.ones(chosen.shape))
    missed = np.linalg.norm(p @ np.swapaxes(R, -1, -2) + t[:, None] - q, axis=-1) / tau  # (triples, n)
    best = (w / (1 + missed**2)).sum(axis=-1).argmax()
    R, t, agree = R[best], t[best], 1 / (1 + missed[best] ** 2)
    for _ in range(ROUNDS):
        R, t = fit_motion(p, q, w * agree**2 + 1e-9)
        agree = 1 / (1 + (np.linalg.norm(p @ R.T + t - q, axis=-1) / tau) ** 2)
    if (w * agree).sum() < EXPLAINED * w.sum():
        return untouched
    fitted = p_ref @ R.T + t
    misfit = np.linalg.norm(fitted - p_live, axis=-1)
    spread = expected_error(fitted, fitted[used], misfit[used], w * agree**2, tau)
    valid = weight > 0
    return Refined(np.where(valid[:, None], fitted, p_live), np.where(valid, misfit, 0.0), np.where(valid, spread, 0.0))


def expected_error(at: Array, p: Array, misfit: Array, weight: Array, tau: Array) -> Array:
    """Standard error of the fitted motion at points (m, 3): least squares over rotation and translation.

    From residuals of `p` (n, 3) with `weight` (n); one pixel's share is added, as few points agree by chance.
    """
    variance = ((weight * misfit**2).sum() + (0.3 * tau.mean()) ** 2) / weight.sum() / 3
    middle = p.mean(axis=0)
    J = _jacobian(p - middle)  # (n, 3, 6)
    information = np.einsum("n,nki,nkj->ij", weight, J, J) + np.diag([1e-5] * 3 + [1e-3] * 3)
    covariance = variance * np.linalg.inv(information)
    J = _jacobian(at - middle)
    return np.sqrt(np.einsum("nki,ij,nkj->n", J, covariance, J))


def _jacobian(r: Array) -> Array:
    """d(position) / d(rotation vector, translation) of points (n, 3) -> (n, 3, 6)."""
    x, y, z, zero = *r.T, np.zeros(len(r))
    turn = np.stack([[zero, z, -y], [-z, zero, x], [y, -x, zero]])  # (3, 3, n): -[r]x
    return np.concatenate([turn.transpose(2, 0, 1), np.broadcast_to(np.eye(3), (len(r), 3, 3))], axis=-1)
