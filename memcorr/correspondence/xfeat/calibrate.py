"""The constants `LOCATED` and `LIFTED` of xfeat's matcher, printed as Python.

    python -m memcorr.correspondence.xfeat.calibrate --practice runs/matcher/practice

The objects are those held out of the embedded matcher's practice (`MatcherConfig.held_out`): three scenes and three
sets of made-up objects, none of which is in any of the ten evaluated worlds. They are rendered if the folder lacks
them. XFeat itself has seen none of them: nothing of it is trained here.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import tyro
from tqdm import tqdm

from ...machine import threads
from ...workers import CORES
from ..cache import auc
from ..embedded.practice import VIEWS, Group, load_groups, render_practice
from ..embedded.train import MatcherConfig, calibrate, examine, judge, logistic_regression, make_pair
from ..lift import BATCH
from . import matcher as constants
from .matcher import XFeatMatcher

POINTS = 48  # asked for per pair, as lifting does


def located_weights(matcher: XFeatMatcher, groups: list[Group], config: MatcherConfig) -> torch.Tensor:
    """The numbers (5,) that turn a location's evidence into the odds that it lifts to within 10 mm."""
    rng = np.random.default_rng([config.seed, 4])
    evidence, right = [], []
    for _ in tqdm(range(BATCH * config.calibration), "locations", unit="pair"):
        group, (a, b) = groups[rng.integers(len(groups))], rng.choice(VIEWS, 2, replace=False)
        pair = make_pair(group, a, b, POINTS, 0, rng)
        (reference,) = matcher.encode(pair.crop_a.rgb[None])
        located = matcher.locate(reference, pair.uv_a.astype(np.float64), pair.crop_b.rgb)
        hits, _ = judge(located.uv[None], [pair], config.right_mm)
        evidence.append(located.evidence)
        right.append(hits[0].numpy() * pair.visible)
    x, y = np.concatenate(evidence), np.concatenate(right).astype(np.float64)
    return logistic_regression(torch.from_numpy(x), torch.from_numpy(y))


def printed(name: str, weights: torch.Tensor) -> tuple[float, ...]:
    rounded = tuple(round(float(w), 3) for w in weights)
    print(f"{name} = {rounded}")
    return rounded


def main(practice: Path = Path("runs/matcher/practice"), batches: int = 4, check: int = 3) -> None:
    """Constants from some pairs of views; how good they are, from others.

    Args:
        practice: Folder of practice scenes, as `memcorr matcher train` leaves it.
        batches: Of eight pairs, for each of the two.
        check: Further batches, which say how well confidence is calibrated. Nothing is chosen by them.
    """
    config = replace(MatcherConfig(), calibration=batches)
    paths = render_practice(practice, dict.fromkeys(config.held_out, config.groups), config.seed, CORES)
    groups = [group for path in paths for group in load_groups(path)]
    matcher = XFeatMatcher()
    with threads(1):
        constants.LOCATED = printed("LOCATED", located_weights(matcher, groups, config))  # type: ignore[assignment]
        constants.LIFTED = printed("LIFTED", calibrate(matcher, groups, config))  # type: ignore[assignment]
        exam = examine(matcher, groups, "rigid", check, config.seed + 1)
    valid, right = exam.matches.valid, exam.error_mm < config.right_mm
    confidence = matcher.lifted_confidence(exam.matches.confidence, exam.doubt)[valid]
    print(
        f"{valid.sum()} points of other pairs: median {np.median(exam.error_mm[valid]):.2f} mm, "
        f"p95 {np.percentile(exam.error_mm[valid], 95):.1f}, "
        f"within {config.right_mm:.0f} mm {right[valid].mean():.3f}, "
        f"mean confidence {confidence.mean():.3f}, AUC {auc(confidence, right[valid]):.3f}"
    )


if __name__ == "__main__":
    tyro.cli(main)
