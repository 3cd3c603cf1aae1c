"""`metrics.jsonl` and TensorBoard: what a run measured, without repeats after a resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..files import appending, forget_later_rows

METRICS, BOARD = "metrics.jsonl", "tensorboard"


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
        self.board = SummaryWriter(str(folder / BOARD), purge_step=update + 1)

    def write(self, update: int, **values: Any) -> None:
        with appending(self.path) as append:
            append(json.dumps({"update": update, **values}) + "\n")
        for name, value in values.items():
            self.board.add_scalar(name, value, update)

    def close(self) -> None:
        self.board.close()
