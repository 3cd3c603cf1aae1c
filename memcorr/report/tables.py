"""Every table of the paper with ours beside it. A table is text; Markdown and HTML are two ways to write it."""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..evaluation.episodes import Episode
from ..evaluation.intervention import Intervention
from ..spec import SPEC, TASKS
from ..worlds.scenes import demonstration_scenes
from . import paper
from .lookup import PHASES, Lookup, door_follows, first_chunk_follows, matching
from .paper import Cell, Line
from .statistics import paired_difference, percent, share

NOT_MEASURED = "–"  # a cell of a row in which something else was measured; other rows are left out


@dataclass(frozen=True)
class Table:
    title: str
    caption: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def markdown(self) -> str:
        lines = [self.header, ("---",) * len(self.header), *self.rows]
        rows = "\n".join(f"| {' | '.join(map(_quoted, line))} |" for line in lines)
        return f"### {self.title}\n\n{self.caption}\n\n{rows}\n"

    def html(self) -> str:
        def cells(row: tuple[str, ...], tag: str) -> str:
            return "".join(f"<{tag}{_style(c)}>{_unbroken(html.escape(c))}</{tag}>" for c in row)

        body = "\n".join(f"<tr>{cells(row, 'td')}</tr>" for row in self.rows)
        return (
            f"<h3>{html.escape(self.title)}</h3>\n<p>{html.escape(self.caption)}</p>\n<div class='scroll'><table>\n"
            f"<thead><tr>{cells(self.header, 'th')}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>\n"
        )


def _quoted(text: str) -> str:
    """A name out of a file stays in its cell and is not markup."""
    return re.sub(r"([|\\`<])", r"\\\1", " ".join(text.split()) if text.strip() else text)


def _style(text: str) -> str:
    return " class='missing'" if text == NOT_MEASURED else ""


def _unbroken(text: str) -> str:
    """Lines may break between a count and its interval, never inside either."""
    for part in (" %", " (", ", ") if "[" in text else ():
        text = text.replace(part, part.replace(" ", "&nbsp;"))
    return text


def count(successes: int, n: int) -> str:
    return f"{successes}/{n} ({100 * successes / n:.2f} %)"


def ours(episodes: Sequence[Episode]) -> str:
    measured = share(episodes)
    if measured is None:
        return NOT_MEASURED
    kind = " exact" if measured.exact else ""
    return f"{count(measured.successes, measured.n)} [{measured.low:.1f}, {measured.high:.1f}{kind}]"


def against(episodes: Sequence[Episode], cell: Cell) -> str:
    """Ours minus the paper's, percentage points."""
    if not episodes or cell.successes is None:
        return "–"
    return f"{percent(episodes) - 100 * cell.successes / cell.n:+.2f}"


def comparison(lookup: Lookup, title: str, caption: str, labels: tuple[str, ...], lines: Sequence[Line]) -> Table:
    """Three columns per condition: the paper, ours with its interval, the difference. A line of which nothing was
    measured is left out."""
    names = [paper.CONDITION_NAMES[cell.setting.condition] for cell in lines[0].cells]
    header = [*labels]
    for name in names:
        header += [f"{name}: paper", f"{name}: ours [95 %]", "Δ points"]
    rows = []
    for line in lines:
        if not any(lookup.of(cell.setting) for cell in line.cells):
            continue
        row = [*line.label]
        for cell in line.cells:
            episodes = lookup.of(cell.setting)
            theirs = NOT_MEASURED if cell.successes is None else count(cell.successes, cell.n)
            theirs = theirs if cell.n else "–"
            row += [theirs, ours(episodes), against(episodes, cell)]
        rows.append(tuple(row))
    return Table(title, caption, tuple(header), tuple(rows))


def contrasts(lookup: Lookup) -> Table:
    rows = []
    for c in paper.CONTRASTS:
        measured = paired_difference(lookup.of(c.ours), lookup.of(c.theirs))
        if measured is None:
            continue
        theirs = "–" if c.points is None else f"{c.points:+.2f}"
        theirs += f" [{c.interval[0]:.2f}, {c.interval[1]:.2f}]" if c.interval else ""
        left_out = f"{measured.n}" + (f" ({measured.unmatched} without partner)" if measured.unmatched else "")
        value = f"{measured.points:+.2f} [{measured.low:.2f}, {measured.high:.2f}]"
        gap = "–" if c.points is None else f"{measured.points - c.points:+.2f}"
        rows.append((c.label, theirs, value, gap, left_out))
    return Table(
        "Paired differences",
        "Percentage points within matched rollouts (same configuration, task and training seed).",
        ("Difference", "paper [95 %]", "ours [95 %]", "Δ points", "matched rollouts"),
        tuple(rows),
    )


def by_task(lookup: Lookup) -> Table:
    rows = []
    for name, setting, counts in paper.BY_TASK:
        if not lookup.of(setting):
            continue
        row = [name]
        for task, theirs in zip(TASKS, counts, strict=True):
            episodes = [e for e in lookup.of(setting) if e.task == task]
            row += ["figure only" if theirs is None else count(theirs, 75), ours(episodes)]
        rows.append(tuple(row))
    header = ("Method", "Opening: paper", "Opening: ours [95 %]", "Closing: paper", "Closing: ours [95 %]")
    return Table("Combined shift by task", "Figure main, panel (c).", header, tuple(rows))


def diagnostics(lookup: Lookup) -> Table:
    policies = [p for p in (paper.MAIN, paper.OURS) if lookup.of(p)]

    def followed(episodes: Sequence[Episode], test: Callable[[Episode], bool]) -> str:
        return count(sum(map(test, episodes)), len(episodes)) if episodes else NOT_MEASURED

    rows: list[tuple[str, ...]] = []
    for condition, (error, fallbacks, decisions) in paper.MATCHING.items():
        name = paper.CONDITION_NAMES[condition].lower()
        measured = [matching(lookup.of(replace(p, condition=condition))) for p in policies]
        means = [NOT_MEASURED if m.mean_error_mm is None else f"{m.mean_error_mm:.2f} mm" for m in measured]
        rows.append((f"Mean 3D correspondence error, {name}", f"{error:.2f} mm", *means))
        counts = [f"{m.fallbacks}/{m.decisions}" if m.decisions else NOT_MEASURED for m in measured]
        rows.append((f"Fallback decisions, {name}", f"{fallbacks}/{decisions}", *counts))
    for label, test in (("first chunk", first_chunk_follows), ("final door displacement", door_follows)):
        mine = [followed(lookup.of(p.showing(reference="opposite")), test) for p in policies]
        rows.append((f"Opposite reference: {label} follows it", count(paper.FOLLOWING[label], 300), *mine))
    for training, lines, theirs in (
        ("standard", paper.OBJECTIVE[:3], "not reported"),
        ("paired", paper.OBJECTIVE[3:], f"{count(600, 600)}, derived: 300 of each reference"),
    ):
        episodes = [e for line in lines for e in lookup.of(line.cells[0].setting) if e.shown.reference != "empty"]
        if episodes and policies:  # one stage one for all of them
            same = ("the same",) * (len(policies) - 1)
            label = f"Stage one, {training}: first chunk follows the supplied reference"
            rows.append((label, theirs, followed(episodes, first_chunk_follows), *same))
    return Table(
        "Diagnostics",
        "Computed after the rollouts from simulator truth; no policy sees them. A first chunk follows a direction when "
        "it is closer, by cosine, to the scripted expert's first chunk of that task in the same scene.",
        ("Quantity", "paper", *(p.experiment for p in policies)),
        tuple(rows) if policies else (),
    )


def schedules(lookup: Lookup) -> Table:
    """Two trainings, two schedules: who listens to the reference after stage one?"""
    rows = []
    for (training, schedule), experiment in paper.SCHEDULES.items():
        base = replace(paper.TRUE, experiment=experiment, stage="stage-one")
        shown = [lookup.of(setting) for setting in paper.interventions(base).values()]
        if not any(shown):
            continue
        referenced = [e for episodes in (shown[0], shown[2]) for e in episodes]
        follow = count(sum(map(first_chunk_follows, referenced)), len(referenced)) if referenced else NOT_MEASURED
        rows.append((training, schedule, *map(ours, shown), follow))
    return Table(
        "Schedule and objective",
        "Stage one, boundary extrapolation, ground-truth relations; success on the original task. The paper's linear "
        "schedule leaves 60 % of the action at its last step, enough to tell opening from closing without looking at "
        "the reference; the squared cosine leaves nothing.",
        ("Objective", "Schedule", "Correct reference", "Empty", "Opposite", "First chunk follows the reference"),
        tuple(rows),
    )


def ranges(lookup: Lookup) -> Table:
    trained = demonstration_scenes()[: SPEC.train_pairs]
    (x0, y0), (x1, y1) = np.min([s.u for s in trained], axis=0), np.max([s.u for s in trained], axis=0)
    covered = f"x {x0:.2f}–{x1:.2f}, y {y0:.2f}–{y1:.2f}"
    rows = [("Training", "(B, B)", "original", str(SPEC.train_pairs), covered, "original", str(len(trained)))]
    for condition, (position, camera, scenes) in paper.RANGES.items():
        here = [e for e in lookup.episodes if (e.condition, e.scene_seed) == (condition, lookup.scene_seed)]
        used = {(e.scene, e.u, e.camera_azimuth_deg) for e in here}
        if used:
            xs, ys, angles = [m[1][0] for m in used], [m[1][1] for m in used], sorted({m[2] for m in used})
            spread = f"x {min(xs):.2f}–{max(xs):.2f}, y {min(ys):.2f}–{max(ys):.2f}"
            row = (spread, ", ".join(f"{a:+.0f}°" if a else "original" for a in angles), str(len(used)))
        else:
            row = (NOT_MEASURED, "–", "0")
        rows.append((paper.CONDITION_NAMES[condition], position, camera, str(scenes), *row))
    return Table(
        "Training and test distributions",
        "B = [0.2, 0.8], N = [0.05, 0.15] ∪ [0.85, 0.95], E = [0, 0.05] ∪ [0.95, 1]. Ours: what the rollouts "
        "actually covered.",
        ("Condition", "Position", "Query camera", "Scenes", "covered positions", "covered cameras", "covered scenes"),
        tuple(rows),
    )


def phases(lookup: Lookup) -> Table:
    rows = []
    for policy in (paper.MAIN, paper.OURS):
        for what, label in zip(PHASES, ("offset {:+.0f} frames", "speed × {:.2f}"), strict=True):
            measured = lookup.phases(policy, what)
            rows += [(policy.experiment, label.format(value), ours(lookup.of(setting))) for value, setting in measured]
    return Table(
        "Sensitivity to the reference phase",
        "Boundary extrapolation. memcorr was trained with phase errors from −32 to 64 frames, so that ±16 lie inside; "
        "memcorr-literal was not. The paper shows these as a figure only: tolerant of moderate mismatch, lower at +16.",
        ("Policy", "Phase", "success [95 %]"),
        tuple(rows),
    )


def in_words(shown: Intervention) -> str:
    """What was shown, in words."""
    words = [f"reference {shown.reference}", f"matcher {shown.matcher}"]
    if shown.pairing != "kept":
        words.append("permuted pairing")
    if not shown.usual_phase:
        clock = f"phase {shown.phase_offset:+d}, × {shown.phase_speed:g}"
        words.append("phase as seen" if shown.phase_from == "seen" else clock)
    if shown.lifting != "rigid":
        words.append(f"lifting {shown.lifting}")
    return ", ".join(words)


def further(lookup: Lookup) -> Table | None:
    """Whatever else was measured: other scenes, matchers, unfinished or scripted policies."""
    rows = []
    for setting, scene_seed, episodes in lookup.further():
        names = (f"{setting.experiment}, {setting.stage}", setting.condition, str(scene_seed), in_words(setting.shown))
        rows.append((*names, ours(episodes)))
    header = ("Policy", "Condition", "Scene seed", "Shown", "ours [95 %]")
    return Table("Further measurements", "No counterpart in the paper's tables.", header, tuple(rows)) if rows else None


def all_tables(lookup: Lookup) -> tuple[list[Table], list[Table]]:
    """The paper's, those of which something was measured, and the one of all further measurements if there are any."""
    matcher = (
        f"Ours matches with “{lookup.matcher}” where the paper uses RoMa v2. The paper's numbers stand beside the "
        "published recipes, “-literal”; “memcorr” is our own, which differs from memcorr-literal in stage two."
    )
    tables = [
        comparison(lookup, "Complete policy systems", matcher, ("Method", "Params"), paper.SYSTEMS),
        comparison(
            lookup, "Representation controls with matched architecture", matcher, ("Condition",), paper.REPRESENTATIONS
        ),
        contrasts(lookup),
        by_task(lookup),
        comparison(
            lookup,
            "Training procedure (stage one)",
            "Ground-truth relations or an empty condition; success is judged by the original task.",
            ("Training", "Reference"),
            paper.OBJECTIVE,
        ),
        comparison(lookup, "Reference condition (final policies)", matcher, ("Condition",), paper.REFERENCE),
        comparison(lookup, "Stronger shifts", matcher, ("Condition",), paper.STRONG),
        schedules(lookup),
        comparison(
            lookup,
            "Point pairing",
            "Same checkpoints, ground-truth geometry; the permutation exchanges the live points among the pairs.",
            ("Pairing",),
            paper.PAIRING,
        ),
        phases(lookup),
        diagnostics(lookup),
        ranges(lookup),
    ]
    rest = further(lookup)
    return [table for table in tables if table.rows], [rest] if rest else []
