"""The command line: verbs in the order the data flows.

Commands import what they need when they run, so that `memcorr --help` is instant. A `UserError`
(or a file system that refuses) becomes one line on standard error and exit code 2.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Literal, cast

import tyro

from .errors import UserError
from .protocol import TASKS, Condition, DepthSampling, Task

app = tyro.extras.SubcommandApp()
matcher_app = tyro.extras.SubcommandApp()


@app.command
def demo(
    out: Path = Path("demo"),
    policy: str = "shipped",
    scenes: int = 25,
    scene_seed: int = 0,
    workers: int = min(2, os.cpu_count() or 1),
) -> None:
    """Watch the shipped policy open and close the door outside its training: counts, videos and a page.

    Args:
        out: Folder for everything that is made.
        policy: shipped, or the folder of a run.
        scenes: Scenes of the combined shift, each with both tasks and both references.
        scene_seed: Draws fresh scenes; the fixed set is seed 0.
        workers: Processes.
    """
    from .demo import demo

    demo(out, policy, scenes, scene_seed, workers)


@app.command
def collect(
    out: Path = Path("data/demos"), pairs: int = 100, seed: int = 0, workers: int = min(2, os.cpu_count() or 1)
) -> None:
    """Record the paired demonstrations; the same command again continues an interrupted run.

    Args:
        out: Folder of the store; made if missing.
        pairs: Paired configurations to record, the first ones of the hypercube of 100.
        seed: Draws the configurations; the paper's set is seed 0.
        workers: Processes. The files are the same for any number.
    """
    from .collect import collect

    if workers < 1:
        raise UserError(f"--workers {workers}: give at least 1")
    collect(out, pairs, seed, workers)


@app.command
def match(
    data: Path = Path("data/demos"),
    out: Path = Path("data/cache"),
    matcher: str = "embedded",
    pairs: int = 80,
    rows: int = 10_000,
    depth_sampling: DepthSampling = "object",
    workers: int = min(2, os.cpu_count() or 1),
) -> None:
    """Match training rows once: the correspondence cache of the mixed stage, and its error table.

    Args:
        data: Demonstrations to match.
        out: Folder of the cache. The same command continues an interrupted run.
        matcher: embedded, romav2, flow, or a file of weights for the embedded one.
        pairs: Training pairs of the store; the paper's are 0-79.
        rows: Rows of the cache, every frame 0 among them.
        depth_sampling: "object" lifts from the object's own pixels, "bilinear" is the paper's.
        workers: Processes. The result is the same for any number.
    """
    from .cache import beside_the_paper, build_cache, read_cache
    from .demos import Store
    from .matchers.pictures import draw_matches, draw_reliability

    store = Store.open(data)
    table = build_cache(store, out, matcher, pairs=pairs, rows=rows, depth_sampling=depth_sampling, workers=workers)
    cache = read_cache(out, store)
    area = draw_reliability(cache, out / "reliability.png")
    draw_matches(cache, store, out / "matches.png")
    print(beside_the_paper(table))
    print(f"AUC of confidence for an error below 10 mm: {area:.3f}")
    print(f"wrote {out}; look at {out}/matches.png and {out}/reliability.png")


@matcher_app.command(name="train")
def matcher_train(
    out: Path = Path("runs/matcher"),
    door: bool = True,
    seed: int = 0,
    steps: int = 3000,
    threads: int = 1,
    workers: int = min(2, os.cpu_count() or 1),
) -> None:
    """Train the embedded matcher on rendered practice scenes; the same command continues.

    Args:
        out: Folder for practice scenes, training state and weights.
        door: Include the door among the practice objects; --no-door holds it out entirely.
        seed: Draws scenes, pairs and initial weights.
        steps: Optimiser steps.
        threads: Threads of the training itself.
        workers: Processes that render the practice scenes.
    """
    import torch

    from .matchers.training import MatcherConfig, train

    torch.set_num_threads(threads)
    train(MatcherConfig(seed=seed, steps=steps, door=door), out, workers)


@app.command
def train(
    experiment: tyro.conf.Positional[str],
    data: Path = Path("data/demos"),
    seed: Annotated[str, tyro.conf.arg(metavar="INT")] = "42",
    out: Path | None = None,
    cache: Path | None = None,
    device: str = "auto",
    threads: int = 1,
    stage_one: Path | None = None,
    dry_run: bool = False,
) -> None:
    """Train one policy in two stages; the same command continues an interrupted run.

    Args:
        experiment: memcorr, memcorr-paper, standard, motion, centroid, visual-transformer, visual-unet or debug.
        data: Demonstrations to train on.
        seed: Draws initial weights and batches; the paper's are 42, 43 and 44.
        out: Folder of the run; runs/EXPERIMENT-SEED if not given.
        cache: Correspondence cache (`memcorr match`), which stage two of a relation policy needs.
        device: auto, cpu or cuda.
        threads: Threads of this process; runs side by side are faster with one each.
        stage_one: Begin with stage two after this stage-one folder of a run that differs in stage two alone.
        dry_run: Print the resolved configuration and the parameter total as JSON, and stop.
    """
    from .training import train

    if not seed.isdecimal():
        raise UserError(f"--seed {seed!r}: give a whole number, such as 42")
    folder = out or Path("runs") / f"{experiment}-{seed}"
    train(experiment, data, int(seed), folder, cache, device, threads, dry_run, stage_one)


@app.command
def evaluate(
    policy: tyro.conf.Positional[str],
    condition: tuple[str, ...] = ("combined",),
    reference: Literal["correct", "empty", "opposite"] = "correct",
    matcher: str = "embedded",
    phase_offset: int = 0,
    phase_speed: float = 1.0,
    permute_pairs: bool = False,
    scene_seed: int = 0,
    scenes: tuple[int, ...] = (),
    tasks: tuple[Task, ...] = TASKS,
    depth_sampling: DepthSampling = "object",
    data: Path | None = None,
    out: Path = Path("runs/evaluation"),
    workers: int = min(2, os.cpu_count() or 1),
    video: bool = False,
) -> None:
    """Roll a policy out in closed loop; rows are added to OUT/episodes.jsonl, those already there are kept.

    Args:
        policy: Folder of a run (its stage-one folder for stage one), shipped, expert or zeros.
        condition: validation, boundary, extreme, camera, combined; one or several.
        reference: What the policy is shown: the same task, nothing, or the opposite task (for a visual
            policy: the task code, no condition, or the opposite code). Success is judged by the original task.
        matcher: embedded, romav2, flow or ground-truth.
        phase_offset: Frames by which the reference leads (negative: lags).
        phase_speed: Speed of the reference against elapsed steps.
        permute_pairs: Exchange the partners of the matched points.
        scene_seed: Draws fresh scenes of the same condition; the fixed sets are seed 0.
        scenes: Numbers of single scenes; all if none is given.
        tasks: open, close or both.
        depth_sampling: As in `memcorr match`.
        data: Demonstrations; pair 0 holds the references. If not given: data/demos, or, where that does not
            exist, a folder in OUT into which the references are recorded first.
        out: Folder of episodes.jsonl. The same command continues an interrupted run.
        workers: Processes. The rows are the same for any number.
        video: Also write a video of the first rollout asked for.
    """
    from .collect import find_references
    from .controllers import Intervention
    from .evaluation import evaluate, summary

    shown = Intervention(reference, matcher, phase_offset, phase_speed, permute_pairs, depth_sampling)
    rows = evaluate(
        policy,
        out,
        conditions=cast(tuple[Condition, ...], condition),  # checked where the scenes are drawn
        shown=shown,
        tasks=tasks,
        scene_seed=scene_seed,
        scenes=scenes,
        data=data,
        workers=workers,
    )
    print(summary(rows))
    if video:
        from .story import watch
        from .video import write_video

        print(f"wrote {write_video(watch(policy, shown, rows[0], data or find_references(out)), out)}")
    print(f"{len(rows)} rollouts in {out / 'episodes.jsonl'}; next: memcorr report {out}")


@app.command
def report(
    places: tyro.conf.Positional[tuple[Path, ...]] = (Path("runs"),),
    out: Path = Path("report"),
    matcher: str | None = None,
    scene_seed: int | None = None,
) -> None:
    """Every table and figure of the paper from episodes.jsonl files, ours beside the paper's value.

    Args:
        places: Files or folders; every episodes.jsonl below them is read.
        out: Folder for REPORT.md, report.html and the figures.
        matcher: Which matcher stands in for the paper's RoMa v2; the first measured of embedded, romav2, flow.
        scene_seed: Which scenes fill the tables; 0, the fixed ones, if measured.
    """
    from .report import write_report

    page = write_report(places, out, matcher, scene_seed)
    print(f"wrote {page} and its figures; open it in a browser")


@app.command
def reproduce(
    tier: Literal["smoke", "cpu", "full"] = "smoke",
    out: Path = Path("runs/reproduce"),
    matcher: str = "embedded",
    workers: int = min(2, os.cpu_count() or 1),
    threads: int = 1,
) -> None:
    """Collect, match, train, evaluate and report in order; the same command continues.

    Args:
        tier: smoke runs every verb in minutes; cpu trains one seed of the main policy and two baselines;
            full is the whole paper.
        out: Folder for everything that is made.
        matcher: embedded, romav2 or flow.
        workers: Processes of collection, matching and evaluation.
        threads: Of training; 2 takes 60 % of the time where nothing else runs, and rounds differently.
    """
    from .reproduce import reproduce

    reproduce(tier, out, matcher, workers, threads)


@app.command
def bench(names: tyro.conf.Positional[tuple[str, ...]] = (), json: bool = False) -> None:
    """Speed as ratios against named baselines, measured interleaved in this very run.

    Args:
        names: What to measure; everything if none is given.
        json: Print a list of {name, ours_ms, baseline, baseline_ms, ratio} instead of a table.
    """
    from .bench import run

    run(names, as_json=json)


@app.command
def doctor() -> None:
    """What this machine has and what it lacks; exit code 2 if something needed is missing."""
    from .doctor import examine

    if not examine():
        raise UserError("something that memcorr needs is missing, see above")


@matcher_app.command(name="evaluate")
def matcher_evaluate(
    settings: tyro.conf.Positional[tuple[str, ...]] = (),
    matcher: str = "embedded",
    scene_seed: int = 0,
    out: Path = Path("data/matcher-errors"),
) -> None:
    """Measure a matcher's 3D error on live scenes, the paper's conditions and harder ones.

    Args:
        settings: validation, boundary, extreme, camera, combined, camera-25, recoloured, relit; all if none given.
        matcher: embedded, romav2, flow, or a file of weights for the embedded one.
        scene_seed: Draws the scenes; the fixed sets are seed 0.
        out: Folder for one JSON file per setting.
    """
    import torch

    from .files import output_folder, write_json
    from .matchers import load_matcher, weights_digest
    from .matchers.evaluation import PAPER_MEAN_MM, SETTINGS, evaluate

    torch.set_num_threads(1)
    output_folder(out)
    chosen = load_matcher(matcher)
    for setting in settings or SETTINGS:
        table = evaluate(chosen, setting, seed=scene_seed) | {"weights": weights_digest(matcher)}
        write_json(out / f"{setting}.json", table)
        paper = PAPER_MEAN_MM.get(setting)
        print(
            f"{setting:12} mean over decisions {table['mean_over_decisions_mm']:6.2f} mm"
            f" (paper {f'{paper:.2f}' if paper else 'unmeasured'})  median {table['median_mm']:.2f}"
            f"  p95 {table['p95_mm']:.2f}  p99 {table['p99_mm']:.2f}  fallback {table['fallback_decisions']}"
            f"/{table['rows']}"
        )


app.command(matcher_app, name="matcher", help="Train the embedded matcher, or measure a matcher on live scenes.")


def main() -> None:
    try:
        app.cli(prog="memcorr", description="MemCorr-DP: a diffusion policy that follows a selected reference.")
    except UserError as problem:
        sys.exit(fail(str(problem)))
    except OSError as problem:
        sys.exit(fail(f"{problem.filename or 'file system'}: {problem.strerror or problem}"))
    except KeyboardInterrupt:
        print("memcorr: interrupted; the same command continues", file=sys.stderr)
        sys.exit(130)


def fail(message: str) -> int:
    print(f"memcorr: {message}", file=sys.stderr)
    return 2
