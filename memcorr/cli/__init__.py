"""The command line. Commands import what they need when they run, so that `memcorr --help` is instant.

What the user got wrong (a value, a file, a file system that refuses) becomes one line on standard error and
exit code 2.
"""

from __future__ import annotations

import io
import logging
import os
import signal
import sys
from types import FrameType

from ..errors import UserError
from ..machine import keep_freed_memory
from . import pipeline as pipeline  # registers its verbs, in this order
from . import recordings as recordings
from . import tools as tools
from . import trials as trials
from .options import parsed


class Console(logging.Handler):
    """What the library says: news to standard output, warnings to standard error."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr if record.levelno >= logging.WARNING else sys.stdout, flush=True)


class Terminated(KeyboardInterrupt):
    """SIGTERM: stop as after Ctrl-C, leaving nothing behind."""


def terminate(number: int, frame: FrameType | None) -> None:
    raise Terminated


def main() -> None:
    if sys.argv[1:] == ["--version"]:
        from .. import __version__

        print(f"memcorr {__version__}")
        return
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal that knows no "±" still gets the rest
    news = logging.getLogger("memcorr")
    news.handlers = [Console()]
    news.setLevel(logging.INFO)
    keep_freed_memory()
    signal.signal(signal.SIGTERM, terminate)
    try:
        parsed()()
    except UserError as problem:
        sys.exit(fail(str(problem)))
    except BrokenPipeError:  # the reader of our output has gone
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
