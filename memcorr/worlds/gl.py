"""Choosing a headless OpenGL before MuJoCo is imported.

MuJoCo reads `MUJOCO_GL` once, at import. Import `mujoco` from here, never directly.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import warnings
from typing import Any

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


def open_context(model: mujoco.MjModel, size: int) -> tuple[Any, mujoco.MjrContext]:
    """A GL context of this process and MuJoCo's own in it. Whatever the libraries raise becomes one line."""
    context = None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # GLFW's, about the missing display
            if not hasattr(mujoco.GLContext, "_context"):  # one that fails half-made complains when it is freed
                mujoco.GLContext._context = None
            context = mujoco.GLContext(size, size)
            context.make_current()
            return context, mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_100)
    except Exception as problem:  # each library has errors of its own
        with contextlib.suppress(Exception):
            context.free()  # type: ignore[union-attr]
        device = os.environ.get("MUJOCO_EGL_DEVICE_ID")
        chosen = f"MUJOCO_GL={backend or 'default'}" + (f" and MUJOCO_EGL_DEVICE_ID={device}" if device else "")
        reason = " ".join(str(problem).split())[:150] or type(problem).__name__
        remedy = f"try MUJOCO_GL=egl and no MUJOCO_EGL_DEVICE_ID, or: {APT_LINE}"
        raise UserError(f"nothing can be drawn with {chosen} ({reason}); {remedy}") from None


__all__ = ["APT_LINE", "backend", "mujoco", "open_context"]
