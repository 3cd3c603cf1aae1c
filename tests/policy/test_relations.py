"""Relation tokens and their controls, against a literal transcription of the paper."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from memcorr.correspondence.matches import Matches
from memcorr.policy.relations import build_relations, centroid_matches, empty_relations, permute_pairs
from memcorr.policy.servo import continued
from memcorr.spec import SPEC

RNG = np.random.default_rng(0)
TAU = (0, 5, 10, 15)


def some_matches(*batch: int, valid: float = 0.8) -> Matches:
    shape = (*batch, 16)
    return Matches(
        RNG.normal(size=(*shape, 3)), RNG.normal(size=(*shape, 3)), RNG.random(shape), RNG.random(shape) < valid
    )


def transcription(matches: Matches, g_q: np.ndarray, g_r: np.ndarray, j: int) -> np.ndarray:
    """The appendix's field order, one scalar at a time (fields count from 1 there)."""
    tokens = np.zeros((64, 18))
    for i in range(16):
        for slot in range(4):
            token = []
            for axis in range(3):
                token.append(g_q[axis] - matches.p_live[i, axis])  # 1:3
            for axis in range(3):
                token.append(g_r[j, axis] - matches.p_ref[i, axis])  # 4:6
            for axis in range(3):
                token.append(g_r[j + TAU[slot], axis] - matches.p_ref[i, axis])  # 7:9
            for axis in range(3):
                token.append(matches.p_live[i, axis] - matches.p_ref[i, axis])  # 10:12
            token += [matches.confidence[i], slot / 3, 0, 0, 0, 0]  # 13, 14, 15:18
            if matches.valid[i]:
                tokens[4 * i + slot] = token
    return tokens.astype(np.float32)


def test_tokens_equal_the_paper_field_by_field() -> None:
    matches, g_q, g_r, j = (
        some_matches(5),
        RNG.normal(size=(5, 3)),
        RNG.normal(size=(5, 200, 3)),
        RNG.integers(0, 185, 5),
    )
    relations = build_relations(matches, g_q, g_r, j)
    assert relations.tokens.dtype == np.float32
    for b in range(5):
        one = matches[b]
        assert np.array_equal(relations.tokens[b], transcription(one, g_q[b], g_r[b], int(j[b])))
        assert np.array_equal(relations.valid[b], np.repeat(one.valid, 4))
        alone = build_relations(one, g_q[b], g_r[b], int(j[b]))  # live use: no batch axis
        assert np.array_equal(alone.tokens, relations.tokens[b])


def test_invalid_content_never_shows() -> None:
    matches = some_matches(3)
    garbage = dataclasses.replace(matches, p_live=np.where(matches.valid[..., None], matches.p_live, 1e9))
    g = (RNG.normal(size=(3, 3)), RNG.normal(size=(3, 200, 3)), np.array([0, 90, 184]))
    for representation in ("full", "motion", "centroid"):
        a, b = (build_relations(m, *g, representation) for m in (matches, garbage))
        assert np.array_equal(a.tokens, b.tokens) and np.array_equal(a.valid, b.valid)


@pytest.mark.parametrize("count", [0, 3, 4, 16])
def test_fewer_than_four_valid_points_empty_the_condition(count: int) -> None:
    matches = dataclasses.replace(some_matches(), valid=np.arange(16) < count)
    relations = build_relations(matches, RNG.normal(size=3), RNG.normal(size=(200, 3)), 7)
    if count < 4:
        empty = empty_relations()
        assert np.array_equal(relations.tokens, empty.tokens) and np.array_equal(relations.valid, empty.valid)
    else:
        assert relations.valid.sum() == 4 * count


def test_motion_holds_only_the_future_displacement() -> None:
    g_r, j = RNG.normal(size=(200, 3)), 31
    relations = build_relations(None, RNG.normal(size=3), g_r, j, "motion")
    assert relations.valid.all()
    expected = np.zeros((64, 18), np.float32)
    for i in range(16):
        for slot in range(4):
            expected[4 * i + slot, 6:9] = g_r[j + TAU[slot]] - g_r[j]
            expected[4 * i + slot, 12:14] = 1, slot / 3
    assert np.array_equal(relations.tokens, expected)


def test_centroid_replaces_the_valid_points_and_nothing_else() -> None:
    matches = some_matches()
    g_q, g_r, j = RNG.normal(size=3), RNG.normal(size=(200, 3)), 100
    v = matches.valid
    by_hand = dataclasses.replace(
        matches,
        p_ref=np.tile(matches.p_ref[v].mean(axis=0), (16, 1)),
        p_live=np.tile(matches.p_live[v].mean(axis=0), (16, 1)),
    )
    relations = build_relations(matches, g_q, g_r, j, "centroid")
    assert np.allclose(relations.tokens, transcription(by_hand, g_q, g_r, j), atol=1e-6)
    assert np.array_equal(relations.valid, np.repeat(v, 4))
    assert np.array_equal(centroid_matches(matches).confidence, matches.confidence)


def test_permutation_keeps_both_point_sets_and_every_partner_changes() -> None:
    matches = some_matches(4)
    permuted = permute_pairs(matches)
    for field in ("p_ref", "confidence", "valid"):
        assert np.array_equal(getattr(permuted, field), getattr(matches, field))
    for b in range(4):
        v = matches.valid[b]
        assert np.array_equal(np.sort(permuted.p_live[b, v], axis=0), np.sort(matches.p_live[b, v], axis=0))
        assert not np.any(np.all(permuted.p_live[b, v] == matches.p_live[b, v], axis=-1))


def test_empty_condition_has_the_interface_of_any_other() -> None:
    relations = empty_relations(2, 3)
    assert (
        relations.tokens.shape == (2, 3, SPEC.tokens, 18) and not relations.valid.any() and not relations.tokens.any()
    )


def test_a_hand_far_below_its_place_rises_whatever_it_is_told() -> None:
    """The reference comes down at full speed where the lost hand has to go up; the two must not cancel out."""
    points = some_matches(valid=1.0)
    same = dataclasses.replace(points, p_live=points.p_ref)
    reference, down = np.tile([0.1, 0.6, 0.2], (60, 1)), np.tile([0.0, 0.0, -0.6], (60, 1))
    plan = continued(same, reference[0] - [0, 0, 0.1], reference, 20, down)
    assert np.allclose(plan[0], [0, 0, 0.6])
    assert np.allclose(continued(same, reference[0], reference, 20, down), down[:16]), "in its place it does as told"
    along = continued(same, reference[0] + [0, 0, 0.1], reference, 20, down)
    assert along[0, 2] < -0.6, "what leads the same way is not held back"
