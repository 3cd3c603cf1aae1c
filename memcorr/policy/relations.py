"""Relational condition tokens: the one function that training data and live rollouts share.

Sixteen points and four future offsets give 64 tokens of 18 fields, point-major: token 4 i + l
belongs to point i and offset tau_l. Everything here is numpy, batched over leading axes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ..correspondence.matches import Matches
from ..spec import SPEC, Array

Representation = Literal["full", "motion", "centroid", "tracking"]
VECTORS = (0, 3, 6, 9, 14)  # first fields of what turns with the world


@dataclass(frozen=True)
class TrackingUnits:
    """What counts as 1 in the tokens of "tracking"."""

    vector_m: float = 0.1  # of the paper's vectors
    gap_m: float = 0.02  # of the hand's distance to where the reference's will be
    command_cm: float = 0.3  # of what the reference's hand was commanded per step


TRACKING = TrackingUnits()


@dataclass(frozen=True)
class Relations:
    """The condition of one replanning decision, or of a batch of them (leading axes)."""

    tokens: NDArray[np.float32]  # (..., 64, 18) metres in the world frame, confidence, offset; 0 where invalid
    valid: NDArray[np.bool_]  # (..., 64)


def build_relations(
    matches: Matches | None,
    gripper_live: Array,
    gripper_ref: Array,
    j: NDArray[np.int64] | int,
    representation: Representation = "full",
    command_ref: Array | None = None,
    units: TrackingUnits = TRACKING,
) -> Relations:
    """Eq. (token): r_il = [g_k^q - p_i^q, g_j^r - p_i^r, g_{j+tau_l}^r - p_i^r, p_i^q - p_i^r, c_i, l/3, 0_4].

    `gripper_live` (..., 3) is g_k^q, `gripper_ref` (..., T, 3) the whole reference trajectory and
    `j` (...) its current frame j_k. With fewer than four valid points the condition is empty. Only
    the motion control does without `matches`.

    "tracking" is for following closely: vectors in units that a network can learn from; in three of the four empty
    fields how far the hand is from where the reference's will be, (g_{j+tau_l}^r - p_i^r) - (g_k^q - p_i^q), in the
    last one the gripper command recorded there; and in place of the displacement of the scene what the reference's
    hand was commanded (`command_ref` (..., T, A), centimetres and, last, the gripper): a hand that presses does not
    move.
    """
    if representation == "motion":
        return _motion(gripper_ref, j)
    assert matches is not None, "relations need matches"
    if representation == "centroid":
        matches = centroid_matches(matches)
    g_q = np.asarray(gripper_live)[..., None, :]  # (..., 1, 3)
    g_r = future(gripper_ref, j)  # (..., 4, 3)
    p_q, p_r = matches.p_live, matches.p_ref  # (..., 16, 3)
    offsets = len(SPEC.future_offsets)
    r = np.zeros((*matches.valid.shape, offsets, SPEC.token_fields))
    r[..., 0:3] = (g_q - p_q)[..., None, :]
    r[..., 3:6] = (g_r[..., :1, :] - p_r)[..., None, :]
    r[..., 6:9] = g_r[..., None, :, :] - p_r[..., None, :]
    r[..., 9:12] = (p_q - p_r)[..., None, :]
    r[..., 12] = matches.confidence[..., None]
    r[..., 13] = np.arange(offsets) / (offsets - 1)
    if representation == "tracking":
        assert command_ref is not None, "tracking needs the reference's commands"
        r[..., 14:17] = (r[..., 6:9] - r[..., 0:3]) / units.gap_m
        r[..., 0:9] /= units.vector_m
        commanded = future(command_ref, j)[..., None, :, :]
        r[..., 9:12] = commanded[..., :3] / units.command_cm
        if commanded.shape[-1] > 3:
            r[..., 17] = commanded[..., -1]
    enough = matches.valid.sum(axis=-1, keepdims=True) >= SPEC.min_valid
    return _masked(r, matches.valid & enough)


def _motion(gripper_ref: Array, j: NDArray[np.int64] | int) -> Relations:
    """Motion only: [0_6, g_{j+tau_l}^r - g_j^r, 0_3, 1, l/3, 0_4] in all 16 nominal slots.

    The slots stand for no point, so neither validity nor the fallback of a matcher applies.
    """
    g_r = future(gripper_ref, j)
    *batch, offsets, _ = g_r.shape
    slots = (*batch, SPEC.points)
    r = np.zeros((*slots, offsets, SPEC.token_fields))
    r[..., 6:9] = (g_r - g_r[..., :1, :])[..., None, :, :]
    r[..., 12] = 1.0
    r[..., 13] = np.arange(offsets) / (offsets - 1)
    return _masked(r, np.ones(slots, bool))


def future(gripper_ref: Array, j: NDArray[np.int64] | int) -> Array:
    """g_{j + tau_l}^r (or another trajectory) for the four offsets: (..., T, 3) and (...) to (..., 4, 3).

    Where a reference is too short to have a future, its last frame stands for it.
    """
    gripper_ref = np.asarray(gripper_ref)
    frames = np.minimum(np.asarray(j)[..., None] + np.array(SPEC.future_offsets), gripper_ref.shape[-2] - 1)
    return np.take_along_axis(gripper_ref, frames[..., None], axis=-2)


def _masked(r: Array, valid: NDArray[np.bool_]) -> Relations:
    """(..., 16, 4, 18) and (..., 16) to the flat 64 tokens, zero where invalid."""
    tokens = np.where(valid[..., None, None], r, 0.0).astype(np.float32)
    return Relations(
        tokens=tokens.reshape(*r.shape[:-3], SPEC.tokens, SPEC.token_fields),
        valid=np.repeat(valid, len(SPEC.future_offsets), axis=-1),
    )


def turned(relations: Relations, turn: Array) -> Relations:
    """As if the whole world had been turned about the vertical, or mirrored, by (B, 2, 2) matrices."""
    tokens, xy = relations.tokens.copy(), turn.astype(np.float32)
    for start in VECTORS:
        part = slice(start, start + 2)
        tokens[..., part] = np.einsum("bij,bnj->bni", xy, relations.tokens[..., part])
    return replace(relations, tokens=tokens)


def empty_relations(*shape: int) -> Relations:
    """The empty condition: nothing of the reference reaches the policy."""
    return Relations(
        np.zeros((*shape, SPEC.tokens, SPEC.token_fields), np.float32), np.zeros((*shape, SPEC.tokens), bool)
    )


def centroid_matches(matches: Matches) -> Matches:
    """Object-centroid control: every valid slot carries the two centroids of the valid points."""
    weight = matches.valid[..., None] / np.maximum(matches.valid.sum(axis=-1), 1)[..., None, None]

    def centroid(p: Array) -> Array:
        return np.broadcast_to((weight * p).sum(axis=-2, keepdims=True), p.shape)

    return replace(matches, p_ref=centroid(matches.p_ref), p_live=centroid(matches.p_live))


def permute_pairs(matches: Matches) -> Matches:
    """Permuted-pairing diagnostic: both point sets stay, every live point changes its partner.

    The paper fixes a permutation without naming it. Ours shifts the valid points by half their
    number, so no partner is kept and an invalid slot never receives a point.
    """
    p_live = matches.p_live.copy()
    for slot in np.ndindex(matches.valid.shape[:-1]):
        points = np.flatnonzero(matches.valid[slot])
        p_live[slot][points] = matches.p_live[slot][np.roll(points, len(points) // 2)]
    return replace(matches, p_live=p_live)
