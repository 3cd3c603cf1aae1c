"""Training rows, counterfactual batches and the mixture of stage two."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from memcorr.correspondence.cache import Cache
from memcorr.demos.store import Store
from memcorr.errors import UserError
from memcorr.policy.networks.diffusion import paired_noise, q_sample
from memcorr.policy.networks.transformer import ActionTransformer
from memcorr.training.batches import Batches
from memcorr.training.dataset import Simulated, measure
from memcorr.training.experiments import EXPERIMENTS, MAIN, Experiment
from memcorr.training.loop import loss_of
from memcorr.training.mixture import Mixture, source_counts

SMALL = dataclasses.replace(MAIN, train_pairs=2, batch=32)


def make_batches(dataset: Simulated, experiment: Experiment = SMALL, cache: Cache | None = None) -> Batches:
    mixture = None if cache is None else Mixture.join(dataset, cache)
    return Batches(dataset, measure([dataset]), experiment, mixture)


def test_rows_are_every_anchor_of_every_demonstration(dataset: Simulated, store: Store) -> None:
    assert len(dataset) == 2 * 2 * 185  # 29,600 for 80 pairs
    closing = store.demonstration(1, "close")
    row = int(dataset.rows(np.array([3]), np.array([184]))[0])
    assert row == len(dataset) - 1
    assert np.array_equal(dataset.windows.chunk[row], closing.action[184:200])
    assert np.array_equal(dataset.windows.state[row], closing.robot_state[184])
    assert list(dataset.task(np.array([0, 185, 370, 555]))) == [0, 1, 0, 1]


def test_references_are_the_next_pair_and_the_same_task(dataset: Simulated) -> None:
    assert list(dataset.reference) == [2, 3, 0, 1]
    assert dataset.reference_frame.max() <= 184
    opening, closing = dataset.first_rows(np.arange(2))
    assert not dataset.reference_frame[np.concatenate([opening, closing])].any()


def test_normalisation_standardises_and_floors(dataset: Simulated) -> None:
    n = measure([dataset])
    x = n.action(dataset.windows.chunk)
    assert np.allclose(x[..., :3].mean(axis=(0, 1)), 0, atol=1e-4) and np.allclose(
        x[..., :3].std(axis=(0, 1)), 1, atol=1e-4
    )
    assert n.action_std[3] == 0.05  # the gripper command never changes
    assert n.state_std.min() >= 1e-3
    assert np.allclose(n.original_action(x), dataset.windows.chunk, atol=1e-6)
    assert dataset.images is not None and np.isclose(n.depth_mean, dataset.images.depth.mean(dtype=np.float64))


def test_a_batch_is_a_pure_function_of_seed_and_update(dataset: Simulated) -> None:
    batches = make_batches(dataset)
    for update in (0, 1):
        a, b, c = batches.draw(42, update), batches.draw(42, update), batches.draw(43, update)
        assert torch.equal(a.z_t, b.z_t) and torch.equal(a.t, b.t) and torch.equal(a.eps, b.eps)
        assert torch.equal(a.condition.keep, b.condition.keep)
        assert not torch.equal(a.z_t, c.z_t) and not torch.equal(a.z_t, batches.draw(42, update + 2).z_t)


def test_updates_alternate_standard_and_paired(dataset: Simulated) -> None:
    alternating, standard = make_batches(dataset), make_batches(dataset, dataclasses.replace(SMALL, paired=False))
    for update in range(4):
        a, b = alternating.draw(42, update), standard.draw(42, update)
        assert (len(a.t), len(b.t)) == (32, 32)
        assert torch.equal(a.t[:16], a.t[16:]) == (update % 2 == 1)
        assert not torch.equal(b.t[:16], b.t[16:])


def test_standard_batch_is_plain_conditional_diffusion(dataset: Simulated) -> None:
    batches = make_batches(dataset)
    batch = batches.standard(np.random.default_rng(1), 4000)
    assert batch.t.min() == 0 and batch.t.max() == 99
    assert abs(float(batch.eps.mean())) < 0.01 and abs(float(batch.eps.std()) - 1) < 0.01
    dropped = ~batch.condition.keep.any(dim=1)
    assert 0.08 < dropped.float().mean() < 0.12
    assert batch.condition.keep[~dropped].all()  # ground truth is always valid
    rows = np.random.default_rng(1).integers(0, len(dataset), 4000)
    x_0 = torch.from_numpy(batches.normalisation.action(dataset.windows.chunk[rows]))
    assert torch.equal(batch.z_t, q_sample(x_0, batch.eps, batch.t))


@pytest.mark.parametrize("cached", [False, True])
def test_paired_directions_share_everything_but_reference_motion_and_target(
    dataset: Simulated, cache: Cache, cached: bool
) -> None:
    batches = make_batches(dataset, cache=cache if cached else None)
    batch = batches.paired(np.random.default_rng(0), 64)
    opening, closing = slice(0, 64), slice(64, 128)
    c = batch.conditions
    for shared in (batch.z_t, batch.t, c.state, c.keep):
        assert torch.equal(shared[opening], shared[closing])
    assert batch.t.min() >= 80 and batch.t.max() <= 99
    assert c.keep.any(dim=1).all()  # no condition dropout
    assert c.tokens is not None
    same = (c.tokens[opening] == c.tokens[closing]).flatten(0, 1).all(dim=0)
    # Geometry, masks and confidences are shared; only fields 7:9, the future motion, are the task's own.
    assert same.tolist() == [True] * 6 + [False] * 3 + [True] * 9
    assert not torch.allclose(batch.eps[opening], batch.eps[closing])


@pytest.mark.parametrize("cached", [False, True])
def test_a_repeated_condition_is_listed_once_and_changes_no_gradient(
    dataset: Simulated, cache: Cache, cached: bool
) -> None:
    """Two pairs, drawn 64 times. In stage two a corruption of its own makes a draw another one: 16 of them."""
    batch = make_batches(dataset, cache=cache if cached else None).paired(np.random.default_rng(0), 64)
    assert len(batch.condition) == (2 * (2 + 2 + 16) if cached else 2 * 2) and len(batch.conditions) == 128
    torch.manual_seed(0)
    network = ActionTransformer()
    gradients = []
    for same in (batch, dataclasses.replace(batch, condition=batch.conditions, context=None)):
        network.zero_grad()
        loss_of(network, same).backward()
        gradients.append(torch.cat([p.grad.flatten() for p in network.parameters() if p.grad is not None]))
    assert (gradients[0] - gradients[1]).abs().max() < 1e-5 * gradients[1].abs().max()
    part = batch[40:100]
    assert torch.equal(part.z_t, batch.z_t[40:100]) and torch.equal(
        part.conditions.state, batch.conditions.state[40:100]
    )


def test_paired_targets_belong_to_their_direction(dataset: Simulated) -> None:
    batches, rng = make_batches(dataset), np.random.default_rng(5)
    batch = batches.paired(np.random.default_rng(5), 8)
    pair = rng.integers(0, 2, 8)
    rng.integers(80, 100, 8)
    eps = torch.from_numpy(rng.standard_normal((8, 16, 4), np.float32))
    x_open, x_close = (
        torch.from_numpy(batches.normalisation.action(dataset.windows.chunk[rows])) for rows in dataset.first_rows(pair)
    )
    z_t, eps_open, eps_close = paired_noise(x_open, x_close, eps, batch.t[:8])
    assert torch.equal(batch.z_t[:8], z_t)
    assert torch.equal(batch.eps, torch.cat([eps_open, eps_close]))


def test_unequal_starts_are_refused(dataset: Simulated) -> None:
    state = dataset.windows.state.copy()
    state[185, 0] += 1e-9
    broken = dataclasses.replace(dataset, windows=dataclasses.replace(dataset.windows, state=state))
    with pytest.raises(UserError, match="same robot state"):  # as when data is loaded
        broken.check_starts(broken.pairs)
    assert 0 not in broken.paired


def test_every_mixed_batch_holds_exactly_a_quarter_a_half_and_a_quarter(dataset: Simulated, cache: Cache) -> None:
    batches = make_batches(dataset, cache=cache)
    assert batches.mixture is not None
    with pytest.raises(UserError):
        source_counts(6)
    rows, matches = batches._standard_rows(np.random.default_rng(0), 32)
    truth = dataset.own_matches(rows)
    is_truth = np.all(matches.p_live == truth.p_live, axis=(1, 2))
    where = [np.flatnonzero(batches.mixture.rows == row) for row in rows]
    is_raw = np.array(
        [len(w) == 1 and np.array_equal(cache.matches.p_live[w[0]], matches.p_live[i]) for i, w in enumerate(where)]
    )
    assert is_truth.tolist() == [True] * 8 + [False] * 24
    assert is_raw.tolist() == [False] * 8 + [True] * 16 + [False] * 8
    for i in range(24, 32):  # residual bootstrap of the row's own cache entry
        (w,) = where[i]
        assert np.array_equal(matches.p_ref[i], cache.matches.p_ref[w])
        assert np.array_equal(matches.valid[i], cache.matches.valid[w])
        assert np.array_equal(matches.confidence[i], cache.matches.confidence[w])
        residual = matches.p_live[i] - cache.p_live_true[w]
        distance = np.linalg.norm(batches.mixture.pool[None] - residual[:, None], axis=-1).min(axis=1)
        assert distance.max() < 1e-12


def test_the_residual_cut_is_the_caches_own_95th_percentile(dataset: Simulated, cache: Cache) -> None:
    pool = Mixture.join(dataset, cache).pool
    measured = np.linalg.norm(cache.residual[cache.matches.valid], axis=-1)
    kept = np.linalg.norm(pool, axis=-1)
    assert kept.max() <= np.percentile(measured, 95) < measured.max()
    assert len(kept) == pytest.approx(0.95 * len(measured), abs=1)


def test_a_cache_of_other_data_is_refused(dataset: Simulated, cache: Cache) -> None:
    moved = dataclasses.replace(cache, p_live_true=cache.p_live_true + 0.01)
    other_frames = dataclasses.replace(cache, reference_frame=(cache.reference_frame + 1) % 185)
    more_pairs = dataclasses.replace(cache, demonstration=cache.demonstration + 2)
    without_start = dataclasses.replace(
        cache, anchor=np.maximum(cache.anchor, 1), reference_frame=cache.reference_frame
    )
    for wrong in (moved, other_frames, more_pairs, without_start):
        with pytest.raises(UserError, match="memcorr match"):
            Mixture.join(dataset, wrong)


def test_visual_batches_hold_image_task_and_state(dataset: Simulated) -> None:
    batches = make_batches(dataset, dataclasses.replace(EXPERIMENTS["visual-transformer"], train_pairs=2))
    batch = batches.paired(np.random.default_rng(0), 4)
    image, task = batch.conditions.image, batch.conditions.task
    assert batch.condition.tokens is None and image is not None and task is not None
    assert image.shape == (8, 5, 64, 64) and torch.equal(image[:4], image[4:])  # one shared start
    assert task.tolist() == [[1, 0]] * 4 + [[0, 1]] * 4
    assert image[:, :3].min() >= -1 and image[:, :3].max() <= 1 and image[:, 3].abs().max() <= 5
    assert set(image[:, 4].unique().tolist()) == {0.0, 1.0}


def test_retimed_matches_are_those_of_the_other_reference_frame(dataset: Simulated) -> None:
    """The same points of the door, where they are in the reference at another frame."""
    rng = np.random.default_rng(0)
    rows, frames = rng.choice(len(dataset), 50, replace=False), rng.integers(0, 185, 50)
    shifted = dataclasses.replace(dataset, reference_frame=dataset.reference_frame.copy())
    shifted.reference_frame[rows] = frames
    retimed = dataset.retimed(rows, dataset.own_matches(rows), frames)
    expected = shifted.own_matches(rows)
    assert np.allclose(retimed.p_ref, expected.p_ref, atol=1e-9) and np.array_equal(retimed.p_live, expected.p_live)
    assert np.abs(retimed.p_ref - dataset.own_matches(rows).p_ref).max() > 0.05
    a = dataset.relations(rows, retimed, frames, EXPERIMENTS["memcorr"])
    b = shifted.relations(rows, expected, frames, EXPERIMENTS["memcorr"])
    assert np.allclose(a.tokens, b.tokens, atol=1e-6)


def test_phases_err_in_half_of_stage_two_and_nowhere_else(dataset: Simulated, cache: Cache) -> None:
    rows = np.arange(len(dataset))
    own = dataset.reference_frame[rows]
    mixed, first = make_batches(dataset, cache=cache), make_batches(dataset)
    frames = mixed._phases(np.random.default_rng(0), rows)
    assert frames is not None and 0.4 < (frames != own).mean() < 0.55
    lead = frames - dataset.windows.anchor[rows]
    moved = (frames != own) & (frames > 0) & (frames < 184)
    assert lead[moved].min() == -32 and lead[moved].max() == 64
    assert first._phases(np.random.default_rng(0), rows) is None
    published = make_batches(dataset, dataclasses.replace(SMALL, phase_errors=None), cache)
    for update in range(2):  # 0 is standard: only its tokens differ; 1 is paired: nothing does
        ours, theirs = mixed.draw(42, update), published.draw(42, update)
        assert torch.equal(ours.z_t, theirs.z_t) and torch.equal(ours.condition.keep, theirs.condition.keep)
        assert ours.condition.tokens is not None and theirs.condition.tokens is not None
        same = (ours.condition.tokens == theirs.condition.tokens).flatten(1).all(dim=1)
        assert same.all() if update else 0.2 < same.float().mean() < 0.9
