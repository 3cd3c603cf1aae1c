"""LeRobot's format: the same files after a round trip, and other people's datasets without a guess."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray

from memcorr.demos.store import Demonstration, Store, demonstration_path, write_demonstration
from memcorr.errors import UserError
from memcorr.files import write_json
from memcorr.frames import Camera, Frame
from memcorr.recordings.check.report import examine
from memcorr.recordings.export import export_lerobot
from memcorr.recordings.lerobot import OWN
from memcorr.recordings.sidecars import import_recordings

Short = list[tuple[Demonstration, list[Frame], NDArray]]


def digests(root: Path) -> dict[str, str]:
    names = ("*.h5", "collection.json")
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for name in names for p in sorted(root.glob(name))}


@pytest.fixture(scope="module")
def exported(store: Store, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("lerobot") / "door"
    assert export_lerobot(store, out) == 4
    return out


def test_a_store_exported_and_imported_is_the_same_files(store: Store, exported: Path, tmp_path: Path) -> None:
    assert import_recordings("lerobot", exported, tmp_path / "back") == 4
    assert digests(tmp_path / "back") == digests(store.root)


def test_so_is_recorded_data_of_another_shape(short: Short, tmp_path: Path) -> None:
    """Not square, no joint, no object pose, times, 7 numbers of state, 6 of action, 17 and 30 rows, tasks missing."""
    root = tmp_path / "mine"
    root.mkdir()
    for pair, (d, frames, _) in enumerate(short):
        rows = (17, 30)[pair]
        seen = [
            Frame(f.rgb[8:72], f.depth[8:72], f.mask[8:72], f.camera, f.robot_state[:7], f.gripper)
            for f in frames[:rows]
        ]
        seen[3] = replace(seen[3], depth=np.where(seen[3].mask, np.nan, seen[3].depth).astype(np.float32))
        action, clock = np.random.default_rng(pair).normal(size=(rows, 6)), np.arange(rows) / 30 + 1e-9
        path = demonstration_path(root, pair, d.task)
        write_demonstration(
            path, seen, action, None, None, pair=pair, task=d.task, u=(0.1, 0.2 + 1e-17), world="mine", time=clock
        )
    write_json(root / "collection.json", {"layout": 1, "world": "mine", "pairs": 2, "tasks": ["open", "close"]})
    export_lerobot(Store.open(root), tmp_path / "out")
    assert json.loads((tmp_path / "out/meta/info.json").read_text())["fps"] == 30
    import_recordings("lerobot", tmp_path / "out", tmp_path / "back")
    assert digests(tmp_path / "back") == digests(root)


def test_an_export_has_what_lerobot_asks_for(exported: Path) -> None:
    info = json.loads((exported / "meta/info.json").read_text())
    assert info["codebase_version"] == "v3.0" and info["total_episodes"] == 4 and info["total_frames"] == 800
    features = info["features"]
    assert features["observation.images.depth"]["info"] == {"is_depth_map": True, "depth_unit": "m"}
    assert features["observation.images.rgb"]["shape"] == [128, 128, 3]
    stats = json.loads((exported / "meta/stats.json").read_text())
    assert set(stats) == set(features)
    for key, found in stats.items():
        assert set(found) == {"min", "max", "mean", "std", "count", "q01", "q10", "q50", "q90", "q99"}
        assert len(found["mean"]) == (features[key]["shape"][-1])
        if features[key]["dtype"] == "image":
            assert np.shape(found["mean"])[1:] == (1, 1) and 0 <= found["q10"][0][0][0] <= found["max"][0][0][0]
    table = pq.read_table(exported / "data/chunk-000/file-000.parquet")
    assert table.column_names == list(features) and len(table) == 800
    assert table["observation.images.depth"][0].as_py()["bytes"][:2] in (b"II", b"MM")
    episodes = pq.read_table(exported / "meta/episodes/chunk-000/file-000.parquet").to_pylist()
    assert [e["dataset_to_index"] for e in episodes] == [200, 400, 600, 800]
    assert episodes[1]["tasks"] == ["close"] and np.shape(episodes[1]["stats/observation.images.rgb/mean"]) == (3, 1, 1)


@pytest.mark.skipif("MEMCORR_LEROBOT_PYTHON" not in os.environ, reason="names a Python that has lerobot 0.6")
def test_lerobot_itself_reads_the_same_pixels(store: Store, exported: Path, tmp_path: Path) -> None:
    frame = store.demonstration(0, "close").frame(5)
    np.savez(tmp_path / "frame.npz", rgb=frame.rgb, depth=frame.depth, mask=frame.mask, g=frame.gripper)
    script = (
        "import numpy as np; from lerobot.datasets.lerobot_dataset import LeRobotDataset\n"
        f"data = LeRobotDataset('local/door', root={str(exported)!r}, depth_output_unit='m')\n"
        f"row, ours = data[205], np.load({str(tmp_path / 'frame.npz')!r})\n"
        "rgb, depth, mask = (row['observation.images.' + k].numpy() for k in ('rgb', 'depth', 'mask'))\n"
        "assert row['task'] == 'close' and len(data) == 800\n"
        "assert ((rgb * 255).round().transpose(1, 2, 0) == ours['rgb']).all()\n"
        "assert (depth[0] == ours['depth']).all() and ((mask[0] > 0.5) == ours['mask']).all()\n"
        "assert np.allclose(row['observation.gripper'].numpy(), ours['g'])\n"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(tmp_path / "hf"), "PYTHONPATH": ""}
    command = [os.environ["MEMCORR_LEROBOT_PYTHON"], "-c", script]
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr[-2000:]


def with_sidecars(root: Path, sidecars: dict[str, dict[str, Any]], *names: str) -> Path:
    for name in names:
        content = sidecars["lerobot" if name == "mapping" else name]
        (root / f"{name}.json").write_text(json.dumps(content))
    return root


@pytest.mark.parametrize("video", [False, True], ids=["16-bit images", "video"])
def test_a_strangers_dataset_is_read_and_nothing_is_wrong_with_it(
    stranger: Callable[..., Path], sidecars: dict[str, dict[str, Any]], short: Short, tmp_path: Path, video: bool
) -> None:
    root = with_sidecars(stranger(tmp_path / "theirs", video=video), sidecars, "calibration", "mapping")
    assert import_recordings("lerobot", root, tmp_path / "store", world="My door") == 2
    store = Store.open(tmp_path / "store")
    assert store.world == "my-door" and store.tasks == ("open", "close") and len(store) == 1
    for (_, frames, action), d in zip(short, store.demonstrations([0]), strict=True):
        assert d.recorded_joint is None and d.time is not None and d.time[1] == pytest.approx(0.05)
        for t in (0, len(d) - 1):
            ours, theirs = frames[t], d.frame(t)
            np.testing.assert_array_equal(theirs.rgb, ours.rgb)
            np.testing.assert_array_equal(theirs.mask, ours.mask)
            np.testing.assert_array_equal(theirs.depth == 0, ours.depth == 0)  # no return stays no return
            near = ours.depth < 3
            assert np.abs(theirs.depth - ours.depth)[near].max() < (0.0017 if video else 0.00051)
            np.testing.assert_allclose(theirs.camera.K, ours.camera.K, atol=1e-3)
            np.testing.assert_allclose(theirs.gripper, ours.gripper, atol=1e-6)
            np.testing.assert_allclose(d.action[t], action[t], atol=1e-6)
        assert not (found := examine(d)), [f.line() for f in found]


def test_what_is_missing_is_asked_for_and_never_guessed(
    stranger: Callable[..., Path], sidecars: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    root = with_sidecars(stranger(tmp_path / "theirs", mask=False), sidecars, "mapping")
    mapping = {k: v for k, v in sidecars["lerobot"].items() if k != "mask"}
    (root / "mapping.json").write_text(json.dumps(mapping))
    with pytest.raises(UserError, match=r"nothing about K and T_world_cam: write .*calibration.json: .*image_size"):
        import_recordings("lerobot", root, tmp_path / "a")
    with_sidecars(root, sidecars, "calibration")
    with pytest.raises(UserError, match=r"where mask come from.*--no-masks"):
        import_recordings("lerobot", root, tmp_path / "a")
    assert import_recordings("lerobot", root, tmp_path / "a", masks=False) == 2
    (found,) = examine(Store.open(tmp_path / "a").demonstration(0, "open"))
    assert (found.field, found.fault) == ("mask", "empty")
    (root / "mapping.json").unlink()
    with pytest.raises(UserError, match=r"where rgb, depth, gripper come from.*dataset has observation.images.front"):
        import_recordings("lerobot", root, tmp_path / "b", masks=False)
    (root / "mapping.json").write_text(json.dumps({**mapping, "rgb": "observation.images.back"}))
    with pytest.raises(UserError, match=r"observation.images.back.*which the dataset has not"):
        import_recordings("lerobot", root, tmp_path / "b", masks=False)
    (root / "mapping.json").write_text(json.dumps(mapping))
    for wrong, words in (
        ({"image_size": [640, 480]}, r"128 x 128, .*calibration\.json is for 640 x 480"),
        ({"pixel_centre": None}, "calibration.json"),
    ):
        (root / "calibration.json").write_text(json.dumps({**sidecars["calibration"], **wrong}))
        with pytest.raises(UserError, match=words):
            import_recordings("lerobot", root, tmp_path / "b", masks=False)
    assert not (tmp_path / "b").exists()


def test_episodes_without_declared_pairs_stand_alone(
    stranger: Callable[..., Path], sidecars: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    root = with_sidecars(stranger(tmp_path / "theirs"), sidecars, "calibration")
    mapping = {k: v for k, v in sidecars["lerobot"].items() if k not in ("pairs", "tasks")}
    (root / "mapping.json").write_text(json.dumps(mapping))
    import_recordings("lerobot", root, tmp_path / "store")
    names = [d.name for d in Store.open(tmp_path / "store").present()]
    assert names == ["pair-000-open-the-door", "pair-001-close-the-door"]


def test_other_versions_and_folders_that_are_taken_are_refused(store: Store, exported: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="choose another --out"):
        export_lerobot(store, exported)
    with pytest.raises(UserError, match="choose another --out"):
        import_recordings("lerobot", exported, store.root)
    with pytest.raises(UserError, match="no LeRobotDataset"):
        import_recordings("lerobot", tmp_path, tmp_path / "out")
    (tmp_path / "meta").mkdir()
    write_json(tmp_path / "meta/info.json", {"codebase_version": "v2.1"})
    with pytest.raises(UserError, match=r"v2\.1, v3\.0 is read"):
        import_recordings("lerobot", tmp_path, tmp_path / "out")


def test_damage_is_one_line_and_another_name_is_taken(exported: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(exported, tmp_path / "copy")
    import_recordings("lerobot", copy, tmp_path / "store", world="Other door")
    other = Store.open(tmp_path / "store")
    assert other.world == "other-door" and other.demonstration(1, "close").world == "other-door"
    table = copy / "data/chunk-000/file-000.parquet"
    table.write_bytes(table.read_bytes()[:100_000])
    with pytest.raises(UserError, match=r"file-000\.parquet is not what was exported; copy the dataset again"):
        import_recordings("lerobot", copy, tmp_path / "b")
    (copy / OWN).unlink()
    with pytest.raises(UserError, match=r"copy/data/chunk-000/file-000\.parquet is damaged .*; copy the dataset again"):
        import_recordings("lerobot", copy, tmp_path / "b")


def test_shapes_that_differ_cannot_share_a_dataset(short: Short, tmp_path: Path) -> None:
    root = tmp_path / "mixed"
    root.mkdir()
    for number, (d, frames, action) in enumerate(short):
        seen = [replace(f, camera=Camera(f.camera.K, f.camera.T_world_cam)) for f in frames[:17]]
        write_demonstration(
            demonstration_path(root, 0, d.task),
            seen,
            action[:17, : 4 - number],
            None,
            None,
            pair=0,
            task=d.task,
            u=(0.0, 0.0),
            world="mine",
        )
    write_json(root / "collection.json", {"layout": 1, "pairs": 1, "world": "mine", "tasks": ["open", "close"]})
    with pytest.raises(UserError, match=r"action is \[3\].*export them apart"):
        export_lerobot(Store.open(root), tmp_path / "out", fps=80)
