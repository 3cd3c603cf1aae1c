"""Appendix "Correspondence, Lifting, and Fallback": crops, sampling, lifting and every validity rule."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from memcorr.correspondence.lift import (
    Crop,
    choose_pixels,
    crop_object,
    lift_query,
    match_frames,
    prepare_references,
    relief,
    sample_depth,
)
from memcorr.correspondence.matcher import Matcher, load_matcher, sample_bilinear, weights_digest
from memcorr.correspondence.matches import Matches, ground_truth_matches, residuals
from memcorr.correspondence.rigid import carried
from memcorr.demos.store import Store
from memcorr.errors import UserError
from memcorr.frames import Frame
from memcorr.spec import Array, Task
from memcorr.worlds.pairs import HANDLE_POINTS
from memcorr.worlds.scenes import Scene
from memcorr.worlds.world import World


class Fixed(Matcher):
    """A matcher that answers what it is told for sixteen points, in original query pixels, and nothing for others."""

    name = "fixed"

    def __init__(self, uv: Array, query: Frame) -> None:
        self.uv, self.crop = uv, crop_object(query)

    def encode(self, crops: NDArray[np.uint8]) -> list[Any]:
        return [None] * len(crops)

    def match(
        self, references: list[Any], pixels: NDArray[np.floating], queries: NDArray[np.uint8]
    ) -> tuple[Array, Array]:
        uv = np.full(pixels.shape, np.nan)
        uv[:, :16] = self.crop.from_original(self.uv)
        return uv, np.full(uv.shape[:-1], 1.7)


@pytest.fixture(scope="module")
def frame(store: Store) -> Frame:
    return store.demonstration(0, "open").frame(0)


def matched(reference: Frame, query: Frame, uv: Array) -> Matches:
    matcher = Fixed(uv, query)
    return match_frames(matcher, prepare_references(matcher, [reference]), [query])


def perfect(reference: Frame) -> Array:
    return choose_pixels(reference.mask)[0].astype(float)


def test_crop_is_the_padded_clipped_box(frame: Frame) -> None:
    mask = np.zeros((128, 128), bool)
    mask[5:8, 100:126] = True  # near the top and the right border
    crop = crop_object(replace(frame, mask=mask))
    assert (crop.left, crop.top) == (88, 0)
    assert (crop.left + crop.width - 1, crop.top + crop.height - 1) == (127, 7 + 12)
    assert crop.rgb.shape == (128, 128, 3)


def test_crop_coordinates_use_pixel_centres() -> None:
    crop = Crop(10, 20, 64, 32, np.zeros((128, 128, 3), np.uint8))
    # The outer edge of the first pixel stays the outer edge: -0.5 -> left - 0.5.
    np.testing.assert_allclose(crop.to_original(np.array([-0.5, -0.5])), [9.5, 19.5])
    np.testing.assert_allclose(crop.to_original(np.array([127.5, 127.5])), [10 + 64 - 0.5, 20 + 32 - 0.5])
    uv = np.random.default_rng(0).uniform(0, 127, (50, 2))
    np.testing.assert_allclose(crop.from_original(crop.to_original(uv)), uv, atol=1e-12)


def test_sixteen_pixels_evenly_spaced_in_row_major_order() -> None:
    mask = np.zeros((128, 128), bool)
    mask[3, 10:20] = mask[4, 5:16] = True  # 21 pixels
    uv, real = choose_pixels(mask)
    order = [(x, 3) for x in range(10, 20)] + [(x, 4) for x in range(5, 16)]
    assert [tuple(p) for p in uv] == [order[round(i * 20 / 15)] for i in range(16)]
    assert real.all()


def test_three_pixels_repeat_the_last_and_mark_it() -> None:
    mask = np.zeros((128, 128), bool)
    mask[50, 60:63] = True
    uv, real = choose_pixels(mask)
    assert [tuple(p) for p in uv[:4]] == [(60, 50), (61, 50), (62, 50), (62, 50)]
    assert real.sum() == 3 and real[:3].all()


def test_identical_frames_match_everywhere(frame: Frame) -> None:
    matches = matched(frame, frame, perfect(frame))
    assert matches.valid.all()
    np.testing.assert_allclose(matches.p_live, matches.p_ref, atol=1e-9)
    assert (matches.confidence == 1.0).all()  # clipped, not thresholded


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"mask": np.zeros((128, 128), bool)}, "none"),  # a query without the object
        ({"depth": np.full((128, 128), np.nan, np.float32)}, "none"),
        ({"depth": np.zeros((128, 128), np.float32)}, "none"),
        ({"depth": np.full((128, 128), np.inf, np.float32)}, "none"),
        ({"depth": np.full((128, 128), -1.0, np.float32)}, "none"),
        ({"mask": np.ones((128, 128), bool)}, "all"),  # touches every border
    ],
)
@pytest.mark.parametrize("side", ["reference", "query"])
def test_bad_frames_are_invalid_never_an_exception(
    frame: Frame, change: dict[str, NDArray], expected: str, side: str
) -> None:
    changed = replace(frame, **change)  # type: ignore[arg-type]
    reference, query = (changed, frame) if side == "reference" else (frame, changed)
    matches = matched(reference, query, perfect(frame))
    for array in (matches.p_ref, matches.p_live, matches.confidence):
        assert np.isfinite(array).all()
    if expected == "none":
        assert not matches.valid.any()
        assert (matches.confidence == 0).all()
    elif side == "query":
        assert matches.valid.all()


def test_answers_out_of_range_or_off_the_object_are_invalid(frame: Frame) -> None:
    uv = perfect(frame)
    uv[0] = np.nan
    uv[1] = [-3, 50]
    uv[2] = [np.inf, 5]
    uv[3] = [127.6, 64]
    uv[4] = [2, 2]  # in the image, not on the door
    matches = matched(frame, frame, uv)
    np.testing.assert_array_equal(matches.valid[0], np.arange(16) >= 5)
    assert np.isfinite(matches.p_live).all()


def test_mask_membership_is_the_nearest_pixel(frame: Frame) -> None:
    row = int(np.nonzero(frame.mask.any(axis=1))[0][8])
    right = int(np.nonzero(frame.mask[row])[0].max())
    crop = crop_object(frame)
    _, valid = lift_query(frame, crop, crop.from_original(np.array([[right + 0.49, row], [right + 0.51, row]])))
    assert valid.tolist() == [True, False]


def test_depth_of_the_paper_and_of_the_object(frame: Frame) -> None:
    """Beyond the outline the paper's bilinear depth blends in the background; ours does not."""
    depth = np.full((128, 128), 3.0, np.float32)
    depth[:, :64] = 1.0
    wall = replace(frame, depth=depth, mask=depth == 1.0)
    uv = np.array([[63.25, 10.0], [40.5, 7.25]])
    np.testing.assert_allclose(sample_depth(wall, uv, "paper"), [1.5, 1.0])
    np.testing.assert_allclose(sample_depth(wall, uv, "object"), [1.0, 1.0])


def test_bilinear_sampling_has_border_padding() -> None:
    field = np.arange(12.0).reshape(3, 4)
    uv = np.array([[0.5, 0.0], [1.25, 1.5], [-5.0, 0.0], [9.0, 9.0]])
    np.testing.assert_allclose(sample_bilinear(field, uv), [0.5, 1.25 + 6.0, 0.0, 11.0])


def test_ground_truth_recovers_a_known_displacement(world: World) -> None:
    poses = []
    for u, joint in (((0.2, 0.8), -0.7854), ((0.7, 0.3), -1.2)):
        world.reset(Scene("camera", 0, 0, u))
        world.set_joint(joint)
        poses.append(world.T_world_object)
    matches = ground_truth_matches(HANDLE_POINTS, poses[0], poses[1])
    hinge = [np.array([0.01 * 10 * u[0] - 0.185, 0.85 + 0.1 * u[1] - 0.1, 0.15]) for u in ((0.2, 0.8), (0.7, 0.3))]
    for side, joint, p in ((0, -0.7854, matches.p_ref), (1, -1.2, matches.p_live)):
        c, s = np.cos(joint), np.sin(joint)
        literal = HANDLE_POINTS @ np.array([[c, -s, 0], [s, c, 0], [0, 0, 1]]).T + hinge[side]
        np.testing.assert_allclose(p, literal, atol=1e-9)
    np.testing.assert_allclose(residuals(matches, poses[0], poses[1]), 0, atol=1e-9)
    off = replace(matches, p_live=matches.p_live + np.array([0.0, 0.003, 0.0]))
    np.testing.assert_allclose(np.linalg.norm(residuals(off, poses[0], poses[1]), axis=-1), 0.003)


def test_transform_applies_batches() -> None:
    T = np.stack([np.eye(4), np.diag([2.0, 2, 2, 1])])
    T[1, :3, 3] = 1
    p = np.ones((2, 5, 3))
    np.testing.assert_allclose(carried(T, p)[:, 0], [[1, 1, 1], [3, 3, 3]])


@pytest.mark.parametrize("name", ["flow", "embedded"])
@pytest.mark.parametrize("task", ["open", "close"])
def test_identical_images_give_the_identity(name: str, task: Task, store: Store) -> None:
    matcher = load_matcher(name)
    for frame in store.demonstration(0, task).frames([0, 60, 120]):
        crop = crop_object(frame)
        uv = crop.from_original(perfect(frame))[None]
        located, confidence = matcher.match(matcher.encode(crop.rgb[None]), uv, crop.rgb[None])
        assert confidence.min() >= 0 and confidence.max() <= 1
        assert np.linalg.norm(located - uv, axis=-1).max() < 0.3  # crop pixels; 0.25 on most processors


def test_relief_is_the_depth_range_of_the_object_alone(frame: Frame) -> None:
    depth = np.full((128, 128), 1.0, np.float32)
    depth[:, 64:] = 1.2
    mask = np.ones((128, 128), bool)
    mask[:, 80:] = False
    depth[:, 80:] = 9.0
    depth[5, 5] = np.nan
    step = replace(frame, depth=depth, mask=mask)
    uv = np.array([[40.0, 40.0], [63.4, 40.0], [62.6, 40.0], [62.4, 40.0], [79.0, 40.0], [5.0, 5.0], [100.0, 9.0]])
    expected = [[0.0, 0.0], [0.2, 0.2], [0.0, 0.2], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]]
    np.testing.assert_allclose(relief(step, uv), expected, atol=1e-6)
    assert np.isfinite(relief(step, np.array([[np.nan, np.inf], [-7.0, 900.0]]))).all()


def test_unknown_matcher() -> None:
    with pytest.raises(UserError, match="choose one of embedded"):
        load_matcher("telepathy")


OWN = """
import memcorr

class Mine(memcorr.Matcher):
    name = "mine"
    def encode(self, crops): return list(crops)
    def match(self, references, pixels, queries): return pixels, 1.0 + 0 * pixels[..., 0]

class Half:
    def encode(self, crops): return list(crops)
"""


def test_a_matcher_of_ones_own_is_named_by_its_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MODULE:CLASS, from the working directory; rows tell its code apart by a digest."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_matcher_of_a_test.py").write_text(OWN)
    name = "own_matcher_of_a_test:Mine"
    matcher = load_matcher(name)
    pixels = np.array([[[3.0, 4.0]]])
    located, confidence = matcher.match(
        matcher.encode(np.zeros((1, 128, 128, 3), np.uint8)), pixels, np.zeros((1, 128, 128, 3), np.uint8)
    )
    assert (located == pixels).all() and confidence.item() == 1.0 and matcher.abstains_below == 0.0
    assert len(weights_digest(name)) == 12 and str(tmp_path) not in sys.path
    for wrong, said in (
        ("own_matcher_of_a_test:Half", "no method match; derive it from memcorr.Matcher"),
        ("own_matcher_of_a_test:Nobody", "has no Nobody"),
        ("no_such_module:Mine", "No module named"),
        ("mine.py:Mine()", "give MODULE:CLASS"),
    ):
        with pytest.raises(UserError, match=re.escape(said)):
            load_matcher(wrong)


def test_holes_in_the_depth_do_not_pull_points_towards_the_camera(world: World) -> None:
    """Beside a pixel without return, depth comes from neighbours that have one; among such pixels, from nowhere."""
    world.reset(Scene("camera", 0, 0, (0.5, 0.5)))
    frame = world.observe()
    rows, columns = np.nonzero(frame.mask)
    centre = np.array([[columns[len(rows) // 2] + 0.4, rows[len(rows) // 2] + 0.0]])
    u, v = centre[0].astype(int)
    whole = sample_depth(frame, centre, "object")[0]
    for nothing in (0.0, np.nan):
        depth = frame.depth.copy()
        depth[v, u + 1] = nothing
        assert sample_depth(replace(frame, depth=depth), centre, "object")[0] == pytest.approx(whole, abs=0.02)
        depth[v : v + 2, u : u + 2] = nothing
        assert not sample_depth(replace(frame, depth=depth), centre, "object")[0] > 0
