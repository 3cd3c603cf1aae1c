"""The training rows in memory: windows, their references and their ground-truth matches.

A row is (demonstration, anchor frame), anchors fastest. Points and tokens are made per batch
from poses and grippers, so the whole set is a few megabytes; only visual policies hold images.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from ..correspondence.matches import Matches, carried, ground_truth_matches
from ..demos.phase import closest_frames, training_reference
from ..demos.store import Demonstration, Store, opened
from ..errors import UserError
from ..policy.condition import Images, Normalisation, shrink
from ..policy.relations import Relations, Representation, build_relations
from ..spec import SPEC, TASKS, Array, TieBreak
from ..worlds.pairs import find_pair

Rows = NDArray[np.int64]


@dataclass(frozen=True)
class Windows:
    """Training rows: one per demonstration and anchor frame 0-184, anchors fastest."""

    demonstration: NDArray[np.int64]  # (N,) index into the list the windows were cut from
    anchor: NDArray[np.int64]  # (N,) query frame
    state: Array  # (N, 9)
    chunk: Array  # (N, 16, 4) actions anchor .. anchor + 15

    def __len__(self) -> int:
        return len(self.anchor)


def cut_windows(demonstrations: Sequence[Demonstration]) -> Windows:
    n = SPEC.windows_per_episode
    if any(len(d) != SPEC.episode_steps for d in demonstrations):
        raise UserError(f"demonstrations must have {SPEC.episode_steps} steps")
    anchors = np.arange(n)
    steps = anchors[:, None] + np.arange(SPEC.chunk)
    return Windows(
        demonstration=np.repeat(np.arange(len(demonstrations)), n),
        anchor=np.tile(anchors, len(demonstrations)),
        state=np.concatenate([d.robot_state[:n] for d in demonstrations]),
        chunk=np.concatenate([d.action[steps] for d in demonstrations]),
    )


def measure(windows: Windows, images: Images | None) -> Normalisation:
    """Statistics of the training windows; of depth over every training frame."""
    depth = np.zeros(1) if images is None else images.depth
    return Normalisation(
        state_mean=windows.state.mean(axis=0),
        state_std=np.maximum(windows.state.std(axis=0), SPEC.state_std_floor),
        action_mean=windows.chunk.mean(axis=(0, 1)),
        action_std=np.maximum(windows.chunk.std(axis=(0, 1)), SPEC.action_std_floor),
        depth_mean=np.asarray(depth.mean(dtype=np.float64)),
        depth_std=np.asarray(depth.std(dtype=np.float64) if images is not None else 1.0),
    )


@dataclass(frozen=True)
class Dataset:
    """D demonstrations (pair-major, open before close) of T frames, cut into N rows."""

    windows: Windows
    gripper: Array  # (D, T, 3)
    object_pose: Array  # (D, T, 4, 4)
    points: Array  # (16, 3) of the ground truth, in the moving body's frame
    reference: Rows  # (D,) the demonstration each one is conditioned on
    reference_frame: Rows  # (N,) j_k of each row
    images: Images | None  # (D, T, 64, 64, ...)

    def __len__(self) -> int:
        return len(self.windows)

    @property
    def pairs(self) -> int:
        return len(self.gripper) // len(TASKS)

    def rows(self, demonstration: Rows, anchor: Rows) -> Rows:
        return demonstration * SPEC.windows_per_episode + anchor

    def first_rows(self, pairs: Rows) -> tuple[Rows, Rows]:
        """The opening and the closing row at frame 0 of physical pairs; they share one robot state."""
        row_open, row_close = (self.rows(len(TASKS) * pairs + task, np.zeros_like(pairs)) for task in range(len(TASKS)))
        if not np.array_equal(self.windows.state[row_open], self.windows.state[row_close]):
            raise UserError("opening and closing do not start from the same robot state; collect the data again")
        return row_open, row_close

    def task(self, rows: Rows) -> Rows:
        """0 for open, 1 for close."""
        return self.windows.demonstration[rows] % len(TASKS)

    def ground_truth(self, rows: Rows) -> Matches:
        """Matches of the fixed handle points, from the door's pose in both scenes."""
        d, anchor = self.windows.demonstration[rows], self.windows.anchor[rows]
        return ground_truth_matches(
            self.points, self.object_pose[self.reference[d], self.reference_frame[rows]], self.object_pose[d, anchor]
        )

    def retimed(self, rows: Rows, matches: Matches, frames: Rows) -> Matches:
        """`matches` as if the reference stood at `frames`: its points move along with its door."""
        r = self.reference[self.windows.demonstration[rows]]
        T = self.object_pose[r, frames] @ np.linalg.inv(self.object_pose[r, self.reference_frame[rows]])
        return replace(matches, p_ref=np.where(matches.valid[..., None], carried(T, matches.p_ref), matches.p_ref))

    def relations(self, rows: Rows, matches: Matches, frames: Rows, representation: Representation) -> Relations:
        """With the references at `frames`."""
        d, anchor = self.windows.demonstration[rows], self.windows.anchor[rows]
        return build_relations(
            matches, self.gripper[d, anchor], self.gripper[self.reference[d]], frames, representation
        )

    def row_images(self, rows: Rows) -> Images:
        assert self.images is not None
        d, anchor = self.windows.demonstration[rows], self.windows.anchor[rows]
        return Images(self.images.rgb[d, anchor], self.images.depth[d, anchor], self.images.mask[d, anchor])

    def fingerprint(self) -> str:
        """Names the data: another collection, split or reference rule gives another one."""
        digest = hashlib.sha256()
        for array in (self.windows.state, self.windows.chunk, self.object_pose, self.reference_frame):
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()[:16]


def load_dataset(store: Store, pairs: Sequence[int], tie_break: TieBreak, images: bool) -> Dataset:
    """Rows of `pairs`; each is conditioned on the next of them for the same task, cyclically."""
    demonstrations = store.demonstrations(pairs)
    windows = cut_windows(demonstrations)
    n, count = SPEC.windows_per_episode, len(TASKS)
    reference = np.array(
        [count * training_reference(i // count, len(pairs)) + i % count for i in range(count * len(pairs))]
    )
    frames = [
        closest_frames(d.joint[:n], np.arange(n), demonstrations[r].joint, tie_break)
        for d, r in zip(demonstrations, reference, strict=True)
    ]
    poses = [d.object_pose for d in demonstrations]
    if any(pose is None for pose in poses):
        raise UserError(f"{store.root} has no object_pose, which training on ground-truth relations needs")
    return Dataset(
        windows,
        gripper=np.stack([d.gripper for d in demonstrations]),
        object_pose=np.stack(poses),  # type: ignore[arg-type]
        points=find_pair(store.world).points,
        reference=reference,
        reference_frame=np.concatenate(frames),
        images=_load_images(store, pairs) if images else None,
    )


def _load_images(store: Store, pairs: Sequence[int]) -> Images:
    shrunk = []
    for demonstration in tqdm(store.demonstrations(pairs), "images", unit="demo", leave=False):
        with opened(demonstration.path) as f:
            shrunk.append(shrink(f["rgb"][:], f["depth"][:], f["mask"][:]))
    return Images(
        np.stack([s.rgb for s in shrunk]), np.stack([s.depth for s in shrunk]), np.stack([s.mask for s in shrunk])
    )
