"""The store: lossless, deterministic, resumable, readable without the simulator, hard to damage."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from memcorr.cli import main
from memcorr.demos.collect import collect
from memcorr.demos.store import Store, demonstration_path
from memcorr.errors import UserError
from memcorr.files import write_json
from memcorr.folders import TEMPORARY
from memcorr.spec import SPEC, TASKS
from memcorr.training.dataset import cut_windows
from memcorr.worlds.expert import act
from memcorr.worlds.scenes import demonstration_scenes
from memcorr.worlds.world import World


def digests(root: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(root.iterdir())}


@pytest.fixture
def copy(store: Store, tmp_path: Path) -> Path:
    return shutil.copytree(store.root, tmp_path / "copy")


@pytest.mark.long
def test_same_bytes_for_one_worker_and_after_a_kill(store: Store, tmp_path: Path) -> None:
    """One worker instead of two, killed with SIGKILL in the middle, then continued: the same files."""
    root = tmp_path / "again"
    script = (
        "from pathlib import Path; from memcorr.demos.collect import collect\n"
        f"if __name__ == '__main__': collect(Path({str(root)!r}), pairs=2, workers=1)"
    )
    (tmp_path / "job.py").write_text(script)
    process = subprocess.Popen([sys.executable, tmp_path / "job.py"], start_new_session=True, stderr=subprocess.DEVNULL)
    deadline = time.time() + 60
    while len(list(root.glob("*.h5"))) < 1 and time.time() < deadline:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert 1 <= len(list(root.glob("*.h5"))) < 4
    (root / f".pair-001-close.h5.1234{TEMPORARY}").write_bytes(b"half a file")
    collect(root, pairs=2, workers=1)
    assert digests(root) == digests(store.root)


def test_stored_frames_equal_a_fresh_rollout(store: Store, world: World) -> None:
    scene = demonstration_scenes()[1]
    demonstration = store.demonstration(1, "open")
    world.reset(scene)
    for t in range(60):
        if t in (0, 37, 59):
            live, stored = world.observe(), demonstration.frame(t)
            for key in ("rgb", "depth", "mask", "robot_state", "gripper"):
                np.testing.assert_array_equal(getattr(stored, key), getattr(live, key))
            np.testing.assert_array_equal(stored.camera.T_world_cam, live.camera.T_world_cam)
            assert demonstration.object_pose is not None
            np.testing.assert_array_equal(demonstration.object_pose[t], world.T_world_object)
        action = act(world, "open")
        np.testing.assert_array_equal(demonstration.action[t], action)
        world.step(action)


def test_pairs_start_equal_and_end_apart(store: Store) -> None:
    a, b = (store.demonstration(0, task) for task in TASKS)
    np.testing.assert_array_equal(a.frame(0).rgb, b.frame(0).rgb)
    np.testing.assert_array_equal(a.robot_state[0], b.robot_state[0])
    assert a.joint[0] == b.joint[0] == SPEC.door_start
    assert a.joint[-1] < -1.5 and b.joint[-1] > -0.1


def test_windows(store: Store) -> None:
    demonstrations = store.demonstrations(range(2))
    windows = cut_windows(demonstrations)
    assert len(windows) == 4 * 185 and 160 * SPEC.windows_per_episode == 29_600
    row = 185 + 184  # pair 0, closing, last anchor
    assert demonstrations[windows.demonstration[row]].task == "close" and windows.anchor[row] == 184
    np.testing.assert_array_equal(windows.chunk[row], demonstrations[1].action[184:200])
    np.testing.assert_array_equal(windows.state[row], demonstrations[1].robot_state[184])


def test_reading_needs_no_simulator(store: Store) -> None:
    script = (
        "import sys; sys.modules['mujoco'] = sys.modules['metaworld'] = None\n"
        "from pathlib import Path; from memcorr.demos.store import Store\n"
        f"print(Store.open(Path({str(store.root)!r})).demonstration(0, 'open').frame(5).rgb.shape)"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "(128, 128, 3)"


def run_cli(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from memcorr.cli import main; main()", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **env},
    )


def assert_one_clear_line(result: subprocess.CompletedProcess[str], *needles: str) -> None:
    assert result.returncode == 2, result
    lines = [line for line in result.stderr.splitlines() if line]
    assert len(lines) == 1 and lines[0].startswith("memcorr: "), result.stderr
    for needle in needles:
        assert needle in lines[0]


def test_truncated_store_is_named_and_left_alone(copy: Path) -> None:
    victim = demonstration_path(copy, 1, "open")
    victim.write_bytes(victim.read_bytes()[:100_000])
    before = digests(copy)
    assert_one_clear_line(run_cli("collect", "--out", str(copy), "--pairs", "2"), "pair-001-open.h5", "delete it")
    assert digests(copy) == before
    with pytest.raises(UserError, match="truncated"):
        Store.open(copy).demonstration(1, "open")


def test_store_of_another_layout_is_refused_and_left_alone(copy: Path) -> None:
    manifest = json.loads((copy / "collection.json").read_text())
    write_json(copy / "collection.json", {**manifest, "layout": 99})
    before = digests(copy)
    assert_one_clear_line(run_cli("collect", "--out", str(copy), "--pairs", "2"), "layout: invalid enum value 99")
    assert digests(copy) == before
    with pytest.raises(UserError, match="layout: invalid enum value 99"):
        Store.open(copy)


@pytest.mark.parametrize(
    ("arguments", "needles"),
    [
        (("collect", "--out", "file/x"), ("cannot write to folder", "--out")),
        (("collect", "--out", "a", "--pairs", "101"), ("from 1 to 100",)),
        (("bench", "nonsense"), ("choose from observe, step",)),
        (("evaluate", "expert", "--condition", "sideways"), ("sideways", "choose one of validation")),
    ],
)
def test_other_bad_inputs(
    arguments: tuple[str, ...],
    needles: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    monkeypatch.setattr(sys, "argv", ["memcorr", *arguments])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    (line,) = filter(None, capsys.readouterr().err.splitlines())
    assert line.startswith("memcorr: ") and all(needle in line for needle in needles)


def test_an_opengl_that_does_not_exist_is_one_line(tmp_path: Path) -> None:
    assert_one_clear_line(run_cli("collect", "--out", str(tmp_path / "b"), MUJOCO_GL="nonsense"), "MUJOCO_GL")
    with pytest.raises(UserError, match="memcorr collect"):
        Store.open(tmp_path)
