"""LeRobotDataset v3.0, read and written without lerobot: pyarrow for the tables, Pillow for the images.

Colour is PNG, depth float32 TIFF in metres (`is_depth_map`), the mask PNG, numbers keep their bits, so a store that is
exported and imported again is the same files. What LeRobot has no place for (pair, position, how the store was made)
is in `meta/memcorr.json`; a reader that does not know it loses nothing else. Other people's datasets may hold depth as
16-bit millimetres or as video; there a pixel without return becomes the shortest depth that can be coded, and is put
back to 0.
"""

from __future__ import annotations

import io
import json
import math
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray
from PIL import Image
from tqdm import tqdm

from ..demos.store import JOINT, Demonstration, Store, opened
from ..errors import UserError
from ..frames import Camera, Frame
from ..runs import claimed, read_json, write_json, written_whole
from ..spec import WORLD_TASKS
from .evidence import in_blocks
from .sidecars import (
    RECORDED,
    Recording,
    fits,
    needs_calibration,
    read_calibration,
    read_sidecar,
    refuse_existing,
    word,
    write_store,
)

try:
    import pyarrow as pa
    import pyarrow.parquet as pq
except ImportError as problem:  # an extra
    raise UserError("reading and writing LeRobot datasets needs pyarrow: pip install 'memcorr[lerobot]'") from problem

VERSION = "v3.0"
TABLE, VIDEO = (
    "chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
    "chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
)
OWN = "meta/memcorr.json"
LARGEST_FILE = 100  # MB of one table, about
LARGER = 3.6  # than a store: frames are not compressed together
SIMULATED_FPS = 80  # control steps per second of Meta-World
QUANTILES = {"q01": 0.01, "q10": 0.1, "q50": 0.5, "q90": 0.9, "q99": 0.99}
SAMPLED = 100  # images of an episode, and every fourth pixel each way: statistics need no more
IMAGES = {name: f"observation.images.{name}" for name in ("rgb", "depth", "mask")}
NUMBERS = {
    "robot_state": "observation.state",
    "gripper": "observation.gripper",
    "K": "observation.camera.K",
    "T_world_cam": "observation.camera.T_world_cam",
    "action": "action",
}
EXTRA = {JOINT: "extra.joint", "object_pose": "extra.object_pose", "time": "extra.time"}  # no policy's input
COUNTERS = {"timestamp": "float32", "frame_index": "int64", "episode_index": "int64", "index": "int64"} | {
    "task_index": "int64"
}
CLOSEST = 0.02  # metres; no depth camera sees this near, so a video's depth below it is its code for no return

Stats = dict[str, dict[str, NDArray]]


# Out: a store becomes a dataset.


def export_lerobot(store: Store, out: Path, fps: float | None = None) -> int:
    """One episode per demonstration. `meta/info.json` comes last, so an interrupted export is no dataset."""
    present = store.present()
    if not present:
        raise UserError(f"{store.root} holds no demonstrations")
    refuse_existing(out, "meta/info.json")
    fps = fps or frames_per_second(present[0])
    features, extras = describe_features(present)
    tasks = list(dict.fromkeys(d.task for d in present))
    episodes: list[dict[str, Any]] = []
    with claimed(out, "meta", "data/chunk-000", "meta/episodes/chunk-000"):
        for folder in ("meta/episodes/chunk-000", "data/chunk-000"):
            (out / folder).mkdir(parents=True, exist_ok=True)
        collected: list[Stats] = []
        for file, group in enumerate(tqdm(grouped(present), "export", unit="file", leave=False)):
            with (
                written_whole(out / "data" / TABLE.format(chunk_index=0, file_index=file)) as temporary,
                pq.ParquetWriter(temporary, schema(features), compression="snappy") as writer,
            ):
                for demonstration in group:
                    first = sum(e["length"] for e in episodes)
                    table, stats = episode(demonstration, len(episodes), first, tasks, fps, features)
                    writer.write_table(table, row_group_size=len(table))
                    episodes.append(episode_row(demonstration, len(episodes), first, file, stats))
                    collected.append(stats)
        write_table(out / "meta/episodes" / TABLE.format(chunk_index=0, file_index=0), pa.Table.from_pylist(episodes))
        write_table(out / "meta/tasks.parquet", task_table(tasks))
        write_json(out / "meta/stats.json", listed(aggregated(collected)))
        own = [{"pair": d.pair, "task": d.task, "u": d.u, "world": d.world, "extras": extras[d.name]} for d in present]
        write_json(out / OWN, {"collection": store.manifest, "episodes": own})
        write_json(out / "meta/info.json", information(store, features, fps, present, tasks))
    return len(present)


def frames_per_second(demonstration: Demonstration) -> float:
    if demonstration.time is not None and len(demonstration) > 1:
        return float(round(1 / np.median(np.diff(demonstration.time)), 3))
    if demonstration.world in WORLD_TASKS:
        return SIMULATED_FPS
    raise UserError(f"{demonstration.path} has no time: give --fps, the number of rows per second")


def describe_features(present: Sequence[Demonstration]) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """LeRobot's description of every column, the same for all; and which optional fields each demonstration has."""
    features: dict[str, Any] = {}
    extras: dict[str, list[str]] = {}
    for d in present:
        with opened(d.path) as f:
            extras[d.name] = [name for name in EXTRA if name in f]
            described = {name: feature(name, f[name]) for name in (*IMAGES, *NUMBERS, *extras[d.name])}
        for name, description in described.items():
            key = {**IMAGES, **NUMBERS, **EXTRA}[name]
            if features.setdefault(key, description) != description:
                raise UserError(
                    f"{d.path}: {name} is {description['shape']} of {description['dtype']}, elsewhere "
                    f"{features[key]['shape']} of {features[key]['dtype']}; a dataset has one: export them apart"
                )
    features |= {key: {"dtype": dtype, "shape": [1], "names": None} for key, dtype in COUNTERS.items()}
    return features, extras


def feature(name: str, dataset: h5py.Dataset) -> dict[str, Any]:
    if name in IMAGES:
        height, width = dataset.shape[1:3]
        described: dict[str, Any] = {
            "dtype": "image",
            "shape": [height, width, 3 if name == "rgb" else 1],
            "names": ["height", "width", "channels"],
        }
        return described | ({"info": {"is_depth_map": True, "depth_unit": "m"}} if name == "depth" else {})
    return {"dtype": str(dataset.dtype), "shape": [math.prod(dataset.shape[1:])], "names": None}


def grouped(present: Sequence[Demonstration]) -> list[list[Demonstration]]:
    """Demonstrations that share a file."""
    groups: list[list[Demonstration]] = [[]]
    size = 0.0
    for demonstration in present:
        size += LARGER * demonstration.path.stat().st_size / 2**20
        if groups[-1] and size > LARGEST_FILE:
            groups.append([])
            size = 0.0
        groups[-1].append(demonstration)
    return groups


def schema(features: dict[str, Any]) -> pa.Schema:
    return pa.schema([(key, arrow_type(description)) for key, description in features.items()])


def arrow_type(description: dict[str, Any]) -> pa.DataType:
    if description["dtype"] == "image":
        return pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    number = pa.from_numpy_dtype(np.dtype(description["dtype"]))
    return number if description["shape"] == [1] else pa.list_(number, description["shape"][0])


def episode(
    d: Demonstration, index: int, first: int, tasks: Sequence[str], fps: float, features: dict[str, Any]
) -> tuple[pa.Table, Stats]:
    """Its rows, and what they measure."""
    n = len(d)
    values: dict[str, NDArray] = {
        "timestamp": (np.arange(n) / fps).astype(np.float32),
        "frame_index": np.arange(n),
        "episode_index": np.full(n, index),
        "index": np.arange(first, first + n),
        "task_index": np.full(n, tasks.index(d.task)),
    }
    columns, stats = {}, {}
    with opened(d.path) as f:
        for name, key in IMAGES.items():
            coded = (encoded(name, image) for image in in_blocks(f[name]))
            columns[key] = pa.array([{"bytes": b, "path": None} for b in coded], arrow_type(features[key]))
            stats[key] = image_statistics(name, f[name])
        for name, key in {**NUMBERS, **EXTRA}.items():
            if key in features:
                shape = (n, features[key]["shape"][0])
                blank = np.full(shape, np.nan, features[key]["dtype"])
                values[key] = f[name][:].reshape(shape) if name in f else blank
    for key, array in values.items():
        array = array.astype(features[key]["dtype"], copy=False)
        flat = pa.array(np.ascontiguousarray(array).reshape(-1))
        wide = features[key]["shape"][0]
        columns[key] = flat if wide == 1 else pa.FixedSizeListArray.from_arrays(flat, wide)
        stats[key] = statistics(array.reshape(n, wide).astype(np.float64))
    return pa.table([columns[key] for key in features], schema=schema(features)), {key: stats[key] for key in features}


def encoded(name: str, image: NDArray) -> bytes:
    """PNG, for depth TIFF; all lossless."""
    buffer = io.BytesIO()
    if name == "depth":
        Image.fromarray(image.astype(np.float32)).save(buffer, "TIFF", compression="tiff_adobe_deflate")
    else:
        pixels = image.astype(np.uint8) * np.uint8(255) if image.dtype == bool else image
        Image.fromarray(pixels).save(buffer, "PNG", compress_level=2)
    return buffer.getvalue()


def statistics(values: NDArray) -> dict[str, NDArray]:
    """Of rows (n, width)."""
    found = {
        "min": values.min(axis=0),
        "max": values.max(axis=0),
        "mean": values.mean(axis=0),
        "std": values.std(axis=0),
    }
    quantiles = np.quantile(values, list(QUANTILES.values()), axis=0)
    return found | dict(zip(QUANTILES, quantiles, strict=True)) | {"count": np.array([len(values)])}


def image_statistics(name: str, dataset: h5py.Dataset) -> dict[str, NDArray]:
    """Per channel, colours in [0, 1], depth in metres, shaped (C, 1, 1) as LeRobot has them."""
    rows = np.unique(np.linspace(0, len(dataset) - 1, min(SAMPLED, len(dataset))).round().astype(int))
    wanted = set(rows.tolist())
    pixels = np.stack([image[::4, ::4] for t, image in enumerate(in_blocks(dataset)) if t in wanted]).astype(np.float64)
    found = statistics(np.nan_to_num(pixels).reshape(-1, pixels.shape[3] if pixels.ndim == 4 else 1))
    scale = 255.0 if name == "rgb" else 1.0
    shaped = {key: (value / scale)[:, None, None] for key, value in found.items() if key != "count"}
    return shaped | {"count": np.array([len(rows)])}


def aggregated(episodes: Sequence[Stats]) -> Stats:
    """Of all episodes, as LeRobot pools them: quantiles are weighted means."""
    total: Stats = {}
    for key in episodes[0]:
        each = {name: np.stack([e[key][name] for e in episodes]) for name in episodes[0][key]}
        count = each["count"].astype(np.float64)
        weight = (count / count.sum()).reshape(-1, *[1] * (each["mean"].ndim - 1))
        mean = (weight * each["mean"]).sum(axis=0)
        variance = (weight * (each["std"] ** 2 + (each["mean"] - mean) ** 2)).sum(axis=0)
        total[key] = {
            "min": each["min"].min(axis=0),
            "max": each["max"].max(axis=0),
            "mean": mean,
            "std": variance**0.5,
        }
        total[key] |= {name: (weight * each[name]).sum(axis=0) for name in QUANTILES}
        total[key]["count"] = each["count"].sum(axis=0)
    return total


def listed(stats: Stats) -> dict[str, dict[str, list]]:
    return {key: {name: value.tolist() for name, value in each.items()} for key, each in stats.items()}


def episode_row(d: Demonstration, index: int, first: int, file: int, stats: Stats) -> dict[str, Any]:
    row: dict[str, Any] = {
        "episode_index": index,
        "tasks": [d.task],
        "length": len(d),
        "data/chunk_index": 0,
        "data/file_index": file,
        "dataset_from_index": first,
        "dataset_to_index": first + len(d),
        "meta/episodes/chunk_index": 0,
        "meta/episodes/file_index": 0,
    }
    return row | {f"stats/{key}/{name}": v for key, each in listed(stats).items() for name, v in each.items()}


def task_table(tasks: Sequence[str]) -> pa.Table:
    """As pandas would write it, with the description as the index."""
    table = pa.table({"task_index": pa.array(range(len(tasks)), pa.int64()), "task": pa.array(tasks, pa.string())})
    columns = [
        {"name": name, "field_name": name, "pandas_type": kind, "numpy_type": numpy, "metadata": None}
        for name, kind, numpy in (("task_index", "int64", "int64"), ("task", "unicode", "object"))
    ]
    index = {"name": None, "field_name": None, "pandas_type": "unicode", "numpy_type": "object", "metadata": None}
    pandas = {"index_columns": ["task"], "column_indexes": [index], "columns": columns, "pandas_version": "2.2.0"}
    return table.replace_schema_metadata({"pandas": json.dumps(pandas)})


def write_table(path: Path, table: pa.Table) -> None:
    with written_whole(path) as temporary:
        pq.write_table(table, temporary, compression="snappy")


def information(
    store: Store, features: dict[str, Any], fps: float, present: Sequence[Demonstration], tasks: Sequence[str]
) -> dict[str, Any]:
    return {
        "codebase_version": VERSION,
        "robot_type": store.world,
        "total_episodes": len(present),
        "total_frames": sum(len(d) for d in present),
        "total_tasks": len(tasks),
        "chunks_size": 1000,
        "data_files_size_in_mb": LARGEST_FILE,
        "video_files_size_in_mb": 200,
        "fps": int(fps) if fps == int(fps) else fps,
        "splits": {"train": f"0:{len(present)}"},
        "data_path": f"data/{TABLE}",
        "video_path": None,
        "features": features,
    }


# In: a dataset, ours or anybody's, becomes a store.


def import_lerobot(
    root: Path,
    out: Path,
    world: str | None = None,
    mapping: Path | None = None,
    calibration: Path | None = None,
    masks: bool = True,
) -> int:
    """Every episode; how many."""
    dataset = Dataset.open(root, mapping, calibration, masks)
    own = read_json(root / OWN) if (root / OWN).exists() else None
    manifest = {"world": word(world or RECORDED), "source": f"LeRobotDataset {VERSION}"}
    recordings = dataset.recordings(own["episodes"] if own else None)
    if own is not None and world is None:
        manifest = own["collection"]
    else:
        recordings = (replace(recording, world=None) for recording in recordings)
    try:
        return write_store(out, recordings, manifest)
    except pa.ArrowException as problem:
        raise UserError(f"{root} is damaged ({str(problem).splitlines()[0]}); copy the dataset again") from None


@dataclass(frozen=True)
class Source:
    """Where a field comes from: a feature, or some of its columns."""

    key: str
    columns: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Dataset:
    """A LeRobotDataset on disk, and what its features mean."""

    root: Path
    info: dict[str, Any]
    sources: dict[str, Source]  # by our names
    calibration: Camera | None
    pairs: dict[int, int]  # episode -> pair, where declared
    words: dict[str, str]  # description of a task -> its short name

    @staticmethod
    def open(root: Path, mapping: Path | None, calibration: Path | None, masks: bool) -> Dataset:
        if not (root / "meta/info.json").exists():
            raise UserError(f"{root} is no LeRobotDataset: it has no meta/info.json")
        info = read_json(root / "meta/info.json")
        if (version := info.get("codebase_version")) != VERSION:
            raise UserError(
                f"{root} is a LeRobotDataset {version}, {VERSION} is read; convert it with "
                "python -m lerobot.scripts.convert_dataset_v21_to_v30"
            )
        if not isinstance(info.get("features"), dict):
            raise UserError(f"{root / 'meta/info.json'} names no features; copy the dataset again")
        said = read_sidecar(mapping, root / "mapping.json")
        features = info["features"]
        usual = {name: key for name, key in {**IMAGES, **NUMBERS, **EXTRA}.items() if key in features}
        sources = {name: Source(key) for name, key in usual.items()}
        for name in (*IMAGES, *NUMBERS, *EXTRA):
            if name in said:
                sources[name] = source(name, said[name], features, root)
        camera, missing = None, [name for name in ("K", "T_world_cam") if name not in sources]
        if missing:
            found = read_calibration(calibration, root / "calibration.json")
            if found is None:
                raise needs_calibration(root, missing)
            height, width = features[sources["rgb"].key]["shape"][:2] if "rgb" in sources else (0, 0)
            if "rgb" in sources:
                fits(found, height, width, root)
            camera = found.camera
        needed = [name for name in ("rgb", "depth", "robot_state", "gripper", "action") if name not in sources]
        if needed or (masks and "mask" not in sources):
            asked = [*needed, *(["mask"] if masks and "mask" not in sources else [])]
            hint = "; --no-masks imports without masks" if "mask" in asked else ""
            raise UserError(
                f"{root} has no feature for {', '.join(asked)}: name them in {root / 'mapping.json'}, as in "
                f'{{"{asked[0]}": "FEATURE"}} or {{"gripper": {{"feature": "FEATURE", "columns": [0, 1, 2]}}}}; '
                f"it has {', '.join(key for key in features if key not in COUNTERS)}{hint}"
            )
        pairs = {episode: number for number, both in enumerate(said.get("pairs", [])) for episode in both}
        return Dataset(root, info, sources, camera, pairs, said.get("tasks", {}))

    def recordings(self, own: list[dict[str, Any]] | None) -> Iterator[Recording]:
        names = task_names(self.root)
        rows = [row for path in sorted(self.root.glob("meta/episodes/*/*.parquet")) for row in episode_rows(path)]
        films: dict[str, Film] = {}
        for row in tqdm(sorted(rows, key=lambda r: r["episode_index"]), "import", unit="episode", leave=False):
            index = int(row["episode_index"])
            path = self.root / self.info["data_path"].format(
                chunk_index=row["data/chunk_index"], file_index=row["data/file_index"]
            )
            keys = {s.key for s in self.sources.values() if self.info["features"][s.key]["dtype"] != "video"}
            wanted = [*sorted(keys), "timestamp", "task_index", "frame_index"]
            table = pq.read_table(path, columns=wanted, filters=[("episode_index", "=", index)])
            table = table.sort_by("frame_index")
            about = own[index] if own else None
            task = about["task"] if about else self.task(names[table["task_index"][0].as_py()])
            yield self.recording(row, table, task, about, films)

    def task(self, description: str) -> str:
        return self.words.get(description) or word(description)

    def recording(
        self, row: dict[str, Any], table: pa.Table, task: str, about: dict[str, Any] | None, films: dict[str, Film]
    ) -> Recording:
        numbers = {name: self.numbers(name, table) for name in (*NUMBERS, *EXTRA) if name in self.sources}
        n = len(table)
        images = {name: self.images(name, row, table, films) for name in IMAGES if name in self.sources}
        if "mask" not in images:
            images["mask"] = np.zeros(images["depth"].shape, bool)
        if images["rgb"].shape[:3] != images["depth"].shape:
            raise UserError(
                f"{self.root}: colour is {images['rgb'].shape[1:3]}, depth {images['depth'].shape[1:]} pixels; "
                "align depth to colour when recording"
            )
        if self.calibration is not None:
            numbers.setdefault("K", np.broadcast_to(self.calibration.K, (n, 3, 3)))
            numbers.setdefault("T_world_cam", np.broadcast_to(self.calibration.T_world_cam, (n, 4, 4)))
        K, T = numbers["K"].reshape(n, 3, 3), numbers["T_world_cam"].reshape(n, 4, 4)
        frames = [
            Frame(rgb, depth, mask, Camera(K[t], T[t]), numbers["robot_state"][t], numbers["gripper"][t])
            for t, (rgb, depth, mask) in enumerate(zip(images["rgb"], images["depth"], images["mask"], strict=True))
        ]
        extras = {name: numbers[name] for name in EXTRA if name in numbers and (not about or name in about["extras"])}
        if about is None and "time" not in extras:
            extras["time"] = table["timestamp"].to_numpy().astype(np.float64)
        pose = extras.get("object_pose")
        index = int(row["episode_index"])
        return Recording(
            about["pair"] if about else self.pairs.get(index, len(self.pairs) + index),
            task,
            frames,
            numbers["action"],
            (float(about["u"][0]), float(about["u"][1])) if about else Recording.u,
            joint=extras[JOINT].reshape(n) if JOINT in extras else None,
            object_pose=pose.reshape(n, 4, 4) if pose is not None else None,
            time=extras["time"].reshape(n) if "time" in extras else None,
            world=about["world"] if about else None,
        )

    def numbers(self, name: str, table: pa.Table) -> NDArray:
        """(T, width) in the type they were stored in, if that is float64; other people's float32 become float64."""
        source = self.sources[name]
        column = table[source.key].combine_chunks()
        flat = column.flatten() if pa.types.is_list(column.type) or pa.types.is_fixed_size_list(column.type) else column
        while pa.types.is_list(flat.type) or pa.types.is_fixed_size_list(flat.type):
            flat = flat.flatten()
        values = flat.to_numpy(zero_copy_only=False).reshape(len(table), -1).astype(np.float64)
        return values if source.columns is None else np.ascontiguousarray(values[:, list(source.columns)])

    def images(self, name: str, row: dict[str, Any], table: pa.Table, films: dict[str, Film]) -> NDArray:
        key = self.sources[name].key
        description = self.info["features"][key]
        if description["dtype"] == "video":
            pixels = self.filmed(name, key, row, len(table), films)
        else:
            pixels = np.stack([decoded(cell, self.root) for cell in table[key].to_pylist()])
        if name == "rgb":
            return pixels[..., :3]
        if name == "mask":
            return (pixels if pixels.ndim == 3 else pixels.max(axis=-1)) > (127 if pixels.max(initial=0) > 1 else 0)
        if pixels.dtype == np.float32 and description["dtype"] == "image":
            unit = (description.get("info") or {}).get("depth_unit", "m")
            return pixels if unit == "m" else (pixels / 1000).astype(np.float32)
        return metres(pixels) if description["dtype"] == "image" else pixels

    def filmed(self, name: str, key: str, row: dict[str, Any], count: int, films: dict[str, Film]) -> NDArray:
        """Frames of an episode from the file that holds several."""
        place = self.root / self.info["video_path"].format(
            video_key=key, chunk_index=row[f"videos/{key}/chunk_index"], file_index=row[f"videos/{key}/file_index"]
        )
        height, width = self.info["features"][key]["shape"][:2]
        if key not in films or films[key].path != place:
            films[key] = Film(place, height, width, depth=name == "depth")
        pixels = films[key].frames(round(row[f"videos/{key}/from_timestamp"] * self.info["fps"]), count)
        return dequantised(pixels, self.info["features"][key].get("info") or {}) if name == "depth" else pixels


def source(name: str, said: Any, features: dict[str, Any], root: Path) -> Source:
    found = (
        Source(said)
        if isinstance(said, str)
        else Source(said.get("feature", ""), tuple(said.get("columns", ())) or None)
    )
    if found.key not in features:
        raise UserError(
            f"{root / 'mapping.json'}: {name} is to be {found.key!r}, which the dataset has not; "
            f"it has {', '.join(key for key in features if key not in COUNTERS)}"
        )
    return found


def task_names(root: Path) -> dict[int, str]:
    """The description of each task."""
    table = pq.read_table(root / "meta/tasks.parquet")
    text = "task" if "task" in table.column_names else "__index_level_0__"
    return dict(zip(table["task_index"].to_pylist(), table[text].to_pylist(), strict=True))


def episode_rows(path: Path) -> list[dict[str, Any]]:
    file = pq.ParquetFile(path)
    names = [name for name in file.schema_arrow.names if not name.startswith("stats/")]
    return file.read(columns=names).to_pylist()


def decoded(cell: dict[str, Any], root: Path) -> NDArray:
    """An image column holds bytes, or a path."""
    content = io.BytesIO(cell["bytes"]) if cell["bytes"] is not None else root / cell["path"]
    with Image.open(content) as image:
        return np.array(image)


def metres(depth: NDArray) -> NDArray[np.float32]:
    """16-bit millimetres."""
    return (depth.astype(np.float32) / 1000).astype(np.float32)


def dequantised(codes: NDArray[np.uint16], info: dict[str, Any]) -> NDArray[np.float32]:
    """LeRobot's 12-bit codes of depth, logarithmic unless told otherwise, to metres; the nearest are no returns."""
    said = {
        name: info.get(f"video.{name}", usual)
        for name, usual in (("depth_min", 0.01), ("depth_max", 10.0), ("shift", 3.5), ("use_log", True))
    }
    low, high, shift = (float(said[name]) for name in ("depth_min", "depth_max", "shift"))
    share = codes.astype(np.float64) / 4095
    if said["use_log"]:
        depth = np.exp(np.log(low + shift) + share * np.log((high + shift) / (low + shift))) - shift
    else:
        depth = low + share * (high - low)
    return np.where(depth < max(CLOSEST, low * 1.05), 0, depth).astype(np.float32)


class Film:
    """A video that is read forwards, through the ffmpeg that comes with imageio-ffmpeg."""

    def __init__(self, path: Path, height: int, width: int, depth: bool) -> None:
        if not path.exists():
            raise UserError(f"{path} is missing: copy the dataset's videos too")
        self.path, self.depth, self.shape = path, depth, (height, width) if depth else (height, width, 3)
        self._position, self._process = 0, self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        from imageio_ffmpeg import get_ffmpeg_exe

        code = "gray12le" if self.depth else "rgb24"
        command = [get_ffmpeg_exe(), "-v", "error", "-i", str(self.path), "-fps_mode", "passthrough"]
        command += ["-f", "rawvideo", "-pix_fmt", code, "-"]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL)

    def frames(self, first: int, count: int) -> NDArray:
        if first < self._position:
            self.close()
            self._position, self._process = 0, self._start()
        while self._position < first:
            self._read()
        return np.stack([self._read() for _ in range(count)])

    def _read(self) -> NDArray:
        assert self._process.stdout is not None
        dtype = np.dtype("<u2" if self.depth else "u1")
        size = math.prod(self.shape) * dtype.itemsize
        content = self._process.stdout.read(size)
        if len(content) != size:
            raise UserError(f"{self.path} ends after {self._position} frames, or is damaged: copy it again")
        self._position += 1
        return np.frombuffer(content, dtype).reshape(self.shape)

    def close(self) -> None:
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._process.terminate()
        self._process.wait()
