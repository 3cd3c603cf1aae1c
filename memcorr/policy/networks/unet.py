"""Visual-DP-U-Net: a conventional Diffusion Policy (1,556,228 parameters).

The table's literal reading is 64 parameters short of its total. A LayerNorm(32) inside the state MLP, as in
the image head, makes it exact; so would one over state and task together, or one on each head. The paper does not say.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...spec import SPEC, TASKS
from ..condition import Condition
from .transformer import IMAGE_CHANNELS, sinusoidal_embedding

IMAGE_WIDTHS = (24, 32, 48, 64, 96)
STATE_WIDTH, STATE_FEATURES, TASK_FEATURES = 32, 24, 8
TIME_WIDTH = 64
GLOBAL = IMAGE_WIDTHS[-1] + STATE_FEATURES + TASK_FEATURES
WIDTHS = (48, 96, 144)
GROUPS = 4


def image_block(d_in: int, d_out: int, kernel: int) -> nn.Sequential:
    convolution = nn.Conv2d(d_in, d_out, kernel, stride=2, padding=kernel // 2)
    return nn.Sequential(convolution, nn.GroupNorm(GROUPS, d_out), nn.Mish())


def action_block(d_in: int, d_out: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv1d(d_in, d_out, 3, padding=1), nn.GroupNorm(GROUPS, d_out), nn.Mish())


class ResidualBlock(nn.Module):
    """Two convolutions; time and global condition scale and shift the features between them (FiLM)."""

    def __init__(self, d_in: int, d_out: int) -> None:
        super().__init__()
        self.first = action_block(d_in, d_out)
        self.film = nn.Sequential(nn.Mish(), nn.Linear(TIME_WIDTH + GLOBAL, 2 * d_out))
        self.second = action_block(d_out, d_out)
        self.shortcut = nn.Identity() if d_in == d_out else nn.Conv1d(d_in, d_out, 1)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        scale, bias = self.film(condition)[..., None].chunk(2, dim=1)
        return self.second(scale * self.first(x) + bias) + self.shortcut(x)


class VisualUNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        pairs = list(zip((IMAGE_CHANNELS, *IMAGE_WIDTHS), IMAGE_WIDTHS, strict=False))
        convolutions = [image_block(a, b, 5 if i == 0 else 3) for i, (a, b) in enumerate(pairs)]
        features = IMAGE_WIDTHS[-1]
        self.image_encoder = nn.Sequential(
            *convolutions,
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(features, features),
            nn.LayerNorm(features),
            nn.Mish(),
        )
        self.state_encoder = nn.Sequential(
            nn.Linear(SPEC.state_dim, STATE_WIDTH),
            nn.LayerNorm(STATE_WIDTH),
            nn.Mish(),
            nn.Linear(STATE_WIDTH, STATE_FEATURES),
        )
        self.task_encoder = nn.Linear(len(TASKS), TASK_FEATURES)
        self.time_mlp = nn.Sequential(
            nn.Linear(TIME_WIDTH, 4 * TIME_WIDTH), nn.Mish(), nn.Linear(4 * TIME_WIDTH, TIME_WIDTH)
        )
        levels = list(zip((SPEC.action_dim, *WIDTHS), WIDTHS, strict=False))
        self.down = nn.ModuleList(
            nn.ModuleList([ResidualBlock(a, b), ResidualBlock(b, b), self._downsample(b, last=b == WIDTHS[-1])])
            for a, b in levels
        )
        self.middle = nn.ModuleList([ResidualBlock(WIDTHS[-1], WIDTHS[-1]) for _ in range(2)])
        self.up = nn.ModuleList(
            nn.ModuleList([ResidualBlock(2 * b, a), ResidualBlock(a, a), nn.ConvTranspose1d(a, a, 4, 2, 1)])
            for a, b in reversed(levels[1:])
        )
        self.out = nn.Sequential(action_block(WIDTHS[0], WIDTHS[0]), nn.Conv1d(WIDTHS[0], SPEC.action_dim, 1))

    @staticmethod
    def _downsample(width: int, last: bool) -> nn.Module:
        return nn.Identity() if last else nn.Conv1d(width, width, 3, stride=2, padding=1)

    def encode(self, condition: Condition) -> Tensor:
        """The global condition (B, 128): image, robot state and task. It does not depend on t."""
        assert condition.image is not None and condition.task is not None
        image = self.image_encoder(condition.image.contiguous(memory_format=torch.channels_last))  # faster on CPUs
        return torch.cat([image, self.state_encoder(condition.state), self.task_encoder(condition.task)], dim=1)

    def denoise(self, z_t: Tensor, t: Tensor, observation: Tensor) -> Tensor:
        condition = torch.cat([self.time_mlp(sinusoidal_embedding(t, TIME_WIDTH)), observation], dim=1)
        x = z_t.transpose(1, 2)
        skips = []
        for level in self.down:
            first, second, downsample = level.children()
            x = second(first(x, condition), condition)
            skips.append(x)
            x = downsample(x)
        for block in self.middle:
            x = block(x, condition)
        for level in self.up:
            first, second, upsample = level.children()
            x = upsample(second(first(torch.cat([x, skips.pop()], dim=1), condition), condition))
        return self.out(x).transpose(1, 2)

    def forward(self, z_t: Tensor, t: Tensor, condition: Condition) -> Tensor:
        return self.denoise(z_t, t, self.encode(condition))
