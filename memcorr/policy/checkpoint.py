"""Policies on disk: JSON and safetensors, no pickles, every file whole or absent.

config.json         how the policy was made; `Design` is what is needed to rebuild and to sample it
model.safetensors   EMA weights and normalisation statistics

A training run keeps more beside them (`training.loop`).
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save
from torch import Tensor, nn

from ..errors import UserError
from ..runs import read_json, write_json, written_whole
from ..spec import SPEC, Lifting, Schedule
from .condition import Normalisation
from .relations import Representation
from .transformer import ActionTransformer, VisualTransformer
from .unet import VisualUNet

CONFIG, MODEL = "config.json", "model.safetensors"
FORMAT = 1  # of checkpoints; raise when a reader of the old format would be wrong
NetworkName = Literal["memcorr", "visual-transformer", "visual-unet"]
NETWORKS: dict[str, type[nn.Module]] = {
    "memcorr": ActionTransformer,
    "visual-transformer": VisualTransformer,
    "visual-unet": VisualUNet,
}


@dataclass(frozen=True)
class Design:
    """Which network, conditioned on what, sampled how. A training recipe adds the rest."""

    name: str = "memcorr"
    network: NetworkName = "memcorr"
    representation: Representation = "full"  # of the relation tokens; visual networks have none
    guidance: float = SPEC.guidance  # 1 means none
    schedule: Schedule = "linear"
    lifting: Lifting = "rigid"  # of the points it was trained on, and follows

    @property
    def visual(self) -> bool:
        """Given images and the task instead of a reference."""
        return self.network != "memcorr"

    @property
    def needs_matches(self) -> bool:
        """Whether a matcher has to run: not for images, nor for motion alone."""
        return not self.visual and self.representation != "motion"

    def build(self) -> nn.Module:
        """A freshly initialised network."""
        return NETWORKS[self.network]()


@dataclass(frozen=True)
class Checkpoint:
    """A policy as read from its two files."""

    design: Design
    seed: int  # of its training
    network: nn.Module
    normalisation: Normalisation
    update: int = 0  # after which its EMA was taken
    digest: str = ""  # first digits of the SHA-256 of the weights' file


def save_file(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
    """safetensors, with the metadata in one order: the same content gives the same bytes."""
    content = save(tensors, metadata)
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    header["__metadata__"] = dict(sorted(metadata.items()))
    text = json.dumps(header, separators=(",", ":")).encode()
    path.write_bytes(content[:8] + text.ljust(size) + content[8 + size :])


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, Any]) -> None:
    owned = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    with written_whole(path) as temporary:
        save_file(owned, temporary, {key: str(value) for key, value in metadata.items()})


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str], str]:
    """Tensors, metadata and digest, all of the same bytes."""
    try:
        content = path.read_bytes()
        tensors = load(content)
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    except FileNotFoundError:
        raise UserError(f"{path} does not exist") from None
    except (SafetensorError, ValueError) as problem:
        raise UserError(f"{path} is damaged ({problem}); restore it or train again into another folder") from None
    return tensors, header.get("__metadata__") or {}, hashlib.sha256(content).hexdigest()[:12]


def write_model(
    folder: Path, config: dict[str, Any], network: nn.Module, normalisation: Normalisation, update: int
) -> None:
    """The two files that `load_policy` reads."""
    folder.mkdir(exist_ok=True)
    tensors = {f"network.{name}": tensor for name, tensor in network.state_dict().items()}
    for name, value in asdict(normalisation).items():
        tensors[f"normalisation.{name}"] = torch.from_numpy(np.asarray(value))
    write_json(folder / CONFIG, config)
    write_tensors(folder / MODEL, tensors, {"update": update})


def model_update(folder: Path) -> int | None:
    """The update whose EMA the folder holds; None when there is none to read."""
    try:
        with safe_open(folder / MODEL, "pt") as f:
            return int(f.metadata()["update"])
    except (SafetensorError, OSError, KeyError, TypeError):
        return None


def read_config(folder: Path) -> dict[str, Any]:
    """`config.json` as it is, of a format that this memcorr reads."""
    path = folder / CONFIG
    if not path.exists():
        raise UserError(f"{folder} holds no policy: {CONFIG} is missing")
    content = read_json(path)
    if not isinstance(content, dict) or not isinstance(content.get("experiment"), dict):
        raise UserError(f"{path} is not a configuration of this memcorr (no experiment)")
    if content.get("format") != FORMAT:
        raise UserError(f"{path} is not a configuration of this memcorr (format {content.get('format')}, not {FORMAT})")
    return content


def read_design(folder: Path) -> tuple[Design, int]:
    """The design and the training seed of the policy in `folder`."""
    content = read_config(folder)
    try:
        told = content["experiment"]
        design = Design(**{f.name: told[f.name] for f in fields(Design) if f.name in told})  # the rest came later
        if design.network not in NETWORKS or "network" not in told:
            raise ValueError(f"unknown network {told.get('network')!r}")
        return design, int(content["seed"])
    except (KeyError, TypeError, ValueError) as problem:
        raise UserError(f"{folder / CONFIG} is not a configuration of this memcorr ({problem})") from None


def read_checkpoint(folder: Path, device: torch.device) -> Checkpoint:
    design, seed = read_design(folder)
    tensors, metadata, digest = read_tensors(folder / MODEL)
    network = design.build()
    weights = {k.removeprefix("network."): v for k, v in tensors.items() if k.startswith("network.")}
    try:
        network.load_state_dict(weights)
        normalisation = Normalisation(
            **{f.name: tensors[f"normalisation.{f.name}"].numpy() for f in fields(Normalisation)}
        )
        update = int(metadata.get("update", 0))
    except (RuntimeError, KeyError, ValueError) as problem:
        reason = str(problem).splitlines()[0]
        raise UserError(f"{folder / MODEL} does not fit {folder / CONFIG} ({reason})") from None
    if not all(torch.isfinite(tensor).all() for tensor in tensors.values()):
        raise UserError(f"{folder / MODEL} holds weights that are not finite; restore it or train again")
    return Checkpoint(design, seed, network.to(device).eval(), normalisation, update, digest)
