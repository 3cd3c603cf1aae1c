"""`memcorr reproduce`: all verbs in order, resumable, with its expected cost printed first.

smoke   every verb on two pairs and tiny training: does the whole path work here?
cpu     one seed: MemCorr-DP as published and as ours, the standard objective, the two visual policies
full    the whole paper with its three seeds, ours beside it, and the schedules with one
many    one policy for seven objects, and the contest with those who learned less or nothing

Each policy is evaluated as soon as it is trained, and the report is written anew after each.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

from .correspondence.cache import build_cache
from .correspondence.matcher import load_matcher
from .demos.collect import collect
from .demos.store import Store
from .evaluation.contest import contest, untrained
from .evaluation.evaluate import list_jobs
from .evaluation.intervention import GROUND_TRUTH, ReferenceChoice
from .evaluation.rounds import ROUNDS, Round
from .evaluation.sweep import Entry, Evaluation, evaluate_once, lender, sweep
from .report.page import write_report
from .report.paper import MATCHED, USUAL
from .spec import SPEC, WORLD_TASKS, Lifting, TestSet, TieBreak
from .training.experiments import EXPERIMENTS, Experiment
from .training.loop import train
from .workers import CORES, Workers, processes_of

log = logging.getLogger(__name__)
PaperTier = Literal["smoke", "cpu", "full"]
Tier = Literal[PaperTier, "many"]
PHASE_OFFSETS, PHASE_SPEEDS = (-16, -8, 8, 16), (0.5, 0.75, 1.25, 1.5)  # the paper's text names only +16
SHIFTS: tuple[TestSet, ...] = ("boundary", "extreme", "camera", "combined")
judged = partial(Evaluation, shown=USUAL)
TRUE = replace(USUAL, matcher=GROUND_TRUTH)
EVERYWHERE: tuple[TestSet, ...] = ("validation", *SHIFTS)
CacheKind = tuple[Lifting, TieBreak]


def interventions(stage_one: bool) -> tuple[Evaluation, ...]:
    usual, choices = TRUE if stage_one else USUAL, get_args(ReferenceChoice)
    return tuple(judged(stage_one=stage_one, shown=replace(usual, reference=choice)) for choice in choices)


PHASES = (
    *(judged(shown=replace(USUAL, phase_offset=offset)) for offset in PHASE_OFFSETS),
    *(judged(shown=replace(USUAL, phase_speed=speed)) for speed in PHASE_SPEEDS),
)
FINAL = (
    judged(EVERYWHERE),
    judged(EVERYWHERE, shown=TRUE),
    judged(("combined",), shown=replace(TRUE, pairing="permuted")),
    *interventions(stage_one=False)[1:],
    *PHASES,
)
STAGE_ONE = interventions(stage_one=True)
SYSTEM = (judged(("boundary", "combined")),)
# What a policy's training costs per update, and any rollout: seconds of one core of two that are both busy (AMD EPYC of
# 2022, no GPU), measured on the committed runs.
SECONDS_PER_UPDATE = {"memcorr": 0.62, "visual-transformer": 0.62, "visual-unet": 0.35}
SECONDS_PER_ROLLOUT = 0.65
SECONDS_PER_MATCH = 0.06


@dataclass(frozen=True)
class Plan:
    """What a tier does."""

    seeds: tuple[int, ...]
    evaluations: dict[str, tuple[Evaluation, ...]]  # by experiment, in the order of training
    fewer_seeds: dict[str, tuple[int, ...]] = field(default_factory=dict)  # of an experiment that the paper lacks
    pairs: int = SPEC.pairs
    rows: int = SPEC.cache_rows  # of the correspondence cache
    scenes: tuple[int, ...] = ()  # all
    recipes: dict[str, Experiment] = field(default_factory=dict)  # instead of the published ones

    def recipe(self, name: str) -> Experiment:
        return self.recipes.get(name, EXPERIMENTS[name])

    def entries(self, matcher: str = "embedded", caches: dict[CacheKind, Path] | None = None) -> list[Entry]:
        """Every policy to train, one seed after the other."""
        found = []
        for name, seed in [(name, seed) for seed in self.seeds for name in self.evaluations]:
            if seed not in self.fewer_seeds.get(name, self.seeds):
                continue
            recipe, evaluations = self.recipe(name), tuple(matched_by(e, matcher) for e in self.evaluations[name])
            mixed = not recipe.visual and any(not evaluation.stage_one for evaluation in evaluations)
            cache = (caches or {}).get(cache_kind(recipe), Path()) if mixed else None
            found.append(Entry(recipe, seed, evaluations, cache))
        return found

    def cache_kinds(self) -> set[CacheKind]:
        return {cache_kind(entry.recipe) for entry in self.entries() if entry.cache is not None}


ONE_SEED: dict[str, tuple[Evaluation, ...]] = {
    "memcorr-literal": (*STAGE_ONE, *FINAL),
    "memcorr": FINAL,
    "standard-literal": STAGE_ONE,
    "visual-transformer": SYSTEM,
    "visual-unet": SYSTEM,
}
TIERS: dict[PaperTier, Plan] = {
    "smoke": Plan(
        seeds=(42,),
        evaluations={"memcorr": (judged(("combined",)), judged(("boundary",), stage_one=True, shown=TRUE))},
        pairs=2,
        rows=16,
        scenes=(0,),
        recipes={"memcorr": replace(EXPERIMENTS["memcorr"], train_pairs=2, batch=8, updates=(4, 2))},
    ),
    "cpu": Plan(seeds=(42,), evaluations=ONE_SEED),
    "full": Plan(
        seeds=SPEC.seeds,
        evaluations={
            **ONE_SEED,
            **dict.fromkeys(("motion-literal", "centroid-literal"), (judged(SHIFTS),)),
            "visual-unet-cosine": SYSTEM,
            **dict.fromkeys(("memcorr-cosine", "standard-cosine"), STAGE_ONE),
        },
        fewer_seeds=dict.fromkeys(("visual-unet-cosine", "memcorr-cosine", "standard-cosine"), SPEC.seeds[:1]),
    ),
}


@dataclass(frozen=True)
class Cost:
    """Of one policy, or of several together."""

    updates: int
    rollouts: int
    hours: float  # of one core


def cost_of(entry: Entry, entries: Sequence[Entry], scenes: Sequence[int] = ()) -> Cost:
    """What training and rolling out one policy takes; a stage one that another policy trains costs nothing again."""
    recipe = entry.recipe
    stages = [recipe.updates[0] if lender(entry, entries) is None else 0]
    stages.append(recipe.updates[1] if recipe.visual or entry.cache is not None else 0)
    rollouts = sum(len(list_jobs(e.conditions, 0, (), scenes, e.world)) for e in entry.evaluations)
    seconds = sum(stages) * SECONDS_PER_UPDATE[recipe.network] + rollouts * SECONDS_PER_ROLLOUT
    return Cost(sum(stages), rollouts, seconds * recipe.batch / SPEC.batch / 3600)


@dataclass(frozen=True)
class Generalist:
    """What the tier `many` does: one policy for several worlds."""

    recipe: Experiment = EXPERIMENTS["memcorr-many"]
    seed: int = SPEC.seeds[0]
    recovering: int = SPEC.pairs  # pairs of recordings that recover, of each world
    rows: int = 1600  # of each world's correspondence cache
    beside: tuple[str, ...] = ("shipped", "servo", "replay", "expert")
    rounds: Sequence[Round] = ROUNDS

    @property
    def rollouts(self) -> int:
        """Of one contender."""
        return sum(one.rollouts for one in self.rounds)

    @property
    def cost(self) -> Cost:
        """Of the learned policy and of all contenders."""
        rollouts = (2 + len(self.beside)) * self.rollouts
        matching = len(self.recipe.worlds) * self.rows * SECONDS_PER_MATCH
        updates = self.recipe.total_updates * SECONDS_PER_UPDATE[self.recipe.network] * self.recipe.batch / SPEC.batch
        hours = (updates + matching + rollouts * SECONDS_PER_ROLLOUT) / 3600
        return Cost(self.recipe.total_updates, rollouts, hours)

    def text(self, workers: int) -> str:
        cost, worlds = self.cost, len(self.recipe.worlds)
        return (
            f"{worlds} worlds with {self.recipe.train_pairs} pairs and {self.recovering} that recover, "
            f"{len(WORLD_TASKS) - worlds} held out; {self.recipe.name} {self.seed}, {cost.updates:,} updates; "
            f"{2 + len(self.beside)} contenders with {self.rollouts:,} rollouts each\n"
            f"about {cost.hours:.1f} core-hours, 5 GB; training takes one core, the rest all {workers}"
        )


MANY = Generalist()


def plan_text(tier: Tier, workers: int) -> str:
    """Runs, updates, rollouts, hours and disk of a tier, a line for each policy."""
    if tier == "many":
        return MANY.text(workers)
    plan = TIERS[tier]
    entries = plan.entries()
    costs = [cost_of(entry, entries, plan.scenes) for entry in entries]
    lines = [f"{'policy':24}{'seed':>6}{'updates':>10}{'rollouts':>10}{'core-hours':>12}"]
    for entry, cost in zip(entries, costs, strict=True):
        lines.append(f"{entry.recipe.name:24}{entry.seed:6}{cost.updates:10,}{cost.rollouts:10,}{cost.hours:12.1f}")
    matching = len(plan.cache_kinds()) * plan.rows * SECONDS_PER_MATCH / 3600
    updates, rollouts = sum(c.updates for c in costs), sum(c.rollouts for c in costs)
    hours = sum(c.hours for c in costs) + matching
    lines.append(f"{'all of them':24}{len(entries):6}{updates:10,}{rollouts:10,}{hours:12.1f}")
    disk = 0.05 + plan.pairs * 0.008 + len(entries) * 0.04
    lines.append(f"about {hours / max(workers, 1):.1f} hours on {workers} such cores, {disk:.1f} GB")
    return "\n".join(lines)


def cache_kind(recipe: Experiment) -> CacheKind:
    return recipe.lifting, recipe.tie_break


def matched_by(evaluation: Evaluation, matcher: str) -> Evaluation:
    """`MATCHED` stands for the tier's own matcher."""
    if evaluation.shown.matcher != MATCHED:
        return evaluation
    return replace(evaluation, shown=replace(evaluation.shown, matcher=matcher))


def reproduce(tier: Tier, out: Path, matcher: str = "embedded", workers: Workers = CORES, threads: int = 1) -> Path:
    """Runs a tier into `out` and returns the report's page; the same call continues."""
    load_matcher(matcher)  # complains before anything is recorded
    root = out / tier
    log.info(f"{plan_text(tier, processes_of(workers))}\nEverything goes to {root}; the same command continues.")
    if tier == "many":
        return generalise(MANY, root, matcher, workers, threads)
    plan = TIERS[tier]
    demos, results = root / "demos", root / "results"
    log.info("--- 1/4 collect")
    collect(demos, plan.pairs, workers=workers)
    store = Store.open(demos)
    log.info("--- 2/4 match")
    caches = {kind: root / f"cache-{'-'.join(kind)}" for kind in sorted(plan.cache_kinds())}
    train_pairs = next(iter(plan.entries())).recipe.train_pairs
    for (lifting, tie_break), cache in caches.items():
        rows_of: dict[str, Any] = {"pairs": train_pairs, "rows": plan.rows, "workers": workers}
        build_cache(store, cache, matcher, lifting=lifting, tie_break=tie_break, **rows_of)
    log.info("--- 3/4 who needs no training: expert and zeros judge the harness, replay and servo the policies")
    for scripted in ("expert", "zeros", "replay", "servo"):
        evaluation = matched_by(judged(SHIFTS), matcher)
        evaluate_once(scripted, results / scripted, evaluation, plan.scenes, demos, workers=workers)
    entries = plan.entries(matcher, caches)
    log.info(f"--- 4/4 train and evaluate {len(entries)} policies")
    for _ in sweep(entries, root, demos, scenes=plan.scenes, workers=workers, threads=threads):
        page = write_report([results], results, matcher)
        log.info(f"wrote {page}; open it in a browser")
    return page


def generalise(plan: Generalist, root: Path, matcher: str, workers: Workers, threads: int) -> Path:
    """The tier `many`: every world's recordings and cache, one training, the contest."""
    recipe, data, disturbed, caches = plan.recipe, root / "worlds", root / "disturbed", root / "caches"
    log.info("--- 1/4 collect")
    for world in dict.fromkeys((*recipe.worlds, *(world for one in plan.rounds for world in one.worlds))):
        pairs = recipe.train_pairs if world in recipe.worlds else 1  # a world held out gives its references
        collect(data / world, pairs, workers=workers, world=world)
    for world in recipe.worlds:
        collect(disturbed / world, plan.recovering, workers=workers, world=world, disturbed=True)
    log.info("--- 2/4 match")
    for world in recipe.worlds:
        rows_of: dict[str, Any] = {"pairs": recipe.train_pairs, "rows": plan.rows, "workers": workers}
        build_cache(Store.open(data / world), caches / world, matcher, lifting=recipe.lifting, **rows_of)
    log.info("--- 3/4 train")
    run = root / "runs" / f"{recipe.name}-{plan.seed}"
    train(recipe, data, plan.seed, run, caches, threads=threads, disturbed=disturbed)
    log.info("--- 4/4 the contest")
    fresh = untrained(run, root / "runs" / "fresh-weights")
    for policy in (str(run), str(fresh), *plan.beside):
        contest(policy, root / "results" / Path(policy).name, data, matcher, plan.rounds, workers)
    page = write_report([root / "results"], root / "results", matcher)
    log.info(f"wrote {page}; open it in a browser")
    return page
