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
from itertools import dropwhile, takewhile
from typing import Annotated, Any

import tyro
from tyro.constructors import PrimitiveConstructorSpec

from ..errors import UserError

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
Whole = Annotated[int, number(int, -(10**9), 10**9, "a whole number")]
Cluster = Annotated[str | None, tyro.conf.arg(metavar="HOST:PORT|slurm|local-jobs")]
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
