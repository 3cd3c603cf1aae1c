"""The verbs of the pipeline, in the order the data flows."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, cast

import tyro

from ..errors import UserError
from ..runs import CORES
from ..spec import DOOR, WORLD_TASKS, Lifting, PhaseSource, Task, TestSet, TieBreak
from .options import Count, Processes, Seed, Speed, Whole, app, verb


@verb(app)
def collect(
    world: str = DOOR,
    out: Path | None = None,
    pairs: Count = 100,
    seed: Seed = 0,
    workers: Processes = CORES,
) -> None:
    """Record the paired demonstrations; the same command again continues an interrupted run.

    Args:
        world: One of the ten worlds, or all of them.
        out: Folder of the store; data/demos for the door, data/worlds/WORLD for another. With --world all, the
            folder that holds one store each; data/worlds.
        pairs: Paired configurations to record, the first ones of the hypercube of 100.
        seed: Draws the configurations; the paper's set is seed 0.
        workers: Processes. The files are the same for any number.
    """
    from ..demos.collect import collect, usual_store
    from ..demos.contact_sheet import write_gallery
    from ..demos.store import Store

    if world != "all":
        collect(out or usual_store(world), pairs, seed, workers, world)
        return
    root = out or Path("data/worlds")
    for name in WORLD_TASKS:
        collect(root / name, pairs, seed, workers, name)
    print(f"wrote {write_gallery([Store.open(root / name) for name in WORLD_TASKS], root / 'gallery.png')}")


@verb(app)
def match(
    data: Path = Path("data/demos"),
    out: Path = Path("data/cache"),
    matcher: str = "embedded",
    pairs: Count = 80,
    rows: Count = 10_000,
    lifting: Lifting = "rigid",
    tie_break: TieBreak = "elapsed",
    workers: Processes = CORES,
) -> None:
    """Match training rows once: the correspondence cache of the mixed stage, and its error table.

    Args:
        data: Demonstrations to match.
        out: Folder of the cache. The same command continues an interrupted run.
        matcher: embedded, romav2, flow, or a file of weights for the embedded one.
        pairs: Training pairs of the store; the paper's are 0-79.
        rows: Rows of the cache, every frame 0 among them.
        lifting: "paper" is to the letter (bilinear depth, no abstaining, confidence as it comes), "object" takes depth
            from the object's own pixels, "rigid" also fits the one motion that carries all points.
        tie_break: Among reference frames with the same joint, the nearest in "elapsed" time or the "first"; the recipe
            that the cache is for says which (memcorr-literal: first).
        workers: Processes. The result is the same for any number.
    """
    from ..correspondence.cache import beside_the_paper, build_cache, read_cache
    from ..correspondence.pictures import draw_matches, draw_reliability
    from ..demos.store import Store

    store = Store.open(data)
    table = build_cache(
        store, out, matcher, pairs=pairs, rows=rows, tie_break=tie_break, lifting=lifting, workers=workers
    )
    cache = read_cache(out, store)
    draw_reliability(cache, out / "reliability.png")
    draw_matches(cache, store, out / "matches.png")
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
    device: str = "auto",
    threads: Processes = 1,
    stage_one: Path | None = None,
    change: Annotated[tuple[str, ...], tyro.conf.arg(name="set", metavar="FIELD=VALUE")] = (),
    dry_run: bool = False,
) -> None:
    """Train one policy in two stages; the same command continues an interrupted run.

    Args:
        experiment: memcorr (ours), memcorr-literal (the paper's), memcorr-no-phase-errors (in between), standard,
            motion, centroid, visual-transformer, visual-unet, their -cosine and -no-phase-errors variants, or debug.
        data: Demonstrations to train on.
        seed: Draws initial weights and batches; the paper's are 42, 43 and 44.
        out: Folder of the run; runs/EXPERIMENT-SEED if not given.
        cache: Correspondence cache (`memcorr match`), which stage two of a relation policy needs.
        device: auto, cpu or cuda.
        threads: Threads of this process; runs side by side are faster with one each.
        stage_one: Begin with stage two after this stage-one folder of a run that differs in stage two alone.
        change: Fields of the recipe to train with instead, such as batch=64; the run is then named after them.
        dry_run: Print the resolved configuration and the parameter total as JSON, and stop.
    """
    from ..training.experiments import changed, find_experiment
    from ..training.loop import resolved, train

    recipe = find_experiment(experiment)
    if change:
        if wrong := [part for part in change if "=" not in part]:
            raise UserError(f"--set {wrong[0]}: give FIELD=VALUE, such as batch=64")
        recipe = changed(recipe, dict(part.split("=", 1) for part in change))
    if dry_run:
        print(resolved(recipe, seed))
        return
    folder = out or Path("runs") / f"{recipe.name}-{seed}"
    train(recipe, data, seed, folder, cache, device, threads, stage_one)


@verb(app)
def evaluate(
    policy: tyro.conf.Positional[str],
    condition: tuple[str, ...] = ("combined",),
    reference: Literal["correct", "empty", "opposite"] = "correct",
    matcher: str = "embedded",
    phase_offset: Whole = 0,
    phase_speed: Speed = 1.0,
    phase: PhaseSource = "elapsed",
    permute_pairs: bool = False,
    scene_seed: Seed = 0,
    scenes: tuple[Seed, ...] = (),
    tasks: tuple[Task, ...] = (),
    world: str = DOOR,
    disturb: tuple[str, ...] = (),
    lifting: Lifting | None = None,
    data: Path | None = None,
    out: Path = Path("runs/evaluation"),
    workers: Processes = CORES,
    video: bool = False,
) -> None:
    """Roll a policy out in closed loop; rows are added to OUT/episodes.jsonl, those already there are kept.

    Args:
        policy: Folder of a run (its stage-one folder for stage one), shipped, expert, zeros, replay or replay-truth.
        condition: validation, boundary, extreme, camera, combined, disturbed; one or several.
        reference: What the policy is shown: the same task, nothing, or the opposite task (for a visual
            policy: the task code, no condition, or the opposite code). Success is judged by the original task.
        matcher: embedded, romav2, flow, ground-truth, or a file of weights for the embedded one.
        phase_offset: Frames by which the reference leads (negative: lags).
        phase_speed: Speed of the reference against elapsed steps.
        phase: Which frame of the reference is now: by the steps made ("elapsed", as published and trained), or by what
            the live scene looks like ("seen").
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
        data: Demonstrations; pair 0 holds the references. If not given: data/demos, or, where that does not
            exist, a folder in OUT into which the references are recorded first.
        out: Folder of episodes.jsonl. The same command continues an interrupted run.
        workers: Processes. The rows are the same for any number.
        video: Also write a video of the first rollout asked for.
    """
    from ..demos.collect import find_references
    from ..evaluation.evaluate import evaluate, summary, usual_lifting
    from ..evaluation.intervention import Intervention
    from ..worlds.disturbances import Disturbance

    pairing: Literal["kept", "permuted"] = "permuted" if permute_pairs else "kept"
    lifted = lifting or usual_lifting(policy)
    shown = Intervention(reference, matcher, phase_offset, phase_speed, pairing, lifted, phase)
    wrong = [Disturbance.parse(text) for text in disturb]
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
            workers=workers,
        )
        print(f"{name}\n{summary(rows)}" if world == "all" else summary(rows))
    if video:
        from ..show.story import watch
        from ..show.video import write_video

        print(f"wrote {write_video(watch(policy, shown, rows[0], data or find_references(out, rows[0].world)), out)}")
    print(f"{len(rows)} rollouts in {out / 'episodes.jsonl'}; next: memcorr report {out}")


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
        matcher: Which matcher stands in for the paper's RoMa v2; the first measured of embedded, romav2, flow.
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
) -> None:
    """Collect, match, train, evaluate and report in order; the same command continues.

    Args:
        tier: smoke runs every verb in minutes; cpu trains one seed of five policies;
            full is the whole paper.
        out: Folder for everything that is made.
        matcher: embedded, romav2 or flow.
        workers: Processes of collection, matching and evaluation.
        threads: Of training; 2 takes 60 % of the time where nothing else runs, and rounds differently.
    """
    from ..reproduce import reproduce

    reproduce(tier, out, matcher, workers, threads)
