"""Appendix "Evaluation Statistics"."""

from __future__ import annotations

import time

import numpy as np
import pytest
from scipy.stats import binomtest, bootstrap

from memcorr.evaluation.episodes import Episode
from memcorr.evaluation.intervention import Intervention
from memcorr.report.statistics import bootstrap_interval, clopper_pearson, paired_difference, share
from memcorr.spec import TASKS, Task


def episode(experiment: str, seed: int, scene: int, task: Task, success: bool) -> Episode:
    return Episode(
        experiment=experiment,
        train_seed=seed,
        condition="boundary",
        scene=scene,
        scene_seed=0,
        u=(0.1, 0.5),
        camera_azimuth_deg=0.0,
        task=task,
        shown=Intervention(),
        success=success,
        steps=80,
        replans=10,
        fallback_replans=0,
        mean_match_error_mm=3.0,
        first_chunk_direction=task,
        final_joint=-1.4,
        seconds=1.0,
    )


@pytest.mark.parametrize(("successes", "n"), [(0, 50), (3, 50), (100, 100)])
def test_exact_intervals_equal_scipys(successes: int, n: int) -> None:
    theirs = binomtest(successes, n).proportion_ci(0.95, "exact")
    assert clopper_pearson(successes, n) == pytest.approx((100 * theirs.low, 100 * theirs.high))


def test_where_all_end_alike_the_interval_is_exact() -> None:
    rows = [episode("a", 42, scene, "open", True) for scene in range(25)]
    measured = share(rows)
    assert measured is not None and measured.exact and measured.low == pytest.approx(86.28, abs=0.01)
    mixed = share([*rows, episode("a", 42, 25, "open", False)])
    assert mixed is not None and not mixed.exact


def random_rows(experiment: str, probability: float, rng: np.random.Generator, scenes: int = 25) -> list[Episode]:
    difficulty = np.random.default_rng(5).uniform(-0.3, 0.1, scenes)
    return [
        episode(experiment, seed, scene, task, bool(rng.random() < probability + difficulty[scene]))
        for seed in (42, 43, 44)
        for scene in range(scenes)
        for task in TASKS
    ]


@pytest.mark.parametrize("n", [25, 50])
def test_the_bootstrap_is_scipys_percentile_bootstrap(n: int) -> None:
    means = np.random.default_rng(n).integers(0, 7, n) / 6
    ours = bootstrap_interval(means)
    theirs = bootstrap(
        (means,), np.mean, n_resamples=100_000, method="percentile", rng=np.random.default_rng(1), batch=10_000
    ).confidence_interval
    # The standard error of a 2.5 % quantile of 100,000 draws is about 0.8 % of the mean's deviation;
    # the means lie on a grid of 1 / (6 n), so a quantile may also fall on the neighbouring point.
    tolerance = 4 * 0.008 * means.std() / np.sqrt(n) + 1.01 / (6 * n)
    assert np.allclose(ours, theirs, atol=tolerance)


def test_a_hundred_thousand_resamples_take_less_than_a_second() -> None:
    means = np.random.default_rng(0).random(50)
    start = time.process_time()
    bootstrap_interval(means)
    assert time.process_time() - start < 1.0


def test_shares_average_tasks_and_seeds_within_a_configuration_first() -> None:
    rows = random_rows("memcorr", 0.9, np.random.default_rng(0))
    measured = share(rows)
    assert measured is not None
    assert (measured.successes, measured.n) == (sum(r.success for r in rows), 150)
    means = np.array([np.mean([r.success for r in rows if r.scene == s]) for s in range(25)])
    assert np.allclose((measured.low, measured.high), bootstrap_interval(100 * means))
    assert measured.low < measured.percent < measured.high


def test_paired_differences_are_a_literal_loop() -> None:
    rng = np.random.default_rng(1)
    ours, theirs = random_rows("memcorr", 0.9, rng), random_rows("visual-transformer", 0.7, rng)
    rng.shuffle(theirs)
    measured = paired_difference(ours, theirs)
    means = []
    for scene in range(25):
        differences = []
        for seed in (42, 43, 44):
            for task in ("open", "close"):
                (a,) = [e for e in ours if (e.scene, e.train_seed, e.task) == (scene, seed, task)]
                (b,) = [e for e in theirs if (e.scene, e.train_seed, e.task) == (scene, seed, task)]
                differences.append(100 * (int(a.success) - int(b.success)))
        means.append(np.mean(differences))
    generator = np.random.default_rng(9)
    resampled = [np.mean(generator.choice(means, 25)) for _ in range(20_000)]
    assert measured is not None and measured.n == 150 and measured.unmatched == 0
    assert measured.points == pytest.approx(np.mean(means))
    assert np.allclose((measured.low, measured.high), np.percentile(resampled, [2.5, 97.5]), atol=0.7)


def test_rollouts_without_a_partner_are_counted_not_guessed() -> None:
    rng = np.random.default_rng(2)
    ours, theirs = random_rows("a", 0.9, rng), random_rows("b", 0.7, rng)
    measured = paired_difference(ours[:100], theirs)
    assert measured is not None and (measured.n, measured.unmatched) == (100, 50)
    assert paired_difference(ours, []) is None and share([]) is None
