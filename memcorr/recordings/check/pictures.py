"""The page that shows what a check saw: colour with the projected gripper, depth, mask, at three moments each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from ...demos.store import Demonstration
from ...frames import Frame
from ...runs import written_whole
from .evidence import Finding, returned

TILE, GAP, HEADER, SIDE, NOTE = 176, 6, 64, 168, 22  # pixels
MOST = 8  # demonstrations on a page, those with findings first
MASK, HAND, BAD = (60, 220, 120), (255, 40, 160), (200, 30, 30)


def write_pictures(present: Sequence[Demonstration], findings: Sequence[Finding], path: Path) -> Path:
    faults = {d.name: [f for f in findings if f.demonstration == d.name] for d in present}
    shown = sorted(present, key=lambda d: (not faults[d.name], present.index(d)))[:MOST]
    heights = [TILE + NOTE * len(faults[d.name]) + GAP for d in shown]
    width = SIDE + 7 * (TILE + GAP)
    page = Image.new("RGB", (width, HEADER + sum(heights)), "white")
    draw = ImageDraw.Draw(page)
    title, label = ImageFont.load_default(16), ImageFont.load_default(13)
    groups = [("colour and gripper: first", "halfway", "last"), ("depth: first", "last"), ("mask: first", "last")]
    for column, text in enumerate(text for group in groups for text in group):
        draw.text((SIDE + column * (TILE + GAP) + TILE / 2, HEADER - 12), text, "black", title, "ms")
    draw.text((12, 22), "cross: the gripper, projected; green: mask; blue in depth: no return", "black", label, "lm")
    y = HEADER
    for demonstration, height in zip(shown, heights, strict=True):
        wrong = faults[demonstration.name]
        colour = BAD if wrong else "black"
        draw.multiline_text(
            (12, y + TILE / 2),
            demonstration.name.replace(f"-{demonstration.task}", f"\n{demonstration.task}"),
            colour,
            title,
            "lm",
        )
        for column, tile in enumerate(tiles(demonstration)):
            page.paste(tile, (SIDE + column * (TILE + GAP), y))
        for number, finding in enumerate(wrong):
            text = f"{finding.field}: {finding.wrong}"
            while draw.textlength(text, label) > width - SIDE - 12:
                text = text[:-4] + "..."
            draw.text((SIDE, y + TILE + NOTE * (number + 0.5)), text, BAD, label, "lm")
        y += height
    with written_whole(path) as temporary:
        page.save(temporary, format="PNG")
    return path


def tiles(demonstration: Demonstration) -> list[Image.Image]:
    try:
        frames = demonstration.frames((0, len(demonstration) // 2, len(demonstration) - 1))
        first, _, last = frames
        near_far = depth_range([first.depth, last.depth])
        made = [with_gripper(frame) for frame in frames]
        made += [fitted(shaded(f.depth, *near_far), f"median {np.median(some(f.depth)):.4g} m") for f in (first, last)]
        return made + [fitted(masked(f), f"{int(f.mask.sum())} px") for f in (first, last)]
    except (ValueError, TypeError, IndexError, KeyError):  # a field of the wrong shape: the findings say which
        return [fitted(np.full((64, 64, 3), 230, np.uint8), "cannot be shown")]


def some(depth: NDArray[np.floating]) -> NDArray[np.floating]:
    seen = depth[returned(depth)]
    return seen if seen.size else np.zeros(1)


def depth_range(depths: Sequence[NDArray[np.floating]]) -> tuple[float, float]:
    near, far = np.percentile(np.concatenate([some(d) for d in depths]), [2, 98])
    return float(near), float(max(far, near + 1e-3))


def shaded(depth: NDArray[np.floating], near: float, far: float) -> NDArray[np.uint8]:
    """Near is light, even steps of 1 / depth; blue where nothing returned."""
    seen = returned(depth)
    inverse = 1 / np.where(seen, depth, far)
    grey = 40 + 215 * np.clip((inverse - 1 / far) / (1 / near - 1 / far), 0, 1)
    picture = np.repeat(grey[..., None], 3, axis=2)
    picture[~seen] = (30, 40, 120)
    return picture.astype(np.uint8)


def masked(frame: Frame) -> NDArray[np.uint8]:
    grey = frame.rgb.mean(axis=2, keepdims=True) * 0.5 + 96
    return np.where(frame.mask[..., None], 0.45 * frame.rgb + 0.55 * np.array(MASK), grey).astype(np.uint8)


def with_gripper(frame: Frame) -> Image.Image:
    """A cross where the gripper projects to, or a word on where it is instead."""
    height, width = frame.rgb.shape[:2]
    with np.errstate(all="ignore"):
        uv, z = frame.camera.project(frame.gripper)
    inside = z > 0 and 0 <= uv[0] <= width - 1 and 0 <= uv[1] <= height - 1
    where = "" if inside else "gripper behind the camera" if not z > 0 else "gripper outside"
    tile = fitted(frame.rgb, where)
    if inside:
        scale = TILE / max(height, width)
        x, y = (uv + 0.5) * scale + [(TILE - width * scale) / 2, (TILE - height * scale) / 2]
        draw = ImageDraw.Draw(tile)
        for thickness, colour in ((5, "white"), (2, HAND)):
            draw.line((x - 9, y, x + 9, y), colour, thickness)
            draw.line((x, y - 9, x, y + 9), colour, thickness)
    return tile


def fitted(picture: NDArray[np.uint8], caption: str = "") -> Image.Image:
    """The picture in a square tile, its shape kept, with a caption."""
    image = Image.fromarray(np.ascontiguousarray(picture))
    scale = TILE / max(image.size)
    image = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.BICUBIC)
    tile = Image.new("RGB", (TILE, TILE), (235, 235, 235))
    tile.paste(image, ((TILE - image.width) // 2, (TILE - image.height) // 2))
    if caption:
        draw, font = ImageDraw.Draw(tile), ImageFont.load_default(13)
        box = draw.textbbox((6, TILE - 6), caption, font, "ls")
        draw.rectangle((box[0] - 4, box[1] - 3, box[2] + 4, box[3] + 3), "black")
        draw.text((6, TILE - 6), caption, "white", font, "ls")
    return tile
