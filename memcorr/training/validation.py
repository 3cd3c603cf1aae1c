"""Validation loss on held-out pairs, standard and paired apart, the same draws every time.

Conditions are ground-truth relations (or images) without dropout, in both stages.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from ..demos.store import Store
from ..policy.condition import Normalisation
from .batches import Batch, Batches
from .dataset import load_dataset
from .experiments import Experiment

SEED = 80_99  # not a training seed: every run, whatever its seed, is judged on the same draws
STANDARD_ROWS, PAIRS = 512, 128
SLICE = 128  # rows per evaluation


class Validation:
    def __init__(
        self, store: Store, experiment: Experiment, normalisation: Normalisation, device: torch.device
    ) -> None:
        held_out = range(experiment.train_pairs, len(store))
        self.batches: dict[str, Batch] = {}
        if not held_out:
            return
        dataset = load_dataset(store, held_out, experiment.tie_break, images=experiment.visual)
        draws = Batches(dataset, normalisation, dataclasses.replace(experiment, condition_dropout=0.0))
        self.batches = {
            "validation_standard": draws.standard(np.random.default_rng([SEED, 0]), STANDARD_ROWS).to(device),
            "validation_paired": draws.paired(np.random.default_rng([SEED, 1]), PAIRS).to(device),
        }

    @torch.no_grad()
    def losses(self, network: nn.Module) -> dict[str, float]:
        return {name: self._loss(network, batch) for name, batch in self.batches.items()}

    @staticmethod
    def _loss(network: nn.Module, batch: Batch) -> float:
        total = 0.0
        for start in range(0, len(batch.t), SLICE):
            part = slice(start, start + SLICE)
            eps_hat = network(batch.z_t[part], batch.t[part], batch.condition[part])
            total += F.mse_loss(eps_hat, batch.eps[part], reduction="sum").item()
        return total / batch.eps.numel()
