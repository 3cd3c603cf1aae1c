"""The paper's figures from measured rollouts; the paper's own values are drawn as open diamonds.

Files are the same bytes for the same rollouts: no dates, fixed identifiers.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure, SubFigure
from matplotlib.lines import Line2D

from ..evaluation.episodes import Episode
from ..folders import written_whole
from ..spec import SPEC, TASKS
from . import paper
from .lookup import PHASES, Lookup
from .paper import Line
from .statistics import paired_difference, percent, share

COLOURS = {
    "memcorr": "#1f6fb4",
    "memcorr-literal": "#8fbbe0",
    "visual-transformer": "#d9822b",
    "visual-unet": "#7a9a3a",
    "visual-unet-cosine": "#b9cc8e",
    "motion-literal": "#8e63b0",
    "centroid-literal": "#b0575a",
    "standard-literal": "#777777",
}
PAPER = Line2D([], [], linestyle="", marker="D", markerfacecolor="white", markeredgecolor="black", label="paper")
SEED = Line2D([], [], linestyle="", marker="o", markerfacecolor="white", markeredgecolor="0.3", label="ours, one seed")
SCENES = Path(__file__).parent / "pictures/scenes.png"  # drawn by scripts/draw_scenes.py
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "svg.hashsalt": "memcorr",
    "figure.dpi": 100,
}


def seeds(episodes: Sequence[Episode]) -> list[tuple[int | None, list[Episode]]]:
    found = sorted({e.train_seed for e in episodes}, key=lambda s: -1 if s is None else s)
    return [(seed, [e for e in episodes if e.train_seed == seed]) for seed in found]


Series = tuple[str, str, list[tuple[Sequence[Episode], float | None]]]  # name, experiment, (ours, the paper's share)


def grouped_bars(axis: plt.Axes, title: str, groups: Sequence[str], series: Sequence[Series]) -> None:
    """A bar per group and series: pooled, with per-seed circles, the paper's diamonds, successes/total inside. Series
    of which nothing was measured are left out."""
    series = [one for one in series if any(episodes for episodes, _ in one[2])]
    width = 0.8 / max(len(series), 1)
    for i, (_, experiment, bars) in enumerate(series):
        for k, (episodes, theirs) in enumerate(bars):
            x = k + (i - (len(series) - 1) / 2) * width
            mark(axis, x, width, episodes, COLOURS[experiment])
            if theirs is not None:
                axis.plot(x, 100 * theirs, "D", color="black", mfc="white", ms=5, zorder=4)
    handles = [plt.Rectangle((0, 0), 1, 1, color=COLOURS[experiment]) for _, experiment, _ in series]
    axis.legend([*handles, PAPER, SEED], [*(name for name, _, _ in series), "paper", "ours, one seed"], **BELOW)
    axis.set_xticks(range(len(groups)), groups)
    axis.set(title=title, ylabel="success, %", ylim=(0, 112), xlim=(-0.5, len(groups) - 0.5))
    axis.set_yticks(range(0, 101, 20))


def by_condition(axis: plt.Axes, lookup: Lookup, lines: Sequence[Line], title: str) -> None:
    series: list[Series] = []
    for line in lines:
        bars = [(lookup.of(c.setting), None if c.successes is None else c.successes / c.n) for c in line.cells]
        series.append((line.label[0], line.cells[0].setting.experiment, list(bars)))
    names = [paper.CONDITION_NAMES[cell.setting.condition].replace(" ", "\n") for cell in lines[0].cells]
    grouped_bars(axis, title, names, series)


def by_task(axis: plt.Axes, lookup: Lookup, title: str) -> None:
    series: list[Series] = []
    for name, setting, counts in paper.BY_TASK:
        rows = [[e for e in lookup.of(setting) if e.task == task] for task in TASKS]
        shares = [None if theirs is None else theirs / 75 for theirs in counts]
        series.append((name, setting.experiment, list(zip(rows, shares, strict=True))))
    grouped_bars(axis, title, ("Opening", "Closing"), series)


BELOW: dict[str, Any] = {
    "loc": "upper center",
    "bbox_to_anchor": (0.5, -0.12),
    "ncols": 2,
    "fontsize": 7.5,
    "frameon": False,
}


def mark(axis: plt.Axes, x: float, width: float, episodes: Sequence[Episode], colour: str) -> None:
    if not episodes:
        return
    axis.bar(x, percent(episodes), width * 0.92, color=colour, alpha=0.85)
    label = f"{sum(e.success for e in episodes)}/{len(episodes)}"
    y = 2 if percent(episodes) >= 20 else percent(episodes) + 3  # above a bar that is too short to hold it
    axis.text(x, y, label, rotation=90, ha="center", va="bottom", color="black", fontsize=7.5)
    groups = seeds(episodes)
    offsets = np.linspace(-0.25, 0.25, len(groups)) * width if len(groups) > 1 else [0.0]
    for offset, (_, rows) in zip(offsets, groups, strict=True):
        axis.plot(x + offset, percent(rows), "o", color="0.3", mfc="white", ms=3.5, zorder=5)


def main_comparison(lookup: Lookup) -> Figure:
    figure, axes = plt.subplots(2, 2, figsize=(11, 9), layout="constrained")
    by_condition(axes[0, 0], lookup, paper.SYSTEMS, "(a) Complete systems")
    differences(axes[0, 1], lookup)
    by_task(axes[1, 0], lookup, "(c) Combined shift by task")
    by_condition(axes[1, 1], lookup, paper.REPRESENTATIONS, "(d) Relation controls")
    return figure


def differences(axis: plt.Axes, lookup: Lookup) -> None:
    recipes = {"memcorr-literal": 0.0, "memcorr": -0.25}  # and how far below the paper's diamond they stand
    for y, condition in enumerate(("boundary", "combined")):
        for c in paper.CONTRASTS:
            is_meant = c.theirs == replace(paper.TRANSFORMER, condition=condition)
            if not is_meant or c.ours.experiment not in recipes:
                continue
            if c.points is not None and c.interval is not None:
                error = np.array([[c.points - c.interval[0]], [c.interval[1] - c.points]])
                axis.errorbar(c.points, y + 0.25, xerr=error, fmt="D", color="black", mfc="white", capsize=3)
            measured, at = paired_difference(lookup.of(c.ours), lookup.of(c.theirs)), y + recipes[c.ours.experiment]
            if measured is None:
                continue
            error = np.maximum([[measured.points - measured.low], [measured.high - measured.points]], 0)  # of rounding
            axis.errorbar(measured.points, at, xerr=error, fmt="o", color=COLOURS[c.ours.experiment], capsize=3)
    axis.axvline(0, color="0.7", linewidth=0.8)
    axis.set_yticks(range(2), ["Boundary\nextrapolation", "Combined\nshift"])
    axis.set(
        title="(b) MemCorr-DP − Visual Transformer, paired",
        xlabel="percentage points (95 % configuration bootstrap)",
        ylim=(-0.6, 1.6),
    )
    drawn = [r for r in recipes if any(e.experiment == r for e in lookup.episodes)]
    mine = [Line2D([], [], linestyle="", marker="o", color=COLOURS[r], label=r) for r in drawn]
    axis.legend(handles=[PAPER, *mine], loc="lower right", fontsize=7.5, frameon=False)


def objective(lookup: Lookup) -> Figure:
    """Correct against opposite reference after standard and after paired training, stage one."""
    figure, axes = plt.subplots(1, 2, figsize=(8, 3.9), sharey=True, layout="constrained")
    titles = ("(a) Standard training", "(b) Counterfactual paired training")
    for axis, title, lines in zip(axes, titles, (paper.OBJECTIVE[:3], paper.OBJECTIVE[3:]), strict=True):
        cells = [line.cells[0] for line in (lines[0], lines[2])]
        theirs = [100 * (cell.successes or 0) / cell.n for cell in cells]
        axis.plot([0, 1], theirs, "D--", color="black", mfc="white", linewidth=1, label="paper")
        both = [lookup.of(cell.setting) for cell in cells]
        if all(both):
            colour = COLOURS[cells[0].setting.experiment]
            for seed, rows in seeds(both[0]):
                other = [e for e in both[1] if e.train_seed == seed]
                if other:
                    axis.plot([0, 1], [percent(rows), percent(other)], color=colour, alpha=0.45, linewidth=1)
            pooled = [percent(rows) for rows in both]
            axis.plot([0, 1], pooled, "o-", color=colour, linewidth=2.5, label="ours, pooled (thin: seeds)")
            axis.set_xlabel(f"ours: correct − opposite {pooled[0] - pooled[1]:+.1f} points")
        axis.set_xticks([0, 1], ["Correct\nreference", "Opposite\nreference"])
        axis.set(title=title, xlim=(-0.3, 1.3), ylim=(0, 104))
        axis.legend(loc="upper right", fontsize=7.5, frameon=False)
    axes[0].set_ylabel("success on the original task, %")
    return figure


def positions(lookup: Lookup) -> Figure:
    """(a) Where the door stood and how the camera was turned, coloured by success there of the published recipe, or of
    ours as long as that one was not measured; (b) training scenes in blue, scenes of the combined shift in red; (c) one
    scene of the camera test."""
    policy = paper.MAIN if lookup.of(paper.MAIN) else paper.OURS
    figure = plt.figure(figsize=(12, 5.6), layout="constrained")
    parts: Any = figure.subfigures(2, 1, height_ratios=(3.7, 1.6))
    above, below = parts
    axes = above.subplots(1, 4, sharey=True)
    colours = matplotlib.colormaps["RdYlGn"]
    low, high = SPEC.band_train
    for axis, condition in zip(axes, ("boundary", "extreme", "camera", "combined"), strict=True):
        rows = lookup.of(replace(policy, condition=condition))
        axis.add_patch(plt.Rectangle((low, low), high - low, high - low, color="0.93", zorder=0))
        for scene in sorted({e.scene for e in rows}):
            here = [e for e in rows if e.scene == scene]
            marker = {-1: "<", 0: "o", 1: ">"}[int(np.sign(here[0].camera_azimuth_deg))]
            colour = colours(percent(here) / 100)
            axis.plot(*here[0].u, marker, color=colour, mec="0.25", mew=0.6, ms=7)
        name = paper.CONDITION_NAMES[condition]
        axis.set_title(f"{name}\n{percent(rows):.1f} % of {len(rows)}" if rows else name)
        axis.set(xlim=(-0.04, 1.04), ylim=(-0.04, 1.04), xlabel="$u_x$", aspect="equal")
    axes[0].set_ylabel("$u_y$")
    scale = plt.cm.ScalarMappable(plt.Normalize(0, 100), colours)
    above.colorbar(scale, ax=axes, label="success, %", shrink=0.85, aspect=18)
    above.supxlabel(
        f"(a)  {policy.experiment};  grey: training band;  ◂ ▸ camera −15° / +15°, ● original", fontsize=8.5
    )
    _draw_scenes(below)
    return figure


def _draw_scenes(figure: SubFigure) -> None:
    views = np.split(plt.imread(SCENES), 11, axis=1)
    frames = ["#1f6fb4"] * 4 + ["#c0392b"] * 4 + ["0.3"] * 3
    below = {0: "(b)  training scenes", 4: "combined shift", 8: "(c)  camera −15°", 9: "0°", 10: "+15°"}
    for number, (axis, view, colour) in enumerate(zip(figure.subplots(1, 11), views, frames, strict=True)):
        axis.imshow(view)
        axis.set(xticks=[], yticks=[])
        axis.set_xlabel(below.get(number, ""), loc="left", fontsize=8.5)
        for spine in axis.spines.values():
            spine.set(visible=True, color=colour, linewidth=2)


def phase(lookup: Lookup) -> Figure:
    figure, axes = plt.subplots(1, 2, figsize=(8, 3.6), sharey=True, layout="constrained")
    labels = ("reference offset δ, frames (negative: lags)", "reference speed ρ")
    floor, main = 80.0, paper.REPRESENTATIONS[0].cells[0]
    for axis, what, label, letter in zip(axes, PHASES, labels, "ab", strict=True):
        for policy in (paper.MAIN, paper.OURS):
            measured = [(value, share(lookup.of(setting))) for value, setting in lookup.phases(policy, what)]
            points = [(value, s) for value, s in measured if s is not None]
            if not points:
                continue
            x = [value for value, _ in points]
            y = [s.percent for _, s in points]
            error = [[s.percent - s.low for _, s in points], [s.high - s.percent for _, s in points]]
            look: dict[str, Any] = {"fmt": "o-", "color": COLOURS[policy.experiment], "label": policy.experiment}
            axis.errorbar(x, y, yerr=np.maximum(error, 0), capsize=3, **look)
            axis.set_xticks(x)
            floor = min(floor, *(s.low - 5 for _, s in points))
        default, theirs = 0 if what == "phase_offset" else 1, 100 * (main.successes or 0) / main.n
        axis.plot(default, theirs, "D", color="black", mfc="white", label="paper (default phase)")
        axis.set(xlabel=label, title=f"({letter})")
        axis.legend(loc="lower left", fontsize=7.5, frameon=False)
    axes[0].set(ylabel="success, % (boundary extrapolation)", ylim=(max(0.0, floor), 101.5))
    return figure


Drawn = tuple[Callable[[Lookup], Figure], str]  # how, and the caption
FIGURES: dict[str, Drawn] = {
    "main": (main_comparison, "Closed-loop system comparison and matched relation controls."),
    "objective": (objective, "Reference intervention at stage one, boundary extrapolation, ground-truth relations."),
    "positions": (
        positions,
        "Position and viewpoint tests: (a) success at every tested configuration; (b) training "
        "scenes and scenes of the combined shift; (c) the camera test turns only the query camera.",
    ),
    "phase": (
        phase,
        "Sensitivity to the reference phase, 95 % configuration-bootstrap intervals. memcorr was trained with phase "
        "errors from −32 to 64 frames: all of these lie inside.",
    ),
}


def worth_drawing(lookup: Lookup, name: str) -> bool:
    """Whether there is anything of ours in a figure of the paper."""
    if name == "objective":
        return any(lookup.of(line.cells[0].setting) for line in paper.OBJECTIVE)
    if name == "phase":
        return any(lookup.phases(policy, what) for policy in (paper.MAIN, paper.OURS) for what in PHASES)
    if name == "viewpoints":
        return any(e.disturbance.startswith("orbit=") for e in lookup.episodes)
    return True


def draw_all(lookup: Lookup, chosen: dict[str, Drawn], out: Path) -> dict[str, str]:
    """Writes OUT/NAME.png; returns the same figures as SVG."""
    out.mkdir(exist_ok=True)
    drawn = {}
    for name, (draw, _) in chosen.items():
        if not worth_drawing(lookup, name):
            (out / f"{name}.png").unlink(missing_ok=True)
            continue
        with matplotlib.rc_context(STYLE):
            figure = draw(lookup)
            with written_whole(out / f"{name}.png") as temporary:
                figure.savefig(temporary, format="png", dpi=150, metadata={"Software": None})
            text = io.StringIO()
            figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
            plt.close(figure)
        drawn[name] = text.getvalue()
    return drawn
