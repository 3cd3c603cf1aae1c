"""The verbs of the pipeline, in the order the data flows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal, cast

import tyro

from ..demos.manner import Manner
from ..errors import UserError
from ..folders import claimed
from ..spec import DOOR, SPEC, WORLD_TASKS, PhaseSource, TestSet, TieBreak, stock_task
from .options import (
    Count,
    Device,
    Disturbed,
    LiftingName,
    MatcherName,
    Processes,
    Reference,
    Rollouts,
    Scenes,
    Seed,
    Sensors,
    Work,
    app,
    verb,
)

Changes = Annotated[tuple[str, ...], tyro.conf.arg(name="set", metavar="FIELD=VALUE")]


@verb(app)
def collect(
    world: str = DOOR,
    out: Path | None = None,
    pairs: Count | None = None,
    seed: Seed = 0,
    disturbed: bool = False,
    *,
    manner: Manner,
    work: Work,
) -> None:
    """Record the paired demonstrations; the same command again continues an interrupted run.

    Args:
        world: One of the ten worlds, all of them, or metaworld/NAME for any task of Meta-World.
        out: Folder of the store; data/demos for the door, data/worlds/WORLD for another, data/disturbed/WORLD for
            disturbed ones. With --world all, the folder that holds one store each; data/worlds or data/disturbed.
        pairs: Paired configurations to record, the first ones of the hypercube of 100; all if not given. Of a task of
            Meta-World that many recordings; one.
        seed: Draws the configurations; the paper's set is seed 0.
        disturbed: Recordings that recover: starts differ, the hand and the object are disturbed on the way.
    """
    from ..demos.collect import collect, usual_store
    from ..demos.contact_sheet import write_gallery
    from ..demos.store import Store

    workers, pairs = work.find(), pairs or (1 if stock_task(world) else SPEC.pairs)
    if world != "all":
        collect(out or usual_store(world, disturbed), pairs, seed, workers, world, disturbed, manner)
        return
    root = out or Path("data/disturbed" if disturbed else "data/worlds")
    for name in WORLD_TASKS:
        collect(root / name, pairs, seed, workers, name, disturbed, manner)
    with claimed(root):
        print(f"wrote {write_gallery([Store.open(root / name) for name in WORLD_TASKS], root / 'gallery.png')}")


@verb(app)
def match(
    data: Path = Path("data/demos"),
    out: Path = Path("data/cache"),
    matcher: MatcherName = "embedded",
    pairs: Count | None = None,
    rows: Count = 10_000,
    lifting: LiftingName = "rigid",
    tie_break: TieBreak = "elapsed",
    measured: bool | None = None,
    phase: PhaseSource = "seen",
    *,
    work: Work,
) -> None:
    """Match training rows once: the correspondence cache of the mixed stage, and its error table.

    Recordings without simulator truth are matched row by row, as memcorr-measured learns from them.

    Args:
        data: Demonstrations to match.
        out: Folder of the cache. The same command continues an interrupted run.
        pairs: Training pairs of the store; the paper's are 0-79. Of recordings without truth, all if not given.
        rows: Rows of the cache, every frame 0 among them.
        tie_break: Among reference frames with the same joint, the nearest in "elapsed" time or the "first"; the recipe
            that the cache is for says which (all of them: elapsed).
        measured: Whether to do without simulator truth; if not given, where the store holds none, or only one task.
        phase: Without truth: which frame of the reference is now, by what is "seen" or by the steps "elapsed".
    """
    from ..correspondence.cache import Cache, beside_the_paper, build_cache
    from ..correspondence.pictures import draw_matches, draw_reliability
    from ..demos.store import Store

    store, workers = Store.open(data), work.find()
    first = next(iter(store.present()), None)
    known = first is not None and first.object_pose is not None and first.recorded_joint is not None
    if measured or (measured is None and first is not None and (not known or len(store.tasks) < 2)):
        from ..following.measured import build_measured, in_words

        print(in_words(build_measured(store, out, matcher, pairs=pairs, phase=phase, lifting=lifting, workers=workers)))
        print(f"wrote {out}; next: memcorr train memcorr-measured --data {data} --cache {out}")
        return

    def draw(cache: Cache) -> None:
        draw_reliability(cache, out / "reliability.png")
        draw_matches(cache, store, out / "matches.png")

    table = build_cache(
        store,
        out,
        matcher,
        pairs=pairs or 80,
        rows=rows,
        tie_break=tie_break,
        lifting=lifting,
        workers=workers,
        draw=draw,
    )
    print(beside_the_paper(table))
    if table["auc"] is not None:  # there were points of either kind
        print(f"AUC of confidence for an error below 10 mm: {table['auc']:.3f}")
    print(f"wrote {out}; look at {out}/matches.png and {out}/reliability.png")


@verb(app)
def train(
    experiment: tyro.conf.Positional[str],
    data: Path = Path("data/demos"),
    seed: Seed = 42,
    out: Path | None = None,
    cache: Path | None = None,
    disturbed: Path | None = None,
    device: Device = "auto",
    threads: Processes = 1,
    stage_one: Path | None = None,
    change: Changes = (),
    dry_run: bool = False,
) -> None:
    """Train one policy in two stages; the same command continues an interrupted run.

    On several GPUs or machines: `torchrun -m memcorr train ...`; the processes share each batch.

    Args:
        experiment: memcorr (ours), memcorr-literal (the paper's) and its controls standard-literal, motion-literal and
            centroid-literal, visual-transformer, visual-unet, memcorr-cosine, standard-cosine, visual-unet-cosine,
            memcorr-many (one policy for seven worlds), memcorr-measured (recordings of your own, no simulator truth),
            or debug.
        data: Demonstrations to train on; for memcorr-many, as for --cache and --disturbed, a folder with one for each
            world.
        seed: Draws initial weights and batches; the paper's are 42, 43 and 44.
        out: Folder of the run; runs/EXPERIMENT-SEED if not given.
        cache: Correspondence cache (`memcorr match`), which stage two of a relation policy needs.
        disturbed: Recordings that recover (`memcorr collect --disturbed`), which memcorr-many learns from, too.
        threads: Threads of this process; runs side by side are faster with one each.
        stage_one: Begin with stage two after this stage-one folder of a run that differs in stage two alone.
        change: Fields of the recipe to train with instead, such as batch=64; the run is then named after them.
            updates=5 are five updates of stage one, updates=[5,3] also three of stage two.
        dry_run: Print the resolved configuration and the parameter total as JSON, and stop.
    """
    from ..training.experiments import changed, find_experiment
    from ..training.loop import resolved, train

    recipe = changed(find_experiment(experiment), read_changes(change))
    if dry_run:
        print(resolved(recipe, seed))
        return
    folder = out or Path("runs") / f"{recipe.name}-{seed}"
    train(recipe, data, seed, folder, cache, device, threads, stage_one, disturbed)


def read_changes(change: tuple[str, ...]) -> dict[str, str]:
    if wrong := [part for part in change if "=" not in part]:
        raise UserError(f"--set {wrong[0]}: give FIELD=VALUE, such as batch=64")
    return dict(part.split("=", 1) for part in change)


@verb(app)
def evaluate(
    policy: tyro.conf.Positional[str],
    out: Path = Path("runs/evaluation"),
    video: bool = False,
    *,
    scenes: Rollouts,
    reference: Reference,
    disturbance: Disturbed,
    sensors: Sensors,
    work: Work,
) -> None:
    """Roll a policy out in closed loop; rows are added to OUT/episodes.jsonl, those already there are kept.

    Args:
        policy: Folder of a run (its stage-one folder for stage one), shipped, expert, zeros, replay,
            replay-truth or servo.
        out: Folder of episodes.jsonl. The same command continues an interrupted run.
        video: Also write a video of the first rollout asked for.
    """
    from ..demos.collect import find_references
    from ..evaluation.evaluate import evaluate, summary, usual
    from ..evaluation.intervention import Intervention
    from ..evaluation.sensors import calibrated_view
    from ..worlds.disturbances import Disturbance

    view = None if sensors.camera is None else calibrated_view(sensors.camera)
    if view is not None and video:
        raise UserError("--video shows the world's own camera: leave out --camera")
    asked = Intervention(
        reference.reference,
        reference.matcher,
        reference.phase_offset,
        reference.phase_speed,
        "permuted" if reference.permute_pairs else "kept",
        swap=reference.swap,
        masks=sensors.masks,
    )
    shown = usual(policy, asked)
    shown = replace(shown, lifting=reference.lifting or shown.lifting, phase_from=reference.phase or shown.phase_from)
    wrong, workers = [Disturbance.parse(text) for text in disturbance.disturb], work.find()
    everywhere = scenes.world == "all"
    for name in WORLD_TASKS if everywhere else (scenes.world,):
        rows = evaluate(
            policy,
            out,
            conditions=cast(tuple[TestSet, ...], scenes.condition),  # checked where the scenes are drawn
            shown=shown,
            tasks=scenes.tasks,
            world=name,
            disturbances=wrong,
            scene_seed=scenes.scene_seed,
            scenes=scenes.scenes,
            data=reference.data,
            workers=workers,
            view=view,
        )
        print(f"{name}\n{summary(rows)}" if everywhere else summary(rows))
    if video:
        from ..show.story import watch
        from ..show.video import write_video

        story = watch(policy, shown, rows[0], reference.data or find_references(out, rows[0].world))
        with claimed(out):
            print(f"wrote {write_video(story, out)}")
    print(f"{len(rows)} rollouts in {out / 'episodes.jsonl'}; next: memcorr report {out}")


@verb(app)
def sweep(
    experiments: tuple[str, ...] = ("memcorr",),
    seeds: tuple[Seed, ...] = (42, 43, 44),
    change: Changes = (),
    data: Path = Path("data/demos"),
    cache: Path | None = None,
    disturbed: Path | None = None,
    condition: tuple[str, ...] = ("combined",),
    reference: tuple[Literal["correct", "empty", "opposite"], ...] = ("correct",),
    matcher: MatcherName = "embedded",
    world: tuple[str, ...] = (DOOR,),
    device: Device = "auto",
    threads: Processes = 1,
    out: Path = Path("runs/sweep"),
    *,
    scenes: Scenes,
    work: Work,
) -> None:
    """Train and evaluate every experiment with every seed, side by side; the same command continues.

    Args:
        experiments: As for `memcorr train`; those that differ in stage two alone share stage one.
        seeds: Of training.
        change: Fields of all recipes to train with instead, such as batch=64.
        data: Demonstrations to train on, whose pair 0 holds the references of rollouts.
        cache: Correspondence cache; without one, relation policies are trained and evaluated after stage one.
        disturbed: Recordings that recover, for experiments that learn from them.
        condition: As for `memcorr evaluate`.
        reference: One or several.
        world: One or several worlds to roll out in.
        device: Of training: auto, cpu or cuda (then a cluster gives each run a GPU).
        threads: Of each training.
        out: Folder of runs/ and results/.
    """
    from ..evaluation.intervention import Intervention
    from ..evaluation.sweep import Entry, Evaluation, sweep
    from ..training.experiments import changed, find_experiment

    conditions = cast(tuple[TestSet, ...], condition)  # checked where the scenes are drawn
    recipes = [changed(find_experiment(name), read_changes(change)) for name in dict.fromkeys(experiments)]
    shown = [Intervention(choice, matcher) for choice in dict.fromkeys(reference)]
    evaluations = tuple(Evaluation(conditions, False, s, w) for w in dict.fromkeys(world) for s in shown)
    entries = [
        Entry(recipe, seed, evaluations, None if recipe.visual else cache)
        for seed in dict.fromkeys(seeds)
        for recipe in recipes
    ]
    for _ in sweep(
        entries,
        out,
        data,
        scene_seed=scenes.scene_seed,
        scenes=scenes.scenes,
        disturbed=disturbed,
        device=device,
        threads=threads,
        workers=work.find(),
    ):
        pass
    print(f"{len(entries)} policies in {out / 'runs'}; next: memcorr report {out / 'results'}")


@verb(app)
def report(
    places: tyro.conf.Positional[tuple[Path, ...]] = (Path("runs"),),
    out: Path = Path("report"),
    matcher: str | None = None,
    scene_seed: Seed | None = None,
) -> None:
    """Every table and figure of the paper from episodes.jsonl files, ours beside the paper's value.

    Args:
        places: Files or folders; every episodes.jsonl below them is read.
        out: Folder for REPORT.md, report.html and the figures.
        matcher: Which matcher stands in for the paper's RoMa v2; the first measured of embedded, xfeat, romav2, flow.
        scene_seed: Which scenes fill the tables; 0, the fixed ones, if measured.
    """
    from ..report.page import write_report

    page = write_report(places, out, matcher, scene_seed)
    print(f"wrote {page} and its figures; open it in a browser")


@verb(app)
def reproduce(
    tier: Literal["smoke", "cpu", "full", "many"] = "smoke",
    out: Path = Path("runs/reproduce"),
    matcher: MatcherName = "embedded",
    threads: Processes = 1,
    dry_run: bool = False,
    *,
    work: Work,
) -> None:
    """Collect, match, train, evaluate and report in order; the same command continues.

    Args:
        tier: smoke runs every verb in minutes; cpu trains one seed of five policies (about 18 core-hours); full is the
            whole paper (about 110 core-hours of a machine without a GPU); many is one policy for seven objects and the
            contest with those who learned less or nothing.
        out: Folder for everything that is made.
        threads: Of training; 2 takes 60 % of the time where nothing else runs, and rounds differently.
        dry_run: Only print the runs, updates, rollouts, hours and disk space that it takes.
    """
    from ..reproduce import plan_text, reproduce

    if dry_run:
        print(plan_text(tier, work.workers))
        return
    reproduce(tier, out, matcher, work.find(), threads)
