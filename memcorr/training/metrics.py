"""What a run measures: running means and the loss on held-out pairs; `metrics.jsonl` and TensorBoard, without repeats
after a resume."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..demos.store import Store
from ..files import appending, forget_later_rows
from ..policy.condition import Normalisation
from .batches import Batch, Batches, predicted
from .dataset import load_dataset
from .experiments import Experiment

METRICS, BOARD = "metrics.jsonl", "tensorboard"
SEED = 80_99  # not a training seed: every run, whatever its seed, is judged on the same draws
STANDARD_ROWS, PAIRS = 512, 128
SLICE = 128  # rows per evaluation


class RunningMeans:
    """Sums since the last report; part of the saved state, so a resumed report covers the same updates."""

    NAMES = ("loss_standard", "loss_paired", "gradient_norm")

    def __init__(self) -> None:
        self.sums = torch.zeros(len(self.NAMES), 2, dtype=torch.float64)  # (sum, count)

    def add(self, **values: float) -> None:
        for name, value in values.items():
            self.sums[self.NAMES.index(name)] += torch.tensor([value, 1.0], dtype=torch.float64)

    def report(self) -> dict[str, float]:
        """Means of what was added, and a new beginning."""
        means = {n: s / c for n, (s, c) in zip(self.NAMES, self.sums.tolist(), strict=True) if c}
        self.sums.zero_()
        return means

    def tensors(self) -> dict[str, Tensor]:
        return {"running": self.sums}


class Metrics:
    """Appends rows; rows beyond `update`, left by a run that was killed later, are forgotten."""

    def __init__(self, folder: Path, update: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # seconds to import, only training needs it

        self.path = folder / METRICS
        forget_later_rows(self.path, "update", update)
        threading.excepthook = _said_elsewhere
        with self.board_named():
            self.board = SummaryWriter(str(folder / BOARD), purge_step=update + 1)

    def write(self, update: int, **values: Any) -> None:
        with appending(self.path) as append:
            append(json.dumps({"update": update, **values}) + "\n")
        with self.board_named():
            for name, value in values.items():
                self.board.add_scalar(name, value, update)

    def close(self) -> None:
        with self.board_named():
            self.board.close()

    @contextmanager
    def board_named(self) -> Iterator[None]:
        """A refused write of TensorBoard's says not where."""
        try:
            yield
        except OSError as problem:
            why = f"could not be written ({problem.strerror or problem}); is the disk full?"
            raise OSError(problem.errno, why, str(self.path.with_name(BOARD))) from problem


_SAY = threading.excepthook


def _said_elsewhere(problem: threading.ExceptHookArgs) -> None:
    """TensorBoard writes in a thread, whose error is raised again where the board is used: no traceback beside it."""
    if not type(problem.thread).__module__.startswith("tensorboard."):
        _SAY(problem)


class Validation:
    """Loss on held-out pairs, standard and paired apart, the same draws every time. Conditions are true relations
    (or images) without dropout, in both stages."""

    def __init__(
        self, stores: Sequence[Store], experiment: Experiment, normalisation: Normalisation, device: torch.device
    ) -> None:
        plain = dataclasses.replace(experiment, condition_dropout=0.0, references=1, noises=1, turned=False)
        self.batches: dict[str, Batch] = {}
        for store in stores:
            held_out = range(experiment.train_pairs, len(store))
            if not held_out:
                continue
            draws = Batches(load_dataset(store, held_out, plain, plain.visual), normalisation, plain)
            of, share = (f"_{store.world}", len(stores)) if len(stores) > 1 else ("", 1)
            rows, pairs = STANDARD_ROWS // share, PAIRS // share
            self.batches |= {
                f"validation_standard{of}": draws.standard(np.random.default_rng([SEED, 0]), rows).to(device),
                f"validation_paired{of}": draws.paired(np.random.default_rng([SEED, 1]), pairs).to(device),
            }

    @torch.no_grad()
    def losses(self, network: nn.Module) -> dict[str, float]:
        return {name: self._loss(network, batch) for name, batch in self.batches.items()}

    @staticmethod
    def _loss(network: nn.Module, batch: Batch) -> float:
        total = 0.0
        for start in range(0, len(batch.t), SLICE):
            part = batch[start : start + SLICE]
            total += F.mse_loss(predicted(network, part), part.eps, reduction="sum").item()
        return total / batch.eps.numel()
