"""The straightforward implementation: what `memcorr bench` and the tests compare ours with.

The same network written with nn.MultiheadAttention, the same update with one default AdamW entry
per parameter, the same sampler with 40 full evaluations (conditional and unconditional at each of
20 steps). It loads our weights by name. The matcher as a call on two images, by the network that was trained.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from ..correspondence.embedded.matcher import EmbeddedMatcher, images
from ..correspondence.embedded.network import Pyramid
from ..policy.condition import Condition
from ..policy.networks.diffusion import ddim_sample, guided
from ..policy.networks.transformer import (
    DENOISER_BLOCKS,
    ENCODER_LAYERS,
    HEADS,
    HIDDEN,
    WIDTH,
    mlp,
    sinusoidal_embedding,
)
from ..spec import SPEC, Array, Prediction, Schedule
from ..training.batches import Batch
from ..training.experiments import Experiment


def attention() -> nn.MultiheadAttention:
    return nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)


class EncoderLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_attention, self.attention = nn.LayerNorm(WIDTH), attention()
        self.norm_mlp, self.mlp = nn.LayerNorm(WIDTH), mlp(WIDTH, HIDDEN, WIDTH)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        h = self.norm_attention(x)
        x = x + self.attention(h, h, h, key_padding_mask=padding, need_weights=False)[0]
        return x + self.mlp(self.norm_mlp(x))


class DenoiserBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_self, self.self_attention = nn.LayerNorm(WIDTH), attention()
        self.norm_cross, self.cross_attention = nn.LayerNorm(WIDTH), attention()
        self.norm_mlp, self.mlp = nn.LayerNorm(WIDTH), mlp(WIDTH, HIDDEN, WIDTH)

    def forward(self, x: Tensor, memory: Tensor, padding: Tensor) -> Tensor:
        h = self.norm_self(x)
        x = x + self.self_attention(h, h, h, need_weights=False)[0]
        h = self.norm_cross(x)
        x = x + self.cross_attention(h, memory, memory, key_padding_mask=padding, need_weights=False)[0]
        return x + self.mlp(self.norm_mlp(x))


class StraightforwardTransformer(nn.Module):
    """MemCorr-DP, one full evaluation per call."""

    def __init__(self) -> None:
        super().__init__()
        self.token_projection = nn.Linear(SPEC.token_fields, WIDTH)
        self.point_embedding = nn.Parameter(torch.zeros(SPEC.points, WIDTH))
        self.offset_embedding = nn.Parameter(torch.zeros(len(SPEC.future_offsets), WIDTH))
        self.encoder = nn.ModuleList(EncoderLayer() for _ in range(ENCODER_LAYERS))
        self.state_mlp = mlp(SPEC.state_dim, WIDTH, WIDTH)
        self.action_projection = nn.Linear(SPEC.action_dim, WIDTH)
        self.action_embedding = nn.Parameter(torch.zeros(SPEC.chunk, WIDTH))
        self.time_mlp = mlp(WIDTH, HIDDEN, WIDTH)
        self.blocks = nn.ModuleList(DenoiserBlock() for _ in range(DENOISER_BLOCKS))
        self.norm_out = nn.LayerNorm(WIDTH)
        self.out = nn.Linear(WIDTH, SPEC.action_dim)

    def forward(self, z_t: Tensor, t: Tensor, condition: Condition) -> Tensor:
        assert condition.tokens is not None
        position = (self.point_embedding[:, None] + self.offset_embedding).reshape(SPEC.tokens, WIDTH)
        context = self.token_projection(condition.tokens) + position
        padding = ~(condition.keep | ~condition.keep.any(dim=1, keepdim=True))
        for layer in self.encoder:
            context = layer(context, padding)
        memory = torch.cat([self.state_mlp(condition.state)[:, None], context], dim=1)
        padding = F.pad(~condition.keep, (1, 0), value=False)
        time = self.time_mlp(sinusoidal_embedding(t, WIDTH))
        x = self.action_projection(z_t) + self.action_embedding + time[:, None]
        for block in self.blocks:
            x = block(x, memory, padding)
        return self.out(self.norm_out(x))


RENAMED = (
    (".self_attention.norm.", ".norm_self."),
    (".cross_attention.norm.", ".norm_cross."),
    (".attention.norm.", ".norm_attention."),
    (".mlp.norm.", ".norm_mlp."),
    (".mlp.expand.", ".mlp.0."),
    (".mlp.contract.", ".mlp.2."),
    ("attention.out.", "attention.out_proj."),
    (".qkv.", ".in_proj_"),
)


def from_ours(network: nn.Module) -> StraightforwardTransformer:
    """The same function in the straightforward form: packed projections under PyTorch's names."""
    ours = dict(network.state_dict())
    for name in [name for name in ours if ".cross_attention.q." in name]:
        kv = name.replace(".q.", ".kv.")
        ours[name.replace(".q.", ".qkv.")] = torch.cat([ours.pop(name), ours.pop(kv)])
    theirs = StraightforwardTransformer()
    renamed = {}
    for name, tensor in ours.items():
        for mine, other in RENAMED:
            name = name.replace(mine, other)
        renamed[name] = tensor
    theirs.load_state_dict(renamed)
    return theirs.to(network.get_parameter("out.weight").device)


class StraightforwardTraining:
    """Forward, backward, clip, AdamW with its defaults, EMA parameter by parameter."""

    def __init__(self, network: nn.Module, experiment: Experiment) -> None:
        self.network, self.experiment = network, experiment
        self.optimizer = torch.optim.AdamW(
            network.parameters(),
            lr=experiment.learning_rate[0],
            betas=experiment.betas,
            eps=experiment.epsilon,
            weight_decay=experiment.weight_decay,
        )
        self.ema = [p.detach().clone() for p in network.parameters()]

    def step(self, batch: Batch) -> float:
        self.optimizer.zero_grad()
        loss = F.mse_loss(self.network(batch.z_t, batch.t, batch.conditions), batch.eps)
        loss.backward()
        nn.utils.clip_grad_norm_(self.network.parameters(), self.experiment.gradient_norm)
        self.optimizer.step()
        with torch.no_grad():
            for average, p in zip(self.ema, self.network.parameters(), strict=True):
                average.mul_(self.experiment.ema).add_(p, alpha=1.0 - self.experiment.ema)
        return loss.item()


@torch.no_grad()
def straightforward_sample(
    network: nn.Module,
    condition: Condition,
    noise: Tensor,
    guidance: float,
    schedule: Schedule = "linear",
    steps: int = SPEC.ddim_steps,
    predicts: Prediction = "noise",
) -> Tensor:
    """DDIM steps, each with a full conditional and, where it guides, a full unconditional evaluation."""

    def denoise(z_t: Tensor, t: Tensor) -> Tensor:
        eps_c = network(z_t, t, condition)
        return eps_c if guidance == 1.0 else guided(network(z_t, t, condition.drop()), eps_c, guidance)

    return ddim_sample(denoise, noise, schedule, steps, predicts)


class StraightforwardMatcher(EmbeddedMatcher):
    """Nothing is kept of a reference but its pixels: at every look both images go through the network."""

    def encode(self, crops: NDArray[np.uint8]) -> list[NDArray[np.uint8]]:  # type: ignore[override]
        return list(crops)

    @torch.inference_mode()
    def match(  # type: ignore[override]
        self, references: list[NDArray[np.uint8]], pixels: NDArray[np.floating], queries: NDArray[np.uint8]
    ) -> tuple[Array, Array]:
        both, B = self.network.encode(images(np.concatenate([np.stack(references), queries]))), len(queries)
        a, b = (Pyramid(*(f[half] for f in (both.f2, both.f4, both.f8))) for half in (slice(B), slice(B, None)))
        located = self.network.locate(a, b, torch.from_numpy(np.asarray(pixels, np.float32)))
        return located.uv.double().numpy(), located.trust.sigmoid().double().numpy()
