"""Other people's recordings, made from ours: what a camera and a robot would have left on disk."""

from __future__ import annotations

import io
import json
import re
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from imageio_ffmpeg import get_ffmpeg_exe
from mcap_ros2.writer import Writer
from numpy.typing import NDArray
from PIL import Image
from scipy.spatial.transform import Rotation

from memcorr.demos.store import Demonstration, Store
from memcorr.frames import Frame
from memcorr.recordings.export import arrow_type, task_table, write_table

PAGE = Path(__file__).parents[2] / "docs/own-data.md"
FPS = 20
EVERY = 3  # rows of ours between two of theirs: a short film of a whole task


def blocks(kind: str) -> list[str]:
    """Of docs/own-data.md."""
    return re.findall(rf"```{kind}\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


@pytest.fixture(scope="session")
def sidecars() -> dict[str, dict[str, Any]]:
    """The files that the page shows: a calibration, and two mappings."""
    calibration, lerobot, mcap = (json.loads(block) for block in blocks("json"))
    return {"calibration": calibration, "lerobot": lerobot, "mcap": mcap}


@pytest.fixture(scope="session")
def commands() -> list[list[str]]:
    """The commands of the page, without the prompt."""
    return [line.split() for block in blocks("sh") for line in block.splitlines() if line.startswith("memcorr ")]


@pytest.fixture(scope="session")
def short(store: Store) -> list[tuple[Demonstration, list[Frame], NDArray]]:
    """Both tasks of a pair at a third of the rate: the rows kept, and the action from each to the next."""
    made = []
    for task in store.tasks:
        d = store.demonstration(0, task)
        rows = np.arange(0, len(d) - EVERY, EVERY)
        action = np.column_stack([np.add.reduceat(d.action[:, :3], rows)[: len(rows)] / EVERY, d.action[rows, 3]])
        made.append((d, d.frames(rows), action))
    return made


def png(image: NDArray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "PNG")
    return buffer.getvalue()


def film(path: Path, depths: Sequence[NDArray[np.float32]]) -> None:
    """As lerobot writes depth: 12-bit codes of its logarithm, HEVC, lossless."""
    low, high, shift = 0.01, 10.0, 3.5
    share = (np.log(np.stack(depths) + shift) - np.log(low + shift)) / (np.log(high + shift) - np.log(low + shift))
    codes = np.rint(share * 4095).clip(0, 4095).astype("<u2")
    height, width = codes.shape[1:]
    path.parent.mkdir(parents=True, exist_ok=True)
    command = [
        get_ffmpeg_exe(),
        "-v",
        "error",
        "-y",
        "-f",
        "rawvideo",
        "-pix_fmt",
        "gray12le",
        "-s",
        f"{width}x{height}",
    ]
    command += ["-r", str(FPS), "-i", "-", "-c:v", "libx265", "-x265-params", "lossless=1:log-level=none"]
    command += ["-pix_fmt", "gray12le", str(path)]
    subprocess.run(command, input=codes.tobytes(), check=True)


@pytest.fixture(scope="session")
def stranger(short: list[tuple[Demonstration, list[Frame], NDArray]]) -> Callable[..., Path]:
    """A LeRobotDataset as its own tools would leave it: float32 numbers, no calibration, names of its own."""

    def make(root: Path, video: bool = False, mask: bool = True) -> Path:
        height, width = short[0][1][0].depth.shape
        image = {"dtype": "image", "shape": [height, width, 3], "names": ["height", "width", "channels"]}
        depth_info = {"is_depth_map": True, "depth_unit": "mm"}
        features: dict[str, Any] = {
            "observation.images.front": image,
            "observation.images.front_depth": {**image, "shape": [height, width, 1], "info": depth_info},
            "observation.images.door": {**image, "shape": [height, width, 1]},
            "observation.state": {"dtype": "float32", "shape": [12], "names": None},
            "action": {"dtype": "float32", "shape": [4], "names": None},
            "timestamp": {"dtype": "float32", "shape": [1], "names": None},
        } | {
            name: {"dtype": "int64", "shape": [1], "names": None}
            for name in ("frame_index", "episode_index", "index", "task_index")
        }
        if video:
            features["observation.images.front_depth"]["dtype"] = "video"
        if not mask:
            del features["observation.images.door"]
        columns = {k: f for k, f in features.items() if f["dtype"] != "video"}
        rows: list[dict[str, Any]] = []
        episodes: list[dict[str, Any]] = []
        for e, (_, frames, action) in enumerate(short):
            first = len(rows)
            for t, f in enumerate(frames):
                cells = {
                    "observation.images.front": {"bytes": png(f.rgb), "path": None},
                    "observation.images.front_depth": {
                        "bytes": png(np.rint(1000 * f.depth).astype(np.uint16)),
                        "path": None,
                    },
                    "observation.images.door": {"bytes": png(f.mask.astype(np.uint8) * 255), "path": None},
                    "observation.state": [*f.gripper, *f.robot_state],
                    "action": action[t].tolist(),
                    "timestamp": t / FPS,
                    "frame_index": t,
                    "episode_index": e,
                    "index": len(rows),
                    "task_index": e,
                }
                rows.append({key: cells[key] for key in columns})
            row: dict[str, Any] = {
                "episode_index": e,
                "length": len(frames),
                "data/chunk_index": 0,
                "data/file_index": 0,
            }
            row |= {"dataset_from_index": first, "dataset_to_index": len(rows)}
            if video:
                key = "videos/observation.images.front_depth"
                row |= {f"{key}/chunk_index": 0, f"{key}/file_index": 0}
                row |= {f"{key}/from_timestamp": first / FPS, f"{key}/to_timestamp": len(rows) / FPS}
            episodes.append(row)
        for folder in ("meta/episodes/chunk-000", "data/chunk-000"):
            (root / folder).mkdir(parents=True)
        schema = pa.schema([(key, arrow_type(feature)) for key, feature in columns.items()])
        write_table(root / "data/chunk-000/file-000.parquet", pa.Table.from_pylist(rows, schema))
        write_table(root / "meta/episodes/chunk-000/file-000.parquet", pa.Table.from_pylist(episodes))
        write_table(root / "meta/tasks.parquet", task_table(["Open the door.", "Close the door."]))
        if video:
            depths = [f.depth for _, frames, _ in short for f in frames]
            film(root / "videos/observation.images.front_depth/chunk-000/file-000.mp4", depths)
        path = "chunk-{chunk_index:03d}/file-{file_index:03d}"
        info = {"codebase_version": "v3.0", "fps": FPS, "features": features, "data_path": f"data/{path}.parquet"}
        info["video_path"] = f"videos/{{video_key}}/{path}.mp4"
        (root / "meta/info.json").write_text(json.dumps(info))
        return root

    return make


HEADER = "std_msgs/Header header\n"
STAMPS = """
================================================================================
MSG: std_msgs/Header
builtin_interfaces/Time stamp
string frame_id
================================================================================
MSG: builtin_interfaces/Time
int32 sec
uint32 nanosec
"""
IMAGE = HEADER + "uint32 height\nuint32 width\nstring encoding\nuint8 is_bigendian\nuint32 step\nuint8[] data" + STAMPS
INFO = HEADER + "uint32 height\nuint32 width\nstring distortion_model\nfloat64[] d\nfloat64[9] k" + STAMPS
JOINTS = HEADER + "string[] name\nfloat64[] position" + STAMPS
NUMBERS = "float64[] data"
VECTORS = """
================================================================================
MSG: geometry_msgs/Vector3
float64 x
float64 y
float64 z
================================================================================
MSG: geometry_msgs/Quaternion
float64 x
float64 y
float64 z
float64 w
"""
TF = (
    "geometry_msgs/TransformStamped[] transforms\n"
    + "=" * 80
    + "\nMSG: geometry_msgs/TransformStamped\n"
    + HEADER
    + "string child_frame_id\ngeometry_msgs/Transform transform\n"
    + "=" * 80
    + "\nMSG: geometry_msgs/Transform\ngeometry_msgs/Vector3 translation\ngeometry_msgs/Quaternion rotation"
    + VECTORS
    + STAMPS
)


@pytest.fixture(scope="session")
def bags(short: list[tuple[Demonstration, list[Frame], NDArray]]) -> Callable[..., Path]:
    """ROS 2 recordings: 16-bit depth, padded colour rows, a camera bolted to a stand that stands in the world."""

    def make(root: Path, without: Sequence[str] = ()) -> Path:
        root.mkdir(parents=True)
        for d, frames, action in short:
            with (root / f"pair-000-{d.task}.mcap").open("wb") as f:
                write_bag(f, frames, action, without)
        return root

    return make


def write_bag(file: Any, frames: Sequence[Frame], action: NDArray, without: Sequence[str]) -> None:
    writer = Writer(file)
    kinds = {
        "image": writer.register_msgdef("sensor_msgs/msg/Image", IMAGE),
        "info": writer.register_msgdef("sensor_msgs/msg/CameraInfo", INFO),
        "joints": writer.register_msgdef("sensor_msgs/msg/JointState", JOINTS),
        "numbers": writer.register_msgdef("std_msgs/msg/Float64MultiArray", NUMBERS),
        "tf": writer.register_msgdef("tf2_msgs/msg/TFMessage", TF),
    }
    start = 1_700_000_000_000_000_000

    def say(topic: str, kind: str, content: dict[str, Any], ns: int) -> None:
        if topic not in without:
            writer.write_message(topic, kinds[kind], content, log_time=ns, publish_time=ns)

    def header(ns: int, frame: str) -> dict[str, Any]:
        return {"stamp": {"sec": ns // 10**9, "nanosec": ns % 10**9}, "frame_id": frame}

    def transform(T: NDArray, parent: str, child: str, ns: int) -> dict[str, Any]:
        q = Rotation.from_matrix(T[:3, :3]).as_quat()
        translation = dict(zip("xyz", map(float, T[:3, 3]), strict=True))
        pose = {"translation": translation, "rotation": dict(zip("xyzw", map(float, q), strict=True))}
        return {"header": header(ns, parent), "child_frame_id": child, "transform": pose}

    def image(pixels: NDArray, encoding: str, ns: int, padding: int = 0) -> dict[str, Any]:
        rows = np.ascontiguousarray(pixels).view(np.uint8).reshape(len(pixels), -1)
        rows = np.pad(rows, ((0, 0), (0, padding)))
        shape = {"height": pixels.shape[0], "width": pixels.shape[1], "step": rows.shape[1]}
        return {"header": header(ns, "eye"), "encoding": encoding, "is_bigendian": 0, "data": rows.tobytes(), **shape}

    stand = np.eye(4)
    stand[:3, 3] = 0.3, -0.2, 0.1
    static = [transform(stand, "world", "stand", start)]
    static.append(transform(np.linalg.inv(stand) @ frames[0].camera.T_world_cam, "stand", "eye", start))
    say("/tf_static", "tf", {"transforms": static}, start)
    for t, f in enumerate(frames):
        ns = start + t * 10**9 // FPS
        hand = np.eye(4)
        hand[:3, 3] = f.gripper
        say("/tf", "tf", {"transforms": [transform(hand, "world", "gripper", ns)]}, ns)
        say("/camera/color/image_raw", "image", image(f.rgb[..., ::-1], "bgr8", ns, padding=16), ns)
        depth = np.rint(1000 * f.depth).astype("<u2")
        say("/camera/aligned_depth_to_color/image_raw", "image", image(depth, "16UC1", ns + 4_000_000), ns)
        say("/door_mask", "image", image(f.mask.astype(np.uint8) * 255, "mono8", ns), ns)
        K = f.camera.K.copy()
        K[:2, 2] -= 0.5
        height, width = f.depth.shape
        info = {"header": header(ns, "eye"), "height": height, "width": width, "distortion_model": "plumb_bob"}
        say("/camera/color/camera_info", "info", {**info, "d": [0.0] * 5, "k": K.ravel().tolist()}, ns)
        joints = {"header": header(ns - 2_000_000, ""), "name": list("abcdefghi"), "position": f.robot_state.tolist()}
        say("/joint_states", "joints", joints, ns)
        say("/command", "numbers", {"data": action[t].tolist()}, ns + 7_000_000)
    writer.finish()
