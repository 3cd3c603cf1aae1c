"""Standard and counterfactual paired batches, each a pure function of (seed, update).

Nothing random outlives one update, which is what makes an interrupted run resume exactly.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..correspondence.matches import Matches, join_matches
from ..policy.condition import Condition, Normalisation, build_condition
from ..policy.diffusion import paired_noise, q_sample
from ..spec import SPEC
from .dataset import Dataset, Rows
from .experiments import Experiment
from .mixture import Mixture, source_counts

CHUNK_SHAPE = (SPEC.chunk, SPEC.action_dim)


@dataclass(frozen=True)
class Batch:
    """Network input and target of one update; the loss is the mean squared error to `eps`."""

    z_t: Tensor  # (B, 16, 4)
    t: Tensor  # (B,)
    condition: Condition
    eps: Tensor  # (B, 16, 4) target

    def to(self, device: torch.device | str) -> Batch:
        return Batch(self.z_t.to(device), self.t.to(device), self.condition.to(device), self.eps.to(device))


@dataclass(frozen=True)
class Batches:
    """Draws batches of one experiment. With a `mixture` the conditions are those of stage two."""

    dataset: Dataset
    normalisation: Normalisation
    experiment: Experiment
    mixture: Mixture | None = None

    def draw(self, seed: int, update: int) -> Batch:
        """The batch of one update; paired and standard updates alternate, standard first."""
        rng = np.random.default_rng([seed, update])
        paired = self.experiment.paired and update % 2 == 1
        return self.paired(rng, self.experiment.batch // 2) if paired else self.standard(rng, self.experiment.batch)

    def standard(self, rng: np.random.Generator, size: int) -> Batch:
        """Uniform rows and timesteps, independent noise, condition dropout."""
        rows, matches = self._standard_rows(rng, size)
        t = torch.from_numpy(rng.integers(0, SPEC.diffusion_steps, size))
        eps = torch.from_numpy(rng.standard_normal((size, *CHUNK_SHAPE), np.float32))
        dropped = torch.from_numpy(rng.random(size) < self.experiment.condition_dropout)
        z_t = q_sample(self._chunks(rows), eps, t, self.experiment.schedule)
        frames = self._phases(rng, rows)
        if frames is not None:
            matches = self.dataset.retimed(rows, matches, frames)
        return Batch(z_t, t, self.condition(rows, matches, frames).drop(dropped), eps)

    def paired(self, rng: np.random.Generator, pairs: int) -> Batch:
        """Opening and closing at frame 0 of `pairs` physical pairs: first all openings, then all closings.

        Both directions share z_t, t, the robot state and, in stage two, the measured geometry.
        """
        pair = rng.integers(0, self.dataset.pairs, pairs)
        row_open, row_close = self.dataset.first_rows(pair)
        t = torch.from_numpy(rng.integers(SPEC.paired_timesteps[0], SPEC.paired_timesteps[1] + 1, pairs))
        eps = torch.from_numpy(rng.standard_normal((pairs, *CHUNK_SHAPE), np.float32))
        chunks = self._chunks(row_open), self._chunks(row_close)
        z_t, eps_open, eps_close = paired_noise(*chunks, eps, t, self.experiment.schedule)
        rows = np.concatenate([row_open, row_close])
        condition = self.condition(rows, self._paired_matches(rng, pair, rows))
        return Batch(torch.cat([z_t, z_t]), torch.cat([t, t]), condition, torch.cat([eps_open, eps_close]))

    def condition(self, rows: Rows, matches: Matches, frames: Rows | None = None) -> Condition:
        """What the network sees of `rows`, with their references at `frames` or where they belong."""
        state, dataset = self.dataset.windows.state[rows], self.dataset
        if self.experiment.visual:
            images, task = dataset.row_images(rows), dataset.task(rows)
            return build_condition(self.normalisation, state, images=images, task=task)
        frames = dataset.reference_frame[rows] if frames is None else frames
        relations = dataset.relations(rows, matches, frames, self.experiment.representation)
        return build_condition(self.normalisation, state, relations=relations)

    def _chunks(self, rows: Rows) -> Tensor:
        return torch.from_numpy(self.normalisation.action(self.dataset.windows.chunk[rows]))

    def _standard_rows(self, rng: np.random.Generator, size: int) -> tuple[Rows, Matches]:
        if self.mixture is None:
            rows = rng.integers(0, len(self.dataset), size)
            return rows, self.dataset.ground_truth(rows)
        truth, raw, corrupted = source_counts(size)
        rows = rng.integers(0, len(self.dataset), truth)
        index = rng.integers(0, len(self.mixture.rows), raw + corrupted)
        return np.concatenate([rows, self.mixture.rows[index]]), self._mixed(rng, rows, index[:raw], index[raw:])

    def _phases(self, rng: np.random.Generator, rows: Rows) -> Rows | None:
        """Reference frames in stage two: half of them lag or lead as they do in a rollout that is ahead of
        its reference or behind. A rollout that has only ever seen the right phase slows down as soon as the
        reference leads by ten frames, falls further behind, and stalls."""
        errors = self.experiment.phase_errors
        if self.mixture is None or self.experiment.visual or errors is None:
            return None
        lead = rng.integers(errors[0], errors[1] + 1, len(rows))
        elsewhere = np.clip(self.dataset.windows.anchor[rows] + lead, 0, SPEC.last_anchor)
        return np.where(rng.random(len(rows)) < 0.5, elsewhere, self.dataset.reference_frame[rows])

    def _paired_matches(self, rng: np.random.Generator, pair: Rows, rows: Rows) -> Matches:
        """Stage one: each direction's ground truth. Stage two: the opening row's matches for both."""
        if self.mixture is None:
            return self.dataset.ground_truth(rows)
        truth, raw, _ = source_counts(len(pair))
        index = self.mixture.first[pair]
        shared = self._mixed(rng, rows[:truth], index[truth : truth + raw], index[truth + raw :])
        return join_matches(shared, shared)

    def _mixed(self, rng: np.random.Generator, rows: Rows, raw: Rows, corrupted: Rows) -> Matches:
        assert self.mixture is not None
        draws = rng.integers(0, len(self.mixture.pool), (len(corrupted), SPEC.points))
        return join_matches(
            self.dataset.ground_truth(rows), self.mixture.raw(raw), self.mixture.bootstrap(corrupted, draws)
        )
