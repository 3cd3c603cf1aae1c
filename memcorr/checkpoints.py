"""Run folders on disk: JSON and safetensors, no pickles, every file whole or absent.

config.json         resolved experiment, seed, data: enough to rebuild the network
model.safetensors   EMA weights and normalisation statistics
stage-one/          the same two files for the EMA after stage one
state.safetensors   everything needed to resume, in one file that is replaced atomically
metrics.jsonl, tensorboard/
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from .errors import UserError
from .experiments import Experiment
from .files import read_json, write_json, written_whole
from .normalisation import Normalisation

CONFIG, MODEL, STATE, STAGE_ONE = "config.json", "model.safetensors", "state.safetensors", "stage-one"
FORMAT = 1  # of checkpoints; raise when a reader of the old format would be wrong


@dataclass(frozen=True)
class Config:
    """What was asked for; two runs with equal configs are the same run."""

    experiment: Experiment
    seed: int
    data: str  # fingerprint of the training rows
    format: int = FORMAT

    @staticmethod
    def read(path: Path) -> Config:
        content = read_json(path)
        try:
            if content["format"] != FORMAT:
                raise ValueError(f"format {content['format']}, this memcorr reads {FORMAT}")
            return Config(**{**content, "experiment": Experiment.from_json(content["experiment"])})
        except (KeyError, TypeError, ValueError) as problem:
            raise UserError(f"{path} is not a configuration of this memcorr ({problem})") from None

    def write(self, path: Path) -> None:
        write_json(path, asdict(self))


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, Any]) -> None:
    owned = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    with written_whole(path) as temporary:
        save_file(owned, temporary, {key: str(value) for key, value in metadata.items()})


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    if not path.exists():
        raise UserError(f"{path} does not exist")
    try:
        with safe_open(path, "pt") as f:
            return {name: f.get_tensor(name) for name in f.keys()}, f.metadata() or {}  # noqa: SIM118
    except (SafetensorError, OSError) as problem:
        raise UserError(f"{path} is damaged ({problem}); restore it or train again into another folder") from None


def write_model(folder: Path, config: Config, network: nn.Module, normalisation: Normalisation, update: int) -> None:
    """The two files that `load_policy` reads."""
    folder.mkdir(exist_ok=True)
    tensors = {f"network.{name}": tensor for name, tensor in network.state_dict().items()}
    for name, value in asdict(normalisation).items():
        tensors[f"normalisation.{name}"] = torch.from_numpy(np.asarray(value))
    config.write(folder / CONFIG)
    write_tensors(folder / MODEL, tensors, {"update": update})


def model_update(folder: Path) -> int | None:
    """The update whose EMA the folder holds; None when there is none to read."""
    try:
        with safe_open(folder / MODEL, "pt") as f:
            return int(f.metadata()["update"])
    except (SafetensorError, OSError, KeyError, TypeError):
        return None


def read_model(folder: Path, device: torch.device) -> tuple[Config, nn.Module, Normalisation]:
    if not (folder / CONFIG).exists():
        raise UserError(f"{folder} holds no policy: {CONFIG} is missing")
    config = Config.read(folder / CONFIG)
    tensors, _ = read_tensors(folder / MODEL)
    network = config.experiment.build()
    weights = {k.removeprefix("network."): v for k, v in tensors.items() if k.startswith("network.")}
    try:
        network.load_state_dict(weights)
        normalisation = Normalisation(
            **{f.name: tensors[f"normalisation.{f.name}"].numpy() for f in fields(Normalisation)}
        )
    except (RuntimeError, KeyError) as problem:
        reason = str(problem).splitlines()[0]
        raise UserError(f"{folder / MODEL} does not fit {folder / CONFIG} ({reason})") from None
    return config, network.to(device).eval(), normalisation
