"""Rows of recordings without truth, and the recipe as such recordings ask for it.

Widths come from the data, and so does how far an action of 1 moves the hand. Pairs are those that the data declares,
as long as they start together. What cannot be told from the data is said, never assumed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from ..correspondence.matches import Matches, motion_of
from ..demos.phase import next_of_same_task
from ..demos.store import Demonstration
from ..errors import UserError
from ..following.measured import Measured as Cache
from ..policy.servo import commands
from ..recordings.check.motion import EXPLAINED, PROMPT, lagged, proportional
from ..recordings.check.report import TOGETHER
from ..spec import SPEC, Array
from .dataset import Dataset, Rows, cut_windows, stacked
from .experiments import Experiment


def centimetres(demonstrations: Sequence[Demonstration]) -> tuple[float, float]:
    """How far an action of 1 moves the hand per step, and how much of the motion that explains; (0, share) where the
    first three numbers of an action are no displacement along the world's axes."""
    if demonstrations[0].action.shape[1] < 3:
        return 0.0, 0.0
    best = (0.0, 0.0)
    recorded = [(d, len(d) - SPEC.chunk) for d in demonstrations]  # the last steps of one that was cut are made up
    for lag in PROMPT:
        parts = [lagged(d.action[: n - 1, :3], np.diff(d.gripper[:n], axis=0), lag) for d, n in recorded]
        cause, motion = (np.concatenate(side) for side in zip(*parts, strict=True))
        if motion.any():
            best = max(best, proportional(cause, motion))
    share, factor = best
    return (round(100 * factor, 3), share) if share > EXPLAINED and factor > 0 else (0.0, share)


def declared_pairs(demonstrations: Sequence[Demonstration]) -> tuple[Rows, int, float]:
    """(P, 2) demonstrations of two tasks from one start, how many of those declared do not start together, and how far
    the others are apart at most, metres."""
    groups: dict[int, list[int]] = {}
    for i, d in enumerate(demonstrations):
        groups.setdefault(d.pair, []).append(i)
    both = [two for group in groups.values() for two in combinations(group, 2)]
    apart = [float(np.linalg.norm(demonstrations[a].gripper[0] - demonstrations[b].gripper[0])) for a, b in both]
    kept = [two for two, gap in zip(both, apart, strict=True) if gap <= TOGETHER]
    widest = max((gap for gap in apart if gap <= TOGETHER), default=0.0)
    return np.array(kept, np.int64).reshape(-1, 2), len(both) - len(kept), widest


def fitted(recipe: Experiment, demonstrations: Sequence[Demonstration]) -> tuple[Experiment, Rows, list[str]]:
    """The recipe with what the data decides, its pairs, and what to tell the user."""
    if recipe.visual or recipe.references != 1 or recipe.disturbed or not recipe.resampled_errors:
        raise UserError(
            f"{recipe.name}: measured rows are for relation policies with resampled errors and one reference"
        )
    widths = {(d.robot_state.shape[1], d.action.shape[1]) for d in demonstrations}
    if len(widths) > 1:
        raise UserError(
            f"robot_state and action have different widths in one store: {sorted(widths)}; train them apart"
        )
    (state_dim, action_dim), said = widths.pop(), []
    changes: dict = {"state_dim": state_dim, "action_dim": action_dim}
    largest = max(float(np.abs(d.action).max()) for d in demonstrations)
    changes["action_limit"] = max(1.0, round(largest, 6))
    cm, share = centimetres(demonstrations)
    if cm:
        said.append(f"an action of 1 moves the hand by {cm:g} cm, which explains {100 * share:.0f} % of its motion")
    else:
        said.append("actions are no displacements of the hand: rows are not turned")
        changes["turned"] = False
    changes["action_cm"] = cm
    if state_dim != SPEC.state_dim:
        said.append(f"robot_state has {state_dim} numbers, which are taken as they are")
        changes |= {"state": "absolute"}
    alone = sum(r == i for i, r in enumerate(next_of_same_task([d.task for d in demonstrations])))
    if alone:
        said.append(
            f"{alone} of {len(demonstrations)} recordings are the only ones of their task: they follow themselves"
        )
    both, elsewhere, widest = declared_pairs(demonstrations)
    if elsewhere:
        far = f"farther than {1000 * TOGETHER:.0f} mm apart"
        said.append(f"{elsewhere} declared pairs start {far}: they are used, but not as pairs")
    if recipe.paired and len(both):
        said.append(
            f"{len(both)} pairs of tasks start at most {1000 * widest:.1f} mm apart: every "
            f"{recipe.paired_every}th update is paired"
        )
    if recipe.paired and not len(both):
        said.append("no pairs: trained without the paired objective, with a schedule that ends in noise (cosine)")
        changes |= {"paired": False, "schedule": "cosine"}
    return replace(recipe, **changes), both, said


@dataclass(frozen=True, kw_only=True)
class Measured(Dataset):
    """Rows of recordings without truth. `object_pose` is how the object moved since the first frame of each recording,
    as a matcher saw it."""

    first_middle: Array  # (D, 3) of the object in the first frame, metres
    live: Array  # (N, 4, 4) how each row's object stands against its reference's first frame
    seen: Matches  # (N, 16, ...) with the references at `reference_frame`

    def own_matches(self, rows: Rows) -> Matches:
        return self.seen[rows]

    def poses(self, rows: Rows, frames: Rows) -> tuple[Array, Array]:
        """Both against the first frame of the reference."""
        return self.object_pose[self.reference[self.windows.demonstration[rows]], frames], self.live[rows]

    def middle(self, rows: Rows) -> Array:
        return self.first_middle[self.reference[self.windows.demonstration[rows]]][:, None]

    @property
    def paired(self) -> Rows:
        """All: recorded starts differ a little; by how much was checked before."""
        return np.arange(self.pairs)


def load_measured(demonstrations: Sequence[Demonstration], seen: Cache, recipe: Experiment, both: Rows) -> Measured:
    """All rows that were matched; each is conditioned on the reference that it was matched with."""
    windows = cut_windows(demonstrations, any_length=True)
    reference = next_of_same_task([d.task for d in demonstrations])
    motion = stacked(seen.motion)
    T_ref = motion[reference[windows.demonstration], seen.reference_frame]
    return Measured(
        windows=windows,
        gripper=stacked([d.gripper for d in demonstrations]),
        command=stacked([commands(d, recipe.action_cm) for d in demonstrations]),
        object_pose=motion,
        first_middle=seen.points,
        reference=reference,
        reference_frame=seen.reference_frame,
        eye=np.stack([d.T_world_cam[0, :3, 3] for d in demonstrations]),
        lengths=np.array([len(d) for d in demonstrations]),
        both=both,
        live=_live(seen, T_ref),
        seen=seen.matches,
    )


def _live(seen: Cache, T_ref: Array) -> Array:
    """(N, 4, 4) how each row's object stands against its reference's first frame; where too little was seen, as the
    reference does (such rows have an empty condition)."""
    live = T_ref.copy()
    for row in range(len(live)):
        T = motion_of(seen.matches[row])
        if T is not None:
            live[row] = T @ T_ref[row]
    return live
