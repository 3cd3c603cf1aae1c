"""Which demonstration is the reference, and which of its frames.

Training: the trajectory of the next training configuration for the same skill, at the frame
whose door joint is closest. Evaluation: the trajectory of training pair 0, at the frame given by
elapsed execution steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..spec import SPEC, Array, Task, TieBreak

JOINT_TIE = 1e-4  # rad; frames this close to the best one count as tied


def training_reference(pair: int, train_pairs: int = SPEC.train_pairs) -> int:
    """The pair whose trajectories are the references of `pair`: the next one, cyclically."""
    return (pair + 1) % train_pairs


def next_of_same_task(tasks: Sequence[Task]) -> NDArray[np.int64]:
    """The same rule for recordings that need not come in pairs: which one each is conditioned on, of all with the
    same task the next one, cyclically; one alone is its own reference."""
    places: dict[Task, list[int]] = {}
    for i, task in enumerate(tasks):
        places.setdefault(task, []).append(i)
    after = {i: same[(n + 1) % len(same)] for same in places.values() for n, i in enumerate(same)}
    return np.array([after[i] for i in range(len(tasks))])


def closest_frames(
    query_joint: Array, query_frame: NDArray[np.int64], reference_joint: Array, tie_break: TieBreak = "elapsed"
) -> NDArray[np.int64]:
    """For every query frame the reference frame with the closest door joint, at most 184.

    The joint stands still, to the bit, while the hand approaches, so ties are the rule there, and the
    paper does not say how they are broken. "elapsed" takes, among frames within `JOINT_TIE` of the
    minimum, the one nearest in time to the query frame, which is what the elapsed-time phase of
    evaluation supplies. "first" takes the earliest frame of the exact minimum: the whole approach is
    then trained against frame 0, while the clock of evaluation advances.
    """
    frames = np.arange(last_phase(len(reference_joint)) + 1)
    gap = np.abs(query_joint[:, None] - reference_joint[None, frames])
    if tie_break == "first":
        return gap.argmin(axis=1)
    tied = gap <= gap.min(axis=1, keepdims=True) + JOINT_TIE
    distance = np.abs(query_frame[:, None] - frames)
    return np.where(tied, distance, len(frames) + 1).argmin(axis=1)


def last_phase(length: int) -> int:
    """The last frame j of a reference of `length` frames: T - 16, as in the paper (184 of 200), at least 0."""
    return max(length - (SPEC.episode_steps - SPEC.last_anchor), 0)


def reference_phase(elapsed: int, length: int, speed: float = 1.0, offset: int = 0) -> int:
    """Eq. (phase): j_k = clip(round(rho e_k) + delta, 0, 184) of a reference of `length` = 200 frames."""
    return int(np.clip(np.round(speed * elapsed) + offset, 0, last_phase(length)))


def windows(length: int) -> int:
    """Training rows of a demonstration: frames with a whole chunk of actions to come, 185 of 200."""
    return last_phase(length) + 1
