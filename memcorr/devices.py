"""Where networks run: CUDA when there is one, unless told otherwise."""

from __future__ import annotations

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
