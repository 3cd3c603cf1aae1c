"""Every trained row of every table, as a difference to the main one."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from .errors import UserError
from .networks import ActionTransformer, VisualTransformer
from .protocol import PROTOCOL
from .references import TieBreak
from .relations import Representation
from .unet import VisualUNet

NetworkName = Literal["memcorr", "visual-transformer", "visual-unet"]


@dataclass(frozen=True)
class Experiment:
    """One training recipe; the defaults are our MemCorr-DP, `memcorr-paper` is the published one."""

    name: str = "memcorr"
    network: NetworkName = "memcorr"
    representation: Representation = "full"  # of the relation tokens; visual networks have none
    paired: bool = True  # alternate with counterfactual paired updates
    condition_dropout: float = 0.1  # on standard updates only
    guidance: float = 1.5  # 1 means none
    tie_break: TieBreak = "elapsed"  # between reference frames with the same door joint
    phase_errors: tuple[int, int] | None = (-32, 64)  # of half the references in stage two, frames; the paper has none
    train_pairs: int = PROTOCOL.train_pairs  # the first pairs of the store; the rest validate
    batch: int = 128
    updates: tuple[int, int] = (20_000, 10_000)  # stage one, stage two
    learning_rate: tuple[float, float] = (3e-4, 5e-5)
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    weight_decay: float = 1e-4
    gradient_norm: float = 10.0
    ema: float = 0.999

    @property
    def visual(self) -> bool:
        return self.network != "memcorr"

    @property
    def total_updates(self) -> int:
        return sum(self.updates)

    def begins_like(self, other: Experiment) -> bool:
        """Whether the two differ in stage two alone."""

        def stage_one(e: Experiment) -> Experiment:
            return dataclasses.replace(
                e, name="", phase_errors=None, updates=(e.updates[0], 0), learning_rate=(e.learning_rate[0], 0.0)
            )

        return stage_one(self) == stage_one(other)

    def build(self) -> nn.Module:
        """A freshly initialised network."""
        return {
            "memcorr": ActionTransformer,
            "visual-transformer": VisualTransformer,
            "visual-unet": VisualUNet,
        }[self.network]()

    @staticmethod
    def from_json(content: dict[str, Any]) -> Experiment:
        """Inverse of `dataclasses.asdict` through JSON, where tuples are lists."""
        fields = {f.name for f in dataclasses.fields(Experiment)}
        if unknown := set(content) - fields:
            raise ValueError(f"unknown fields {', '.join(sorted(unknown))}")
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in content.items()}
        return Experiment(**values)


MAIN = Experiment()
_VISUAL = dataclasses.replace(MAIN, name="visual-transformer", network="visual-transformer")

EXPERIMENTS: dict[str, Experiment] = {
    e.name: e
    for e in (
        MAIN,
        dataclasses.replace(MAIN, name="memcorr-paper", phase_errors=None),
        dataclasses.replace(MAIN, name="standard", paired=False),
        dataclasses.replace(MAIN, name="motion", representation="motion"),
        dataclasses.replace(MAIN, name="centroid", representation="centroid"),
        _VISUAL,
        dataclasses.replace(
            _VISUAL, name="visual-unet", network="visual-unet", paired=False, condition_dropout=0.0, guidance=1.0
        ),
        # Seconds instead of hours: does the whole path work on this machine?
        dataclasses.replace(MAIN, name="debug", train_pairs=2, batch=16, updates=(12, 6)),
    )
}


def find_experiment(name: str) -> Experiment:
    if name not in EXPERIMENTS:
        raise UserError(f"unknown experiment {name!r}: choose one of {', '.join(EXPERIMENTS)}")
    return EXPERIMENTS[name]
