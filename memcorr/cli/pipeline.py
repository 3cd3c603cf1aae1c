"""The verbs of the pipeline, in the order the data flows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal, cast

import tyro

from ..errors import UserError
from ..runs import CORES, claimed
from ..spec import DOOR, WORLD_TASKS, Lifting, PhaseSource, Task, TestSet, TieBreak
from .options import Cluster, Count, Processes, Seed, Speed, Whole, app, verb

Changes = Annotated[tuple[str, ...], tyro.conf.arg(name="set", metavar="FIELD=VALUE")]


@verb(app)
def collect(
    world: str = DOOR,
    out: Path | None = None,
    pairs: Count = 100,
    seed: Seed = 0,
    disturbed: bool = False,
    workers: Processes = CORES,
    cluster: Cluster = None,
) -> None:
    """Record the paired demonstrations; the same command again continues an interrupted run.

    Args:
        world: One of the ten worlds, or all of them.
        out: Folder of the store; data/demos for the door, data/worlds/WORLD for another, data/disturbed/WORLD for
            disturbed ones. With --world all, the folder that holds one store each; data/worlds or data/disturbed.
        pairs: Paired configurations to record, the first ones of the hypercube of 100.
        seed: Draws the configurations; the paper's set is seed 0.
        disturbed: Recordings that recover: starts differ, the hand and the object are disturbed on the way.
        workers: Processes. The files are the same for any number.
        cluster: Work there instead, to the same bytes: a Ray cluster that this machine belongs to, or jobs of Slurm or
            of this machine.
    """
    from ..cluster.pool import find_workers
    from ..demos.collect import collect, usual_store
    from ..demos.contact_sheet import write_gallery
    from ..demos.store import Store

    those = find_workers(cluster, workers)
    if world != "all":
        collect(out or usual_store(world, disturbed), pairs, seed, those, world, disturbed)
        return
    root = out or Path("data/disturbed" if disturbed else "data/worlds")
    for name in WORLD_TASKS:
        collect(root / name, pairs, seed, those, name, disturbed)
    with claimed(root):
        print(f"wrote {write_gallery([Store.open(root / name) for name in WORLD_TASKS], root / 'gallery.png')}")


@verb(app)
def match(
    data: Path = Path("data/demos"),
    out: Path = Path("data/cache"),
    matcher: str = "embedded",
    pairs: Count | None = None,
    rows: Count = 10_000,
    lifting: Lifting = "rigid",
    tie_break: TieBreak = "elapsed",
    measured: bool | None = None,
    phase: PhaseSource = "seen",
    workers: Processes = CORES,
    cluster: Cluster = None,
) -> None:
    """Match training rows once: the correspondence cache of the mixed stage, and its error table.

    Recordings without simulator truth are matched row by row, as memcorr-measured learns from them.

    Args:
        data: Demonstrations to match.
        out: Folder of the cache. The same command continues an interrupted run.
        matcher: embedded, xfeat, romav2, flow, or a file of weights for the embedded one.
        pairs: Training pairs of the store; the paper's are 0-79. Of recordings without truth, all if not given.
        rows: Rows of the cache, every frame 0 among them.
        lifting: "paper" is to the letter (bilinear depth, no abstaining, confidence as it comes), "object" takes depth
            from the object's own pixels, "rigid" also fits the one motion that carries all points.
        tie_break: Among reference frames with the same joint, the nearest in "elapsed" time or the "first"; the recipe
            that the cache is for says which (memcorr-literal: first).
        measured: Whether to do without simulator truth; if not given, where the store holds none.
        phase: Without truth: which frame of the reference is now, by what is "seen" or by the steps "elapsed".
        workers: Processes. The result is the same for any number.
        cluster: As for `memcorr collect`.
    """
    from ..cluster.pool import find_workers
    from ..correspondence.cache import Cache, beside_the_paper, build_cache
    from ..correspondence.pictures import draw_matches, draw_reliability
    from ..demos.store import Store

    store = Store.open(data)
    those = find_workers(cluster, workers)
    first = next(iter(store.present()), None)
    known = first is not None and first.object_pose is not None and first.recorded_joint is not None
    if measured or (measured is None and first is not None and not known):
        from ..following.measured import build_measured, in_words

        print(in_words(build_measured(store, out, matcher, pairs=pairs, phase=phase, lifting=lifting, workers=those)))
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
        workers=those,
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
    device: str = "auto",
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
        device: auto, cpu or cuda.
        threads: Threads of this process; runs side by side are faster with one each.
        stage_one: Begin with stage two after this stage-one folder of a run that differs in stage two alone.
        change: Fields of the recipe to train with instead, such as batch=64; the run is then named after them.
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
    condition: tuple[str, ...] = ("combined",),
    reference: Literal["correct", "empty", "opposite"] = "correct",
    matcher: str = "embedded",
    phase_offset: Whole = 0,
    phase_speed: Speed = 1.0,
    phase: PhaseSource | None = None,
    swap: Whole = 0,
    permute_pairs: bool = False,
    scene_seed: Seed = 0,
    scenes: tuple[Seed, ...] = (),
    tasks: tuple[Task, ...] = (),
    world: str = DOOR,
    disturb: tuple[str, ...] = (),
    lifting: Lifting | None = None,
    camera: Path | None = None,
    masks: Literal["simulator", "carried"] = "simulator",
    data: Path | None = None,
    out: Path = Path("runs/evaluation"),
    workers: Processes = CORES,
    cluster: Cluster = None,
    video: bool = False,
) -> None:
    """Roll a policy out in closed loop; rows are added to OUT/episodes.jsonl, those already there are kept.

    Args:
        policy: Folder of a run (its stage-one folder for stage one), shipped, expert, zeros, replay,
            replay-truth or servo.
        condition: validation, boundary, extreme, camera, combined, disturbed; one or several.
        reference: What the policy is shown: the same task, nothing, or the opposite task (for a visual
            policy: the task code, no condition, or the opposite code). Success is judged by the original task.
        matcher: embedded, xfeat, romav2, flow, ground-truth, or a file of weights for the embedded one.
        phase_offset: Frames by which the reference leads (negative: lags).
        phase_speed: Speed of the reference against elapsed steps.
        phase: Which frame of the reference is now: by the steps made ("elapsed", as published), or by what the live
            scene looks like ("seen"); what the policy was trained with if not given.
        swap: Show the other task's reference first, and exchange it for the right one after so many control steps.
        permute_pairs: Exchange the partners of the matched points.
        scene_seed: Draws fresh scenes of the same condition; the fixed sets are seed 0.
        scenes: Numbers of single scenes; all if none is given.
        tasks: The world's tasks (the door's are open and close); both if none is given.
        world: One of the ten worlds, or all of them.
        disturb: What goes wrong, KIND or KIND=SIZE: start (0.2), set-back, bump (0.05 m), shift (0.03 m),
            action-noise (0.3), delay (3 steps), depth-noise (1), depth-holes (0.1), mask-erode (1 px),
            mask-dilate (2 px), mask-late (3 steps), extrinsics (1: 1 degree and 5 mm), azimuth (20 degrees),
            elevation (10 degrees). The condition "disturbed" takes them one after the other.
        lifting: As in `memcorr match`; what the policy was trained with if not given.
        camera: calibration.json of another camera to look through (docs/own-data.md), such as that of your recordings.
        masks: Of live frames: the simulator's, or its first one "carried" by the matcher, as on a real robot.
        data: Demonstrations; pair 0 holds the references. If not given: data/demos, or, where that does not
            exist, a folder in OUT into which the references are recorded first.
        out: Folder of episodes.jsonl. The same command continues an interrupted run.
        workers: Processes. The rows are the same for any number.
        cluster: As for `memcorr collect`.
        video: Also write a video of the first rollout asked for.
    """
    from ..cluster.pool import find_workers
    from ..demos.collect import find_references
    from ..evaluation.evaluate import evaluate, summary, usual
    from ..evaluation.intervention import Intervention
    from ..evaluation.sensors import calibrated_view
    from ..worlds.disturbances import Disturbance

    pairing: Literal["kept", "permuted"] = "permuted" if permute_pairs else "kept"
    view = None if camera is None else calibrated_view(camera)
    if view is not None and video:
        raise UserError("--video shows the world's own camera: leave out --camera")
    shown = usual(policy, Intervention(reference, matcher, phase_offset, phase_speed, pairing, swap=swap, masks=masks))
    shown = replace(shown, lifting=lifting or shown.lifting, phase_from=phase or shown.phase_from)
    wrong = [Disturbance.parse(text) for text in disturb]
    those = find_workers(cluster, workers)
    for name in WORLD_TASKS if world == "all" else (world,):
        rows = evaluate(
            policy,
            out,
            conditions=cast(tuple[TestSet, ...], condition),  # checked where the scenes are drawn
            shown=shown,
            tasks=tasks,
            world=name,
            disturbances=wrong,
            scene_seed=scene_seed,
            scenes=scenes,
            data=data,
            workers=those,
            view=view,
        )
        print(f"{name}\n{summary(rows)}" if world == "all" else summary(rows))
    if video:
        from ..show.story import watch
        from ..show.video import write_video

        story = watch(policy, shown, rows[0], data or find_references(out, rows[0].world))
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
    matcher: str = "embedded",
    world: tuple[str, ...] = (DOOR,),
    scene_seed: Seed = 0,
    scenes: tuple[Seed, ...] = (),
    device: str = "auto",
    threads: Processes = 1,
    out: Path = Path("runs/sweep"),
    workers: Processes = CORES,
    cluster: Cluster = None,
) -> None:
    """Train and evaluate every experiment with every seed, side by side; the same command continues.

    Args:
        experiments: As for `memcorr train`; those that differ in stage two alone share stage one.
        seeds: Of training.
        change: Fields of all recipes to train with instead, such as batch=64.
        data: Demonstrations to train on, whose pair 0 holds the references of rollouts.
        cache: Correspondence cache; without one, relation policies are trained and evaluated after stage one.
        disturbed: Recordings that recover, for experiments that learn from them.
        condition: As for `memcorr evaluate`, as are the next five.
        reference: One or several.
        matcher: embedded, xfeat, romav2, flow, ground-truth, or a file of weights for the embedded one.
        world: One or several worlds to roll out in.
        scene_seed: Draws fresh scenes; the fixed sets are seed 0.
        scenes: Numbers of single scenes; all if none is given.
        device: Of training: auto, cpu or cuda (then a cluster gives each run a GPU).
        threads: Of each training.
        out: Folder of runs/ and results/.
        workers: Processes; as many policies are trained at a time as have threads in them.
        cluster: As for `memcorr collect`.
    """
    from ..cluster.pool import find_workers
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
    those = find_workers(cluster, workers)
    for _ in sweep(
        entries,
        out,
        data,
        scene_seed=scene_seed,
        scenes=scenes,
        disturbed=disturbed,
        device=device,
        threads=threads,
        workers=those,
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
    tier: Literal["smoke", "cpu", "full"] = "smoke",
    out: Path = Path("runs/reproduce"),
    matcher: str = "embedded",
    workers: Processes = CORES,
    threads: Processes = 1,
    cluster: Cluster = None,
    dry_run: bool = False,
) -> None:
    """Collect, match, train, evaluate and report in order; the same command continues.

    Args:
        tier: smoke runs every verb in minutes; cpu trains one seed of five policies (about 18 core-hours); full is the
            whole paper (about 110 core-hours of a machine without a GPU).
        out: Folder for everything that is made.
        matcher: embedded, xfeat, romav2 or flow.
        workers: Processes of collection, matching and evaluation, and policies trained side by side.
        threads: Of training; 2 takes 60 % of the time where nothing else runs, and rounds differently.
        cluster: As for `memcorr collect`.
        dry_run: Only print the runs, updates, rollouts, hours and disk space that it takes.
    """
    from ..cluster.pool import find_workers
    from ..reproduce import plan_text, reproduce

    if dry_run:
        print(plan_text(tier, workers))
        return
    reproduce(tier, out, matcher, find_workers(cluster, workers), threads)
