"""What about a recording will make it hard to follow: said before a robot moves.

for remark in remarks(demonstration):
    print(remark)
"""

from __future__ import annotations

import numpy as np

from ..frames import Frame
from ..spec import SPEC
from .pace import USUAL_PACE, Pace, durations, is_cut, speeds
from .store import Demonstration

SMALL = 0.004  # of the image: an object that fills less is matched badly
TURNS_DEG = (25.0, 40.0, 65.0, 90.0, 115.0, 140.0)  # after which a round object looks the same
SAME_M, SAME_COLOUR = 0.008, 25.0  # between what is seen before and after a turn: metres, and of 255
ROUND = 0.85  # share of the points, in the worst turn, that have to look the same


def remarks(d: Demonstration, pace: Pace = USUAL_PACE) -> list[str]:
    """One sentence each; none where nothing stands out."""
    found, taken = [], durations(d, pace)
    if (fast := taken > 1).any():
        found.append(
            f"fast: {fast.sum()} of {len(d)} steps command up to {speeds(d).max():.2f} of an action, where "
            f"{pace.fastest:g} can be followed well"
        )
    if left_out := int((taken == 0).sum()):
        found.append(f"pauses: {left_out} steps in which nothing happens")
    if is_cut(d, pace):
        found.append("cut short: the hand is still under way in the last frame; record until it rests")
    looks = [*range(0, len(d) - 1, SPEC.executed), len(d) - 1]
    frames = d.frames(looks)
    share = np.array([(frame.mask & (frame.depth > 0)).mean() for frame in frames])
    if not share.any():
        return [*found, "its object is never seen: the mask is empty, or has no depth"]
    if hidden := int(np.argmax(share > 0)):
        found.append(f"hidden at first: its object is not seen before frame {looks[hidden]}")
    if share.max() < SMALL:
        found.append(f"small: its object fills at most {100 * share.max():.2f} % of the image; look from nearer")
    if looks_round(frames[int(share.argmax())]):
        found.append("symmetric: its object looks the same when it is turned, so its turn cannot be seen")
    return found


def looks_round(frame: Frame) -> bool:
    """Whether the object's visible points, turned about the vertical through their middle, stay on or behind what is
    seen, and look the same there."""
    return roundness(frame) >= ROUND


def roundness(frame: Frame) -> float:
    """The share of points that do, in the worst turn."""
    seen = frame.mask & (frame.depth > 0) & np.isfinite(frame.depth)
    v, u = np.nonzero(seen)
    if len(u) < SPEC.points:
        return 0.0
    uv = np.stack([u, v], axis=1).astype(np.float64)
    p = frame.camera.lift(uv, frame.depth[v, u].astype(np.float64))
    middle, (height, width) = (p.min(axis=0) + p.max(axis=0)) / 2, frame.mask.shape
    alike = []
    for angle in np.radians(TURNS_DEG):
        c, s = np.cos(angle), np.sin(angle)
        turned = middle + (p - middle) @ np.array([[c, s, 0.0], [-s, c, 0.0], [0.0, 0.0, 1.0]])
        there, z = frame.camera.project(turned)
        x, y = np.rint(there).astype(np.int64).T
        inside = (x >= 0) & (x < width) & (y >= 0) & (y < height)
        x, y = np.where(inside, x, 0), np.where(inside, y, 0)
        behind = z - frame.depth[y, x]
        off = np.abs(frame.rgb[y, x].astype(np.float64) - frame.rgb[v, u]).mean(axis=1)
        same = (behind > SAME_M) | ((behind > -SAME_M) & (off < SAME_COLOUR))
        alike.append((inside & seen[y, x] & same).mean())
    return float(min(alike))
