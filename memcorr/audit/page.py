"""What an audit leaves: audit.json with every row, audit.png, and audit.html, one self-contained page."""

from __future__ import annotations

import base64
import html
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from ..files import write_json
from ..folders import write_text, written_whole
from ..machine import provenance
from ..report.figures import STYLE
from ..report.page import CSS
from .evidence import Check, Findings, Level, Measure, Verdict, in_words, reservations

COLOURS = {"correct": "#1f6fb4", "empty": "#999999", "opposite": "#d9822b", "false": "#7a5aa6", "noise": "#444444"}
SHORT = {"online": "in rollouts", "offline": "on recorded data"}
HOW = (
    "The same scene and the same task; only what it is shown differs: the right condition, none, that of the opposite "
    "task, a false one of another object, and the right one with noise in place of all images. Success and error are "
    "always judged by the task itself, so a policy that listens, or looks, loses both under the others, and one that "
    "does not keeps them. Brackets are 95 % intervals over scenes, "
    "resampled with their tasks together; where all scenes are alike the exact binomial one stands in. “Does not "
    "listen” is said only where the interval leaves out a difference of 20 points (0.2 sd)."
)


@dataclass(frozen=True)
class Audit:
    """Everything that was found."""

    name: str
    policy: str  # as it was asked for
    given: tuple[str, ...]
    train_seed: int | None
    checkpoint: str  # first digits of the SHA-256 of the weights, of memcorr's own
    verdict: Verdict
    because: str
    checklist: tuple[Check, ...]
    findings: tuple[Findings, ...]

    @property
    def sentence(self) -> str:
        return f"{self.name}: {self.verdict} ({self.because})"

    @property
    def reservations(self) -> list[str]:
        return reservations(self.findings) if self.verdict == "listens" else []

    def json(self) -> dict[str, Any]:
        return asdict(self) | {"reservations": self.reservations, "made_with": provenance()}


def write_audit(audit: Audit, out: Path) -> None:
    write_json(out / "audit.json", audit.json())
    with written_whole(out / "audit.png") as temporary:
        draw(audit, temporary)
    write_text(out / "audit.html", page(audit, (out / "audit.png").read_bytes()))


def lines(audit: Audit) -> list[str]:
    """For the terminal."""
    words = []
    for found in audit.findings:
        words.append(f"{found.kind}: {found.where}")
        words += [f"  {level.shown:9} {amount(found, level)}" for level in found.levels]
        words += [f"  {in_words(measure):66} {measure.verdict}" for measure in found.measures]
    words += [f"{check.answer:16} {check.question:46} {check.because}".rstrip() for check in audit.checklist]
    return [*words, audit.sentence, *(f"but {but}" for but in audit.reservations)]


def amount(found: Findings, level: Level) -> str:
    if level.count is not None:
        return f"{level.count}/{level.n} done [{level.low:.0f}, {level.high:.0f}] %"
    return f"error {level.value:.2f} [{level.low:.2f}, {level.high:.2f}] {found.unit}, {level.n} rows"


def draw(audit: Audit, path: Path) -> None:
    with plt.rc_context(STYLE):
        rows = len(audit.findings)
        figure, axes = plt.subplots(
            rows, 2, figsize=(9, 2.7 * rows + 0.4), squeeze=False, layout="constrained", width_ratios=(2, 3)
        )
        for row, found in enumerate(audit.findings):
            draw_levels(axes[row, 0], found)
            draw_measures(axes[row, 1], found)
        figure.suptitle(f"{audit.name}: {audit.verdict}", x=0.01, ha="left", fontsize=11)
        figure.savefig(path, format="png", dpi=150, metadata={"Software": None})
        plt.close(figure)


def draw_levels(axis: Axes, found: Findings) -> None:
    for i, level in enumerate(found.levels):
        axis.bar(i, level.value, color=COLOURS[level.shown], width=0.6)
        down, up = max(level.value - level.low, 0), max(level.high - level.value, 0)
        axis.errorbar(i, level.value, [[down], [up]], color="0.2", capsize=4)
        text = f"{level.count}/{level.n}" if level.count is not None else f"{level.value:.2f}"
        axis.annotate(text, (i, level.high), (0, 3), textcoords="offset points", ha="center")
    axis.set_xticks(range(len(found.levels)), [level.shown for level in found.levels])
    axis.set_title(f"{SHORT[found.kind]}: {found.where}", fontsize=8.5)
    axis.set_ylabel("success, %" if found.kind == "online" else "action error, sd")
    axis.set_ylim(0, 115 if found.kind == "online" else None)
    axis.margins(y=0.15)


def draw_measures(axis: Axes, found: Findings) -> None:
    """Each as a share of its own scale from not listening (0) on, so that they fit under each other."""
    for i, measure in enumerate(reversed(found.measures)):
        value, low, high = (scaled(measure, x, found.kind) for x in (measure.value, measure.low, measure.high))
        colour = "#1f6fb4" if measure.verdict == "listens" else "0.5"
        axis.errorbar(value, i, xerr=[[max(value - low, 0)], [max(high - value, 0)]], fmt="o", color=colour, capsize=3)
    axis.axvline(0, color="0.3", linewidth=0.8)
    axis.set_yticks(range(len(found.measures)), [m.name for m in reversed(found.measures)], fontsize=7.5)
    axis.set_ylim(-0.6, len(found.measures) - 0.4)
    axis.set_xlim(*((min(axis.get_xlim()[0], -5), 105) if found.kind == "online" else axis.get_xlim()))
    units = {
        "online": "0: does not listen, 100: as shown",
        "offline": "sd; of the first chunk, 1: as it is shown",
    }
    axis.set_xlabel(units[found.kind], fontsize=7.5)


def scaled(measure: Measure, x: float, kind: str) -> float:
    if measure.deaf == 50:
        return 2 * (x - 50) / (1 if kind == "online" else 100)
    return x


def page(audit: Audit, picture: bytes) -> str:
    image = f"<img alt='conditions and measures' src='data:image/png;base64,{base64.b64encode(picture).decode()}'>"
    seed = "" if audit.train_seed is None else f", training seed {audit.train_seed}, weights {audit.checkpoint}"
    asked = html.escape(" ".join([audit.policy, *audit.given]) + seed)
    made = ", ".join(f"{key} {value}" for key, value in provenance().items() if value)
    why = html.escape("; but ".join([audit.because, *audit.reservations]))
    return (
        f"<!doctype html>\n<html lang='en'><head><meta charset='utf-8'><title>{html.escape(audit.name)}</title>"
        f"<meta name='viewport' content='width=device-width'><style>{CSS}</style></head>\n<body>"
        f"<h1>{html.escape(audit.name)}: {audit.verdict}</h1>\n<p>{why}.</p>\n<figure>{image}</figure>\n"
        + rows_of("Checklist", ("", "", "because"), [(c.question, c.answer, c.because) for c in audit.checklist])
        + "".join(table(found) for found in audit.findings)
        + f"<h3>How to read this</h3><p>{html.escape(HOW)}</p>"
        f"<p>Audited: {asked}. Made with {html.escape(made)}. Every row is in audit.json.</p></body></html>\n"
    )


def table(found: Findings) -> str:
    rows = [(f"condition: {level.shown}", amount(found, level), "") for level in found.levels]
    rows += [(m.name, in_words(m).removeprefix(m.name), m.verdict) for m in found.measures]
    return rows_of(f"{SHORT[found.kind].capitalize()}: {found.where}", ("", "measured", "says"), rows)


def rows_of(title: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<h3>{html.escape(title)}</h3><div class='scroll'><table><tr>{head}</tr>{body}</table></div>\n"
