"""`memcorr data check`: every injected fault is named, and good data, however noisy, is left alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from memcorr.demos.store import (
    Demonstration,
    Store,
    demonstration_path,
    read_demonstration,
    write_demonstration,
)
from memcorr.errors import UserError
from memcorr.files import write_json
from memcorr.frames import Camera, Frame
from memcorr.recordings.check.evidence import repeated
from memcorr.recordings.check.motion import check_time, in_view
from memcorr.recordings.check.report import check, examine
from memcorr.recordings.check.residuals import UNTESTABLE, measure
from tests.test_folders import taken

REFERENCES = Path(__file__).parents[2] / "results/references/metaworld"

Change = Callable[[list[Frame], NDArray], tuple[list[Frame], NDArray]]
OPENGL = np.diag([1.0, -1.0, -1.0, 1.0])


@dataclass(frozen=True)
class Fault:
    """What is done to a good recording, and what has to be said about it."""

    change: Change
    field: str
    words: tuple[str, ...]  # each in the one line
    time: Callable[[int], NDArray] | None = None


def frames(change: Callable[[Frame], Frame]) -> Change:
    return lambda seen, action: ([change(f) for f in seen], action)


def poses(change: Callable[[NDArray], NDArray]) -> Change:
    return frames(lambda f: replace(f, camera=Camera(f.camera.K, change(f.camera.T_world_cam))))


def actions(change: Callable[[NDArray], NDArray]) -> Change:
    return lambda seen, action: (seen, change(action))


def boxed(frame: Frame) -> Frame:
    mask = np.zeros_like(frame.mask)
    mask[84:104, 50:75] = True
    return replace(frame, mask=mask)


def in_camera(frame: Frame) -> Frame:
    g = np.linalg.inv(frame.camera.T_world_cam) @ np.append(frame.gripper, 1.0)
    return replace(frame, gripper=g[:3], robot_state=np.zeros(9))


def moved(frame: Frame) -> Frame:
    by = np.array([0.12, -0.10, 0.08])
    return replace(frame, gripper=frame.gripper + by, robot_state=frame.robot_state + np.tile(by, 3))


def interrupted(seen: list[Frame], action: NDArray) -> tuple[list[Frame], NDArray]:
    """Fifteen rows are lost where the hand is fastest."""
    steps = np.linalg.norm(np.diff([f.gripper for f in seen], axis=0), axis=1)
    first = int(np.argmax(np.convolve(steps, np.ones(15), "valid")))
    kept = [t for t in range(len(seen)) if not first < t <= first + 15]
    return [seen[t] for t in kept], action[kept]


def thinned(frame: Frame) -> Frame:
    lost = np.random.default_rng(0).random(frame.depth.shape) < 0.9
    return replace(frame, depth=np.where(lost, 0, frame.depth).astype(np.float32))


def late(*names: str) -> Change:
    """Images show what was there five rows before."""

    def change(seen: list[Frame], action: NDArray) -> tuple[list[Frame], NDArray]:
        old = [{name: getattr(f, name) for name in names} for f in seen]
        return [replace(f, **o) for f, o in zip(seen[5:], old, strict=False)], action[5:]

    return change


def gripping(sign: float) -> Change:
    """The hand closes half-way, two rows after it is told to."""

    def change(seen: list[Frame], action: NDArray) -> tuple[list[Frame], NDArray]:
        action = np.column_stack([action[:, :3], np.where(np.arange(len(action)) < 100, -sign, sign)])
        made = []
        for t, f in enumerate(seen):
            apart = np.array([0.0, 0.05 if t < 102 else 0.01, 0.0])
            made.append(
                replace(f, robot_state=np.concatenate([f.robot_state[:3], f.gripper + apart, f.gripper - apart]))
            )
        return made, action

    return change


def late_clock(length: int) -> NDArray:
    return 0.05 * np.arange(length) + 0.6 * (np.arange(length) >= 90)


FAULTS = {
    "depth in millimetres": Fault(
        frames(lambda f: replace(f, depth=1000 * f.depth)), "depth", ("millimetres", "divide by 1000")
    ),
    "inverted extrinsics": Fault(poses(lambda T: np.linalg.inv(T)), "T_world_cam", ("T_cam_world", "invert it")),
    "OpenGL axes": Fault(poses(lambda T: T @ OPENGL), "T_world_cam", ("OpenGL", "negate its second and third column")),
    "inverted extrinsics with OpenGL axes": Fault(
        poses(lambda T: np.linalg.inv(T @ OPENGL)), "T_world_cam", ("world to camera", "OpenGL")
    ),
    "extrinsics that nothing explains": Fault(
        poses(lambda T: T @ np.block([[cv2.Rodrigues(np.array([0.6, 0.3, 0.1]))[0], np.zeros((3, 1))], [0, 0, 0, 1]])),
        "T_world_cam",
        ("no surface in view is level", "calibrate anew"),
    ),
    "intrinsics of an image twice as large": Fault(
        frames(lambda f: replace(f, camera=Camera(np.diag([2.0, 2.0, 1.0]) @ f.camera.K, f.camera.T_world_cam))),
        "K",
        ("256 x 256", "multiply its first row by 0.5"),
    ),
    "images upside down": Fault(
        frames(lambda f: replace(f, rgb=f.rgb[::-1], depth=f.depth[::-1], mask=f.mask[::-1])),
        "rgb, depth, mask",
        ("upside down", "reverse their rows"),
    ),
    "no returns": Fault(frames(thinned), "depth", ("no return at 9", "%")),
    "no returns on the object": Fault(
        frames(lambda f: replace(f, depth=np.where(f.mask, 0, f.depth).astype(np.float32))),
        "depth",
        ("100 % of the object's pixels",),
    ),
    "mask empty": Fault(
        frames(lambda f: replace(f, mask=np.zeros_like(f.mask))), "mask", ("empty in 16 of 16", "mark the visible")
    ),
    "mask inverted": Fault(frames(lambda f: replace(f, mask=~f.mask)), "mask", ("% of the image", "negate it")),
    "mask beside the object": Fault(
        frames(lambda f: replace(f, mask=np.roll(f.mask, (9, 14), (0, 1)))),
        "mask",
        ("not on the object", "-14 px across and -9 px down"),
    ),
    "mask on the table": Fault(frames(boxed), "mask", ("not on an object",)),
    "gripper in millimetres": Fault(
        frames(lambda f: replace(f, gripper=1000 * f.gripper, robot_state=1000 * f.robot_state)),
        "gripper",
        ("millimetres", "divide by 1000"),
    ),
    "gripper in the camera's frame": Fault(frames(in_camera), "gripper", ("camera's frame", "apply T_world_cam")),
    "gripper beside the hand": Fault(frames(moved), "gripper", ("does not project onto the hand", "level table")),
    "gripper at the wrist": Fault(
        frames(lambda f: replace(f, gripper=f.gripper + np.array([0.0, -0.3, 0.15]))),
        "gripper",
        ("midpoint of the fingertips",),
    ),
    "gap, without times": Fault(interrupted, "gripper", ("it jumps by", "rows are missing")),
    "gap, with times": Fault(
        frames(lambda f: f), "time", ("0.650 s pass after row 89", "12 rows are missing"), time=late_clock
    ),
    "a slow camera": Fault(
        lambda seen, action: ([replace(f, rgb=seen[t - t % 3].rgb) for t, f in enumerate(seen)], action),
        "rgb",
        ("repeat the one before while the hand moves",),
    ),
    "depth that stops": Fault(
        lambda seen, action: ([replace(f, depth=seen[min(t, 20)].depth) for t, f in enumerate(seen)], action),
        "depth",
        ("repeat the one before", "first: row 21"),
    ),
    "actions of another recording": Fault(
        actions(lambda a: np.random.default_rng(0).permutation(a)), "action", ("explains", "this very demonstration")
    ),
    "actions that come late": Fault(
        actions(lambda a: np.roll(a, 15, axis=0)), "action", ("rows late", "after the picture")
    ),
    "actions along other axes": Fault(
        actions(lambda a: a[:, [1, 0, 2, 3]] * [1, -1, 1, 1]), "action", ("its axes are not the world's", "-y, x, z")
    ),
    "actions in metres": Fault(actions(lambda a: a * [0.01, 0.01, 0.01, 1]), "action", ("divided by 1 cm",)),
    "colour late": Fault(late("rgb"), "rgb", ("about 5 rows late",)),
    "depth late": Fault(late("depth"), "depth", ("about 5 rows late", "where the gripper was then")),
    "all images late": Fault(late("rgb", "depth", "mask"), "rgb, depth, mask", ("rows late", "the hand is seen")),
    "depth 5 % too far": Fault(
        frames(lambda f: replace(f, depth=f.depth * np.float32(1.05))), "depth", ("mm behind it", "depth's scale")
    ),
    "depth 5 % too near": Fault(
        frames(lambda f: replace(f, depth=f.depth / np.float32(1.05))), "depth", ("mm in front of it",)
    ),
    "gripper 2 cm off": Fault(
        frames(lambda f: replace(f, gripper=f.gripper + np.array([0.02, 0.0, 0.0]))),
        "gripper",
        ("(+20, ", "mm from the midpoint of the fingertips"),
    ),
    "gripper's command inverted": Fault(gripping(-1.0), "action", ("command is inverted",)),
    "time in milliseconds": Fault(frames(lambda f: f), "time", ("divide by 1000",), time=lambda n: 50.0 * np.arange(n)),
    "state constant": Fault(
        frames(lambda f: replace(f, robot_state=np.arange(7.0))), "robot_state", ("it never changes",)
    ),
    "actions that are missing": Fault(actions(np.zeros_like), "action", ("never changes",)),
}


def rewritten(d: Demonstration, path: Path, seen: list[Frame], action: NDArray, **more: Any) -> Demonstration:
    write_demonstration(path, seen, action, None, None, pair=d.pair, task=d.task, u=d.u, world="mine", **more)
    return read_demonstration(path)


@pytest.fixture(scope="module")
def good(store: Store) -> tuple[Demonstration, list[Frame]]:
    d = store.demonstration(1, "open")
    return d, d.frames(range(len(d)))


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_in_one_line_and_no_other_is(
    good: tuple[Demonstration, list[Frame]], tmp_path: Path, name: str
) -> None:
    fault, (d, seen) = FAULTS[name], good
    changed, action = fault.change(seen, d.action)
    time = fault.time(len(changed)) if fault.time else None
    found = examine(rewritten(d, tmp_path / "pair-001-open.h5", changed, action, time=time))
    assert len(found) == 1, [f.line() for f in found]
    line = found[0].line()
    assert "\n" not in line and line.startswith(f"pair-001-open: {fault.field}: "), line
    for words in fault.words:
        assert words in line


def test_what_cannot_be_told_from_good_data_is_said(good: tuple[Demonstration, list[Frame]], tmp_path: Path) -> None:
    """Red and blue exchanged, the whole hand 2 cm off, actions twice as large: each is listed, in the output and
    on the page, as the rest is; what moves is measured."""
    page = (Path(__file__).parents[2] / "docs/own-data.md").read_text()
    assert all(words.split(" (")[0] in page for words in UNTESTABLE)
    d, seen = good
    by = np.array([0.0, 0.0, 0.02])
    moved = [replace(f, gripper=f.gripper + by, robot_state=f.robot_state + np.tile(by, 3)) for f in seen]
    versions = {
        "good": (seen, d.action),
        "blue": ([replace(f, rgb=f.rgb[..., ::-1].copy()) for f in seen], d.action),
        "moved": (moved, d.action),
        "far": ([replace(f, depth=f.depth * np.float32(1.02)) for f in seen], d.action),
        "twice": (seen, d.action * [2, 2, 2, 1]),
        "fingers": gripping(1.0)(seen, d.action),
    }
    found = {}
    for name, (frames, action) in versions.items():
        written = rewritten(d, tmp_path / f"{name}.h5", frames, action)
        assert not (wrong := examine(written)), (name, [f.line() for f in wrong])
        found[name] = measure(written)
    good_one = found["good"]
    assert good_one.offset_m and good_one.action_m and found["far"].offset_m and found["twice"].action_m
    assert found["far"].offset_m.value - good_one.offset_m.value == pytest.approx(0.02, abs=0.004)
    assert found["twice"].action_m.value == pytest.approx(good_one.action_m.value / 2)
    assert good_one.depth_lag is not None and good_one.depth_lag.value == 0 and found["fingers"].closing is not None
    assert good_one.colour_lag is not None and set(good_one.colour_lag.parts) == {0.0}


def test_faults_do_not_hide_each_other(good: tuple[Demonstration, list[Frame]], tmp_path: Path) -> None:
    """Depth in millimetres, an inverted camera and a mask beside the object: three lines."""
    d, seen = good
    for name in ("depth in millimetres", "inverted extrinsics", "mask beside the object"):
        seen, _ = FAULTS[name].change(seen, d.action)
    found = examine(rewritten(d, tmp_path / "all.h5", seen, d.action))
    assert [(f.field, f.fault) for f in found] == [
        ("depth", "millimetres"),
        ("T_world_cam", "inverted"),
        ("mask", "displaced"),
    ]


def test_wrong_shapes_are_named_before_anything_is_computed(
    good: tuple[Demonstration, list[Frame]], tmp_path: Path
) -> None:
    d, seen = good
    small = [replace(f, mask=f.mask[::2, ::2]) for f in seen]
    with pytest.raises(ValueError, match=r"mask is bool \(200, 64, 64\)"):
        rewritten(d, tmp_path / "small.h5", small, d.action)
    broken = np.array(d.action)
    broken[7] = np.nan
    (found,) = examine(rewritten(d, tmp_path / "nan.h5", seen, broken))
    assert found.field == "action" and "row 7" in found.wrong
    (found,) = examine(rewritten(d, tmp_path / "short.h5", seen[:16], d.action[:16]))
    assert "16 rows" in found.wrong and "at least 17" in found.right


def test_other_shapes_of_state_action_and_image_are_no_fault(
    good: tuple[Demonstration, list[Frame]], tmp_path: Path
) -> None:
    """7 joints, 7 numbers of action, 96 x 128 pixels, and actions that are positions to go to."""
    d, seen = good

    def cut(f: Frame) -> Frame:
        K = f.camera.K - np.array([[0, 0, 0], [0, 0, 16], [0, 0, 0]])
        camera = Camera(K, f.camera.T_world_cam)
        return Frame(f.rgb[16:112], f.depth[16:112], f.mask[16:112], camera, f.robot_state[:7], f.gripper)

    target = np.column_stack([d.gripper + 0.01 * d.action[:, :3], np.zeros((len(d), 4))])
    assert not examine(rewritten(d, tmp_path / "x.h5", [cut(f) for f in seen], target))


def test_the_report_says_what_is_there_groups_what_is_wrong_and_draws_it(store: Store, tmp_path: Path) -> None:
    root = tmp_path / "store"
    root.mkdir()
    for pair in range(2):
        for task in store.tasks:
            d = store.demonstration(pair, task)
            seen, action = d.frames(range(len(d))), d.action
            if pair == 1:
                seen, action = FAULTS["inverted extrinsics"].change(seen, action)
            rewritten(d, demonstration_path(root, pair, task), seen, action)
    write_json(root / "collection.json", {"layout": 1, "pairs": 2, "world": "mine", "tasks": ["open", "close"]})
    with taken(root), pytest.raises(UserError, match="another memcorr"):  # who would clear away half a picture
        check(Store.open(root), root / "check.png")
    report = check(Store.open(root), root / "check.png")
    assert "4 demonstrations of mine (open, close), 200 rows, images 128 x 128" in report.summary
    assert "without door_joint, object_pose, time" in report.summary
    assert report.notes == ("2 pairs; their grippers start at most 0.0 mm apart",)
    assert any("an action of 1 moves the hand by" in line and "(" in line for line in report.measured)
    assert sum("exchanged" in line for line in report.measured) == 2
    (line,) = report.lines()
    assert line.startswith("pair-001-open and 1 more: T_world_cam: it maps world to camera")
    with Image.open(root / "check.png") as page:
        assert page.width > 1000


def test_a_store_without_a_joint_says_so_when_it_is_needed(
    good: tuple[Demonstration, list[Frame]], tmp_path: Path
) -> None:
    d, seen = good
    bare = rewritten(d, tmp_path / "bare.h5", seen[:17], d.action[:17], time=np.arange(17.0))
    assert len(bare) == 17 and bare.recorded_joint is None and bare.object_pose is None
    np.testing.assert_array_equal(bare.time, np.arange(17.0))
    with pytest.raises(UserError, match="has no door_joint"):
        _ = bare.joint


def test_a_hand_that_no_camera_sees_changes_no_picture() -> None:
    """In this recording of a stock task it comes into view after some steps: nothing is wrong with its pictures."""
    d = read_demonstration(demonstration_path(REFERENCES / "faucet-close", 0, "faucet-close"))
    assert repeated(d, "rgb")[:20].any() and not in_view(d)[:5].any() and in_view(d).any()
    assert check_time(d) == []
