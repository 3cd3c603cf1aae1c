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
from ..correspondence.rigid import fit_motion
from ..spec import SPEC, Array

Representation = Literal["full", "motion", "centroid", "tracking"]
TRACKING_M, GAP_M, COMMAND = 0.1, 0.02, 0.3  # metres, metres and actions that count as 1 in "tracking"
GAIN, FASTEST = 8.0, 0.6  # action per metre, action: of `continued`
LEAVE_M, COME_DOWN_M = (0.03, 0.06), (0.015, 0.045)  # how far aside a low hand goes up, a high one stays there
OPPOSED_M = (0.025, 0.05)  # how far from its place a hand is told nothing that leads farther away
RISE_M = (0.04, 0.08)  # how far below the height of travelling it only rises
FAR_M = (0.03, 0.06)  # where it counts how the object is turned
VECTORS = (0, 3, 6, 9, 14)  # first fields of what turns with the world


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
) -> Relations:
    """Eq. (token): r_il = [g_k^q - p_i^q, g_j^r - p_i^r, g_{j+tau_l}^r - p_i^r, p_i^q - p_i^r, c_i, l/3, 0_4].

    `gripper_live` (..., 3) is g_k^q, `gripper_ref` (..., T, 3) the whole reference trajectory and
    `j` (...) its current frame j_k. With fewer than four valid points the condition is empty. Only
    the motion control does without `matches`.

    "tracking" is for following closely: vectors in units that a network can learn from, in three of the four empty
    fields how far the hand is from where the reference's will be, (g_{j+tau_l}^r - p_i^r) - (g_k^q - p_i^q), and in
    place of the displacement of the scene what the reference's hand was told to do then (`command_ref` (..., T, 3)):
    a hand that presses does not move.
    """
    if representation == "motion":
        return _motion(gripper_ref, j)
    assert matches is not None, "relations need matches"
    if representation == "centroid":
        matches = centroid_matches(matches)
    g_q = np.asarray(gripper_live)[..., None, :]  # (..., 1, 3)
    g_r = _future(gripper_ref, j)  # (..., 4, 3)
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
        r[..., 14:17] = (r[..., 6:9] - r[..., 0:3]) / GAP_M
        r[..., 0:9] /= TRACKING_M
        r[..., 9:12] = _future(command_ref, j)[..., None, :, :] / COMMAND
    enough = matches.valid.sum(axis=-1, keepdims=True) >= SPEC.min_valid
    return _masked(r, matches.valid & enough)


def continued(
    matches: Matches,
    gripper_live: Array,
    gripper_ref: Array,
    j: NDArray[np.int64] | int,
    command_ref: Array,
) -> Array:
    """Displacements (..., 16, 3) that continue the reference from frame j: what its hand was told, and the way back to
    where its hand was, as seen from the object; nothing with fewer than four valid points.

    Arguments as in `build_relations`. The way back is taken as the scripted expert takes it: in proportion and no
    faster than its hand ever moves; whoever is beside its place goes up first, to where the reference's hand came from,
    then across, and comes down above it. What the hand was told waits for the same, and never undoes a long way back.
    """
    frames = np.minimum(np.asarray(j)[..., None] + np.arange(SPEC.chunk), command_ref.shape[-2] - 1)
    told = np.take_along_axis(np.asarray(command_ref), frames[..., None], axis=-2)
    there = _future(gripper_ref, j)[..., 0, :]
    gap, steps = _way_back(matches, gripper_live, there), []
    so_far = np.arange(gripper_ref.shape[-2]) <= np.asarray(j)[..., None]
    above = np.where(so_far, gripper_ref[..., 2], -np.inf).max(axis=-1)[..., None] - there[..., 2:]
    for k in range(SPEC.chunk):
        aside = np.linalg.norm(gap[..., :2], axis=-1, keepdims=True)
        low = _smoothstep(gap[..., 2:] + above, *RISE_M)
        away = low * _smoothstep(aside, *LEAVE_M) + (1 - low) * _smoothstep(aside, *COME_DOWN_M)
        level = 1 - away * low
        back = GAIN * np.concatenate([level * gap[..., :2], gap[..., 2:] + away * above], axis=-1)
        back = back * np.minimum(1.0, FASTEST / np.maximum(np.linalg.norm(back, axis=-1, keepdims=True), 1e-9))
        onward = level * told[..., k, :]
        onward[..., 2:] *= np.where(onward[..., 2:] < 0, 1 - away, 1.0)
        steps.append(back + _unopposed(onward, back))
        gap = gap - back / 100  # an action of 1 is 1 cm
    enough = matches.valid.sum(axis=-1) >= SPEC.min_valid
    return np.where(enough[..., None, None], np.stack(steps, axis=-2), 0.0)


def _way_back(matches: Matches, here: Array, there: Array) -> Array:
    """From the live hand to where the reference's was, (..., 3) metres, as seen from the object.

    Near its course a hand sees no more than how far the points are; from farther away, how the object is turned counts
    as well (a door that stands otherwise is approached from elsewhere), which few points tell less exactly.
    """
    weight = np.where(matches.valid, np.maximum(matches.confidence, 0.02), 1e-9)
    share = (np.where(matches.valid, 1.0, 1e-9) / np.maximum(matches.valid.sum(axis=-1, keepdims=True), 1))[..., None]
    p_ref, p_live = (share * matches.p_ref).sum(axis=-2), (share * matches.p_live).sum(axis=-2)
    gap = (there - p_ref) - (here - p_live)
    R, _ = fit_motion(matches.p_ref, matches.p_live, weight)
    turned_gap = np.einsum("...ij,...j->...i", R, there - p_ref) - (here - p_live)
    return gap + _smoothstep(np.linalg.norm(gap, axis=-1, keepdims=True), *FAR_M) * (turned_gap - gap)


def _unopposed(onward: Array, back: Array) -> Array:
    """What the hand was told, without what would undo the way back where that is long."""
    length = np.linalg.norm(back, axis=-1, keepdims=True)
    direction = back / np.maximum(length, 1e-9)
    against = np.minimum((onward * direction).sum(axis=-1, keepdims=True), 0.0)
    return np.asarray(onward - _smoothstep(length / GAIN, *OPPOSED_M) * against * direction)


def _smoothstep(x: Array, low: float, high: float) -> Array:
    t = np.clip((x - low) / (high - low), 0.0, 1.0)
    return np.asarray(t * t * (3 - 2 * t))


def _motion(gripper_ref: Array, j: NDArray[np.int64] | int) -> Relations:
    """Motion only: [0_6, g_{j+tau_l}^r - g_j^r, 0_3, 1, l/3, 0_4] in all 16 nominal slots.

    The slots stand for no point, so neither validity nor the fallback of a matcher applies.
    """
    g_r = _future(gripper_ref, j)
    *batch, offsets, _ = g_r.shape
    slots = (*batch, SPEC.points)
    r = np.zeros((*slots, offsets, SPEC.token_fields))
    r[..., 6:9] = (g_r - g_r[..., :1, :])[..., None, :, :]
    r[..., 12] = 1.0
    r[..., 13] = np.arange(offsets) / (offsets - 1)
    return _masked(r, np.ones(slots, bool))


def _future(gripper_ref: Array, j: NDArray[np.int64] | int) -> Array:
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
