"""LeRobotDataset v3.0 into a store, without lerobot: pyarrow for the tables, Pillow for the images.

Our own exports come back as the same files; other people's datasets are read by what `mapping.json` and
`calibration.json` say of them. Depth may be float metres, 16-bit millimetres or video.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from ..demos.store import JOINT
from ..errors import UserError
from ..files import digest_of, read_json
from .film import Film, dequantised, metres
from .sidecars import (
    RECORDED,
    Recording,
    Sidecars,
    blamed,
    decoded,
    fits,
    needs_calibration,
    whole_numbers,
    word,
)
from .tables import Tables, pa

VERSION = "v3.0"
OWN = "meta/memcorr.json"
IMAGES = {name: f"observation.images.{name}" for name in ("rgb", "depth", "mask")}
NUMBERS = {
    "robot_state": "observation.state",
    "gripper": "observation.gripper",
    "K": "observation.camera.K",
    "T_world_cam": "observation.camera.T_world_cam",
    "action": "action",
}
SQUARE = {"K": 3, "T_world_cam": 4}
EXTRA = {JOINT: "extra.joint", "object_pose": "extra.object_pose", "time": "extra.time"}  # no policy's input
COUNTERS = {"timestamp": "float32"} | dict.fromkeys(("frame_index", "episode_index", "index", "task_index"), "int64")


REMEDY = "copy the dataset again"


def recordings(sidecars: Sidecars, world: str | None) -> tuple[dict[str, Any], Iterator[Recording]]:
    """How the store is described, and every episode."""
    root = sidecars.root
    own = Own.read(root) if (root / OWN).exists() else None
    with blamed(root / "meta/info.json", REMEDY):
        dataset = Dataset.open(sidecars)
    found = dataset.recordings(own.episodes if own else None)
    if own is not None and world is None:
        return own.collection, found
    manifest = {"world": word(world or RECORDED), "source": f"LeRobotDataset {VERSION}"}
    return manifest, (replace(recording, world=None) for recording in found)


@dataclass(frozen=True)
class Own:
    """`meta/memcorr.json`: what an export of ours knows beyond LeRobot's format."""

    collection: dict[str, Any]
    episodes: list[dict[str, Any]]
    files: dict[str, str] = field(default_factory=dict)  # SHA-256 of those that are read: theirs have no checksums

    @staticmethod
    def read(root: Path) -> Own:
        own = read_json(root / OWN, Own, "what memcorr exported", REMEDY)
        for name, digest in own.files.items():
            if digest_of(root / name, REMEDY) != digest:
                raise UserError(
                    f"{root / name} is not what was exported; {REMEDY}, or, if the change is meant, remove {root / OWN}"
                )
        return own


def position(u: list[float | None]) -> tuple[float, float]:
    """NaN where it is not known."""
    x, y = (math.nan if value is None else float(value) for value in u)
    return x, y


@dataclass(frozen=True)
class Source:
    """Where a field comes from: a feature, or some of its columns."""

    key: str
    columns: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Dataset:
    """A LeRobotDataset on disk, and what its features mean."""

    sidecars: Sidecars
    info: dict[str, Any]
    sources: dict[str, Source]  # by our names
    pairs: dict[int, int]  # episode -> pair, where declared
    words: dict[str, str]  # description of a task -> its short name

    @property
    def root(self) -> Path:
        return self.sidecars.root

    @staticmethod
    def open(sidecars: Sidecars) -> Dataset:
        root, said = sidecars.root, sidecars.mapping
        if not (root / "meta/info.json").exists():
            raise UserError(f"{root} is no LeRobotDataset: it has no meta/info.json")
        info = read_json(root / "meta/info.json", dict[str, Any], "a description of a dataset", REMEDY)
        if (version := info.get("codebase_version")) != VERSION:
            raise UserError(
                f"{root} is a LeRobotDataset {version}, {VERSION} is read; convert it with "
                "python -m lerobot.scripts.convert_dataset_v21_to_v30"
            )
        if not isinstance(info.get("features"), dict):
            raise UserError(f"{root / 'meta/info.json'} names no features; copy the dataset again")
        features = info["features"]
        usual = {name: key for name, key in {**IMAGES, **NUMBERS, **EXTRA}.items() if key in features}
        sources = {name: Source(key) for name, key in usual.items()}
        for name in (*IMAGES, *NUMBERS, *EXTRA):
            if name in said:
                sources[name] = source(name, said[name], features, sidecars.place)
        if missing := [name for name in ("K", "T_world_cam") if name not in sources]:
            if sidecars.calibration is None:
                raise needs_calibration(root, missing)
            if "rgb" in sources:
                fits(sidecars.calibration, size_of(features[sources["rgb"].key]))
        example = (
            'give {"rgb": "FEATURE"} or {"gripper": {"feature": "FEATURE", "columns": [0, 1, 2]}}; the dataset has '
            f"{', '.join(key for key in features if key not in COUNTERS)}"
        )
        sidecars.require(sources, example)
        declared = said.get("pairs", [])
        if not isinstance(declared, list):
            raise UserError(f"{sidecars.place}: pairs is a list of lists of episodes, [[0, 1], [2, 3]]")
        each = [whole_numbers(both, f"{sidecars.place}: pairs: each") for both in declared]
        pairs = {episode: number for number, both in enumerate(each) for episode in both}
        if len(pairs) < sum(map(len, each)):
            raise UserError(f"{sidecars.place}: pairs names an episode twice")
        words = said.get("tasks", {})
        if not isinstance(words, dict) or any(not isinstance(short, str) for short in words.values()):
            raise UserError(f'{sidecars.place}: tasks is {{"DESCRIPTION": "short", ...}}')
        return Dataset(sidecars, info, sources, pairs, words)

    def recordings(self, own: list[dict[str, Any]] | None) -> Iterator[Recording]:
        films: dict[str, Film] = {}
        try:
            with Tables(REMEDY) as tables:
                yield from self._recordings(own, tables, films)
        finally:
            for film in films.values():
                film.close()

    def _recordings(
        self, own: list[dict[str, Any]] | None, tables: Tables, films: dict[str, Film]
    ) -> Iterator[Recording]:
        place = self.root / "meta/tasks.parquet"
        with blamed(place, REMEDY):
            names = self.short(tables.task_names(place))
        rows: dict[int, dict[str, Any]] = {}
        for path in sorted(self.root.glob("meta/episodes/*/*.parquet")):
            with blamed(path, REMEDY):
                for row in tables.episodes(path):
                    if rows.setdefault(int(row["episode_index"]), row) is not row:
                        raise UserError(f"{path}: episode {row['episode_index']} is there twice; {REMEDY}")
        read = dict[Path, int]()
        for index, row in tqdm(sorted(rows.items()), "import", unit="episode", leave=False):
            with blamed(self.root / "meta/info.json", REMEDY):
                numbers = {"chunk_index": row["data/chunk_index"], "file_index": row["data/file_index"]}
                path = inside(self.root, filled(self.info["data_path"], numbers))
            with blamed(path, REMEDY):
                table = self.rows(path, index, int(row["length"]), tables)
                read[path] = read.get(path, 0) + len(table)
                about = own[index] if own else None
                task = about["task"] if about else names[table["task_index"][0].as_py()]
                one = self.recording(row, table, task, about, films)
            yield one
        for path in sorted(self.root.glob("data/*/*.parquet")):
            with blamed(path, REMEDY):
                if (there := tables.length(path)) != read.get(path, 0):
                    raise UserError(
                        f"{path} has {there} rows, meta/episodes tells of {read.get(path, 0)} of them; {REMEDY}"
                    )

    def rows(self, path: Path, index: int, length: int, tables: Tables) -> pa.Table:
        """Of one episode, in their order, all of them."""
        keys = {s.key for s in self.sources.values() if self.info["features"][s.key]["dtype"] != "video"}
        table = tables.rows(path, [*sorted(keys), "timestamp", "task_index", "frame_index"], index)
        if table["frame_index"].to_pylist() != list(range(length)):
            raise UserError(f"{path}: episode {index} has {len(table)} rows, not 0 to {length - 1} once each; {REMEDY}")
        if len(set(table["task_index"].to_pylist())) > 1:
            raise UserError(f"{path}: episode {index} is of several tasks; export one task an episode")
        return table

    def short(self, descriptions: dict[int, str]) -> dict[int, str]:
        """Tasks as parts of file names: those of mapping.json, else made of the description; no two become one."""
        made: dict[str, str] = {}
        for text in descriptions.values():
            if text not in self.words and made.setdefault(word(text), text) != text:
                raise UserError(
                    f"{text!r} and {made[word(text)]!r} would both be called {word(text)}: give them names in "
                    f'{self.sidecars.place}, "tasks": {{"DESCRIPTION": "short", ...}}'
                )
        return {index: self.words.get(text) or word(text) for index, text in descriptions.items()}

    def recording(
        self, row: dict[str, Any], table: pa.Table, task: str, about: dict[str, Any] | None, films: dict[str, Film]
    ) -> Recording:
        numbers = {name: self.numbers(name, table) for name in (*NUMBERS, *EXTRA) if name in self.sources}
        n = len(table)
        square = {name: numbers[name].reshape(n, side, side) for name, side in SQUARE.items() if name in numbers}
        images = {name: self.images(name, row, table, films) for name in IMAGES if name in self.sources}
        frames = self.sidecars.frames({**numbers, **square, **images})
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
            position(about["u"]) if about else Recording.u,
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
        if source.columns is None:
            return values
        if max(source.columns) >= values.shape[1]:
            raise UserError(f"{self.sidecars.place}: {name}: {source.key} has {values.shape[1]} columns")
        return np.ascontiguousarray(values[:, list(source.columns)])

    def images(self, name: str, row: dict[str, Any], table: pa.Table, films: dict[str, Film]) -> NDArray:
        key = self.sources[name].key
        description = self.info["features"][key]
        if description["dtype"] == "video":
            pixels = self.filmed(name, key, row, len(table), films)
        else:
            size = size_of(description)
            cells = (content(cell, self.root) for cell in table[key].to_pylist())
            try:
                pixels = np.stack([decoded(cell, size, colour=name == "rgb") for cell in cells])
            except UserError as problem:
                raise UserError(f"{self.root}: {key}: {problem}") from None
        if name == "rgb":
            return pixels
        if name == "mask":
            return (pixels if pixels.ndim == 3 else pixels.max(axis=-1)) > (127 if pixels.max(initial=0) > 1 else 0)
        if pixels.dtype == np.float32 and description["dtype"] == "image":
            unit = (description.get("info") or {}).get("depth_unit", "m")
            return pixels if unit == "m" else (pixels / 1000).astype(np.float32)
        return metres(pixels) if description["dtype"] == "image" else pixels

    def filmed(self, name: str, key: str, row: dict[str, Any], count: int, films: dict[str, Film]) -> NDArray:
        """Frames of an episode from the file that holds several."""
        numbers = {name: row[f"videos/{key}/{name}"] for name in ("chunk_index", "file_index")}
        place = inside(self.root, filled(self.info["video_path"], {"video_key": key, **numbers}))
        height, width = size_of(self.info["features"][key])
        if key in films and films[key].path != place:
            films.pop(key).close()
        if key not in films:
            films[key] = Film(place, height, width, depth=name == "depth")
        with blamed(place, REMEDY):
            pixels = films[key].frames(round(row[f"videos/{key}/from_timestamp"] * self.info["fps"]), count)
        return dequantised(pixels, self.info["features"][key].get("info") or {}) if name == "depth" else pixels


def size_of(feature: dict[str, Any]) -> tuple[int, int]:
    """Height and width of its images."""
    shape, names = feature["shape"], feature.get("names")
    if isinstance(names, list) and {"height", "width"} <= set(names):
        return int(shape[names.index("height")]), int(shape[names.index("width")])
    return int(shape[0]), int(shape[1])


def filled(pattern: str, values: dict[str, Any]) -> str:
    """`{name}` and `{name:03d}` replaced; no other format that Python knows."""

    def one(found: re.Match[str]) -> str:
        value = values[found[1]]
        return str(value) if found[2] is None else f"{int(value):0{found[2]}d}"

    return re.sub(r"\{(\w+)(?::0(\d)d)?\}", one, pattern)


def source(name: str, said: Any, features: dict[str, Any], place: Path) -> Source:
    if isinstance(said, str):
        found = Source(said)
    elif isinstance(said, dict) and isinstance(said.get("feature"), str):
        columns = whole_numbers(said["columns"], f"{place}: {name}: columns") if "columns" in said else None
        found = Source(said["feature"], None if columns is None else tuple(columns))
    else:
        raise UserError(f'{place}: {name} is a feature, or {{"feature": ..., "columns": [...]}}')
    if found.key not in features:
        raise UserError(
            f"{place}: {name} is to be {found.key!r}, which the dataset has not; "
            f"it has {', '.join(key for key in features if key not in COUNTERS)}"
        )
    return found


def inside(root: Path, name: str) -> Path:
    """A file of the dataset: one from a stranger must not show what only its reader may see."""
    path = root / name
    if not path.resolve().is_relative_to(root.resolve()):
        raise UserError(f"{root} names {name}, which is outside of it; {REMEDY}")
    return path


def content(cell: dict[str, Any], root: Path) -> io.BytesIO | Path:
    """An image column holds bytes, or a path."""
    return io.BytesIO(cell["bytes"]) if cell["bytes"] is not None else inside(root, cell["path"])
