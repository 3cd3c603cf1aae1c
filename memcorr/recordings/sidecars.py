"""What a recording does not say about itself: small JSON files beside it, and the store that comes out.

`mapping.json` says which feature or topic holds what; `calibration.json` holds the camera where the recording does not.
Nothing of this is guessed: what is missing is asked for, all of it at once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..demos.store import LAYOUT, demonstration_path, write_demonstration
from ..errors import UserError
from ..files import read_json, write_json
from ..frames import Camera, Frame
from ..runs import claimed
from ..spec import DOOR, Array, Task

RECORDED = "recorded"  # the world's name, if it has none
UNKNOWN = (float("nan"), float("nan"))  # u of an object whose place nobody measured


@dataclass(frozen=True)
class Recording:
    """One demonstration on its way into a store."""

    pair: int
    task: Task
    frames: Sequence[Frame]
    action: Array
    u: tuple[float, float] = UNKNOWN
    joint: Array | None = None
    object_pose: Array | None = None
    time: Array | None = None
    world: str | None = None  # as its own file says


@dataclass(frozen=True)
class Calibration:
    """Of the colour camera, for images of one size."""

    camera: Camera
    width: int
    height: int


def read_sidecar(given: Path | None, usual: Path) -> dict[str, Any]:
    """The file that was named, else the usual one, else nothing."""
    if given is None and not usual.exists():
        return {}
    return read_json(given or usual, dict[str, Any], "a JSON object", "correct it")


CALIBRATION = (
    '{"K": [[fx, 0, cx], [0, fy, cy], [0, 0, 1]], "image_size": [width, height], "pixel_centre": 0.0, '
    '"T_world_cam": 4 x 4, camera to world, OpenCV axes, metres}'
)


def read_calibration(given: Path | None, usual: Path) -> Calibration | None:
    """`pixel_centre` says where K has the centre of the first pixel: 0 in OpenCV, ROS and RealSense; 0.5 in ours."""
    content, place = read_sidecar(given, usual), given or usual
    if not content:
        return None
    if missing := [key for key in ("K", "image_size", "pixel_centre", "T_world_cam") if key not in content]:
        raise UserError(f"{place} lacks {', '.join(missing)}: give {CALIBRATION}")
    try:
        K, T = (np.array(content[key], np.float64) for key in ("K", "T_world_cam"))
        width, height = (int(n) for n in content["image_size"])
        centre = float(content["pixel_centre"])
    except (TypeError, ValueError) as problem:
        raise UserError(f"{place} is not understood ({problem}): give {CALIBRATION}") from None
    if K.shape != (3, 3) or T.shape != (4, 4) or centre not in (0.0, 0.5):
        raise UserError(f"{place}: K is 3 x 3, T_world_cam 4 x 4, pixel_centre 0 or 0.5: give {CALIBRATION}")
    return Calibration(Camera(continuous(K, centre), T), width, height)


def continuous(K: Array, pixel_centre: float = 0.0) -> Array:
    """`K` in the continuous image plane, where the first pixel's centre is at 0.5."""
    K = K.astype(np.float64).copy()
    K[:2, 2] += 0.5 - pixel_centre
    return K


def needs_calibration(place: Path, missing: Sequence[str]) -> UserError:
    return UserError(
        f"{place} says nothing about {' and '.join(missing)}: write {place / 'calibration.json'}: {CALIBRATION}"
    )


def fits(calibration: Calibration, height: int, width: int, place: Path) -> None:
    if (calibration.width, calibration.height) != (width, height):
        raise UserError(
            f"{place}: images are {width} x {height}, calibration.json is for "
            f"{calibration.width} x {calibration.height}; give K for the images as they are"
        )


def word(text: str) -> str:
    """A task's description as part of a file name."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "task"


def refuse_existing(out: Path, name: str) -> None:
    if (out / name).exists():
        raise UserError(f"{out} already holds {name}; choose another --out")


def understood(recordings: Iterator[Recording], place: Path, remedy: str) -> Iterator[Recording]:
    """The same; whatever reading one raises is told in one line.

    Decoders of other people's files raise what they like (struct.error, KeyError, SyntaxError, MemoryError, ...).
    """
    while True:
        try:
            one = next(recordings)
        except StopIteration:
            return
        except UserError:
            raise
        except Exception as problem:
            told = " ".join(str(problem).split())[:200]
            raise UserError(f"{place} is damaged ({type(problem).__name__}: {told}); {remedy}") from None
        yield one


def write_store(out: Path, recordings: Iterator[Recording], manifest: dict[str, Any], place: Path, remedy: str) -> int:
    """All of them; `collection.json` comes last, so an interrupted import is none. How many there were.

    `place` is what they come from, `remedy` what to do if that cannot be read.
    """
    refuse_existing(out, "collection.json")
    count, pairs, tasks = 0, 0, []
    with claimed(out):
        for r in understood(recordings, place, remedy):
            _write(out, r, manifest.get("world", DOOR), place)
            count, pairs = count + 1, max(pairs, r.pair + 1)
            if r.task not in tasks:
                tasks.append(r.task)
        if not count:
            raise UserError(f"nothing to import into {out}: there is no episode")
        write_json(out / "collection.json", manifest if "pairs" in manifest else fresh(manifest, pairs, tasks))
    return count


def _write(out: Path, r: Recording, world: str, place: Path) -> None:
    try:
        write_demonstration(
            demonstration_path(out, r.pair, r.task),
            r.frames,
            r.action,
            r.joint,
            r.object_pose,
            pair=r.pair,
            task=r.task,
            u=r.u,
            world=r.world or world,
            time=r.time,
        )
    except (ValueError, TypeError) as problem:  # values that no demonstration can have
        raise UserError(f"{place}: pair {r.pair}, {r.task} cannot be used ({problem}); record it again") from None


def fresh(manifest: dict[str, Any], pairs: int, tasks: Sequence[Task]) -> dict[str, Any]:
    return {"layout": LAYOUT, "world": manifest["world"], "pairs": pairs, "tasks": list(tasks), **manifest}
