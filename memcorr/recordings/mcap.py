"""ROS 2 recordings (MCAP) into a store: one file is one demonstration, one colour image is one row.

Colour images are the clock. Depth, mask, state, gripper and camera pose are those nearest in time; the action is the
first one sent at or after the image, as row t is what was seen *before* action t. Which topic holds what is in
`mapping.json` (see docs/own-data.md); whatever it does not say is asked for. No ROS is needed.
"""

from __future__ import annotations

import io
import re
import zlib
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.spatial.transform import Rotation
from tqdm import tqdm

from ..errors import UserError, needs
from ..spec import Array
from .film import metres
from .sidecars import RECORDED, Recording, Sidecars, continuous, decoded, understood, whole_numbers, word

with needs("mcap"):
    from mcap.exceptions import McapError
    from mcap.reader import make_reader
    from mcap.records import Footer
    from mcap.stream_reader import MAGIC_SIZE, StreamReader
    from mcap_ros2.decoder import DecoderFactory

COLOURS = {"rgb8": (3, [0, 1, 2]), "bgr8": (3, [2, 1, 0]), "rgba8": (4, [0, 1, 2]), "bgra8": (4, [2, 1, 0])}
LATE = 1.5  # rows by which what belongs to a colour image may be away from it in time
EXAMPLE = (
    'give {"rgb": "/camera/color/image_raw", "depth": "/camera/aligned_depth_to_color/image_raw", '
    '"action": "/command", ...}'
)
REMEDY = "record or copy it again"
NAMED = re.compile(r"pair-(\d+)-(.+)")


@dataclass
class Stream:
    """What one topic said, and when."""

    times: list[float] = field(default_factory=list)  # seconds
    values: list[Any] = field(default_factory=list)

    def add(self, time: float, value: Any) -> None:
        self.times.append(time)
        self.values.append(value)

    def sort(self) -> None:
        order = np.argsort(self.times, kind="stable")
        self.times, self.values = [self.times[i] for i in order], [self.values[i] for i in order]

    def nearest(self, times: Array) -> NDArray[np.int64]:
        return np.array([self.closest(time) for time in times.tolist()], np.int64)

    def closest(self, time: float) -> int:
        """Of a stream that is sorted."""
        after = min(bisect_left(self.times, time), len(self.times) - 1)
        before = max(after - 1, 0)
        return before if time - self.times[before] <= self.times[after] - time else after

    def following(self, times: Array) -> NDArray[np.int64]:
        """The first at or after; after the last one, the last."""
        return np.minimum(np.searchsorted(np.asarray(self.times), times - 1e-6), len(self.times) - 1)

    def gap(self, chosen: NDArray[np.int64], times: Array) -> float:
        return float(np.abs(np.asarray(self.times)[chosen] - times).max())


@dataclass(frozen=True)
class Mapping:
    """`mapping.json`: topics by our names; a pose or a point may also be a pair of frames of /tf."""

    topics: dict[str, str]
    frames: dict[str, tuple[str, str]]  # "T_world_cam" or "gripper": (world, child)
    files: dict[str, dict[str, Any]]  # file name -> pair and task
    place: Path  # of the file that says so
    columns: dict[str, list[int]]  # of robot_state and action, where not all are wanted

    @staticmethod
    def read(sidecars: Sidecars) -> Mapping:
        place, said = sidecars.place, sidecars.mapping
        topics: dict[str, str] = {}
        frames: dict[str, tuple[str, str]] = {}
        columns: dict[str, list[int]] = {}
        for name in ("rgb", "depth", "mask", "camera_info", "T_world_cam", "robot_state", "gripper", "action"):
            entry = said.get(name)
            if isinstance(entry, dict) and isinstance(entry.get("tf"), list) and len(entry["tf"]) == 2:
                frames[name] = (str(entry["tf"][0]), str(entry["tf"][1]))
            elif isinstance(entry, dict) and "topic" in entry:
                topics[name] = str(entry["topic"])
                if "columns" in entry:
                    columns[name] = whole_numbers(entry["columns"], f"{place}: {name}: columns")
            elif isinstance(entry, str):
                topics[name] = entry
            elif entry is not None:
                raise UserError(
                    f'{place}: {name} is a topic, {{"topic": ..., "columns": [...]}} or {{"tf": [world, child]}}'
                )
        unknown_camera = ("camera_info", "T_world_cam") if sidecars.calibration is None else ()
        sidecars.require(topics.keys() | frames.keys(), EXAMPLE, unknown_camera)
        files = said.get("demonstrations", {})
        if not isinstance(files, dict):
            raise UserError(f'{place}: demonstrations is {{"FILE.mcap": {{"pair": 0, "task": "open"}}, ...}}')
        return Mapping(topics, frames, files, place, columns)


def recordings(sidecars: Sidecars, world: str | None) -> tuple[dict[str, Any], Iterator[Recording]]:
    """How the store is described, and the demonstration of every .mcap file."""
    paths = sorted(sidecars.root.glob("*.mcap"))
    if not paths:
        raise UserError(f"{sidecars.root} holds no .mcap files")
    mapping = Mapping.read(sidecars)
    jobs = [(path, numbered(path, mapping)) for path in paths]
    bar = tqdm(jobs, "import", unit="file", leave=False)
    made = (one for job in bar for one in understood(_one(*job, mapping, sidecars), job[0], REMEDY))
    return {"world": word(world or RECORDED), "source": "ROS 2 MCAP"}, made


def _one(*arguments: Any) -> Iterator[Recording]:
    """Reads when it is asked for, so that `understood` can name the file in whatever that raises."""
    yield recording(*arguments)


def numbered(path: Path, mapping: Mapping) -> tuple[int, str]:
    """Which pair and task a file shows."""
    if (about := mapping.files.get(path.name)) is not None:
        pair, task = (about.get("pair"), about.get("task")) if isinstance(about, dict) else (None, None)
        if type(pair) is not int or pair < 0 or not isinstance(task, str):
            raise UserError(f'{mapping.place}: demonstrations: {path.name} needs {{"pair": 0, "task": "open"}}')
        return pair, word(task)
    if (match := NAMED.fullmatch(path.stem)) is None:
        raise UserError(
            f"{path}: which task is it? Name files pair-000-open.mcap, or add to {mapping.place} "
            f'"demonstrations": {{"{path.name}": {{"pair": 0, "task": "open"}}, ...}}'
        )
    return int(match[1]), word(match[2])


def recording(path: Path, number: tuple[int, str], mapping: Mapping, sidecars: Sidecars) -> Recording:
    streams, tree = read(path, mapping)
    rgb = streams["rgb"]
    times = np.array(rgb.times)
    if not len(times):
        raise UserError(f"{path} has no message on {mapping.topics['rgb']} (rgb); it has {', '.join(topics_of(path))}")
    period = float(np.median(np.diff(times))) if len(times) > 1 else 1.0
    if "action" in streams and (sent := streams["action"].times):
        times = times[times <= sent[-1] + 1e-6]  # what was seen after the last action led to none
    chosen: dict[str, list[Any]] = {"rgb": rgb.values[: len(times)]}
    for name, stream in streams.items():
        if name == "rgb":
            continue
        if not stream.times:
            raise UserError(
                f"{path} has no message on {mapping.topics[name]} ({name}); it has {', '.join(topics_of(path))}"
            )
        rows = stream.following(times) if name == "action" else stream.nearest(times)
        if name != "camera_info" and (gap := stream.gap(rows, times)) > LATE * period:
            raise UserError(
                f"{path}: {mapping.topics[name]} ({name}) is up to {gap:.3f} s away from a colour image, "
                f"which come every {period:.3f} s; record both throughout, with stamps of one clock"
            )
        chosen[name] = [stream.values[row] for row in rows]
    for name, (parent, child) in mapping.frames.items():
        poses = [tree.pose(parent, child, time, LATE * period, path) for time in times]
        chosen[name] = [T[:3, 3] for T in poses] if name == "gripper" else poses
    for name, columns in mapping.columns.items():
        if max(columns) >= (width := min(len(value) for value in chosen[name])):
            raise UserError(f"{mapping.place}: {name} has no column {max(columns)}: {path} has {width}")
        chosen[name] = [value[columns] for value in chosen[name]]
    for (K, (width, height)), image in zip(chosen.pop("camera_info", []), rgb.values, strict=False):
        if image.shape[:2] != (height, width):
            size = f"{image.shape[1]} x {image.shape[0]}"
            raise UserError(f"{path}: camera_info is for {width} x {height}, images are {size}")
        chosen.setdefault("K", []).append(K)
    return Recording(*number, sidecars.frames(chosen), np.stack(chosen["action"]), time=times - times[0])


def topics_of(path: Path) -> list[str]:
    with path.open("rb") as f:
        summary = make_reader(f).get_summary()
    return sorted({channel.topic for channel in summary.channels.values()}) if summary else []


def read(path: Path, mapping: Mapping) -> tuple[dict[str, Stream], Tree]:
    """All messages that are asked for, decoded."""
    readers: dict[str, Callable[[Any], Any]] = {
        "rgb": colour,
        "depth": depth,
        "mask": mask,
        "camera_info": intrinsics,
        "T_world_cam": pose_of,
        "gripper": point,
        "robot_state": vector,
        "action": vector,
    }
    streams, tree = {name: Stream() for name in mapping.topics}, Tree()
    wanted: dict[str, list[str]] = {}
    for name, topic in mapping.topics.items():
        wanted.setdefault(topic, []).append(name)
    try:
        for topic, logged, content in messages(path, [*wanted, *(["/tf", "/tf_static"] if mapping.frames else [])]):
            time = stamp(content, logged)
            for name in wanted.get(topic, ()):
                try:
                    streams[name].add(time, readers[name](content))
                except UserError as problem:
                    raise UserError(f"{path}: {topic} ({name}): {problem}") from None
            if topic in ("/tf", "/tf_static"):
                tree.add(content, static=topic == "/tf_static")
    except McapError as problem:
        raise UserError(f"{path} is damaged ({problem or type(problem).__name__}); {REMEDY}") from None
    for stream in (*streams.values(), *tree.streams.values()):
        stream.sort()
    return streams, tree


def messages(path: Path, topics: list[str]) -> Iterator[tuple[str, int, Any]]:
    """Topic, nanoseconds when it was logged, content."""
    check_sums(path)
    with path.open("rb") as f:
        reader = make_reader(f, validate_crcs=True, decoder_factories=[DecoderFactory()])
        for _, channel, message, content in reader.iter_decoded_messages(topics=topics):
            yield channel.topic, message.log_time, content


def check_sums(path: Path) -> None:
    """Of the data and of the summary that says where they are, if the recorder has noted them (else they are 0)."""
    with path.open("rb") as f:
        footer = None
        for record in StreamReader(f, emit_chunks=True, validate_crcs=True).records:  # raises if the data's is wrong
            footer = record if isinstance(record, Footer) else footer
        if footer is None or not (footer.summary_crc and footer.summary_start):
            return
        f.seek(-MAGIC_SIZE - 4, 2)  # the sum itself and the mark at the end are not in it
        end = f.tell()
        f.seek(footer.summary_start)
        if zlib.crc32(f.read(end - footer.summary_start)) != footer.summary_crc:
            raise UserError(f"{path} is damaged (its summary does not match its checksum); {REMEDY}")


def stamp(message: Any, logged: int) -> float:
    """When it was measured, if it says; else when it was logged."""
    header = getattr(message, "header", None)
    if header is not None and (header.stamp.sec or header.stamp.nanosec):
        return float(header.stamp.sec + 1e-9 * header.stamp.nanosec)
    return 1e-9 * logged


def pixels(message: Any, dtype: str, channels: int) -> NDArray:
    """Rows of an uncompressed image, which may be padded."""
    kind = np.dtype(dtype).newbyteorder(">" if message.is_bigendian else "<")
    rows = np.frombuffer(bytes(message.data), np.uint8).reshape(message.height, message.step)
    row = np.ascontiguousarray(rows[:, : message.width * channels * kind.itemsize]).view(kind)
    shape = (message.height, message.width, channels) if channels > 1 else (message.height, message.width)
    return row.reshape(shape).astype(np.dtype(dtype))


def compressed(message: Any, colour: bool = False) -> NDArray:
    if "compressedDepth" in message.format:
        raise UserError("compressedDepth is not read: record the raw depth topic, or republish it")
    return decoded(io.BytesIO(bytes(message.data)), None, colour)


def colour(message: Any) -> NDArray[np.uint8]:
    if hasattr(message, "format"):
        return compressed(message, colour=True)
    if message.encoding not in COLOURS:
        raise UserError(f"its encoding is {message.encoding}; {', '.join(COLOURS)} are read")
    channels, order = COLOURS[message.encoding]
    return np.ascontiguousarray(pixels(message, "uint8", channels)[..., order])


def depth(message: Any) -> NDArray[np.float32]:
    """Metres: REP 118 has 16-bit images in millimetres and float ones in metres; 0 or NaN is no return."""
    if hasattr(message, "format"):
        found = compressed(message)
        if found.dtype not in (np.uint16, np.int32):
            raise UserError(f"its compressed images are {found.dtype}; 16-bit PNG is read")
        return metres(found)
    if message.encoding in ("16UC1", "mono16"):
        return metres(pixels(message, "uint16", 1))
    if message.encoding == "32FC1":
        found = pixels(message, "float32", 1)
        return np.where(np.isfinite(found), found, 0).astype(np.float32)
    raise UserError(f"its encoding is {message.encoding}; 16UC1 (millimetres) and 32FC1 (metres) are read")


def mask(message: Any) -> NDArray[np.bool_]:
    if hasattr(message, "format"):
        found = compressed(message)
        return (found if found.ndim == 2 else found[..., :3].max(axis=2)) > 0
    if message.encoding not in ("mono8", "8UC1"):
        raise UserError(f"its encoding is {message.encoding}; mono8 is read, not 0 on the object")
    return pixels(message, "uint8", 1) > 0


def intrinsics(message: Any) -> tuple[Array, tuple[int, int]]:
    """K of the image as it is; ROS has the centre of the first pixel at 0, we have it at 0.5."""
    if any(abs(d) > 1e-3 for d in message.d):
        raise UserError("the images are distorted: record the rectified ones (image_rect) and their camera_info")
    return continuous(np.array(message.k, np.float64).reshape(3, 3)), (int(message.width), int(message.height))


def rigid(translation: Any, rotation: Any) -> Array:
    T = np.eye(4)
    T[:3, :3] = Rotation.from_quat([rotation.x, rotation.y, rotation.z, rotation.w]).as_matrix()
    T[:3, 3] = translation.x, translation.y, translation.z
    return T


def pose_of(message: Any) -> Array:
    """Of a Pose, Transform, or either with a stamp or covariance."""
    inner = message
    for name in ("pose", "transform"):
        while hasattr(inner, name):
            inner = getattr(inner, name)
    if hasattr(inner, "position"):
        return rigid(inner.position, inner.orientation)
    if hasattr(inner, "translation"):
        return rigid(inner.translation, inner.rotation)
    raise UserError("it is no pose: give PoseStamped or TransformStamped")


def point(message: Any) -> Array:
    inner = getattr(message, "point", message)
    if hasattr(inner, "x") and hasattr(inner, "z"):
        return np.array([inner.x, inner.y, inner.z], np.float64)
    return pose_of(message)[:3, 3]


def vector(message: Any) -> Array:
    """Numbers of a Float64MultiArray, JointState, Twist or pose."""
    inner = getattr(message, "twist", message)
    if hasattr(inner, "linear"):
        parts = (inner.linear, inner.angular)
        return np.array([getattr(part, axis) for part in parts for axis in "xyz"], np.float64)
    for name in ("data", "position", "positions"):
        values = getattr(message, name, None)
        if isinstance(values, list | tuple | np.ndarray):
            return np.array(values, np.float64)
    T = pose_of(message)
    return np.append(T[:3, 3], Rotation.from_matrix(T[:3, :3]).as_quat())


class Tree:
    """/tf and /tf_static: where each frame is in its parent, over time."""

    def __init__(self) -> None:
        self._parents: dict[str, str] = {}
        self.streams: dict[str, Stream] = {}
        self._static: set[str] = set()

    def add(self, message: Any, static: bool) -> None:
        for t in message.transforms:
            child, parent = t.child_frame_id.lstrip("/"), t.header.frame_id.lstrip("/")
            self._parents[child] = parent
            if static:
                self._static.add(child)
            time = 0.0 if static else t.header.stamp.sec + 1e-9 * t.header.stamp.nanosec
            self.streams.setdefault(child, Stream()).add(time, rigid(t.transform.translation, t.transform.rotation))

    def pose(self, parent: str, child: str, time: float, late: float, path: Path) -> Array:
        """T_parent_child: up from the child until the parent is reached; what moves must be known at the time."""
        T, at, passed = np.eye(4), child.lstrip("/"), set[str]()
        while at != parent.lstrip("/"):
            if at in passed:
                raise UserError(f"{path}: /tf leads from {child} in a circle through {at}; record it again")
            passed.add(at)
            if at not in self._parents:
                known = ", ".join(sorted({*self._parents, *self._parents.values()})) or "nothing"
                raise UserError(f"{path}: /tf does not lead from {child} up to {parent}; it knows {known}")
            stream = self.streams[at]
            row = stream.closest(time)
            if at not in self._static and (gap := abs(stream.times[row] - time)) > late:
                raise UserError(f"{path}: /tf has no {at} within {gap:.3f} s of a colour image; record it throughout")
            T = stream.values[row] @ T
            at = self._parents[at]
        return T
