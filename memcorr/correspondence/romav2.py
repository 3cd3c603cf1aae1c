"""`romav2`: the published RoMa v2 (2.0.1, "turbo", frozen, float32), the paper's matcher.

    pip install 'memcorr[romav2]'
    matcher = load_matcher("romav2")

The network is the package's own, run by the package's own `forward`. What is saved changes no
result: a reference is described once, DINOv3 stops after the last block that is read (17 of
0-23), convolutions are channels_last. The two-view transformer rotates in bfloat16 by definition,
which magnifies every rounding before it; so nothing before it is computed in another order.

Licences: romav2 is MIT, but its `vit/`, DINOv3's code, and the DINOv3 weights inside the released
file are under the DINOv3 License (https://ai.meta.com/resources/models-and-libraries/dinov3-license).
Nothing of either is part of this package.
"""

from __future__ import annotations

import copy
import logging
import os
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import UserError
from ..spec import SPEC, Array
from .matcher import Matcher, sample_bilinear

FILE = "romav2.0.1.pt"
URL = f"https://github.com/Parskatt/RoMaV2/releases/download/v2.0.1/{FILE}"
SHA256 = "1557dec0d21b62366465f7ff4d5fdf228cc695d0582e196ad2b80e05230828b7"  # 1,095,883,548 bytes
INSTALL = "pip install 'memcorr[romav2]'"
VARIABLE = "MEMCORR_ROMAV2_WEIGHTS"
DINOV3 = "facebookresearch_dinov3_adc254450203739c8149213a7a69d8d905b4fcfa"  # the hub's folder, as romav2 pins it
log = logging.getLogger(__name__)
KEPT: list[Any] = []  # operator definitions vanish with the library that holds them
LAYERS = (11, 17)  # the DINOv3 blocks that RoMa v2 reads


@dataclass(frozen=True)
class Encoding:
    """All that RoMa v2 computes from a reference alone; about 50 MB."""

    image: Tensor  # (1, 3, 320, 320), [0, 1]
    coarse: list[Tensor]  # per layer (1, 20, 20, 1024)
    fine: dict[int, Tensor]  # stride -> (1, 320 / stride, 320 / stride, channels)


class RomaV2Matcher(Matcher):
    """Weights: the argument, else $MEMCORR_ROMAV2_WEIGHTS, else the torch hub cache, else downloaded there.

    Runs on the device romav2 chooses: CUDA if there is one. A `model` that is given is taken over.
    """

    name = "romav2"

    def __init__(self, weights: Path | None = None, *, model: Any = None) -> None:
        self.model = model if model is not None else load(weights)
        del self.model.f.blocks[LAYERS[-1] + 1 :]
        self.model.f = self._coarse = Recall(self.model.f)
        self.model.refiner_features = self._fine = Recall(self.model.refiner_features)
        for part in (self.model.matcher.head, self.model.refiners, self.model.refiner_features):
            part.to(memory_format=torch.channels_last)

    @torch.inference_mode()
    def encode(self, crops: NDArray[np.uint8]) -> list[Encoding]:
        images = [self._image(crop) for crop in crops]
        return [Encoding(image, self._coarse(image), self._fine(image)) for image in images]

    @torch.inference_mode()
    def match(
        self, references: list[Encoding], pixels: NDArray[np.floating], queries: NDArray[np.uint8]
    ) -> tuple[Array, Array]:
        """Border-padded bilinear samples of the dense warp and overlap, one pair at a time."""
        located, confidence = [], []
        for reference, uv, query in zip(references, pixels, queries, strict=True):
            self._coarse.known = reference.image, reference.coarse
            self._fine.known = reference.image, reference.fine
            out = self.model(reference.image, self._image(query))
            field = torch.cat([out["warp_AB"], out["confidence_AB"][..., :1].sigmoid()], dim=-1)[0].cpu().numpy()
            scale = field.shape[0] / SPEC.image_size
            sampled = sample_bilinear(field.astype(np.float64), (uv + 0.5) * scale - 0.5)
            located.append((sampled[:, :2] + 1) / 2 * SPEC.image_size - 0.5)  # [-1, 1] spans the outer edges
            confidence.append(np.clip(sampled[:, 2], 0.0, 1.0))
        return np.stack(located), np.stack(confidence)

    def _image(self, crop: NDArray[np.uint8]) -> Tensor:
        """As RoMaV2.match prepares its input."""
        image = self.model._load_image(np.ascontiguousarray(crop))
        return F.interpolate(image, (self.model.H_lr, self.model.W_lr), mode="bicubic", antialias=True)


class Recall(nn.Module):
    """A frozen feature extractor that is not run again on the image it already knows."""

    known: tuple[Tensor | None, Any] = (None, None)

    def __init__(self, extract: nn.Module) -> None:
        super().__init__()
        self.extract = extract

    def forward(self, image: Tensor) -> Any:
        known, features = self.known
        # A copy, because RoMa v2 writes into the list it is given.
        return copy.copy(features) if image is known else self.extract(image)


def load(weights: Path | None = None) -> Any:
    """The published model with its published weights."""
    roma_package()
    path = weights_path(weights)
    if not path.is_file():
        if path != hub_weights():  # named by the user: a slip, nothing to fill with a gigabyte
            raise wrong_weights(path, "missing")
        download(path)
    model = build()
    try:
        model.load_state_dict(torch.load(path, map_location="cpu", mmap=True, weights_only=True))
    except Exception as problem:  # pickle, zip, key and shape errors alike
        reason = " ".join(str(problem).split())[:100]
        raise wrong_weights(path, f"not the released file ({path.stat().st_size} bytes; {reason})") from None
    return model


def build() -> Any:
    """RoMaV2 "turbo" in float32, weights as initialised: its own `__init__` without the downloads."""
    package = roma_package()
    model = package.RoMaV2.__new__(package.RoMaV2)
    nn.Module.__init__(model)
    model.cfg = cfg = package.RoMaV2.Cfg(setting="turbo")
    model.name, model.anchor_width, model.anchor_height = cfg.name, cfg.anchor_width, cfg.anchor_height
    model.f = dinov3()
    model.matcher = package.Matcher(cfg.matcher)
    model.refiners = package.Refiners(cfg.refiners)
    model.refiner_features = package.FineFeatures(cfg.refiner_features)
    model.apply_setting(cfg.setting)
    return model.to(package.device).eval().requires_grad_(False)


def random_romav2(seed: int = 0) -> Any:
    """For benchmarks and tests: the published model in float32 with random weights of the right shapes.

    `random_romav2().match(reference, query)` on two crops is RoMa v2 as published;
    `RomaV2Matcher(model=random_romav2())` is ours. It matches nothing.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = build()
        for parameter in model.parameters():
            if parameter.ndim > 1:  # unit gain; with torch's default the answer hardly depends on the images
                parameter.uniform_(-1, 1).mul_((3 / parameter[0].numel()) ** 0.5)
        for name, tensor in model.f.state_dict().items():
            if name.endswith(("gamma", "bias_mask")):  # 1e-5 and NaN in a fresh DINOv3
                tensor.fill_(1.0)
    return model


def dinov3() -> nn.Module:
    """DINOv3 ViT-L/16: its own code if that is in the hub cache, else the same network of the layers romav2 ships."""
    folder = Path(torch.hub.get_dir(), DINOV3)
    local = partial(torch.hub.load, str(folder), "dinov3_vitl16", source="local", pretrained=False)
    vit: Any = local() if folder.is_dir() else VisionTransformer()
    vit.forward = MethodType(describe, vit)  # this one's; romav2 replaces the class's, with one network for all
    return vit


def describe(vit: Any, image: Tensor) -> list[Tensor]:
    """What RoMa v2 wants of DINOv3: per layer (B, H / 16, W / 16, 1024) of images in [0, 1]."""
    normalised = import_module("romav2.normalizers").imagenet(image)
    size = image.shape[2] // 16, image.shape[3] // 16
    return [x.unflatten(1, size) for x in vit.get_intermediate_layers(normalised, n=LAYERS)]


class VisionTransformer(nn.Module):
    """ViT-L/16 with DINOv3's parameter names: a class token, four registers, rotary positions."""

    def __init__(self, width: int = 1024, depth: int = 24, heads: int = 16) -> None:
        super().__init__()
        layers, patches = import_module("romav2.vit"), import_module("romav2.vit.patch_embed")
        block = partial(layers.SelfAttentionBlock, qkv_bias=True, init_values=1e-5, mask_k_bias=True)
        norm = partial(nn.LayerNorm, eps=1e-5)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.storage_tokens = nn.Parameter(torch.zeros(1, 4, width))
        self.mask_token = nn.Parameter(torch.zeros(1, width))  # in the released file, never used here
        self.patch_embed = patches.PatchEmbed(patch_size=16, embed_dim=width)
        self.rope_embed = layers.RopePositionEmbedding(width, num_heads=heads, dtype=torch.float32)
        self.blocks = nn.ModuleList(block(width, heads, norm_layer=norm) for _ in range(depth))
        self.norm = norm(width)

    def get_intermediate_layers(self, image: Tensor, n: tuple[int, ...]) -> list[Tensor]:
        """Normalised patch tokens (B, H W / 256, width) after each of the blocks `n`."""
        B, _, H, W = image.shape
        extra = torch.cat([self.cls_token, self.storage_tokens], dim=1)
        x = torch.cat([extra.expand(B, -1, -1), self.patch_embed(image)], dim=1)
        rope = self.rope_embed(H=H // 16, W=W // 16)
        taken = []
        for i, block in enumerate(self.blocks):
            x = block(x, rope)
            if i in n:
                taken.append(self.norm(x)[:, extra.shape[1] :])
        return taken


class Float32Torch(ModuleType):
    """What romav2 sees as `torch`: two of its autocasts to bfloat16 have no switch, so it gets none."""

    @staticmethod
    def autocast(*_: Any, **__: Any) -> nullcontext[None]:
        return nullcontext()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@cache
def roma_package() -> Any:
    """The module romav2.romav2."""
    if find_spec("romav2") is None:
        raise UserError(f"matcher romav2 needs its package: {INSTALL}")
    try:
        import_module("torchvision")
    except RuntimeError:  # a CUDA build beside a CPU torch: it annotates two operators that it then lacks
        KEPT.append(library := torch.library.Library("torchvision", "FRAGMENT"))
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    for name in ("dpt", "features", "matcher", "refiner"):
        module: Any = import_module(f"romav2.{name}")
        module.torch = Float32Torch("torch")
    return import_module("romav2.romav2")


def hub_weights() -> Path:
    return Path(torch.hub.get_dir(), "checkpoints", FILE)


def weights_path(given: Path | None = None) -> Path:
    """The file named by argument or environment, else its place in the torch hub cache; it may not be there."""
    return Path(given or os.environ.get(VARIABLE) or hub_weights()).expanduser()


def wrong_weights(path: Path, reason: str) -> UserError:
    return UserError(
        f"RoMa v2's weights: {path}: {reason}; put {FILE} (1.1 GB) there with "
        f"`curl -L --create-dirs -o {path} {URL}`, or set {VARIABLE} to where you have it"
    )


def download(path: Path) -> None:
    """Fetches the released file, with a progress bar, and verifies it; `path` appears whole or not at all."""
    log.info(f"RoMa v2's weights (1.1 GB) go to {path}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.hub.download_url_to_file(URL, str(path), hash_prefix=SHA256, progress=True)
    except (OSError, RuntimeError) as problem:  # no network or disk; another hash
        raise wrong_weights(path, f"download failed ({getattr(problem, 'reason', problem)})") from None


def status() -> str:
    """For `memcorr doctor`: where the weights are; a UserError says what is missing and where it goes."""
    if find_spec("romav2") is None:
        raise UserError(f"not installed: {INSTALL}")
    path = weights_path()
    if not path.is_file():
        raise wrong_weights(path, "missing")
    return f"weights found at {path}"
