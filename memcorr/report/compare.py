"""`memcorr compare A B`: is A better than B, on the rollouts that both made?

Rows are ours (`episodes.jsonl`, or folders of them) or LeRobot's (`eval_info.json`). As in the report:
differences within matched rollouts, configurations resampled.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
from scipy.stats import norm

from ..errors import UserError
from ..evaluation.episodes import Episode, find_episodes
from ..files import read_json
from .statistics import Difference, configuration, difference, with_room

Verdict = Literal["better", "worse", "cannot tell"]
EVAL_INFO = "eval_info.json"
ALL = "all"
FEWEST = 5  # configurations; resampling fewer tells nothing
POWER = 0.8  # how often as many rollouts as are named would tell
CHOSEN = (
    *("experiment", "stage", "reference", "matcher", "lifting", "pairing", "swap", "masks", "camera", "recording"),
    *("phase_from", "phase_offset", "phase_speed"),
)


@dataclass(frozen=True)
class Rollout:
    """One rollout, of any policy."""

    place: str  # in words: rollouts of one place are also compared by themselves
    configuration: tuple  # what is resampled
    task: str
    train_seed: int | None
    success: bool
    columns: Mapping[str, str]  # by which rows are chosen

    @property
    def kind(self) -> tuple[tuple[str, str], ...]:
        """What both sides must hold one of: who, and what was shown."""
        return tuple((name, self.columns[name]) for name in CHOSEN if name in self.columns)


@dataclass(frozen=True)
class Comparison:
    place: str
    successes: tuple[float, float]  # of A and of B, percent of the matched rollouts
    difference: Difference  # A minus B
    verdict: Verdict  # about A
    more: int | None  # rollouts of each side that would tell a difference as large as this one; None: it is told
    matters: float  # points
    more_matters: int  # the same for a difference of `matters` points
    ruled_out: bool  # differences of `matters` points and more are outside the interval

    def line(self) -> str:
        d = self.difference
        words = (
            f"{self.place}: A {self.successes[0]:.1f} %, B {self.successes[1]:.1f} %, A − B {d.points:+.2f} points "
            f"[{d.low:+.2f}, {d.high:+.2f}], {d.n} matched rollouts of {d.configurations} scenes: "
        )
        if self.verdict != "cannot tell":
            return f"{words}A is {self.verdict}"
        if self.ruled_out:
            words += f"cannot tell, but {self.matters:g} points or more are ruled out either way"
        else:
            words += f"cannot tell; a difference of {self.matters:g} points: {more(self.more_matters)}"
        return f"{words}; one as seen: {more(self.more)}" if self.more else words


def more(rollouts: int) -> str:
    return f"{rollouts} more rollouts of each would tell" if rollouts else "as many rollouts are enough to tell"


# Rows


def of_ours(e: Episode) -> Rollout:
    row = dataclasses.asdict(e)
    row |= row.pop("shown")
    place = ", ".join([e.world, e.condition, *([e.disturbance] if e.condition == "disturbed" else [])])
    columns = {name: str(value) for name, value in row.items()}
    return Rollout(place, configuration(e), e.task, e.train_seed, e.success, columns)


class Metrics(msgspec.Struct):
    successes: list[bool]


class Task(msgspec.Struct):
    metrics: Metrics
    task_group: str = ""
    task_id: int | str = 0


class Single(msgspec.Struct):
    episode_ix: int
    success: bool


class EvalInfo(msgspec.Struct):
    """LeRobot's, as of 0.4 (`per_task`), or of one task before that (`per_episode`)."""

    per_task: list[Task] = []
    per_episode: list[Single] = []


def of_lerobot(path: Path) -> list[Rollout]:
    """Its episodes have no seed: nth episodes are one scene, as they are where `--seed` was the same."""
    info = read_json(path, EvalInfo, "an eval_info.json of lerobot-eval", "give the file that lerobot-eval wrote")
    found = [
        (task.task_group, str(task.task_id), number, success)
        for task in info.per_task
        for number, success in enumerate(task.metrics.successes)
    ]
    found += [("", "0", single.episode_ix, single.success) for single in info.per_episode]
    return [
        Rollout(group or ALL, (group, task, n), task, None, success, {"task_group": group, "task": task})
        for group, task, n, success in found
    ]


def read_rollouts(place: Path) -> list[Rollout]:
    files = [place] if place.suffix == ".json" else sorted(place.rglob(EVAL_INFO)) if place.is_dir() else []
    if len(files) > 1:
        raise UserError(f"{place} holds {len(files)} of {EVAL_INFO}; give one of them, such as {files[0]}")
    if not files and not place.exists():
        raise UserError(f"{place} does not exist; give episodes.jsonl, a folder that holds some, or {EVAL_INFO}")
    rows = of_lerobot(files[0]) if files else [of_ours(e) for e in find_episodes([place])]
    if not rows:
        raise UserError(f"{place} holds no rollouts")
    return rows


def chosen(rows: Sequence[Rollout], wanted: Iterable[str], name: str, option: str) -> list[Rollout]:
    """Those that have what is wanted, NAME=VALUE each; of one kind, or a UserError that says what to choose from."""
    for text in wanted:
        column, equals, value = text.partition("=")
        if not equals or column not in rows[0].columns:
            raise UserError(f"{option} {text}: give NAME=VALUE, with {', '.join(sorted(rows[0].columns))}")
        there = sorted({row.columns[column] for row in rows})
        rows = [row for row in rows if row.columns[column] == value]
        if not rows:
            raise UserError(f"{option} {text}: {name} has {', '.join(there)}")
    kinds = {row.kind for row in rows}
    if len(kinds) > 1:
        values = {column: sorted({dict(kind)[column] for kind in kinds}) for column, _ in next(iter(kinds))}
        several = ", ".join(f"{column}={'|'.join(found)}" for column, found in values.items() if len(found) > 1)
        raise UserError(f"{name} holds {len(kinds)} kinds of rollouts; choose one with {option}: {several}")
    return list(rows)


# Differences


def compare(
    a: Path,
    b: Path,
    where: Sequence[str] = (),
    of_a: Sequence[str] = (),
    of_b: Sequence[str] = (),
    matters: float = 10.0,
) -> list[Comparison]:
    """Place by place, and of all together if there are several."""
    sides = [
        chosen(read_rollouts(path), [*where, *own], f"{label}, {path},", option)
        for path, own, label, option in ((a, of_a, "A", "--of-a"), (b, of_b, "B", "--of-b"))
    ]
    seeds = [{row.train_seed for row in side} for side in sides]
    paired_by_seed = bool(seeds[0] & seeds[1])  # else each side is averaged over its own training seeds
    places = [place for place in dict.fromkeys(r.place for r in sides[0]) if any(r.place == place for r in sides[1])]
    found: list[Comparison] = []
    for place in [*places, *([ALL] if len(places) > 1 else [])]:
        mine, theirs = (successes([row for row in side if place in (row.place, ALL)], paired_by_seed) for side in sides)
        measured = difference(mine, theirs)
        if measured is not None:
            matched = mine.keys() & theirs.keys()
            shares = tuple(100 * float(np.mean([side[key] for key in matched])) for side in (mine, theirs))
            disagree = place == ALL and {"better", "worse"} <= {one.verdict for one in found}
            name = f"{ALL}, though they disagree" if disagree else place
            found.append(judged(name, (shares[0], shares[1]), measured, matters))
    if not found:
        raise UserError(f"{a} and {b} have no rollout of the same scene and task in common")
    return found


def successes(rows: Sequence[Rollout], by_seed: bool) -> dict[tuple, float]:
    grouped: dict[tuple, list[bool]] = {}
    for row in rows:
        grouped.setdefault((row.configuration, row.task, row.train_seed if by_seed else None), []).append(row.success)
    return {key: float(np.mean(values)) for key, values in grouped.items()}


def judged(place: str, shares: tuple[float, float], d: Difference, matters: float) -> Comparison:
    if d.deviation == 0:
        low, high = with_room(d.low, d.high, d.configurations)
        d = dataclasses.replace(d, low=low, high=high)
    verdict: Verdict = "better" if d.low > 0 else "worse" if d.high < 0 else "cannot tell"
    if d.configurations < FEWEST:
        verdict = "cannot tell"
    told = verdict != "cannot tell"
    seen = None if told or not d.points else lacking(d, abs(d.points))
    ruled_out = -matters < d.low and d.high < matters and d.configurations >= FEWEST
    return Comparison(place, shares, d, verdict, seen, matters, 0 if told else lacking(d, matters), ruled_out)


def lacking(d: Difference, points: float) -> int:
    """Rollouts of each side beside those that there are, with which the interval leaves out zero four times in five if
    the true difference is `points`: ((z_97.5 + z_80) s / points)² configurations, s being the deviation of one, no less
    than that of so rare a difference."""
    s = max(d.deviation, math.sqrt(points * max(100 - points, 0)))
    wanted = max(((norm.ppf(0.975) + norm.ppf(POWER)) * s / points) ** 2, FEWEST)
    return max(math.ceil((wanted - d.configurations) * d.n / d.configurations), 0)
