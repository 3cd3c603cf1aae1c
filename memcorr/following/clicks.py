"""`memcorr data mask --click U V`: the object's mask on the first frame of a recording, from points clicked on it.

A pixel is the object's if the way to a click is shorter than to what is surely none of it. A way is long where colour
changes and where depth has a step or a crease. The recording helps: where depth later shows the place empty, the object
has left it; where it shows the same surface all along, that is more likely the background.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray
from PIL import Image
from scipy.sparse import coo_array
from scipy.sparse.csgraph import dijkstra
from scipy.spatial import cKDTree

from ..demos.contact_sheet import MASK_COLOUR, WRONG
from ..demos.store import Store
from ..errors import UserError
from ..folders import written_whole
from ..frames import Frame
from .masks import GONE, HAND, HERE, Mask, Segmenter, _grown, _lifted, _returned, _standing

Point = tuple[int, int]  # column and row

SHOWN = 640  # pixels of the picture to look at
LOOKS = 12  # frames of the recording that are asked where the object was
REACH = 0.35  # metres from all clicks: what is farther is not the object
COLOUR = 6.0  # difference of neighbouring pixels (Lab) that is an edge
CREASE = 0.008  # the same of depth: metres off the plane through its neighbours, at one metre
FREE = 0.03  # length of a step without an edge
SLOW, QUICK = 1.5, 0.2  # how much longer a step is where the recording says otherwise, and as it says
STEADY, LEFT = 0.95, 0.15  # share of the looks


def clicked_mask(
    frames: Sequence[Frame], clicks: Sequence[Point], away: Sequence[Point] = (), reach: float = REACH
) -> Mask:
    """On the first of `frames`, which are some of one recording; `away` are clicks on what is not the object."""
    first = frames[0]
    H, W = first.depth.shape
    ours, others = np.zeros((H, W), bool), np.zeros((H, W), bool)
    for seeds, points in ((ours, clicks), (others, away)):
        for u, v in points:
            seeds[v, u] = True
    steady, left = history(frames)
    hand = near_hand(first, ours)
    robot = _touching(left & ~_grown(ours, 2), hand) & ~_touching(left & ~hand, _grown(ours, 2))
    left &= ~robot
    others |= ~ours & (far(first, ours, reach) | hand | robot)
    step = edges(first)
    mine = distance(step * np.where(steady, SLOW, np.where(left, QUICK, 1.0)), ours)
    theirs = distance(step * np.where(left, SLOW, 1.0), others)
    return _touching(mine < theirs, ours)


def far(frame: Frame, ours: Mask, reach: float) -> Mask:
    """Beyond reach of the clicks, or at the picture's rim."""
    found = np.zeros(ours.shape, bool)
    found[[0, -1]] = found[:, [0, -1]] = True
    return found | (_nearest(frame, _lifted(frame, ours & _returned(frame))) > reach)


def near_hand(frame: Frame, ours: Mask) -> Mask:
    """At the gripper, unless that was clicked."""
    found = _nearest(frame, frame.gripper[None]) < HAND
    return found & ~(found & ours).any()


def _nearest(frame: Frame, points: NDArray[np.float64]) -> NDArray[np.float64]:
    """How far the surface at each pixel is from the nearest of the points, metres; nothing where there is no depth."""
    found, returned = np.full(frame.depth.shape, np.nan), _returned(frame)
    if len(points):
        found[returned] = cKDTree(points).query(_lifted(frame, returned))[0]
    return found


def _touching(mask: Mask, seeds: Mask) -> Mask:
    """The connected parts of a mask that have a seed."""
    _, parts = cv2.connectedComponents(mask.astype(np.uint8), connectivity=8)
    return mask & np.isin(parts, np.unique(parts[seeds & mask]))


def history(frames: Sequence[Frame]) -> tuple[Mask, Mask]:
    """Pixels of the first frame whose surface stays all along, and those that it has left."""
    first = frames[0]
    returned = _returned(first)
    steady, left = np.zeros(returned.shape, bool), np.zeros(returned.shape, bool)
    if len(frames) > 1:
        standing = np.stack([_standing(frame, _lifted(first, returned)) for frame in frames[1:]])
        seen = np.maximum(((standing == HERE) | (standing == GONE)).sum(axis=0), 1)
        steady[returned] = (standing == HERE).sum(axis=0) / seen >= STEADY
        left[returned] = (standing == GONE).mean(axis=0) >= LEFT
    return steady, left


def edges(frame: Frame) -> NDArray[np.float64]:
    """How long a step onto each pixel is."""
    lab = cv2.cvtColor(np.ascontiguousarray(frame.rgb), cv2.COLOR_RGB2LAB).astype(np.float32)
    colour = np.linalg.norm(np.stack([cv2.Sobel(lab, cv2.CV_32F, dx, 1 - dx) / 8 for dx in (0, 1)]), axis=(0, 3))
    returned = _returned(frame)
    closeness = np.where(returned, 1 / np.where(returned, frame.depth, 1.0), 0.0).astype(np.float32)  # linear on planes
    bend = np.abs(cv2.Laplacian(closeness, cv2.CV_32F, ksize=1))
    known = cv2.erode(returned.astype(np.uint8), np.ones((3, 3), np.uint8)) > 0
    return FREE + (colour / COLOUR) ** 2 + np.where(known, np.minimum(bend / CREASE, 8.0), 0.0)


def distance(step: NDArray[np.float64], seeds: Mask) -> NDArray[np.float64]:
    """Length of the shortest way from the seeds to each pixel, steps to eight neighbours."""
    H, W = step.shape
    number = np.arange(H * W).reshape(H, W)
    heads, tails, lengths = [], [], []
    for dv, du in ((0, 1), (1, 0), (1, 1), (1, -1)):
        a = (slice(0, H - dv), slice(max(-du, 0), W - max(du, 0)))
        b = (slice(dv, H), slice(max(du, 0), W - max(-du, 0)))
        heads.append(number[a].ravel())
        tails.append(number[b].ravel())
        lengths.append((np.hypot(dv, du) * np.maximum(step[a], step[b])).ravel())
    graph = coo_array((np.concatenate(lengths), (np.concatenate(heads), np.concatenate(tails))), shape=(H * W, H * W))
    if not seeds.any():
        return np.full((H, W), np.inf)
    found = dijkstra(graph.tocsr(), directed=False, indices=number[seeds], min_only=True)
    return found.reshape(H, W)


def show_clicks(
    store: Store, segmenter: Segmenter, of: str | None, clicks: Sequence[Point], away: Sequence[Point], out: Path
) -> tuple[Path, Path]:
    """The mask that clicks on the first frame of a recording make, as a picture to draw from, and as one to look at."""
    named = {d.name: d for d in store.present()}
    if of is None and len(named) != 1:
        raise UserError(f"{store.root} holds {len(named)} recordings; say with --of which: {', '.join(named)}")
    if of is not None and of not in named:
        raise UserError(f"--of {of}: {store.root} holds {', '.join(named)}")
    d = named[of] if of is not None else next(iter(named.values()))
    height, width = d.frame(0).depth.shape
    for u, v in [*clicks, *away]:
        if not (0 <= u < width and 0 <= v < height):
            raise UserError(f"{u} {v} is outside the picture: column 0 to {width - 1}, row 0 to {height - 1}")
    frames = d.frames(sorted({round(t) for t in np.linspace(0, len(d) - 1, LOOKS)}))
    mask = segmenter.clicked(frames, clicks, away)
    drawn, shown = out / f"{d.name}.png", out / "look" / f"{d.name}.png"
    shown.parent.mkdir(parents=True, exist_ok=True)
    for path, picture in ((drawn, mask), (shown, overlay(frames[0], mask, clicks, away))):
        with written_whole(path) as temporary:
            Image.fromarray(picture).save(temporary, format="PNG")
    return drawn, shown


def overlay(frame: Frame, mask: Mask, clicks: Sequence[Point], away: Sequence[Point]) -> NDArray[np.uint8]:
    """Enlarged, the mask green, clicks on the object as green rings, others as red ones."""
    k = max(1, round(SHOWN / max(mask.shape)))
    rgb: NDArray[Any] = cv2.resize(np.ascontiguousarray(frame.rgb), None, fx=k, fy=k, interpolation=cv2.INTER_NEAREST)
    inside = cv2.resize(mask.astype(np.uint8), None, fx=k, fy=k, interpolation=cv2.INTER_NEAREST) > 0
    rgb[inside] = (0.45 * rgb[inside] + 0.55 * MASK_COLOUR).astype(np.uint8)
    for points, colour in ((clicks, (0, 120, 0)), (away, WRONG)):
        for u, v in points:
            at = (round(k * (u + 0.5)), round(k * (v + 0.5)))
            cv2.circle(rgb, at, 6, (255, 255, 255), 3)
            cv2.circle(rgb, at, 6, colour, 2)
    return rgb
