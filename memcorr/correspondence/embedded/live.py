"""The network laid out for a decision that waits for it: the same answers from fewer products and fewer calls.

`MatchNetwork` is what is trained and what every number here is tested against. What changes is rounding alone:
- Of a reference everything is kept that does not depend on the live image, down to the first queries, keys and values.
- The 49 samples of a refiner's window share one fraction of a cell, and correlation is linear: 64 cells are
  correlated and 64 numbers interpolated, where 49 vectors would be interpolated and correlated.
- The window around a pixel in its own image is read once: for the descriptor, for the bias and for the way back.
- Linear maps that follow each other are one: position codes join biases, the mean that a normalisation would
  subtract is subtracted from the weights before it, 1x1 convolutions are products of matrices.

Images are rows of cells, row-major, channels last: (B * side * side, C). Image a comes first, then b.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from .network import HEADS, RADIUS, SIZE, WIDTHS, Attention, MatchNetwork, Refiner, SelfAttention

SIDE, WIDTH = SIZE // 8, WIDTHS[8]
CELLS = 2 * RADIUS + 2  # on a side: what the samples of a window lie between
MIDDLE = slice(RADIUS, RADIUS + 2)  # of these, around the pixel itself


@dataclass(frozen=True)
class Encoded:
    """What is kept of images; feature maps (B, side, side, C), tokens (B, 256, C)."""

    f2: Tensor
    f4: Tensor
    tokens: Tensor  # of stride 8; they have looked at themselves once
    qkv: Tensor  # (B, 256, 3 C) with which they look at another image first

    def each(self) -> list[Encoded]:
        return [Encoded(*parts) for parts in zip(self.f2, self.f4, self.tokens, self.qkv, strict=True)]

    @staticmethod
    def join(images: list[Encoded]) -> Encoded:
        """The opposite of `each`; one image is not copied."""
        columns = zip(*((e.f2, e.f4, e.tokens, e.qkv) for e in images), strict=True)
        return Encoded(*(c[0][None] if len(c) == 1 else torch.stack(c) for c in columns))


@dataclass(frozen=True)
class Affine:
    """y = h W + b. W is stored (in, out): small products with it are up to twice as fast."""

    weight: Tensor
    bias: Tensor

    @staticmethod
    def of(*layers: nn.Module) -> Affine:
        """Linear layers or 1x1 convolutions of one input, beside each other."""
        weights = [layer.get_parameter("weight").flatten(1).t() for layer in layers]
        biases: list[Tensor] = [layer.get_parameter("bias") for layer in layers]
        return Affine(torch.cat(weights, dim=1).contiguous(), torch.cat(biases).contiguous())

    def then(self, following: Affine) -> Affine:
        """Both in one."""
        return Affine(self.weight @ following.weight, self.bias @ following.weight + following.bias)

    def beside(self, other: Affine) -> Affine:
        return Affine(torch.cat([self.weight, other.weight], dim=1), torch.cat([self.bias, other.bias]))

    def centred(self) -> Affine:
        """Less the mean over channels."""
        return Affine(self.weight - self.weight.mean(dim=1, keepdim=True), self.bias - self.bias.mean())

    def __call__(self, h: Tensor) -> Tensor:
        return torch.addmm(self.bias, h, self.weight)


class Layer:
    """One attention layer over rows of tokens (images * 256, C)."""

    def __init__(self, layer: Attention, position: Tensor) -> None:
        self.norm, self.norm_mlp = layer.norm, layer.norm_mlp
        qkv = Affine.of(layer.q, layer.k, layer.v)
        placed = position @ qkv.weight[:, : 2 * WIDTH] if isinstance(layer, SelfAttention) else position[:, :0]
        self.weight, self.bias = qkv.weight, F.pad(placed, (0, 3 * WIDTH - placed.shape[1])) + qkv.bias  # (256, 3 C)
        self.out = Affine.of(layer.out)
        self.expand, self.contract = Affine.of(layer.mlp[0]), Affine.of(layer.mlp[2])

    def qkv(self, x: Tensor) -> Tensor:
        """(images, 256, 3 C)."""
        h = _norm(x, self.norm).view(-1, SIDE**2, WIDTH)
        return torch.baddbmm(self.bias, h, self.weight.expand(len(h), -1, -1))

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        x = (x + self.out.bias).addmm_(attended, self.out.weight)
        hidden = F.gelu(self.expand(_norm(x, self.norm_mlp)))
        return x.add_(self.contract.bias).addmm_(hidden, self.contract.weight)


def _norm(x: Tensor, norm: nn.LayerNorm) -> Tensor:
    return torch.layer_norm(x, norm.normalized_shape, norm.weight, norm.bias, norm.eps)


def _norm_centred(x: Tensor, norm: nn.LayerNorm) -> Tensor:
    """As `norm`, of rows whose mean is zero; in place."""
    length = torch.linalg.vector_norm(x, dim=1, keepdim=True)
    scale = length.square_().mul_(1 / x.shape[1]).add_(norm.eps).rsqrt_()
    return torch.addcmul(norm.bias, x.mul_(scale), norm.weight)


def _attend(of: Tensor, to: Tensor) -> Tensor:
    """Queries of some images, keys and values of others (B, 256, 3 C) -> (B * 256, C)."""
    q, k, v = (
        t.narrow(-1, first * WIDTH, WIDTH).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        for t, first in ((of, 0), (to, 1), (to, 2))
    )
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(-1, WIDTH)


class Maps:
    """Descriptors of one stride of all images, and reading them between cells."""

    def __init__(self, rows: Tensor, stride: int) -> None:
        self.rows, self.stride, self.side = rows, stride, SIZE // stride

    def around(self, uv: Tensor, image: Tensor, near: Tensor) -> tuple[Tensor, Tensor]:
        """The cells (n, k, k, C) at offsets `near` (k) of crop pixels (n, 2) in images (n, 1), and the fractions
        (n, 2, 1, 1) by which the pixels lie beyond the cell of offset 0. Beyond the border the border goes on."""
        at = (uv + 0.5) / self.stride - 0.5
        first = at.floor()
        cell = (first.long()[..., None] + near).clamp_(0, self.side - 1)  # (n, 2, k): columns, rows
        index = ((image * self.side + cell[:, 1]) * self.side)[:, :, None] + cell[:, None, 0]
        found = self.rows.index_select(0, index.flatten())
        return found.view(*index.shape, -1), (at - first)[:, :, None, None]

    def sample(self, uv: Tensor, image: Tensor) -> Tensor:
        """Between four cells: (n, C)."""
        cells, fraction = self.around(uv, image, torch.arange(2, device=uv.device))
        return between(cells, fraction)[:, 0, 0]


def between(cells: Tensor, fraction: Tensor) -> Tensor:
    """Bilinear in cells (n, k, k, ...), all by the same fraction (n, 2, 1, 1) -> (n, k - 1, k - 1, ...)."""
    x, y = (fraction[:, i].view(-1, *(1,) * (cells.dim() - 1)) for i in range(2))
    across = torch.lerp(cells[:, :, :-1], cells[:, :, 1:], x)
    return torch.lerp(across[:, :-1], across[:, 1:], y)


@dataclass(frozen=True)
class Window:
    """Cells around n pixels of an image."""

    cells: Tensor  # (n, 8, 8, C)
    fraction: Tensor  # (n, 2, 1, 1)
    here: Tensor  # (n, C) at the pixels themselves

    def part(self, rows: slice) -> Window:
        return Window(self.cells[rows], self.fraction[rows], self.here[rows])


@dataclass(frozen=True)
class Step:
    """A refiner's answer for n pixels."""

    move: Tensor  # (n, 2) in cells
    evidence: Tensor  # (n, EVIDENCE)


class LiveRefiner:
    def __init__(self, refiner: Refiner) -> None:
        self.stride, self.window = refiner.stride, refiner.window
        self.scale = WIDTHS[self.stride] ** -0.5
        self.first, self.second = Affine.of(refiner.mlp[0]), Affine.of(refiner.mlp[2])
        self.shift = Affine.of(refiner.shift)
        self.near = torch.arange(-RADIUS, RADIUS + 2, device=self.window.device)

    def look(self, maps: Maps, uv: Tensor, image: Tensor) -> Window:
        cells, fraction = maps.around(uv, image, self.near)
        return Window(cells, fraction, between(cells[:, MIDDLE, MIDDLE], fraction)[:, 0, 0])

    def step(self, descriptor: Tensor, window: Window) -> Step:
        near = torch.bmm(descriptor[:, None], window.cells.flatten(1, 2).mT).view(-1, CELLS, CELLS)
        correlation = between(near, window.fraction).flatten(1).mul_(self.scale)
        softargmax = correlation.softmax(-1) @ self.window
        h = torch.cat([correlation, descriptor, window.here, softargmax], dim=-1)
        h = F.gelu(self.second(F.gelu(self.first(h))))
        return Step(softargmax.add_(self.shift(h)), h)


class LiveNetwork:
    """`encode` and `locate` of a trained network. It keeps a copy: what is trained further is not followed."""

    @torch.no_grad()
    def __init__(self, network: MatchNetwork) -> None:
        n = fold_batch_norms(deepcopy(network).eval().requires_grad_(False))
        n.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.to2, self.to4, self.to8 = n.to2, n.to4, n.to8
        self.own = [Layer(layer, n.position) for layer in n.self_attention]  # type: ignore[arg-type]
        self.other = [Layer(layer, n.position) for layer in n.cross_attention]  # type: ignore[arg-type]
        self.norm8, self.norm4, self.norm2 = n.norm8, n.norm4, n.norm2
        self.conv4, self.conv2 = n.merge4[0], n.merge2[0]
        self.down4, after4 = Affine.of(n.down4), Affine.of(n.merge4[1])
        self.after4 = after4.centred().beside(after4.then(Affine.of(n.down2)))  # descriptors, and what stride 2 gets
        self.after2 = Affine.of(n.merge2[1]).centred()
        self.refine4, self.refine2 = LiveRefiner(n.refine4), LiveRefiner(n.refine2)
        self.trust = network.trust
        self.sharpness = float(n.log_temperature.exp()) * WIDTH**-0.5
        cells = torch.cartesian_prod(torch.arange(SIDE), torch.arange(SIDE)).flip(-1).to(n.position)
        far = (cells[:, None] - cells).abs().amax(-1) > 1
        self.cells = cells  # (256, 2) as (x, y)
        self.beyond_peak = torch.zeros_like(far, dtype=cells.dtype).masked_fill_(far, float("-inf"))  # (256, 256)

    @torch.inference_mode()
    def encode(self, images: Tensor) -> Encoded:
        """RGB in [0, 1], (B, 3, 128, 128), channels last."""
        f2 = self.to2((images - 0.45).div_(0.25))
        f4 = self.to4(f2)
        x = self.to8(f4).permute(0, 2, 3, 1).reshape(-1, WIDTH)
        qkv = self.own[0].qkv(x)
        x = self.own[0].finish(x, _attend(qkv, qkv))
        qkv = self.other[0].qkv(x)
        f2, f4 = (f.permute(0, 2, 3, 1).contiguous() for f in (f2, f4))
        return Encoded(f2, f4, x.view(-1, SIDE**2, WIDTH), qkv)

    def _look(self, a: Encoded, b: Encoded) -> Tensor:
        """Both images' tokens (2 B * 256, C) after they have looked at each other, and in between at themselves."""
        x = torch.cat([a.tokens, b.tokens]).view(-1, WIDTH)
        for layer, (own, other) in enumerate(zip(self.own, self.other, strict=True)):
            if layer > 0:
                qkv = own.qkv(x)
                x = own.finish(x, _attend(qkv, qkv))
            qkv_a, qkv_b = (a.qkv, b.qkv) if layer == 0 else other.qkv(x).chunk(2)
            x = other.finish(x, torch.cat([_attend(qkv_a, qkv_b), _attend(qkv_b, qkv_a)]))
        return _norm(x, self.norm8)

    def _merge(self, tokens: Tensor, a: Encoded, b: Encoded) -> tuple[Maps, Maps]:
        """Descriptors at strides 4 and 2 that know the context of both images."""
        h = self._finer(self.down4(tokens), a.f4, b.f4, self.conv4)
        g4, down2 = self.after4(h).split([WIDTHS[4], WIDTHS[2]], dim=1)
        g2 = self.after2(self._finer(down2, a.f2, b.f2, self.conv2))
        return Maps(_norm_centred(g4, self.norm4), 4), Maps(_norm_centred(g2, self.norm2), 2)

    def _finer(self, rows: Tensor, a: Tensor, b: Tensor, conv: nn.Module) -> Tensor:
        """Rows at half the resolution of the feature maps of a and b, brought to it, added, convolved."""
        half = a.shape[1] // 2
        coarse = rows.view(-1, half, half, rows.shape[-1]).permute(0, 3, 1, 2)
        fine = F.interpolate(coarse, scale_factor=2.0, mode="bilinear").permute(0, 2, 3, 1)
        fine[: len(a)].add_(a)
        fine[len(a) :].add_(b)
        return conv(fine.permute(0, 3, 1, 2)).permute(0, 2, 3, 1).flatten(0, 2)

    @torch.inference_mode()
    def locate(self, a: Encoded, b: Encoded, uv_a: Tensor) -> tuple[Tensor, Tensor]:
        """Where pixels (B, N, 2) of the images a are in the images b, and the logits (B, N) of being right."""
        B, N, _ = uv_a.shape
        tokens = self._look(a, b)
        maps4, maps2 = self._merge(tokens, a, b)
        asked = uv_a.flatten(0, 1)
        in_both = torch.arange(2 * B, device=uv_a.device).repeat_interleave(N)[:, None]
        in_a, in_b = in_both.chunk(2)
        query = Maps(tokens, 8).sample(asked, in_a).view(B, N, WIDTH)
        logits = torch.bmm(query, tokens.view(2 * B, -1, WIDTH)[B:].mT).mul_(self.sharpness).flatten(0, 1)
        near = logits + self.beyond_peak.index_select(0, logits.argmax(-1))
        uv = 8 * (near.softmax(-1) @ self.cells + 0.5) - 0.5
        steps: list[Step] = []
        windows: list[Window] = []
        for refine, maps in ((self.refine4, maps4), (self.refine2, maps2)):
            # Asked for a pixel of a in a itself, a refiner is a little off, and much the same in b.
            both = refine.look(maps, torch.cat([asked, uv]), in_both)
            windows.append(own := both.part(slice(len(asked))))
            twice = refine.step(own.here.repeat(2, 1), both)
            bias, found = twice.move[: len(asked)], Step(twice.move[len(asked) :], twice.evidence[len(asked) :])
            for last in (False, True):
                steps.append(Step(found.move - bias, found.evidence))
                uv = torch.add(uv, steps[-1].move, alpha=refine.stride)
                if not last:
                    found = refine.step(own.here, refine.look(maps, uv, in_b))
        for refine, maps, own in ((self.refine4, maps4, windows[0]), (self.refine2, maps2, windows[1])):
            steps.append(refine.step(maps.sample(uv, in_b), own))
        evidence = [x for step in steps for x in (step.evidence, step.move, step.move.abs())]
        probability = logits.softmax(-1)
        peaks = [probability.topk(3).values, probability.square().sum(-1, keepdim=True)]
        trust = self.trust(torch.cat([*evidence, *peaks], dim=-1))
        return uv.view(B, N, 2), trust.view(B, N)


def fold_batch_norms(network: MatchNetwork) -> MatchNetwork:
    """Frozen normalisation is part of the convolution before it: a fifth faster in batches."""
    for block in network.modules():
        if (
            isinstance(block, nn.Sequential)
            and isinstance(block[0], nn.Conv2d)
            and isinstance(block[1], nn.BatchNorm2d)
        ):
            block[0], block[1] = fuse_conv_bn_eval(block[0], block[1]), nn.Identity()
    return network
