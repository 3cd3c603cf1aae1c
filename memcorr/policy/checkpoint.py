"""Policies on disk: JSON and safetensors, no pickles, every file whole or absent.

config.json         how the policy was made; `Design` is what is needed to rebuild and to sample it
model.safetensors   EMA weights and normalisation statistics; weights may be kept in half precision

A training run keeps more beside them (`training.loop`).
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
import torch
from msgspec import Meta
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..errors import UserError
from ..files import Form, check_forms, converted, read_arrays, read_json, write_arrays, write_json
from ..following.course import USUAL, PhaseCosts
from ..spec import SPEC, Lifting, PhaseSource, Prediction, Schedule, StateKind
from .condition import Normalisation
from .networks.transformer import ActionTransformer, VisualTransformer
from .networks.unet import VisualUNet
from .relations import TRACKING, Representation, TrackingUnits

CONFIG, MODEL = "config.json", "model.safetensors"
FORMAT: Literal[1] = 1  # of checkpoints; raise when a reader of the old format would be wrong
Kind = TypeVar("Kind")
NetworkName = Literal["memcorr", "visual-transformer", "visual-unet"]
NETWORKS: dict[str, type[nn.Module]] = {
    "memcorr": ActionTransformer,
    "visual-transformer": VisualTransformer,
    "visual-unet": VisualUNet,
}


# Files are named after a policy: it cannot lead out of their folder.
Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][^/\\\x00-\x1f]*$", max_length=200)]
Seed = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Positive = Annotated[float, Meta(ge=0)]
AGAIN = "restore it, or train again into another folder"


class Uninitialised(TorchFunctionMode):
    """Layers made in here keep whatever their memory holds."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if getattr(func, "__module__", None) == "torch.nn.init":
            return args[0] if args else (kwargs or {})["tensor"]
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Design:
    """Which network, conditioned on what, sampled how. A training recipe adds the rest."""

    name: Name = "memcorr"
    network: NetworkName = "memcorr"
    representation: Representation = "full"  # of the relation tokens; visual networks have none
    guidance: Positive = SPEC.guidance  # 1 means none
    schedule: Schedule = "linear"
    predicts: Prediction = "noise"
    lifting: Lifting = "rigid"  # of the points it was trained on, and follows
    state: StateKind = "absolute"
    phase: PhaseSource = "elapsed"  # which frame of the reference is now, in training and live
    phase_costs: PhaseCosts = USUAL  # where it is by what is seen
    tracking: TrackingUnits = TRACKING  # of the tokens, where they are for tracking
    ddim_steps: Annotated[int, Meta(ge=2, le=SPEC.diffusion_steps)] = SPEC.ddim_steps
    state_dim: Annotated[int, Meta(ge=1, le=4096)] = SPEC.state_dim  # these four as the data has them
    action_dim: Annotated[int, Meta(ge=1, le=4096)] = SPEC.action_dim
    action_cm: Positive = 1.0  # by which an action of 1 moves the hand per step; 0 where it is no displacement
    action_limit: Annotated[float, Meta(gt=0)] = 1.0  # components of an action stay in [-limit, limit]

    @property
    def visual(self) -> bool:
        """Given images and the task instead of a reference."""
        return self.network != "memcorr"

    @property
    def needs_matches(self) -> bool:
        """Whether a matcher has to run: not for images, nor for motion alone."""
        return not self.visual and self.representation != "motion"

    @property
    def evaluations(self) -> int:
        """Of the network, for one chunk, if nothing is shared."""
        return self.ddim_steps * (1 if self.guidance == 1.0 else 2)

    def build(self, initialised: bool = True) -> nn.Module:
        """A freshly initialised network; or, half the time saved, one whose weights are about to be read."""
        with nullcontext() if initialised else Uninitialised():
            if self.network == "memcorr":
                return ActionTransformer(self.state_dim, self.action_dim)
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


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, Any]) -> None:
    write_arrays(path, {name: tensor.detach().cpu().numpy() for name, tensor in tensors.items()}, metadata)


def read_tensors(path: Path, forms: dict[str, Form] | None = None) -> tuple[dict[str, Tensor], dict[str, str], str]:
    """Tensors, metadata and digest, all of the same bytes."""
    read = read_arrays(path, AGAIN, forms)
    return {name: torch.from_numpy(array) for name, array in read.arrays.items()}, read.metadata, read.digest


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


def forms_of(tensors: dict[str, Tensor]) -> dict[str, Form]:
    return {name: Form(str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in tensors.items()}


def model_forms(network: nn.Module, design: Design) -> dict[str, Form]:
    """Everything in `model.safetensors`."""
    forms = forms_of({f"network.{name}": tensor for name, tensor in network.state_dict().items()})
    sizes = {"state": (design.state_dim,), "action": (design.action_dim,), "depth": ()}
    for f in fields(Normalisation):
        forms[f"normalisation.{f.name}"] = Form("float64", sizes[f.name.partition("_")[0]])
    return forms


def model_update(folder: Path) -> int | None:
    """The update whose EMA the folder holds; None when there is none to read."""
    try:
        return int(read_tensors(folder / MODEL)[1]["update"])
    except (UserError, KeyError, ValueError):
        return None


@dataclass(frozen=True)
class Configured:
    """What of a `config.json` is needed to rebuild a policy; training reads more."""

    experiment: Design
    seed: Seed
    format: Literal[1]  # FORMAT


def read_config(folder: Path, kind: type[Kind], recipe: type | None = None) -> Kind:
    """`config.json` of a policy, as `kind`; with `recipe`, the type of its experiment, no field may be unknown."""
    path = folder / CONFIG
    if not path.exists():
        raise UserError(f"{folder} holds no policy: {CONFIG} is missing")
    what = f"a configuration of this memcorr, format {FORMAT}"
    content = read_json(path, dict[str, Any], what, AGAIN)
    given = content["experiment"].keys() if isinstance(content.get("experiment"), dict) else set()
    try:
        config = converted(content, kind)
        if missing := [f.name for f in fields(Design) if f.name not in given]:
            raise ValueError(f"experiment: without {missing[0]}")
        if unknown := [n for n in given if recipe and n not in {f.name for f in fields(recipe)}]:
            raise ValueError(f"experiment: unknown field {unknown[0]}")
    except ValueError as problem:
        raise UserError(f"{path} is not {what} ({problem}); {AGAIN}") from None
    return config


def read_checkpoint(folder: Path, device: torch.device) -> Checkpoint:
    config = read_config(folder, Configured)
    network = config.experiment.build(initialised=False)
    tensors, metadata, digest = read_tensors(folder / MODEL)
    tensors = {name: t.float() if t.dtype == torch.float16 else t for name, t in tensors.items()}
    expected = model_forms(network, config.experiment)
    try:
        check_forms({name: (t.numpy().dtype, tuple(t.shape)) for name, t in tensors.items()}, expected)
    except ValueError as problem:
        raise UserError(f"{folder / MODEL} does not fit {folder / CONFIG} ({problem}); {AGAIN}") from None
    network.load_state_dict({k.removeprefix("network."): v for k, v in tensors.items() if k.startswith("network.")})
    normalisation = Normalisation(**{f.name: tensors[f"normalisation.{f.name}"].numpy() for f in fields(Normalisation)})
    if min(value.min() for name, value in asdict(normalisation).items() if name.endswith("std")) <= 0:
        raise UserError(f"{folder / MODEL} is damaged (a deviation is not positive); {AGAIN}")
    update = metadata.get("update", "0")
    if not update.isdecimal():
        raise UserError(f"{folder / MODEL} is damaged (update {update!r}); {AGAIN}")
    return Checkpoint(config.experiment, config.seed, network.to(device).eval(), normalisation, int(update), digest)
