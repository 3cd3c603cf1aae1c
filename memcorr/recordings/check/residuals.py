"""How well pictures, gripper, actions and clock fit each other, in numbers: what is wrong by a little.

Everything is measured where the hand moves most. Pictures are put against the gripper at other rows: the depth around
the gripper's pixel is least restless at the row at which it was taken. Colour and depth change at the same pixels
in the same row. Intervals are over parts of the recordings.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ...demos.store import CHUNK, Demonstration
from ...spec import SPEC, Array
from .evidence import Finding, returned
from .motion import PROMPT, STILL, finding, lagged, proportional

ROWS = 120  # of a recording, those in which the hand goes farthest
FAR = 10  # rows by which pictures may be late or early
LATE = 3  # rows from where on they are
CLEARLY = 2.0  # times as restless, or as much alike, as elsewhere
WINDOW = 1 / 50  # of the image's larger side, around the gripper's pixel
MAP = 96  # pixels on the larger side of a map of changes
COLOUR, DEPTH = 60.0, 0.05  # of colour: most that counts; of depth, metres: least that does
OFFSET = -0.065, 0.012  # metres from the gripper to the front of the hand, as depth has it
PARTS = 4  # of a recording, for intervals
FINGERS = 0.005, 0.15  # metres of the gripper from the middle of the fingertips that are no rounding, and still a hand
RATE = 2.0  # seconds between rows: no robot is so slow
UNTESTABLE = (
    "red and blue exchanged (look at the picture)",
    "the gripper and its fingertips off together by some 3 cm",
    "depth off by some 3 % (the offset above moves)",
    "actions in another unit (above: what an action of 1 does)",
    "a gripper's command that is inverted, where it never changes or robot_state does not show the fingers",
    "labels of tasks exchanged",
)


@dataclass(frozen=True)
class Residual:
    """One quantity, of one recording: as a whole, and of its parts."""

    value: float
    parts: tuple[float, ...] = ()


@dataclass(frozen=True)
class Residuals:
    """None where the recording says nothing about it."""

    depth_lag: Residual | None = None  # rows by which depth is late against the gripper
    colour_lag: Residual | None = None  # rows by which colour is late against depth
    depth_scale: Residual | None = None  # of depth, where the gripper's distance changes; the hand's shape is in it
    offset_m: Residual | None = None  # from the gripper to the surface seen there, along the optical axis
    action_m: Residual | None = None  # that the hand moves where the action is 1
    action_lag: Residual | None = None  # rows by which motion follows the action
    closing: Residual | None = None  # correlation of the gripper's command with how closed the fingers are
    seconds: Residual | None = None  # between rows


NAMES = {
    "depth_lag": ("depth is late against the gripper by", "rows", 1.0),
    "colour_lag": ("colour is late against depth by", "rows", 1.0),
    "depth_scale": ("depth is, times what the gripper's distance says,", "", 1.0),
    "offset_m": ("what depth shows at the gripper is farther away by", "mm", 1000.0),
    "action_m": ("an action of 1 moves the hand by", "mm a row", 1000.0),
    "action_lag": ("the hand follows its action after", "rows", 1.0),
    "closing": ("the gripper's command and closed fingers correlate by", "", 1.0),
    "seconds": ("rows are apart by", "ms", 1000.0),
}


def in_words(measured: Sequence[Residuals]) -> list[str]:
    """One line each: the median recording, and where nine tenths of all parts are."""
    lines = []
    for name, (words, unit, factor) in NAMES.items():
        some = [r for r in (getattr(m, name) for m in measured) if r is not None]
        if not some:
            lines.append(f"  {words} ?: no recording says")
            continue
        middle = factor * float(np.median([r.value for r in some]))
        parts = factor * np.array([p for r in some for p in (r.parts or (r.value,))])
        low, high = np.percentile(parts, [5, 95])
        lines.append(f"  {words} {middle:.3g} {unit}".rstrip() + f" ({low:.3g} to {high:.3g})")
    return lines


def measure(demonstration: Demonstration) -> Residuals:
    d = demonstration
    found = Residuals(seconds=None if d.time is None else Residual(float(np.median(np.diff(d.time)))))
    if np.linalg.norm(np.ptp(d.gripper, axis=0)) < STILL:
        return found
    rows = moving(d.gripper)
    surface, distance, changes = look(d, rows)
    depth_lag, offset, scale = against_gripper(surface, distance)
    action_m, action_lag = of_actions(d)
    return Residuals(depth_lag, of_colour(changes), scale, offset, action_m, action_lag, of_fingers(d), found.seconds)


def moving(gripper: Array) -> NDArray[np.int64]:
    """Consecutive rows in which the hand goes farthest."""
    way = np.concatenate([[0.0], np.cumsum(np.linalg.norm(np.diff(gripper, axis=0), axis=1))])
    count = min(ROWS, len(gripper))
    first = int(np.argmax(way[count - 1 :] - way[: len(way) - count + 1]))
    return np.arange(first, first + count)


Changes = tuple[NDArray[np.float32], NDArray[np.bool_]]


def look(d: Demonstration, rows: NDArray[np.int64]) -> tuple[Array, Array, Changes]:
    """What depth shows around the gripper of each row and of FAR rows around it, how far that gripper is (each
    (rows, 2 FAR + 1), NaN where nothing is seen), and maps of what changes from row to row, in colour and in depth."""
    lags = np.arange(-FAR, FAR + 1)
    surface = np.full((len(rows), len(lags)), np.nan)
    distance = surface.copy()
    colour: list[NDArray[np.float32]] = []
    depths: list[NDArray[np.float32]] = []
    for first in range(0, len(rows), CHUNK):
        for frame in d.frames(rows[first : first + CHUNK]):
            k, row = len(colour), rows[len(colour)]
            height, width = frame.depth.shape
            reach = max(2, round(WINDOW * max(height, width)))
            for i, lag in enumerate(lags):
                if not 0 <= row - lag < len(d):
                    continue
                uv, z = frame.camera.project(d.gripper[row - lag])
                distance[k, i] = z
                if z > 0 and 0 <= uv[0] < width and 0 <= uv[1] < height:
                    u, v = np.round(uv).astype(int)
                    window = (slice(max(v - reach, 0), v + reach + 1), slice(max(u - reach, 0), u + reach + 1))
                    seen = frame.depth[window][returned(frame.depth[window]) & ~frame.mask[window]]
                    if seen.size > frame.depth[window].size / 2:
                        surface[k, i] = np.quantile(seen, 0.1)
            step = -(-max(height, width) // MAP)
            colour.append(frame.rgb[::step, ::step].mean(axis=-1, dtype=np.float32))
            depths.append(np.where(returned(frame.depth), frame.depth, np.nan)[::step, ::step])
    with np.errstate(invalid="ignore"):
        nearer = np.abs(np.diff(np.stack(depths), axis=0)) > DEPTH
    return surface, distance, (np.minimum(np.abs(np.diff(np.stack(colour), axis=0)), COLOUR), nearer)


def parts(count: int) -> list[slice]:
    edges = np.linspace(0, count, PARTS + 1).astype(int)
    return [slice(a, b) for a, b in pairwise(edges)]


def restless(surface: Array, distance: Array) -> Array:
    """(2 FAR + 1) how much the depth at the gripper varies, metres, of each lag; what is far off counts 5 cm."""
    off = surface - distance
    with np.errstate(invalid="ignore"):
        middle = np.array([np.median(c[np.isfinite(c)]) if np.isfinite(c).any() else 0.0 for c in off.T])
        miss = np.minimum(np.abs(off - middle), 0.05)
    return np.array([c[np.isfinite(c)].mean() if np.isfinite(c).sum() > 5 else 0.05 for c in miss.T])


def quietest(score: Array) -> int:
    """The lag, nearest to none, at which depth is hardly more restless than at its best; none unless that is clear."""
    if score[FAR] <= CLEARLY * score.min():
        return 0
    near = np.flatnonzero(score <= 1.1 * score.min() + 2e-4) - FAR
    return int(near[np.abs(near).argmin()])


def against_gripper(surface: Array, distance: Array) -> tuple[Residual | None, Residual | None, Residual | None]:
    """Lag, offset and scale of depth."""
    score = restless(surface, distance)
    if score.min() > 0.02:  # nothing steady is seen there
        return None, None, None
    lag, pieces = quietest(score), parts(len(surface))
    some = [quietest(s) for p in pieces if (s := restless(surface[p], distance[p])).min() <= 0.02]
    off, z = (surface - distance)[:, lag + FAR], distance[:, lag + FAR]
    whole = [o for p in pieces if np.isfinite(o := off[p]).sum() > 5]
    offset = Residual(float(np.nanmedian(off)), tuple(float(np.nanmedian(o)) for o in whole))
    known = np.isfinite(off) & (np.abs(off - np.nanmedian(off)) < 0.05)
    scale = None
    if known.sum() > 20 and np.ptp(z[known]) > 0.1:
        scale = Residual(*_slope(z[known], surface[:, lag + FAR][known]))
    return Residual(float(lag), tuple(map(float, some))), offset, scale


def _slope(x: Array, y: Array) -> tuple[float, tuple[float, ...]]:
    """By what y grows with x; and without each part of the rows in turn."""
    kept = [np.delete(np.arange(len(x)), np.arange(len(x))[p]) for p in parts(len(x))]
    return float(np.polyfit(x, y, 1)[0]), tuple(float(np.polyfit(x[k], y[k], 1)[0]) for k in kept)


def of_colour(changes: Changes) -> Residual | None:
    """The lag at which colour and depth change at the same pixels."""
    scores = [_alike(changes, p) for p in (slice(None), *parts(len(changes[0])))]
    if scores[0] is None or scores[0].max() < 0.03:
        return None
    best = [float(s.argmax() - FAR) for s in scores if s is not None and s.max() > CLEARLY * np.median(s)]
    return Residual(float(scores[0].argmax() - FAR), tuple(best[1:]))


def _alike(changes: Changes, rows: slice) -> Array | None:
    """(2 FAR + 1) mean correlation of the maps; None without any change."""
    colour, depth = (c[rows].reshape(len(c[rows]), -1).astype(np.float32) for c in changes)
    if len(colour) <= 2 * FAR:
        return None
    usual = [c - c.mean(axis=1, keepdims=True) for c in (colour, depth)]
    a, b = (c / np.maximum(np.linalg.norm(c, axis=1, keepdims=True), 1e-6) for c in usual)
    scores = []
    for lag in range(-FAR, FAR + 1):
        late, early = lagged(b, a, lag)
        scores.append(float((late * early).sum(axis=1).mean()))
    return np.array(scores)


def of_actions(d: Demonstration) -> tuple[Residual | None, Residual | None]:
    """Of four numbers: a displacement and the gripper's command."""
    if d.action.shape[1] != SPEC.action_dim or not np.ptp(d.action[:, :3], axis=0).any():
        return None, None
    motion, action = np.diff(d.gripper, axis=0), d.action[:-1, :3]
    fits = {lag: proportional(*lagged(action, motion, lag)) for lag in PROMPT}
    lag = max(fits, key=lambda k: fits[k][0])
    if fits[lag][0] < 0.5:
        return None, None
    cause, effect = lagged(action, motion, lag)
    factors = [proportional(cause[p], effect[p])[1] for p in parts(len(cause)) if np.ptp(cause[p], axis=0).any()]
    return Residual(fits[lag][1], tuple(factors)), Residual(float(lag))


def of_fingers(d: Demonstration) -> Residual | None:
    """Where robot_state has both fingertips."""
    if d.action.shape[1] != SPEC.action_dim or d.robot_state.shape[1] != SPEC.state_dim:
        return None
    command, opening = d.action[:, 3], np.linalg.norm(d.robot_state[:, 3:6] - d.robot_state[:, 6:9], axis=1)
    if np.ptp(command) < 0.1 or np.ptp(opening) < 0.005:
        return None
    best = max((np.corrcoef(*lagged(command, -opening, lag))[0, 1] for lag in PROMPT), key=abs)
    return Residual(float(best))


def check_residuals(d: Demonstration, r: Residuals) -> Iterator[Finding]:
    """Those that are too large to be good data's."""
    late, colour = (0.0 if x is None else x.value for x in (r.depth_lag, r.colour_lag))
    if abs(late) >= LATE or abs(colour) >= LATE:
        field, rows = ("rgb, depth, mask", late)
        if abs(colour) >= LATE:
            field, rows = ("depth", late) if abs(late) >= LATE else ("rgb", colour)
        when = "late" if rows > 0 else "early"
        wrong = f"about {abs(rows):.0f} rows {when}: where the gripper was then is where the hand is seen"
        if field == "rgb":
            wrong = f"about {abs(rows):.0f} rows {when}: it changes where depth had changed then"
        yield finding(d, field, "late", wrong, "row t holds what was seen when the gripper was where row t says")
    if r.offset_m is not None and not OFFSET[0] < r.offset_m.value < OFFSET[1]:
        mm = 1000 * r.offset_m.value
        wrong = (
            f"what it shows at the gripper is {abs(mm):.0f} mm {'behind it' if mm > 0 else 'in front of it'} (median)"
        )
        right = "the hand's front is there: check depth's scale, the calibration and where the gripper is"
        yield finding(d, "depth", "offset", wrong, right)
    if r.closing is not None and r.closing.value < -0.5:
        wrong = f"the gripper's command is inverted: where it is larger, fingers open ({r.closing.value:+.2f})"
        yield finding(d, "action", "gripper-inverted", wrong, "the fourth number closes the fingers where it is larger")
    if r.seconds is not None and r.seconds.value > RATE:
        wrong = f"{r.seconds.value:g} s pass between rows"
        yield finding(d, "time", "milliseconds", wrong, "seconds are expected: divide by 1000")
    if not np.ptp(d.robot_state, axis=0).any() and np.linalg.norm(np.ptp(d.gripper, axis=0)) >= STILL:
        right = "give what the robot reported in each row"
        yield finding(d, "robot_state", "constant", "it never changes while the hand moves", right)
    if d.robot_state.shape[1] == SPEC.state_dim:
        off = d.gripper - (d.robot_state[:, 3:6] + d.robot_state[:, 6:9]) / 2
        far = float(np.linalg.norm(np.median(off, axis=0)))
        if FINGERS[0] < far < FINGERS[1] and np.abs(off - np.median(off, axis=0)).max() < 1e-3:
            x, y, z = 1000 * np.median(off, axis=0)
            wrong = f"it is ({x:+.0f}, {y:+.0f}, {z:+.0f}) mm from the midpoint of the fingertips in robot_state"
            yield finding(
                d, "gripper", "not-the-fingertips", wrong, "give the midpoint of the fingertips; metres, world"
            )
