"""A page to look at: some configurations with start, middle and end of both tasks."""

from __future__ import annotations

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
DEPTH_RANGE = (0.6, 1.8)  # metres shown from light to dark


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
    rows = np.unique(np.linspace(0, len(store) - 1, min(MAX_ROWS, len(store))).round().astype(int))
    titles = [
        "shared start",
        "mask",
        "depth",
        *(f"{task}: {when}" for task in store.tasks for when in ("halfway", "end")),
    ]
    width = SIDE + len(titles) * (TILE + GAP)
    sheet = Image.new("RGB", (width, HEADER + len(rows) * (TILE + GAP)), "white")
    draw = ImageDraw.Draw(sheet)
    title, label = ImageFont.load_default(18), ImageFont.load_default(14)
    for column, text in enumerate(titles):
        x = SIDE + column * (TILE + GAP) + TILE / 2
        draw.text((x, HEADER - 14), text, fill="black", font=title, anchor="ms")
    for row, pair in enumerate(rows):
        y = HEADER + row * (TILE + GAP)
        demonstrations = [store.demonstration(int(pair), task) for task in store.tasks]
        start = demonstrations[0].frame(0)
        tiles = [start.rgb, masked(start), shaded(start)]
        captions = ["", f"{int(start.mask.sum())} px", f"{start.depth[start.mask].mean():.2f} m"]
        for demonstration in demonstrations:
            ts = moments(demonstration)
            tiles += [frame.rgb for frame in demonstration.frames(ts)]
            captions += [f"step {t}, {demonstration.joint[t]:.2f}" for t in ts]
        u = demonstrations[0].u
        draw.multiline_text(
            (12, y + TILE / 2), f"pair {pair}\nu = ({u[0]:.2f}, {u[1]:.2f})", fill="black", font=label, anchor="lm"
        )
        for column, (tile, caption) in enumerate(zip(tiles, captions, strict=True)):
            x = SIDE + column * (TILE + GAP)
            sheet.paste(Image.fromarray(tile).resize((TILE, TILE), Image.Resampling.BICUBIC), (x, y))
            if caption:
                box = draw.textbbox((x + 6, y + TILE - 6), caption, font=label, anchor="ls")
                draw.rectangle((box[0] - 4, box[1] - 3, box[2] + 4, box[3] + 3), fill="black")
                draw.text((x + 6, y + TILE - 6), caption, fill="white", font=label, anchor="ls")
    with written_whole(path) as temporary:
        sheet.save(temporary, format="PNG")
    return path
