"""Masks from one that was drawn on the first frame: carried by the matcher, or by SAM 2."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from memcorr.demos.store import LAYOUT, Demonstration, Store, read_demonstration, write_demonstration
from memcorr.errors import UserError
from memcorr.files import write_json
from memcorr.following.masks import (
    MatcherSegmenter,
    Segmenter,
    Tracked,
    draw_masks,
    first_mask,
    load_segmenter,
    overlap,
)
from memcorr.frames import Frame
from tests.test_files import damaged, quick, write_small
from tests.test_folders import taken

SPAN = range(48, 84, 2)  # the door is pulled open by a good part


@pytest.fixture(scope="module")
def film(store: Store) -> list[Frame]:
    return store.demonstration(0, "open").frames(SPAN)


def without_masks(frames: list[Frame]) -> list[Frame]:
    return [dataclasses.replace(frame, mask=np.zeros_like(frame.mask)) for frame in frames]


def write(root: Path, d: Demonstration, frames: list[Frame], action: np.ndarray) -> Store:
    root.mkdir()
    nowhere = (float("nan"), float("nan"))
    write_demonstration(
        root / "pair-000-open.h5", frames, action, None, None, pair=0, task="open", u=nowhere, world="mine"
    )
    write_json(root / "collection.json", {"layout": LAYOUT, "pairs": 1, "world": "mine", "tasks": ["open"]})
    return Store.open(root)


def test_a_mask_is_carried_along_with_the_object(film: list[Frame]) -> None:
    truth = np.stack([frame.mask for frame in film])
    masks = MatcherSegmenter().segment(without_masks(film), truth[0])
    still = overlap(np.repeat(truth[:1], len(film), 0), truth)
    carried = overlap(masks, truth)
    assert np.array_equal(masks[0], truth[0]) and masks.shape == truth.shape
    assert carried.mean() > 0.75 and carried.min() > 0.5, carried.round(2)
    assert carried[-1] > still[-1] + 0.2, (carried[-1], still[-1])  # the door is not where it was


def test_looks_of_a_robot_carry_it_too(film: list[Frame]) -> None:
    """Every eighth step, as a policy looks."""
    tracked = Tracked(MatcherSegmenter().matcher, film[0], film[0].mask)
    for frame in without_masks(film)[4::4]:
        mask = tracked.look(frame)
    last = film[4::4][-1].mask
    assert overlap(mask[None], last[None])[0] > 0.5


def test_holes_and_noise_in_depth_do_not_lose_it(film: list[Frame]) -> None:
    from memcorr.evaluation.sensors import noisy, with_holes

    rng = np.random.default_rng(0)
    poor = [dataclasses.replace(f, depth=with_holes(noisy(f.depth, 1.0, rng), 0.1, rng)) for f in without_masks(film)]
    masks = MatcherSegmenter().segment(poor, film[0].mask)
    assert overlap(masks, np.stack([f.mask for f in film])).mean() > 0.65


def test_nothing_to_carry_stays_nothing(film: list[Frame]) -> None:
    blind = [dataclasses.replace(f, depth=np.zeros_like(f.depth)) for f in film[:3]]
    assert not MatcherSegmenter().segment(blind, film[0].mask)[1:].any()


def test_masks_are_drawn_into_a_store_once(store: Store, film: list[Frame], tmp_path: Path) -> None:
    d, few = store.demonstration(0, "open"), film[:6]
    root = tmp_path / "bare"
    bare = write(root, d, without_masks(few), d.action[: len(few)])
    segmenter = MatcherSegmenter()
    with pytest.raises(UserError, match="--first-masks"):  # nothing was drawn
        draw_masks(bare, segmenter, None)
    pictures = tmp_path / "first"
    pictures.mkdir()
    with pytest.raises(UserError, match=r"pair-000-open\.png is missing"):
        draw_masks(bare, segmenter, pictures)
    Image.fromarray(few[0].mask[:64]).save(pictures / "pair-000-open.png")
    with pytest.raises(UserError, match="128 x 64 pixels, the recording 128 x 128"):
        draw_masks(bare, segmenter, pictures)
    Image.fromarray(few[0].mask).save(pictures / "pair-000-open.png")
    assert draw_masks(bare, segmenter, pictures) == 1
    drawn = bare.demonstration(0, "open")
    assert np.array_equal(drawn.frame(0).mask, few[0].mask) and drawn.frame(5).mask.any()
    assert np.array_equal(drawn.frame(3).rgb, few[3].rgb) and np.array_equal(drawn.action, d.action[: len(few)])
    before = drawn.path.read_bytes()
    assert draw_masks(bare, segmenter, pictures) == 0 and drawn.path.read_bytes() == before
    assert draw_masks(bare, segmenter, None, again=True) == 1 and drawn.path.read_bytes() == before
    with pytest.raises(UserError, match="choose one of matcher, sam2"):
        load_segmenter("magic")
    with taken(root), pytest.raises(UserError, match="another memcorr"):  # who would clear away what is half-written
        draw_masks(bare, segmenter, None, again=True)


def test_a_damaged_drawing_is_one_line(tmp_path: Path) -> None:
    """Pillow raises what it likes: OSError, SyntaxError, ValueError."""
    path = tmp_path / "pair-000-open.png"
    d = read_demonstration(write_small(tmp_path / "pair-000-open.h5"))
    Image.fromarray(d.frame(0).mask).save(path)
    good = path.read_bytes()

    @quick
    @given(st.integers(0, 5), st.floats(0, 1), st.integers(0, 300))
    def check(how: int, where: float, what: int) -> None:
        path.write_bytes(damaged(good, how, where, what))
        with contextlib.suppress(UserError):
            first_mask(d, tmp_path)

    check()
    for at, kind in ((11, "ValueError"), (36, "SyntaxError"), (40, "UnidentifiedImageError")):  # sizes and a name
        path.write_bytes(good[:at] + bytes(1) + good[at + 1 :])
        with pytest.raises(UserError, match=rf"pair-000-open\.png is no picture \({kind}.*\); draw it again"):
            first_mask(d, tmp_path)


def test_sam2_follows_its_first_mask(film: list[Frame], tmp_path: Path) -> None:
    """A tiny network of the right shape with random weights: the path, not the quality."""
    transformers = pytest.importorskip("transformers")
    from transformers.models.sam2_video import configuration_sam2_video as video

    from memcorr.following.sam2 import Sam2Segmenter

    backbone = transformers.Sam2HieraDetConfig(
        hidden_size=16,
        image_size=[64, 64],
        blocks_per_stage=[1, 1, 2, 1],
        embed_dim_per_stage=[16, 32, 64, 128],
        num_attention_heads_per_stage=[1, 2, 4, 8],
        global_attention_blocks=[3],  # not the first of a stage, which pools within its windows
    )
    vision = transformers.Sam2VisionConfig(
        backbone_config=backbone,
        backbone_channel_list=[128, 64, 32, 16],
        backbone_feature_sizes=[[16, 16], [8, 8], [4, 4]],
        fpn_hidden_size=128,
    )
    config = transformers.Sam2VideoConfig(
        vision_config=vision,
        prompt_encoder_config=video.Sam2VideoPromptEncoderConfig(hidden_size=128, image_size=64, patch_size=16),
        mask_decoder_config=video.Sam2VideoMaskDecoderConfig(hidden_size=128, mlp_dim=32, iou_head_hidden_dim=32),
        image_size=64,
        memory_attention_hidden_size=128,
        memory_attention_feed_forward_hidden_size=32,
        memory_attention_rope_feat_sizes=[4, 4],
        memory_encoder_hidden_size=128,
        memory_encoder_output_channels=64,  # its attention takes no other, and twice that elsewhere
        mask_downsampler_embed_dim=128,
        memory_fuser_embed_dim=128,
        memory_fuser_intermediate_dim=32,
    )
    segmenter: Segmenter = Sam2Segmenter(model=transformers.Sam2VideoModel(config))
    masks = segmenter.segment(without_masks(film[:3]), film[0].mask)
    assert masks.shape == (3, 128, 128) and masks.dtype == bool and np.array_equal(masks[0], film[0].mask)
    clicked = segmenter.clicked(without_masks(film[:3]), [(60, 70), (64, 72)], [(5, 5)])
    assert clicked.shape == (128, 128) and clicked.dtype == bool
    with pytest.raises(UserError, match="no SAM 2 there"):
        Sam2Segmenter(str(tmp_path))
