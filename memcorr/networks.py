"""The two Transformer policies of the table "Trainable policy architectures".

`ActionTransformer` is the complete MemCorr-DP network (1,612,804 parameters): relation encoder,
state, time and action inputs, four denoiser blocks. `VisualTransformer` puts an image tokenizer
in front of the same core (1,618,636). `unet.py` holds the third network.

The context does not depend on the timestep, so `encode` and `denoise` are separate: the sampler
encodes once.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .conditions import Condition
from .protocol import PROTOCOL, TASKS
from .relations import TOKEN_FIELDS, TOKENS

WIDTH, HEADS, HIDDEN = 128, 4, 512
ENCODER_LAYERS, DENOISER_BLOCKS = 2, 4
IMAGE_SIZE, IMAGE_CHANNELS, PATCH = 64, 5, 8


def sinusoidal_embedding(t: Tensor, dim: int) -> Tensor:
    """Timesteps (B,) to (B, dim): sines, then cosines, of geometric frequencies 1 .. 1e-4."""
    half = dim // 2
    frequency = torch.exp(torch.arange(half, device=t.device) * (-math.log(10000.0) / (half - 1)))
    angle = t[:, None].float() * frequency
    return torch.cat([angle.sin(), angle.cos()], dim=-1)


def mlp(d_in: int, d_hidden: int, d_out: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(d_in, d_hidden), nn.GELU(), nn.Linear(d_hidden, d_out))


def heads(x: Tensor, count: int) -> tuple[Tensor, ...]:
    """(B, n, count * 128) packed projections to `count` tensors (B, 4, n, 32)."""
    B, n, _ = x.shape
    return x.view(B, n, count, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4).unbind(0)


def attend(q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None = None) -> Tensor:
    """Softmax attention over (B, 4, n, 32) heads; `keep` (B, keys) marks keys that count. To (B, n, 128).

    A key that does not count has weight exactly 0, so its content cannot reach the output.
    """
    bias = None if keep is None else torch.zeros_like(keep, dtype=q.dtype).masked_fill_(~keep, -torch.inf)
    out = F.scaled_dot_product_attention(q, k, v, None if bias is None else bias[:, None, None, :])
    return out.transpose(1, 2).flatten(2)


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, keep: Tensor | None = None) -> Tensor:
        q, k, v = heads(self.qkv(x), 3)
        return self.out(attend(q, k, v, keep))


class CrossAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(WIDTH, WIDTH)
        self.kv = nn.Linear(WIDTH, 2 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, memory: Tensor, keep: Tensor) -> Tensor:
        (q,) = heads(self.q(x), 1)
        k, v = heads(self.kv(memory), 2)
        return self.out(attend(q, k, v, keep))


class EncoderLayer(nn.Module):
    """Pre-LN self-attention and MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(WIDTH)
        self.attention = SelfAttention()
        self.norm_mlp = nn.LayerNorm(WIDTH)
        self.mlp = mlp(WIDTH, HIDDEN, WIDTH)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        x = x + self.attention(self.norm_attention(x), keep)
        return x + self.mlp(self.norm_mlp(x))


class DenoiserBlock(nn.Module):
    """Pre-LN self-attention over actions, cross-attention to state and context, MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_self = nn.LayerNorm(WIDTH)
        self.self_attention = SelfAttention()
        self.norm_cross = nn.LayerNorm(WIDTH)
        self.cross_attention = CrossAttention()
        self.norm_mlp = nn.LayerNorm(WIDTH)
        self.mlp = mlp(WIDTH, HIDDEN, WIDTH)

    def forward(self, x: Tensor, memory: Tensor, keep: Tensor) -> Tensor:
        x = x + self.self_attention(self.norm_self(x))
        x = x + self.cross_attention(self.norm_cross(x), memory, keep)
        return x + self.mlp(self.norm_mlp(x))


class ActionTransformer(nn.Module):
    """MemCorr-DP: eps_hat(z_t, t, s, r) with one state token and 64 context tokens as memory."""

    def __init__(self) -> None:
        super().__init__()
        self.token_projection = nn.Linear(TOKEN_FIELDS, WIDTH)
        self.point_embedding = nn.Parameter(torch.randn(PROTOCOL.points, WIDTH) * 0.02)
        self.offset_embedding = nn.Parameter(torch.randn(len(PROTOCOL.future_offsets), WIDTH) * 0.02)
        self.encoder = nn.ModuleList(EncoderLayer() for _ in range(ENCODER_LAYERS))
        self.state_mlp = mlp(PROTOCOL.state_dim, WIDTH, WIDTH)
        self.action_projection = nn.Linear(PROTOCOL.action_dim, WIDTH)
        self.action_embedding = nn.Parameter(torch.randn(PROTOCOL.chunk, WIDTH) * 0.02)
        self.time_mlp = mlp(WIDTH, HIDDEN, WIDTH)
        self.blocks = nn.ModuleList(DenoiserBlock() for _ in range(DENOISER_BLOCKS))
        self.norm_out = nn.LayerNorm(WIDTH)
        self.out = nn.Linear(WIDTH, PROTOCOL.action_dim)

    def context(self, condition: Condition) -> Tensor:
        """The 64 x 18 tokens to encode."""
        assert condition.tokens is not None
        return condition.tokens

    def encode(self, tokens: Tensor, keep: Tensor) -> Tensor:
        """Tokens (B, 64, 18) to context (B, 64, 128). Rows where `keep` is false are meaningless."""
        position = (self.point_embedding[:, None] + self.offset_embedding).reshape(TOKENS, WIDTH)
        x = self.token_projection(tokens) + position
        # A sample without any token still needs a finite softmax; nothing reads its result.
        keys = keep | ~keep.any(dim=1, keepdim=True)
        for layer in self.encoder:
            x = layer(x, keys)
        return x

    def embed_time(self, t: Tensor) -> Tensor:
        return self.time_mlp(sinusoidal_embedding(t, WIDTH))

    def denoise(self, z_t: Tensor, t: Tensor, state: Tensor, context: Tensor, keep: Tensor) -> Tensor:
        """eps_hat (B, 16, 4) from the encoded context; the state token is always a key."""
        memory = torch.cat([self.state_mlp(state)[:, None], context], dim=1)
        keys = F.pad(keep, (1, 0), value=True)
        x = self.action_projection(z_t) + self.action_embedding + self.embed_time(t)[:, None]
        for block in self.blocks:
            x = block(x, memory, keys)
        return self.out(self.norm_out(x))

    def forward(self, z_t: Tensor, t: Tensor, condition: Condition) -> Tensor:
        context = self.encode(self.context(condition), condition.keep)
        return self.denoise(z_t, t, condition.state, context, condition.keep)


class VisualTransformer(ActionTransformer):
    """Visual-DP-Transformer: 64 image patches plus a task embedding in place of the relations."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(IMAGE_CHANNELS, TOKEN_FIELDS, PATCH, stride=PATCH)
        self.task_embedding = nn.Linear(len(TASKS), TOKEN_FIELDS)

    def context(self, condition: Condition) -> Tensor:
        assert condition.image is not None and condition.task is not None
        patches = self.patches(condition.image).flatten(2).transpose(1, 2)
        return patches + self.task_embedding(condition.task)[:, None]


def parameter_total(network: nn.Module) -> int:
    return sum(p.numel() for p in network.parameters() if p.requires_grad)
