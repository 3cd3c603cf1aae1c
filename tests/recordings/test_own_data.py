"""docs/own-data.md: every command, with the files it shows, as a person would type it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from memcorr.files import CHECK

ROOT = Path(__file__).parents[2]


QUICK = {
    "train": ["--set", "updates=[2,1]", "batch=8", "--out", "runs/memcorr-measured-42"],
    "evaluate": ["--scenes", "0", "--tasks", "open", "--workers", "1"],
}


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "memcorr", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment())


@pytest.mark.parametrize(("package", "kind"), [("pyarrow", "lerobot"), ("mcap", "mcap")])
def test_a_missing_extra_is_asked_for(package: str, kind: str, tmp_path: Path) -> None:
    script = (
        f"import sys; sys.modules[{package!r}] = None; from memcorr.errors import UserError\n"
        "from pathlib import Path; from memcorr.recordings.sidecars import import_recordings\n"
        f"try: import_recordings({kind!r}, Path('a'), Path('b'))\n"
        "except UserError as problem: print(problem)"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT).stdout
    assert "pip install 'memcorr[" in out and len(out.splitlines()) == 1


@pytest.mark.long
def test_every_command_of_the_page_runs(
    commands: list[list[str]],
    stranger: Callable[..., Path],
    bags: Callable[..., Path],
    sidecars: dict[str, dict[str, Any]],
    tmp_path: Path,
) -> None:
    theirs, ros = stranger(tmp_path / "recordings/lerobot", video=True), bags(tmp_path / "recordings/ros")
    (theirs / "calibration.json").write_text(json.dumps(sidecars["calibration"]))
    (theirs / "mapping.json").write_text(json.dumps(sidecars["lerobot"]))
    (ros / "mapping.json").write_text(json.dumps(sidecars["mcap"]))
    made = [sys.executable, str(ROOT / "examples/strangers_door.py"), "recordings/stranger", "--pairs", "1"]
    subprocess.run([*made, "--shortest", "24", "--longest", "40"], cwd=tmp_path, check=True, env=environment())
    verbs = {" ".join(command[1 : 3 if command[1] in ("data", "import", "export") else 2]) for command in commands}
    learning = {"match", "train", "evaluate", "data mask"}
    assert verbs == {"import lerobot", "import mcap", "data check", "export lerobot"} | learning
    for command in commands:
        result = run(tmp_path, *command[1:], *QUICK.get(command[1], []))
        assert result.returncode == 0, result.stdout + result.stderr
        if command[1:4] == ["data", "check", "data/stranger"]:
            assert "2 demonstrations of my-door" in result.stdout and "images 160 x 120" in result.stdout
        elif command[1:3] == ["data", "check"]:
            assert "2 demonstrations of my-door (open, close)" in result.stdout.replace("close, open", "open, close")
            assert "1 pair; their grippers start at most" in result.stdout
            assert "no fault that can be tested was found" in result.stdout
            assert (tmp_path / command[3] / "check.png").exists()
    shutil.rmtree(tmp_path / "data/mine")
    back = run(tmp_path, "import", "lerobot", "shared/mine", "--out", "data/mine")
    assert back.returncode == 0 and "next: memcorr data check data/mine" in back.stdout
    for path in (tmp_path / "data/mine").glob("*.h5"):  # the camera is now said to be elsewhere
        import h5py

        with h5py.File(path, "r+") as f:
            f["gripper"][:] = f["gripper"][:] * 1000
            del f.attrs[CHECK]  # whoever changes a file by hand takes its checksum out
    wrong = run(tmp_path, "data", "check", "data/mine")
    assert wrong.returncode == 2 and "gripper: it is in millimetres" in wrong.stdout
    (last,) = [line for line in wrong.stderr.splitlines() if line.startswith("memcorr: ")]
    assert "something is wrong in 2 demonstrations" in last and "check.png" in last
