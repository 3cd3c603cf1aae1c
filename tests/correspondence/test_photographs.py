"""Real photographs: the same pairs for the same seed, and correspondences that are true."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from memcorr.correspondence.flow import FlowMatcher
from memcorr.correspondence.photographs import views
from memcorr.correspondence.photographs.evaluate import evaluate, measure_photographs, present
from memcorr.correspondence.photographs.views import PICTURES, SETTINGS, PhotoPair, pairs
from memcorr.errors import UserError
from memcorr.spec import Array

needs_pictures = pytest.mark.skipif(find_spec("skimage") is None, reason=f"not installed: {views.INSTALL}")


class Truth(FlowMatcher):
    """Knows one pair, and misses it by a pixel to the right."""

    def __init__(self, pair: PhotoPair) -> None:
        self.pair = pair

    def match(self, references: list, pixels: NDArray, queries: NDArray[np.uint8]) -> tuple[Array, Array]:
        return self.pair.truth[None] + [1.0, 0.0], np.ones((1, len(self.pair.truth)))


def test_missing_pictures_name_the_install_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(views, "find_spec", lambda _: None)
    views.folder.cache_clear()
    with pytest.raises(UserError, match=r"pip install 'memcorr\[photographs\]'"):
        list(measure_photographs((), "flow", 0, tmp_path / "out"))
    assert not (tmp_path / "out").exists()


@needs_pictures
@pytest.mark.parametrize("setting", SETTINGS)
def test_pairs_depend_on_the_seed_alone(setting: str) -> None:
    first, again, other = (next(pairs(setting, seed, 1)) for seed in (3, 3, 4))
    np.testing.assert_array_equal(first.query, again.query)
    np.testing.assert_array_equal(first.truth, again.truth)
    assert not np.array_equal(first.query, other.query)


@needs_pictures
@pytest.mark.parametrize("setting", SETTINGS)
def test_both_views_show_the_same_where_they_correspond(setting: str) -> None:
    """In grey, after light and noise: much more alike than at places chosen at random."""
    alike, chance = [], []
    rng = np.random.default_rng(0)
    for pair in pairs(setting, 0, 1):
        grey = [x.astype(float).mean(axis=-1) for x in (pair.reference, pair.query)]
        at = [np.clip(np.rint(uv), 0, 127).astype(int) for uv in (pair.pixels, pair.truth)]
        a, b = (g[uv[:, 1], uv[:, 0]] for g, uv in zip(grey, at, strict=True))
        alike.append(np.corrcoef(a, b)[0, 1])
        chance.append(np.corrcoef(a, rng.permutation(b))[0, 1])
    assert np.median(alike) > 0.7 > 0.3 > np.median(np.abs(chance))


@needs_pictures
def test_errors_are_counted_in_pixels_and_in_millimetres() -> None:
    pair = next(pairs("stereo", 0, 1))
    table = evaluate(Truth(pair), [pair])
    assert table["within_1px"] == 0 and table["within_2px"] == 1 and table["median_px"] == 1
    assert 0.5 < table["median_mm"] < 30  # one to two pixels of the photograph, a few metres away
    assert pair.lifted_error is not None
    assert np.nanmax(pair.lifted_error(pair.truth)) < 0.14  # within a pixel of disparity


@needs_pictures
def test_tables_are_kept_and_the_same_again(tmp_path: Path) -> None:
    first = list(measure_photographs(("mild",), "flow", 0, tmp_path, count=1))
    assert first == list(measure_photographs(("mild",), "flow", 0, tmp_path, count=1))
    assert present(tmp_path / "photographs.json") == first
    assert first[0]["pairs"] == len(PICTURES)
    with pytest.raises(UserError, match="unknown setting 'combined': choose from mild, strong, stereo"):
        list(measure_photographs(("combined",), "flow", 0, tmp_path))
