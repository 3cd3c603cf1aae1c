"""`memcorr doctor`: what this machine has, what it lacks, and where missing things go."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version

from ..errors import UserError
from ..workers import CORES


def _versions(*packages: str) -> str:
    return ", ".join(f"{p} {version(p)}" for p in packages)


def _renderer() -> str:
    from ..worlds.scenes import demonstration_scenes
    from ..worlds.world import World

    world = World()
    world.reset(demonstration_scenes()[0])
    frame = world.observe()
    if not 100 < frame.mask.sum() < 2000:
        raise UserError(f"rendered a frame in which the door covers {frame.mask.sum()} pixels; the GL driver is broken")
    from OpenGL import GL

    return f"{GL.glGetString(GL.GL_RENDERER).decode()} through {os.environ.get('MUJOCO_GL', 'the default')}"


def _torch() -> str:
    import torch

    device = "CUDA" if torch.cuda.is_available() else "CPU only"
    return f"torch {torch.__version__}, {device}, {torch.get_num_threads()} threads"


def _embedded() -> str:
    from ..correspondence.embedded.matcher import WEIGHTS, load_network

    load_network(WEIGHTS)
    return f"weights found, {WEIGHTS.stat().st_size / 1e6:.1f} MB"


def _romav2() -> str:
    from ..correspondence.romav2 import status

    return status()


def _xfeat() -> str:
    from ..correspondence.xfeat.package import status

    return status()


def _policy() -> str:
    from ..evaluation.evaluate import find_subject

    subject = find_subject("shipped")
    return f"shipped policy found: {subject.experiment}, seed {subject.train_seed}, {subject.stage}"


CHECKS: dict[str, tuple[bool, Callable[[], str]]] = {  # needed, finding
    "python": (True, lambda: f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
    "cores": (True, lambda: str(CORES)),
    "simulator": (True, lambda: _versions("mujoco", "metaworld", "gymnasium")),
    "rendering": (True, _renderer),
    "torch": (True, _torch),
    "embedded": (True, _embedded),
    "policy": (False, _policy),
    "xfeat": (False, _xfeat),
    "romav2": (False, _romav2),
    "serve": (False, lambda: _versions("websockets", "msgpack")),
    "hub": (False, lambda: _versions("huggingface_hub")),
}


def examine() -> Iterator[tuple[bool, str]]:
    """One finding per check: whether memcorr can work with it, and a line that says so."""
    for name, (needed, finding) in CHECKS.items():
        try:
            yield True, f"  ok       {name:10} {finding()}"
        except (UserError, ImportError, PackageNotFoundError, OSError, RuntimeError) as problem:
            yield not needed, f"  {'MISSING' if needed else 'absent '}  {name:10} {problem}"
