"""`embedded`: the matcher that ships with the package. Needs no download.

Trained in simulation alone (`memcorr matcher train`); see `embedded.md`. It is not RoMa v2.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from ...files import Form, read_arrays
from ...spec import Array
from ..matcher import Doubt, Matcher
from .live import Encoded, LiveNetwork
from .network import MatchNetwork

WEIGHTS = Path(__file__).parent / "embedded.safetensors"


def images(crops: NDArray[np.uint8]) -> torch.Tensor:
    """(B, 128, 128, 3) bytes -> (B, 3, 128, 128) in [0, 1], channels last in memory."""
    return torch.from_numpy(np.ascontiguousarray(crops)).permute(0, 3, 1, 2).float() / 255


def load_network(path: Path) -> MatchNetwork:
    network = MatchNetwork()
    forms = {
        name: Form("float" if t.is_floating_point() else "int64", tuple(t.shape))
        for name, t in network.state_dict().items()
    }
    read = read_arrays(path, "reinstall memcorr or run `memcorr matcher train`", forms)
    network.load_state_dict({name: torch.from_numpy(array) for name, array in read.arrays.items()})
    return network.eval().requires_grad_(False)


class EmbeddedMatcher(Matcher):
    name = "embedded"
    abstains_below = 0.15  # the point is probably hidden

    def __init__(self, weights: Path = WEIGHTS, device: str = "cpu", network: MatchNetwork | None = None) -> None:
        self.device = device
        self.network = (network or load_network(weights)).to(device)
        self.live = LiveNetwork(self.network)

    @torch.inference_mode()
    def encode(self, crops: NDArray[np.uint8]) -> list[Encoded]:
        return self.live.encode(images(crops).to(self.device)).each()

    @torch.inference_mode()
    def match(
        self, references: list[Encoded], pixels: NDArray[np.floating], queries: NDArray[np.uint8]
    ) -> tuple[Array, Array]:
        """Confidence is the network's trust in the location alone; see `lifted_confidence`."""
        query = self.live.encode(images(queries).to(self.device))
        asked = torch.from_numpy(np.asarray(pixels, np.float32)).to(self.device)
        uv, trust = self.live.locate(Encoded.join(references), query, asked)
        return uv.double().cpu().numpy(), trust.sigmoid().double().cpu().numpy()

    @torch.inference_mode()
    def lifted_confidence(self, confidence: Array, doubt: Doubt) -> Array:
        """Estimates the probability that the lifted point is within 10 mm of the truth."""
        evidence = torch.from_numpy(trust_evidence(confidence, doubt))
        return (evidence @ self.network.calibration.double().cpu()).sigmoid().numpy()


def trust_evidence(confidence: Array, doubt: Doubt) -> Array:
    """What confidence in a lifted point is computed from (..., 8): for points as measured the first four, for
    points put where a rigid motion carries them the others; those that do not apply are zero.

    A constant and the log odds of trust in the location; then the relief of the depth around it, which matters
    from some 40 and 80 mm on, or the expected error of the motion there and the distance it was moved by.
    """
    trust = np.clip(confidence, 1e-6, 1 - 1e-6)
    odds, one = np.log(trust / (1 - trust)), np.ones_like(trust)
    relief = np.log1p((doubt.relief / [0.04, 0.08]) ** 2)
    fitted = (doubt.spread > 0)[..., None]
    expected = np.log(np.maximum(doubt.spread, 1e-5) / 0.005)
    moved = np.log1p((doubt.misfit / 0.02) ** 2)
    as_measured = np.stack([one, odds, relief[..., 0], relief[..., 1]], axis=-1)
    as_carried = np.stack([one, odds, expected, moved], axis=-1)
    return np.concatenate([np.where(fitted, 0.0, as_measured), np.where(fitted, as_carried, 0.0)], axis=-1)
