"""Carries an unfinished training run to another machine in half of its size.

    python scripts/carry_run.py pack RUN FOLDER      # RUN/state.safetensors in half precision, and its small files
    python scripts/carry_run.py unpack FOLDER RUN    # then the same `memcorr train ... --out RUN` continues
    python scripts/carry_run.py rename RUN DATA      # where demonstrations recorded here differ in their last digits

Weights, EMA and AdamW's moments are rounded to float16: a relative error of 5e-4, a tenth of what one update changes.
The run that continues is the same recipe from nearly the same point, not the same bits. FOLDER/carried.json says at
which update. Another processor records demonstrations that differ by 1e-6 or so; a run, or the stage one that another
is to begin with, names the very bytes it was trained on. `rename` lets it name those in DATA, if their statistics are
the same to five digits.
"""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from keep_run import current

from memcorr.files import converted, write_json
from memcorr.policy.checkpoint import CONFIG, MODEL, read_checkpoint, read_tensors, write_tensors
from memcorr.training.dataset import measure
from memcorr.training.experiments import Experiment
from memcorr.training.loading import load_worlds
from memcorr.training.loop import STATE

SMALL = ("config.json", "metrics.jsonl")
SCALE = 2.0**12  # gradients are small: without it the least of them would be lost in float16
SECOND = "exp_avg_sq"  # a square: its root is what fits


def pack(run: Path, folder: Path) -> None:
    tensors, metadata, _ = read_tensors(run / STATE)
    folder.mkdir(parents=True, exist_ok=True)
    moments = {"exp_avg": tensors["exp_avg"] * SCALE, SECOND: tensors[SECOND].sqrt() * SCALE}
    halves = {name: moments.get(name, tensors[name]).to(torch.float16) for name in ("weights", "ema", *moments)}
    if not all(torch.isfinite(half).all() for half in halves.values()):
        raise SystemExit(f"{run / STATE}: a value is too large for half precision")
    exact = {name: tensor for name, tensor in tensors.items() if name not in halves}
    kept = {name: metadata[name] for name in ("update", "threads", "processes", "cache")}
    write_tensors(folder / STATE, {**halves, **exact}, kept)
    (folder / "carried.json").write_text(json.dumps({"update": int(kept["update"]), "precision": "float16"}) + "\n")
    for name in SMALL:
        shutil.copyfile(run / name, folder / name)


def unpack(folder: Path, run: Path) -> None:
    if (run / STATE).exists():
        raise SystemExit(f"{run} holds a run already; give another folder")
    tensors, metadata, _ = read_tensors(folder / STATE)
    whole = {name: t.float() if t.dtype == torch.float16 else t for name, t in tensors.items()}
    whole["exp_avg"] = whole["exp_avg"] / SCALE
    whole[SECOND] = (whole[SECOND] / SCALE).square()
    run.mkdir(parents=True, exist_ok=True)
    for name in SMALL:
        shutil.copyfile(folder / name, run / name)
    # A cache that is made again on another processor differs in its last digits: the run takes it all the same.
    kept = {name: metadata[name] for name in ("update", "threads", "processes")} | {"cache": ""}
    write_tensors(run / STATE, whole, kept)


def rename(run: Path, data: Path) -> None:
    config = current(json.loads((run / CONFIG).read_text()))
    recipe = converted(config["experiment"], Experiment)
    dataset = load_worlds(recipe, data, None, None)[0].dataset
    if (run / MODEL).exists():
        before, here = read_checkpoint(run, "cpu").normalisation, measure([dataset], recipe)
        for name, value in asdict(here).items():
            if not np.allclose(value, getattr(before, name), rtol=1e-5, atol=1e-5):
                raise SystemExit(f"{data} holds other demonstrations than {run} was trained on: {name} differs")
    write_json(run / CONFIG, config | {"data": dataset.fingerprint()})


if __name__ == "__main__":
    if len(sys.argv) != 4 or sys.argv[1] not in ("pack", "unpack", "rename"):
        raise SystemExit(__doc__)
    {"pack": pack, "unpack": unpack, "rename": rename}[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]))
