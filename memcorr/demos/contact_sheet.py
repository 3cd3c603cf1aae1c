"""Pages to look at: some configurations of a store with start, middle and end of both tasks, and all worlds at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from ..frames import Frame
from ..runs import written_whole
from .store import Demonstration, Store

TILE, GAP, HEADER, SIDE = 192, 6, 56, 150
MAX_ROWS = 8
MASK_COLOUR = np.array([60, 220, 120])
DEPTH_RANGE = (0.4, 1.8)  # metres shown from light to dark


@dataclass(frozen=True)
class Tile:
    image: NDArray[np.uint8]
    caption: str = ""


def masked(frame: Frame) -> NDArray[np.uint8]:
    """RGB with the visible object tinted and everything else faded."""
    grey = frame.rgb.mean(axis=2, keepdims=True) * 0.5 + 96
    tinted = 0.45 * frame.rgb + 0.55 * MASK_COLOUR
    return np.where(frame.mask[..., None], tinted, grey).astype(np.uint8)


def shaded(frame: Frame) -> NDArray[np.uint8]:
    """Depth as grey: near is light."""
    near, far = DEPTH_RANGE
    grey = np.where(frame.depth > 0, np.clip((far - frame.depth) / (far - near), 0, 1) * 255, 0)
    return np.repeat(grey[..., None], 3, axis=2).astype(np.uint8)


def moments(demonstration: Demonstration) -> tuple[int, int]:
    """A frame halfway through the object's motion and the last one."""
    q = demonstration.joint
    return int(np.argmin(np.abs(q - (q[0] + q[-1]) / 2))), len(q) - 1


def write_contact_sheet(store: Store, path: Path) -> Path:
    """Up to eight pairs of one store."""
    chosen = np.unique(np.linspace(0, len(store) - 1, min(MAX_ROWS, len(store))).round().astype(int))
    titles = ["shared start", "mask", "depth"]
    titles += [f"{task}: {when}" for task in store.tasks for when in ("halfway", "end")]
    rows = []
    for pair in chosen:
        demonstrations = [store.demonstration(int(pair), task) for task in store.tasks]
        start = demonstrations[0].frame(0)
        tiles = [
            Tile(start.rgb),
            Tile(masked(start), f"{int(start.mask.sum())} px"),
            Tile(shaded(start), f"{start.depth[start.mask].mean():.2f} m"),
        ]
        for demonstration in demonstrations:
            ts = moments(demonstration)
            captions = [f"step {t}, joint {demonstration.joint[t]:.2f}" for t in ts]
            frames = demonstration.frames(ts)
            tiles += [Tile(frame.rgb, caption) for frame, caption in zip(frames, captions, strict=True)]
        u = demonstrations[0].u
        rows.append((f"pair {pair}\nu = ({u[0]:.2f}, {u[1]:.2f})", tiles))
    return _write(path, titles, rows)


def write_gallery(stores: Sequence[Store], path: Path) -> Path:
    """One row per world: the shared start, what the mask is, and both ends."""
    rows = []
    for store in stores:
        a, b = (store.demonstration(0, task) for task in store.tasks)
        start = a.frame(0)
        tiles = [Tile(start.rgb), Tile(masked(start), f"{int(start.mask.sum())} px")]
        tiles += [Tile(d.frame(len(d) - 1).rgb, d.task) for d in (a, b)]
        rows.append((store.world, tiles))
    half = -(-len(rows) // 2)  # two worlds side by side
    pairs = [(rows[i][0], rows[i][1], rows[i + half] if i + half < len(rows) else None) for i in range(half)]
    titles = ["shared start", "mask", "one task", "the other"]
    return _write(
        path,
        [*titles, *titles] if len(rows) > 1 else titles,
        [(name, [*tiles, *(other[1] if other else [])]) for name, tiles, other in pairs],
        [other[0] if other else "" for _, _, other in pairs],
    )


def _write(
    path: Path, titles: Sequence[str], rows: Sequence[tuple[str, list[Tile]]], names: Sequence[str] = ()
) -> Path:
    """A table of tiles; with `names` its right half is a second table with these row labels."""
    half = len(titles) // 2 if names else len(titles)
    left = [SIDE + (i * (TILE + GAP)) + (SIDE if i >= half else 0) for i in range(len(titles))]
    sheet = Image.new("RGB", (left[-1] + TILE + GAP, HEADER + len(rows) * (TILE + GAP)), "white")
    draw = ImageDraw.Draw(sheet)
    title, label = ImageFont.load_default(18), ImageFont.load_default(14)
    for x, text in zip(left, titles, strict=True):
        draw.text((x + TILE / 2, HEADER - 14), text, fill="black", font=title, anchor="ms")
    for row, (name, tiles) in enumerate(rows):
        y = HEADER + row * (TILE + GAP)
        draw.multiline_text((12, y + TILE / 2), name, fill="black", font=label if "\n" in name else title, anchor="lm")
        if names:
            draw.text((left[half] - SIDE + 12, y + TILE / 2), names[row], fill="black", font=title, anchor="lm")
        for x, tile in zip(left, tiles, strict=False):
            sheet.paste(Image.fromarray(tile.image).resize((TILE, TILE), Image.Resampling.BICUBIC), (x, y))
            if tile.caption:
                box = draw.textbbox((x + 6, y + TILE - 6), tile.caption, font=label, anchor="ls")
                draw.rectangle((box[0] - 4, box[1] - 3, box[2] + 4, box[3] + 3), fill="black")
                draw.text((x + 6, y + TILE - 6), tile.caption, fill="white", font=label, anchor="ls")
    with written_whole(path) as temporary:
        sheet.save(temporary, format="PNG")
    return path
