"""The command line: verbs in the order the data flows.

Commands import what they need when they run, so that `memcorr --help` is instant. What the user got wrong
(a value, a file, a file system that refuses) becomes one line on standard error and exit code 2.
"""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import math
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable
from itertools import dropwhile, takewhile
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, Literal, cast

import tyro
from tyro.constructors import PrimitiveConstructorSpec

from .errors import UserError
from .runs import CORES, keep_freed_memory
from .spec import TASKS, DepthSampling, Task, TestSet

app = tyro.extras.SubcommandApp()
matcher_app = tyro.extras.SubcommandApp()


def number(kind: type, lowest: float, highest: float, words: str) -> PrimitiveConstructorSpec:
    """An option that is a number in a range; anything else is answered with `words`."""

    def read(given: list[str]) -> Any:
        try:
            value = kind(given[0])
        except ValueError:
            value = math.nan
        if not lowest <= value <= highest:
            raise ValueError(f"{given[0]!r}: give {words}")
        return value

    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=kind.__name__.upper(),
        instance_from_str=read,
        is_instance=lambda value: isinstance(value, kind),
        str_from_instance=lambda value: [str(value)],
    )


Seed = Annotated[int, number(int, 0, 2**63 - 1, "a whole number from 0 up, such as 42")]
Count = Annotated[int, number(int, 1, 10**9, "a whole number from 1 up")]
Processes = Annotated[int, number(int, 1, 4096, "a whole number from 1 up")]
Whole = Annotated[int, number(int, -(10**9), 10**9, "a whole number")]
Speed = Annotated[float, number(float, 0, 1e9, "a number from 0 up")]


def verb(of: tyro.extras.SubcommandApp, name: str | None = None) -> Callable[[Callable[..., None]], Callable[..., Any]]:
    """Registers a command. Parsing only returns what is to be called: its mistakes are told apart from the work's."""

    def register(command: Callable[..., None]) -> Callable[..., Any]:
        @functools.wraps(command)
        def later(*args: Any, **kwargs: Any) -> Callable[[], None]:
            return functools.partial(command, *args, **kwargs)

        of.command(name=name)(later)
        return command

    return register


@verb(app)
def demo(
    out: Path = Path("demo"),
    policy: str = "shipped",
    scenes: Count = 25,
    scene_seed: Seed = 0,
    workers: Processes = CORES,
) -> None:
    """Watch the shipped policy open and close the door outside its training: counts, videos and a page.

    Args:
        out: Folder for everything that is made.
        policy: shipped, or the folder of a run.
        scenes: Scenes of the combined shift, each with both tasks and both references.
        scene_seed: Draws fresh scenes; the fixed set is seed 0.
        workers: Processes.
    """
    from .show.demo import demo

    demo(out, policy, scenes, scene_seed, workers)


@verb(app)
def collect(out: Path = Path("data/demos"), pairs: Count = 100, seed: Seed = 0, workers: Processes = CORES) -> None:
    """Record the paired demonstrations; the same command again continues an interrupted run.

    Args:
        out: Folder of the store; made if missing.
        pairs: Paired configurations to record, the first ones of the hypercube of 100.
        seed: Draws the configurations; the paper's set is seed 0.
        workers: Processes. The files are the same for any number.
    """
    from .demos.collect import collect

    collect(out, pairs, seed, workers)


@verb(app)
def match(
    data: Path = Path("data/demos"),
    out: Path = Path("data/cache"),
    matcher: str = "embedded",
    pairs: Count = 80,
    rows: Count = 10_000,
    depth_sampling: DepthSampling = "object",
    workers: Processes = CORES,
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
    from .correspondence.cache import beside_the_paper, build_cache, read_cache
    from .correspondence.pictures import draw_matches, draw_reliability
    from .demos.store import Store

    store = Store.open(data)
    table = build_cache(store, out, matcher, pairs=pairs, rows=rows, depth_sampling=depth_sampling, workers=workers)
    cache = read_cache(out, store)
    area = draw_reliability(cache, out / "reliability.png")
    draw_matches(cache, store, out / "matches.png")
    print(beside_the_paper(table))
    print(f"AUC of confidence for an error below 10 mm: {area:.3f}")
    print(f"wrote {out}; look at {out}/matches.png and {out}/reliability.png")


@verb(matcher_app, "train")
def matcher_train(
    out: Path = Path("runs/matcher"),
    door: bool = True,
    seed: Seed = 0,
    steps: Count = 3000,
    threads: Processes = 1,
    workers: Processes = CORES,
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
    from . import runs
    from .correspondence.embedded.train import MatcherConfig, train

    with runs.threads(threads):
        train(MatcherConfig(seed=seed, steps=steps, door=door), out, workers)


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
        experiment: memcorr, memcorr-paper, standard, motion, centroid, visual-transformer, visual-unet or debug.
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
    from .training.experiments import changed, find_experiment
    from .training.loop import resolved, train

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
    permute_pairs: bool = False,
    scene_seed: Seed = 0,
    scenes: tuple[Seed, ...] = (),
    tasks: tuple[Task, ...] = TASKS,
    depth_sampling: DepthSampling = "object",
    data: Path | None = None,
    out: Path = Path("runs/evaluation"),
    workers: Processes = CORES,
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
    from .demos.collect import find_references
    from .evaluation.evaluate import evaluate, summary
    from .evaluation.intervention import Intervention

    pairing: Literal["kept", "permuted"] = "permuted" if permute_pairs else "kept"
    shown = Intervention(reference, matcher, phase_offset, phase_speed, pairing, depth_sampling)
    rows = evaluate(
        policy,
        out,
        conditions=cast(tuple[TestSet, ...], condition),  # checked where the scenes are drawn
        shown=shown,
        tasks=tasks,
        scene_seed=scene_seed,
        scenes=scenes,
        data=data,
        workers=workers,
    )
    print(summary(rows))
    if video:
        from .show.story import watch
        from .show.video import write_video

        print(f"wrote {write_video(watch(policy, shown, rows[0], data or find_references(out)), out)}")
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
    from .report.page import write_report

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
        tier: smoke runs every verb in minutes; cpu trains one seed of the main policy and two baselines;
            full is the whole paper.
        out: Folder for everything that is made.
        matcher: embedded, romav2 or flow.
        workers: Processes of collection, matching and evaluation.
        threads: Of training; 2 takes 60 % of the time where nothing else runs, and rounds differently.
    """
    from .reproduce import reproduce

    reproduce(tier, out, matcher, workers, threads)


@verb(app)
def bench(names: tyro.conf.Positional[tuple[str, ...]] = (), json: bool = False) -> None:
    """Speed as ratios against named baselines, measured interleaved in this very run.

    Args:
        names: What to measure; everything if none is given.
        json: Print a list of {name, ours_ms, baseline, baseline_ms, ratio} instead of a table.
    """
    from .bench.run import run, told

    results = run(names, None if json else print)
    if json:
        print(told(results))


@verb(app)
def doctor() -> None:
    """What this machine has and what it lacks; exit code 2 if something needed is missing."""
    from .doctor import examine

    if not all([_shown(finding) for finding in examine()]):
        raise UserError("something that memcorr needs is missing, see above")


def _shown(finding: tuple[bool, str]) -> bool:
    print(finding[1])
    return finding[0]


@verb(matcher_app, "evaluate")
def matcher_evaluate(
    settings: tyro.conf.Positional[tuple[str, ...]] = (),
    matcher: str = "embedded",
    scene_seed: Seed = 0,
    out: Path = Path("data/matcher-errors"),
) -> None:
    """Measure a matcher's 3D error on live scenes, the paper's conditions and harder ones.

    Args:
        settings: validation, boundary, extreme, camera, combined, camera-25, recoloured, relit; all if none given.
        matcher: embedded, romav2, flow, or a file of weights for the embedded one.
        scene_seed: Draws the scenes; the fixed sets are seed 0.
        out: Folder for one JSON file per setting.
    """
    from .correspondence.evaluate import PAPER_MEAN_MM, SETTINGS, evaluate
    from .correspondence.matcher import load_matcher, weights_digest
    from .runs import claimed, threads, write_json

    chosen = load_matcher(matcher)
    for setting in settings or SETTINGS:
        with threads(1), claimed(out):
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


class Console(logging.Handler):
    """What the library says: news to standard output, warnings to standard error."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr if record.levelno >= logging.WARNING else sys.stdout, flush=True)


class Terminated(KeyboardInterrupt):
    """SIGTERM: stop as after Ctrl-C, leaving nothing behind."""


def terminate(number: int, frame: FrameType | None) -> None:
    raise Terminated


def parsed() -> Callable[[], None]:
    """The command that was asked for; a value that it cannot take is a UserError of one line."""
    if shutil.get_terminal_size().columns < 40:
        os.environ["COLUMNS"] = "80"  # help could not be laid out
    words = io.StringIO()
    try:
        with contextlib.redirect_stderr(words):
            return app.cli(prog="memcorr", description="MemCorr-DP: a policy that follows a selected reference.")
    except SystemExit as stop:
        if not stop.code:  # help was asked for
            raise
        raise UserError(one_line(words.getvalue())) from None


def one_line(box: str) -> str:
    """The message in tyro's box, drawn or plain, coloured or not: what stands between its title and its next rule."""
    plain = re.sub(r"\x1b\[[\d;]*m", "", box)
    lines = [re.sub(r"^-+$", "", line.strip(" │╭╮╰╯─")) for line in plain.splitlines()[1:]]
    message = " ".join(takewhile(bool, dropwhile(lambda line: not line, lines)))
    message = re.sub(r"^Error parsing (\S+): ", r"\1 ", message).rstrip(".")
    return f"{message or 'the command line is not understood'}; see memcorr --help"


def main() -> None:
    if sys.argv[1:] == ["--version"]:
        from . import __version__

        print(f"memcorr {__version__}")
        return
    news = logging.getLogger("memcorr")
    news.handlers = [Console()]
    news.setLevel(logging.INFO)
    keep_freed_memory()
    signal.signal(signal.SIGTERM, terminate)
    try:
        parsed()()
    except UserError as problem:
        sys.exit(fail(str(problem)))
    except BrokenPipeError:  # whoever read our output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except OSError as problem:
        sys.exit(fail(f"{problem.filename or 'file system'}: {problem.strerror or problem}"))
    except MemoryError:
        sys.exit(fail("out of memory; fewer --workers need less"))
    except Terminated:
        print("memcorr: terminated; the same command continues", file=sys.stderr)
        sys.exit(143)
    except KeyboardInterrupt:
        print("memcorr: interrupted; the same command continues", file=sys.stderr)
        sys.exit(130)


def fail(message: str) -> int:
    print(f"memcorr: {message}", file=sys.stderr)
    return 2
