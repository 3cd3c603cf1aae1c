"""A store as a LeRobotDataset v3.0, lossless and without lerobot.

Colour is PNG, depth float32 TIFF in metres (`is_depth_map`), the mask PNG, numbers keep their bits, so a store that is
exported and imported again is the same files. What LeRobot has no place for (pair, position, how the store was made)
is in `meta/memcorr.json`; a reader that does not know it loses nothing else.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray
from PIL import Image
from tqdm import tqdm

from ..demos.store import Demonstration, Store, opened
from ..errors import UserError
from ..files import digest_of, read_json, write_json
from ..folders import claimed, write_text, written_whole
from ..spec import WORLD_TASKS
from .check.evidence import in_blocks
from .lerobot import COUNTERS, EXTRA, IMAGES, NUMBERS, OWN, VERSION
from .sidecars import refuse_existing
from .tables import pa, pq

TABLE = "chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
LARGEST_FILE = 100  # MB of one table, about
LARGER = 3.6  # than a store: frames are not compressed together
SIMULATED_FPS = 80  # control steps per second of Meta-World
QUANTILES = {"q01": 0.01, "q10": 0.1, "q50": 0.5, "q90": 0.9, "q99": 0.99}
SAMPLED = 100  # images of an episode, and every fourth pixel each way: statistics need no more

Stats = dict[str, dict[str, NDArray]]


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
        own = [
            {"pair": d.pair, "task": d.task, "u": known(d.u), "world": d.world, "extras": extras[d.name]}
            for d in present
        ]
        collection = read_json(store.root / "collection.json", dict[str, Any], "a description of demonstrations")
        info = json.dumps(information(store, features, fps, present, tasks), indent=2) + "\n"
        files = {str(path.relative_to(out)): digest_of(path) for path in sorted(out.rglob("*.parquet"))}
        files["meta/info.json"] = hashlib.sha256(info.encode()).hexdigest()
        # The collection as it is: back again it is the same file.
        write_json(out / OWN, {"collection": collection, "episodes": own, "files": files})
        write_text(out / "meta/info.json", info)
    return len(present)


def known(u: tuple[float, float]) -> list[float | None]:
    """A position, without NaN, which is no JSON."""
    return [x if math.isfinite(x) else None for x in u]


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
    found = {name: getattr(values, name)(axis=0) for name in ("min", "max", "mean", "std")}
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
        low, high = each["min"].min(axis=0), each["max"].max(axis=0)
        total[key] = {"min": low, "max": high, "mean": mean, "std": variance**0.5}
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
