"""Demonstrations: a lossless store that reads without the simulator.

A store is a folder: `collection.json` says how it was made, `pair-017-open.h5` is one
demonstration of T steps (200 in the paper's; at least 2, and 17 to learn from). Row t of every dataset is what was
seen *before* action t; images are of any size, S and A of any width:

    rgb          (T, H, W, 3) uint8
    depth        (T, H, W)    float32  metres along the optical axis; 0 = no return
    mask         (T, H, W)    bool     visible pixels of the object
    K            (T, 3, 3)    float64  intrinsics, continuous image plane
    T_world_cam  (T, 4, 4)    float64  OpenCV camera axes -> world
    robot_state  (T, S)       float64  S = 9: end effector, right, left fingertip; metres, world
    gripper      (T, 3)       float64  midpoint of the fingertips; metres, world
    action       (T, A)       float64  A = 4: displacement / 1 cm, gripper command; in [-1, 1]
    door_joint   (T,)         float64  the object's joint, in its unit; for choosing reference frames, never seen
    object_pose  (T, 4, 4)    float64  frame of the moving body -> world; for ground truth, never a policy input

    time         (T,)         float64  seconds, of recorded data; simulated data has none

Recorded robot data fits the same layout; `door_joint` is then any scalar progress of the object. It, `object_pose`
and `time` may be left out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import h5py
import hdf5plugin
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from ..errors import UserError
from ..files import (
    CHECK,
    NO_SUM,
    SEAL,
    Form,
    check_finite,
    check_forms,
    check_seal,
    content_of,
    read_json,
    refuse,
    sealed,
)
from ..folders import written_whole
from ..frames import FARTHEST, Camera, Frame
from ..spec import DOOR, SPEC, STOCK, Array, Task, tasks_of

LAYOUT = 1  # of the store
CHUNK = 10  # frames compressed together: still images shrink, one frame stays quick to read
JOINT = "door_joint"  # its name in the files, whatever the object
IMAGES = {
    "rgb": Form("uint8", ("T", "H", "W", 3)),
    "depth": Form("float32", ("T", "H", "W")),
    "mask": Form("bool", ("T", "H", "W")),
}
NUMBERS = {
    "K": Form("float64", ("T", 3, 3)),
    "T_world_cam": Form("float64", ("T", 4, 4)),
    "robot_state": Form("float64", ("T", "S")),
    "gripper": Form("float64", ("T", 3)),
    "action": Form("float64", ("T", "A")),
    JOINT: Form("float64", ("T",)),
    "object_pose": Form("float64", ("T", 4, 4)),
    "time": Form("float64", ("T",)),
}
FORMS, OPTIONAL = {**IMAGES, **NUMBERS}, (JOINT, "object_pose", "time")
ALWAYS = tuple(name for name in NUMBERS if name not in OPTIONAL)
WORD = r"[A-Za-z0-9][\w.-]*"  # of a task: part of a file's name
NAME = rf"({STOCK})?{WORD}"  # of a world
LONGEST, LARGEST = 100_000, 4096  # frames, pixels: beyond this a file is damaged, and nothing is allocated for it
LARGEST_CHUNK = 2**30  # bytes
ABOUT = ("pair", "task", "u", "world", "disturbances")  # attributes of a file
REMEDY = "delete it and run the same `memcorr collect` again"


@dataclass(frozen=True)
class Demonstration:
    """One trajectory. Numbers are in memory; images are read when asked for."""

    path: Path
    pair: int
    task: Task
    u: tuple[float, float]  # normalised position
    K: Array
    T_world_cam: Array
    robot_state: Array
    gripper: Array
    action: Array
    recorded_joint: Array | None  # (T,) of the object, in its unit
    object_pose: Array | None
    world: str = DOOR
    time: Array | None = None  # (T,) seconds
    disturbances: str = ""  # what happened on the way, "bump=0.05 start=0.2"; "" when nothing did
    recorded: NDArray[np.int64] | None = None  # (T,) the file's frame behind each, where it was retimed
    images: Mapping[str, NDArray] | None = None  # rgb, depth, mask (N, H, W, ...) of a recording that is in no file

    @staticmethod
    def of(
        rgb: NDArray[np.uint8],
        depth: NDArray[np.float32],
        mask: NDArray[np.bool_],
        K: Array,
        T_world_cam: Array,
        gripper: Array,
        action: Array,
        robot_state: Array | None = None,
        task: Task = "task",
        world: str = "recorded",
    ) -> Demonstration:
        """A recording from arrays in memory, as they are described above; one `K` and one `T_world_cam` will do for a
        camera that stands still, and a robot's state that is not known is its gripper's."""
        T = len(action)
        arrays: dict[str, NDArray] = {
            "rgb": rgb,
            "depth": depth,
            "mask": mask,
            "K": np.broadcast_to(np.asarray(K, np.float64), (T, 3, 3)),
            "T_world_cam": np.broadcast_to(np.asarray(T_world_cam, np.float64), (T, 4, 4)),
            "robot_state": np.asarray(gripper if robot_state is None else robot_state, np.float64),
            "gripper": np.asarray(gripper, np.float64),
            "action": np.asarray(action, np.float64),
        }
        check_forms({name: (array.dtype, array.shape) for name, array in arrays.items()}, FORMS, OPTIONAL)
        images = {name: arrays.pop(name) for name in IMAGES}
        about = _about({"pair": 0, "task": task, "u": (0.0, 0.0), "world": world}) | arrays
        return Demonstration(Path("memory"), recorded_joint=None, object_pose=None, images=images, **about)

    def __len__(self) -> int:
        return len(self.action)

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def joint(self) -> Array:
        """`recorded_joint`, or a UserError where the recording has none."""
        if self.recorded_joint is None:
            raise UserError(f"{self.path} has no {JOINT}, which is needed to choose reference frames by it")
        return self.recorded_joint

    def camera(self, t: int) -> Camera:
        return Camera(self.K[t], self.T_world_cam[t])

    def frame(self, t: int) -> Frame:
        return self.frames([t])[0]

    def frames(self, ts: Iterable[int]) -> list[Frame]:
        """The frames `ts`, in the order asked for."""
        with nullcontext(self.images) if self.images is not None else opened(self.path) as f:
            rgb, depth, mask = f["rgb"], f["depth"], f["mask"]
            found = []
            for t in ts:
                n = t if self.recorded is None else int(self.recorded[t])
                found.append(Frame(rgb[n], depth[n], mask[n], self.camera(t), self.robot_state[t], self.gripper[t]))
            return found


_CHECKED: set[tuple[object, ...]] = set()  # files in the state in which this process has checked them


def opened(path: Path) -> h5py.File:
    """The one way into a demonstration's file: its bytes, layout and datasets are checked when it is first opened."""
    try:
        found = path.stat()
    except OSError as problem:
        refuse(path, problem, "run the same `memcorr collect` again to complete the store")
    state = (path, found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
    if state not in _CHECKED:
        content = content_of(path, REMEDY)
    file = None
    try:
        if state not in _CHECKED:
            check_seal(content)
        file = h5py.File(path, "r")
        if state not in _CHECKED:
            if (layout := file.attrs.get("layout")) != LAYOUT:
                raise ValueError(f"its store layout is {layout}, not {LAYOUT}")
            _check_datasets(file)
            _CHECKED.add(state)
        return file
    except Exception as problem:  # a damaged file makes h5py raise almost anything
        if file is not None:
            file.close()
        if isinstance(problem, UserError):
            raise
        truncated = isinstance(problem, OSError) and "truncated" in str(problem)
        refuse(path, "truncated" if truncated else _reason(problem), REMEDY)


def _reason(problem: Exception) -> str:
    """A damaged file is no missing one, even if HDF5 says so of a part of it."""
    return str(problem) if isinstance(problem, ValueError) else f"not a readable HDF5 file: {problem}"


def _check_datasets(f: h5py.File) -> None:
    """Raises a ValueError unless the file holds what the layout says, itself and whole. Reads and allocates nothing."""
    found: dict[str, tuple[np.dtype, tuple[int, ...]]] = {}
    whole: dict[str, bool] = {}
    for name in f:
        if not isinstance(f.get(name, getlink=True), h5py.HardLink):
            raise ValueError(f"{name} is a link, perhaps to another file")
        dataset = f[name]
        if not isinstance(dataset, h5py.Dataset):
            raise ValueError(f"{name} is not a dataset")
        made = dataset.id.get_create_plist()
        if made.get_external_count() or made.get_layout() == h5py.h5d.VIRTUAL:
            raise ValueError(f"{name} keeps its values in another file")
        dtype, shape = found[name] = dataset.dtype, dataset.shape
        if made.get_layout() == h5py.h5d.CHUNKED:
            chunks = made.get_chunk()
            if math.prod(chunks) * dtype.itemsize > LARGEST_CHUNK:
                raise ValueError(f"{name} declares chunks of more than {LARGEST_CHUNK >> 20} MiB")
            wanted = math.prod(-(-size // chunk) for size, chunk in zip(shape, chunks, strict=True))
            whole[name] = dataset.id.get_num_chunks() == wanted
        else:
            whole[name] = dataset.id.get_storage_size() == math.prod(shape) * dtype.itemsize
    sizes = check_forms(found, FORMS, OPTIONAL)
    if not (2 <= sizes["T"] <= LONGEST and 1 <= sizes["H"] <= LARGEST and 1 <= sizes["W"] <= LARGEST):
        raise ValueError(f"it declares {sizes['T']} frames of {sizes['H']} x {sizes['W']} pixels")
    if missing := [name for name, there in whole.items() if not there]:
        raise ValueError(f"{missing[0]} was never written in full")


def read_demonstration(path: str | Path) -> Demonstration:
    path = Path(path)
    with opened(path) as f:
        try:
            numbers = {name: f[name][:] for name in NUMBERS if name in f}
            about = _about({name: f.attrs[name] for name in ABOUT if name in f.attrs})
            if tasks_of(about["world"]):
                check_numbers(numbers)
        except Exception as problem:  # a damaged file makes h5py raise almost anything
            refuse(path, _reason(problem), REMEDY)
    optional = {name: numbers.pop(name, None) for name in OPTIONAL}
    found = Demonstration(path, recorded_joint=optional.pop(JOINT), **optional, **about, **numbers)
    named = re.fullmatch(r"pair-(\d+)-(.+)\.h5", path.name)
    if named and (found.pair, found.task) != (int(named[1]), named[2]):
        _exchanged(found)
    return found


def _about(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """What the attributes say, if it makes sense; else a ValueError."""
    world, task = attributes.get("world", DOOR), attributes.get("task")
    pair, u = np.asarray(attributes.get("pair")), np.asarray(attributes.get("u"))
    if not isinstance(world, str) or not re.fullmatch(NAME, world):
        raise ValueError(f"world is {world!r}, not a word")
    if not isinstance(task, str) or not re.fullmatch(WORD, task):
        raise ValueError(f"task is {task!r}, not a word")
    if task not in (tasks_of(world) or (task,)):  # recorded worlds have tasks of their own
        raise ValueError(f"task is {task!r}, not {' or '.join(tasks_of(world))}")
    if pair.shape != () or pair.dtype.kind not in "iu" or pair < 0:
        raise ValueError("pair is not a whole number from 0 up")
    known = bool(tasks_of(world))  # the place of recorded objects is unknown
    if u.shape != (2,) or u.dtype.kind not in "fiu" or (known and not np.isfinite(u).all()):
        raise ValueError("u is not two finite numbers")
    disturbances = attributes.get("disturbances", "")
    if not isinstance(disturbances, str):
        raise ValueError("disturbances is no text")
    about = {"pair": int(pair), "task": task, "u": (float(u[0]), float(u[1])), "world": world}
    return about | {"disturbances": disturbances}


def check_numbers(numbers: Mapping[str, NDArray]) -> None:
    """Raises a ValueError for what no robot and no camera of our own worlds reports. What recorded data has wrong,
    `memcorr data check` explains."""
    check_finite(numbers)
    if (numbers["robot_state"].shape[1], numbers["action"].shape[1]) != (SPEC.state_dim, SPEC.action_dim):
        raise ValueError(f"robot_state and action do not have {SPEC.state_dim} and {SPEC.action_dim} numbers")
    if np.abs(numbers["action"]).max() > 1 + 1e-6:
        raise ValueError("action leaves [-1, 1]")
    for name in ("robot_state", "gripper"):
        if np.abs(numbers[name]).max() > FARTHEST:
            raise ValueError(f"{name} is more than {FARTHEST:.0f} m away")
    if not (numbers["K"][:, [0, 1], [0, 1]] > 0).all():
        raise ValueError("K has a focal length that is not positive")
    for name in ("T_world_cam", "object_pose"):
        if (T := numbers.get(name)) is None:
            continue
        R = T[:, :3, :3]
        rigid = np.abs(R @ R.transpose(0, 2, 1) - np.eye(3)).max() < 1e-3 and (np.linalg.det(R) > 0).all()
        if not rigid or np.abs(T[:, 3] - [0, 0, 0, 1]).max() > 1e-6:
            raise ValueError(f"{name} is no rigid transform")


def write_demonstration(
    path: Path,
    frames: Sequence[Frame],
    action: Array,
    joint: Array | None,
    object_pose: Array | None,
    *,
    pair: int,
    task: Task,
    u: tuple[float, float],
    world: str = DOOR,
    time: Array | None = None,
    disturbances: str = "",
) -> None:
    arrays: dict[str, NDArray] = {
        **{name: np.stack([getattr(f, name) for f in frames]) for name in IMAGES},  # in this order: bytes depend on it
        **{name: np.stack([getattr(f.camera, name) for f in frames]) for name in ("K", "T_world_cam")},
        **{name: np.stack([getattr(f, name) for f in frames]) for name in ("robot_state", "gripper")},
        "action": action,
    }
    optional = {JOINT: joint, "object_pose": object_pose, "time": time}
    arrays |= {name: array for name, array in optional.items() if array is not None}
    arrays = {name: array.astype(FORMS[name].dtype, casting="same_kind", copy=False) for name, array in arrays.items()}
    check_forms({name: (array.dtype, array.shape) for name, array in arrays.items()}, FORMS, OPTIONAL)
    about = _about({"pair": pair, "task": task, "u": u, "world": world, "disturbances": disturbances})
    if not disturbances:
        del about["disturbances"]
    if tasks_of(world):
        check_numbers({name: array for name, array in arrays.items() if name in NUMBERS})
    # Made in memory: HDF5 may lose a chunk that the disk refuses, say nothing, and crash when the process ends.
    with h5py.File(path, "w", driver="core", backing_store=False) as f:
        f.attrs[CHECK] = np.bytes_(SEAL + NO_SUM)
        for name, array in arrays.items():
            chunks = (min(CHUNK, len(array)), *array.shape[1:])
            f.create_dataset(
                name, data=array, chunks=chunks, shuffle=True, fletcher32=True, **hdf5plugin.Zstd(clevel=1)
            )
        f.attrs.update({"layout": LAYOUT, **about})
        f.flush()
        content = f.id.get_file_image()
    with written_whole(path) as temporary:
        temporary.write_bytes(sealed(content))


def demonstration_path(root: Path, pair: int, task: Task) -> Path:
    return root / f"pair-{pair:03d}-{task}.h5"


def find_demonstration(root: Path, world: str, pair: int, task: Task) -> Demonstration:
    """The file that should hold it, if it does."""
    path = demonstration_path(root, pair, task)
    found = read_demonstration(path)
    if (found.world, found.pair, found.task) != (world, pair, task):
        _exchanged(found)
    return found


def _exchanged(found: Demonstration) -> None:
    what = f"{found.world}, pair {found.pair}, {found.task}"
    raise UserError(f"{found.path} holds {what}: files were exchanged; collect it again")


@dataclass(frozen=True)
class Manifest:
    """`collection.json`: how a store was made. Your own recordings need only the first two fields."""

    layout: Literal[1]  # LAYOUT
    pairs: Annotated[int, Meta(ge=1, le=10**6)]
    world: Annotated[str, Meta(pattern=f"^{NAME}$")] = DOOR
    seed: int | None = None
    spec: dict[str, Any] | None = None
    tasks: tuple[Annotated[str, Meta(pattern=f"^{WORD}$")], ...] = ()  # of recorded data; our worlds have theirs
    source: str = ""  # what it was imported from
    disturbed: bool = False  # whether something goes wrong on the way, and the expert recovers


@dataclass(frozen=True)
class Store:
    """A folder of paired demonstrations."""

    root: Path

    @staticmethod
    def open(root: str | Path) -> Store:
        store = Store(Path(root))
        _ = store.manifest  # complains about a folder that is none
        return store

    @cached_property
    def manifest(self) -> Manifest:
        path = self.root / "collection.json"
        if not path.exists():
            raise UserError(f"{self.root} holds no demonstrations; make them with `memcorr collect --out {self.root}`")
        return read_json(path, Manifest, "a description of demonstrations", REMEDY)

    @property
    def world(self) -> str:
        """Which world was recorded."""
        return self.manifest.world

    @property
    def tasks(self) -> tuple[Task, ...]:
        """Of a simulated world: its own. Of recorded data: as many as it says."""
        if self.manifest.tasks:
            return self.manifest.tasks
        if not (known := tasks_of(self.world)):
            raise UserError(
                f'{self.root / "collection.json"} names no tasks of {self.world}: add "tasks": ["open", ...]'
            )
        return known

    def __len__(self) -> int:
        """Number of pairs."""
        return self.manifest.pairs

    def demonstration(self, pair: int, task: Task) -> Demonstration:
        return find_demonstration(self.root, self.world, pair, task)

    def present(self) -> list[Demonstration]:
        """Whatever is there: recorded data need not come in pairs."""
        places = (demonstration_path(self.root, pair, task) for pair in range(len(self)) for task in self.tasks)
        return [read_demonstration(path) for path in places if path.exists()]

    def demonstrations(self, pairs: Iterable[int]) -> list[Demonstration]:
        """Both tasks of each pair, in the order of `tasks`."""
        return [self.demonstration(pair, task) for pair in pairs for task in self.tasks]
