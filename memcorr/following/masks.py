"""`memcorr data mask`: the object's mask in every frame of a recording, from one that was drawn on its first frame.

A segmenter is given frames and the first mask, and answers with all of them. `matcher` needs no weights beside the
matcher's: it keeps the object as points in space, finds by matched points and depth how they moved, and calls object
what then lies on them. What it had not seen before, the other side of a door, is added as it comes into view.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Protocol

import cv2
import numpy as np
from numpy.typing import NDArray
from PIL import Image
from scipy.spatial import cKDTree
from tqdm import tqdm

from ..correspondence.lift import match_frames, prepare_references
from ..correspondence.matcher import Matcher, load_matcher
from ..correspondence.matches import motion_of
from ..correspondence.rigid import carried, fit_motion, interpolated, inverse
from ..demos.store import Demonstration, Store, write_demonstration
from ..errors import UserError
from ..folders import claimed
from ..frames import Frame
from ..spec import SPEC, Array

Mask = NDArray[np.bool_]

LOOK_EVERY = 4  # frames; the motion between two looks is interpolated
REACH = 0.06  # of the larger side of the image: how far the object moves from look to look
NEAR_PIXELS, NEAREST = (
    1.0,
    0.006,
)  # a pixel this close to a point of the object is the object: pixels, but at least metres
NEW, CANDIDATE = 0.004, 0.018  # metres from all known points: may be a part that was not seen before
MOVED = 0.015  # metres after which it shows whether it is
HAND = 0.06  # metres around the gripper: what comes into view there may be the hand's
ROUNDS = 4  # of putting the object where depth is
CELL = 0.003  # metres
SMALLEST = 8  # pixels; a first mask with fewer shows nothing


class Segmenter(Protocol):
    name: str

    def segment(self, frames: Sequence[Frame], first: Mask) -> NDArray[np.bool_]:
        """The object's visible pixels (T, H, W) in all frames, given the first ones; masks of `frames` do not count."""
        ...

    def clicked(
        self, frames: Sequence[Frame], clicks: Sequence[tuple[int, int]], away: Sequence[tuple[int, int]] = ()
    ) -> Mask:
        """Those in the first of some frames, given points (column, row) on the object and beside it."""
        ...


# Imported when asked for, like matchers.
SEGMENTERS: dict[str, str] = {
    "matcher": "memcorr.following.masks:MatcherSegmenter",
    "sam2": "memcorr.following.sam2:Sam2Segmenter",
}


def load_segmenter(name: str, weights: str | None = None) -> Segmenter:
    """By name; `weights` are SAM 2's folder or repository, or a file of the embedded matcher's."""
    if name not in SEGMENTERS:
        raise UserError(f"unknown segmenter {name!r}: choose one of {', '.join(SEGMENTERS)}")
    module, _, attribute = SEGMENTERS[name].partition(":")
    factory: Callable[..., Segmenter] = getattr(import_module(module), attribute)
    return factory() if weights is None else factory(weights)


class Tracked:
    """An object that is followed from look to look: its points as they were in the first frame, and how they moved."""

    def __init__(self, matcher: Matcher, frame: Frame, mask: Mask) -> None:
        self.matcher = matcher
        self.frame = replace(frame, mask=mask)  # of the last look, with the mask found there
        self.motion = np.eye(4)  # from the first frame to the last look
        points = _lifted(frame, mask & _returned(frame))
        self.points = _thinned(points)
        self.tree = cKDTree(self.points) if len(self.points) else None
        self.pending = np.zeros((0, 3))  # points that may be the object's, as they would have been in the first frame,
        self.found_at = np.zeros((0, 3))  # where they were found,
        self.arrived = np.zeros(0, bool)  # and whether that place was free, or the object's, before
        self.history = [self.frame]

    def look(self, frame: Frame) -> Mask:
        """The next frame that is looked at."""
        region = _grown(self.frame.mask, REACH * max(frame.depth.shape))
        step = None
        if self.frame.mask.any():
            (reference,) = prepare_references(self.matcher, [self.frame], batch=1)
            step = motion_of(match_frames(self.matcher, [reference], [replace(frame, mask=region)], batch=1)[0])
        if step is not None:
            self.motion = self._settled(frame, step @ self.motion, region)
        mask = self.at(frame, self.motion)
        if mask.any():
            self._learn(frame, mask, region)
            self.frame = replace(frame, mask=mask)
            self.history.append(self.frame)
        return mask

    def at(self, frame: Frame, motion: Array) -> Mask:
        """Pixels that lie on the object after a motion since the first frame; where depth is missing, as around."""
        found = np.zeros(frame.depth.shape, bool)
        if self.tree is None:
            return found
        near = _grown(self._silhouette(frame, motion), 3)
        returned = _returned(frame)
        asked = near & returned
        at_first = carried(inverse(motion), _lifted(frame, asked))
        found[asked] = self.tree.query(at_first, distance_upper_bound=1.0)[0] < _nearness(frame, asked)
        return _completed(found, near & ~returned, returned)

    def _silhouette(self, frame: Frame, motion: Array) -> Mask:
        """Where the known points are in the image, hidden or not."""
        uv, z = frame.camera.project(carried(motion, self.points))
        columns, rows = np.rint(uv).astype(np.int64).T
        H, W = frame.depth.shape
        inside = (z > 0) & (columns >= 0) & (columns < W) & (rows >= 0) & (rows < H)
        image = np.zeros((H, W), bool)
        image[rows[inside], columns[inside]] = True
        return image

    def _settled(self, frame: Frame, motion: Array, region: Mask) -> Array:
        """The motion, moved a little so that known points lie where depth is: small errors of many looks do not add."""
        assert self.tree is not None
        asked = region & _returned(frame)
        p = _lifted(frame, asked)
        limit = _nearness(frame, asked)
        for _ in range(ROUNDS):
            at_first = carried(inverse(motion), p)
            distance, index = self.tree.query(at_first)
            close = distance < limit
            if close.sum() < SPEC.points:
                break
            R, t = fit_motion(self.points[index[close]], p[close], np.ones(int(close.sum())))
            motion = np.eye(4)
            motion[:3, :3], motion[:3, 3] = R, t
        return motion

    def _learn(self, frame: Frame, mask: Mask, region: Mask) -> None:
        """Points that come into view beside known ones are the object's if they move along: they are where its motion
        carries them, and were not always where they were found. Beside the gripper they may be the hand's."""
        now = carried(self.motion, self.pending)
        moved = np.linalg.norm(now - self.found_at, axis=1) > MOVED
        along, stayed = _standing(frame, now), _standing(frame, self.found_at)
        mine = moved & (along == HERE) & (self.arrived | (stayed == GONE))
        others = (along == GONE) | (moved & ~self.arrived & (stayed == HERE))
        if mine.any():
            self.points = np.concatenate([self.points, _thinned(self.pending[mine])])
            self.tree = cKDTree(self.points)
        assert self.tree is not None
        p = _lifted(frame, _grown(mask, 2) & region & _returned(frame))
        p = p[np.linalg.norm(p - frame.gripper, axis=1) > HAND]
        at_first = carried(inverse(self.motion), p)
        distance = self.tree.query(at_first)[0]
        fresh = (distance > NEW) & (distance < CANDIDATE)
        static, arrived = self._past(p[fresh])
        found, kept = np.flatnonzero(fresh)[~static], ~mine & ~others
        self.pending = np.concatenate([self.pending[kept], at_first[found]])
        self.found_at = np.concatenate([self.found_at[kept], p[found]])
        self.arrived = np.concatenate([self.arrived[kept], arrived[~static]])
        cells = np.floor(self.pending / CELL).astype(np.int64)
        _, oldest = np.unique(cells, axis=0, return_index=True)
        self.pending, self.found_at, self.arrived = self.pending[oldest], self.found_at[oldest], self.arrived[oldest]

    def _past(self, p: Array) -> tuple[Mask, Mask]:
        """Of points (n, 3): which stood there before and were not the object, and which have come there since."""
        static, arrived = np.zeros(len(p), bool), np.zeros(len(p), bool)
        for seen in self.history:
            standing, pixels = _standing(seen, p), _pixels(seen, p)
            on, beside = (m[pixels[1], pixels[0]] for m in (seen.mask, _grown(seen.mask, 1)))
            static |= (standing == HERE) & ~beside
            arrived |= (standing == GONE) | ((standing == HERE) & on)
        return static, arrived


HERE, GONE, HIDDEN = 0, 1, 2


def _pixels(frame: Frame, p: Array) -> NDArray[np.int64]:
    """Column and row (2, n) of points (n, 3); the nearest ones of those outside."""
    uv = np.nan_to_num(frame.camera.project(p)[0])
    H, W = frame.depth.shape
    return np.clip(np.rint(uv), 0, [W - 1, H - 1]).astype(np.int64).T


def _standing(frame: Frame, p: Array) -> NDArray[np.int64]:
    """Of points (n, 3): whether depth shows them, shows something behind them, or something before them or nothing."""
    z = frame.camera.project(p)[1]
    columns, rows = _pixels(frame, p)
    seen = frame.depth[rows, columns].astype(np.float64)
    behind = np.where((z > 0) & np.isfinite(seen) & (seen > 0), seen - z, -np.inf)
    return np.where(np.abs(behind) < 2 * NEW, HERE, np.where(behind > 2 * NEW, GONE, HIDDEN))


class MatcherSegmenter:
    """Carries the first mask through the recording with the matcher, depth and nothing else."""

    name = "matcher"

    def __init__(self, matcher: str | Matcher = "embedded") -> None:
        self.matcher = load_matcher(matcher) if isinstance(matcher, str) else matcher

    def segment(self, frames: Sequence[Frame], first: Mask) -> NDArray[np.bool_]:
        tracked = Tracked(self.matcher, frames[0], first)
        looks = [*range(0, len(frames) - 1, LOOK_EVERY), len(frames) - 1]
        motions, masks = [np.eye(4)], {0: first}
        for t in looks[1:]:
            masks[t] = tracked.look(frames[t])
            motions.append(tracked.motion)
        between = interpolated(looks, motions, len(frames))
        return np.stack([masks[t] if t in masks else tracked.at(frames[t], between[t]) for t in range(len(frames))])

    def clicked(
        self, frames: Sequence[Frame], clicks: Sequence[tuple[int, int]], away: Sequence[tuple[int, int]] = ()
    ) -> Mask:
        from .clicks import clicked_mask

        return clicked_mask(frames, clicks, away)


def _returned(frame: Frame) -> Mask:
    return np.isfinite(frame.depth) & (frame.depth > 0)


def _lifted(frame: Frame, mask: Mask) -> Array:
    rows, columns = np.nonzero(mask)
    return frame.camera.lift(np.stack([columns, rows], axis=-1), frame.depth[rows, columns])


def _nearness(frame: Frame, mask: Mask) -> Array:
    """How close to a known point each pixel of `mask` has to be, metres."""
    return np.maximum(NEAR_PIXELS * frame.depth[mask].astype(np.float64) / frame.camera.K[0, 0], NEAREST)


def _grown(mask: Mask, pixels: float) -> Mask:
    size = 2 * int(np.ceil(pixels)) + 1
    kernel = cv2.getStructuringElement(cv2.MORPH_ELLIPSE, (size, size))
    return cv2.dilate(mask.astype(np.uint8), kernel) > 0


def _completed(found: Mask, unknown: Mask, returned: Mask) -> Mask:
    """Pixels without depth are the object where most of their neighbours are; specks of a pixel are nothing."""
    around = cv2.blur(found.astype(np.float32), (3, 3))
    known = np.maximum(cv2.blur(returned.astype(np.float32), (3, 3)), 1e-6)
    return (found & (around > 1.5 / 9)) | (unknown & (around / known > 0.5))


def _thinned(points: Array) -> Array:
    """One point per cell."""
    if not len(points):
        return points
    _, kept = np.unique(np.floor(points / CELL).astype(np.int64), axis=0, return_index=True)
    return points[np.sort(kept)]


def overlap(a: NDArray[np.bool_], b: NDArray[np.bool_]) -> Array:
    """Intersection over union of masks (T, H, W) -> (T,); 1 where both are empty."""
    both, either = (a & b).sum(axis=(1, 2)), (a | b).sum(axis=(1, 2))
    return np.where(either > 0, both / np.maximum(either, 1), 1.0)


def first_mask(demonstration: Demonstration, folder: Path | None) -> Mask:
    """As drawn in a picture of the demonstration's name, else the mask of its first frame."""
    d = demonstration
    drawn = d.frame(0).mask
    if folder is not None:
        path = folder / f"{d.name}.png"
        if not path.exists():
            raise UserError(f"{path} is missing: draw the object on the first frame of {d.name}, white on black")
        try:
            with Image.open(path) as picture:
                drawn = np.asarray(picture.convert("L")) > 127
        except Exception as problem:  # the decoder raises what it likes (OSError, SyntaxError, ValueError, ...)
            told = " ".join(str(problem).split())[:200]
            raise UserError(f"{path} is no picture ({type(problem).__name__}: {told}); draw it again") from None
        if drawn.shape != d.frame(0).mask.shape:
            height, width = d.frame(0).mask.shape
            raise UserError(f"{path} has {drawn.shape[1]} x {drawn.shape[0]} pixels, the recording {width} x {height}")
    if drawn.sum() < SMALLEST:
        where = f"{folder / d.name}.png" if folder else f"the first frame of {d.path}"
        raise UserError(f"{where} shows no object: give its mask with --first-masks FOLDER, {d.name}.png in it")
    return drawn


def draw_masks(store: Store, segmenter: Segmenter, first_masks: Path | None, again: bool = False) -> int:
    """Every recording with masks in all its frames, in place; those that have them are left alone unless asked.

    How many were drawn."""
    with claimed(store.root):
        present = store.present()
        todo = [d for d in present if again or not d.frame(len(d) // 2).mask.any()]
        drawn = [first_mask(d, first_masks) for d in todo]  # complains before anything is written
        for d, first in zip(tqdm(todo, f"mask {segmenter.name}", unit="demo"), drawn, strict=True):
            frames = d.frames(range(len(d)))
            masks = segmenter.segment(frames, first)
            masked = [replace(frame, mask=mask) for frame, mask in zip(frames, masks, strict=True)]
            about = {"pair": d.pair, "task": d.task, "u": d.u, "world": d.world, "time": d.time}
            truth = d.recorded_joint, d.object_pose
            write_demonstration(d.path, masked, d.action, *truth, **about, disturbances=d.disturbances)
        return len(todo)
