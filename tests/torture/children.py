"""Verbs in forked children of a process that has loaded everything, so that random moments fall into the work.

Nothing is replaced by something simpler, but it is made short: recordings of 96 steps, rollouts of 40, a training that
saves every second update, one chapter of the demonstration (16 steps, its references recorded), one figure of the
report, and, where Mesa draws in software and without threads, the parent's own GL context.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import importlib
import os
import resource
import select
import shutil
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from ..test_folders import processes

MARK = "MEMCORR_TORTURE"  # in the environment that every child inherits: that is how orphans are found
DISK = "MEMCORR_TORTURE_DISK"  # where the preloaded library is
STEPS = {"collect": 96, "evaluate": 40, "demo": 16}  # the expert needs 86
MODULES = (
    *("memcorr.cli", "memcorr.demos.collect", "memcorr.correspondence.pictures", "memcorr.correspondence.flow"),
    *("memcorr.correspondence.embedded.matcher", "memcorr.training.loop", "memcorr.evaluation.evaluate"),
    *("memcorr.report.page", "memcorr.show.demo", "memcorr.reproduce", "memcorr.bench.run", "memcorr.cli.doctor"),
    *("memcorr.correspondence.embedded.train", "torch.utils.tensorboard", "matplotlib.pyplot", "imageio_ffmpeg"),
    *("torch._dynamo", "safetensors.numpy", "typeguard", "PIL.PngImagePlugin"),
)


def restarted(arguments: list[str], folder: Path) -> int:
    """This program once more, marked, with a disk that can be full and a renderer that survives a fork."""
    environment = {**os.environ, MARK: str(os.getpid()), "LP_NUM_THREADS": "0", "OMP_NUM_THREADS": "1"}
    if compiler := shutil.which("gcc") or shutil.which("cc"):
        library, source = str(folder / "disk.so"), str(Path(__file__).parent / "disk.c")
        subprocess.run([compiler, "-shared", "-fPIC", "-O1", source, "-o", library, "-ldl"], check=True)
        environment |= {"LD_PRELOAD": library, DISK: library}
    return subprocess.run([sys.executable, "-m", "tests.torture", *arguments], env=environment).returncode


def load(worlds: tuple[str, ...] = ()) -> None:
    """Everything that a verb loads, and the worlds with their pictures."""
    import cv2
    import torch

    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    cv2.setNumThreads(0)
    for name in MODULES:
        importlib.import_module(name)
    from memcorr.worlds.world import shared_world

    for name in worlds:
        world = shared_world(name)
        if not world.__dict__.get("renderer"):
            from OpenGL import GL

            _ = world.renderer
            if b"llvmpipe" not in GL.glGetString(GL.GL_RENDERER):  # what lives on a card is not forked
                del world.__dict__["renderer"]


@dataclasses.dataclass(frozen=True)
class Trouble:
    """What is in store for a child: a disk that refuses the Nth write, or all from there, or more bytes than so many
    in a file; or the kill at the Nth write."""

    write: int = -1
    once: bool = False
    deadly: bool = False
    size: int | None = None


def disk() -> ctypes.CDLL | None:
    if DISK not in os.environ:
        return None
    library = ctypes.CDLL(os.environ[DISK])
    library.disk.argtypes, library.disk_below.argtypes = [ctypes.c_long] * 3, [ctypes.c_char_p, ctypes.c_long]
    library.written.restype = ctypes.c_long
    return library


def start(arguments: list[str], errors: Path, out: Path | None = None, trouble: Trouble | None = None) -> int:
    """`memcorr ARGUMENTS [--out OUT]` in a forked child, whose number is returned. Its standard error goes to a file,
    beside which it leaves how often it wrote below OUT. With two workers it is as long as ever: these are spawned."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    code, library = 70, disk()
    try:
        os.setsid()
        sink = os.open(errors, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(sink, 2)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if "2" not in arguments[arguments.index("--workers") :][1:2] if "--workers" in arguments else True:
            shorten(arguments[0])
        if out is not None and library is not None:
            trouble = trouble or Trouble()
            library.disk(-1, trouble.write, int(trouble.once))
            library.disk_below(f"{out}/".encode(), int(trouble.deadly))
        if trouble is not None and trouble.size is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (trouble.size, trouble.size))
        from memcorr.cli import main

        sys.argv = ["memcorr", *arguments, *(["--out", str(out)] if out else [])]
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
        main()
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stderr.flush()
            if library is not None and code == 0:
                errors.with_suffix(".writes").write_text(str(library.written()))
        os._exit(code)


def shorten(verb: str) -> None:
    """In a child: less of the same. Pictures are saved blank: the time to draw them is no moment worth a kill."""
    from matplotlib.figure import Figure

    from memcorr.report import page
    from memcorr.show import demo
    from memcorr.spec import SPEC
    from memcorr.training import loop

    save = Figure.savefig

    def blank(figure: Figure, *arguments: Any, **options: Any) -> None:
        figure.clear()
        save(figure, *arguments, **options)

    setattr(Figure, "savefig", blank)  # noqa: B010
    object.__setattr__(SPEC, "episode_steps", STEPS.get(verb, STEPS["collect"]))
    page.FIGURES = {"objective": page.FIGURES["objective"]}
    loop.SAVE_EVERY = loop.LOG_EVERY = 2
    demo.CHAPTERS = (dataclasses.replace(demo.CHAPTERS[0], tasks=("open",), policies=("servo",)),)


def processor_seconds(child: int) -> float:
    """What the child and its own children have used so far: moments are counted in it, as the machine may be busy."""
    ticks = 0
    with contextlib.suppress(OSError, ValueError):
        family = [child, *map(int, Path(f"/proc/{child}/task/{child}/children").read_text().split())]
        for number in family:
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
                ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def ended(child: int, moment: float | None = None, within: float = 1800) -> int | None:
    """The child's exit code; None if it was killed, after `moment` seconds of processor time, or by itself."""
    end = time.monotonic() + within
    while True:
        number, status = os.waitpid(child, os.WNOHANG)
        if number:
            code = os.waitstatus_to_exitcode(status)
            return None if code == -signal.SIGKILL else code
        left = end - time.monotonic()
        if moment is not None:
            left = min(left, moment - processor_seconds(child))
        if left <= 0:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return None
        wait(child, max(left / 3, 0.01))  # at most three of the family can be at work at once


def wait(child: int, seconds: float) -> None:
    """Until the child ends, at most so long; without looking again and again, which takes its time from it."""
    descriptor = os.pidfd_open(child)
    try:
        select.select([descriptor], [], [], seconds)
    finally:
        os.close(descriptor)


def told(errors: Path) -> list[str]:
    """What a person sees: progress bars overwrite themselves."""
    lines = errors.read_text(errors="replace").replace("\r", "\n").splitlines()
    return [line for line in lines if line.strip() and "%|" not in line]


def orphans() -> list[int]:
    return [number for number in processes(f"{MARK}={os.environ[MARK]}\0") if number != os.getpid()]
