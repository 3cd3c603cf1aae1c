"""Where networks run (CUDA when there is one, unless told otherwise), and what they need of the system."""

from __future__ import annotations

import ctypes

import torch

from .errors import UserError


def choose_device(name: str) -> torch.device:
    if name not in ("auto", "cpu", "cuda"):
        raise UserError(f"--device {name}: choose auto, cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: this machine has no CUDA device that torch can use; give --device cpu")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def keep_freed_memory() -> None:
    """Stops glibc from handing large freed blocks back to the system, only to fault them in again
    at the next update or decision (some 9,000 page faults per update). Other C libraries are left alone."""
    mmap_threshold, trim_threshold = -3, -1  # <malloc.h>
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return
    mallopt(mmap_threshold, 2**30)
    mallopt(trim_threshold, 2**31 - 1)
