"""The table "one recording, stock tasks": rolls out everything that results/one-recording holds.

    python scripts/one_recording.py                      # rows that are there already are kept
    python scripts/one_recording.py --subjects servo

One recording of Meta-World's own scripted policy per task, as that policy makes it; 20 other placements; then one task
with recordings as people make them. The references are in results/references/metaworld.
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

from memcorr.demos.collect import collect
from memcorr.demos.manner import PLAINLY, Manner
from memcorr.evaluation.evaluate import evaluate
from memcorr.report.contests import TASKS, VARIED
from memcorr.spec import STOCK

RESULTS = Path(__file__).parents[1] / "results"
MANNERS = (Manner(speed=0.5), Manner(speed=2), Manner(pause=160), Manner(cut=True), Manner(hidden=10))
SUBJECTS = ("expert", "replay", "servo", "shipped")


def reference(task: str, manner: Manner, workers: int) -> Path:
    folder = RESULTS / "references" / "metaworld" / "-".join([task, *str(manner).split()])
    if not (folder / "collection.json").exists():
        collect(folder, 1, workers=workers, world=STOCK + task, manner=manner)
        (folder / "contact-sheet.png").unlink()
    return folder


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--subjects", nargs="*", default=SUBJECTS)
    parser.add_argument("--workers", type=int, default=1)
    asked = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    recordings = [(task, PLAINLY) for task in TASKS] + [(VARIED, manner) for manner in MANNERS]
    for subject in asked.subjects:
        for task, manner in recordings:
            if manner != PLAINLY and subject not in ("replay", "servo"):
                continue  # the expert follows no recording; one that never learned the object need not be asked again
            data = reference(task, manner, asked.workers)
            evaluate(subject, RESULTS / "one-recording", world=STOCK + task, data=data, workers=asked.workers)
