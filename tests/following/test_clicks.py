"""Masks by clicking: from depth, colour and what the recording shows later; shown before anything is drawn with it."""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest
from PIL import Image

from memcorr.cli import main
from memcorr.demos.store import Store
from memcorr.errors import UserError
from memcorr.following.clicks import LOOKS, clicked_mask, show_clicks
from memcorr.following.masks import MatcherSegmenter, overlap
from memcorr.frames import Frame

Point = tuple[int, int]


@pytest.fixture(scope="module")
def looks(store: Store) -> list[Frame]:
    d = store.demonstration(0, "open")
    return [
        dataclasses.replace(f, mask=np.zeros_like(f.mask))
        for f in d.frames([round(t) for t in np.linspace(0, len(d) - 1, LOOKS)])
    ]


def innermost(mask: np.ndarray) -> Point:
    depth = cv2.distanceTransform(np.pad(mask, 1).astype(np.uint8), cv2.DIST_L2, 5)[1:-1, 1:-1]
    v, u = np.unravel_index(depth.argmax(), depth.shape)
    return int(u), int(v)


def iou(a: np.ndarray, b: np.ndarray) -> float:
    return float(overlap(a[None], b[None])[0])


def test_one_click_finds_most_of_a_door_and_a_second_one_mends_it(store: Store, looks: list[Frame]) -> None:
    truth = store.demonstration(0, "open").frame(0).mask
    click = innermost(truth)
    first = clicked_mask(looks, [click])
    assert iou(first, truth) > 0.6
    second = clicked_mask(looks, [click, innermost(truth & ~first)])
    assert iou(second, truth) > max(0.85, iou(first, truth))
    # The recording is what tells the door from the box it hangs on, of the same colour.
    alone = clicked_mask(looks[:1], [click])
    assert iou(alone, truth) < iou(first, truth)


def test_a_click_beside_the_object_takes_away(store: Store, looks: list[Frame]) -> None:
    truth = store.demonstration(0, "open").frame(0).mask
    click = innermost(truth)
    kept = clicked_mask(looks, [click])
    u, v = innermost(kept & (np.indices(kept.shape)[0] < click[1] - 10))
    less = clicked_mask(looks, [click], [(u, v)])
    assert kept[v, u] and not less[v, u] and less[click[1], click[0]] and less.sum() < kept.sum()


def test_without_depth_colour_alone_is_asked(store: Store, looks: list[Frame]) -> None:
    blind = [dataclasses.replace(frame, depth=np.zeros_like(frame.depth)) for frame in looks]
    truth = store.demonstration(0, "open").frame(0).mask
    u, v = innermost(truth)
    found = clicked_mask(blind, [(u, v)])
    assert found[v, u] and 20 < found.sum() < truth.size / 3


def digests(root: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in root.glob("*.*")}


def test_a_clicked_mask_is_shown_and_nothing_is_drawn_until_it_is_used(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "mine"
    shutil.copytree(store.root, root)
    before = digests(root)
    u, v = innermost(store.demonstration(0, "open").frame(0).mask)
    line = ["memcorr", "data", "mask", str(root), "--click", str(u), str(v), "--of", "pair-000-open"]
    monkeypatch.setattr(sys, "argv", line)
    main()
    assert digests(root) == before and "look at" in capsys.readouterr().out
    with (
        Image.open(root / "first-masks/pair-000-open.png") as drawn,
        Image.open(root / "first-masks/look/pair-000-open.png") as shown,
    ):
        assert drawn.size == (128, 128) and np.asarray(drawn.convert("L"))[v, u] == 255
        assert shown.size == (640, 640) and shown.mode == "RGB"


def test_what_cannot_be_clicked_is_one_line(store: Store, tmp_path: Path) -> None:
    segmenter = MatcherSegmenter()
    for of, click, words in (
        (None, (3, 3), "holds 4 recordings; say with --of which: pair-000-open"),
        ("pair-9", (3, 3), "--of pair-9"),
        ("pair-000-open", (128, 3), "128 3 is outside the picture: column 0 to 127"),
    ):
        with pytest.raises(UserError, match=words):
            show_clicks(store, segmenter, of, [click], [], tmp_path / "out")
    assert not (tmp_path / "out").exists()
