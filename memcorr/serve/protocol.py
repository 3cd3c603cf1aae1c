"""What travels between a robot and the server: openpi's encoding, and everything else refused.

A message is a msgpack map. An array in it is the map {__ndarray__, data, dtype, shape} with keys in bytes, as
`openpi_client.msgpack_numpy` writes it. openpi's decoder takes any dtype that numpy can parse; ours takes six,
checks that size and shape agree, and never builds an object. Whatever is wrong with a message is `Refused`
with one line that its sender can act on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray

from ..demos.store import Demonstration
from ..frames import Camera, Frame, check_frame

DTYPES = ("|b1", "|u1", "<i4", "<i8", "<f4", "<f8")
MOST_AXES = 4  # a recording of colour images
MOST_PARTS = 100  # lists, and maps: an upload has 15 and 16
FARTHEST_CM = 100.0  # that a hand is commanded to move in one step
MOST_FRAMES = 1000  # of an uploaded reference
LONGEST_NAME = 80
IMAGES = {"rgb": None, "depth": np.float32, "mask": None}  # and what they are computed with, if not as they come
NUMBERS = ("K", "T_world_cam", "robot_state", "gripper")
FRAME = (*IMAGES, *NUMBERS)
OPTIONS = ("reference", "elapsed", "seed", "reset")


class Refused(ValueError):
    """A message that cannot be used; says what was wrong and what would be right."""


def encode(content: dict[str, Any]) -> bytes:
    """As openpi's client reads it, and writes it."""
    return msgpack.packb(content, default=_packed)


def _brief(value: Any) -> str:
    """What a client sent, for an answer that stays short whatever it is."""
    return (
        repr(value[:40] if isinstance(value, str) else value)
        if isinstance(value, str | int | float)
        else (type(value).__name__)
    )


def _packed(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return {b"__ndarray__": True, b"data": value.tobytes(), b"dtype": value.dtype.str, b"shape": value.shape}
    raise TypeError(f"{type(value).__name__} is not part of the protocol")


def decode(data: bytes) -> dict[str, Any]:
    """A message's map, its arrays views of what was received."""
    parts = 0

    def counted(part: Any) -> Any:
        """A list of one byte becomes an object of many: their number is limited, not only the message's length."""
        nonlocal parts
        if (parts := parts + 1) > MOST_PARTS:
            raise Refused("a message of too many lists and maps")
        return _unpacked(part) if isinstance(part, dict) else part

    limits = {"max_array_len": 16, "max_map_len": 32, "max_ext_len": 0}
    try:
        content = msgpack.unpackb(data, object_hook=counted, list_hook=counted, **limits)
    except Refused:
        raise
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException):
        raise Refused("not a message: a msgpack map, with arrays as openpi_client packs them, is expected") from None
    if not isinstance(content, dict):
        raise Refused(f"a message is a map, not {type(content).__name__}")
    return content


def _unpacked(found: dict[Any, Any]) -> Any:
    if b"__ndarray__" in found:
        return _array(found.get(b"dtype"), found.get(b"shape"), found.get(b"data"))
    if b"__npgeneric__" in found:
        return _allowed(found.get(b"dtype")).type(found.get(b"data")).item()
    return found


def _allowed(name: Any) -> np.dtype:
    if name not in DTYPES:
        raise Refused(f"an array of dtype {_brief(name)}: the server takes {', '.join(DTYPES)}")
    return np.dtype(name)


def _array(name: Any, shape: Any, data: Any) -> NDArray:
    dtype = _allowed(name)
    sizes = shape if isinstance(shape, list) else []
    if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in sizes) or len(sizes) > MOST_AXES:
        raise Refused(f"an array's shape is a list of at most {MOST_AXES} sizes, not {_brief(shape)}")
    if not isinstance(data, bytes) or len(data) != dtype.itemsize * math.prod(sizes):
        raise Refused(f"an array of shape {tuple(sizes)} and dtype {name} whose data has another size")
    flat = np.frombuffer(data, np.uint8) != 0 if dtype.kind == "b" else np.frombuffer(data, dtype)  # a bool is 0 or 1
    return flat.reshape(sizes)


@dataclass(frozen=True)
class Upload(Demonstration):
    """A reference that a client brought; its images are in memory."""

    @property
    def nbytes(self) -> int:
        """Of everything that is held for it."""
        return sum(a.nbytes for a in (*vars(self).values(), *(self.images or {}).values()) if isinstance(a, np.ndarray))


@dataclass(frozen=True)
class Message:
    """What one client says at once; every part may be missing."""

    frame: Frame | None = None  # asks for a plan
    reference: str | Upload | None = None  # to follow from now on
    elapsed: int | None = None  # control steps since the reference was begun; counted by the server if not given
    seed: int = 0  # of the sample's noise
    reset: bool = False  # an episode begins


def read_message(data: bytes | str) -> Message:
    """Decoded, and every frame checked: nothing behind this function meets a wrong shape, type or NaN."""
    if isinstance(data, str):
        raise Refused("a text message: binary ones are expected")
    content = decode(data)
    if unknown := [key for key in content if key not in (*FRAME, *OPTIONS)]:
        raise Refused(f"unknown field {_brief(unknown[0])}: choose from {', '.join((*FRAME, *OPTIONS))}")
    reference, reset = content.get("reference"), content.get("reset", False)
    if isinstance(reference, dict):
        reference = read_upload(reference)
    elif reference is not None and not isinstance(reference, str):
        raise Refused(f"reference must be a name or a recording, not {type(reference).__name__}")
    if not isinstance(reset, bool):
        raise Refused(f"reset must be true or false, not {type(reset).__name__}")
    elapsed = _whole(content, "elapsed", 10**9)
    frame = read_frame(content) if any(name in content for name in FRAME) else None
    if frame is None and reference is None and not reset and elapsed is None:
        raise Refused("an empty message: send an observation, a reference or reset")
    return Message(frame, reference, elapsed, _whole(content, "seed", 2**63 - 1) or 0, reset)


def _whole(content: dict[str, Any], name: str, highest: int) -> int | None:
    value = content.get(name)
    if value is not None and (type(value) is not int or not 0 <= value <= highest):
        raise Refused(f"{name} must be a whole number from 0 up, not {_brief(value)}")
    return value


def _arrays(content: dict[str, Any], whose: str) -> dict[str, NDArray]:
    """The seven arrays of an observation, or of a recording, in the precision that is computed with."""
    if missing := [name for name in FRAME if name not in content]:
        raise Refused(f"{whose} lacks {', '.join(missing)}")
    arrays = {}
    for name in FRAME:
        array = content[name]
        if not isinstance(array, np.ndarray):
            raise Refused(f"{whose}.{name} must be an array, not {type(array).__name__}")
        precision = np.float64 if name in NUMBERS else IMAGES[name]
        floating = precision is not None and np.issubdtype(array.dtype, np.floating)
        with np.errstate(over="ignore"):
            arrays[name] = array.astype(precision, copy=False) if floating else array
    return arrays


def _checked(frame: Frame, whose: str) -> Frame:
    try:
        check_frame(frame, whose)
    except ValueError as problem:
        raise Refused(str(problem)) from None
    return frame


def read_frame(content: dict[str, Any]) -> Frame:
    a = _arrays(content, "frame")
    camera = Camera(a["K"], a["T_world_cam"])
    return _checked(Frame(a["rgb"], a["depth"], a["mask"], camera, a["robot_state"], a["gripper"]), "frame")


def read_upload(content: dict[str, Any]) -> Upload:
    """A recording: a name, the arrays of an observation with a time axis in front, and if it is known what the hand
    was commanded, `action` (T, 3 or more), centimetres per step."""
    name = content.get("name")
    if not isinstance(name, str) or not 0 < len(name) <= LONGEST_NAME or not name.isprintable():
        raise Refused(f"an uploaded reference needs a name of at most {LONGEST_NAME} letters")
    if unknown := [key for key in content if key not in (*FRAME, "name", "action")]:
        raise Refused(
            f"unknown field {_brief(unknown[0])} of a reference: choose from name, action, {', '.join(FRAME)}"
        )
    a = _arrays(content, "reference")
    T = len(a["rgb"]) if a["rgb"].ndim else 0
    if not 2 <= T <= MOST_FRAMES or any(array.ndim < 1 or len(array) != T for array in a.values()):
        raise Refused(f"a reference has 2 to {MOST_FRAMES} frames, the same number in every array")
    action = content.get("action", np.zeros((T, 0)))
    if not isinstance(action, np.ndarray) or action.ndim != 2 or len(action) != T or action.dtype.kind != "f":
        raise Refused(f"reference.action must be an array of floats, ({T}, 3) or wider")
    with np.errstate(over="ignore", invalid="ignore"):
        if not (np.abs(action) <= FARTHEST_CM).all():
            raise Refused("reference.action holds NaN, infinity or more than a metre per step: give centimetres")
    a = {key: array.copy() for key, array in a.items()}  # the message they are part of can go
    upload = Upload(
        Path(name),
        pair=0,
        task="",
        u=(0.0, 0.0),
        K=a["K"],
        T_world_cam=a["T_world_cam"],
        robot_state=a["robot_state"],
        gripper=a["gripper"],
        action=action.astype(np.float64),  # none: how the hand moved stands for it
        recorded_joint=None,
        object_pose=None,
        images={name: a[name] for name in ("rgb", "depth", "mask")},
    )
    for t, frame in enumerate(upload.frames(range(T))):
        _checked(frame, f"reference, frame {t}")
    return upload
