"""Rolls out the contest (`rounds`), and makes the policy that learned nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from ..folders import claimed
from ..policy.checkpoint import model_update, read_checkpoint, write_model
from ..training.experiments import Config
from ..workers import Workers
from .evaluate import evaluate, find_subject, follows, usual
from .rounds import ROUNDS, SCENE_SEED, Round


def contest(
    policy: str,
    out: Path,
    references: Path,
    matcher: str = "embedded",
    rounds: Sequence[Round] = ROUNDS,
    workers: Workers = 1,
) -> None:
    """All rounds of one policy into `out`; rows that are there already are kept. `references` holds a store for each
    world. The expert and `zeros` follow no reference and look at no sensor: rounds about these are without them."""
    subject = find_subject(policy)
    for one in rounds:
        if not follows(subject, one.shown) and (one.reference != "correct" or one.swap or one.disturbances):
            continue
        for world in one.worlds:
            for disturbance in one.disturbances or (None,):
                evaluate(
                    policy,
                    out,
                    conditions=one.conditions,
                    shown=usual(policy, replace(one.shown, matcher=matcher)),
                    world=world,
                    disturbances=() if disturbance is None else (disturbance,),
                    scene_seed=SCENE_SEED,
                    scenes=one.scenes,
                    data=references / world,
                    workers=workers,
                )


def untrained(run: Path, out: Path) -> Path:
    """`run` with fresh weights instead of its own: whatever succeeds with these was not learned."""
    config, checkpoint = Config.read(run), read_checkpoint(run, torch.device("cpu"))
    with claimed(out), torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        if model_update(out) is None:
            write_model(out, config.json(), config.experiment.build(), checkpoint.normalisation, update=0)
    return out
