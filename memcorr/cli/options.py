"""Options that check themselves, the registry of verbs, and one handler for a command line that makes no sense."""

from __future__ import annotations

import contextlib
import functools
import io
import math
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from itertools import dropwhile, takewhile
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from tyro.constructors import PrimitiveConstructorSpec

from ..errors import UserError
from ..spec import DOOR, Lifting, PhaseSource, Task
from ..workers import CORES, Workers

app = tyro.extras.SubcommandApp()
matcher_app = tyro.extras.SubcommandApp()
data_app, import_app, export_app = (tyro.extras.SubcommandApp() for _ in range(3))


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
Port = Annotated[int, number(int, 0, 65535, "a port from 0 to 65535")]
ActionLimit = Annotated[float, number(float, 1e-9, 1e9, "a number above 0, such as 1")]
Whole = Annotated[int, number(int, -(10**9), 10**9, "a whole number")]
Cluster = Annotated[str | None, tyro.conf.arg(metavar="HOST:PORT|slurm|local-jobs")]
MatcherName = Annotated[
    str,
    tyro.conf.arg(
        help="embedded, xfeat, romav2, flow, your own as MODULE:CLASS, or a file of weights for the embedded one; to "
        "roll out also ground-truth."
    ),
]
PolicyName = Annotated[str, tyro.conf.arg(help="shipped, or the folder of a run.")]
Device = Annotated[str, tyro.conf.arg(help="auto, cpu or cuda.")]
LiftingName = Annotated[
    Lifting,
    tyro.conf.arg(
        help='"paper" is to the letter (bilinear depth, no abstaining, confidence as it comes), "object" takes depth '
        'from the object\'s own pixels, "rigid" also fits the one motion that carries all points.'
    ),
]
Points = Annotated[float, number(float, 1e-3, 100, "percentage points, such as 10")]
Speed = Annotated[float, number(float, 0, 1e9, "a number from 0 up")]


@dataclass(frozen=True)
class Work:
    """Where the work is done. What comes out is the same for any number of processes, here or on a cluster."""

    workers: Processes = CORES
    """Processes."""
    cluster: Cluster = None
    """Work there instead: a Ray cluster that this machine belongs to, or jobs of Slurm or of this machine."""

    def find(self) -> Workers:
        from ..cluster.pool import find_workers

        return find_workers(self.cluster, self.workers)


@dataclass(frozen=True)
class Scenes:
    """Which scenes are rolled out."""

    scene_seed: Seed = 0
    """Draws fresh scenes of the same condition; the fixed sets are seed 0."""
    scenes: tuple[Seed, ...] = ()
    """Numbers of single scenes; all if none is given."""


@dataclass(frozen=True)
class Rollouts(Scenes):
    """Which scenes are rolled out."""

    condition: tuple[str, ...] = ()
    """validation, boundary, extreme, camera, combined, disturbed; one or several. If none is given: combined, or the
    20 validation placements of one of Meta-World's own tasks."""
    tasks: tuple[Task, ...] = ()
    """The world's tasks (the door's are open and close); both if none is given."""
    world: str = DOOR
    """One of the ten worlds, all of them, or metaworld/NAME for any task of Meta-World, such as
    metaworld/button-press."""


@dataclass(frozen=True)
class Reference:
    """What the policy is shown of the reference."""

    reference: Literal["correct", "empty", "opposite"] = "correct"
    """The same task, nothing, or the opposite task (for a visual policy: the task code, no condition, or the opposite
    code). Success is judged by the original task."""
    matcher: MatcherName = "embedded"
    lifting: Lifting | None = None
    """As in `memcorr match`; what the policy was trained with if not given."""
    phase: PhaseSource | None = None
    """Which frame of the reference is now: by the steps made ("elapsed", as published), or by what the live scene looks
    like ("seen"); what the policy was trained with if not given."""
    phase_offset: Whole = 0
    """Frames by which the reference leads (negative: lags)."""
    phase_speed: Speed = 1.0
    """Speed of the reference against elapsed steps."""
    swap: Whole = 0
    """Show the other task's reference first, and exchange it for the right one after so many control steps."""
    permute_pairs: bool = False
    """Exchange the partners of the matched points."""
    data: Path | None = None
    """Demonstrations; pair 0 holds the references. If not given: data/demos, or, where that does not exist, a folder in
    OUT into which the references are recorded first."""


@dataclass(frozen=True)
class Disturbed:
    """What goes wrong."""

    disturb: tuple[str, ...] = ()
    """KIND or KIND=SIZE: start (0.2), set-back, bump (0.05 m), shift (0.03 m), action-noise (0.3), delay (3 steps),
    depth-noise (1), depth-holes (0.1), mask-erode (1 px), mask-dilate (2 px), mask-late (3 steps), extrinsics (1: 1
    degree and 5 mm), azimuth (20 degrees), orbit (the same, about the object), elevation (10 degrees). The condition
    "disturbed" takes them one after the other, but for orbit."""


@dataclass(frozen=True)
class Sensors:
    """What the live scene is seen with."""

    camera: Path | None = None
    """calibration.json of another camera to look through (docs/own-data.md), such as that of your recordings."""
    masks: Literal["simulator", "carried"] = "simulator"
    """Of live frames: the simulator's, or its first one "carried" by the matcher, as on a real robot."""


def verb(of: tyro.extras.SubcommandApp, name: str | None = None) -> Callable[[Callable[..., None]], Callable[..., Any]]:
    """Registers a command. Parsing only returns what is to be called: its mistakes differ from those of the work."""

    def register(command: Callable[..., None]) -> Callable[..., Any]:
        @functools.wraps(command)
        def later(*args: Any, **kwargs: Any) -> Callable[[], None]:
            return functools.partial(command, *args, **kwargs)

        of.command(name=name)(later)
        return command

    return register


def parsed() -> Callable[[], None]:
    """The command that was asked for; a value that it cannot take is a UserError of one line."""
    if shutil.get_terminal_size().columns < 40:
        os.environ["COLUMNS"] = "80"  # help could not be laid out
    words = io.StringIO()
    try:
        with contextlib.redirect_stderr(words):
            return app.cli(
                config=(tyro.conf.OmitArgPrefixes,),
                prog="memcorr",
                description="MemCorr-DP: a policy that follows a selected reference.",
            )
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
