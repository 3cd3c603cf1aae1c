"""`memcorr reproduce`: all verbs in order, resumable, with its expected cost printed first.

smoke   every verb on two pairs and tiny training: does the whole path work here?
cpu     one seed of MemCorr-DP as ours and as published, of its standard objective and of the two visual policies
full    three seeds of all of these, the representations and the schedules, and every intervention of the paper

Each policy is evaluated as soon as it is trained, and the report is written anew after each.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from .correspondence.cache import build_cache
from .correspondence.matcher import load_matcher
from .demos.collect import collect
from .demos.store import Store
from .evaluation.intervention import GROUND_TRUTH
from .evaluation.sweep import Entry, Evaluation, evaluate_once, sweep
from .report.page import write_report
from .report.paper import MATCHED, USUAL
from .runs import CORES, Workers
from .spec import SPEC, TestSet
from .training.experiments import EXPERIMENTS, Experiment

log = logging.getLogger(__name__)
Tier = Literal["smoke", "cpu", "full"]
PHASE_OFFSETS, PHASE_SPEEDS = (-16, -8, 8, 16), (0.5, 0.75, 1.25, 1.5)  # the paper's text names only +16
SHIFTS: tuple[TestSet, ...] = ("boundary", "extreme", "camera", "combined")
judged = partial(Evaluation, shown=USUAL)
TRUE = replace(USUAL, matcher=GROUND_TRUTH)
EVERYWHERE: tuple[TestSet, ...] = ("validation", *SHIFTS)


def interventions(stage_one: bool) -> tuple[Evaluation, ...]:
    usual = TRUE if stage_one else USUAL
    return (
        judged(stage_one=stage_one, shown=usual),
        judged(stage_one=stage_one, shown=replace(usual, reference="empty")),
        judged(stage_one=stage_one, shown=replace(usual, reference="opposite")),
    )


MAIN = (
    judged(EVERYWHERE),
    judged(EVERYWHERE, shown=TRUE),
    judged(("combined",), shown=replace(TRUE, pairing="permuted")),
    *interventions(stage_one=True),
    *interventions(stage_one=False)[1:],
)
PHASES = (
    *(judged(shown=replace(USUAL, phase_offset=offset)) for offset in PHASE_OFFSETS),
    *(judged(shown=replace(USUAL, phase_speed=speed)) for speed in PHASE_SPEEDS),
)
SYSTEM = (judged(("boundary", "combined")),)


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
            "memcorr": (judged(("combined",)), judged(("boundary",), stage_one=True, shown=TRUE)),
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
            "memcorr-literal": (judged(SHIFTS),),
            "memcorr-no-phase-errors": (judged(SHIFTS),),
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
            "memcorr-literal": (judged(SHIFTS),),
            "memcorr-no-phase-errors": (judged(SHIFTS),),
            "memcorr-cosine": (*interventions(stage_one=True), judged(SHIFTS)),
            "standard-cosine": interventions(stage_one=True),
            "motion": (judged(EVERYWHERE),),
            "centroid": SYSTEM,
            "motion-no-phase-errors": SYSTEM,
            "centroid-no-phase-errors": SYSTEM,
            "visual-transformer": SYSTEM,
            "visual-unet": SYSTEM,
            "visual-unet-cosine": SYSTEM,
        },
    ),
}


def settled(evaluation: Evaluation, matcher: str) -> Evaluation:
    """`MATCHED` stands for the tier's own matcher."""
    if evaluation.shown.matcher != MATCHED:
        return evaluation
    return replace(evaluation, shown=replace(evaluation.shown, matcher=matcher))


def reproduce(tier: Tier, out: Path, matcher: str = "embedded", workers: Workers = CORES, threads: int = 1) -> Path:
    """Runs a tier into `out` and returns the report's page; the same call continues."""
    load_matcher(matcher)  # complains before anything is recorded
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
        evaluation = settled(judged(SHIFTS), matcher)
        evaluate_once(scripted, results / scripted, evaluation, plan.scenes, demos, workers=workers)
    entries = []
    for name, seed in [(name, seed) for seed in plan.seeds for name in plan.evaluations]:
        recipe, evaluations = plan.recipe(name), tuple(settled(e, matcher) for e in plan.evaluations[name])
        mixed = not recipe.visual and any(not evaluation.stage_one for evaluation in evaluations)
        cache_of = folders[recipe.lifting, recipe.tie_break] if mixed else None
        entries.append(Entry(recipe, seed, evaluations, cache_of))
    stated(f"4/4 train and evaluate {len(entries)} policies")
    for _ in sweep(entries, root, demos, scenes=plan.scenes, workers=workers, threads=threads):
        page = write_report([results], results, matcher)
        log.info(f"wrote {page}; open it in a browser")
    return page


def stated(step: str) -> None:
    log.info(f"--- {step}")
