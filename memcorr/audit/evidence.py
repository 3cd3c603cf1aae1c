"""What was shown and what came of it, and what that says: rows, and measures with paired intervals.

A policy that does not listen does the same whatever it is shown. So every measure here has a value that such a policy
has (`deaf`), and the question is whether the interval leaves it out. Rows are paired: the same scene, task and noise
under each condition. Scenes are resampled, as in the report.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar, get_args

import numpy as np

from ..report.statistics import bootstrap_interval, clopper_pearson, configuration_means, with_room
from ..spec import Task

# The right reference, none, that of the opposite task, one of another object; and the right one with noise for images.
Shown = Literal["correct", "empty", "opposite", "false", "noise"]
SHOWN: tuple[Shown, ...] = get_args(Shown)
USUAL = SHOWN[:3]
OTHERS = ("opposite", "empty", "false", "noise")
Verdict = Literal["listens", "does not listen", "does the contrary", "cannot tell"]
SD = "sd"  # standard deviations of the recorded actions
FEWEST = 5  # scenes; resampling fewer tells nothing
NOTABLE = 20.0  # points; "does not listen" is said only where the interval leaves out as much as this (0.2 sd)


@dataclass(frozen=True)
class Trial:
    """One rollout. Success is judged by `task`, whatever was shown."""

    scene: str  # what is resampled
    task: Task
    shown: Shown
    success: bool
    steps: int = 0
    direction: Task | None = None  # which task's first chunk its own resembles; None: cannot be told


@dataclass(frozen=True)
class Prediction:
    """What was answered to one recorded row."""

    scene: str  # the recording's pair, which is resampled
    task: Task  # what was recorded
    shown: Shown
    row: int
    error: float  # root mean square over the chunk, in standard deviations of the recorded actions
    change: float | None = None  # of the chunk against the one under the right condition, in the same unit
    direction: Task | None = None  # at the first row of a pair


@dataclass(frozen=True)
class Level:
    """One condition's mean, with its 95 % interval."""

    shown: Shown
    value: float
    low: float
    high: float
    n: int
    count: int | None = None  # successes, where that is what is counted


@dataclass(frozen=True)
class Measure:
    """A paired number that tells listening from not listening, with its 95 % interval."""

    name: str
    unit: str
    deaf: float  # what it is for a policy that does the same whatever it is shown
    value: float
    low: float
    high: float
    scenes: int
    verdict: Verdict


@dataclass(frozen=True)
class Findings:
    """One side of an audit."""

    kind: Literal["online", "offline"]
    where: str  # in words
    unit: str  # of the levels
    levels: tuple[Level, ...]
    measures: tuple[Measure, ...]
    rows: tuple[Trial, ...] | tuple[Prediction, ...]


Row = TypeVar("Row", Trial, Prediction)


def of_trials(trials: Sequence[Trial], where: str) -> Findings:
    levels = [
        level(shown, [(t.scene, 100.0 * t.success) for t in some], sum(t.success for t in some))
        for shown, some in by_shown(trials).items()
    ]
    gaps = [
        paired(
            f"success, correct minus {other}",
            {(t.scene, t.task): 100.0 * t.success for t in trials if t.shown == "correct"},
            {(t.scene, t.task): 100.0 * t.success for t in trials if t.shown == other},
        )
        for other in OTHERS
    ]
    return Findings("online", where, "% success", tuple(levels), tuple(_there([*gaps, follows(trials)])), tuple(trials))


def of_predictions(answers: Sequence[Prediction], where: str) -> Findings:
    levels = [level(shown, [(a.scene, a.error) for a in some]) for shown, some in by_shown(answers).items()]
    gaps = [
        paired(
            f"action error, {other} minus correct",
            {(a.scene, a.task, a.row): a.error for a in answers if a.shown == other},
            {(a.scene, a.task, a.row): a.error for a in answers if a.shown == "correct"},
            unit=SD,
        )
        for other in OTHERS
    ]
    changes = [(a.scene, a.change) for a in answers if a.shown == "opposite" and a.change is not None]
    moved = summarised("chunk changes, opposite for correct", SD, 0.0, changes) if changes else None
    measures = tuple(_there([*gaps, moved, follows(answers)]))
    return Findings("offline", where, "sd of the recorded actions", tuple(levels), measures, tuple(answers))


def _there(measures: Iterable[Measure | None]) -> list[Measure]:
    return [measure for measure in measures if measure is not None]


def by_shown(rows: Sequence[Row]) -> dict[Shown, list[Row]]:
    found = {shown: [row for row in rows if row.shown == shown] for shown in SHOWN}
    return {shown: some for shown, some in found.items() if some}


def level(shown: Shown, values: Sequence[tuple[str, float]], count: int | None = None) -> Level:
    value, n = float(np.mean([v for _, v in values])), len(values)
    if count in (0, n):
        return Level(shown, value, *clopper_pearson(count, n), n, count)
    return Level(shown, value, *bootstrap_interval(_means(values)), n, count)


def _means(values: Iterable[tuple[str, float]]) -> np.ndarray:
    return configuration_means(((scene,), value) for scene, value in values)


def paired(name: str, more: dict[tuple, float], less: dict[tuple, float], unit: str = "points") -> Measure | None:
    """`more` minus `less` within rows of the same scene and task; None without any."""
    matched = sorted(more.keys() & less.keys())
    return summarised(name, unit, 0.0, [(key[0], more[key] - less[key]) for key in matched]) if matched else None


def follows(rows: Sequence[Trial] | Sequence[Prediction]) -> Measure | None:
    """How often the first chunk is of the task that is shown, over the right and the opposite condition. Who does the
    same under both is right exactly once in two."""
    judged_rows = [row for row in rows if row.shown in ("correct", "opposite") and row.direction is not None]
    if {row.shown for row in judged_rows} != {"correct", "opposite"}:
        return None
    values = [(row.scene, 100.0 * ((row.direction == row.task) == (row.shown == "correct"))) for row in judged_rows]
    values = [(s, 50.0 if row.direction == "" else v) for (s, v), row in zip(values, judged_rows, strict=True)]
    return summarised("first chunk follows what is shown", "%", 50.0, values)


def summarised(name: str, unit: str, deaf: float, values: Sequence[tuple[str, float]]) -> Measure:
    means = _means(values)
    value, n = float(np.mean([v for _, v in values])), len(means)
    low, high = bootstrap_interval(means)
    if unit != SD and np.ptp(means) == 0:
        low, high = with_room(low, high, n, -100.0 if deaf == 0 else 0.0)
    return Measure(
        name, unit, deaf, value, low, high, n, judged(unit, deaf, low, high) if n >= FEWEST else "cannot tell"
    )


def judged(unit: str, deaf: float, low: float, high: float) -> Verdict:
    if low > deaf:
        return "listens"
    if high < deaf:
        return "does the contrary"
    notable = NOTABLE / 100 if unit == SD else NOTABLE
    return "does not listen" if max(high - deaf, deaf - low) < notable else "cannot tell"


def verdict(findings: Sequence[Findings]) -> tuple[Verdict, str]:
    """The word for all of it, and the measure that it rests on.

    Rollouts decide where there are some, by success; if nothing ever succeeds, success tells nothing, and the first
    chunk decides. Without rollouts, the first chunk on recorded data does, or the error.
    """
    wanted: list[Callable[[Findings, Measure], bool]] = [
        lambda f, m: f.kind == "online" and m.name.endswith("opposite") and any(x.count for x in f.levels),
        lambda f, m: f.kind == "online" and m.deaf == 50,
        lambda f, m: f.kind == "online",
        lambda f, m: m.deaf == 50,
        lambda f, m: m.name.startswith("action error, opposite"),
    ]
    for rule in wanted:
        for found in findings:
            for measure in found.measures:
                if rule(found, measure):
                    return measure.verdict, f"{found.kind}: {in_words(measure)}{why_unsure(measure)}"
    return "cannot tell", "nothing was measured under two conditions"


QUESTIONS = {
    "opposite": "does what the reference shows",
    "empty": "needs the reference",
    "false": "minds that the reference is of another object",
    "noise": "looks at the camera images",
    "first chunk": "sets out as the reference does",
}
ANSWERS = {"listens": "yes", "does not listen": "no", "does the contrary": "no: the contrary"}


@dataclass(frozen=True)
class Check:
    """One line of the checklist."""

    question: str
    answer: str  # yes, no, no: the contrary, cannot tell, not asked
    because: str


def checklist(findings: Sequence[Findings]) -> list[Check]:
    return [_check(about, question, findings) for about, question in QUESTIONS.items()]


def _check(about: str, question: str, findings: Sequence[Findings]) -> Check:
    """Rollouts answer before recorded data does, unless nothing ever succeeds: then no success can be lost."""
    found = [(f, m) for f in findings for m in f.measures if about in m.name and "chunk changes" not in m.name]
    telling = [(f, m) for f, m in found if m.deaf == 50 or f.kind == "offline" or any(x.count for x in f.levels)]
    if not found:
        return Check(question, "not asked", "")
    f, measure = (telling or found)[0]
    right = next((x for x in f.levels if x.shown == "correct"), None)
    floor = f.kind == "online" and measure.deaf == 0 and (right is None or right.low < NOTABLE)
    unsure = not telling or (measure.verdict == "does not listen" and floor)
    because = f"{f.kind}: {in_words(measure)}"
    because += "; it succeeds too rarely to lose much" if unsure else why_unsure(measure)
    return Check(question, "cannot tell" if unsure else ANSWERS.get(measure.verdict, "cannot tell"), because)


def reservations(findings: Sequence[Findings]) -> list[str]:
    """What a reader of the verdict "listens" has to know as well."""
    words = []
    for found in findings:
        for level in found.levels:
            if found.kind == "online" and level.shown == "opposite" and level.low > 2:
                words.append(f"shown the opposite it still does the task itself in {level.count}/{level.n} rollouts")
        for measure in found.measures:
            if measure.deaf == 50 and measure.high < 90:
                words.append(f"{found.kind}, its first chunk is as shown in only {measure.value:.0f} %")
    return words


def why_unsure(measure: Measure) -> str:
    """Why a measure cannot tell, and what would help; '' for one that can."""
    if measure.verdict != "cannot tell":
        return ""
    if measure.scenes < FEWEST:
        scenes = f"{measure.scenes} scene{'s' * (measure.scenes != 1)}"
        return f"; {scenes}, and at least {FEWEST} are needed: take more --scenes"
    notable = f"{NOTABLE / 100:g} sd" if measure.unit == SD else f"{NOTABLE:g} points"
    return f"; {measure.scenes} scenes leave room for {notable} either way: take more --scenes"


def in_words(measure: Measure) -> str:
    sign = "+" if measure.deaf == 0 else ""
    digits = 2 if measure.unit == SD else 0
    low, high = f"{measure.low:{sign}.{digits}f}", f"{measure.high:{sign}.{digits}f}"
    return f"{measure.name} {measure.value:{sign}.{digits}f} {measure.unit} [{low}, {high}]"
