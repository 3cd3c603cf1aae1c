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

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import h5py
import hdf5plugin
import numpy as np
from numpy.typing import NDArray

from ..errors import UserError
from ..frames import Camera, Frame
from ..runs import read_json, written_whole
from ..spec import DOOR, WORLD_TASKS, Array, Task

LAYOUT = 1  # of the store; raise when a reader of the old layout would be wrong
CHUNK = 10  # frames compressed together: still images shrink, one frame stays quick to read
NUMBERS = ("K", "T_world_cam", "robot_state", "gripper", "action")
JOINT = "door_joint"  # its name in the files, whatever the object


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

    def __len__(self) -> int:
        return len(self.action)

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def joint(self) -> Array:
        """For who cannot do without."""
        if self.recorded_joint is None:
            raise UserError(f"{self.path} has no {JOINT}, which is needed to choose reference frames by it")
        return self.recorded_joint

    def camera(self, t: int) -> Camera:
        return Camera(self.K[t], self.T_world_cam[t])

    def frame(self, t: int) -> Frame:
        return self.frames([t])[0]

    def frames(self, ts: Iterable[int]) -> list[Frame]:
        """The frames `ts`, in the order asked for."""
        with opened(self.path) as f:
            rgb, depth, mask = f["rgb"], f["depth"], f["mask"]
            return [Frame(rgb[t], depth[t], mask[t], self.camera(t), self.robot_state[t], self.gripper[t]) for t in ts]


def opened(path: Path) -> h5py.File:
    try:
        return h5py.File(path, "r")
    except FileNotFoundError:
        raise UserError(f"{path} is missing; run the same `memcorr collect` again to complete the store") from None
    except OSError as problem:
        reason = "truncated" if "truncated" in str(problem) else "not a readable HDF5 file"
        raise UserError(f"{path} is damaged ({reason}); delete it and run the same `memcorr collect` again") from None


def read_demonstration(path: str | Path) -> Demonstration:
    path = Path(path)
    with opened(path) as f:
        if (layout := f.attrs.get("layout")) != LAYOUT:
            raise UserError(f"{path} has store layout {layout}, this memcorr reads layout {LAYOUT}; collect it anew")
        try:
            numbers = {name: f[name][:] for name in NUMBERS}
            joint, pose, time = (f[name][:] if name in f else None for name in (JOINT, "object_pose", "time"))
            return Demonstration(
                path,
                int(f.attrs["pair"]),
                f.attrs["task"],
                (float(f.attrs["u"][0]), float(f.attrs["u"][1])),
                recorded_joint=joint,
                object_pose=pose,
                world=f.attrs.get("world", DOOR),
                time=time,
                **numbers,
            )
        except (KeyError, OSError) as problem:
            raise UserError(f"{path} is damaged ({problem}); delete it and collect it again") from None


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
) -> None:
    arrays: dict[str, NDArray] = {
        "rgb": np.stack([f.rgb for f in frames]),
        "depth": np.stack([f.depth for f in frames]),
        "mask": np.stack([f.mask for f in frames]),
        "K": np.stack([f.camera.K for f in frames]),
        "T_world_cam": np.stack([f.camera.T_world_cam for f in frames]),
        "robot_state": np.stack([f.robot_state for f in frames]),
        "gripper": np.stack([f.gripper for f in frames]),
        "action": action,
    }
    optional = {JOINT: joint, "object_pose": object_pose, "time": time}
    arrays |= {name: array for name, array in optional.items() if array is not None}
    # Made in memory: HDF5 may lose a chunk that the disk refuses, say nothing, and crash when the process ends.
    with h5py.File(path, "w", driver="core", backing_store=False) as f:
        for name, array in arrays.items():
            chunks = (min(CHUNK, len(array)), *array.shape[1:])
            f.create_dataset(
                name, data=array, chunks=chunks, shuffle=True, fletcher32=True, **hdf5plugin.Zstd(clevel=1)
            )
        f.attrs.update({"layout": LAYOUT, "pair": pair, "task": task, "u": u})
        if world != DOOR:  # the door's files are older than the other worlds, and stay as they are
            f.attrs["world"] = world
        f.flush()
        content = f.id.get_file_image()
    with written_whole(path) as temporary:
        temporary.write_bytes(content)


def demonstration_path(root: Path, pair: int, task: Task) -> Path:
    return root / f"pair-{pair:03d}-{task}.h5"


def find_demonstration(root: Path, world: str, pair: int, task: Task) -> Demonstration:
    """The file that should hold it, if it does."""
    path = demonstration_path(root, pair, task)
    found = read_demonstration(path)
    if (found.world, found.pair, found.task) != (world, pair, task):
        what = f"{found.world}, pair {found.pair}, {found.task}"
        raise UserError(f"{path} holds {what}: files were exchanged; collect it again")
    return found


@dataclass(frozen=True)
class Store:
    """A folder of paired demonstrations."""

    root: Path

    @staticmethod
    def open(root: str | Path) -> Store:
        store = Store(Path(root))
        if (layout := store.manifest.get("layout")) != LAYOUT:
            raise UserError(
                f"{root} has store layout {layout}, this memcorr reads layout {LAYOUT}; "
                "collect into a new folder with `memcorr collect --out`"
            )
        return store

    @cached_property
    def manifest(self) -> dict:
        """How the store was made (`collection.json`)."""
        path = self.root / "collection.json"
        if not path.exists():
            raise UserError(f"{self.root} holds no demonstrations; make them with `memcorr collect --out {self.root}`")
        content = read_json(path)
        if not isinstance(content, dict) or not isinstance(content.get("pairs"), int):
            raise UserError(
                f"{path} does not describe demonstrations; delete it and run the same `memcorr collect` again"
            )
        return content

    @property
    def world(self) -> str:
        """Which world was recorded."""
        return self.manifest.get("world", DOOR)

    @property
    def tasks(self) -> tuple[Task, ...]:
        """Of one of our worlds: its two, which undo each other. Of recorded data: as many as it says."""
        if said := self.manifest.get("tasks"):
            return tuple(said)
        if self.world not in WORLD_TASKS:
            raise UserError(
                f'{self.root / "collection.json"} names no tasks of {self.world}: add "tasks": ["open", ...]'
            )
        return WORLD_TASKS[self.world]

    def __len__(self) -> int:
        """Number of pairs."""
        return int(self.manifest["pairs"])

    def demonstration(self, pair: int, task: Task) -> Demonstration:
        return find_demonstration(self.root, self.world, pair, task)

    def present(self) -> list[Demonstration]:
        """Whatever is there: recorded data need not come in pairs."""
        places = (demonstration_path(self.root, pair, task) for pair in range(len(self)) for task in self.tasks)
        return [read_demonstration(path) for path in places if path.exists()]

    def demonstrations(self, pairs: Iterable[int]) -> list[Demonstration]:
        """Both tasks of each pair, in the order of `tasks`."""
        return [self.demonstration(pair, task) for pair in pairs for task in self.tasks]
