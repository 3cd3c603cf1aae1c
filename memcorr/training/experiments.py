"""Every trained row of every table, as a difference to the main one."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

from ..errors import UserError
from ..policy.checkpoint import CONFIG, FORMAT, NETWORKS, Design, read_config
from ..policy.relations import Representation
from ..runs import provenance
from ..spec import PUBLISHED_RESIDUAL_MM, SPEC, Lifting, Schedule, TieBreak

CHOICES: dict[str, Collection[str]] = {
    "network": NETWORKS,
    "representation": get_args(Representation),
    "tie_break": get_args(TieBreak),
    "schedule": get_args(Schedule),
    "lifting": get_args(Lifting),
}


@dataclass(frozen=True)
class Experiment(Design):
    """One training recipe; the defaults are our MemCorr-DP, `memcorr-literal` is the published one."""

    paired: bool = True  # alternate with counterfactual paired updates
    condition_dropout: float = SPEC.condition_dropout  # on standard updates only
    tie_break: TieBreak = "elapsed"  # between reference frames with the same door joint
    phase_errors: tuple[int, int] | None = (-32, 64)  # of half the references in stage two, frames; the paper has none
    residual_limit_mm: float | None = None  # of the residual bootstrap; None: the cache's own 95th percentile
    train_pairs: int = SPEC.train_pairs  # the first pairs of the store; the rest validate
    batch: int = SPEC.batch
    updates: tuple[int, int] = SPEC.updates  # stage one, stage two
    learning_rate: tuple[float, float] = SPEC.learning_rate
    betas: tuple[float, float] = SPEC.betas
    epsilon: float = SPEC.epsilon
    weight_decay: float = SPEC.weight_decay
    gradient_norm: float = SPEC.gradient_norm
    ema: float = SPEC.ema

    @property
    def total_updates(self) -> int:
        return sum(self.updates)

    def begins_like(self, other: Experiment) -> bool:
        """Whether the two differ in stage two alone."""

        def stage_one(e: Experiment) -> Experiment:
            return dataclasses.replace(
                e,
                name="",
                phase_errors=None,
                residual_limit_mm=None,
                lifting="rigid",
                updates=(e.updates[0], 0),
                learning_rate=(e.learning_rate[0], 0.0),
            )

        return stage_one(self) == stage_one(other)

    @staticmethod
    def from_json(content: dict[str, Any]) -> Experiment:
        """Inverse of `dataclasses.asdict` through JSON, where tuples are lists."""
        fields = {f.name for f in dataclasses.fields(Experiment)}
        if unknown := set(content) - fields:
            raise ValueError(f"unknown fields {', '.join(sorted(unknown))}")
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in content.items()}
        return check_recipe(Experiment(**values))


MAIN = Experiment()
_NO_PHASE_ERRORS = dataclasses.replace(MAIN, name="memcorr-no-phase-errors", phase_errors=None)
_VISUAL = dataclasses.replace(MAIN, name="visual-transformer", network="visual-transformer")
_UNET = dataclasses.replace(
    _VISUAL, name="visual-unet", network="visual-unet", paired=False, condition_dropout=0.0, guidance=1.0
)

EXPERIMENTS: dict[str, Experiment] = {
    e.name: e
    for e in (
        MAIN,
        # To the letter: closest joint, the first of ties; bilinear depth, every answer used; residuals up to 20.034 mm.
        dataclasses.replace(
            _NO_PHASE_ERRORS,
            name="memcorr-literal",
            tie_break="first",
            lifting="paper",
            residual_limit_mm=PUBLISHED_RESIDUAL_MM,
        ),
        _NO_PHASE_ERRORS,  # in between: published but for frames nearest in time, our lifting and residuals
        dataclasses.replace(MAIN, name="standard", paired=False),
        dataclasses.replace(MAIN, name="motion", representation="motion"),
        dataclasses.replace(MAIN, name="centroid", representation="centroid"),
        dataclasses.replace(_NO_PHASE_ERRORS, name="motion-no-phase-errors", representation="motion"),
        dataclasses.replace(_NO_PHASE_ERRORS, name="centroid-no-phase-errors", representation="centroid"),
        _VISUAL,
        _UNET,
        # Is a schedule that ends in noise a cure as good as the paired objective?
        dataclasses.replace(MAIN, name="memcorr-cosine", schedule="cosine"),
        dataclasses.replace(MAIN, name="standard-cosine", paired=False, schedule="cosine"),
        dataclasses.replace(_UNET, name="visual-unet-cosine", schedule="cosine"),
        # Seconds instead of hours: does the whole path work on this machine?
        dataclasses.replace(MAIN, name="debug", train_pairs=2, batch=16, updates=(12, 6)),
    )
}


def find_experiment(name: str) -> Experiment:
    if name not in EXPERIMENTS:
        raise UserError(f"unknown experiment {name!r}: choose one of {', '.join(EXPERIMENTS)}")
    return EXPERIMENTS[name]


def changed(recipe: Experiment, changes: dict[str, str]) -> Experiment:
    """`recipe` with fields set from text, such as {"batch": "64"}; its name then says so."""
    kinds = get_type_hints(Experiment)
    values: dict[str, Any] = {}
    for name, text in changes.items():
        if name not in kinds or name == "name":
            known = ", ".join(k for k in kinds if k != "name")
            raise UserError(f"--set {name}: not a field of a recipe; choose one of {known}")
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        values[name] = tuple(value) if isinstance(value, list) else value
    try:
        made = check_recipe(dataclasses.replace(recipe, **values))
    except ValueError as problem:
        raise UserError(f"--set {' '.join(f'{k}={v}' for k, v in changes.items())}: {problem}") from None
    different = {k: v for k, v in values.items() if getattr(recipe, k) != v}
    suffix = "".join(f",{k}={json.dumps(v, separators=(',', ':'))}" for k, v in sorted(different.items()))
    return dataclasses.replace(made, name=recipe.name + suffix)


def check_recipe(recipe: Experiment) -> Experiment:
    """`recipe`, if every field has the type and the range that training needs; else a ValueError."""
    for f in dataclasses.fields(recipe):
        value, default = getattr(recipe, f.name), getattr(MAIN, f.name)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if isinstance(default, bool):
            right = isinstance(value, bool)
        elif isinstance(default, int):
            right = isinstance(value, int) and number and value > 0
        elif isinstance(default, float):
            right = number and 0 <= value < float("inf")
        elif isinstance(default, tuple):
            kinds = (int,) if isinstance(default[0], int) else (int, float)
            right = isinstance(value, tuple) and len(value) == 2 and all(type(v) in kinds for v in value)
            right = right or (f.name == "phase_errors" and value is None)
        elif default is None:
            right = value is None or (number and 0 < value < float("inf"))
        else:
            right = isinstance(value, str) and (f.name not in CHOICES or value in CHOICES[f.name])
        if not right:
            raise ValueError(f"{f.name} cannot be {value!r}; it is {default!r} by default")
    if recipe.batch % 4 or min(recipe.updates) < 0:
        raise ValueError(
            f"batch must be a multiple of 4 and updates not negative, not {recipe.batch}, {recipe.updates}"
        )
    return recipe


@dataclass(frozen=True)
class Config:
    """What was asked for; two runs with equal configs are the same run."""

    experiment: Experiment
    seed: int
    data: str  # fingerprint of the training rows
    format: int = FORMAT

    @staticmethod
    def read(folder: Path) -> Config:
        content = read_config(folder)
        try:
            experiment = Experiment.from_json(content["experiment"])
            return Config(experiment, int(content["seed"]), str(content["data"]))
        except (KeyError, TypeError, ValueError) as problem:
            raise UserError(f"{folder / CONFIG} is not a configuration of this memcorr ({problem})") from None

    def json(self) -> dict[str, Any]:
        """As it is written, with what it was made with."""
        return dataclasses.asdict(self) | {"made_with": provenance()}
