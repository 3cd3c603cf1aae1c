"""`memcorr data check`: what is there, and what is wrong with it, before a policy learns from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
from tqdm import tqdm

from ...demos.contact_sheet import Row, Tile, masked, shaded, write_sheet
from ...demos.remarks import remarks
from ...demos.store import ALWAYS, JOINT, Demonstration, Store, opened
from ...errors import UserError
from ...folders import claimed
from ...frames import Frame
from ...spec import SPEC
from .evidence import Evidence, Finding
from .mask import check_mask
from .motion import check_actions, check_time
from .residuals import UNTESTABLE, Residuals, check_residuals, in_words, measure
from .space import check_depth, check_hand, check_intrinsics, check_rotation

SHORTEST = SPEC.chunk + 1  # rows: one chunk of actions, and what came after it
SMALLEST = 64  # pixels
SHOWN = 8  # demonstrations on the page of pictures, those with findings first
COLUMNS = ("colour: first", "halfway", "last", "depth: first", "last", "mask: first", "last")
HAND = (255, 40, 160)
TOGETHER = 0.01  # metres between the starts of two tasks that count as one start


@dataclass(frozen=True)
class Report:
    """What `check` saw."""

    summary: str
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]  # worth knowing, nothing wrong
    measured: tuple[str, ...]  # how well things fit each other
    picture: Path

    def lines(self) -> list[str]:
        """One per cause: demonstrations with the same one share it."""
        causes: dict[tuple[str, str], list[Finding]] = {}
        for finding in self.findings:
            causes.setdefault((finding.field, finding.fault), []).append(finding)
        return [same[0].line(len(same) - 1) for same in causes.values()]


def check_layout(demonstration: Demonstration) -> list[Finding]:
    """Numbers and sizes, so that everything after can rely on them; shapes and types are the reader's to check."""
    d, found = demonstration, []

    def say(field: str, fault: str, wrong: str, right: str) -> None:
        found.append(Finding(d.name, field, fault, wrong, right))

    with opened(d.path) as f:
        size = f["rgb"].shape[1:3]
    for name in ALWAYS:
        if not np.isfinite(values := getattr(d, name)).all():
            row = int(np.argmin(np.isfinite(values.reshape(len(d), -1)).all(axis=1)))
            say(name, "not-finite", f"NaN or infinity in row {row}", "give numbers, or leave the row out")
    if len(d) < SHORTEST:
        say("action", "short", f"{len(d)} rows", f"at least {SHORTEST} are needed")
    if min(size) < SMALLEST:
        say("rgb", "small", f"images are {size[1]} x {size[0]}", f"at least {SMALLEST} pixels are needed each way")
    return found


def examine(demonstration: Demonstration, measured: Residuals | None = None) -> list[Finding]:
    """Everything that is wrong with one demonstration, each cause once."""
    if found := check_layout(demonstration):
        return found
    of_time = check_time(demonstration)
    evidence, found = check_depth(Evidence.of(demonstration))
    evidence, of_intrinsics = check_intrinsics(evidence)
    of_camera = check_rotation(evidence)
    faults = {finding.fault for finding in (*of_time, *found, *of_camera)}
    if not faults & {"repeated", "no-returns", "transposed", "not-rigid", "mirrors"}:
        evidence, of_camera = check_hand(evidence)
    found = [*found, *of_intrinsics, *of_camera, *check_mask(evidence), *of_time]
    if not of_time:
        found += check_actions(demonstration, all(finding.field != "gripper" for finding in of_camera))
    return found or list(check_residuals(demonstration, measured or measure(demonstration)))


def check(store: Store, picture: Path) -> Report:
    """All demonstrations of a store, and one page of pictures of them."""
    present = store.present()
    if not present:
        raise UserError(f"{store.root} holds no demonstrations such as pair-000-{store.tasks[0]}.h5")
    findings, measured = list[Finding](), list[Residuals]()
    with claimed(picture.parent):  # usually the store's own folder, where others may be at work
        for demonstration in tqdm(present, "check", unit="demo", leave=False):
            if not check_layout(demonstration):
                measured.append(measure(demonstration))
            findings += examine(demonstration, measured[-1] if measured else None)
        write_pictures(present, findings, picture)
    fits = (
        "measured (where nine tenths of all parts of the recordings are):",
        *in_words(measured),
        "what no recording shows:",
        *(f"  {words}" for words in UNTESTABLE),
    )
    return Report(describe(store, present), tuple(findings), tuple(notes(store, present)), fits, picture)


def write_pictures(present: Sequence[Demonstration], findings: Sequence[Finding], path: Path) -> Path:
    """Colour with the projected gripper, depth and mask, at several moments of each demonstration."""
    wrong = {d.name: [f"{f.field}: {f.wrong}" for f in findings if f.demonstration == d.name] for d in present}
    shown = sorted(present, key=lambda d: (not wrong[d.name], present.index(d)))[:SHOWN]
    rows = [Row(d.name.replace(f"-{d.task}", f"\n{d.task}"), tiles(d), wrong[d.name]) for d in shown]
    return write_sheet(path, COLUMNS, rows, "cross: the gripper, projected; green: mask; blue in depth: no return")


def tiles(demonstration: Demonstration) -> list[Tile]:
    try:
        frames = demonstration.frames((0, len(demonstration) // 2, len(demonstration) - 1))
        ends = frames[0], frames[-1]
        return [*map(with_gripper, frames), *map(shaded, ends), *map(masked, ends)]
    except (ValueError, TypeError, IndexError, KeyError):  # a field of the wrong shape: the findings say which
        return [Tile(np.full((64, 64, 3), 230, np.uint8), "cannot be shown")]


def with_gripper(frame: Frame) -> Tile:
    """A cross where the gripper projects to, or a word on where it is instead."""
    height, width = frame.rgb.shape[:2]
    with np.errstate(all="ignore"):
        uv, z = frame.camera.project(frame.gripper)
    if not (z > 0 and 0 <= uv[0] <= width - 1 and 0 <= uv[1] <= height - 1):
        return Tile(frame.rgb, "gripper outside" if z > 0 else "gripper behind the camera")
    at, size = np.round(uv).astype(int).tolist(), max(height, width)
    image = frame.rgb.copy()
    for thickness, colour in ((size // 40 + 2, (255, 255, 255)), (size // 100 + 1, HAND)):
        cv2.drawMarker(image, at, colour, cv2.MARKER_CROSS, size // 10, thickness)
    return Tile(image)


def describe(store: Store, present: Sequence[Demonstration]) -> str:
    lengths = sorted({len(d) for d in present})
    rows = f"{lengths[0]}" if len(lengths) == 1 else f"{lengths[0]} to {lengths[-1]}"
    with opened(present[0].path) as f:
        height, width = f["rgb"].shape[1:3]
    first = present[0]
    lacks = [
        name
        for name, array in ((JOINT, first.recorded_joint), ("object_pose", first.object_pose), ("time", first.time))
        if array is None
    ]
    return (
        f"{len(present)} demonstrations of {store.world} ({', '.join(store.tasks)}), {rows} rows, "
        f"images {width} x {height}, robot_state {first.robot_state.shape[1]}, action {first.action.shape[1]}"
        + (f"; without {', '.join(lacks)}" if lacks else "")
    )


def notes(store: Store, present: Sequence[Demonstration]) -> list[str]:
    """Whether pairs are pairs (the counterfactual objective compares tasks from one start); what is hard to follow."""
    pairs: dict[int, list[Demonstration]] = {}
    for demonstration in present:
        pairs.setdefault(demonstration.pair, []).append(demonstration)
    whole = [both for both in pairs.values() if len(both) == 2]
    if len(store.tasks) < 2:
        return hard_to_follow(present)
    if len(whole) < len(pairs):
        alone = len(pairs) - len(whole)
        words = f"{alone} of {len(pairs)} pairs lack one of two tasks: paired training has nothing to compare there"
        return [words, *hard_to_follow(present)]
    apart = np.array([np.linalg.norm(a.gripper[0] - b.gripper[0]) for a, b in whole])
    text = f"{len(whole)} pair{'s' * (len(whole) > 1)}; their grippers start at most {1000 * apart.max():.1f} mm apart"
    return [
        text + (f" ({(apart > TOGETHER).sum()} more than {1000 * TOGETHER:.0f} mm)" if apart.max() > TOGETHER else ""),
        *hard_to_follow(present),
    ]


def hard_to_follow(present: Sequence[Demonstration]) -> list[str]:
    """Each kind of remark once, with how many recordings it is about and the first of them."""
    kinds: dict[str, list[tuple[str, str]]] = {}
    for d in present:
        if not check_layout(d):
            for remark in remarks(d):
                kind, _, words = remark.partition(": ")
                kinds.setdefault(kind, []).append((d.name, words))
    return [
        f"hard to follow, {kind}: {len(about)} of {len(present)} recordings; {about[0][0]}: {about[0][1]}"
        for kind, about in kinds.items()
    ]
