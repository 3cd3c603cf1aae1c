"""`memcorr reproduce`: all verbs in order, resumable, with its expected cost printed first.

smoke   every verb on two pairs and tiny training: does the whole path work here?
cpu     one seed of MemCorr-DP as ours and as published, of its standard objective and of the two visual policies
full    three seeds of all of these, the representations and the schedules, and every intervention of the paper

Each policy is evaluated as soon as it is trained, and the report is written anew after each.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from .correspondence.cache import build_cache
from .demos.collect import collect
from .demos.store import Store
from .evaluation.evaluate import evaluate, find_subject, summary, usual_lifting
from .evaluation.intervention import GROUND_TRUTH, Intervention
from .policy.checkpoint import CONFIG
from .report.page import write_report
from .report.paper import MATCHED, USUAL
from .runs import CORES
from .spec import SPEC, TestSet
from .training.experiments import EXPERIMENTS, Experiment
from .training.loop import STAGE_ONE, train
from .training.metrics import METRICS

log = logging.getLogger(__name__)
Tier = Literal["smoke", "cpu", "full"]
PHASE_OFFSETS, PHASE_SPEEDS = (-16, -8, 8, 16), (0.5, 0.75, 1.25, 1.5)  # the paper's text names only +16
SHIFTS: tuple[TestSet, ...] = ("boundary", "extreme", "camera", "combined")
TRUE = replace(USUAL, matcher=GROUND_TRUTH)
EVERYWHERE: tuple[TestSet, ...] = ("validation", *SHIFTS)


@dataclass(frozen=True)
class Evaluation:
    """One `memcorr evaluate` of a tier; `MATCHED` stands for the tier's own matcher."""

    conditions: tuple[TestSet, ...] = ("boundary",)
    stage_one: bool = False
    shown: Intervention = USUAL

    def settled(self, matcher: str) -> Intervention:
        return replace(self.shown, matcher=matcher) if self.shown.matcher == MATCHED else self.shown


def interventions(stage_one: bool) -> tuple[Evaluation, ...]:
    usual = TRUE if stage_one else USUAL
    return (
        Evaluation(stage_one=stage_one, shown=usual),
        Evaluation(stage_one=stage_one, shown=replace(usual, reference="empty")),
        Evaluation(stage_one=stage_one, shown=replace(usual, reference="opposite")),
    )


MAIN = (
    Evaluation(EVERYWHERE),
    Evaluation(EVERYWHERE, shown=TRUE),
    Evaluation(("combined",), shown=replace(TRUE, pairing="permuted")),
    *interventions(stage_one=True),
    *interventions(stage_one=False)[1:],
)
PHASES = (
    *(Evaluation(shown=replace(USUAL, phase_offset=offset)) for offset in PHASE_OFFSETS),
    *(Evaluation(shown=replace(USUAL, phase_speed=speed)) for speed in PHASE_SPEEDS),
)
SYSTEM = (Evaluation(("boundary", "combined")),)


@dataclass(frozen=True)
class Plan:
    """What a tier does."""

    cost: str
    seeds: tuple[int, ...]
    evaluations: dict[str, tuple[Evaluation, ...]]  # by experiment, in the order of training
    pairs: int = SPEC.pairs
    rows: int = SPEC.cache_rows  # of the correspondence cache
    scenes: tuple[int, ...] = ()  # all
    recipes: dict[str, Experiment] = field(default_factory=dict)  # instead of the published ones

    def recipe(self, name: str) -> Experiment:
        return self.recipes.get(name, EXPERIMENTS[name])


TIERS: dict[Tier, Plan] = {
    "smoke": Plan(
        cost="a few minutes, 20 MB; the numbers mean nothing",
        seeds=(42,),
        evaluations={
            "memcorr": (Evaluation(("combined",)), Evaluation(("boundary",), stage_one=True, shown=TRUE)),
        },
        pairs=2,
        rows=16,
        scenes=(0,),
        recipes={"memcorr": replace(EXPERIMENTS["memcorr"], train_pairs=2, batch=8, updates=(4, 2))},
    ),
    "cpu": Plan(
        cost="about 4 hours per trained policy (2.5 with --threads 2), the work of 6, an hour of rollouts; 1 GB",
        seeds=(42,),
        evaluations={
            "memcorr": (*MAIN, *PHASES),
            "standard": interventions(stage_one=True),
            "memcorr-literal": (Evaluation(SHIFTS),),
            "memcorr-no-phase-errors": (Evaluation(SHIFTS),),
            "visual-transformer": SYSTEM,
            "visual-unet": SYSTEM,
        },
    ),
    "full": Plan(
        cost="about 4 hours per trained policy (2.5 with --threads 2), the work of 37, and a day of rollouts; 2 GB",
        seeds=SPEC.seeds,
        evaluations={
            "memcorr": (*MAIN, *PHASES),
            "standard": interventions(stage_one=True),
            "memcorr-literal": (Evaluation(SHIFTS),),
            "memcorr-no-phase-errors": (Evaluation(SHIFTS),),
            "memcorr-cosine": (*interventions(stage_one=True), Evaluation(SHIFTS)),
            "standard-cosine": interventions(stage_one=True),
            "motion": (Evaluation(EVERYWHERE),),
            "centroid": SYSTEM,
            "motion-no-phase-errors": SYSTEM,
            "centroid-no-phase-errors": SYSTEM,
            "visual-transformer": SYSTEM,
            "visual-unet": SYSTEM,
            "visual-unet-cosine": SYSTEM,
        },
    ),
}


def reproduce(tier: Tier, out: Path, matcher: str = "embedded", workers: int = CORES, threads: int = 1) -> Path:
    """Runs a tier into `out` and returns the report's page; the same call continues."""
    plan, root = TIERS[tier], out / tier
    log.info(f"reproduce --tier {tier}: {plan.cost}. Everything goes to {root}; the same command continues.")
    demos, results = root / "demos", root / "results"
    stated("1/4 collect")
    collect(demos, plan.pairs, workers=workers)
    store = Store.open(demos)
    stated("2/4 match")
    usual = plan.recipe("memcorr")
    caches = {(r.lifting, r.tie_break) for r in map(plan.recipe, plan.evaluations) if not r.visual}
    main = (usual.lifting, usual.tie_break)
    folders = {how: root / ("cache" if how == main else f"cache-{how[0]}-{how[1]}") for how in sorted(caches)}
    for how, cache in folders.items():
        rows_of: dict[str, Any] = {"pairs": usual.train_pairs, "rows": plan.rows, "workers": workers}
        build_cache(store, cache, matcher, lifting=how[0], tie_break=how[1], **rows_of)
    stated("3/4 expert and zeros, which judge the harness")
    for scripted in ("expert", "zeros"):
        evaluate_once(scripted, results / scripted, Evaluation(SHIFTS), matcher, plan.scenes, demos, workers)
    runs = [(name, seed) for seed in plan.seeds for name in plan.evaluations]
    for number, (name, seed) in enumerate(runs, 1):
        stated(f"4/4 train and evaluate, policy {number} of {len(runs)}: {name}, seed {seed}")
        recipe, folder, rows = plan.recipe(name), root / "runs" / f"{name}-{seed}", results / f"{name}-{seed}"
        mixed = not recipe.visual and any(not evaluation.stage_one for evaluation in plan.evaluations[name])
        first = next(other for other in plan.evaluations if plan.recipe(other).begins_like(recipe))
        stage_one = None if first == name else root / "runs" / f"{first}-{seed}" / STAGE_ONE
        cache_of = folders[recipe.lifting, recipe.tie_break] if mixed else None
        train(recipe, demos, seed, folder, cache_of, threads=threads, stage_one=stage_one)
        for evaluation in plan.evaluations[name]:
            checkpoint = folder / (STAGE_ONE if evaluation.stage_one else "")
            evaluate_once(str(checkpoint), rows, evaluation, matcher, plan.scenes, demos, workers)
        for file in (CONFIG, METRICS):  # beside its rollouts: how the policy came about
            shutil.copy(folder / file, rows)
        page = write_report([results], results, matcher)
        log.info(f"wrote {page}; open it in a browser")
    return page


def evaluate_once(
    policy: str, out: Path, evaluation: Evaluation, matcher: str, scenes: Sequence[int], data: Path, workers: int
) -> None:
    shown = replace(evaluation.settled(matcher), lifting=usual_lifting(policy))
    rows = evaluate(
        policy, out, conditions=evaluation.conditions, shown=shown, scenes=scenes, data=data, workers=workers
    )
    log.info(f"{find_subject(policy).experiment}, reference {shown.reference}\n{summary(rows)}")


def stated(step: str) -> None:
    log.info(f"--- {step}")
