"""The command line: verbs in the order the data flows.

Commands import what they need when they run, so that `memcorr --help` is instant. A `UserError`
(or a file system that refuses) becomes one line on standard error and exit code 2.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import tyro

from .errors import UserError

app = tyro.extras.SubcommandApp()


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
