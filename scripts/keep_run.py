"""Keeps a policy's two files for a table: weights in half precision, configuration and metrics beside them.

    python scripts/keep_run.py RUN FOLDER      # RUN is a run's folder, or its `stage-one`

Rows that are committed are rolled out from FOLDER, so that anybody can roll them out again. The runs of the grid
are made by the tag grid-1; where a field of their recipe has another name by now, it is written under that one.
"""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from memcorr.files import converted, write_json
from memcorr.policy.checkpoint import CONFIG, MODEL, read_tensors, write_tensors
from memcorr.training.experiments import Experiment

RENAMED = {"astray": "off_track", "lent_errors": "resampled_errors"}  # since grid-1
GONE = {"actions": "absolute"}  # the one value that is left


def current(config: dict[str, Any]) -> dict[str, Any]:
    """`config.json` with today's names; what was no field then had the value that is today's default."""
    old = {RENAMED.get(name, name): value for name, value in config["experiment"].items()}
    for name, value in GONE.items():
        if old.pop(name, value) != value:
            raise SystemExit(f"{name} is no longer a field of a recipe, and was not {value}")
    recipe = converted(asdict(Experiment()) | old, Experiment)
    if unknown := set(old) - set(asdict(recipe)):
        raise SystemExit(f"unknown fields: {', '.join(sorted(unknown))}")
    kept = {name: value for name, value in config.items() if name != "check"}
    return kept | {"experiment": asdict(recipe)}


def keep(run: Path, folder: Path) -> None:
    tensors, metadata, _ = read_tensors(run / MODEL)
    kept = {
        n: t.to(torch.float16) if n.startswith("network.") and t.is_floating_point() else t for n, t in tensors.items()
    }
    if not all(torch.isfinite(t).all() for t in kept.values()):
        raise SystemExit(f"{run / MODEL}: a value is too large for half precision")
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / CONFIG, current(json.loads((run / CONFIG).read_text())))
    write_tensors(folder / MODEL, kept, {"update": metadata["update"]})
    if (run / "metrics.jsonl").exists():
        shutil.copyfile(run / "metrics.jsonl", folder / "metrics.jsonl")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    keep(Path(sys.argv[1]), Path(sys.argv[2]))
