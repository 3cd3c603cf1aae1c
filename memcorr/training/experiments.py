"""Every trained row of every table, as a difference to the main one."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta

from ..errors import UserError
from ..files import converted, decoded
from ..machine import provenance
from ..policy.checkpoint import FORMAT, Design, Positive, Seed, read_config
from ..spec import DOOR, PUBLISHED_RESIDUAL_MM, SPEC, TRAINED_WORLDS, WORLD_TASKS, TieBreak

Count = Annotated[int, Meta(ge=1, le=10**9)]
Updates = Annotated[int, Meta(ge=0, le=10**9)]
Few = Annotated[int, Meta(ge=1, le=SPEC.pairs)]
Share = Annotated[float, Meta(ge=0, le=1)]
Below = Annotated[float, Meta(ge=0, lt=1)]  # of a running mean


@dataclass(frozen=True)
class Experiment(Design):
    """One training recipe; the defaults are our MemCorr-DP, `memcorr-literal` is the published one."""

    paired: bool = True  # every so often, a counterfactual paired update
    paired_every: Annotated[int, Meta(ge=2)] = 2  # updates; the paper's alternate
    condition_dropout: Share = SPEC.condition_dropout  # on standard updates only
    tie_break: TieBreak = "elapsed"  # between reference frames with the same door joint
    phase_errors: tuple[int, int] | None = (-32, 64)  # frames by which half the references lag or lead; paper: none
    residual_limit_mm: Positive | None = None  # of the residual bootstrap; None: the cache's own 95th percentile
    train_pairs: Count = SPEC.train_pairs  # the first pairs of the store; the rest validate
    worlds: tuple[str, ...] = (DOOR,)  # of several, every batch holds equal parts
    disturbed: bool = False  # also on recordings that recover (`collect --disturbed`)
    off_track: Share = 0.0  # share of rows that are drawn from those whose hand is off-track
    references: Few = 1  # other scenes that each demonstration is conditioned on
    turned: bool = False  # rows are turned about the vertical and mirrored at random
    measured: bool = False  # no simulator truth: relations, phases and errors as a matcher saw them
    resampled_errors: Positive = 0.0  # in both stages points and errors of other rows, up to so many times
    sensor_errors: Share = 0.0  # share of rows whose resampled points also err together, as bad sensors make them
    noises: Few = 1  # noisy chunks per row, whose context is encoded once
    batch: Annotated[int, Meta(ge=4, le=2**16, multiple_of=4)] = SPEC.batch
    updates: tuple[Updates, Updates] = SPEC.updates  # stage one, stage two
    learning_rate: tuple[Positive, Positive] = SPEC.learning_rate
    betas: tuple[Below, Below] = SPEC.betas
    epsilon: Positive = SPEC.epsilon
    weight_decay: Positive = SPEC.weight_decay
    gradient_norm: Positive = SPEC.gradient_norm
    ema: Below = SPEC.ema

    def __post_init__(self) -> None:
        """What the types cannot say; a ValueError that names the field."""
        if not self.worlds or len(set(self.worlds)) < len(self.worlds) or not set(self.worlds) <= set(WORLD_TASKS):
            raise ValueError(f"worlds: give some of {', '.join(WORLD_TASKS)}, each once")
        if self.batch % (2 * len(self.worlds)):
            raise ValueError(f"batch: {self.batch} rows are no equal parts, in pairs, of {len(self.worlds)} worlds")
        if self.phase_errors is not None and self.phase_errors[0] > self.phase_errors[1]:
            raise ValueError("phase_errors: give the least one first")

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


MAIN = Experiment()
# To the letter: bilinear depth, every answer used; residuals up to 20.034 mm; references at their own phase. Stage one
# is the same as ours.
_LITERAL = dataclasses.replace(
    MAIN, name="memcorr-literal", phase_errors=None, lifting="paper", residual_limit_mm=PUBLISHED_RESIDUAL_MM
)
_STANDARD = dataclasses.replace(_LITERAL, name="standard-literal", paired=False)
_VISUAL = dataclasses.replace(MAIN, name="visual-transformer", network="visual-transformer")
_UNET = dataclasses.replace(
    _VISUAL, name="visual-unet", network="visual-unet", paired=False, condition_dropout=0.0, guidance=1.0
)
# Follows by what is seen. The reference's commands and the gap to its hand are inputs like any other.
_SEEING = dataclasses.replace(
    MAIN,
    representation="tracking",
    guidance=1.0,
    schedule="cosine",
    predicts="velocity",
    state="relative",
    phase="seen",
    phase_errors=(-6, 6),
    paired_every=8,
    turned=True,
    resampled_errors=2.5,
    noises=4,
    learning_rate=(5e-4, 5e-5),
)

EXPERIMENTS: dict[str, Experiment] = {
    e.name: e
    for e in (
        MAIN,
        _LITERAL,
        _STANDARD,
        dataclasses.replace(_LITERAL, name="motion-literal", representation="motion"),
        dataclasses.replace(_LITERAL, name="centroid-literal", representation="centroid"),
        _VISUAL,
        _UNET,
        # Is a schedule that ends in noise a cure as good as the paired objective?
        dataclasses.replace(_LITERAL, name="memcorr-cosine", schedule="cosine"),
        dataclasses.replace(_STANDARD, name="standard-cosine", schedule="cosine"),
        dataclasses.replace(_UNET, name="visual-unet-cosine", schedule="cosine"),
        # One policy for many objects, which reacts; window, faucet and lock are in no training.
        dataclasses.replace(
            _SEEING,
            name="memcorr-many",
            train_pairs=40,
            worlds=TRAINED_WORLDS,
            disturbed=True,
            off_track=0.3,
            references=2,
            sensor_errors=0.5,
            noises=2,
            batch=140,
            updates=(24_000, 6_000),
        ),
        # Recordings of one's own: what a camera and a robot report; widths, units and pairs as the data has them.
        dataclasses.replace(_SEEING, name="memcorr-measured", measured=True, batch=32, updates=(1_200, 300)),
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
    known = [f.name for f in dataclasses.fields(Experiment) if f.name != "name"]
    values: dict[str, Any] = {}
    for name, text in changes.items():
        if name not in known:
            raise UserError(f"--set {name}: not a field of a recipe; choose one of {', '.join(known)}")
        try:
            values[name] = decoded(text.encode(), Any)
        except ValueError:
            values[name] = text
        if name == "updates" and isinstance(values[name], int):  # all of them in stage one
            values[name] = [values[name], 0]
    try:
        made = converted(dataclasses.asdict(recipe) | values, Experiment)
    except ValueError as problem:
        raise UserError(f"--set {' '.join(f'{k}={v}' for k, v in changes.items())}: {problem}") from None
    different = {k: getattr(made, k) for k in values if getattr(made, k) != getattr(recipe, k)}
    suffix = "".join(f",{k}={json.dumps(v, separators=(',', ':'))}" for k, v in sorted(different.items()))
    return dataclasses.replace(made, name=recipe.name + suffix)


@dataclass(frozen=True)
class Config:
    """What was asked for; two runs with equal configs are the same run."""

    experiment: Experiment
    seed: Seed
    data: str  # fingerprint of the training rows
    format: Literal[1] = FORMAT

    @staticmethod
    def read(folder: Path) -> Config:
        return read_config(folder, Config, Experiment)

    def json(self) -> dict[str, Any]:
        """As it is written, with what it was made with."""
        return dataclasses.asdict(self) | {"made_with": provenance()}
