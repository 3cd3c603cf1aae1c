"""Time, repeated frames, and whether the actions explain how the hand moved."""

from __future__ import annotations

from itertools import permutations, product

import numpy as np
from numpy.typing import NDArray

from ...demos.store import Demonstration
from ...spec import Array
from .evidence import Finding, repeated

GAP = 1.75  # rows' worth of time between two rows
MOVED = 0.003  # metres of the gripper between two rows: the picture cannot stay the same
JUMP, LEAP = 5.0, 0.02  # times the usual largest step, and at least so many metres
STILL = 0.03  # metres: a hand that went less far than this says nothing about actions
EXPLAINED, CLEARLY = 0.5, 0.8  # share of the motion's variance
PROMPT = range(-1, 9)  # rows by which motion may lag behind its action
FAR = 24  # rows of delay that are tried
UNIT = (0.002, 0.05)  # metres that an action of 1 may move the hand; ours: 0.01


def finding(demonstration: Demonstration, field: str, fault: str, wrong: str, right: str) -> Finding:
    return Finding(demonstration.name, field, fault, wrong, right)


def check_time(demonstration: Demonstration) -> list[Finding]:
    """Rows are one control step apart, each with a picture of its own."""
    d = demonstration
    steps = np.linalg.norm(np.diff(d.gripper, axis=0), axis=1)
    if d.time is not None:
        between = np.diff(d.time)
        usual = float(np.median(between))
        if (between <= 0).any():
            row = int(np.argmax(between <= 0))
            wrong = f"it does not increase after row {row} ({between[row]:+.3f} s)"
            return [finding(d, "time", "not-increasing", wrong, "give one row per control step, in order")]
        if (between > GAP * usual).any():
            row = int(np.argmax(between))
            wrong = f"{between[row]:.3f} s pass after row {row}, {usual:.3f} s after others"
            missing = round(between[row] / usual) - 1
            right = f"{missing} rows are missing: split the recording there, or record without gaps"
            return [finding(d, "time", "gap", wrong, right)]
    row = int(np.argmax(steps))
    if steps[row] > max(JUMP * np.percentile(steps, 98), LEAP):
        wrong = f"it jumps by {100 * steps[row]:.1f} cm after row {row}, {100 * np.median(steps):.1f} cm are usual"
        return [
            finding(d, "gripper", "gap", wrong, "rows are missing there: split the recording, or record without gaps")
        ]
    seen = in_view(d)
    moved = (steps > MOVED) & seen[1:] & seen[:-1]  # a hand that no camera sees changes no picture
    for name in ("rgb", "depth"):
        again = repeated(d, name) & moved
        if again.sum() > max(2, 0.02 * len(d)):
            row = int(np.argmax(again))
            wrong = f"{again.sum()} frames repeat the one before while the hand moves (first: row {row + 1})"
            right = "give one new frame per row: is the camera slower than the robot, or did it stop?"
            return [finding(d, name, "repeated", wrong, right)]
    return []


def in_view(d: Demonstration) -> NDArray[np.bool_]:
    """(T,) whether the gripper projects into the image."""
    height, width = d.frame(0).mask.shape
    uv, z = zip(*(d.camera(t).project(p) for t, p in enumerate(d.gripper)), strict=True)
    u, v = np.stack(uv).T
    return np.asarray((np.stack(z) > 0) & (u >= 0) & (u < width) & (v >= 0) & (v < height))


def lagged(action: Array, motion: Array, lag: int) -> tuple[Array, Array]:
    """Actions, and the motion that came `lag` rows later."""
    n = len(motion) - abs(lag)
    return action[max(0, -lag) :][:n], motion[max(0, lag) :][:n]


def explained(cause: Array, motion: Array) -> float:
    """Share of the motion's variance that is linear in its cause."""
    X = np.column_stack([cause, np.ones(len(cause))])
    residual = motion - X @ np.linalg.lstsq(X, motion, rcond=None)[0]
    return float(1 - (residual**2).sum() / ((motion - motion.mean(axis=0)) ** 2).sum())


def proportional(cause: Array, motion: Array) -> tuple[float, float]:
    """Share that is one number times the cause, and that number."""
    factor = float((cause * motion).sum() / max((cause**2).sum(), 1e-12))
    residual = motion - factor * cause
    return float(1 - (residual**2).sum() / (motion**2).sum()), factor


def check_actions(demonstration: Demonstration, gripper_trusted: bool = True) -> list[Finding]:
    """Does the hand move as the action says: by a displacement or velocity (linear in the action), or to a position?"""
    d = demonstration
    motion, action = np.diff(d.gripper, axis=0), d.action[:-1]
    if np.linalg.norm(np.ptp(d.gripper, axis=0)) < STILL:
        return []
    if not np.ptp(d.action, axis=0).any():
        right = "give the command that was sent after each row's picture"
        return [finding(d, "action", "constant", "it never changes while the hand moves", right)]
    causes = [action]
    if action.shape[1] >= 3:
        causes.append(np.column_stack([action[:, :3] - d.gripper[:-1], action[:, 3:]]))  # positions to go to
    far = min(FAR, len(motion) // 3)
    share = {lag: max(explained(*lagged(cause, motion, lag)) for cause in causes) for lag in range(-far, far + 1)}
    prompt = max(share[lag] for lag in PROMPT)
    best = max(share, key=share.__getitem__)
    if best not in PROMPT and share[best] > CLEARLY and share[best] - prompt > 0.1:
        rows = f"about {best} rows early" if best > 0 else f"about {-best} rows late"
        wrong = (
            f"it is {rows}: it explains {100 * share[best]:.0f} % of the motion there, {100 * prompt:.0f} % where it is"
        )
        return [
            finding(d, "action", "shifted", wrong, "row t holds the command that was sent after the picture of row t")
        ]
    if prompt < EXPLAINED:
        wrong = f"it explains {100 * max(prompt, 0):.0f} % of the gripper's motion"
        right = "give the commands of this very demonstration, row t after the picture of row t"
        return [finding(d, "action", "unrelated", wrong, right)]
    return check_axes(d, action, motion) if action.shape[1] == 4 and gripper_trusted else []


def check_axes(d: Demonstration, action: Array, motion: Array) -> list[Finding]:
    """Four numbers are a displacement along the world's axes in centimetres, and the gripper's command."""
    fits = {}
    for order in permutations(range(3)):
        for signs in product((1, -1), repeat=3):
            cause = action[:, order] * signs
            fits[order, signs] = max(proportional(*lagged(cause, motion, lag)) for lag in PROMPT)
    (share, factor), (best, at) = fits[(0, 1, 2), (1, 1, 1)], max((fit, key) for key, fit in fits.items())
    if share < EXPLAINED and best[0] > CLEARLY:
        names = [f"{'-' if sign < 0 else ''}{'xyz'[axis]}" for axis, sign in zip(*at, strict=True)]
        wrong = f"its axes are not the world's: the hand moves along x, y, z as the action's {', '.join(names)} say"
        return [finding(d, "action", "axes", wrong, "give displacements along the world's axes, divided by 1 cm")]
    if share > EXPLAINED and not UNIT[0] < factor < UNIT[1]:
        wrong = f"an action of 1 moves the hand by {factor:.3g} m per row"
        return [finding(d, "action", "unit", wrong, "displacements are divided by 1 cm: in [-1, 1]")]
    return []
