"""The embedded matcher's network: where are these pixels of image A in image B?

A small convolutional pyramid (strides 2, 4, 8) encodes each image once. At stride 8 attention lets
the two images look at each other, and every asked-for pixel is located by a softmax over all of B.
Two refiners then correct the location from local correlations at stride 4 and stride 2, twice each and
freed of the bias they show on A itself. At last the answer is asked back, from B to A, and a small head
that has seen every step says how likely it is right. Only the asked-for pixels are ever refined.

Coordinates are pixels of the 128x128 crop; a feature map of stride s has its cell (i, j) centred on
pixel s * (i + 0.5) - 0.5.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SIZE = 128
WIDTHS = {2: 32, 4: 64, 8: 128}
LAYERS = 3
HEADS = 4
RADIUS = 3  # of a refiner's correlation window, in feature cells
EVIDENCE = 128  # width of a refiner's hidden layer


def conv(c_in: int, c_out: int, kernel: int = 3, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(c_in, c_out, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(c_out), nn.ReLU(inplace=True)
    )


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = conv(width, width)
        self.second = nn.Sequential(nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)).add_(x).relu_()


class Attention(nn.Module):
    """Pre-norm attention among tokens (B, n, C) of images, then an MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        y = x.flatten(0, -2) + self.out.bias  # the product is added in place: one pass over memory, not three
        x = y.addmm_(attended.flatten(2).flatten(0, -2), self.out.weight.t()).view_as(x)
        return x + self.mlp(self.norm_mlp(x))


class SelfAttention(Attention):
    """Every image looks at itself.

    The position code steers the attention but never enters what is passed on: descriptors that
    carried it would match by place instead of by look.
    """

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        h = self.norm(x)
        placed = h + position
        return self.finish(x, _attend(self.q(placed), self.k(placed), self.v(h)))


class CrossAttention(Attention):
    """The first half of the images looks at the second half, and the other way round."""

    def forward(self, x: Tensor) -> Tensor:
        h, half = self.norm(x), len(x) // 2
        q, k, v = (layer(h).split(half) for layer in (self.q, self.k, self.v))
        return self.finish(x, torch.cat([_attend(q[0], k[1], v[1]), _attend(q[1], k[0], v[0])]))


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """(B, n, C) -> (B, n, heads, C / heads)."""
    q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)


def sample(features: Tensor, uv: Tensor, stride: int) -> Tensor:
    """Bilinear samples of features (B, C, H, W) at crop pixels (B, N, 2) -> (B, N, C), border padding."""
    grid = 2 * (uv + 0.5) / SIZE - 1  # align_corners=False: cell centres at s * (i + 0.5) - 0.5
    return F.grid_sample(features, grid[:, :, None], padding_mode="border", align_corners=False)[..., 0].mT


@dataclass(frozen=True)
class Stage:
    """One refinement."""

    uv: Tensor  # (B, N, 2) crop pixels: the corrected location
    origin: Tensor  # (B, N, 2) where the window was centred
    correlation: Tensor  # (B, N, 49) logits over the window, row-major
    stride: int
    evidence: Tensor  # (B, N, EVIDENCE) what the correction was computed from

    @property
    def move(self) -> Tensor:
        """(B, N, 2) the correction, in feature cells."""
        return (self.uv - self.origin) / self.stride


class Refiner(nn.Module):
    """Corrects locations from the correlation of A's descriptor with a window of B's."""

    def __init__(self, stride: int) -> None:
        super().__init__()
        self.stride, width = stride, WIDTHS[stride]
        offsets = torch.arange(-RADIUS, RADIUS + 1.0)
        self.window: Tensor
        self.register_buffer("window", torch.cartesian_prod(offsets, offsets).flip(-1), persistent=False)  # (49, 2)
        self.mlp = nn.Sequential(
            nn.Linear(len(self.window) + 2 * width + 2, EVIDENCE), nn.GELU(), nn.Linear(EVIDENCE, EVIDENCE), nn.GELU()
        )
        self.shift = nn.Linear(EVIDENCE, 2)
        nn.init.zeros_(self.shift.weight)
        nn.init.zeros_(self.shift.bias)

    def forward(self, descriptor: Tensor, features_b: Tensor, uv: Tensor, bias: Tensor | float = 0.0) -> Stage:
        """Descriptors of A (B, N, C), features of B, current locations (B, N, 2) -> better ones, less `bias`."""
        n = uv.shape[1]
        around = uv[:, :, None] + self.stride * self.window
        patch = sample(features_b, around.flatten(1, 2), self.stride).unflatten(1, (n, -1))  # (B, N, 49, C)
        correlation = torch.einsum("bnc,bnwc->bnw", descriptor, patch) * descriptor.shape[-1] ** -0.5
        softargmax = correlation.softmax(-1) @ self.window
        here = patch[:, :, len(self.window) // 2]
        h = self.mlp(torch.cat([correlation, descriptor, here, softargmax], dim=-1))
        return Stage(uv + self.stride * (softargmax + self.shift(h)) - bias, uv, correlation, self.stride, h)


@dataclass(frozen=True)
class Pyramid:
    """What is kept of an image: its feature maps, finest first. The coarsest has looked at itself once."""

    f2: Tensor
    f4: Tensor
    f8: Tensor


@dataclass(frozen=True)
class Located:
    logits: Tensor  # (B, N, 256) over the cells of B, stride 8
    stages: list[Stage]  # every refinement in turn
    trust: Tensor  # (B, N) logit of being right

    @property
    def uv(self) -> Tensor:
        """The answer, (B, N, 2) crop pixels."""
        return self.stages[-1].uv


class MatchNetwork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        w2, w4, w8 = WIDTHS[2], WIDTHS[4], WIDTHS[8]
        self.to2 = nn.Sequential(conv(3, w2, 5, 2), Residual(w2))
        self.to4 = nn.Sequential(conv(w2, w4, 3, 2), Residual(w4), Residual(w4))
        self.to8 = nn.Sequential(conv(w4, w8, 3, 2), Residual(w8))
        self.position: Tensor
        self.register_buffer("position", sinusoids(SIZE // 8, w8), persistent=False)
        self.norm8 = nn.LayerNorm(w8)
        self.self_attention = nn.ModuleList(SelfAttention(w8) for _ in range(LAYERS))
        self.cross_attention = nn.ModuleList(CrossAttention(w8) for _ in range(LAYERS))
        self.down4 = nn.Conv2d(w8, w4, 1)
        self.merge4 = nn.Sequential(conv(w4, w4), nn.Conv2d(w4, w4, 1))
        self.down2 = nn.Conv2d(w4, w2, 1)
        self.merge2 = nn.Sequential(conv(w2, w2), nn.Conv2d(w2, w2, 1))
        self.norm4, self.norm2 = nn.LayerNorm(w4), nn.LayerNorm(w2)
        self.refine4, self.refine2 = Refiner(4), Refiner(2)
        steps = 6  # four forwards, two back; each gives its evidence, its move and the move's size
        self.trust = nn.Sequential(nn.Linear(steps * (EVIDENCE + 4) + 4, 64), nn.GELU(), nn.Linear(64, 1))
        self.log_temperature = nn.Parameter(torch.tensor(0.0))
        self.calibration: Tensor
        self.register_buffer("calibration", torch.tensor([0.0, 1.0, 0.0, 0.0] * 2))  # of `trust_evidence`: none

    def encode(self, images: Tensor) -> Pyramid:
        """RGB in [0, 1], (B, 3, 128, 128)."""
        f2 = self.to2((images - 0.45) / 0.25)
        f4 = self.to4(f2)
        f8 = self.to8(f4)
        tokens = f8.flatten(2).mT
        return Pyramid(f2, f4, self.self_attention[0](tokens, self.position).mT.unflatten(2, f8.shape[2:]))

    def _look(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """At each other, and in between at themselves."""
        x = torch.cat([a, b])
        for layer, (own, other) in enumerate(zip(self.self_attention, self.cross_attention, strict=True)):
            if layer > 0:
                x = own(x, self.position)
            x = other(x)
        a, b = x.chunk(2)
        return a, b

    def _merge(self, tokens: Tensor, image: Pyramid) -> tuple[Tensor, Tensor]:
        """Descriptors at strides 4 and 2 that know the context of both images."""
        f8 = tokens.mT.unflatten(2, (SIZE // 8, SIZE // 8))
        g4 = self.merge4(F.interpolate(self.down4(f8), scale_factor=2.0, mode="bilinear").add_(image.f4))
        g2 = self.merge2(F.interpolate(self.down2(g4), scale_factor=2.0, mode="bilinear").add_(image.f2))
        # Descriptors of one length: otherwise correlations start out flat and the refiners learn late.
        return over_channels(self.norm4, g4), over_channels(self.norm2, g2)

    def locate(self, image_a: Pyramid, image_b: Pyramid, uv_a: Tensor) -> Located:
        a, b = (self.norm8(x) for x in self._look(*(image.f8.flatten(2).mT for image in (image_a, image_b))))
        (a4, a2), (b4, b2) = self._merge(a, image_a), self._merge(b, image_b)
        a8 = a.mT.unflatten(2, (SIZE // 8, SIZE // 8))
        query = sample(a8, uv_a, 8)
        logits = query @ b.mT * (self.log_temperature.exp() * b.shape[-1] ** -0.5)
        uv = around_the_peak(logits).detach()
        stages: list[Stage] = []
        for refine, own, other in ((self.refine4, a4, b4), (self.refine2, a2, b2)):
            descriptor = sample(own, uv_a, refine.stride)
            # Asked for a pixel of A in A itself, where the truth is known, a refiner is a little off, and
            # much the same in B. Practice does without this correction: there the refiners are to learn.
            bias = 0.0 if self.training else refine(descriptor, own, uv_a).uv - uv_a
            for _ in range(2):
                stages.append(refine(descriptor, other, uv, bias))
                uv = stages[-1].uv.detach()
        back = [self.refine4(sample(b4, uv, 4), a4, uv_a), self.refine2(sample(b2, uv, 2), a2, uv_a)]
        steps = [x for stage in (*stages, *back) for x in (stage.evidence, stage.move, stage.move.abs())]
        probability = logits.softmax(-1)
        peaks = torch.cat([probability.topk(3).values, probability.square().sum(-1, keepdim=True)], dim=-1)
        return Located(logits, stages, self.trust(torch.cat([*steps, peaks], dim=-1))[..., 0])


def over_channels(norm: nn.LayerNorm, x: Tensor) -> Tensor:
    return norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def sinusoids(side: int, width: int) -> Tensor:
    """Position code of a side x side grid, row-major: (side * side, width), half for y, half for x."""
    frequency = torch.pi * 2.0 ** torch.linspace(0, 3, width // 4)
    angle = torch.linspace(0, 1, side)[:, None] * frequency
    line = torch.cat([angle.sin(), angle.cos()], dim=-1)
    y, x = (line[i] for i in torch.cartesian_prod(torch.arange(side), torch.arange(side)).T)
    return torch.cat([y, x], dim=-1)


def around_the_peak(logits: Tensor) -> Tensor:
    """Expected location (B, N, 2) under the softmax, within one cell of its peak."""
    side = SIZE // 8
    cells = torch.cartesian_prod(torch.arange(side), torch.arange(side)).flip(-1).to(logits)  # (256, 2) as (x, y)
    peak = cells[logits.argmax(-1)]
    near = ((cells - peak[..., None, :]).abs() <= 1).all(-1)
    probability = logits.masked_fill(~near, float("-inf")).softmax(-1)
    return 8 * (probability @ cells + 0.5) - 0.5
