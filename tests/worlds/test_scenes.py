"""Table "Training and test distributions", row by row."""

from __future__ import annotations

import numpy as np
import pytest

from memcorr.errors import UserError
from memcorr.spec import SPEC, TestSet
from memcorr.worlds.pairs import find_pair
from memcorr.worlds.scenes import demonstration_scenes, evaluation_scenes

LO, HI = SPEC.band_train


def in_band(u: float, bands: tuple[tuple[float, float], ...]) -> bool:
    return any(lo <= u <= hi for lo, hi in bands)


def test_demonstrations_are_a_latin_hypercube() -> None:
    u = np.array([s.u for s in demonstration_scenes()])
    assert u.shape == (100, 2)
    for axis in range(2):
        strata = np.floor((u[:, axis] - LO) / (HI - LO) * 100).astype(int)
        assert sorted(strata) == list(range(100))


def test_validation_is_the_last_twenty_pairs() -> None:
    assert [s.u for s in evaluation_scenes("validation")] == [s.u for s in demonstration_scenes()[80:]]
    assert [s.index for s in evaluation_scenes("validation")] == list(range(80, 100))


@pytest.mark.parametrize(
    ("condition", "count", "bands", "azimuths"),
    [
        ("boundary", 50, SPEC.band_boundary, {0.0}),
        ("extreme", 25, SPEC.band_extreme, {0.0}),
        ("camera", 25, None, {-15.0, 15.0}),
        ("combined", 25, SPEC.band_extreme, {-15.0, 15.0}),
    ],
)
def test_test_distributions(condition: TestSet, count: int, bands: tuple | None, azimuths: set[float]) -> None:
    scenes = evaluation_scenes(condition)
    assert len(scenes) == count
    assert {s.camera_azimuth_deg for s in scenes} == azimuths
    for i, scene in enumerate(scenes):
        active = [] if bands is None else [i % 2]
        for axis in range(2):
            if axis in active:
                assert in_band(scene.u[axis], (bands[(i // 2) % 2],))  # type: ignore[index]
            else:
                assert LO <= scene.u[axis] <= HI
    assert evaluation_scenes(condition, seed=0) == scenes
    assert evaluation_scenes(condition, seed=1) != scenes


def test_camera_sign_is_not_tied_to_the_position_band() -> None:
    seen = {(i % 2, (i // 2) % 2, s.camera_azimuth_deg) for i, s in enumerate(evaluation_scenes("combined"))}
    assert len(seen) == 8


def test_door_position_in_metres() -> None:
    np.testing.assert_allclose(find_pair("door").place((0.0, 1.0)), [0.0, 0.95, 0.15])
    np.testing.assert_allclose(find_pair("door").place((1.0, 0.5)), [0.10, 0.90, 0.15])


def test_unknown_condition_is_a_user_error() -> None:
    with pytest.raises(UserError, match="choose one of validation, boundary"):
        evaluation_scenes("sideways")  # type: ignore[arg-type]
