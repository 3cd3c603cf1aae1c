"""Cases of `memcorr bench` for training and sampling: ours and the straightforward implementation.

Each case returns two callables that do the same work on the same inputs, for one thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .batches import Batch
from .conditions import Condition
from .experiments import MAIN
from .networks import ActionTransformer
from .protocol import PROTOCOL
from .relations import TOKEN_FIELDS, TOKENS
from .sampler import TransformerSampler
from .straightforward import StraightforwardTraining, from_ours, straightforward_sample
from .training import keep_freed_memory, loss_of
from .weights import Weights


@dataclass(frozen=True)
class Case:
    ours: Callable[[], object]
    baseline: Callable[[], object]
    baseline_name: str
    difference: float  # largest absolute difference of the two results


def _condition(size: int, dropped: float, generator: torch.Generator) -> Condition:
    """Random tokens, one point in ten invalid, a share of conditions dropped as a whole."""
    keep = (torch.rand(size, PROTOCOL.points, generator=generator) > 0.1).repeat_interleave(
        TOKENS // PROTOCOL.points, 1
    )
    keep[: round(dropped * size)] = False
    tokens = 0.3 * torch.randn(size, TOKENS, TOKEN_FIELDS, generator=generator) * keep[..., None]
    return Condition(torch.randn(size, PROTOCOL.state_dim, generator=generator), keep, tokens=tokens)


def _chunks(size: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(size, PROTOCOL.chunk, PROTOCOL.action_dim, generator=generator)


def train_step() -> Case:
    """One standard update (one condition in ten dropped) and one paired update, batch 128."""
    keep_freed_memory()
    generator = torch.Generator().manual_seed(0)
    batches = [
        Batch(
            _chunks(MAIN.batch, generator),
            torch.randint(0, 100, (MAIN.batch,), generator=generator),
            _condition(MAIN.batch, dropped, generator),
            _chunks(MAIN.batch, generator),
        )
        for dropped in (MAIN.condition_dropout, 0.0)
    ]
    network = ActionTransformer()
    theirs = StraightforwardTraining(from_ours(network), MAIN)
    weights = Weights(network, ActionTransformer(), MAIN, torch.device("cpu"))

    def ours() -> list[float]:
        losses = []
        for batch in batches:
            loss = loss_of(network, batch)
            weights.step(loss)
            losses.append(loss.item())
        return losses

    def baseline() -> list[float]:
        return [theirs.step(batch) for batch in batches]

    difference = max(abs(a - b) for a, b in zip(ours(), baseline(), strict=True))
    return Case(ours, baseline, "nn.MultiheadAttention, default AdamW", difference)


def sample(size: int) -> Case:
    """20-step DDIM with guidance for `size` chunks."""
    generator = torch.Generator().manual_seed(0)
    network = ActionTransformer().eval()
    theirs = from_ours(network).eval()
    sampler = TransformerSampler(network, MAIN.guidance)
    condition, noise = _condition(size, 0.0, generator), _chunks(size, generator)

    def ours() -> torch.Tensor:
        return sampler.sample(condition, noise)

    def baseline() -> torch.Tensor:
        return straightforward_sample(theirs, condition, noise, MAIN.guidance)

    difference = (ours() - baseline()).abs().max().item()
    return Case(ours, baseline, "nn.MultiheadAttention, 40 full evaluations", difference)


CASES: dict[str, Callable[[], Case]] = {
    "train-step": train_step,
    "sample-1": lambda: sample(1),
    "sample-32": lambda: sample(32),
}
