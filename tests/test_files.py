"""What is on disk is believed only after it was checked: every damage is told in one line, or changes nothing.

`damaged` and the readers in `KINDS` are also what `tests/torture.py` uses, thousands of times.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import resource
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memcorr.demos.store import Manifest, Store, demonstration_path, read_demonstration, write_demonstration
from memcorr.errors import UserError
from memcorr.evaluation.episodes import EPISODES, Episode, find_episodes, parse, read_episodes, write_episodes
from memcorr.evaluation.intervention import Intervention
from memcorr.files import (
    SEAL,
    Form,
    appending,
    content_of,
    forget_later_rows,
    read_arrays,
    read_json,
    write_arrays,
    write_json,
)
from memcorr.frames import Camera, Frame

ROOT = Path(__file__).parents[1]
quick = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
FRAMES, SIZE = 6, 16


# Small files of every kind


def frame(seed: int, size: int = SIZE) -> Frame:
    rng = np.random.default_rng(seed)
    camera = Camera.from_fovy(45.0, size, np.eye(4))
    rgb = rng.integers(0, 256, (size, size, 3), dtype=np.uint8)
    depth = rng.uniform(0.5, 1.0, (size, size)).astype(np.float32)
    return Frame(rgb, depth, rng.random((size, size)) < 0.5, camera, rng.random(9), rng.random(3))


def write_small(
    path: Path, pair: int = 0, task: str = "open", size: int = SIZE, frames: int = FRAMES, **changes: Any
) -> Path:
    """A demonstration of a few frames."""
    rng = np.random.default_rng(0)
    arguments: dict[str, Any] = {
        "action": rng.uniform(-1, 1, (frames, 4)),
        "joint": rng.random(frames),
        "object_pose": np.tile(np.eye(4), (frames, 1, 1)),
        "pair": pair,
        "task": task,
        "u": (0.25, 0.75),
    }
    write_demonstration(path, [frame(k, size) for k in range(frames)], **(arguments | changes))
    return path


ROW = Episode(
    experiment="memcorr",
    train_seed=42,
    condition="combined",
    scene=3,
    scene_seed=0,
    u=(0.25, 0.5),
    camera_azimuth_deg=15.0,
    task="open",
    shown=Intervention(),
    success=True,
    steps=77,
    replans=10,
    mean_match_error_mm=5.25,
    final_joint=-1.5,
    seconds=1.5,
    checkpoint="0123456789ab",
)
ARRAYS = {
    "p": np.linspace(0, 1, 48).reshape(4, 4, 3),
    "n": np.arange(4),
    "valid": np.arange(16).reshape(4, 4) % 3 > 0,
    "half": np.linspace(0, 1, 8).astype(np.float16),
    "turned": np.arange(12.0).reshape(3, 4).T,  # not in the order of its memory
    "one": np.array(2.5, np.float32),
}
MANIFEST = {"layout": 1, "pairs": 3, "world": "door", "seed": 0, "spec": {"chunk": 16, "betas": [0.9, 0.999]}}


def read_arrays_of(path: Path) -> object:
    read = read_arrays(path, "make it again")
    return {k: (str(v.dtype), v.shape, v.tobytes()) for k, v in read.arrays.items()}, read.metadata.get("update")


def read_demonstration_of(path: Path) -> object:
    d = read_demonstration(path)
    numbers = (d.K, d.T_world_cam, d.robot_state, d.gripper, d.action, d.joint, d.object_pose)
    images = [(f.rgb.tobytes(), f.depth.tobytes(), f.mask.tobytes()) for f in d.frames(range(len(d)))]
    return d.pair, d.task, d.u, d.world, [None if n is None else n.tobytes() for n in numbers], images


def read_rows_of(path: Path) -> object:
    return [dataclasses.replace(row, seconds=0.0) for row in read_episodes(path)]


def write_rows(path: Path) -> None:
    write_episodes(path, [dataclasses.replace(ROW, scene=k, final_joint=-k / 7) for k in range(5)])


@dataclass(frozen=True)
class Kind:
    """A kind of file: how one is made, and how it is read into something that can be compared."""

    name: str
    write: Callable[[Path], object]
    read: Callable[[Path], object]
    sealed: bool = True  # another content is noticed; text of ours has no checksum

    @staticmethod
    def of_text(name: str, write: Callable[[Path], object], read: Callable[[Path], object]) -> Kind:
        return Kind(name, write, read, sealed=False)


KINDS = (
    Kind("cache.safetensors", lambda path: write_arrays(path, ARRAYS, {"update": 7}), read_arrays_of),
    Kind(
        "collection.json", lambda path: write_json(path, MANIFEST), lambda p: read_json(p, Manifest, "a store"), False
    ),
    Kind(EPISODES, write_rows, read_rows_of, False),
    Kind("pair-000-open.h5", write_small, read_demonstration_of),
)


def damaged(content: bytes, how: int, where: float, what: int) -> bytes:
    """`content` after an accident: `how` of six, at a share `where` of its length."""
    at = min(int(where * len(content)), len(content) - 1)
    if how == 0:  # a bit
        return content[:at] + bytes([content[at] ^ (1 << what % 8)]) + content[at + 1 :]
    if how == 1:  # a byte
        return content[:at] + bytes([what % 256]) + content[at + 1 :]
    if how == 2:  # the end is missing
        return content[:at]
    if how == 3:  # a block of zeros, as after a power cut
        return content[:at] + bytes(min(what, len(content) - at)) + content[at + what :]
    if how == 4:  # a piece twice
        return content[: at + what] + content[at:]
    return content[:at] + content[at + 1 + what :]  # a piece is missing


def told_or_harmless(kind: Kind, path: Path, content: bytes, undamaged: object) -> str:
    """ "refused" or "harmless"; anything else fails. Half a last row counts as harmless: its rollout runs again.
    Text has no checksum: another value of the right type may be what somebody wrote there."""
    path.write_bytes(content)
    try:
        found = kind.read(path)
    except UserError as problem:
        message = str(problem)
        assert "; " in message and "\n" not in message, message
        assert str(path) in message or not kind.sealed, message  # a changed name in text may name another file
        return "refused"
    assert found == undamaged or not kind.sealed, "another content"
    return "harmless"


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_any_damage_is_told_in_one_line_or_changes_nothing(kind: Kind, tmp_path: Path) -> None:
    path = tmp_path / kind.name
    kind.write(path)
    good, undamaged, counts = path.read_bytes(), kind.read(path), {"refused": 0, "harmless": 0}

    @quick
    @given(st.integers(0, 5), st.floats(0, 1), st.integers(0, 300))
    def check(how: int, where: float, what: int) -> None:
        content = damaged(good, how, where, what)
        counts["harmless" if content == good else told_or_harmless(kind, path, content, undamaged)] += 1

    check()
    assert counts["refused"] >= (20 if kind.sealed else 10), counts


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_any_bytes_are_refused_in_one_line(kind: Kind, tmp_path: Path) -> None:
    path = tmp_path / kind.name

    @quick
    @given(st.binary(min_size=1, max_size=200))
    def check(content: bytes) -> None:
        path.write_bytes(content + b"\n")
        with pytest.raises(UserError, match=re.escape(str(path))):
            kind.read(path)

    check()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def test_a_row_with_any_other_value_is_refused_with_file_and_line_or_means_the_same_type(tmp_path: Path) -> None:
    good = json.loads(ROW.line())
    names = sorted(good)

    @settings(quick, max_examples=200)
    @given(st.sampled_from(names), json_values)
    def check(name: str, value: Any) -> None:
        line = json.dumps({**good, name: value}).encode()
        try:
            row = parse(line)
        except ValueError:
            return
        found = json.loads(row.line())[name]
        assert type(found) is type(value) or (type(found), type(value)) == (float, int)

    check()
    for name, value in (("success", 2), ("success", 1), ("success", "true"), ("steps", -1), ("steps", 1.5), ("u", [1])):
        (tmp_path / EPISODES).write_text(ROW.line() + json.dumps({**good, name: value}) + "\n")
        with pytest.raises(UserError, match=rf"episodes\.jsonl, line 2 is not a rollout \({name}.*repair or remove it"):
            find_episodes([tmp_path])


def test_arrays_come_back_as_they_were_and_the_same_content_gives_the_same_bytes(tmp_path: Path) -> None:
    contents = set()
    for _ in range(20):  # the library's own order of keys is another one each time
        write_arrays(tmp_path / "x", ARRAYS, {"update": 7, "threads": 1, "cache": "", "more": "x"})
        contents.add((tmp_path / "x").read_bytes())
    assert len(contents) == 1
    read = read_arrays(tmp_path / "x", "")
    for name, array in ARRAYS.items():
        assert read.arrays[name].dtype == array.dtype
        np.testing.assert_array_equal(read.arrays[name], array)
    from safetensors.numpy import load_file

    assert all(np.array_equal(value, ARRAYS[name]) for name, value in load_file(tmp_path / "x").items())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"n": np.arange(4.0)}, r"n is float64 \(4\), not int64 \(R\)"),
        ({"n": np.arange(5)}, r"p is float64 \(4, 3\), not float64 \(R, 3\)"),
        ({"more": np.arange(5)}, "more does not belong there"),
        ({"n": None}, "n is missing"),
        ({"p": np.full((4, 3), np.nan)}, "p holds values that are not finite"),
    ],
)
def test_arrays_of_another_form_are_refused(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    path, forms = tmp_path / "x.safetensors", {"n": Form("int64", ("R",)), "p": Form("float64", ("R", 3))}
    arrays = {"n": np.arange(4), "p": np.zeros((4, 3))}
    save_file(arrays, path)
    read_arrays(path, "", forms)
    save_file({k: v for k, v in (arrays | change).items() if v is not None}, path)
    with pytest.raises(UserError, match=rf"x\.safetensors is damaged \({words}\); make it again"):
        read_arrays(path, "make it again", forms)


def test_weights_that_are_no_numbers_are_never_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="p holds values that are not finite"):
        write_arrays(tmp_path / "x", {"p": np.array([np.inf])})
    assert not list(tmp_path.iterdir())


# Files of other programs


def test_files_without_a_checksum_are_read(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    import memcorr

    policy = Path(shutil.copytree(ROOT / "memcorr/policy/shipped", tmp_path / "policy"))
    weights = policy / "model.safetensors"
    read = read_arrays(weights, "")
    save_file(read.arrays, weights, {"update": read.metadata["update"]})  # as another program would
    assert SEAL not in bytes(content_of(weights))
    assert memcorr.load_policy(policy).design.name == "memcorr"
    path = write_small(tmp_path / "pair-000-open.h5")
    expected = read_demonstration_of(path)
    with h5py.File(path, "a") as f:
        del f.attrs["check"], f.attrs["world"]
    path.write_bytes(path.read_bytes().replace(SEAL, b"x" * len(SEAL)))
    assert read_demonstration_of(path) == expected
    write_json(tmp_path / "collection.json", {"layout": 1, "pairs": 1})
    assert Store.open(tmp_path).demonstration(0, "open").task == "open"


# Demonstrations


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"action": np.full((FRAMES, 4), 1.5)}, r"action leaves \[-1, 1\]"),
        ({"action": np.full((FRAMES, 4), np.nan)}, "action holds values that are not finite"),
        ({"action": np.zeros((FRAMES, 3))}, "robot_state and action do not have 9 and 4 numbers"),
        ({"joint": np.zeros(FRAMES - 1)}, "door_joint is"),
        ({"object_pose": np.zeros((FRAMES, 4, 4))}, "object_pose is no rigid transform"),
        ({"task": "fly"}, "task is 'fly', not open or close"),
        ({"pair": -1}, "pair is not a whole number"),
        ({"u": (np.nan, 0.5)}, "u is not two finite numbers"),
        ({"world": "../moon"}, "world is '../moon', not a word"),
    ],
)
def test_a_demonstration_that_cannot_be_right_is_neither_written_nor_read(
    change: dict[str, Any], words: str, tmp_path: Path
) -> None:
    path = tmp_path / "pair-000-open.h5"
    with pytest.raises(ValueError, match=words):
        write_small(path, **change)
    write_small(path)
    with h5py.File(path, "a") as f:  # as another program might
        del f.attrs["check"]
        for name, value in change.items():
            if name in ("action", "joint", "object_pose"):
                name = "door_joint" if name == "joint" else name
                del f[name]
                f[name] = value
            else:
                f.attrs[name] = value
    with pytest.raises(UserError, match=rf"pair-000-open\.h5 is damaged \({words}.*delete it"):
        read_demonstration(path)


def replace_dataset(path: Path, make: Callable[[h5py.File], object]) -> None:
    with h5py.File(path, "a") as f:
        del f.attrs["check"], f["gripper"]
        make(f)


def test_what_lies_in_other_files_is_not_read(tmp_path: Path) -> None:
    """A file from a stranger must not show what only its reader may see."""
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(FRAMES * 3 * 8))
    other = write_small(tmp_path / "other.h5")
    source = h5py.VirtualSource(str(other), "gripper", (FRAMES, 3))
    layout = h5py.VirtualLayout((FRAMES, 3), np.float64)
    layout[:] = source

    def raw(f: h5py.File) -> None:
        f.create_dataset("gripper", (FRAMES, 3), np.float64, external=[(str(secret), 0, FRAMES * 3 * 8)])

    def link(f: h5py.File) -> None:
        f["gripper"] = h5py.ExternalLink(str(other), "/gripper")

    def soft(f: h5py.File) -> None:
        f["gripper"] = h5py.SoftLink("/action")

    def virtual(f: h5py.File) -> None:
        f.create_virtual_dataset("gripper", layout)

    for make, words in ((raw, "in another file"), (link, "is a link"), (soft, "is a link"), (virtual, "another file")):
        path = write_small(tmp_path / "pair-000-open.h5")
        replace_dataset(path, make)
        with pytest.raises(UserError, match=rf"gripper .*{words}.*delete it"):
            read_demonstration(path)


def test_declared_sizes_are_checked_before_anything_is_allocated(tmp_path: Path) -> None:
    """Four billion rows in a file of kilobytes: 119 GiB were asked for."""
    path = write_small(tmp_path / "pair-000-open.h5")
    with h5py.File(path, "a") as f:
        del f.attrs["check"]
        for name in list(f):
            shape, dtype = f[name].shape, f[name].dtype
            del f[name]
            f.create_dataset(name, (4_000_000_000, *shape[1:]), dtype, chunks=(10, *shape[1:]))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UserError, match="declares 4000000000 frames"):
        read_demonstration(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB
    write_small(path)
    with h5py.File(path, "a") as f:  # within the limits, but nothing is there
        del f.attrs["check"], f["gripper"]
        f.create_dataset("gripper", (FRAMES, 3), np.float64, chunks=(FRAMES, 3))
    with pytest.raises(UserError, match="gripper was never written in full"):
        read_demonstration(path)


def test_pair_and_task_are_those_of_the_name(tmp_path: Path) -> None:
    write_small(tmp_path / "pair-000-open.h5")
    shutil.copy(tmp_path / "pair-000-open.h5", tmp_path / "pair-001-open.h5")
    with pytest.raises(UserError, match=r"pair-001-open\.h5 holds door, pair 0, open: files were exchanged"):
        read_demonstration(tmp_path / "pair-001-open.h5")


def test_a_file_changed_after_it_was_read_is_checked_again(tmp_path: Path) -> None:
    path = write_small(demonstration_path(tmp_path, 0, "open"))
    demonstration = read_demonstration(path)
    demonstration.frame(0)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(1, 1))
    with pytest.raises(UserError, match="does not match its checksum"):
        demonstration.frame(0)


# The file system


@pytest.fixture
def nobody() -> Iterator[Path]:
    """A folder of files that this process may not read, even if it is root's."""
    folder = Path(tempfile.mkdtemp(prefix="memcorr-"))  # not below pytest's, which nobody else may enter
    folder.chmod(0o755)
    for kind in KINDS:
        kind.write(folder / kind.name)
        (folder / kind.name).chmod(0)
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield folder
    finally:
        if root:
            os.seteuid(0)
        shutil.rmtree(folder)


def test_permission_denied_is_not_called_damaged(nobody: Path) -> None:
    for kind in KINDS:
        with pytest.raises(UserError, match=r"may not be read \(permission denied\); change its permissions") as told:
            kind.read(nobody / kind.name)
        assert "damaged" not in str(told.value) and "delete" not in str(told.value)


def test_a_refused_row_names_its_file(tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full")
    (tmp_path / EPISODES).symlink_to("/dev/full")
    with pytest.raises(OSError, match="is the disk full") as told, appending(tmp_path / EPISODES) as append:
        append(ROW.line())
    assert told.value.filename == str(tmp_path / EPISODES)


def test_rows_beyond_the_saved_step_are_forgotten_and_a_torn_one_too(tmp_path: Path) -> None:
    """Resumed training writes them again; twice the same step would look like two measurements."""
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 10, "loss": 1.0}\n{"step": 20, "loss": 0.5}\n{"step": 30, "lo')
    forget_later_rows(path, "step", 10)
    assert path.read_text() == '{"step": 10, "loss": 1.0}\n'
    path.write_text('{"step": 10}\nnonsense\n{"step": 30}\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl, line 2 is not a row of metrics"):
        forget_later_rows(path, "step", 10)


# The house


OPENS = re.compile(
    r"h5py\.File\(|safe_open|load_file\(|json\.loads?\(|torch\.load\(|np\.load|(?<!os\.)\bopen\(|\.read_(text|bytes)\("
)
ALLOWED = {
    "files.py": "the readers",
    "demos/store.py": "demonstrations",
    "folders.py": "locks",
    "machine.py": "the processor's name",
    "cli/__init__.py": "/dev/null",
    "cluster/pool.py": "our own source",
    "correspondence/romav2.py": "weights of somebody else's format",
    "correspondence/xfeat/package.py": "the same, from bytes whose digest was checked",
    "correspondence/photographs/views.py": "scikit-image's disparity",
    "bench/readers.py": "the plain readers that ours are measured against",
    "report/page.py": "figures that were drawn a moment ago",
    "audit/page.py": "the same",
    "following/masks.py": "masks that somebody drew",
    "policy/hub.py": "a model card",
    "serve/server.py": "a key",
    "recordings/export.py": "a format of somebody else's, and its pictures",
    "recordings/film.py": "the same",
    "recordings/lerobot.py": "the same",
    "recordings/mcap.py": "the same",
    "recordings/sidecars.py": "an image whose kind and size are checked before it is decoded",
}


def test_nothing_else_opens_a_file() -> None:
    found = {}
    for path in sorted((ROOT / "memcorr").rglob("*.py")):
        name = str(path.relative_to(ROOT / "memcorr"))
        lines = [
            line.strip() for line in path.read_text().splitlines() if OPENS.search(line) and "Store.open" not in line
        ]
        if lines and name not in ALLOWED:
            found[name] = lines
    assert not found


def test_every_json_is_decoded_into_a_type() -> None:
    """What a type checker cannot see is seen here: a type that msgspec does not understand fails when it is built."""
    from memcorr.correspondence.cache import CacheSettings
    from memcorr.evaluation.episodes import Row
    from memcorr.policy.checkpoint import Configured
    from memcorr.training.experiments import Config

    for kind in (Manifest, CacheSettings, Configured, Config, Row):
        msgspec.json.Decoder(kind)
