"""Cases of `memcorr bench` for training and sampling: ours and the straightforward implementation.

Each case returns two callables that do the same work on the same inputs, for one thread.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from .batches import Batch
from .bench import Case
from .conditions import Condition
from .experiments import MAIN
from .networks import IMAGE_CHANNELS, IMAGE_SIZE, ActionTransformer
from .protocol import PROTOCOL, TASKS
from .relations import TOKEN_FIELDS, TOKENS
from .sampler import TransformerSampler
from .straightforward import StraightforwardTraining, from_ours, straightforward_sample
from .training import keep_freed_memory, loss_of
from .weights import Weights

TOLERANCE = 1e-4  # by which the two results may differ


def random_condition(size: int, seed: int = 0, dropped: float = 0.0) -> Condition:
    """Random inputs for any of the networks: one point in ten invalid, a share of conditions dropped as a whole."""
    g = torch.Generator().manual_seed(seed)
    offsets = TOKENS // PROTOCOL.points
    keep = (torch.rand(size, PROTOCOL.points, generator=g) > 0.1).repeat_interleave(offsets, dim=1)
    keep[: round(dropped * size)] = False
    return Condition(
        torch.randn(size, PROTOCOL.state_dim, generator=g),
        keep,
        tokens=0.3 * torch.randn(size, TOKENS, TOKEN_FIELDS, generator=g) * keep[..., None],
        image=torch.randn(size, IMAGE_CHANNELS, IMAGE_SIZE, IMAGE_SIZE, generator=g),
        task=torch.eye(len(TASKS))[torch.arange(size) % len(TASKS)],
    )


def _chunks(size: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(size, PROTOCOL.chunk, PROTOCOL.action_dim, generator=generator)


def train_step() -> Case:
    """One standard update (one condition in ten dropped) and one paired update, batch 128."""
    torch.set_num_threads(1)
    keep_freed_memory()
    generator = torch.Generator().manual_seed(0)
    batches = [
        Batch(
            _chunks(MAIN.batch, generator),
            torch.randint(0, 100, (MAIN.batch,), generator=generator),
            random_condition(MAIN.batch, dropped=dropped),
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

    assert max(abs(a - b) for a, b in zip(ours(), baseline(), strict=True)) < TOLERANCE
    return Case(ours, baseline, "nn.MultiheadAttention, default AdamW", rounds=15)


def sample(size: int) -> Case:
    """20-step DDIM with guidance for `size` chunks."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    network = ActionTransformer().eval()
    theirs = from_ours(network).eval()
    sampler = TransformerSampler(network, MAIN.guidance)
    condition, noise = random_condition(size), _chunks(size, generator)

    def ours() -> torch.Tensor:
        return sampler.sample(condition, noise)

    def baseline() -> torch.Tensor:
        return straightforward_sample(theirs, condition, noise, MAIN.guidance)

    assert (ours() - baseline()).abs().max() < TOLERANCE
    return Case(ours, baseline, "nn.MultiheadAttention, 40 full evaluations", rounds=40 if size == 1 else 7)


CASES: dict[str, Callable[[], Case]] = {
    "train-step": train_step,
    "sample-1": lambda: sample(1),
    "sample-32": lambda: sample(32),
}
