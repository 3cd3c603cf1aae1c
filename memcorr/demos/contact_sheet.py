"""Pages to look at, tables of pictures: some pairs of a store, all worlds, or what `memcorr data check` saw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from ..folders import written_whole
from ..frames import Frame
from .store import Demonstration, Store

TILE, GAP, HEADER, SIDE, NOTE = 184, 6, 60, 168, 22  # pixels
MAX_ROWS = 8
MASK_COLOUR, WRONG = np.array([60, 220, 120]), (200, 30, 30)


@dataclass(frozen=True)
class Tile:
    image: NDArray[np.uint8]  # of any size; its shape is kept
    caption: str = ""


@dataclass(frozen=True)
class Row:
    name: str
    tiles: Sequence[Tile]
    notes: Sequence[str] = ()  # what is wrong with it, a line each below the tiles


def write_sheet(path: Path, titles: Sequence[str], rows: Sequence[Row], legend: str = "") -> Path:
    """A table of tiles, a title above every column."""
    heights = [TILE + GAP + NOTE * len(row.notes) for row in rows]
    width = SIDE + len(titles) * (TILE + GAP)
    sheet = Image.new("RGB", (width, HEADER + sum(heights)), "white")
    draw, title, label = ImageDraw.Draw(sheet), ImageFont.load_default(16), ImageFont.load_default(13)
    draw.text((12, 22), legend, "black", label, "lm")
    for column, text in enumerate(titles):
        draw.text((SIDE + column * (TILE + GAP) + TILE / 2, HEADER - 12), text, "black", title, "ms")
    y = HEADER
    for row, height in zip(rows, heights, strict=True):
        draw.multiline_text((12, y + TILE / 2), row.name, WRONG if row.notes else "black", title, "lm")
        for column, tile in enumerate(row.tiles):
            sheet.paste(_square(tile), (SIDE + column * (TILE + GAP), y))
        for number, text in enumerate(row.notes):
            while draw.textlength(text, label) > width - SIDE - 12:
                text = text[:-4] + "..."
            draw.text((SIDE, y + TILE + NOTE * (number + 0.5)), text, WRONG, label, "lm")
        y += height
    with written_whole(path) as temporary:
        sheet.save(temporary, format="PNG")
    return path


def _square(tile: Tile) -> Image.Image:
    """The picture in the middle of a square, its caption in a corner."""
    image = Image.fromarray(np.ascontiguousarray(tile.image))
    scale = TILE / max(image.size)
    image = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.BICUBIC)
    square = Image.new("RGB", (TILE, TILE), (235, 235, 235))
    square.paste(image, ((TILE - image.width) // 2, (TILE - image.height) // 2))
    if tile.caption:
        draw, font = ImageDraw.Draw(square), ImageFont.load_default(13)
        box = draw.textbbox((6, TILE - 6), tile.caption, font, "ls")
        draw.rectangle((box[0] - 4, box[1] - 3, box[2] + 4, box[3] + 3), "black")
        draw.text((6, TILE - 6), tile.caption, "white", font, "ls")
    return square


def masked(frame: Frame) -> Tile:
    """RGB with the visible object tinted and everything else faded."""
    grey = frame.rgb.mean(axis=2, keepdims=True) * 0.5 + 96
    image = np.where(frame.mask[..., None], 0.45 * frame.rgb + 0.55 * MASK_COLOUR, grey)
    return Tile(image.astype(np.uint8), f"{int(frame.mask.sum())} px")


def shaded(frame: Frame) -> Tile:
    """Depth: near is light, in even steps of 1 / depth; blue where nothing returned."""
    seen = np.isfinite(frame.depth) & (frame.depth > 0)
    near, far = np.percentile(frame.depth[seen], [2, 98]) if seen.any() else (1.0, 1.0)
    far = max(far, near + 1e-3)
    inverse = 1 / np.where(seen, frame.depth, far)
    grey = 40 + 215 * np.clip((inverse - 1 / far) / (1 / near - 1 / far), 0, 1)
    picture = np.repeat(grey[..., None], 3, axis=2)
    picture[~seen] = (30, 40, 120)
    return Tile(picture.astype(np.uint8), f"median {np.median(frame.depth[seen]):.4g} m" if seen.any() else "no depth")


def moments(demonstration: Demonstration) -> tuple[int, int]:
    """A frame halfway through the object's motion and the last one."""
    q = demonstration.joint
    return int(np.argmin(np.abs(q - (q[0] + q[-1]) / 2))), len(q) - 1


def write_contact_sheet(store: Store, path: Path) -> Path:
    """Up to eight pairs of one store: the shared start, middle and end of both tasks."""
    chosen = np.unique(np.linspace(0, len(store) - 1, min(MAX_ROWS, len(store))).round().astype(int))
    titles = ["start" if len(store.tasks) == 1 else "shared start", "mask", "depth"]
    titles += [f"{task}: {when}" for task in store.tasks for when in ("halfway", "end")]
    rows = []
    for pair in chosen:
        demonstrations = [store.demonstration(int(pair), task) for task in store.tasks]
        start, u = demonstrations[0].frame(0), demonstrations[0].u
        tiles = [Tile(start.rgb), masked(start), shaded(start)]
        for d in demonstrations:
            ts = moments(d)
            frames = zip(ts, d.frames(ts), strict=True)
            tiles += [Tile(frame.rgb, f"step {t}, joint {d.joint[t]:.2f}") for t, frame in frames]
        rows.append(Row(f"pair {pair}\nu = ({u[0]:.2f}, {u[1]:.2f})", tiles))
    return write_sheet(path, titles, rows)


def write_gallery(stores: Sequence[Store], path: Path) -> Path:
    """One row per world: the shared start, what the mask is, and both ends."""
    rows = []
    for store in stores:
        both = [store.demonstration(0, task) for task in store.tasks]
        start = both[0].frame(0)
        ends = [Tile(d.frame(len(d) - 1).rgb, d.task) for d in both]
        rows.append(Row(store.world, [Tile(start.rgb), masked(start), *ends]))
    return write_sheet(path, ["shared start", "mask", "one task", "the other"], rows)
