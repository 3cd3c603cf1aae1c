"""Beyond the paper: disturbances, other worlds, and the baselines that need no learning, in every table of success.

No number is hidden because replay wins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from ..evaluation.episodes import Episode
from ..evaluation.intervention import GROUND_TRUTH, NO_MATCHER
from ..spec import DOOR, TEST_SETS, WORLD_TASKS, Lifting
from .lookup import Lookup
from .paper import CONDITION_NAMES
from .statistics import share
from .tables import NOT_MEASURED, Table, ours

# Who stands in these tables, in order: the experiment of the rows and what they were shown.
MANY = "memcorr-many"
SEEING = (MANY, "servo")  # whose phase is by what is seen
LIFTED: dict[str, Lifting] = {"memcorr-literal": "paper", "centroid-literal": "paper"}  # all others: rigid
SCRIPTED = {"expert": NO_MATCHER, "zeros": NO_MATCHER, "replay-truth": GROUND_TRUTH}
NAMES = {
    "expert": "Expert (sees everything)",
    "zeros": "Zeros",
    "replay-truth": "Replay, true displacement",
    "replay": "Replay, matcher",
    "servo": "Servo, not learned",
    "memcorr-literal": "MemCorr-DP, as published",
    "memcorr": "MemCorr-DP, ours",
    MANY: "memcorr-many",
}
KINDS_IN_CURVES = {
    "azimuth": "camera turned, degrees",
    "elevation": "camera raised or lowered, degrees",
    "extrinsics": "calibration off by so many times 1° and 5 mm",
    "depth-noise": "depth noise, times an RGB-D camera's",
    "depth-holes": "share of pixels without depth",
    "mask-erode": "mask too small, pixels all around",
    "mask-dilate": "mask too large, pixels all around",
    "mask-late": "mask too old, steps",
}
VIEWPOINT = "azimuth"
PIVOTS = {VIEWPOINT: "about the point that it looks at", "orbit": "about the door"}
VIEWED = ("memcorr-literal", "memcorr", "visual-transformer", "replay")
MARKS = {
    "replay-truth": ("#b0575a", "s"),
    "replay": ("#d9822b", "D"),
    "memcorr": ("#1f6fb4", "o"),
    "memcorr-literal": ("#8fbbe0", "o"),
    "visual-transformer": ("#7a9a3a", "s"),
    MANY: ("#2a9d5c", "^"),
}


class Contenders:
    """Rollouts by who made them, whatever the world, condition and disturbance."""

    def __init__(self, lookup: Lookup) -> None:
        self.rows = [e for e in lookup.episodes if self._usual(e, lookup.matcher, LIFTED.get(e.experiment, "rigid"))]
        measured = {e.experiment for e in self.rows}
        rest = sorted(measured - NAMES.keys())
        self.names = [name for name in (*NAMES, *rest) if name in measured]

    @staticmethod
    def _usual(e: Episode, matcher: str, lifting: Lifting) -> bool:
        shown = e.shown
        plain = (shown.pairing, shown.lifting) == ("kept", lifting) and shown.reference != "empty"
        known = shown.matcher in (SCRIPTED.get(e.experiment, matcher), NO_MATCHER)
        timed = shown.usual_phase or (e.experiment in SEEING and shown.phase_from == "seen")
        return plain and known and timed and not shown.swap and e.stage in ("final", "scripted")

    def of(
        self,
        name: str,
        world: str,
        condition: str,
        disturbance: str,
        scene_seed: int | None,
        reference: str = "correct",
    ) -> list[Episode]:
        wanted = (name, world, condition, disturbance, reference)
        return [
            e
            for e in self.rows
            if (e.experiment, e.world, e.condition, e.disturbance, e.shown.reference) == wanted
            and scene_seed in (None, e.scene_seed)
        ]


def _name(experiment: str) -> str:
    return NAMES.get(experiment, experiment)


def baselines(lookup: Lookup) -> Table:
    """The paper's shifts with the baselines that the paper does not have."""
    who, rows = Contenders(lookup), []
    conditions = [c for c in TEST_SETS if c not in ("validation", "disturbed")]
    for name in who.names:
        cells = [ours(who.of(name, DOOR, condition, "", lookup.scene_seed)) for condition in conditions]
        if any(cell != NOT_MEASURED for cell in cells):
            rows.append((_name(name), *cells))
    return Table(
        "Baselines that need no learning, door",
        "Why they differ: the expert knows the simulator's state, the servo looks again every eight steps, replay "
        "looks once and then plays the reference's hand path, moved by how far the object stands elsewhere, and "
        "zeros never moves. Undisturbed, these tests cannot tell a policy from a tape recorder.",
        ("Who", *(CONDITION_NAMES[c] for c in conditions)),
        tuple(rows),
    )


def disturbances(lookup: Lookup) -> list[Table]:
    """One table per world in which something went wrong on purpose."""
    who, tables = Contenders(lookup), []
    for world in WORLD_TASKS:
        kinds = dict.fromkeys(e.disturbance for e in who.rows if (e.world, e.condition) == (world, "disturbed"))
        names = [n for n in who.names if any(who.of(n, world, "disturbed", kind, None) for kind in kinds)]
        if not names:
            continue
        rows = [
            (kind or "nothing", *(ours(who.of(name, world, "disturbed", kind, None)) for name in names))
            for kind in sorted(kinds, key=magnitude)
        ]
        tables.append(
            Table(
                f"Disturbances, {world}",
                "Training positions, one thing going wrong in each scene; both tasks, judged within 200 steps.",
                ("What goes wrong", *map(_name, names)),
                tuple(rows),
            )
        )
    return tables


def worlds(lookup: Lookup) -> Table | None:
    """Success in the other worlds, undisturbed, under the right and the opposite reference."""
    who, rows = Contenders(lookup), []
    for world in (name for name in WORLD_TASKS if name != DOOR):
        for condition in (c for c in TEST_SETS if c != "disturbed"):
            for reference in ("correct", "opposite"):
                cells = [ours(who.of(name, world, condition, "", None, reference)) for name in who.names]
                if any(cell != NOT_MEASURED for cell in cells):
                    rows.append((world, CONDITION_NAMES[condition], reference, *cells))
    caption = (
        "References of the world itself (its training pair 0), all scene seeds pooled. Success on the original task: "
        "under the opposite reference it should be 0."
    )
    header = ("World", "Condition", "Reference", *map(_name, who.names))
    return Table("Other worlds", caption, header, tuple(rows)) if rows else None


def grouped(episodes: Iterable[Episode], key: Callable[[Episode], tuple[str, ...]]) -> tuple[tuple[str, ...], ...]:
    """A row for every value of `key`, with the success of its rollouts at the end."""
    groups: dict[tuple[str, ...], list[Episode]] = {}
    for e in episodes:
        groups.setdefault(key(e), []).append(e)
    return tuple((*words, ours(here)) for words, here in sorted(groups.items()))


def exchanges(lookup: Lookup) -> Table:
    """The other task's reference first, exchanged on the way."""
    swapped = [e for e in lookup.episodes if e.shown.swap and e.stage in ("final", "scripted")]
    rows = grouped(swapped, lambda e: (_name(e.experiment), e.world, str(e.shown.swap)))
    return Table(
        "Another reference in mid-episode",
        "The policy first follows the reference of the other task; after so many control steps it is handed the right "
        "one. Success is judged by the latter, within the 200 steps of an episode, those before included.",
        ("Policy", "World", "Exchanged after", "New goal reached"),
        rows,
    )


def strangers(episodes: Sequence[Episode]) -> Table:
    """Seen by another camera, or with masks that were carried: recordings by another camera."""

    def key(e: Episode) -> tuple[str, ...]:
        scenes = f"{e.condition}, seed {e.scene_seed}"
        return e.experiment, e.camera, e.shown.masks, scenes, e.disturbance, e.shown.reference

    return Table(
        "A stranger's recordings",
        "References and live scenes seen by another camera; masks of live frames are the simulator's, or its first one "
        "carried by the matcher. docs/own-data.md has the commands.",
        ("Policy", "Camera", "Live masks", "Scenes", "Sensors", "Reference", "Success"),
        grouped((e for e in episodes if e.camera or e.shown.masks != "simulator"), key),
    )


def magnitude(disturbance: str) -> tuple[str, float]:
    kind, _, size = disturbance.partition("=")
    return kind, float(size or 0)


def curves(lookup: Lookup) -> Figure:
    """Success against the size of a sensor fault, door; policies and replay in one panel."""
    who = Contenders(lookup)
    figure, panels = plt.subplots(2, len(KINDS_IN_CURVES) // 2, figsize=(13, 6.4), sharey=True, layout="constrained")
    for axis, (kind, label) in zip(panels.ravel(), KINDS_IN_CURVES.items(), strict=True):
        _draw(axis, who, [n for n in who.names if n not in ("expert", "zeros")], kind)
        axis.set(xlabel=label, ylim=(-3, 104))
    return _finished(figure, panels[:, 0], panels.ravel())


def viewpoints(lookup: Lookup) -> Figure:
    """Success against how far the camera is turned, about either point, door."""
    who = Contenders(lookup)
    figure, panels = plt.subplots(1, len(PIVOTS), figsize=(8.5, 3.8), sharey=True, layout="constrained")
    for axis, (kind, label), letter in zip(panels, PIVOTS.items(), "ab", strict=True):
        _draw(axis, who, [n for n in VIEWED if n in who.names], kind, zero=f"{VIEWPOINT}=0")
        axis.set(xlabel="camera turned, degrees", ylim=(-3, 104), title=f"({letter}) {label}")
    return _finished(figure, panels[:1], panels)


def _draw(axis: plt.Axes, who: Contenders, names: Sequence[str], kind: str, zero: str = "") -> None:
    """A line for each policy measured at two sizes of a fault or more; `zero` is the disturbance of size 0."""
    sizes = sorted({magnitude(e.disturbance)[1] for e in who.rows if e.disturbance.startswith(f"{kind}=")} - {0.0})
    at = {0.0: zero} | {size: f"{kind}={size:g}" for size in sizes}
    for number, name in enumerate(names):
        rows = {size: who.of(name, DOOR, "disturbed", text, None) for size, text in at.items()}
        if zero:  # the same scenes at every size
            scenes = {(e.scene_seed, e.scene) for e in rows[0.0]}
            rows = {size: [e for e in here if (e.scene_seed, e.scene) in scenes] for size, here in rows.items()}
        points = [(size, share(here)) for size, here in rows.items()]
        drawn = [(size, s) for size, s in points if s is not None]
        if len(drawn) < 3:
            continue
        aside = 0.012 * sizes[-1] * (number - 1)  # equal curves stay visible beside each other
        error = np.maximum([[s.percent - s.low for _, s in drawn], [s.high - s.percent for _, s in drawn]], 0)
        colour, marker = MARKS.get(name, ("0.4", "v"))
        axis.errorbar(
            [size + aside for size, _ in drawn],
            [s.percent for _, s in drawn],
            yerr=error,
            fmt=f"{marker}-",
            ms=5,
            mfc="white",
            capsize=3,
            color=colour,
            label=_name(name),
        )


def _finished(figure: Figure, left: Iterable[plt.Axes], axes: Iterable[plt.Axes]) -> Figure:
    """With one legend for all panels."""
    for axis in left:
        axis.set_ylabel("success, % (door, training positions)")
    handles, labels = max((axis.get_legend_handles_labels() for axis in axes), key=lambda found: len(found[0]))
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=8.5)
    return figure
