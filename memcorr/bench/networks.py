"""Cases of `memcorr bench` for training, sampling and XFeat: ours and the straightforward implementation.

Each case returns two callables that do the same work on the same inputs, for one thread.
"""

from __future__ import annotations

import contextlib
import multiprocessing
from multiprocessing.connection import Connection

import cv2
import numpy as np
import torch

from ..correspondence.xfeat.matcher import ENLARGED, XFeatMatcher
from ..correspondence.xfeat.package import published_way
from ..machine import keep_freed_memory
from ..policy.condition import Condition
from ..policy.networks.sampler import make_sampler
from ..policy.networks.transformer import IMAGE_CHANNELS, ActionTransformer
from ..spec import SPEC, TASKS
from ..training.batches import Batch
from ..training.experiments import MAIN
from ..training.loop import loss_of
from ..training.optimiser import Weights
from .run import Case
from .straightforward import StraightforwardTraining, from_ours, straightforward_sample

TOLERANCE = 1e-4  # by which the two results may differ


def random_condition(size: int, seed: int = 0, dropped: float = 0.0) -> Condition:
    """Random inputs for any of the networks: one point in ten invalid, a share of conditions dropped as a whole."""
    g = torch.Generator().manual_seed(seed)
    offsets = SPEC.tokens // SPEC.points
    keep = (torch.rand(size, SPEC.points, generator=g) > 0.1).repeat_interleave(offsets, dim=1)
    keep[: round(dropped * size)] = False
    return Condition(
        torch.randn(size, SPEC.state_dim, generator=g),
        keep,
        tokens=0.3 * torch.randn(size, SPEC.tokens, SPEC.token_fields, generator=g) * keep[..., None],
        image=torch.randn(size, IMAGE_CHANNELS, SPEC.visual_size, SPEC.visual_size, generator=g),
        task=torch.eye(len(TASKS))[torch.arange(size) % len(TASKS)],
    )


def _chunks(size: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(size, SPEC.chunk, SPEC.action_dim, generator=generator)


def train_step() -> Case:
    """One standard update (one condition in ten dropped) and one paired update (64 draws of 80 pairs), batch 128.

    The baseline runs in a process of its own, because ours also tunes the process's allocator.
    """
    torch.set_num_threads(1)
    keep_freed_memory()
    batches, network = _training_inputs()
    weights = Weights(network, ActionTransformer(), MAIN, torch.device("cpu"))

    def ours() -> list[float]:
        losses = []
        for batch in batches:
            loss = loss_of(network, batch)
            weights.step(loss)
            losses.append(loss.item())
        return losses

    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    context.Process(target=_straightforward_updates, args=(there,), daemon=True).start()

    def baseline() -> list[float]:
        here.send(True)
        return here.recv()

    assert max(abs(a - b) for a, b in zip(ours(), baseline(), strict=True)) < TOLERANCE
    return Case(ours, baseline, "nn.MultiheadAttention, default AdamW", rounds=15)


def _training_inputs() -> tuple[list[Batch], ActionTransformer]:
    """The same two batches and the same fresh network in every process."""
    g = torch.Generator().manual_seed(0)
    batches = []
    pairs, drawn = torch.randint(0, SPEC.train_pairs, (MAIN.batch // 2,), generator=g).unique(return_inverse=True)
    repeated = torch.cat([drawn, drawn + len(pairs)])
    for size, dropped, context in ((MAIN.batch, MAIN.condition_dropout, None), (2 * len(pairs), 0.0, repeated)):
        t = torch.randint(0, SPEC.diffusion_steps, (MAIN.batch,), generator=g)
        condition = random_condition(size, dropped=dropped)
        batches.append(Batch(_chunks(MAIN.batch, g), t, condition, _chunks(MAIN.batch, g), context))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return batches, ActionTransformer()


def _straightforward_updates(requests: Connection) -> None:
    torch.set_num_threads(1)
    batches, network = _training_inputs()
    training = StraightforwardTraining(from_ours(network), MAIN)
    with contextlib.suppress(EOFError):  # the parent process is gone
        while requests.recv():
            requests.send([training.step(batch) for batch in batches])


def sample(size: int) -> Case:
    """20-step DDIM with guidance for `size` chunks."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    network = ActionTransformer().eval()
    theirs = from_ours(network).eval()
    sampler = make_sampler(network, MAIN.guidance)
    condition, noise = random_condition(size), _chunks(size, generator)

    def ours() -> torch.Tensor:
        return sampler.sample(condition, noise)

    def baseline() -> torch.Tensor:
        return straightforward_sample(theirs, condition, noise, MAIN.guidance)

    assert (ours() - baseline()).abs().max() < TOLERANCE
    return Case(ours, baseline, "nn.MultiheadAttention, 40 full evaluations", rounds=40 if size == 1 else 7)


def match_xfeat() -> Case:
    """48 points looked for with an encoded reference, against the package's own way of matching the same two crops.

    Its own way finds keypoints in both crops, here enlarged as ours are, and pairs those that are each other's nearest.
    """
    torch.set_num_threads(1)
    matcher, package = XFeatMatcher(), published_way()
    rng = np.random.default_rng(0)
    grain = cv2.resize(rng.integers(0, 256, (32, 32, 3), np.uint8), (160, 160), interpolation=cv2.INTER_CUBIC)
    crops = np.stack([grain[10:138, 12:140], grain[14:142, 9:137]]).astype(np.uint8)
    pixels = rng.uniform(24, 103, (1, 48, 2))
    encoded = matcher.encode(crops[:1])
    large = torch.from_numpy(np.stack([cv2.resize(c, None, fx=ENLARGED, fy=ENLARGED) for c in crops]))
    large = large.permute(0, 3, 1, 2).float() / 255

    def ours() -> object:
        return matcher.match(encoded, pixels, crops[1:])

    def theirs() -> object:
        return package.match_xfeat(large[:1], large[1:])

    return Case(ours, theirs, "XFeat's own detectAndCompute on both crops, and its matching", rounds=5)
