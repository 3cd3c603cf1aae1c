"""Standard and counterfactual paired batches, each a pure function of (seed, update).

Nothing random outlives one update, which is what makes an interrupted run resume exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from ..correspondence.matches import Matches, join_matches
from ..policy.condition import Condition, Normalisation, build_condition, join_conditions, own_state
from ..policy.networks.diffusion import paired_noise, q_sample, velocity
from ..policy.networks.transformer import ActionTransformer
from ..policy.relations import turned
from ..spec import SPEC, Array
from .dataset import Dataset, Rows, Simulated
from .experiments import Experiment
from .mixture import Mixture, Resampled, SensorErrors, source_counts


def draw_turns(rng: np.random.Generator, size: int) -> Array:
    """(size, 2, 2) rotations about the vertical, half of them mirrored: a drawer's slide then teaches a window's."""
    angle, mirror = rng.uniform(0.0, 2 * np.pi, size), rng.choice([-1.0, 1.0], size)
    c, s = np.cos(angle), np.sin(angle)
    return np.stack([np.stack([c, -s * mirror], axis=-1), np.stack([s, c * mirror], axis=-1)], axis=-2)


@dataclass(frozen=True)
class Batch:
    """Network input and target of one update; the loss is the mean squared error to `eps`."""

    z_t: Tensor  # (B, 16, 4)
    t: Tensor  # (B,)
    condition: Condition
    eps: Tensor  # (B, 16, 4) target: the noise, or the velocity
    context: Tensor | None = None  # (B,) the row of `condition` that each chunk has; None: B / rows chunks for each

    def to(self, device: torch.device | str) -> Batch:
        context = None if self.context is None else self.context.to(device)
        return Batch(self.z_t.to(device), self.t.to(device), self.condition.to(device), self.eps.to(device), context)

    @property
    def conditions(self) -> Condition:
        """As `condition`, repeated where several chunks share one: B rows."""
        rows = torch.arange(len(self.condition)).repeat_interleave(self.chunks_per_row)
        return self.condition[rows if self.context is None else self.context]

    @property
    def chunks_per_row(self) -> int:
        """Chunks that stay together when the batch is divided."""
        return 1 if self.context is not None else len(self.t) // len(self.condition)

    def __getitem__(self, chunks: slice) -> Batch:
        """Some of the chunks, with the conditions that they need."""
        z_t, t, eps = self.z_t[chunks], self.t[chunks], self.eps[chunks]
        if self.context is None:
            first, last, _ = chunks.indices(len(self.t))
            rows = slice(first // self.chunks_per_row, last // self.chunks_per_row)
            return Batch(z_t, t, self.condition[rows], eps)
        used, context = self.context[chunks].unique(return_inverse=True)
        return Batch(z_t, t, self.condition[used], eps, context)


@dataclass(frozen=True)
class Batches:
    """Draws batches of one experiment. With a `mixture` the conditions are those of stage two; with `resampled` errors
    they are a matcher's from the start."""

    dataset: Dataset
    normalisation: Normalisation
    experiment: Experiment
    mixture: Mixture | None = None
    resampled: Resampled | None = None

    def draw(self, seed: int, update: int) -> Batch:
        """The batch of one update, of this world alone."""
        return draw([self], seed, update)

    def standard(self, rng: np.random.Generator, size: int) -> Batch:
        """Uniform rows and timesteps, independent noise, condition dropout."""
        e, dataset = self.experiment, self.dataset
        rows, matches = self._standard_rows(rng, size)
        t = torch.from_numpy(rng.integers(0, SPEC.diffusion_steps, size * e.noises))
        eps = self._noise(rng, size * e.noises)
        dropped = torch.from_numpy(rng.random(size) < e.condition_dropout)
        frames = self._phases(rng, rows)
        if self.resampled is not None:
            frames = dataset.reference_frame[rows] if frames is None else frames
            sources, factor = self.resampled.draw(rng, size)
            matches = self.resampled.matches(*dataset.poses(rows, frames), sources, factor, rows)
            matches = self._seen_badly(matches, rows, SensorErrors.draw(rng, size, e.sensor_errors))
        elif frames is not None:
            matches = dataset.retimed(rows, matches, frames)
        turn = draw_turns(rng, size) if e.turned else None
        chunks = self._chunks(rows, turn).repeat_interleave(e.noises, 0)
        z_t = q_sample(chunks, eps, t, e.schedule)
        return Batch(z_t, t, self.condition(rows, matches, frames, turn).drop(dropped), self._target(chunks, eps, t))

    def paired(self, rng: np.random.Generator, pairs: int) -> Batch:
        """Opening and closing at frame 0 of `pairs` physical pairs: first all openings, then all closings.

        Both directions share z_t, t, the robot state and, in stage two, the measured geometry. Pairs are drawn with
        replacement: a condition that occurs several times is listed, and encoded, once.
        """
        noises = self.experiment.noises
        pair = self.dataset.paired[rng.integers(0, len(self.dataset.paired), pairs)]
        row_open, row_close = self.dataset.first_rows(pair)
        turn = draw_turns(rng, pairs) if self.experiment.turned else None
        t = torch.from_numpy(rng.integers(SPEC.paired_timesteps[0], SPEC.paired_timesteps[1] + 1, pairs * noises))
        eps = self._noise(rng, pairs * noises)
        rows = np.concatenate([row_open, row_close])
        both = None if turn is None else np.concatenate([turn, turn])
        matches = self._paired_matches(rng, pair, rows)
        chunks = self._chunks(rows, both)
        x_open, x_close = chunks.repeat_interleave(noises, 0).chunk(2)
        z_t, eps_open, eps_close = paired_noise(x_open, x_close, eps, t, self.experiment.schedule)
        targets = self._target(x_open, eps_open, t), self._target(x_close, eps_close, t)
        listed, equals = self._distinct(pair)
        context = None
        if equals is not None:
            context = torch.from_numpy(np.concatenate([equals, equals + len(listed)]).repeat(noises))
            listed = np.concatenate([listed, listed + pairs])
            rows, matches = rows[listed], matches[listed]
        condition = self.condition(rows, matches, turn=both)
        return Batch(torch.cat([z_t, z_t]), torch.cat([t, t]), condition, torch.cat(targets), context)

    def _distinct(self, pair: Rows) -> tuple[Rows, Rows | None]:
        """Which draws of `pair` to list, and the listed one that each draw equals; None where all are different."""
        if self.resampled is not None or self.experiment.turned:
            return np.arange(len(pair)), None
        key = pair
        if self.mixture is not None:  # equal pairs from different sources differ, and every corruption is another
            truth, raw, corrupted = source_counts(len(pair))
            source = np.repeat([0, 1, 2], [truth, raw, corrupted])
            source[truth + raw :] += np.arange(corrupted)
            key = pair + len(self.dataset.both) * source
        _, first, context = np.unique(key, return_index=True, return_inverse=True)
        return first, context

    def condition(
        self, rows: Rows, matches: Matches, frames: Rows | None = None, turn: Array | None = None
    ) -> Condition:
        """What the network sees of `rows`, with their references at `frames` or where they belong."""
        dataset, state = self.dataset, own_state(self.dataset.windows.state[rows], self.experiment.state)
        if self.experiment.visual:
            assert isinstance(dataset, Simulated)
            images, task = dataset.row_images(rows), dataset.task(rows)
            return build_condition(self.normalisation, state, images=images, task=task)
        frames = dataset.reference_frame[rows] if frames is None else frames
        relations = dataset.relations(rows, matches, frames, self.experiment)
        relations = relations if turn is None else turned(relations, turn)
        return build_condition(self.normalisation, state, relations=relations)

    def _noise(self, rng: np.random.Generator, size: int) -> Tensor:
        shape = (size, SPEC.chunk, self.experiment.action_dim)
        return torch.from_numpy(rng.standard_normal(shape, np.float32))

    def _target(self, x_0: Tensor, eps: Tensor, t: Tensor) -> Tensor:
        return eps if self.experiment.predicts == "noise" else velocity(x_0, eps, t, self.experiment.schedule)

    def _chunks(self, rows: Rows, turn: Array | None = None) -> Tensor:
        """The demonstrated actions (B, 16, 4), standardised."""
        chunk = self.dataset.windows.chunk[rows]
        if turn is not None:
            chunk = np.concatenate([np.einsum("bij,bnj->bni", turn, chunk[..., :2]), chunk[..., 2:]], axis=-1)
        return torch.from_numpy(self.normalisation.action(chunk))

    def _standard_rows(self, rng: np.random.Generator, size: int) -> tuple[Rows, Matches]:
        """Rows, and their matches as far as nothing else is drawn for them."""
        e, off_track = self.experiment, self.dataset.off_track if self.experiment.off_track else ()
        if self.mixture is None:
            rows = rng.integers(0, len(self.dataset), size)
            if len(off_track):
                off = off_track[rng.integers(0, len(off_track), size)]
                rows = np.where(rng.random(size) < e.off_track, off, rows)
            return rows, self.dataset.own_matches(rows)
        truth, raw, corrupted = source_counts(size)
        rows = rng.integers(0, len(self.dataset), truth)
        index = rng.integers(0, len(self.mixture.rows), raw + corrupted)
        return np.concatenate([rows, self.mixture.rows[index]]), self._mixed(rng, rows, index[:raw], index[raw:])

    def _phases(self, rng: np.random.Generator, rows: Rows) -> Rows | None:
        """Reference frames where a matcher's errors are trained on: half of them lag or lead what a rollout would find
        (the elapsed steps, or the frame that is seen). A policy that has only ever been given the right phase slows
        down as soon as the reference leads by ten frames, falls further behind, and stalls."""
        errors, matched = self.experiment.phase_errors, self.mixture is not None or self.resampled is not None
        if errors is None or not matched or self.experiment.visual:
            return None
        own = self.dataset.reference_frame[rows]
        live = self.dataset.windows.anchor[rows] if self.experiment.phase == "elapsed" else own
        lead = rng.integers(errors[0], errors[1] + 1, len(rows))
        elsewhere = np.clip(live + lead, 0, self.dataset.last_frames(rows))
        return np.where(rng.random(len(rows)) < 0.5, elsewhere, own)

    def _paired_matches(self, rng: np.random.Generator, pair: Rows, rows: Rows) -> Matches:
        """Stage one: each direction's ground truth. Stage two: the opening row's matches for both. Resampled errors:
        the same points and errors for both."""
        if self.resampled is not None:
            sources, factor = self.resampled.draw(rng, len(pair))
            T_ref, T_live = self.dataset.poses(rows, self.dataset.reference_frame[rows])
            matches = self.resampled.matches(T_ref, T_live, np.tile(sources, 2), np.tile(factor, 2), rows)
            sensors = SensorErrors.draw(rng, len(pair), self.experiment.sensor_errors)
            return self._seen_badly(matches, rows, sensors.twice())
        if self.mixture is None:
            return self.dataset.own_matches(rows)
        truth, raw, _ = source_counts(len(pair))
        index = self.mixture.first[pair]
        shared = self._mixed(rng, rows[:truth], index[truth : truth + raw], index[truth + raw :])
        return join_matches(shared, shared)

    def _seen_badly(self, matches: Matches, rows: Rows, sensors: SensorErrors) -> Matches:
        return sensors.on(matches, self.dataset.eye[self.dataset.windows.demonstration[rows]])

    def _mixed(self, rng: np.random.Generator, rows: Rows, raw: Rows, corrupted: Rows) -> Matches:
        assert self.mixture is not None
        draws = rng.integers(0, len(self.mixture.pool), (len(corrupted), SPEC.points))
        return join_matches(
            self.dataset.own_matches(rows), self.mixture.raw(raw), self.mixture.bootstrap(corrupted, draws)
        )


def predicted(network: nn.Module, batch: Batch) -> Tensor:
    """What the network says of every chunk (B, 16, 4)."""
    if batch.context is None:
        return network(batch.z_t, batch.t, batch.condition)
    if not isinstance(network, ActionTransformer):  # encodes nothing that could be shared
        return network(batch.z_t, batch.t, batch.conditions)
    return network(batch.z_t, batch.t, batch.condition, batch.context)


def is_paired(experiment: Experiment, update: int) -> bool:
    """Standard updates come first."""
    return experiment.paired and update % experiment.paired_every == experiment.paired_every - 1


def draw(worlds: Sequence[Batches], seed: int, update: int) -> Batch:
    """The batch of one update, in equal parts from every world."""
    e = worlds[0].experiment
    rng, size = np.random.default_rng([seed, update]), e.batch // len(worlds)
    paired = is_paired(e, update)
    return join_batches([w.paired(rng, size // 2) if paired else w.standard(rng, size) for w in worlds])


def join_batches(parts: Sequence[Batch]) -> Batch:
    """One after the other."""
    if len(parts) == 1:
        return parts[0]
    before = np.cumsum([0, *(len(p.condition) for p in parts)])
    contexts = [p.context + int(n) for p, n in zip(parts, before, strict=False) if p.context is not None]
    return Batch(
        torch.cat([p.z_t for p in parts]),
        torch.cat([p.t for p in parts]),
        join_conditions([p.condition for p in parts]),
        torch.cat([p.eps for p in parts]),
        torch.cat(contexts) if contexts else None,
    )
