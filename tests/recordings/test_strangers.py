"""Strangers' files: nothing is lost without a word, nothing is decoded that need not be, the right file is blamed."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from memcorr.demos.store import Store
from memcorr.errors import UserError
from memcorr.recordings.film import Film
from memcorr.recordings.lerobot import OWN, filled
from memcorr.recordings.mcap import Stream, Tree
from memcorr.recordings.sidecars import import_recordings, read_calibration, word
from tests.recordings.conftest import film
from tests.torture.kinds import source_of_exports, write_bags, write_dataset

TABLE = "chunk-000/file-000.parquet"
DATA, EPISODES, TASKS = f"data/{TABLE}", f"meta/episodes/{TABLE}", "meta/tasks.parquet"


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    """Of two short episodes, with nothing of ours beside it."""
    write_dataset(source_of_exports(tmp_path), tmp_path / "dataset/meta/info.json")
    (tmp_path / "dataset" / OWN).unlink()
    return tmp_path / "dataset"


def changed(path: Path, column: str, values: list[Any] | Callable[[list[Any]], list[Any]]) -> None:
    table = pq.read_table(path)
    old = table[column].to_pylist()
    new = pa.array(values(old) if callable(values) else values, table[column].type)
    pq.write_table(table.set_column(table.column_names.index(column), column, new), path)


def taken(dataset: Path) -> list[str]:
    import_recordings("lerobot", dataset, dataset.parent / "store")
    return [d.name for d in Store.open(dataset.parent / "store").present()]


def refused(dataset: Path, words: str) -> None:
    with pytest.raises(UserError, match=words):
        import_recordings("lerobot", dataset, dataset.parent / "store")
    assert not (dataset.parent / "store/collection.json").exists()


def test_tasks_of_any_alphabet_stay_two(dataset: Path) -> None:
    names = pq.read_table(dataset / TASKS).column_names
    changed(dataset / TASKS, next(n for n in names if n != "task_index"), ["ドアを開ける", "ドアを閉める"])
    first, second = taken(dataset)
    assert first.startswith("pair-000-task-") and second.startswith("pair-001-task-") and first[9:] != second[9:]
    assert word("Öffne die Tür!") == "offne-die-tur" and word("Straße") == "strasse"
    assert word("open ドア") != word("open 窓") and word("開") == word("開")


def test_names_that_would_become_one_are_refused(dataset: Path) -> None:
    names = pq.read_table(dataset / TASKS).column_names
    changed(dataset / TASKS, next(n for n in names if n != "task_index"), ["Open the door.", "open the door"])
    refused(dataset, r"would both be called open-the-door: give them names in .*mapping\.json")
    (dataset / "mapping.json").write_text('{"tasks": {"Open the door.": "one", "open the door": "one"}}')
    assert taken(dataset) == ["pair-000-one", "pair-001-one"]  # as somebody says


def test_no_episode_takes_the_place_of_another(dataset: Path) -> None:
    names = pq.read_table(dataset / TASKS).column_names
    changed(dataset / TASKS, next(n for n in names if n != "task_index"), ["a", "b"])
    (dataset / "mapping.json").write_text('{"tasks": {"a": "one", "b": "one"}, "pairs": [[0, 1]]}')
    refused(dataset, "pair 0, one is there twice")
    (dataset / "mapping.json").write_text('{"pairs": [[0, 1], [1]]}')
    refused(dataset, r"mapping\.json: pairs names an episode twice")
    (dataset / "mapping.json").unlink()
    changed(dataset / EPISODES, "episode_index", [0, 0])
    refused(dataset, rf"{EPISODES}: episode 0 is there twice")


def test_rows_in_are_rows_out_or_a_refusal(dataset: Path) -> None:
    good = (dataset / DATA).read_bytes(), (dataset / EPISODES).read_bytes()

    def again() -> None:
        (dataset / DATA).write_bytes(good[0])
        (dataset / EPISODES).write_bytes(good[1])

    table = pq.read_table(dataset / DATA)
    pq.write_table(table.slice(0, len(table) - 1), dataset / DATA)
    refused(dataset, rf"{DATA}: episode 1 has {len(table) // 2 - 1} rows")
    pq.write_table(pq.read_table(dataset / EPISODES).slice(0, 1), dataset / EPISODES)
    again()
    pq.write_table(pq.read_table(dataset / EPISODES).slice(0, 1), dataset / EPISODES)
    refused(dataset, rf"{DATA} has {len(table)} rows, meta/episodes tells of {len(table) // 2} of them")
    again()
    changed(dataset / DATA, "frame_index", lambda old: [max(n, 1) for n in old])
    refused(dataset, rf"{DATA}: episode 0 has .* rows, not 0 to .* once each")
    again()
    changed(dataset / DATA, "task_index", lambda old: [*old[:-1], 0])
    refused(dataset, rf"{DATA}: episode 1 is of several tasks")
    again()
    one = table.filter(pa.compute.equal(table["frame_index"], 0))
    pq.write_table(one, dataset / DATA)
    changed(dataset / EPISODES, "length", [1, 1])
    refused(dataset, "has 1 rows; a demonstration has at least two")


def picture(kind: str, size: tuple[int, int]) -> bytes:
    content = io.BytesIO()
    Image.new("RGB" if kind == "EPS" else "L", size).save(content, kind)
    return content.getvalue()


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        (("PNG", (9000, 9000)), rf"{DATA}|9000 x 9000 pixels; .* was declared"),
        (("PNG", (4, 3)), "an image is 4 x 3 pixels; .* was declared"),
        (("EPS", (8, 8)), rf"{DATA} is damaged \(UnidentifiedImageError"),
    ],
)
def test_an_image_is_decoded_only_if_it_is_one_of_the_declared_size(
    dataset: Path, cell: tuple[str, tuple[int, int]], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*arguments: Any, **settings: Any) -> None:
        raise AssertionError("Ghostscript")

    monkeypatch.setattr("PIL.EpsImagePlugin.Ghostscript", never)
    monkeypatch.setattr("PIL.Image.MAX_IMAGE_PIXELS", None)
    bad = {"bytes": picture(*cell), "path": None}
    changed(dataset / DATA, "observation.images.rgb", lambda old: [*old[:1], bad, *old[2:]])
    began = time.process_time()
    refused(dataset, words)
    assert time.process_time() - began < 2


def test_grey_and_palette_pictures_are_colours(dataset: Path) -> None:
    def grey(old: list[Any]) -> list[Any]:
        made = []
        for n, one in enumerate(old):
            content = io.BytesIO()
            image = Image.open(io.BytesIO(one["bytes"])).convert("RGB")
            (image.quantize(8) if n % 2 else image.convert("L")).save(content, "PNG")
            made.append({"bytes": content.getvalue(), "path": None})
        return made

    changed(dataset / DATA, "observation.images.rgb", grey)
    taken(dataset)
    frames = Store.open(dataset.parent / "store").present()[0].frames(range(2))
    content = pq.read_table(dataset / DATA)["observation.images.rgb"].to_pylist()
    for frame, one in zip(frames, content, strict=False):
        assert np.array_equal(frame.rgb, np.array(Image.open(io.BytesIO(one["bytes"])).convert("RGB")))


def test_a_video_has_the_size_that_was_declared(tmp_path: Path) -> None:
    film(tmp_path / "film.mp4", [np.full((32, 32), 1.0, np.float32)] * 3)
    with pytest.raises(UserError, match=r"film\.mp4 has frames of 32 x 32 pixels; 16 x 16 was declared"):
        Film(tmp_path / "film.mp4", 16, 16, depth=True)
    Film(tmp_path / "film.mp4", 32, 32, depth=True).close()
    (tmp_path / "list.mp4").write_text(f"ffconcat version 1.0\nfile {tmp_path / 'film.mp4'}\n")
    with pytest.raises(UserError, match=r"list\.mp4 is damaged, or no video"):
        Film(tmp_path / "list.mp4", 32, 32, depth=True)


def test_paths_are_filled_in_and_not_computed(dataset: Path) -> None:
    numbers = {"chunk_index": 3, "file_index": 12}
    assert filled("data/chunk-{chunk_index:03d}/{file_index}.parquet", numbers) == "data/chunk-003/12.parquet"
    info = json.loads((dataset / "meta/info.json").read_text())
    for wrong in ("{chunk_index:0999999999d}", "{chunk_index.__class__}", "{0}", "{nothing}", 7, None):
        (dataset / "meta/info.json").write_text(json.dumps({**info, "data_path": wrong}))
        refused(dataset, r"data/|is damaged|info\.json")


@pytest.mark.parametrize("name", [TASKS, EPISODES, DATA])
def test_the_damaged_file_is_the_one_that_is_named(dataset: Path, name: str) -> None:
    content = (dataset / name).read_bytes()
    (dataset / name).write_bytes(content[: len(content) // 2])
    refused(dataset, rf"{name} is damaged \(.*; copy the dataset again")


@pytest.mark.parametrize(
    "said",
    [
        {"pairs": 5},
        {"pairs": [0, 1]},
        {"pairs": [["0"]]},
        {"tasks": ["open"]},
        {"tasks": {"a": 1}},
        {"rgb": 3},
        {"gripper": {"feature": "observation.state", "columns": "all"}},
        {"gripper": {"feature": "observation.state", "columns": [0, 1, 99]}},
        {"gripper": {"feature": "observation.state", "columns": [0, -1]}},
    ],
)
def test_what_is_wrong_with_the_mapping_is_said_of_the_mapping(dataset: Path, said: dict[str, Any]) -> None:
    (dataset / "mapping.json").write_text(json.dumps(said))
    refused(dataset, r"mapping\.json: ")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"K": [[None, 0, 1], [0, 1, 1], [0, 0, 1]]}, "K and T_world_cam are finite numbers"),
        ({"T_world_cam": [[1, 0, 0, "inf"], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]}, "are finite numbers"),
        ({"image_size": [1e400, 3]}, "calibration"),
    ],
)
def test_a_calibration_is_finite(sidecars: dict[str, Any], tmp_path: Path, wrong: dict[str, Any], words: str) -> None:
    place = tmp_path / "calibration.json"
    place.write_text(json.dumps({**sidecars["calibration"], **wrong}))
    with pytest.raises(UserError, match=words):
        read_calibration(place, place)


def test_frames_in_a_circle_are_told(tmp_path: Path) -> None:
    tree = Tree()

    class Named:
        def __init__(self, **values: Any) -> None:
            vars(self).update(values)

    zero, turn = Named(x=0.0, y=0.0, z=0.0), Named(x=0.0, y=0.0, z=0.0, w=1.0)
    for child, parent in (("a", "b"), ("b", "c"), ("c", "a")):
        header = Named(frame_id=parent, stamp=Named(sec=0, nanosec=0))
        one = Named(header=header, child_frame_id=child, transform=Named(translation=zero, rotation=turn))
        tree.add(Named(transforms=[one]), static=True)
    with pytest.raises(UserError, match="in a circle through a"):
        tree.pose("world", "a", 0.0, 1.0, tmp_path / "x.mcap")


def test_what_is_nearest_in_time_costs_no_square_of_the_messages() -> None:
    rng = np.random.default_rng(0)
    times = rng.random(300)
    stream = Stream()
    for at in (0.5, 0.1, 0.9, 0.3):
        stream.add(at, at)
    stream.sort()
    right = np.abs(np.array(stream.times)[None] - times[:, None]).argmin(axis=1)
    assert np.array_equal(stream.nearest(times), right)
    many = Stream(list(np.arange(200_000.0)), [0] * 200_000)  # of all pairs: 320 GB
    assert many.nearest(np.arange(200_000.0) + 0.4).tolist() == list(range(200_000))


def test_the_mapping_of_a_ros_recording_is_blamed_by_name(tmp_path: Path) -> None:
    path = tmp_path / "bags/pair-000-open.mcap"
    path.parent.mkdir()
    write_bags(path)
    said = json.loads((path.parent / "mapping.json").read_text())
    for wrong in (
        {"demonstrations": {"pair-000-open.mcap": {"pair": "0", "task": "open"}}},
        {"demonstrations": [1]},
        {"action": {"topic": "/command", "columns": ["x"]}},
        {"action": {"topic": "/command", "columns": [0, 9]}},
    ):
        (path.parent / "mapping.json").write_text(json.dumps({**said, **wrong}))
        with pytest.raises(UserError, match=r"mapping\.json: "):
            import_recordings("mcap", path.parent, tmp_path / "store")
