"""All parameters of a network in one flat buffer: one fused AdamW call, one EMA, one tensor to save.

Parameters become views of the buffer. Each starts on a 64-byte boundary, because matrix products
may round differently for differently aligned operands and a resumed run must not.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from .experiments import Experiment

ALIGNMENT = 16  # floats


def _padded(n: int) -> int:
    return -(-n // ALIGNMENT) * ALIGNMENT


def flat_size(network: nn.Module) -> int:
    return sum(_padded(p.numel()) for p in network.parameters())


def bind(network: nn.Module, flat: Tensor, gradient: Tensor | None = None) -> None:
    """Makes every parameter (and its gradient) a view of `flat`; values come from `flat`."""
    offset = 0
    for p in network.parameters():
        p.data = flat[offset : offset + p.numel()].view(p.shape)
        p.grad = None if gradient is None else gradient[offset : offset + p.numel()].view(p.shape)
        offset += _padded(p.numel())


def gather(network: nn.Module, device: torch.device) -> Tensor:
    """The parameters' values as one flat buffer, zero between them."""
    flat = torch.zeros(flat_size(network), device=device)
    offset = 0
    for p in network.parameters():
        flat[offset : offset + p.numel()] = p.detach().to(device).flatten()
        offset += _padded(p.numel())
    return flat


class Weights:
    """Weights, gradient, AdamW moments and EMA of one network during one stage."""

    def __init__(
        self, network: nn.Module, ema_network: nn.Module, experiment: Experiment, device: torch.device
    ) -> None:
        self.experiment = experiment
        self.network, self.ema_network = network, ema_network
        self.flat = gather(network, device)
        self.gradient = torch.zeros_like(self.flat)
        self.ema = self.flat.clone()
        bind(network, self.flat, self.gradient)
        bind(ema_network, self.ema)
        self.begin_stage(0)

    def begin_stage(self, stage: int) -> None:
        """A fresh optimiser at the stage's learning rate, starting from the EMA of what came before."""
        self.flat.copy_(self.ema)
        parameter = nn.Parameter(self.flat)
        parameter.grad = self.gradient
        e = self.experiment
        self.optimizer = torch.optim.AdamW(
            [parameter],
            lr=e.learning_rate[stage],
            betas=e.betas,
            eps=e.epsilon,
            weight_decay=e.weight_decay,
            fused=True,
        )
        self.moments = {
            "step": torch.zeros((), device=self.flat.device),
            "exp_avg": torch.zeros_like(self.flat),
            "exp_avg_sq": torch.zeros_like(self.flat),
        }
        self.optimizer.state[parameter] = self.moments

    def step(self, loss: Tensor, add_up: Callable[[Tensor], Tensor] = lambda gradient: gradient) -> Tensor:
        """Backward, clip to the global norm, AdamW, EMA. Returns the norm before clipping. `add_up` brings the parts
        of a batch together."""
        self.gradient.zero_()
        loss.backward()
        add_up(self.gradient)
        norm = torch.linalg.vector_norm(self.gradient)
        self.gradient.mul_((self.experiment.gradient_norm / (norm + 1e-6)).clamp(max=1.0))
        self.optimizer.step()
        self.ema.lerp_(self.flat, 1.0 - self.experiment.ema)
        return norm

    def tensors(self) -> dict[str, Tensor]:
        """Everything a resumed run needs."""
        return {"weights": self.flat, "ema": self.ema, **self.moments}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        for name, tensor in self.tensors().items():
            tensor.copy_(tensors[name])
