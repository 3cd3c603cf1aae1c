"""Recorded data in place of an environment: what would it have done there, under each condition?

    answers = audit_offline(policy, Store.open("data/mine"), conditions)

Weaker than rollouts, but it needs no simulator and no robot: the error against the recorded actions, and, where two
tasks were recorded from one start, whose first chunk the answer resembles.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..demos.store import Demonstration, Store
from ..errors import UserError
from ..spec import SPEC, Array, Task
from ..worlds.gym_env import observation_of
from .evidence import SHOWN, USUAL, Prediction, Shown
from .online import Listener, begin_episode, chunk_of, noised, shown_for

DISPLACEMENT = 3  # leading numbers of our own four that move the hand


def audit_offline(
    policy: Listener,
    store: Store,
    conditions: Mapping[Task, Any],
    *,
    shown: Sequence[Shown] = USUAL,
    every: int = 5 * SPEC.executed,
    without: Sequence[int] = (),
    false: Sequence[Any] = (),
) -> Iterator[Prediction]:
    """Every so many rows of each recording (but of the pairs `without`), in order, as in an episode; `false` are
    conditions of another object."""
    present = [d for d in store.present() if d.pair not in without]
    tasks = [task for task in store.tasks if task in conditions]
    if len(tasks) < 2:
        raise UserError(f"{store.root}: an audit exchanges conditions, and needs recordings of two tasks")
    if not present:
        raise UserError(f"{store.root} holds no recordings beside the references")
    spread = np.maximum(np.concatenate([d.action for d in present]).std(axis=0), SPEC.action_std_floor)
    first = {(d.pair, d.task): d.action for d in present}
    for d in present:
        if d.task not in tasks:
            continue
        rows = range(0, max(len(d) - SPEC.chunk, 0) + 1, every)
        frames = d.frames(rows)
        right: dict[int, Array] = {}
        for choice in sorted(shown, key=SHOWN.index):  # the right one first: changes are against it
            rng = begin_episode(policy, d.name)
            condition = shown_for(d.task, tasks, choice, conditions, false)
            for t, frame in zip(rows, frames, strict=True):
                seen = observation_of(frame)
                seen = noised(seen, rng) if choice == "noise" else seen
                answer = chunk_of(policy({**seen, "elapsed": t}, condition))
                yield judged_row(d, t, choice, answer, spread, right, first, tasks)


def judged_row(
    d: Demonstration,
    t: int,
    choice: Shown,
    answer: Array,
    spread: Array,
    right: dict[int, Array],
    first: Mapping[tuple[int, Task], Array],
    tasks: Sequence[Task],
) -> Prediction:
    """`right` holds the answers under the right condition, and is filled with them."""
    wide = d.action.shape[1]
    if answer.shape[1] != wide:
        raise UserError(f"the policy answered with {answer.shape[1]} numbers per action, {d.path} has {wide}")
    recorded = d.action[t : t + SPEC.chunk]
    n = min(len(answer), len(recorded))
    if choice == "correct":
        right[t] = answer
    change = distance(answer[:n], right[t][:n], spread) if choice != "correct" and t in right else None
    direction = None
    if t == 0 and all((d.pair, task) in first for task in tasks):
        moves = DISPLACEMENT if wide == SPEC.action_dim else wide
        direction = resembles(answer[: SPEC.executed, :moves], {k: first[d.pair, k][:, :moves] for k in tasks})
    error = distance(answer[:n], recorded[:n], spread)
    return Prediction(f"pair {d.pair}", d.task, choice, t, error, change, direction)


def distance(a: Array, b: Array, spread: Array) -> float:
    return round(float(np.sqrt(np.mean(((a - b) / spread) ** 2))), 6)


def resembles(chunk: Array, recorded: Mapping[Task, Array]) -> Task:
    """The task whose first recorded actions have the largest cosine with `chunk`; '' when nothing moves."""
    ours = chunk.ravel()
    if not np.isfinite(ours).all() or not ours.any():
        return ""
    theirs = {task: actions[: len(chunk)].ravel() for task, actions in recorded.items()}
    return max(theirs, key=lambda task: float(ours @ theirs[task] / max(float(np.linalg.norm(theirs[task])), 1e-12)))
