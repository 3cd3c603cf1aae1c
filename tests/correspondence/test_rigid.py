"""The object is rigid: one motion is found among wrong points, and left alone what no motion explains."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.spatial.transform import Rotation

from memcorr.correspondence.rigid import fit_motion, refined
from memcorr.spec import Array

PIXEL = np.full(16, 0.008)


def motion(rng: np.random.Generator) -> tuple[Array, Array]:
    return Rotation.from_rotvec(rng.normal(0, 0.3, 3)).as_matrix(), rng.normal(0, 0.1, 3)


def points(rng: np.random.Generator, shape: str) -> Array:
    """Sixteen points of an object of some 20 cm."""
    p = rng.uniform(-0.1, 0.1, (16, 3))
    return p * {"solid": (1, 1, 1), "panel": (1, 1, 0), "bar": (1, 0.02, 0.02)}[shape] + (0.1, 0.6, 0.2)


def test_least_squares_equals_scipy() -> None:
    rng = np.random.default_rng(0)
    p, q, w = rng.normal(size=(5, 16, 3)), rng.normal(size=(5, 16, 3)), rng.uniform(0, 1, (5, 16))
    R, t = fit_motion(p, q, w)
    for i in range(5):
        centred = [x[i] - np.average(x[i], axis=0, weights=w[i]) for x in (p, q)]
        theirs = Rotation.align_vectors(centred[1], centred[0], w[i])[0].as_matrix()
        np.testing.assert_allclose(R[i], theirs, atol=1e-9)
        np.testing.assert_allclose(np.average(p[i] @ R[i].T + t[i] - q[i], axis=0, weights=w[i]), 0, atol=1e-12)


@pytest.mark.parametrize("shape", ["solid", "panel", "bar"])
def test_a_third_of_wrong_points_does_not_matter(shape: str) -> None:
    rng = np.random.default_rng(1)
    before, after = [], []
    for _ in range(50):
        p, (R, t) = points(rng, shape), motion(rng)
        truth = p @ R.T + t
        measured = truth + rng.normal(0, 0.002, (16, 3))
        measured[rng.choice(16, 5, replace=False)] += rng.normal(0, 0.08, (5, 3))
        settled = refined(p, measured, np.ones(16), PIXEL)
        before.append(np.linalg.norm(measured - truth, axis=-1))
        after.append(np.linalg.norm(settled.p_live - truth, axis=-1))
    assert np.mean(before) > 0.03
    assert np.percentile(after, 95) < 0.006 and np.mean(after) < 0.003


def test_the_expected_error_is_the_error() -> None:
    """Where all points are equally noisy, its mean square is what least squares theory says, at every point."""
    rng = np.random.default_rng(2)
    p, sigma = points(rng, "panel"), 0.002
    errors, expected = [], []
    for _ in range(300):
        R, t = motion(rng)
        truth = p @ R.T + t
        settled = refined(p, truth + rng.normal(0, sigma, (16, 3)), np.ones(16), PIXEL)
        errors.append(((settled.p_live - truth) ** 2).sum(axis=-1))
        expected.append(settled.spread**2)
    np.testing.assert_allclose(np.sqrt(np.mean(expected, axis=0)), np.sqrt(np.mean(errors, axis=0)), rtol=0.35)


def test_what_bends_stays_as_measured() -> None:
    rng = np.random.default_rng(3)
    p = points(rng, "solid")
    scattered = p + rng.normal(0, 0.1, (16, 3))
    settled = refined(p, scattered, np.ones(16), PIXEL)
    np.testing.assert_array_equal(settled.p_live, scattered)
    assert not settled.spread.any() and not settled.misfit.any()


def test_invalid_points_neither_vote_nor_move() -> None:
    rng = np.random.default_rng(4)
    p, (R, t) = points(rng, "solid"), motion(rng)
    truth = p @ R.T + t
    measured, weight = truth.copy(), np.ones(16)
    measured[10:], weight[10:] = 0.0, 0.0
    settled = refined(p, measured, weight, PIXEL)
    np.testing.assert_allclose(settled.p_live[:10], truth[:10], atol=1e-9)
    assert not settled.p_live[10:].any()
    few = np.where(np.arange(16) < 3, 1.0, 0.0)
    np.testing.assert_array_equal(refined(p, measured, few, PIXEL).p_live, measured)
