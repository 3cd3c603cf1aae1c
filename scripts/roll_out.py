"""Rolls a kept policy out in every cell that `memcorr reproduce --tier full` has for it.

    python scripts/roll_out.py results/memcorr-literal-42      # rows are added to its episodes.jsonl

Rows that are there already are kept. Stage one is rolled out from the folder `stage-one` beside the final weights.
The weights of the policy that ships are in the package, not in FOLDER.
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

from memcorr.evaluation.sweep import evaluate_once
from memcorr.policy.checkpoint import CONFIG, MODEL
from memcorr.policy.policy import SHIPPED
from memcorr.reproduce import TIERS, matched_by
from memcorr.training.experiments import Config
from memcorr.training.loop import STAGE_ONE

REFERENCES = Path(__file__).parents[1] / "results/references"  # the very files that the committed rows followed


def roll_out(folder: Path, data: Path, matcher: str, workers: int) -> None:
    final, stage_one = folder, folder / STAGE_ONE
    if not (folder / MODEL).exists() and (folder / CONFIG).read_bytes() == (SHIPPED / CONFIG).read_bytes():
        final = SHIPPED
    there = [f for f in (final, stage_one) if (f / MODEL).exists() and (f / CONFIG).exists()]
    if not there:
        raise SystemExit(f"{folder} holds no {MODEL} with its {CONFIG}")
    for evaluation in TIERS["full"].evaluations[Config.read(there[0]).experiment.name]:
        policy = stage_one if evaluation.stage_one else final
        if policy in there:
            evaluate_once(str(policy), folder, matched_by(evaluation, matcher), (), data, workers=workers)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--data", type=Path, default=REFERENCES, help="pair 0 holds the references")
    parser.add_argument("--matcher", default="embedded")
    parser.add_argument("--workers", type=int, default=2)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    roll_out(**vars(parser.parse_args()))
