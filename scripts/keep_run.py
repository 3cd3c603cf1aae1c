"""Keeps a policy's two files for a table: weights in half precision, configuration and metrics beside them.

    python scripts/keep_run.py RUN FOLDER      # RUN is a run's folder, or its `stage-one`

Rows that are committed are rolled out from FOLDER, so that anybody can roll them out again.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import torch

from memcorr.policy.checkpoint import CONFIG, MODEL, read_tensors, write_tensors


def keep(run: Path, folder: Path) -> None:
    tensors, metadata, _ = read_tensors(run / MODEL)
    kept = {
        n: t.to(torch.float16) if n.startswith("network.") and t.is_floating_point() else t for n, t in tensors.items()
    }
    if not all(torch.isfinite(t).all() for t in kept.values()):
        raise SystemExit(f"{run / MODEL}: a value is too large for half precision")
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(run / CONFIG, folder / CONFIG)
    write_tensors(folder / MODEL, kept, {"update": metadata["update"]})
    if (run / "metrics.jsonl").exists():
        shutil.copyfile(run / "metrics.jsonl", folder / "metrics.jsonl")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    keep(Path(sys.argv[1]), Path(sys.argv[2]))
