"""The two Transformer policies of the table "Trainable policy architectures".

`ActionTransformer` is the complete MemCorr-DP network (1,612,804 parameters): relation encoder,
state, time and action inputs, four denoiser blocks. `VisualTransformer` puts an image tokenizer
in front of the same core (1,618,636). `unet.py` holds the third network.

The context does not depend on the timestep, so `encode` and `denoise` are separate: the sampler
encodes once.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...spec import SPEC, TASKS
from ..condition import Condition

WIDTH, HEADS, HIDDEN = 128, 4, 512
ENCODER_LAYERS, DENOISER_BLOCKS = 2, 4
IMAGE_CHANNELS, PATCH = 5, 8


def sinusoidal_embedding(t: Tensor, dim: int) -> Tensor:
    """Timesteps (B,) to (B, dim): sines, then cosines, of geometric frequencies 1 .. 1e-4."""
    half = dim // 2
    frequency = torch.exp(torch.arange(half, device=t.device) * (-math.log(10000.0) / (half - 1)))
    angle = t[:, None].float() * frequency
    return torch.cat([angle.sin(), angle.cos()], dim=-1)


def mlp(d_in: int, d_hidden: int, d_out: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(d_in, d_hidden), nn.GELU(), nn.Linear(d_hidden, d_out))


def heads(x: Tensor) -> Tensor:
    """One projection (B, n, 128) to its heads (B, 4, n, 32)."""
    return x.unflatten(-1, (HEADS, WIDTH // HEADS)).transpose(1, 2)


def attend(q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None = None) -> Tensor:
    """Four-headed softmax attention of (B, n, 128) projections; `keep` (B, keys) marks keys that count.

    A key that does not count has weight exactly 0, so its content cannot reach the output.
    """
    bias = None
    if keep is not None:
        bias = torch.zeros_like(keep, dtype=q.dtype).masked_fill_(~keep, -torch.inf)[:, None, None, :]
    return F.scaled_dot_product_attention(heads(q), heads(k), heads(v), bias).transpose(1, 2).flatten(2)


def onednn(x: Tensor, w: Tensor, b: Tensor | None, plus: Tensor | None = None) -> Tensor:
    """x w^T + b (+ plus), in float32 on the processor."""
    if plus is None:
        return torch.ops.mkldnn._linear_pointwise(x, w, b, "none", [], "")
    return torch.ops.mkldnn._linear_pointwise.binary(x, plus, w, b, "add")


class Product(torch.autograd.Function):
    """h W^T + b (+ x), with the products of both directions by oneDNN.

    PyTorch leaves float32 products to MKL, which is half as fast on AVX-512 processors that are not Intel's.
    """

    @staticmethod
    def forward(ctx: Any, h: Tensor, weight: Tensor, bias: Tensor | None, x: Tensor | None) -> Tensor:
        ctx.save_for_backward(h, weight)
        return onednn(h, weight, bias, x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        h, weight = ctx.saved_tensors
        gradient = gradients[0].flatten(0, -2)
        rows, (d_out, d_in) = h.flatten(0, -2), weight.shape
        to_h, to_weight, to_bias, to_x = ctx.needs_input_grad
        d_h = onednn(gradient, weight.t(), None).view_as(h) if to_h else None
        if not to_weight:
            d_weight = None
        elif d_out <= d_in:  # a product with few rows is the faster one
            d_weight = onednn(gradient.t(), rows.t(), None)
        else:
            d_weight = onednn(rows.t(), gradient.t(), None).t()
        return d_h, d_weight, gradient.sum(0) if to_bias else None, gradients[0] if to_x else None


def linear(h: Tensor, weight: Tensor, bias: Tensor | None = None, plus: Tensor | None = None) -> Tensor:
    """h W^T + bias (+ plus): one pass over memory instead of three."""
    single = h.device.type == "cpu" and h.dtype == torch.float32 and h.numel() > 0
    if single and torch.is_grad_enabled() and torch.backends.mkldnn.is_available():
        return Product.apply(h, weight, bias, plus)
    if plus is None or bias is None:
        y = F.linear(h, weight, bias)
        return y if plus is None else y + plus
    return (plus.flatten(0, -2) + bias).addmm_(h.flatten(0, -2), weight.t()).view_as(plus)


class MLP(nn.Module):
    """x + W_2 GELU(W_1 LN(x))."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.expand = nn.Linear(WIDTH, HIDDEN)
        self.contract = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(linear(self.norm(x), self.expand.weight, self.expand.bias))
        return linear(hidden, self.contract.weight, self.contract.bias, plus=x)


class SelfAttention(nn.Module):
    """x + attention of LN(x) to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, keep: Tensor | None = None) -> Tensor:
        q, k, v = linear(self.norm(x), self.qkv.weight, self.qkv.bias).split(WIDTH, dim=-1)
        return linear(attend(q, k, v, keep), self.out.weight, self.out.bias, plus=x)


class CrossAttention(nn.Module):
    """x + attention of LN(x) to the memory.

    Two of the biases cost nothing: one added to every key changes no softmax, and one added to
    every value passes through it, so it joins the output's bias.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q = nn.Linear(WIDTH, WIDTH)
        self.kv = nn.Linear(WIDTH, 2 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def output_bias(self) -> Tensor:
        return torch.addmv(self.out.bias, self.out.weight, self.kv.bias[WIDTH:])

    def forward(self, x: Tensor, memory: Tensor, keep: Tensor, of: Tensor | None = None) -> Tensor:
        """`of` (B,): the memory that each chunk attends to, keys already in that order; without it chunks that share
        a memory stand side by side."""
        kv = linear(memory, self.kv.weight)
        k, v = (kv if of is None else kv.index_select(0, of)).split(WIDTH, dim=-1)
        q = linear(self.norm(x), self.q.weight, self.q.bias).reshape(len(k), -1, WIDTH)
        return linear(attend(q, k, v, keep).reshape(x.shape), self.out.weight, self.output_bias(), plus=x)


class EncoderLayer(nn.Module):
    """Pre-LN self-attention and MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = SelfAttention()
        self.mlp = MLP()

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        return self.mlp(self.attention(x, keep))


class DenoiserBlock(nn.Module):
    """Pre-LN self-attention over actions, cross-attention to state and context, MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attention = SelfAttention()
        self.cross_attention = CrossAttention()
        self.mlp = MLP()

    def forward(self, x: Tensor, memory: Tensor, keep: Tensor, of: Tensor | None = None) -> Tensor:
        return self.mlp(self.cross_attention(self.self_attention(x), memory, keep, of))


class ActionTransformer(nn.Module):
    """MemCorr-DP: eps_hat(z_t, t, s, r) with one state token and 64 context tokens as memory."""

    def __init__(self, state_dim: int = SPEC.state_dim, action_dim: int = SPEC.action_dim) -> None:
        super().__init__()
        self.token_projection = nn.Linear(SPEC.token_fields, WIDTH)
        self.point_embedding = nn.Parameter(torch.randn(SPEC.points, WIDTH) * 0.02)
        self.offset_embedding = nn.Parameter(torch.randn(len(SPEC.future_offsets), WIDTH) * 0.02)
        self.encoder = nn.ModuleList(EncoderLayer() for _ in range(ENCODER_LAYERS))
        self.state_mlp = mlp(state_dim, WIDTH, WIDTH)
        self.action_projection = nn.Linear(action_dim, WIDTH)
        self.action_embedding = nn.Parameter(torch.randn(SPEC.chunk, WIDTH) * 0.02)
        self.time_mlp = mlp(WIDTH, HIDDEN, WIDTH)
        self.blocks = nn.ModuleList(DenoiserBlock() for _ in range(DENOISER_BLOCKS))
        self.norm_out = nn.LayerNorm(WIDTH)
        self.out = nn.Linear(WIDTH, action_dim)

    def context(self, condition: Condition) -> Tensor:
        """The 64 x 18 tokens to encode."""
        assert condition.tokens is not None
        return condition.tokens

    def encode(self, tokens: Tensor, keep: Tensor) -> Tensor:
        """Tokens (B, 64, 18) to context (B, 64, 128). Rows where `keep` is false are meaningless."""
        position = (self.point_embedding[:, None] + self.offset_embedding).reshape(SPEC.tokens, WIDTH)
        x = self.token_projection(tokens) + position
        # A sample without any token still needs a finite softmax; nothing reads its result.
        keys = keep | ~keep.any(dim=1, keepdim=True)
        for layer in self.encoder:
            x = layer(x, keys)
        return x

    def embed_time(self, t: Tensor) -> Tensor:
        return self.time_mlp(sinusoidal_embedding(t, WIDTH))

    def denoise(
        self, z_t: Tensor, t: Tensor, state: Tensor, context: Tensor, keep: Tensor, of: Tensor | None = None
    ) -> Tensor:
        """eps_hat (B, 16, 4) from the encoded context; the state token is always a key.

        `of` (B,) says which context each noisy chunk has. Without it there are equally many for each context, one
        context's after the other's.
        """
        memory = torch.cat([self.state_mlp(state)[:, None], context], dim=1)
        keys = F.pad(keep if of is None else keep[of], (1, 0), value=True)
        x = self.action_projection(z_t) + self.action_embedding + self.embed_time(t)[:, None]
        for block in self.blocks:
            x = block(x, memory, keys, of)
        return self.out(self.norm_out(x))

    def forward(self, z_t: Tensor, t: Tensor, condition: Condition, of: Tensor | None = None) -> Tensor:
        tokens, keep = self.context(condition), condition.keep
        present = keep.any(dim=1)
        if present.all():
            context = self.encode(tokens, keep)
        else:  # a dropped condition costs nothing: it is never encoded
            context = tokens.new_zeros(*keep.shape, WIDTH)
            context[present] = self.encode(tokens[present], keep[present])
        return self.denoise(z_t, t, condition.state, context, keep, of)


class VisualTransformer(ActionTransformer):
    """Visual-DP-Transformer: 64 image patches plus a task embedding in place of the relations."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(IMAGE_CHANNELS, SPEC.token_fields, PATCH, stride=PATCH)
        self.task_embedding = nn.Linear(len(TASKS), SPEC.token_fields)

    def context(self, condition: Condition) -> Tensor:
        assert condition.image is not None and condition.task is not None
        patches = self.patches(condition.image).flatten(2).transpose(1, 2)
        return patches + self.task_embedding(condition.task)[:, None]


def parameter_total(network: nn.Module) -> int:
    return sum(p.numel() for p in network.parameters() if p.requires_grad)
