"""What this machine computes with: its device, its threads, its memory, and what is written down of it."""

from __future__ import annotations

import contextlib
import ctypes
import platform
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from .errors import UserError

if TYPE_CHECKING:
    import torch


def padded(count: int, size: int) -> Iterator[NDArray[np.int64]]:
    """Indices 0 .. count - 1 in batches of exactly `size`; the last one repeats its last index.

    Matrix products of another shape round differently, so to get the same bits for one row and
    for many, compute in batches of one shape, and drops what was repeated.
    """
    for first in range(0, count, size):
        yield np.minimum(np.arange(first, first + size), count - 1)


def choose_device(name: str) -> torch.device:
    """CUDA when there is one, unless `name` says otherwise."""
    import torch

    if name not in ("auto", "cpu", "cuda"):
        raise UserError(f"--device {name}: choose auto, cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: this machine has no CUDA device that torch can use; give --device cpu")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Torch computes with `count` threads meanwhile: another number rounds differently."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def keep_freed_memory() -> None:
    """Stops glibc from handing large freed blocks back to the system, only to fault them in again
    at the next update or decision (some 9,000 page faults per update). Other C libraries are left alone.
    For processes that are ours alone: the command line's and its workers'."""
    mmap_threshold, trim_threshold = -3, -1  # <malloc.h>
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return
    mallopt(mmap_threshold, 2**30)
    mallopt(trim_threshold, 2**31 - 1)


def provenance() -> dict[str, str]:
    """What made a file: versions of this package and of what it stands on, the commit, the processor."""
    found = {}
    for package in ("memcorr", "torch", "mujoco", "metaworld", "numpy"):
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found | {"python": platform.python_version(), "commit": _commit(), "cpu": _cpu()}


def _commit() -> str:
    """Of the checkout that this package is run from, with a plus sign if it was changed; '' elsewhere."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run([*git, "status", "--porcelain", "."], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "")


def _cpu() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
