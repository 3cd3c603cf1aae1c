"""Action diffusion: the forward process, the two objectives' targets and the DDIM sampler.

One function per equation. Noise, timesteps and the denoiser are passed in, never drawn here.
All actions are in normalised coordinates, chunks are (batch, 16, 4), timesteps (batch,) integers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ...spec import SPEC, Prediction, Schedule

LARGEST_BETA = 0.999  # of the squared cosine, whose last step would take everything


def alpha_bars(schedule: Schedule = "linear") -> Tensor:
    """alpha_bar_t = prod_{q <= t} (1 - beta_q): (100,) float64.

    linear, the paper's: beta_t = 1e-4 + t (2e-2 - 1e-4) / 99. At t = 99 sixty per cent of the action is left, by
    which a network tells apart two behaviours without ever looking at its condition (docs/log).
    cosine: beta_t = min(1 - f((t + 1) / 100) / f(t / 100), 0.999) with f(s) = cos^2((s + 0.008) / 1.008 pi / 2).
    """
    T = SPEC.diffusion_steps
    if schedule == "linear":
        beta = torch.linspace(SPEC.beta_first, SPEC.beta_last, T, dtype=torch.float64)
    else:
        f = torch.cos((torch.arange(T + 1, dtype=torch.float64) / T + 0.008) / 1.008 * math.pi / 2) ** 2
        beta = (1 - f[1:] / f[:-1]).clamp(max=LARGEST_BETA)
    return torch.cumprod(1.0 - beta, dim=0)


def signal_and_noise(
    t: Tensor, dtype: torch.dtype = torch.float32, schedule: Schedule = "linear"
) -> tuple[Tensor, Tensor]:
    """sqrt(alpha_bar_t) and sqrt(1 - alpha_bar_t), shaped to multiply chunks."""
    alpha_bar = alpha_bars(schedule).to(t.device)[t].reshape(-1, 1, 1)
    return alpha_bar.sqrt().to(dtype), (1.0 - alpha_bar).sqrt().to(dtype)


def q_sample(x_0: Tensor, eps: Tensor, t: Tensor, schedule: Schedule = "linear") -> Tensor:
    """Standard diffusion: x_t = sqrt(alpha_bar_t) x_0 + sqrt(1 - alpha_bar_t) eps. The target is eps."""
    signal, noise = signal_and_noise(t, x_0.dtype, schedule)
    return signal * x_0 + noise * eps


def velocity(x_0: Tensor, eps: Tensor, t: Tensor, schedule: Schedule) -> Tensor:
    """v = sqrt(alpha_bar_t) eps - sqrt(1 - alpha_bar_t) x_0: the target of who predicts velocities."""
    signal, noise = signal_and_noise(t, x_0.dtype, schedule)
    return signal * eps - noise * x_0


def noise_of(v: Tensor, z_t: Tensor, coefficients: tuple[float, float, float, float]) -> Tensor:
    """The noise that a velocity stands for: eps = sqrt(alpha_bar) v + sqrt(1 - alpha_bar) z_t."""
    return coefficients[0] * v + coefficients[1] * z_t


def paired_noise(
    x_open: Tensor, x_close: Tensor, eps: Tensor, t: Tensor, schedule: Schedule = "linear"
) -> tuple[Tensor, Tensor, Tensor]:
    """Counterfactual paired denoising: z_t shared by both behaviours, and their targets eps^open, eps^close.

    m = (x_open + x_close) / 2,  z_t = sqrt(alpha_bar) m + sqrt(1 - alpha_bar) eps,
    eps^b = (z_t - sqrt(alpha_bar) x_0^b) / sqrt(1 - alpha_bar).

    The target is computed as eps + sqrt(alpha_bar / (1 - alpha_bar)) (m - x_0^b), the same number
    without the cancellation: equal chunks give exactly eps, the standard target.
    """
    signal, noise = signal_and_noise(t, x_open.dtype, schedule)
    m = 0.5 * (x_open + x_close)
    z_t = signal * m + noise * eps
    return z_t, eps + signal / noise * (m - x_open), eps + signal / noise * (m - x_close)


def ddim_timesteps(steps: int = SPEC.ddim_steps) -> list[int]:
    """The descending integer indices of linspace(0, 99, 20), truncated: 99, 93, ..., 5, 0."""
    return torch.linspace(0, SPEC.diffusion_steps - 1, steps, dtype=torch.float64).long().flip(0).tolist()


def ddim_coefficients(
    schedule: Schedule = "linear", steps: int = SPEC.ddim_steps
) -> list[tuple[float, float, float, float]]:
    """Per step sqrt(alpha_bar_t), sqrt(1 - alpha_bar_t) and the same two of the next, less noisy index.

    After the last step (t = 0) nothing is noisy: alpha_bar = 1.
    """
    alpha_bar = alpha_bars(schedule)[ddim_timesteps(steps)]
    following = torch.cat([alpha_bar[1:], torch.ones(1, dtype=alpha_bar.dtype)])
    columns = torch.stack([alpha_bar.sqrt(), (1 - alpha_bar).sqrt(), following.sqrt(), (1 - following).sqrt()], dim=1)
    return [(row[0], row[1], row[2], row[3]) for row in columns.tolist()]


def ddim_step(z_t: Tensor, eps_hat: Tensor, coefficients: tuple[float, float, float, float]) -> Tensor:
    """One deterministic DDIM step (stochasticity zero) with the clean prediction clipped to +-5.

    As in the common implementation the direction keeps the predicted noise, also where the clean
    prediction was clipped.
    """
    signal, noise, signal_next, noise_next = coefficients
    x_0 = ((z_t - noise * eps_hat) / signal).clamp(-SPEC.clean_limit, SPEC.clean_limit)
    return signal_next * x_0 + noise_next * eps_hat


@dataclass(frozen=True)
class Prefix:
    """Actions that are being made while a chunk is planned. The rest of the chunk is in-painted to continue them.

    Before every step they stand in the sample as the forward process makes them noisy, with the sample's own noise."""

    chunk: Tensor  # (B, 16, 4) clean and normalised; only what is held counts
    held: Tensor  # (B, 16) bool, the first actions of each

    def put(self, z_t: Tensor, eps: Tensor, signal: float, noise: float) -> Tensor:
        return torch.where(self.held[..., None], signal * self.chunk + noise * eps, z_t)


def guided(eps_u: Tensor, eps_c: Tensor, guidance: float) -> Tensor:
    """Classifier-free guidance: eps_u + w (eps_c - eps_u)."""
    return eps_u + guidance * (eps_c - eps_u)


def ddim_sample(
    denoise: Callable[[Tensor, Tensor], Tensor],
    noise: Tensor,
    schedule: Schedule = "linear",
    steps: int = SPEC.ddim_steps,
    predicts: Prediction = "noise",
    prefix: Prefix | None = None,
) -> Tensor:
    """From Gaussian `noise` (B, 16, 4) to clean normalised chunks; `denoise(z_t, t)` predicts the noise or what stands
    for it."""
    z_t = noise if prefix is None else prefix.put(noise, noise, *ddim_coefficients(schedule, steps)[0][:2])
    for t, coefficients in zip(ddim_timesteps(steps), ddim_coefficients(schedule, steps), strict=True):
        prediction = denoise(z_t, torch.full((len(noise),), t, device=noise.device))
        noise_hat = prediction if predicts == "noise" else noise_of(prediction, z_t, coefficients)
        z_t = ddim_step(z_t, noise_hat, coefficients)
        z_t = z_t if prefix is None else prefix.put(z_t, noise, *coefficients[2:])
    return z_t
