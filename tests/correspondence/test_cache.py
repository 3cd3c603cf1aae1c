"""The correspondence cache: the paper's rows, deterministic, resumable, tied to its demonstrations."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memcorr.correspondence.cache import (
    beside_the_paper,
    build_cache,
    choose_rows,
    error_table,
    match_demonstration,
    read_cache,
)
from memcorr.correspondence.evaluate import _present
from memcorr.correspondence.matches import residuals
from memcorr.demos.collect import collect
from memcorr.demos.phase import closest_frames, reference_phase, training_reference
from memcorr.demos.store import Store
from memcorr.errors import UserError
from memcorr.files import write_json
from memcorr.spec import SPEC
from tests.costs import kept


def test_rows_are_all_of_frame_zero_and_distinct_others() -> None:
    demonstration, anchor = choose_rows(160)
    assert len(anchor) == SPEC.cache_rows and anchor.max() == 184
    assert sorted(demonstration[anchor == 0]) == list(range(160))
    assert len(set(zip(demonstration.tolist(), anchor.tolist(), strict=True))) == SPEC.cache_rows
    again = choose_rows(160)
    np.testing.assert_array_equal(again[1], anchor)
    assert not np.array_equal(choose_rows(160, seed=1)[1], anchor)


@pytest.fixture(scope="module")
def cache_folder(store: Store, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("cache")
    build_cache(store, out, "flow", pairs=2, rows=60, workers=2)
    return out


def test_same_bytes_for_one_worker_and_after_an_interruption(store: Store, cache_folder: Path, tmp_path: Path) -> None:
    build_cache(store, tmp_path / "a", "flow", pairs=2, rows=60, workers=1)
    expected = (cache_folder / "cache.safetensors").read_bytes()
    assert (tmp_path / "a" / "cache.safetensors").read_bytes() == expected
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    (tmp_path / "b" / "cache.safetensors").unlink()  # as if killed before the shards were joined
    build_cache(store, tmp_path / "b", "flow", pairs=2, rows=60, workers=1)
    assert (tmp_path / "b" / "cache.safetensors").read_bytes() == expected


def test_rows_hold_what_they_say(store: Store, cache_folder: Path) -> None:
    cache = read_cache(cache_folder, store)
    assert len(cache.anchor) == 60 and sorted(cache.demonstration[cache.anchor == 0]) == [0, 1, 2, 3]
    demonstrations = store.demonstrations(range(2))
    for row in (0, 17, 59):
        query = demonstrations[cache.demonstration[row]]
        reference = store.demonstration(training_reference(query.pair, 2), query.task)
        assert query.object_pose is not None and reference.object_pose is not None
        one = residuals(
            cache.matches, reference.object_pose[cache.reference_frame[row]], query.object_pose[cache.anchor[row]]
        )[row]
        np.testing.assert_allclose(cache.residual[row], one, atol=1e-12)
        np.testing.assert_allclose(cache.p_live_true[row] + cache.residual[row], cache.matches.p_live[row])
        gap = abs(reference.joint[cache.reference_frame[row]] - query.joint[cache.anchor[row]])
        assert gap <= np.abs(reference.joint[:185] - query.joint[cache.anchor[row]]).min() + 0.0101


def test_error_table(store: Store, cache_folder: Path) -> None:
    cache = read_cache(cache_folder, store)
    table = error_table("flow", cache.residual, cache.matches.valid)
    written = json.loads((cache_folder / "errors.json").read_text())
    assert table.items() <= written.items() and written["lifting"] == "rigid"
    assert written["auc"] is None or 0 <= written["auc"] <= 1  # None: every point is right
    mm = sorted(1e3 * np.linalg.norm(r) for r in cache.residual[cache.matches.valid])
    assert table["mean_mm"] == pytest.approx(sum(mm) / len(mm), abs=1e-3)
    assert table["valid_points"] == len(mm)
    assert "79.62" in beside_the_paper(table)


@pytest.fixture(scope="module")
def other() -> Store:
    return Store.open(kept("other", "memcorr.demos", lambda root: collect(root, pairs=2, seed=5, workers=2)))


def test_cache_of_other_demonstrations_is_refused(
    store: Store, other: Store, cache_folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="other demonstrations"):
        read_cache(cache_folder, other)
    with pytest.raises(UserError, match="other settings, weights or demonstrations"):
        build_cache(store, cache_folder, "flow", pairs=2, rows=61)
    with pytest.raises(UserError, match="memcorr match"):
        read_cache(tmp_path, store)


def test_killed_when_all_was_joined_it_still_tidies_up(store: Store, cache_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(cache_folder, tmp_path / "cache")
    before = sorted(path.name for path in folder.iterdir())
    (folder / "shard-001.safetensors").write_bytes(b"what was joined")
    build_cache(store, folder, "flow", pairs=2, rows=60, workers=1)
    assert sorted(path.name for path in folder.iterdir()) == before


def test_damaged_cache_is_named(store: Store, cache_folder: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(cache_folder, tmp_path / "broken")
    data = (broken / "cache.safetensors").read_bytes()
    (broken / "cache.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(UserError, match="damaged"):
        read_cache(broken, store)


def test_tables_of_live_scenes_say_what_they_are_about(tmp_path: Path) -> None:
    about = {"matcher": "flow", "lifting": "rigid", "world": "door", "setting": "camera", "scene_seed": 0}
    path = tmp_path / "matching.json"
    write_json(path, {"tables": [about]})
    assert _present(path) == [about] and _present(tmp_path / "nothing") == []
    for wrong in ({}, {**about, "scene_seed": "x"}, {**about, "world": None}):
        write_json(path, {"tables": [about, wrong]})
        with pytest.raises(UserError, match=r"matching\.json is damaged \(.*; delete it"):
            _present(path)


def test_without_any_point_there_is_no_cache(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its errors would be those of nothing."""
    one = match_demonstration

    def unseen(*arguments: Any) -> dict[str, Any]:
        rows = one(*arguments)
        return rows | {"valid": np.zeros_like(rows["valid"])}

    monkeypatch.setattr("memcorr.correspondence.cache.match_demonstration", unseen)
    with pytest.raises(UserError, match="flow found no point of any row again"):
        build_cache(store, tmp_path / "cache", "flow", pairs=2, rows=8, workers=1)


def test_ties_are_broken_by_elapsed_time() -> None:
    reference = np.concatenate([np.full(60, -0.78), np.linspace(-0.78, -1.6, 40), np.full(100, -1.6)])
    query = np.array([-0.78, -0.78, -1.2, -1.6])
    frames = np.array([0, 45, 70, 150])
    chosen = closest_frames(query, frames, reference, "elapsed")
    assert chosen[0] == 0 and chosen[1] == 45 and chosen[3] == 150
    assert abs(reference[chosen[2]] + 1.2) < 0.03
    assert closest_frames(query, frames, reference, "first")[1] == 0


def test_reference_phase() -> None:
    assert [reference_phase(e, 200) for e in (0, 8, 184, 199)] == [0, 8, 184, 184]
    assert reference_phase(8, 200, offset=-16) == 0 and reference_phase(100, 200, speed=1.5, offset=16) == 166
    assert [reference_phase(e, 120) for e in (0, 100, 112, 199)] == [0, 100, 104, 104]
    assert [reference_phase(e, 2) for e in (0, 100)] == [0, 0]
