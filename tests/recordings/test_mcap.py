"""ROS 2 recordings become demonstrations, or are told what they lack."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from memcorr.demos.store import Demonstration, Store
from memcorr.errors import UserError
from memcorr.frames import Frame
from memcorr.recordings.check.report import examine
from memcorr.recordings.sidecars import import_recordings

Sidecars = dict[str, dict[str, Any]]


def test_a_recording_becomes_a_demonstration(
    bags: Callable[..., Path],
    sidecars: Sidecars,
    short: list[tuple[Demonstration, list[Frame], NDArray]],
    tmp_path: Path,
) -> None:
    root = bags(tmp_path / "bags")
    (root / "mapping.json").write_text(json.dumps(sidecars["mcap"]))
    assert import_recordings("mcap", root, tmp_path / "store", world="My door") == 2
    store = Store.open(tmp_path / "store")
    assert store.world == "my-door" and set(store.tasks) == {"open", "close"}
    for ours, frames, action in short:
        d = store.demonstration(0, ours.task)
        assert len(d) == len(frames) and d.time is not None
        np.testing.assert_allclose(np.diff(d.time), 0.05, atol=1e-6)
        np.testing.assert_allclose(d.action, action)
        for t in (0, 20, len(d) - 1):
            theirs = d.frame(t)
            np.testing.assert_array_equal(theirs.rgb, frames[t].rgb)
            np.testing.assert_array_equal(theirs.mask, frames[t].mask)
            assert np.abs(theirs.depth - frames[t].depth).max() < 0.00051
            np.testing.assert_allclose(theirs.camera.K, frames[t].camera.K)
            np.testing.assert_allclose(theirs.camera.T_world_cam, frames[t].camera.T_world_cam, atol=1e-9)
            np.testing.assert_allclose(theirs.gripper, frames[t].gripper)
            np.testing.assert_allclose(theirs.robot_state, frames[t].robot_state)
        assert not (found := examine(d)), [f.line() for f in found]


def test_a_fixed_camera_may_be_in_a_sidecar(bags: Callable[..., Path], sidecars: Sidecars, tmp_path: Path) -> None:
    root = bags(tmp_path / "bags", without=("/tf_static", "/camera/color/camera_info", "/door_mask"))
    said = {k: v for k, v in sidecars["mcap"].items() if k not in ("T_world_cam", "camera_info", "mask")}
    (root / "mapping.json").write_text(json.dumps(said))
    with pytest.raises(UserError, match=r"does not say where camera_info, T_world_cam come from.*calibration.json"):
        import_recordings("mcap", root, tmp_path / "store", masks=False)
    (root / "calibration.json").write_text(json.dumps(sidecars["calibration"]))
    with pytest.raises(UserError, match=r"where mask come from.*--no-masks"):
        import_recordings("mcap", root, tmp_path / "store")
    assert import_recordings("mcap", root, tmp_path / "store", masks=False) == 2
    (found,) = examine(Store.open(tmp_path / "store").demonstration(0, "open"))
    assert (found.field, found.fault) == ("mask", "empty")


def test_what_a_recording_lacks_is_said(bags: Callable[..., Path], sidecars: Sidecars, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds no \.mcap files"):
        import_recordings("mcap", tmp_path, tmp_path / "out")
    root = bags(tmp_path / "bags", without=("/command",))
    (root / "mapping.json").write_text(json.dumps(sidecars["mcap"]))
    with pytest.raises(UserError, match=r"no message on /command \(action\); it has /camera"):
        import_recordings("mcap", root, tmp_path / "out")
    root = bags(tmp_path / "whole")
    (root / "mapping.json").write_text(json.dumps({**sidecars["mcap"], "gripper": {"tf": ["base", "gripper"]}}))
    with pytest.raises(UserError, match="from gripper up to base; it knows eye, gripper, stand, world"):
        import_recordings("mcap", root, tmp_path / "out2")
    (root / "mapping.json").write_text(json.dumps({**sidecars["mcap"], "depth": "/camera/color/image_raw"}))
    with pytest.raises(UserError, match=r"/camera/color/image_raw \(depth\): its encoding is bgr8; 16UC1"):
        import_recordings("mcap", root, tmp_path / "out3")
    (root / "mapping.json").write_text(json.dumps(sidecars["mcap"]))
    (root / "pair-000-open.mcap").rename(root / "take7.mcap")
    with pytest.raises(UserError, match=r"take7.mcap: which task is it\?"):
        import_recordings("mcap", root, tmp_path / "out4")
    (root / "take7.mcap").write_bytes((root / "take7.mcap").read_bytes()[:5000])
    (root / "take7.mcap").rename(root / "pair-000-open.mcap")
    (root / "pair-000-close.mcap").unlink()
    with pytest.raises(UserError, match="damaged"):
        import_recordings("mcap", root, tmp_path / "out5")
    assert not list(tmp_path.glob("out*/collection.json"))
