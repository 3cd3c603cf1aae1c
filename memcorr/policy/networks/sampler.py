"""The fast DDIM sampler: the same 20 steps and the same numbers as 40 full network evaluations.

What does not depend on the timestep is computed once per chunk: the encoded context and each
block's cross-attention keys and values. What depends on neither is computed once per policy: the
time embeddings of the 20 steps. Conditional and unconditional branches share one batch; without
the 64 tokens the state is the only key, so the unconditional cross-attention is a constant vector.

A sample's bits do not depend on what else is in the batch, but they may depend on the batch's
size: matrix products of other shapes round differently. Callers who need the same bits for one
sample and for many pad to a constant size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...spec import SPEC, Prediction, Schedule
from ..condition import Condition
from .diffusion import Prefix, ddim_coefficients, ddim_sample, ddim_step, ddim_timesteps, noise_of
from .transformer import HEADS, HIDDEN, WIDTH, ActionTransformer, DenoiserBlock, heads
from .unet import VisualUNet

CHUNK = SPEC.chunk


class Sampler(Protocol):
    def sample(self, condition: Condition, noise: Tensor, prefix: Prefix | None = None) -> Tensor:
        """Clean normalised chunks (B, 16, 4) from Gaussian noise of that shape, continuing a prefix if there is one."""


def make_sampler(
    network: nn.Module,
    guidance: float,
    schedule: Schedule = "linear",
    steps: int = SPEC.ddim_steps,
    predicts: Prediction = "noise",
) -> Sampler:
    if isinstance(network, ActionTransformer):
        return TransformerSampler(network, guidance, schedule, steps, predicts)
    assert isinstance(network, VisualUNet) and guidance == 1.0, "the U-Net has no unconditional branch to guide with"
    return UNetSampler(network, schedule, steps, predicts)


@dataclass(frozen=True)
class Affine:
    """y = h W + b. W is stored (in, out): small products with it are up to twice as fast."""

    weight: Tensor
    bias: Tensor

    @staticmethod
    def of(linear: nn.Linear, bias: Tensor | None = None) -> Affine:
        return Affine(linear.weight.t().contiguous(), linear.bias if bias is None else bias)

    def add_to(self, x: Tensor, h: Tensor) -> None:
        """x += h W + b."""
        x.add_(self.bias).addmm_(h, self.weight)


class Block:
    """One denoiser block with its weights laid out for small batches."""

    def __init__(self, block: DenoiserBlock) -> None:
        attention, cross, mlp = block.self_attention, block.cross_attention, block.mlp
        self.norm_self, self.norm_cross, self.norm_mlp = attention.norm, cross.norm, mlp.norm
        self.qkv, self.self_out = Affine.of(attention.qkv), Affine.of(attention.out)
        self.q, self.cross_out = Affine.of(cross.q), Affine.of(cross.out, cross.output_bias())
        self.kv = cross.kv.weight
        self.expand, self.contract = Affine.of(mlp.expand), Affine.of(mlp.contract)


@dataclass(frozen=True)
class Memory:
    """What one block's cross-attention needs to know about the condition."""

    k: Tensor  # (B, 4, 65, 32)
    v: Tensor  # (B, 4, 65, 32)
    state_only: Tensor | None  # (B, 1, 128) what cross-attention adds in the unconditional branch, if there is one


class TransformerSampler:
    """For MemCorr-DP and the visual Transformer."""

    @torch.no_grad()
    def __init__(
        self, network: ActionTransformer, guidance: float, schedule: Schedule, steps: int, predicts: Prediction
    ) -> None:
        self.network, self.guidance, self.coefficients = network, guidance, ddim_coefficients(schedule, steps)
        self.predicts = predicts
        device = network.out.weight.device
        self.blocks = [Block(block) for block in network.blocks]  # type: ignore[arg-type]
        self.kv = torch.cat([block.kv for block in self.blocks])
        self.action, self.out = Affine.of(network.action_projection), Affine.of(network.out)
        time = network.embed_time(torch.tensor(ddim_timesteps(steps), device=device))
        self.steps = time[:, None] + network.action_embedding + network.action_projection.bias  # (20, 16, 128)

    def _memories(self, condition: Condition) -> tuple[list[Memory], Tensor]:
        """Keys and values of every block, and the bias that hides tokens which do not count."""
        network = self.network
        context = network.encode(network.context(condition), condition.keep)
        memory = torch.cat([network.state_mlp(condition.state)[:, None], context], dim=1)
        hidden = F.pad(~condition.keep, (1, 0), value=False)
        bias = torch.zeros_like(hidden, dtype=memory.dtype).masked_fill_(hidden, -torch.inf)
        # All blocks' keys and values are one product, laid out in one copy: (blocks, 2, B, 4, 65, 32).
        kv = F.linear(memory, self.kv).view(*memory.shape[:2], len(self.blocks), 2, HEADS, WIDTH // HEADS)
        kv = kv.permute(2, 3, 0, 4, 1, 5).contiguous()
        memories = []
        for block, (k, v) in zip(self.blocks, kv, strict=True):
            state_only = None
            if self.guidance != 1.0:
                state_only = torch.addmm(block.cross_out.bias, v[:, :, 0].flatten(1), block.cross_out.weight)[:, None]
            memories.append(Memory(k, v, state_only))
        return memories, bias[:, None, None, :]

    @torch.inference_mode()
    def sample(self, condition: Condition, noise: Tensor, prefix: Prefix | None = None) -> Tensor:
        memories, bias = self._memories(condition)
        B, guided = len(noise), self.guidance != 1.0
        R, branches = B * CHUNK, 1 + guided
        # Rows of x: all conditional actions, then all unconditional ones. The buffers and their
        # views serve all steps; for one sample, making them anew would cost as much as the maths.
        x = noise.new_empty(branches * R, WIDTH)
        x_cond, x_free = x[:R], x[R:]
        qkv, hidden = x.new_empty(branches * R, 3 * WIDTH), x.new_empty(branches * R, HIDDEN)
        q, k, v = qkv.view(branches * B, CHUNK, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4).unbind(0)
        one_branch, both = (x_cond, qkv[:R], q[:B], k[:B], v[:B]), (x, qkv, q, k, v)
        inputs, added_free = x_cond.view(B, CHUNK, WIDTH), x_free.view(-1, CHUNK, WIDTH)
        q_cross = x.new_empty(R, WIDTH)
        q_cross_heads = heads(q_cross.view(B, CHUNK, WIDTH))
        z_t = noise if prefix is None else prefix.put(noise, noise, *self.coefficients[0][:2])
        for step, coefficients in zip(self.steps, self.coefficients, strict=True):
            torch.add(torch.matmul(z_t, self.action.weight), step, out=inputs)
            for block, memory in zip(self.blocks, memories, strict=True):
                if block is self.blocks[0]:  # the branches are the same until the first of them hears the condition
                    _self_attention(block, *one_branch)
                    x_free.copy_(x_cond[: len(x_free)])
                else:
                    _self_attention(block, *both)
                torch.addmm(block.q.bias, _norm(x_cond, block.norm_cross), block.q.weight, out=q_cross)
                attended = F.scaled_dot_product_attention(q_cross_heads, memory.k, memory.v, bias)
                block.cross_out.add_to(x_cond, _merged(attended))
                if memory.state_only is not None:
                    added_free.add_(memory.state_only)
                torch.addmm(block.expand.bias, _norm(x, block.norm_mlp), block.expand.weight, out=hidden)
                block.contract.add_to(x, F.gelu(hidden))
            h = _norm(x, self.network.norm_out)
            if guided:  # eps_u + w (eps_c - eps_u); the output layer is affine, so it may come after
                h = torch.lerp(h[R:], h[:R], self.guidance)
            eps_hat = torch.addmm(self.out.bias, h, self.out.weight).view_as(noise)
            if self.predicts == "velocity":
                eps_hat = noise_of(eps_hat, z_t, coefficients)
            z_t = ddim_step(z_t, eps_hat, coefficients)
            z_t = z_t if prefix is None else prefix.put(z_t, noise, *coefficients[2:])
        return z_t


def _self_attention(block: Block, x: Tensor, qkv: Tensor, q: Tensor, k: Tensor, v: Tensor) -> None:
    """In place on the rows x; q, k and v are views of the buffer qkv."""
    torch.addmm(block.qkv.bias, _norm(x, block.norm_self), block.qkv.weight, out=qkv)
    block.self_out.add_to(x, _merged(F.scaled_dot_product_attention(q, k, v)))


def _norm(x: Tensor, norm: nn.LayerNorm) -> Tensor:
    return torch.layer_norm(x, (WIDTH,), norm.weight, norm.bias, norm.eps)


def _merged(attended: Tensor) -> Tensor:
    """(B, 4, n, 32) heads back to rows (B n, 128)."""
    return attended.transpose(1, 2).reshape(-1, WIDTH)


class UNetSampler:
    """For the visual U-Net: the observation is encoded once."""

    def __init__(self, network: VisualUNet, schedule: Schedule, steps: int, predicts: Prediction) -> None:
        self.network, self.how = network, (schedule, steps, predicts)

    @torch.inference_mode()
    def sample(self, condition: Condition, noise: Tensor, prefix: Prefix | None = None) -> Tensor:
        observation = self.network.encode(condition)
        return ddim_sample(lambda z_t, t: self.network.denoise(z_t, t, observation), noise, *self.how, prefix)
