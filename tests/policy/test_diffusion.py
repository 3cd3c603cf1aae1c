"""Schedule, targets and sampler against the paper's equations and Hugging Face diffusers."""

from __future__ import annotations

import dataclasses
from typing import get_args

import pytest
import torch
from torch import Tensor

from memcorr.bench.networks import random_condition
from memcorr.bench.straightforward import from_ours, straightforward_sample
from memcorr.policy.condition import Condition
from memcorr.policy.networks.diffusion import (
    Prefix,
    alpha_bars,
    ddim_coefficients,
    ddim_sample,
    ddim_step,
    ddim_timesteps,
    guided,
    noise_of,
    paired_noise,
    q_sample,
    velocity,
)
from memcorr.policy.networks.sampler import make_sampler
from memcorr.policy.networks.transformer import ActionTransformer, VisualTransformer
from memcorr.policy.networks.unet import VisualUNet
from memcorr.spec import Prediction, Schedule

SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)


def test_schedule_is_the_papers() -> None:
    product = 1.0
    for t, alpha_bar in enumerate(alpha_bars().tolist()):
        product *= 1 - (1e-4 + t * (2e-2 - 1e-4) / 99)
        assert alpha_bar == pytest.approx(product, rel=1e-12)


def test_timesteps_descend_through_linspace() -> None:
    assert ddim_timesteps() == [int(99 * k / 19) for k in range(19, -1, -1)]


@pytest.mark.parametrize(("schedule", "theirs"), [("linear", "linear"), ("cosine", "squaredcos_cap_v2")])
def test_ddim_equals_diffusers_on_every_step(schedule: Schedule, theirs: str) -> None:
    diffusers = pytest.importorskip("diffusers")
    scheduler = diffusers.DDIMScheduler(
        num_train_timesteps=100,
        beta_start=1e-4,
        beta_end=2e-2,
        beta_schedule=theirs,
        clip_sample=True,
        clip_sample_range=5.0,
        set_alpha_to_one=True,
        prediction_type="epsilon",
    )
    network, condition = ActionTransformer(), random_condition(3)
    with torch.no_grad():  # a denoiser that drives some clean predictions into the clip
        network.out.weight.mul_(8)
    generator = torch.Generator().manual_seed(0)
    z_t = 3 * torch.randn(3, 16, 4, generator=generator)
    timesteps, clipped = ddim_timesteps(), 0
    for i, (t, coefficients) in enumerate(zip(timesteps, ddim_coefficients(schedule), strict=True)):
        with torch.no_grad():
            eps = network(z_t, torch.full((3,), t), condition)
        # diffusers steps down by 100 // num_inference_steps; choose it so that this is our next index.
        gap = t - timesteps[i + 1] if i + 1 < len(timesteps) else 100
        scheduler.num_inference_steps = 100 // gap
        assert 100 // scheduler.num_inference_steps == gap
        step = scheduler.step(eps, t, z_t)
        clipped += int((step.pred_original_sample.abs() == 5).sum())
        z_t = ddim_step(z_t, eps, coefficients)
        assert torch.allclose(z_t, step.prev_sample, atol=1e-5), t
    assert clipped > 0
    torch.testing.assert_close(alpha_bars(schedule).float(), scheduler.alphas_cumprod, rtol=1e-4, atol=1e-8)


def test_the_cosine_schedule_ends_in_noise_and_the_linear_one_does_not() -> None:
    """Chunks of opening and closing, 19.5 apart, stay 14.7 sigma apart to the end of the paper's schedule."""
    left = {schedule: alpha_bars(schedule)[-1].item() for schedule in SCHEDULES}
    apart = {schedule: 19.5 * (a / (1 - a)) ** 0.5 for schedule, a in left.items()}
    assert apart["linear"] == pytest.approx(14.7, abs=0.1) and apart["cosine"] < 0.02


def test_q_sample_is_the_forward_process() -> None:
    x_0, eps = torch.randn(2, 4, 16, 4, dtype=torch.float64)
    t = torch.tensor([0, 30, 60, 99])
    x_t = q_sample(x_0, eps, t)
    for b in range(4):
        alpha_bar = alpha_bars()[t[b]]
        assert torch.allclose(x_t[b], alpha_bar.sqrt() * x_0[b] + (1 - alpha_bar).sqrt() * eps[b])


def test_paired_targets_are_the_papers() -> None:
    x_open, x_close, eps = torch.randn(3, 8, 16, 4, dtype=torch.float64)
    t = torch.randint(80, 100, (8,))
    z_t, eps_open, eps_close = paired_noise(x_open, x_close, eps, t)
    alpha_bar = alpha_bars()[t].view(-1, 1, 1)
    m = (x_open + x_close) / 2
    assert torch.allclose(z_t, alpha_bar.sqrt() * m + (1 - alpha_bar).sqrt() * eps)
    for x_0, target in ((x_open, eps_open), (x_close, eps_close)):
        assert torch.allclose(target, (z_t - alpha_bar.sqrt() * x_0) / (1 - alpha_bar).sqrt())


def test_an_identical_pair_gives_the_standard_target_exactly() -> None:
    x_0, eps, t = torch.randn(8, 16, 4), torch.randn(8, 16, 4), torch.randint(80, 100, (8,))
    z_t, eps_open, eps_close = paired_noise(x_0, x_0, eps, t)
    assert torch.equal(z_t, q_sample(x_0, eps, t))
    assert torch.equal(eps_open, eps) and torch.equal(eps_close, eps)


def test_guidance_extrapolates_from_the_unconditional() -> None:
    u, c = torch.randn(2, 5)
    assert torch.allclose(guided(u, c, 1.5), u + 1.5 * (c - u)) and torch.allclose(guided(u, c, 1.0), c)


def test_a_perfect_denoiser_returns_the_clean_chunk() -> None:
    x_0 = torch.randn(2, 16, 4).clamp(-3, 3)
    alpha_bar = alpha_bars().float()

    def oracle(z_t: Tensor, t: Tensor) -> Tensor:
        a = alpha_bar[t].view(-1, 1, 1)
        return (z_t - a.sqrt() * x_0) / (1 - a).sqrt()

    assert torch.allclose(ddim_sample(oracle, torch.randn(2, 16, 4)), x_0, atol=1e-3)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("steps", [5, 20])
def test_a_velocity_stands_for_the_noise_and_the_clean_chunk(schedule: Schedule, steps: int) -> None:
    x_0, eps = torch.randn(2, 20, 16, 4, dtype=torch.float64)
    t = torch.tensor(ddim_timesteps())
    z_t = q_sample(x_0, eps, t, schedule)
    v = velocity(x_0, eps, t, schedule)
    for i, c in enumerate(ddim_coefficients(schedule)):
        assert torch.allclose(noise_of(v[i], z_t[i], c), eps[i])
        assert torch.allclose(c[0] * z_t[i] - c[1] * v[i], x_0[i])
    alpha_bar, clean = alpha_bars(schedule), x_0[:1].clamp(-3, 3)

    def oracle(z: Tensor, t: Tensor) -> Tensor:
        a = alpha_bar[t].view(-1, 1, 1)
        return velocity(clean, (z - a.sqrt() * clean) / (1 - a).sqrt(), t, schedule)

    noise = torch.randn(1, 16, 4, dtype=torch.float64)
    assert torch.allclose(ddim_sample(oracle, noise, schedule, steps, "velocity"), clean, atol=1e-6)


@pytest.mark.parametrize("guidance", [1.0, 1.5])
@pytest.mark.parametrize("size", [1, 5])
def test_fast_sampler_equals_forty_full_evaluations(size: int, guidance: float) -> None:
    network, condition = ActionTransformer().eval(), random_condition(size)
    condition = condition.drop(torch.arange(size) == 3)  # a fallback slot among the others
    noise = torch.randn(size, 16, 4)
    expected = straightforward_sample(from_ours(network).eval(), condition, noise, guidance)
    assert torch.allclose(make_sampler(network, guidance).sample(condition, noise), expected, atol=1e-4)
    how: tuple[Schedule, int, Prediction] = ("cosine", 10, "velocity")
    expected = straightforward_sample(from_ours(network).eval(), condition, noise, guidance, *how)
    assert torch.allclose(make_sampler(network, guidance, *how).sample(condition, noise), expected, atol=1e-4)


def test_a_sample_does_not_depend_on_its_neighbours() -> None:
    """Bit for bit, in a batch of the same size, whoever they are and wherever it stands."""
    network = ActionTransformer().eval()
    sampler, condition, noise = make_sampler(network, 1.5), random_condition(6), torch.randn(6, 16, 4)
    alone = sampler.sample(condition, noise)
    order = torch.tensor([4, 2, 0, 5, 1, 3])
    assert torch.equal(sampler.sample(condition[order], noise[order]), alone[order])
    others = random_condition(6, seed=9)
    here = torch.arange(6) == 2
    parts = ((f.name, getattr(others, f.name), getattr(condition, f.name)) for f in dataclasses.fields(Condition))
    mixed = Condition(**{name: torch.where(here.view(-1, *[1] * (a.ndim - 1)), b, a) for name, a, b in parts})
    other_noise = torch.cat([torch.randn(2, 16, 4), noise[2:3], torch.randn(3, 16, 4)])
    assert torch.equal(sampler.sample(mixed, other_noise)[2], alone[2])


@pytest.mark.parametrize(("network", "guidance"), [(VisualTransformer(), 1.5), (VisualUNet(), 1.0)])
def test_visual_samplers_equal_the_plain_loop(network: torch.nn.Module, guidance: float) -> None:
    condition, noise = random_condition(2), torch.randn(2, 16, 4)
    network.eval()
    expected = straightforward_sample(network, condition, noise, guidance)
    assert torch.allclose(make_sampler(network, guidance).sample(condition, noise), expected, atol=1e-4)


@pytest.mark.parametrize("network", [ActionTransformer(), VisualUNet()])
def test_a_prefix_is_kept_and_the_rest_continues_it(network: ActionTransformer | VisualUNet) -> None:
    """In-painting: the held actions come out to the bit, others hear of them, and who holds none gets the same bits."""
    network.eval()
    condition, noise = random_condition(3), torch.randn(3, 16, 4)
    chunk, held = torch.randn(3, 16, 4), torch.zeros(3, 16, dtype=torch.bool)
    held[0, :4], held[2, :1] = True, True
    sampler = make_sampler(network, 1.0)
    free, kept = sampler.sample(condition, noise), sampler.sample(condition, noise, Prefix(chunk, held))
    assert torch.equal(kept[held], chunk[held]) and torch.equal(kept[1], free[1])
    assert not torch.allclose(kept[0, 4:], free[0, 4:], atol=1e-3)
    assert torch.equal(sampler.sample(condition, noise, Prefix(chunk, torch.zeros_like(held))), free)

    def denoise(z_t: Tensor, t: Tensor) -> Tensor:
        told: Tensor = network(z_t, t, condition)
        return told

    with torch.no_grad():
        assert torch.allclose(kept, ddim_sample(denoise, noise, prefix=Prefix(chunk, held)), atol=1e-4)


def test_a_perfect_denoiser_is_not_disturbed_by_a_true_prefix() -> None:
    """What stands in the sample is what the forward process would have put there."""
    x_0, noise = torch.randn(2, 16, 4).clamp(-3, 3), torch.randn(2, 16, 4)
    seen: list[float] = []

    def oracle(z_t: Tensor, t: Tensor) -> Tensor:
        a = alpha_bars().float()[t].view(-1, 1, 1)
        seen.append(float((z_t[:, :5] - a.sqrt() * x_0[:, :5] - (1 - a).sqrt() * noise[:, :5]).abs().max()))
        return (z_t - a.sqrt() * x_0) / (1 - a).sqrt()

    held = torch.arange(16).expand(2, 16) < 5
    assert torch.allclose(ddim_sample(oracle, noise, prefix=Prefix(x_0, held)), x_0, atol=1e-3)
    assert len(seen) == 20 and max(seen) < 1e-5
