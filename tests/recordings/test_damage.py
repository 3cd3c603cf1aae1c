"""Recordings on their way in: damage to what we exported is told, and strangers' files raise one line at most."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path

import pytest

from memcorr.errors import UserError
from memcorr.recordings import tables
from memcorr.recordings.lerobot import OWN
from memcorr.recordings.sidecars import import_recordings
from tests.test_files import damaged, told_or_harmless
from tests.test_workers import children, within
from tests.torture.inputs import told_or_taken
from tests.torture.kinds import exported_kinds, read_bags, source_of_exports, strange_kinds, write_bags, write_dataset

TABLE = "chunk-000/file-000.parquet"


@pytest.mark.parametrize("whose", ["ours", "of strangers"])
def test_any_damage_is_one_line_or_harmless(whose: str, tmp_path: Path) -> None:
    random.seed(1)
    refused = 0
    for number, kind in enumerate(exported_kinds(tmp_path) if whose == "ours" else strange_kinds(tmp_path)):
        path = tmp_path / str(number) / kind.name
        path.parent.mkdir(parents=True)
        kind.write(path)
        good, undamaged = path.read_bytes(), kind.read(path)
        for k in range(12):
            content = damaged(good, k % 6, random.random(), random.randint(1, 300))
            if whose == "ours":
                seen = told_or_harmless(kind, path, content, undamaged) if content != good else ""
            else:
                seen = told_or_taken(kind, path, content)
            refused += seen == "refused"
    assert refused > 30


def test_a_dataset_that_was_changed_on_purpose_is_anybodys(tmp_path: Path) -> None:
    path = tmp_path / "dataset/meta/info.json"
    write_dataset(source_of_exports(tmp_path), path)
    info = json.loads(path.read_text())
    path.write_text(json.dumps({**info, "robot_type": "another"}))
    with pytest.raises(
        UserError, match=r"info\.json is not what was exported; .*if the change is meant, remove .*json"
    ):
        import_recordings("lerobot", tmp_path / "dataset", tmp_path / "a")
    (tmp_path / "dataset" / OWN).unlink()
    assert import_recordings("lerobot", tmp_path / "dataset", tmp_path / "a") == 2


def test_a_dataset_shows_nothing_outside_of_it(tmp_path: Path) -> None:
    path = tmp_path / "dataset/meta/info.json"
    write_dataset(source_of_exports(tmp_path), path)
    (tmp_path / "dataset" / OWN).unlink()
    shutil.move(tmp_path / "dataset/data", tmp_path / "data")
    info = json.loads(path.read_text())
    path.write_text(json.dumps({**info, "data_path": f"../{info['data_path']}"}))
    with pytest.raises(UserError, match="outside of it"):
        import_recordings("lerobot", tmp_path / "dataset", tmp_path / "a")


def test_a_table_whose_reading_does_not_end_is_refused_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here a pipe that nobody writes to: pyarrow waits for it for ever, and hears no signal meanwhile."""
    dataset = tmp_path / "dataset"
    write_dataset(source_of_exports(tmp_path), dataset / "meta/info.json")
    (dataset / OWN).unlink()
    table = dataset / "meta/episodes" / TABLE
    table.unlink()
    os.mkfifo(table)
    monkeypatch.setattr(tables, "SECONDS", 1.5)
    before = children()
    with within(60), pytest.raises(UserError, match=r"parquet is damaged \(it cannot be read: no answer within 1\.5 s"):
        import_recordings("lerobot", dataset, tmp_path / "store")
    assert children() == before and not (tmp_path / "store/collection.json").exists()


def test_a_whole_dataset_is_read_by_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = []

    class Counted(tables.Answering):
        def __init__(self) -> None:
            started.append(self)
            super().__init__()

    monkeypatch.setattr(tables, "Answering", Counted)
    write_dataset(source_of_exports(tmp_path), tmp_path / "dataset/meta/info.json")
    before = children()
    assert import_recordings("lerobot", tmp_path / "dataset", tmp_path / "store") == 2
    assert len(started) == 1 and children() == before


def test_a_bit_in_a_recording_is_noticed(tmp_path: Path) -> None:
    """In an image, in the index that says where messages are: neither changes what is imported, or is told."""
    path = tmp_path / "bags/pair-000-open.mcap"
    path.parent.mkdir()
    write_bags(path)
    good, undamaged = path.read_bytes(), read_bags(path)
    for at in (*range(40, len(good), len(good) // 25), *range(len(good) - 400, len(good), 25)):
        path.write_bytes(good[:at] + bytes([good[at] ^ 16]) + good[at + 1 :])
        try:
            assert read_bags(path) == undamaged
        except UserError as problem:
            assert str(path) in str(problem)
