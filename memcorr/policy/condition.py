"""What a network is conditioned on: the boundary between data (numpy) and networks (torch).

`build_condition` is the one builder, for training batches and for live frames. Loss and sampler
condition through the same object. Dropping the condition, for training and for the unconditional
branch of guidance, is one operation on it: no token may be attended to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..spec import SPEC, TASKS, Array, StateKind
from .relations import Relations


@dataclass(frozen=True)
class Normalisation:
    """Means and deviations of the training windows; they travel with every checkpoint."""

    state_mean: Array  # (9,)
    state_std: Array
    action_mean: Array  # (4,)
    action_std: Array
    depth_mean: Array  # () metres; 0 and 1 for policies that see no image
    depth_std: Array

    def state(self, state: Array) -> NDArray[np.float32]:
        return ((state - self.state_mean) / self.state_std).astype(np.float32)

    def action(self, action: Array) -> NDArray[np.float32]:
        return ((action - self.action_mean) / self.action_std).astype(np.float32)

    def original_action(self, x_0: NDArray[np.floating]) -> Array:
        """Back to the units of the robot."""
        return np.asarray(x_0 * self.action_std + self.action_mean)


@dataclass(frozen=True)
class Condition:
    """A batch of B conditions on one device. Relation policies carry `tokens`, visual ones `image` and `task`."""

    state: Tensor  # (B, 9) s, standardised
    keep: Tensor  # (B, 64) bool: context tokens that may be attended to
    tokens: Tensor | None = None  # (B, 64, 18) relation tokens
    image: Tensor | None = None  # (B, 5, 64, 64) RGB in [-1, 1], standardised depth, binary mask
    task: Tensor | None = None  # (B, 2) one-hot open, close

    def __len__(self) -> int:
        return len(self.state)

    def drop(self, rows: Tensor | None = None) -> Condition:
        """Without the 64 tokens in `rows` (B,) bool, or everywhere. The robot state stays."""
        keep = torch.zeros_like(self.keep) if rows is None else self.keep & ~rows[:, None]
        return replace(self, keep=keep)

    def to(self, device: torch.device | str) -> Condition:
        return self._map(lambda x: x.to(device))

    def __getitem__(self, rows: slice | Tensor) -> Condition:
        return self._map(lambda x: x[rows])

    def _map(self, change: Callable[[Tensor], Tensor]) -> Condition:
        present = {f.name: getattr(self, f.name) for f in fields(self)}
        return Condition(**{name: change(x) for name, x in present.items() if x is not None})


def join_conditions(parts: Sequence[Condition]) -> Condition:
    """Batches of the same kind, one after the other."""
    present = [f.name for f in fields(Condition) if getattr(parts[0], f.name) is not None]
    return Condition(**{name: torch.cat([getattr(p, name) for p in parts]) for name in present})


def own_state(state: Array, kind: StateKind) -> Array:
    """What a policy knows of the robot (..., 9). "relative" says nothing of where the hand is nor how it is turned
    about the vertical: only how far out and how far down its fingertips are."""
    if kind == "absolute":
        return state
    tips = state[..., 3:].reshape(*state.shape[:-1], 2, 3) - state[..., None, :3]
    out = np.zeros((*state.shape[:-1], 3, 3))
    out[..., 1:, 0], out[..., 1:, 2] = np.linalg.norm(tips[..., :2], axis=-1), tips[..., 2]
    return out.reshape(state.shape)


def build_condition(
    normalisation: Normalisation,
    state: Array,
    *,
    relations: Relations | None = None,
    images: Images | None = None,
    task: NDArray[np.int64] | None = None,
) -> Condition:
    """Conditions of B robot states (B, 9): of a relation policy from `relations` (B, ...), of a visual
    one from `images` (B, ...) and `task` (B,), 0 for open and 1 for close."""
    standardised = torch.from_numpy(normalisation.state(state))
    if relations is not None:
        return Condition(standardised, torch.from_numpy(relations.valid), tokens=torch.from_numpy(relations.tokens))
    if images is None or task is None:
        raise ValueError("a condition needs relations, or images and the task")
    image = network_image(images, float(normalisation.depth_mean), float(normalisation.depth_std))
    one_hot = torch.from_numpy(np.eye(len(TASKS), dtype=np.float32)[task])
    keep = torch.ones(len(state), SPEC.tokens, dtype=torch.bool)
    return Condition(standardised, keep, image=torch.from_numpy(image), task=one_hot)


@dataclass(frozen=True)
class Images:
    """What the visual policies see: shrunk observations, with any leading axes."""

    rgb: NDArray[np.uint8]  # (..., 64, 64, 3)
    depth: NDArray[np.float32]  # (..., 64, 64) metres, 0 where nothing was seen
    mask: NDArray[np.bool_]  # (..., 64, 64)

    def __getitem__(self, index: NDArray[np.int64] | int) -> Images:
        return Images(self.rgb[index], self.depth[index], self.mask[index])


def shrink(rgb: NDArray[np.uint8], depth: NDArray[np.float32], mask: NDArray[np.bool_]) -> Images:
    """From 128 x 128: colours are averaged; depth and mask keep one pixel of each block, so that
    the mask stays binary, depth never mixes two surfaces and the two agree."""
    k = rgb.shape[-2] // SPEC.visual_size
    *lead, _, _, _ = rgb.shape
    blocks = rgb.reshape(*lead, SPEC.visual_size, k, SPEC.visual_size, k, 3)
    mean = blocks.sum(axis=(-4, -2), dtype=np.uint16) // np.uint16(k * k)
    return Images(mean.astype(np.uint8), depth[..., ::k, ::k].copy(), mask[..., ::k, ::k].copy())


def network_image(images: Images, depth_mean: float, depth_std: float) -> NDArray[np.float32]:
    """(B, 5, 64, 64): RGB in [-1, 1], standardised and clipped depth, binary mask."""
    x = np.empty((*images.mask.shape[:-2], 5, SPEC.visual_size, SPEC.visual_size), np.float32)
    x[..., :3, :, :] = np.moveaxis(images.rgb, -1, -3) / np.float32(127.5) - np.float32(1)
    x[..., 3, :, :] = np.clip(
        (images.depth - depth_mean) / depth_std, -SPEC.visual_depth_limit, SPEC.visual_depth_limit
    )
    x[..., 4, :, :] = images.mask
    return x
