"""The body of every import: what small JSON files say beside the recordings, and the store that comes out.

    import_recordings("lerobot", Path("dataset"), Path("store"))

`lerobot.py` and `mcap.py` each give `recordings(sidecars, world)`: how the store is described, and its demonstrations.

`mapping.json` says which feature or topic holds what; `calibration.json` holds the camera where the recording does not.
Nothing of this is guessed: what is missing is asked for, all of it at once.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ..demos.store import LARGEST, LAYOUT, demonstration_path, write_demonstration
from ..errors import UserError
from ..files import read_json, write_json
from ..folders import claimed
from ..frames import Camera, Frame
from ..spec import DOOR, Array, Task

RECORDED = "recorded"  # the world's name, if it has none
UNKNOWN = (float("nan"), float("nan"))  # u of an object whose place was not measured


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
    place: Path  # of the file


@dataclass(frozen=True)
class Sidecars:
    """What is said beside the recordings in `root`."""

    root: Path
    place: Path  # of mapping.json
    mapping: dict[str, Any]  # which feature or topic holds what, by our names
    calibration: Calibration | None
    masks: bool  # whether the recordings have masks of the object

    @staticmethod
    def read(root: Path, mapping: Path | None, calibration: Path | None, masks: bool) -> Sidecars:
        """Files that were named, else the usual ones if they are there."""
        place, camera = mapping or root / "mapping.json", read_calibration(calibration, root / "calibration.json")
        return Sidecars(root, place, _read(mapping, place), camera, masks)

    def require(self, found: Container[str], example: str, more: Sequence[str] = ()) -> None:
        """Complains about everything that is needed and not `found`, at once."""
        needed = ("rgb", "depth", "robot_state", "gripper", "action", *(("mask",) if self.masks else ()), *more)
        missing = [name for name in needed if name not in found]
        if missing:
            hints = [f"; a fixed camera may be in {self.root / 'calibration.json'}"] * bool(set(more) & set(missing))
            hints += ["; --no-masks imports without masks"] * ("mask" in missing)
            names = ", ".join(missing)
            raise UserError(f"{self.place} does not say where {names} come from: {example}{''.join(hints)}")

    def frames(self, columns: Mapping[str, Any]) -> list[Frame]:
        """Rows of rgb, depth, robot_state and gripper, and of mask, K and T_world_cam where the recording has them."""
        frames = []
        for t, (rgb, depth) in enumerate(zip(columns["rgb"], columns["depth"], strict=True)):
            if depth.shape != rgb.shape[:2]:
                raise UserError(
                    f"{self.root}: colour is {rgb.shape[:2]}, depth {depth.shape} pixels; align depth to colour when "
                    "recording"
                )
            mask = columns["mask"][t] if "mask" in columns else np.zeros(depth.shape, bool)
            K, T = (self._camera(name, columns, t, depth.shape) for name in ("K", "T_world_cam"))
            frames.append(Frame(rgb, depth, mask, Camera(K, T), columns["robot_state"][t], columns["gripper"][t]))
        return frames

    def _camera(self, name: str, columns: Mapping[str, Any], t: int, size: tuple[int, ...]) -> Array:
        """K or T_world_cam of row t: the recording's own, else that of calibration.json."""
        if name in columns:
            return columns[name][t]
        if self.calibration is None:
            raise needs_calibration(self.root, [name])
        fits(self.calibration, size)
        return getattr(self.calibration.camera, name)


def _read(given: Path | None, usual: Path) -> dict[str, Any]:
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
    content, place = _read(given, usual), given or usual
    if not content:
        return None
    if missing := [key for key in ("K", "image_size", "pixel_centre", "T_world_cam") if key not in content]:
        raise UserError(f"{place} lacks {', '.join(missing)}: give {CALIBRATION}")
    try:
        K, T = (np.array(content[key], np.float64) for key in ("K", "T_world_cam"))
        width, height = (int(n) for n in content["image_size"])
        centre = float(content["pixel_centre"])
    except (TypeError, ValueError, OverflowError) as problem:
        raise UserError(f"{place} is not understood ({problem}): give {CALIBRATION}") from None
    if K.shape != (3, 3) or T.shape != (4, 4) or centre not in (0.0, 0.5):
        raise UserError(f"{place}: K is 3 x 3, T_world_cam 4 x 4, pixel_centre 0 or 0.5: give {CALIBRATION}")
    if not (np.isfinite(K).all() and np.isfinite(T).all()):
        raise UserError(f"{place}: K and T_world_cam are finite numbers: give {CALIBRATION}")
    return Calibration(Camera(continuous(K, centre), T), width, height, place)


def continuous(K: Array, pixel_centre: float = 0.0) -> Array:
    """`K` in the continuous image plane, where the first pixel's centre is at 0.5."""
    K = K.astype(np.float64).copy()
    K[:2, 2] += 0.5 - pixel_centre
    return K


def needs_calibration(place: Path, missing: Sequence[str]) -> UserError:
    return UserError(
        f"{place} says nothing about {' and '.join(missing)}: write {place / 'calibration.json'}: {CALIBRATION}"
    )


def fits(calibration: Calibration, size: Sequence[int]) -> None:
    """`size` of the images: height, width."""
    height, width = size[:2]
    if (calibration.width, calibration.height) != (width, height):
        raise UserError(
            f"images are {width} x {height}, {calibration.place} is for "
            f"{calibration.width} x {calibration.height}; give K for the images as they are"
        )


def word(text: str) -> str:
    """A task's description, in any alphabet, as part of a file name: letters that it cannot have are told apart by a
    digest."""
    plain = "".join(c for c in unicodedata.normalize("NFKD", text.casefold()) if not unicodedata.combining(c))
    found = re.sub(r"[^a-z0-9]+", "-", plain).strip("-")
    if found and not any(c.isalnum() and not c.isascii() for c in plain):
        return found
    return f"{found or 'task'}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def decoded(content: Any, size: Sequence[int] | None, colour: bool) -> NDArray:
    """An image file as a camera's driver would write it; refused before it is decoded if it is of another kind, or of
    another size (height, width) than was declared."""
    with Image.open(content, formats=("PNG", "JPEG", "TIFF", "BMP", "WEBP")) as image:
        height, width = image.size[::-1] if size is None else size[:2]
        if image.size != (width, height) or max(image.size) > LARGEST:
            raise UserError(f"an image is {image.width} x {image.height} pixels; {width} x {height} was declared")
        return np.array(image.convert("RGB") if colour else image)


def whole_numbers(found: Any, whose: str) -> list[int]:
    if not isinstance(found, list) or not found or any(type(n) is not int or n < 0 for n in found):
        raise UserError(f"{whose} must be a list of whole numbers from 0 up, [0, 1, 2]")
    return found


def refuse_existing(out: Path, name: str) -> None:
    if (out / name).exists():
        raise UserError(f"{out} already holds {name}; choose another --out")


def understood(recordings: Iterator[Recording], place: Path, remedy: str) -> Iterator[Recording]:
    """The same; whatever reading one raises becomes one line.

    Decoders of other people's files raise what they like (struct.error, KeyError, SyntaxError, MemoryError, ...).
    """
    while True:
        with blamed(place, remedy):
            one = next(recordings, None)
        if one is None:
            return
        yield one


@contextmanager
def blamed(place: Path, remedy: str) -> Iterator[None]:
    """Whatever is raised is the fault of the file at `place`."""
    try:
        yield
    except UserError:
        raise
    except Exception as problem:
        reason = " ".join(str(problem).split())[:200]
        raise UserError(f"{place} is damaged ({type(problem).__name__}: {reason}); {remedy}") from None


def import_recordings(
    kind: Literal["lerobot", "mcap"],
    root: Path,
    out: Path,
    world: str | None = None,
    mapping: Path | None = None,
    calibration: Path | None = None,
    masks: bool = True,
) -> int:
    """Every recording in `root` into the store `out`; how many there were."""
    module = import_module(f".{kind}", __package__)
    manifest, recordings = module.recordings(Sidecars.read(root, mapping, calibration, masks), world)
    return write_store(out, recordings, manifest, root, module.REMEDY)


def write_store(out: Path, recordings: Iterator[Recording], manifest: dict[str, Any], place: Path, remedy: str) -> int:
    """All of them; `collection.json` comes last, so an interrupted import is none. How many there were.

    `place` is what they come from, `remedy` what to do if that cannot be read.
    """
    refuse_existing(out, "collection.json")
    count, pairs, tasks, written = 0, 0, [], set()
    with claimed(out):
        for r in understood(recordings, place, remedy):
            if (r.pair, r.task) in written:
                raise UserError(f"{place}: pair {r.pair}, {r.task} is there twice; give them other pairs or tasks")
            written.add((r.pair, r.task))
            _write(out, r, manifest.get("world", DOOR), place)
            count, pairs = count + 1, max(pairs, r.pair + 1)
            if r.task not in tasks:
                tasks.append(r.task)
        if not count:
            raise UserError(f"nothing to import into {out}: there is no episode")
        write_json(out / "collection.json", manifest if "pairs" in manifest else fresh(manifest, pairs, tasks))
    return count


def _write(out: Path, r: Recording, world: str, place: Path) -> None:
    if len(r.frames) < 2:
        raise UserError(f"{place}: pair {r.pair}, {r.task} has {len(r.frames)} rows; a demonstration has at least two")
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
