"""Choosing a headless OpenGL before MuJoCo is imported.

MuJoCo reads `MUJOCO_GL` once, at import. Import `mujoco` from here, never directly.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys

from ..errors import UserError

APT_LINE = "apt-get install -y libegl1 libgl1-mesa-dri libopengl0"


def _loads(*libraries: str) -> bool:
    try:
        for library in libraries:
            ctypes.CDLL(library)
    except OSError:
        return False
    return True


def choose_backend() -> str:
    """The value for `MUJOCO_GL`: the user's own, else EGL, else OSMesa."""
    if chosen := os.environ.get("MUJOCO_GL"):
        return chosen
    if not sys.platform.startswith("linux"):
        return ""  # MuJoCo's own default
    if _loads("libEGL.so.1", "libOpenGL.so.0"):
        return "egl"
    if _loads("libOSMesa.so.8"):
        return "osmesa"
    raise UserError(f"no OpenGL library found for headless rendering; install one: {APT_LINE}")


# CUDA builds of torch bring triton, whose LLVM crashes when it is loaded after Mesa's.
with contextlib.suppress(ImportError):
    import triton  # noqa: F401

backend = choose_backend()
if backend:
    os.environ["MUJOCO_GL"] = backend
    if backend in ("egl", "osmesa"):
        os.environ["PYOPENGL_PLATFORM"] = backend
try:
    import mujoco
except (ImportError, AttributeError, RuntimeError) as problem:
    raise UserError(f"MuJoCo cannot start with MUJOCO_GL={backend}: {problem}; try: {APT_LINE}") from problem

__all__ = ["APT_LINE", "backend", "mujoco"]
