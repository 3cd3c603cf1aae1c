"""The training rows in memory: windows, their references and how each relates to its own.

A row is (demonstration, anchor frame), anchors fastest. Points and tokens are made per batch from poses and grippers,
so the whole set is a few megabytes; only visual policies hold images. `Simulated` rows know where the object is,
`Measured` ones (`measured.py`) what a matcher saw of it.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from ..correspondence.matches import Matches, ground_truth_matches
from ..correspondence.rigid import carried
from ..demos.phase import closest_frames
from ..demos.phase import windows as window_count
from ..demos.store import Demonstration, Store, opened
from ..errors import UserError
from ..following.course import Course, seen_phases
from ..policy.checkpoint import Design
from ..policy.condition import Images, Normalisation, own_state, shrink
from ..policy.relations import Relations, build_relations
from ..policy.servo import commands
from ..spec import SPEC, TASKS, Array
from ..worlds.pairs import find_pair
from .experiments import MAIN, Experiment

Rows = NDArray[np.int64]
OFF_TRACK_M = 0.04  # from where the reference's hand is; an undisturbed hand never is so far away


@dataclass(frozen=True)
class Windows:
    """Training rows: one per demonstration and anchor frame with a whole chunk to come (0-184 of 200), anchors
    fastest."""

    demonstration: NDArray[np.int64]  # (N,) index into the list the windows were cut from
    anchor: NDArray[np.int64]  # (N,) query frame
    state: Array  # (N, 9), or as wide as own data has it
    chunk: Array  # (N, 16, 4) actions anchor .. anchor + 15; or as wide as own data has it

    def __len__(self) -> int:
        return len(self.anchor)


def cut_windows(demonstrations: Sequence[Demonstration], any_length: bool = False) -> Windows:
    if not any_length and any(len(d) != SPEC.episode_steps for d in demonstrations):
        raise UserError(f"demonstrations must have {SPEC.episode_steps} steps")
    counts = [window_count(len(d)) for d in demonstrations]
    chunk = np.arange(SPEC.chunk)
    return Windows(
        demonstration=np.repeat(np.arange(len(demonstrations)), counts),
        anchor=np.concatenate([np.arange(n) for n in counts]),
        state=np.concatenate([d.robot_state[:n] for d, n in zip(demonstrations, counts, strict=True)]),
        chunk=np.concatenate(
            [d.action[np.arange(n)[:, None] + chunk] for d, n in zip(demonstrations, counts, strict=True)]
        ),
    )


def measure(datasets: Sequence[Dataset], recipe: Experiment = MAIN) -> Normalisation:
    """Statistics of the training windows; of depth over every training frame. Where a recipe turns its rows, a
    horizontal action has no direction on average, and the same size in both."""
    state = np.concatenate([own_state(d.windows.state, recipe.state) for d in datasets])
    chunk = np.concatenate([d.windows.chunk for d in datasets])
    images = getattr(datasets[0], "images", None)
    depth = np.zeros(1) if images is None else images.depth
    mean, std = chunk.mean(axis=(0, 1)), chunk.std(axis=(0, 1))
    if recipe.turned:
        mean[:2], std[:2] = 0.0, np.sqrt((chunk[..., :2] ** 2).mean())
    return Normalisation(
        state_mean=state.mean(axis=0),
        state_std=np.maximum(state.std(axis=0), SPEC.state_std_floor),
        action_mean=mean,
        action_std=np.maximum(std, SPEC.action_std_floor),
        depth_mean=np.asarray(depth.mean(dtype=np.float64)),
        depth_std=np.asarray(depth.std(dtype=np.float64) if images is not None else 1.0),
    )


@dataclass(frozen=True, kw_only=True)
class Dataset(ABC):
    """D demonstrations (pair-major, open before close) of up to T frames, cut into N rows. Shorter demonstrations stand
    still after their end."""

    windows: Windows
    gripper: Array  # (D, T, 3)
    command: Array  # (D, T, 4) what the hand was commanded: centimetres, and the gripper
    object_pose: Array  # (D, T, 4, 4)
    reference: Rows  # (D,) the demonstration each one is conditioned on
    reference_frame: Rows  # (N,) j_k of each row
    eye: Array  # (D, 3) where the camera is in the first frame
    lengths: Rows  # (D,) frames
    both: Rows  # (P, 2) demonstrations of different tasks from one start

    @abstractmethod
    def own_matches(self, rows: Rows) -> Matches:
        """Matches (B, 16, ...) between the references at `reference_frame` and the rows."""

    @abstractmethod
    def poses(self, rows: Rows, frames: Rows) -> tuple[Array, Array]:
        """The object's pose (B, 4, 4) in the references at `frames` and in the rows; of both in one frame of
        coordinates."""

    @abstractmethod
    def middle(self, rows: Rows) -> Array:
        """(B, 1, 3) of the object, in the frame in which `poses` are poses."""

    @property
    @abstractmethod
    def paired(self) -> Rows:
        """Those of `both` that can be learned from as counterfactual pairs."""

    @cached_property
    def off_track(self) -> Rows:
        """Rows whose hand is farther from where the reference's is than an undisturbed one ever strays."""
        d, anchor, every = self.windows.demonstration, self.windows.anchor, np.arange(len(self))
        (T_ref, T_live), middle = self.poses(every, self.reference_frame), self.middle(every)
        here = self.gripper[d, anchor] - carried(T_live, middle)[:, 0]
        there = self.gripper[self.reference[d], self.reference_frame] - carried(T_ref, middle)[:, 0]
        return np.flatnonzero(np.linalg.norm(here - there, axis=-1) > OFF_TRACK_M)

    def __len__(self) -> int:
        return len(self.windows)

    @property
    def pairs(self) -> int:
        return len(self.both)

    @cached_property
    def _first(self) -> Rows:
        """(D,) row of each demonstration's frame 0."""
        counts = [window_count(int(length)) for length in self.lengths]
        return np.cumsum([0, *counts[:-1]])

    def rows(self, demonstration: Rows, anchor: Rows) -> Rows:
        return self._first[demonstration] + anchor

    def last_frames(self, rows: Rows) -> Rows:
        """(B,) the last frame that the rows' references can be at."""
        return np.maximum(self.lengths[self.reference[self.windows.demonstration[rows]]] - SPEC.chunk, 0)

    def first_rows(self, pairs: Rows) -> tuple[Rows, Rows]:
        """The opening and the closing row at frame 0 of some of `both`."""
        return self._first[self.both[pairs, 0]], self._first[self.both[pairs, 1]]

    def task(self, rows: Rows) -> Rows:
        """0 for open, 1 for close."""
        return self.windows.demonstration[rows] % len(TASKS)

    def retimed(self, rows: Rows, matches: Matches, frames: Rows) -> Matches:
        """`matches` as if the reference stood at `frames`: its points move along with its object."""
        r = self.reference[self.windows.demonstration[rows]]
        T = self.object_pose[r, frames] @ np.linalg.inv(self.object_pose[r, self.reference_frame[rows]])
        return replace(matches, p_ref=np.where(matches.valid[..., None], carried(T, matches.p_ref), matches.p_ref))

    def relations(self, rows: Rows, matches: Matches, frames: Rows, recipe: Design) -> Relations:
        """With the references at `frames`."""
        d, anchor = self.windows.demonstration[rows], self.windows.anchor[rows]
        r = self.reference[d]
        return build_relations(
            matches,
            self.gripper[d, anchor],
            self.gripper[r],
            frames,
            recipe.representation,
            self.command[r],
            recipe.tracking,
        )

    def fingerprint(self) -> str:
        """Names the data: another collection, split or reference rule gives another one."""
        digest = hashlib.sha256()
        for array in (self.windows.state, self.windows.chunk, self.object_pose, self.reference_frame):
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()[:16]


@dataclass(frozen=True, kw_only=True)
class Simulated(Dataset):
    """Rows whose object's pose in the world is known."""

    points: Array  # (16, 3) of the ground truth, in the moving body's frame
    images: Images | None = None  # (D, T, 64, 64, ...)

    def own_matches(self, rows: Rows) -> Matches:
        """Ground truth: fixed points of the object, from its pose in both scenes."""
        return ground_truth_matches(self.points, *self.poses(rows, self.reference_frame[rows]))

    def poses(self, rows: Rows, frames: Rows) -> tuple[Array, Array]:
        d, anchor = self.windows.demonstration[rows], self.windows.anchor[rows]
        return self.object_pose[self.reference[d], frames], self.object_pose[d, anchor]

    def middle(self, rows: Rows) -> Array:
        return np.broadcast_to(self.points.mean(axis=0), (len(rows), 1, 3))

    @cached_property
    def paired(self) -> Rows:
        """Pairs whose demonstrations share their start: all but those that begin where the other task was left."""
        row_open, row_close = self.first_rows(np.arange(self.pairs))
        return np.flatnonzero((self.windows.state[row_open] == self.windows.state[row_close]).all(axis=-1))

    def check_starts(self, pairs: int) -> None:
        """Complains unless the first so many pairs share their start."""
        if not set(range(pairs)) <= set(self.paired.tolist()):
            raise UserError("opening and closing do not start from the same robot state; collect the data again")

    def row_images(self, rows: Rows) -> Images:
        assert self.images is not None
        d, anchor = self.windows.demonstration[rows], self.windows.anchor[rows]
        return Images(self.images.rgb[d, anchor], self.images.depth[d, anchor], self.images.mask[d, anchor])


def load_dataset(
    store: Store, pairs: Sequence[int], recipe: Experiment, images: bool = False, disturbed: Store | None = None
) -> Simulated:
    """Rows of `pairs`, and of everything in `disturbed`; each is conditioned on the next of `pairs` for the same
    task, cyclically. Where a recipe wants several references, the one after that follows, and so on."""
    if store.manifest.disturbed:
        raise UserError(f"{store.root} holds disturbed recordings: they go with --disturbed, others with --data")
    recovering = [] if disturbed is None else disturbed.demonstrations(range(len(disturbed)))
    demonstrations = store.demonstrations(pairs) + recovering
    if any(d.object_pose is None for d in demonstrations):
        raise UserError(f"{store.root} has no object_pose, which training on ground-truth relations needs")
    count, total = len(TASKS), len(demonstrations)
    reference = np.array(
        [
            count * ((i // count + 1 + view) % len(pairs)) + i % count
            for view in range(recipe.references)
            for i in range(total)
        ]
    )
    followed = [demonstrations[r] for r in reference]
    queries = demonstrations * recipe.references
    any_length = recipe.phase == "seen"
    windows = cut_windows(queries, any_length)
    points = find_pair(store.world).points
    frames = [_reference_frames(d, r, points, recipe) for d, r in zip(queries, followed, strict=True)]
    dataset = Simulated(
        windows=windows,
        gripper=stacked([d.gripper for d in queries]),
        command=stacked([commands(d, recipe.action_cm) for d in queries]),
        object_pose=stacked([_pose(d) for d in queries]),
        points=points,
        reference=reference,
        reference_frame=np.concatenate(frames),
        images=_load_images(store, pairs) if images else None,
        eye=np.stack([d.T_world_cam[0, :3, 3] for d in queries]),
        lengths=np.array([len(d) for d in queries]),
        both=np.arange(len(queries)).reshape(-1, count),
    )
    dataset.check_starts(len(pairs))
    return dataset


def stacked(parts: Sequence[Array]) -> Array:
    """(D, T, ...) of arrays (t, ...); the last row of a shorter one is repeated."""
    longest = max(len(part) for part in parts)
    return np.stack([part[np.minimum(np.arange(longest), len(part) - 1)] for part in parts])


def _pose(d: Demonstration) -> Array:
    assert d.object_pose is not None
    return d.object_pose


def _reference_frames(query: Demonstration, reference: Demonstration, points: Array, recipe: Experiment) -> Rows:
    """j of every anchor: by the joint, as published, or by what is seen, as live."""
    n = window_count(len(query))
    if recipe.phase == "elapsed":
        return closest_frames(query.joint[:n], np.arange(n), reference.joint, recipe.tie_break)
    course = Course.of_poses(points, _pose(reference), reference.gripper)
    motion = _pose(query)[:n] @ np.linalg.inv(_pose(reference)[0])
    begun = None
    if "other-task" in query.disturbances:  # the episode began before the recording: with the object at its start
        pair = find_pair(query.world)
        begun = pair.place(query.u) - pair.place(reference.u)
    return seen_phases(course, motion, query.gripper[:n], SPEC.executed, begun, recipe.phase_costs)


def _load_images(store: Store, pairs: Sequence[int]) -> Images:
    shrunk = []
    for demonstration in tqdm(store.demonstrations(pairs), "images", unit="demo", leave=False):
        with opened(demonstration.path) as f:
            shrunk.append(shrink(f["rgb"][:], f["depth"][:], f["mask"][:]))
    return Images(
        np.stack([s.rgb for s in shrunk]), np.stack([s.depth for s in shrunk]), np.stack([s.mask for s in shrunk])
    )
