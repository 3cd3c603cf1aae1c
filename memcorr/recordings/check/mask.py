"""Is the mask on an object, and on which?

Its outline should follow edges of the picture. How well it does is measured where it is and where it would be if it
were moved sideways: a right mask fits best at home, a displaced one fits best elsewhere, a meaningless one nowhere.
"""

from __future__ import annotations

import cv2
import numpy as np
from numpy.typing import NDArray

from ...frames import Frame
from .evidence import Evidence, Finding, returned

CROSS = cv2.getStructuringElement(cv2.MORPH_CROSS, (3, 3))
REACH = 3 / 16  # of the image's smaller side: how far it is moved sideways
HOME = 1 / 50  # of that side: closer than this it is where it belongs
CLEARLY = 0.8  # of the best fit anywhere: less at home means that it belongs elsewhere
RANK = 0.9  # share of all places that fit worse than home
SHORTEST = 12  # pixels of an outline that say something
EMPTY, FULL = 0.5, 0.8  # share of frames without any, share of the image covered
SMALLEST = 8  # pixels


def check_mask(evidence: Evidence) -> list[Finding]:
    masks = np.stack([f.mask for f in evidence.frames])
    covered = masks.mean(axis=(1, 2))
    empty = masks.sum(axis=(1, 2)) < SMALLEST
    if empty.mean() > EMPTY:
        wrong = f"empty in {empty.sum()} of {len(masks)} frames looked at"
        return [evidence.finding("mask", "empty", wrong, "mark the visible pixels of the object that is handled")]
    if np.median(covered) > FULL:
        wrong = f"it covers {100 * np.median(covered):.0f} % of the image"
        return [evidence.finding("mask", "inverted", wrong, "true is the object, false the rest: negate it")]
    if follows_hand(evidence):
        wrong = "it moves with the hand from the first frame on"
        return [evidence.finding("mask", "on-the-hand", wrong, "mark the object that is handled, not the robot")]
    return check_outline(evidence)


def edges(frame: Frame) -> NDArray[np.float32]:
    """Strength of colour edges, 1 for the strongest tenth."""
    smooth = cv2.GaussianBlur(np.ascontiguousarray(frame.rgb), (3, 3), 0).astype(np.float32)
    across, down = (np.abs(cv2.Sobel(smooth, cv2.CV_32F, dx, 1 - dx)) for dx in (1, 0))
    strength = np.hypot(across, down).max(axis=2)
    return np.minimum(strength / (np.percentile(strength, 90) + 1e-6), 1).astype(np.float32)


def outline(mask: NDArray[np.bool_]) -> NDArray[np.float32]:
    line = mask & ~(cv2.erode(mask.astype(np.uint8), np.ones((3, 3), np.uint8)) > 0)
    line[:2] = line[-2:] = False  # where the image ends, the object need not
    line[:, :2] = line[:, -2:] = False
    return line.astype(np.float32)


def check_outline(evidence: Evidence) -> list[Finding]:
    height, width = evidence.size
    side = min(height, width)
    reach, home = round(side * REACH), max(2, round(side * HOME))
    # A segmenter may cut a pixel off all around: the outline and the next one out both count.
    total, counted = np.zeros((2, 2 * reach + 1, 2 * reach + 1), np.float32), 0
    for frame in evidence.frames:
        grown = cv2.dilate(np.ascontiguousarray(frame.mask).astype(np.uint8), CROSS) > 0
        lines = [outline(mask) for mask in (frame.mask, grown)]
        if lines[0].sum() < SHORTEST:
            continue
        field = cv2.copyMakeBorder(edges(frame), reach, reach, reach, reach, cv2.BORDER_REFLECT)
        total += np.stack([cv2.matchTemplate(field, line, cv2.TM_CCORR) / line.sum() for line in lines])
        counted += 1
    if not counted:
        return []
    fit = total.max(axis=0) / counted
    here = float(fit[reach - home : reach + home + 1, reach - home : reach + home + 1].max())
    rank, (v, u) = float((fit < here).mean()), np.unravel_index(fit.argmax(), fit.shape)
    best, dx, dy = float(fit.max()), int(u) - reach, int(v) - reach
    if here >= CLEARLY * best and rank >= RANK:
        return []
    at_rim = max(abs(dx), abs(dy)) == reach
    if here < CLEARLY * best and best > 0.5 and not at_rim:
        wrong = (
            f"it is not on the object: its outline fits the picture {dx:+d} px across and {dy:+d} px down from there"
        )
        right = "take the mask of this very frame and camera, in the size of the images"
        return [evidence.finding("mask", "displaced", wrong, right)]
    wrong = (
        f"it is not on an object: its outline would follow edges better at {100 * (1 - rank):.0f} % of places nearby"
    )
    return [evidence.finding("mask", "off-object", wrong, "mark the visible pixels of the object that is handled")]


def follows_hand(evidence: Evidence) -> bool:
    """Do its points move as the gripper does, from the first frame on?"""
    centres, hands = [], []
    for frame in evidence.frames:
        v, u = np.nonzero(frame.mask & returned(frame.depth))
        if len(u) >= SMALLEST:
            centres.append(np.median(frame.camera.lift(np.stack([u, v], axis=-1), frame.depth[v, u]), axis=0))
            hands.append(frame.gripper)
    if len(centres) < len(evidence.frames) / 2:
        return False
    hand, offset = np.stack(hands), np.stack(centres) - np.stack(hands)
    way = np.linalg.norm(np.diff(hand, axis=0), axis=1).sum()
    spread = np.linalg.norm(offset - np.median(offset, axis=0), axis=1)
    return bool(way > 0.15 and np.percentile(spread, 90) < 0.15 * np.linalg.norm(np.ptp(hand, axis=0)))
