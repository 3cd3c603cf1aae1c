"""`memcorr sweep`: a grid of recipes and seeds, trained side by side and rolled out, here or on a cluster.

OUT/runs/EXPERIMENT-SEED      one training run each
OUT/results/EXPERIMENT-SEED   its rollouts, beside its config and metrics, for `memcorr report OUT/results`

A training run is one unit of work. Wherever it was interrupted, the same command, or the cluster, continues
it from its last saved state to the same bits.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from ..correspondence.matcher import matcher_label
from ..demos.store import Store
from ..errors import UserError
from ..folders import InUse, claimed, written_whole
from ..machine import choose_device
from ..policy.checkpoint import CONFIG
from ..spec import DOOR, TestSet
from ..training.experiments import Experiment
from ..training.loop import STAGE_ONE, train
from ..training.metrics import METRICS
from ..workers import CORES, Workers, needing, processes_of, spread
from .evaluate import Subject, evaluate, find_subject, list_jobs, normalised, summary, usual
from .intervention import PLAIN, Intervention

log = logging.getLogger(__name__)
PATIENCE = 120.0  # seconds; the process of a lost machine may live a little longer and hold its folder


@dataclass(frozen=True)
class Evaluation:
    """One `memcorr evaluate` of a trained policy."""

    conditions: tuple[TestSet, ...] = ("boundary",)
    stage_one: bool = False  # of the policy after stage one
    shown: Intervention = PLAIN
    world: str = DOOR


@dataclass(frozen=True)
class Entry:
    """One policy of the grid."""

    recipe: Experiment
    seed: int
    evaluations: tuple[Evaluation, ...]
    cache: Path | None = None  # without one, a relation policy ends with stage one

    @property
    def name(self) -> str:
        return f"{self.recipe.name}-{self.seed}"


@dataclass(frozen=True)
class Training:
    """What a worker does with a stream of (entry, whose stage one it begins with)."""

    data: Path
    runs: Path
    device: str
    threads: int
    disturbed: Path | None
    quiet: bool
    patience: float  # seconds

    def __call__(self, jobs: Iterator[tuple[Entry, Entry | None]]) -> Iterator[Entry]:
        for entry, lender in jobs:
            stage_one = None if lender is None else self.runs / lender.name / STAGE_ONE
            self.train(entry, stage_one, time.monotonic() + self.patience)
            yield entry

    def train(self, entry: Entry, stage_one: Path | None, until: float) -> None:
        while True:
            try:
                train(
                    entry.recipe,
                    self.data,
                    entry.seed,
                    self.runs / entry.name,
                    entry.cache,
                    self.device,
                    self.threads,
                    stage_one,
                    self.disturbed,
                    self.quiet,
                )
                return
            except InUse:
                if time.monotonic() > until:
                    raise
                time.sleep(1)


def sweep(
    entries: Sequence[Entry],
    out: Path,
    data: Path,
    *,
    scene_seed: int = 0,
    scenes: Sequence[int] = (),
    disturbed: Path | None = None,
    device: str = "auto",
    threads: int = 1,
    workers: Workers = CORES,
) -> Iterator[Entry]:
    """Trains and evaluates what is missing; an entry is yielded when its rows are there."""
    check(entries, scene_seed, scenes, device)
    runs, at_once = out / "runs", needing(workers, threads, int(device == "cuda"))
    lent = {entry: lender(entry, entries) for entry in entries}
    waves = [[(e, by) for e, by in lent.items() if (by is None) == alone] for alone in (True, False)]
    with tqdm(desc="policies", total=len(lent), unit="policy") as bar:
        for wave in waves:  # who begins with another's stage one waits for it
            elsewhere = not isinstance(at_once, int)
            quiet = elsewhere or min(processes_of(at_once), len(wave)) > 1  # bars of several would overwrite each other
            training = Training(data, runs, device, threads, disturbed, quiet, PATIENCE if elsewhere else 0.0)
            with closing(spread(training, wave, at_once)) as trained:
                for entry in trained:
                    folder, rows = runs / entry.name, out / "results" / entry.name
                    for evaluation in entry.evaluations:
                        policy = str(folder / STAGE_ONE if evaluation.stage_one else folder)
                        store = references(data, entry.recipe, evaluation.world)
                        evaluate_once(policy, rows, evaluation, scenes, store, scene_seed, workers)
                    with claimed(rows):
                        for file in (CONFIG, METRICS):  # beside its rollouts: how the policy came about
                            with written_whole(rows / file) as temporary:
                                shutil.copyfile(folder / file, temporary)
                    bar.update()
                    yield entry


def lender(entry: Entry, entries: Sequence[Entry]) -> Entry | None:
    """The first policy of the grid with the same stage one, unless that is the entry itself."""
    first = next(e for e in entries if e.seed == entry.seed and e.recipe.begins_like(entry.recipe))
    return None if first == entry else first


def check(entries: Sequence[Entry], scene_seed: int, scenes: Sequence[int], device: str) -> None:
    """Complains before hours are spent."""
    if device != "cuda":  # which a cluster may have, if not this machine
        choose_device(device)
    if not entries or not all(entry.evaluations for entry in entries):
        raise UserError("nothing to do: give at least one of --experiments, --seeds, --condition and --reference")
    for entry in entries:
        for evaluation in entry.evaluations:
            list_jobs(evaluation.conditions, scene_seed, (), scenes, evaluation.world)
            normalised(Subject("", entry.recipe.name, entry.seed, "final", "", entry.recipe), evaluation.shown)
            matcher_label(evaluation.shown.matcher)


def references(data: Path, recipe: Experiment, world: str) -> Path | None:
    """The store that a rollout's references come from: among those trained on, else found by `evaluate`."""
    place = data / world if len(recipe.worlds) > 1 else data
    return place if (place / "collection.json").exists() and Store.open(place).world == world else None


def evaluate_once(
    policy: str,
    out: Path,
    evaluation: Evaluation,
    scenes: Sequence[int],
    data: Path | None,
    scene_seed: int = 0,
    workers: Workers = CORES,
) -> None:
    shown = usual(policy, evaluation.shown)
    rows = evaluate(
        policy,
        out,
        conditions=evaluation.conditions,
        shown=shown,
        world=evaluation.world,
        scene_seed=scene_seed,
        scenes=scenes,
        data=data,
        workers=workers,
    )
    subject = find_subject(policy)
    name = subject.experiment if subject.train_seed is None else f"{subject.experiment}, seed {subject.train_seed}"
    log.info(f"{name}, reference {shown.reference}\n{summary(rows)}")
