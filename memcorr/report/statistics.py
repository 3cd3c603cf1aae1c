"""Evaluation statistics: the configuration bootstrap and paired differences.

A physical configuration contributes the mean over its tasks and training seeds; configurations are
resampled with replacement. The intervals speak about configurations, given the trained models.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from scipy.stats import beta

from ..evaluation.episodes import Episode
from ..spec import SPEC, Array

BLOCK = 10_000  # resamples in memory at a time
SEED = 0


@dataclass(frozen=True)
class Share:
    """Successes of n rollouts with a 95 % interval; shares in percent."""

    successes: int
    n: int
    percent: float
    low: float
    high: float
    exact: bool = False  # binomial over configurations, where all end alike and the bootstrap knows no spread


@dataclass(frozen=True)
class Difference:
    """Mean of paired differences in percentage points, with its interval."""

    points: float
    low: float
    high: float
    n: int  # matched rollouts
    unmatched: int  # rollouts of either side without a partner, left out
    configurations: int
    deviation: float  # standard deviation of the configurations' differences, in points


def bootstrap_interval(means: Array, resamples: int = SPEC.resamples, seed: int = SEED) -> tuple[float, float]:
    """2.5th and 97.5th percentile of the mean over resampled configurations."""
    return _interval(np.asarray(means, np.float64).tobytes(), resamples, seed)


@cache
def _interval(content: bytes, resamples: int, seed: int) -> tuple[float, float]:
    """Remembered: tables and figures ask for the same cells."""
    means = np.frombuffer(content)
    rng, n = np.random.default_rng(seed), len(means)
    averages = np.concatenate(
        [
            means[rng.integers(0, n, (min(BLOCK, resamples - start), n), np.uint32)].mean(axis=1)
            for start in range(0, resamples, BLOCK)
        ]
    )
    low, high = np.percentile(averages, [2.5, 97.5])
    return float(low), float(high)


def configuration_means(values: Iterable[tuple[tuple, float]]) -> Array:
    """Mean value of every physical configuration, in the order of the configurations."""
    grouped: dict[tuple, list[float]] = defaultdict(list)
    for configuration, value in values:
        grouped[configuration].append(value)
    return np.array([np.mean(grouped[configuration]) for configuration in sorted(grouped)])


def configuration(episode: Episode) -> tuple:
    """What is resampled: one physical scene, and what goes wrong in it."""
    return (episode.condition, episode.scene_seed, episode.world, episode.disturbance, episode.scene)


def percent(episodes: Sequence[Episode]) -> float:
    return 100 * sum(e.success for e in episodes) / len(episodes)


def share(episodes: Sequence[Episode]) -> Share | None:
    """None when nothing was measured."""
    if not episodes:
        return None
    means = configuration_means((configuration(e), float(e.success)) for e in episodes)
    successes, n = sum(e.success for e in episodes), len(episodes)
    if successes in (0, n):
        alike = len(means) if successes else 0
        return Share(successes, n, percent(episodes), *clopper_pearson(alike, len(means)), exact=True)
    return Share(successes, n, percent(episodes), *bootstrap_interval(100 * means))


def clopper_pearson(successes: int, n: int, level: float = 0.95) -> tuple[float, float]:
    """Exact binomial interval in percent: shares that would not be surprised by so few, or so many, successes."""
    tail = (1 - level) / 2
    low = beta.ppf(tail, successes, n - successes + 1) if successes else 0.0
    high = beta.ppf(1 - tail, successes + 1, n - successes) if successes < n else 1.0
    return 100 * float(low), 100 * float(high)


def paired_difference(ours: Sequence[Episode], theirs: Sequence[Episode]) -> Difference | None:
    """Ours minus theirs within rollouts of the same configuration, task and training seed."""
    return difference(
        *({(configuration(e), e.task, e.train_seed): float(e.success) for e in side} for side in (ours, theirs))
    )


def difference(ours: Mapping[tuple, float], theirs: Mapping[tuple, float]) -> Difference | None:
    """The same of any successes, by what two rollouts share: the configuration first. None without a match."""
    matched = sorted(ours.keys() & theirs.keys())
    if not matched:
        return None
    values = [(key[0], 100.0 * (ours[key] - theirs[key])) for key in matched]
    means = configuration_means(values)
    points = float(np.mean([v for _, v in values]))
    unmatched = len(ours.keys() ^ theirs.keys())
    return Difference(points, *bootstrap_interval(means), len(matched), unmatched, len(means), float(np.std(means)))


def with_room(low: float, high: float, n: int, lowest: float = -100.0) -> tuple[float, float]:
    """Where all n configurations are alike the bootstrap has no spread, but one more might differ: the exact binomial
    interval says how much that could be."""
    room = clopper_pearson(0, n)[1]
    return max(low - room, lowest), min(high + room, 100.0)
