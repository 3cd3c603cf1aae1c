"""The command line and its surroundings: whatever is wrong with either is one line and exit code 2."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

from memcorr.cli import main
from memcorr.errors import UserError
from memcorr.evaluation.episodes import EPISODES, write_episodes
from memcorr.folders import TEMPORARY
from tests.test_files import ROW, frame, write_small
from tests.test_folders import files_up_to

ROOT = Path(__file__).parents[1]
ZEROS = str(ROOT / "results/zeros")
BAD = (
    "collect --seed -1",
    "collect --pairs 0",
    "collect --pairs 101",
    "collect --world moon",
    "match --workers 0",
    "match --pairs 0",
    "match --rows x",
    "train debug --threads 0",
    "train debug --threads 100000",
    f"train debug --seed {2**64}",
    "train debug --seed 1.5",
    "train memcorr --set batch=3",
    "train memcorr --set learning_rate=nan",
    "train memcorr --set betas=[1,1]",
    "train memcorr --set phase_errors=[5,-5]",
    "train memcorr --set worlds=[]",
    "train memcorr --set ddim_steps=1",
    "train memcorr-many --set batch=60",
    "train memcorr-many",
    "train memcorr-many --cache nowhere --disturbed nowhere --data nowhere",
    "collect --disturbed --seed -1",
    "collect --disturbed --world moon",
    "evaluate expert --phase seen",
    "evaluate expert --swap 8",
    "evaluate replay --swap 3",
    "evaluate servo --swap 3",
    "evaluate shipped --swap -8",
    "evaluate shipped --swap 200",
    "evaluate shipped --matcher nowhere.safetensors",
    "evaluate shipped --phase later",
    "evaluate shipped --phase seen --phase-offset 8",
    "evaluate expert --phase-speed nan",
    "evaluate expert --phase-speed -1",
    "evaluate expert --scene-seed -1",
    "evaluate expert --tasks fly --video",
    "evaluate expert --disturb bump=",
    "evaluate expert --workers 0",
    "evaluate expert --cluster nonsense",
    "sweep --experiments nonsense",
    "sweep --experiments debug --seeds -1",
    "sweep --experiments debug --condition moonlight",
    "demo --scene-seed -1",
    "demo --scenes 26",
    "demo --policy nonsense",
    "demo --policy zeros",
    "reproduce --workers 0",
    "reproduce --threads 0",
    "reproduce --matcher nonsense",
    f"report {ZEROS} --matcher nope",
    f"report {ZEROS} --scene-seed 5",
    "report nowhere",
    "matcher train --steps 0",
    "matcher train --seed nan",
    "audit nonsense",
    "audit nowhere:callable",
    "audit shipped --no-online",
    "audit shipped --condition moon",
    "audit shipped --data nowhere",
    "audit shipped --environment a:b",
    "audit expert",
    f"audit nonsense --episodes {ZEROS}",
    "compare nowhere nowhere",
    f"compare {ZEROS} {ZEROS} --matters 0",
    f"compare {ZEROS} {ZEROS} --where moon=full",
    f"compare {ZEROS} {ZEROS} --of-b task",
    f"compare {ZEROS} {Path(__file__)}",
    "bench nonsense",
    "lab --world moon --port 0",
    "lab --port 70000",
    "lab nonsense --port 0",
    "lab --matcher nope --port 0",
    "lab --data nowhere --port 0",
    "nonsense",
    "collect --nonsense 1",
)


@pytest.mark.parametrize("line", BAD)
def test_a_value_that_makes_no_sense_is_one_line(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["memcorr", *line.split(" ")])
    with pytest.raises(SystemExit) as stop:
        main()
    told = capsys.readouterr().err
    assert stop.value.code == 2 and told.count("\n") == 1 and told.startswith("memcorr: "), told
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("sweep --experiments debug --matcher nowhere.safetensors", "nowhere.safetensors does not exist"),
        ("sweep --experiments debug --device tpu", "choose auto, cpu or cuda"),
    ],
)
def test_what_is_needed_last_is_asked_for_first(
    line: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Here even before the missing demonstrations: policies would be trained for hours, and then not rolled out."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["memcorr", *line.split(" ")])
    with pytest.raises(SystemExit):
        main()
    told = capsys.readouterr().err
    assert words in told and told.count("\n") == 1, told


def memcorr(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "memcorr", *arguments]
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, **environment}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.long
@pytest.mark.parametrize(
    "environment",
    [
        {"MUJOCO_GL": "disable"},
        {"MUJOCO_GL": "glfw", "DISPLAY": "", "WAYLAND_DISPLAY": ""},
        {"MUJOCO_GL": "egl", "MUJOCO_EGL_DEVICE_ID": "99"},
        {"MUJOCO_GL": "egl", "__EGL_VENDOR_LIBRARY_FILENAMES": "/nonexistent"},
    ],
    ids=lambda environment: "-".join(environment.values()),
)
def test_where_nothing_can_be_drawn_one_line_says_so(environment: dict[str, str], tmp_path: Path) -> None:
    """Not a traceback, not "out of memory?"; in a worker's words, too, and in doctor."""
    result = memcorr("collect", "--pairs", "1", "--workers", "2", cwd=tmp_path, **environment)
    lines = [line for line in result.stderr.replace("\r", "\n").splitlines() if line and "demo/s" not in line]
    assert result.returncode == 2 and len(lines) == 1 and "nothing can be drawn with MUJOCO_GL=" in lines[0], lines
    result = memcorr("doctor", cwd=tmp_path, **environment)
    assert result.returncode == 2 and "MISSING  rendering  nothing can be drawn with" in result.stdout, result
    assert result.stderr.count("\n") == 1


@pytest.mark.long
@pytest.mark.parametrize("line", ["matcher evaluate validation --matcher flow", "evaluate shipped --scenes 0", "demo"])
def test_so_it_is_in_every_verb_that_draws(line: str, tmp_path: Path) -> None:
    result = memcorr(*line.split(), "--workers", "1", "--out", "out", cwd=tmp_path, MUJOCO_GL="disable")
    lines = [line for line in result.stderr.replace("\r", "\n").splitlines() if line and "%|" not in line]
    assert result.returncode == 2 and len(lines) == 1 and "nothing can be drawn with MUJOCO_GL=" in lines[0], lines


def test_a_report_needs_neither_gl_nor_a_terminal_of_this_century(tmp_path: Path) -> None:
    environment = {
        "MUJOCO_GL": "nonsense",
        "LC_ALL": "C",
        "PYTHONUTF8": "0",
        "PYTHONCOERCECLOCALE": "0",
        "COLUMNS": "1",
    }
    result = memcorr("report", ZEROS, "--out", "report", cwd=tmp_path, **environment)
    assert result.returncode == 0 and not result.stderr, result.stderr
    assert memcorr("collect", "--help", cwd=tmp_path, **environment).returncode == 0


def test_whoever_stops_reading_ends_us_quietly(tmp_path: Path) -> None:
    code = "import sys; from memcorr.cli import main; sys.argv = ['memcorr', 'train', 'memcorr', '--dry-run']; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert (process.stderr.read(), process.wait(timeout=60)) == ("", 141)


def test_a_wrong_matcher_does_not_poison_the_folder(tmp_path: Path) -> None:
    from memcorr.correspondence.cache import build_cache
    from memcorr.demos.store import Store, demonstration_path
    from memcorr.files import write_json

    for task in ("open", "close"):
        write_small(demonstration_path(tmp_path, 0, task), task=task)
    write_json(tmp_path / "collection.json", {"layout": 1, "pairs": 1})
    out, store = tmp_path / "cache", Store.open(tmp_path)
    (tmp_path / "broken.safetensors").write_bytes(b"nothing")
    for matcher in ("nonsense", str(tmp_path / "missing.safetensors"), str(tmp_path / "broken.safetensors")):
        with pytest.raises(UserError, match=r"matcher|safetensors"):
            build_cache(store, out, matcher, pairs=1, rows=2, workers=1)
        assert not out.exists()


# Videos


def watched() -> object:
    """A story of a few moments without a policy."""
    from memcorr.evaluation.rollout import Response
    from memcorr.show.story import Moment, Story

    moments = [Moment(0, frame(k, 128), -0.5, False) for k in range(4)]
    return Story(ROW, "open", [None], [Response(None)], moments)


FFMPEG = {
    "fails": "#!/bin/sh\necho 'ffmpeg version 7.0'\n[ $# -lt 3 ] && exit 0\necho 'no such codec' >&2\nexit 1\n",
    "ends early": "#!/bin/sh\necho 'ffmpeg version 7.0'\n[ $# -lt 3 ] && exit 0\n"
    'cat > /dev/null\nfor last; do :; done\nhead -c 1000 /dev/zero > "$last"\n',
}


@pytest.mark.parametrize("how", [*FFMPEG, "full disk"])
def test_half_a_video_is_never_published(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from memcorr.show.video import is_whole, write_video

    (tmp_path / "out").mkdir()
    story = watched()
    path = write_video(story, tmp_path / "out")  # type: ignore[arg-type]
    content = path.read_bytes()
    assert is_whole(content) and not any(is_whole(content[:n]) for n in (0, 8, 100, len(content) - 1))
    path.unlink()
    if how in FFMPEG:
        (tmp_path / "ffmpeg").write_text(FFMPEG[how])
        (tmp_path / "ffmpeg").chmod(0o755)
        monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", str(tmp_path / "ffmpeg"))
    room = nullcontext() if how in FFMPEG else files_up_to(len(content) // 2)
    with room, pytest.raises(UserError, match=r"mp4 could not be written: ffmpeg (failed|left half a video)"):
        write_video(story, tmp_path / "out")  # type: ignore[arg-type]
    assert not list((tmp_path / "out").iterdir())


def test_a_name_out_of_a_file_is_no_markup_in_the_report(tmp_path: Path) -> None:
    import dataclasses

    from memcorr.report.page import write_report

    (tmp_path / "report/figures").mkdir(parents=True)
    left = tmp_path / f"report/figures/.main.png.1234{TEMPORARY}"  # by a report that was killed
    left.write_text("half")
    evil = dataclasses.replace(ROW, experiment="a|b <script>`x`\n# heading", stage="final")
    write_episodes(tmp_path / EPISODES, [evil])
    write_report([tmp_path], tmp_path / "report")
    text, page = ((tmp_path / "report" / name).read_text() for name in ("REPORT.md", "report.html"))
    assert not left.exists()
    assert "a\\|b \\<script>\\`x\\` # heading" in text and "\n# heading" not in text
    assert "<script>" not in page and "&lt;script&gt;" in page
    assert np.all([line.count(" | ") > 0 for line in text.splitlines() if line.startswith("| a")])
