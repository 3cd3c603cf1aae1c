"""`memcorr report`: every table and figure of the paper from `episodes.jsonl` files, and the error tables beside them.

Writes REPORT.md, its figures as PNG, and report.html, one self-contained page. The same rollouts give
the same bytes.
"""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from tqdm import tqdm

from ..evaluation.episodes import find_episodes
from ..folders import claimed, write_text
from ..spec import SPEC
from . import figures as paper_figures
from .contests import contest, one_recording
from .figures import draw_all
from .lookup import Lookup
from .matching import Measured, in_all_worlds, like_for_like
from .paper import settings
from .robustness import baselines, curves, disturbances, exchanges, strangers, viewpoints, worlds
from .tables import Table, all_tables

FIGURES = paper_figures.FIGURES | {
    "robustness": (
        curves,
        "Success against the size of a sensor fault, door; 95 % intervals.",
    ),
    "viewpoints": (
        viewpoints,
        "Success against how far the camera is turned, to either side, door; 95 % intervals. The paper turns by "
        "15 degrees, about a point that it does not name.",
    ),
}
TITLE = "MemCorr-DP: measured beside published"
CSS = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 1240px; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.6em; } h3 { margin: 2em 0 .2em; } p { margin: .3em 0 .8em; color: #444; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { padding: .35em .6em; text-align: left; border-bottom: 1px solid #ddd; vertical-align: top; }
th { border-bottom: 2px solid #888; background: #f6f6f6; } td.missing { color: #999; }
ul { columns: 3 20em; padding-left: 1.2em; }
figure { margin: 1.5em 0; } figure img { max-width: 100%; } figcaption { color: #444; }
"""


def introduction(lookup: Lookup) -> str:
    """What the reader must know before comparing."""
    trained = sorted({e.train_seed for e in lookup.episodes if e.train_seed is not None})
    seeds = ", ".join(map(str, trained)) or "none"
    return (
        f"{len(lookup.episodes):,} rollouts; training seeds {seeds} (paper: 42, 43, 44); tables use scene seed "
        f"{lookup.scene_seed} and the matcher “{lookup.matcher}” where the paper uses RoMa v2. Brackets are 95 % "
        f"configuration-bootstrap intervals ({SPEC.resamples:,} resamples, percentile): they speak about "
        "configurations, given the trained models; where every rollout ends alike that interval is a point, and the "
        "exact binomial one over configurations (Clopper–Pearson) stands there instead. Time-outs and rollouts with "
        "fallback decisions count. The matcher “embedded” has never seen an object of the ten worlds. A dash (–) "
        "stands where nothing was measured; a row without rollouts is left out." + missing(lookup)
    )


def missing(lookup: Lookup) -> str:
    """Which policies of the paper's tables have no rollouts yet."""
    asked = dict.fromkeys(setting.experiment for setting in sorted(settings(), key=lambda s: s.experiment))
    lacking = [name for name in asked if not any(e.experiment == name for e in lookup.episodes)]
    return f" Not measured yet, and absent below: {', '.join(lacking)}." if lacking else ""


def markdown(lookup: Lookup, tables: Sequence[Table], figures: Iterable[str]) -> str:
    """Contents, tables, figures: what was measured first."""
    contents = "\n".join(f"- [{t.title}](#{anchor(t.title)})" for t in tables)
    pictures = "\n".join(f"![{FIGURES[name][1]}](figures/{name}.png)\n\n{FIGURES[name][1]}\n" for name in figures)
    body = "\n".join(t.markdown() for t in tables)
    return (
        f"# {TITLE}\n\n{introduction(lookup)}\n\n{contents}\n- [Figures](#figures)\n\n{body}\n### Figures\n\n{pictures}"
    )


def anchor(title: str) -> str:
    """What a heading of Markdown is linked by: lower case, no punctuation, hyphens for spaces."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def page(lookup: Lookup, tables: Sequence[Table], figures: dict[str, str]) -> str:
    """Everything inline, so that the file opens from disk and can be sent around alone."""
    images = []
    for name, svg in figures.items():
        data, caption = base64.b64encode(svg.encode()).decode(), html.escape(FIGURES[name][1])
        image = f"<img alt='{caption}' src='data:image/svg+xml;base64,{data}'>"
        images.append(f"<figure>{image}<figcaption>{caption}</figcaption></figure>")
    return (
        f"<!doctype html>\n<html lang='en'><head><meta charset='utf-8'><title>{TITLE}</title>"
        f"<meta name='viewport' content='width=device-width'><style>{CSS}</style></head>\n<body><h1>{TITLE}</h1>\n"
        f"<p>{html.escape(introduction(lookup))}</p>\n<ul>\n"
        + "\n".join(f"<li><a href='#{anchor(t.title)}'>{html.escape(t.title)}</a></li>" for t in tables)
        + "\n</ul>\n"
        + "\n".join(f"<section id='{anchor(t.title)}'>{t.html()}</section>" for t in tables)
        + "\n".join(images)
        + "</body></html>\n"
    )


def complete(lookup: Lookup, measured: Measured) -> list[Table]:
    """The paper's tables, then what it does not have; whatever else was measured comes last."""
    paper, further = all_tables(lookup)
    matching = [like_for_like(lookup, measured), in_all_worlds(measured)]
    robust = [
        contest(lookup.episodes, lookup.matcher),
        baselines(lookup),
        *disturbances(lookup),
        worlds(lookup),
        exchanges(lookup),
    ]
    ours = [*matching, *robust, one_recording(lookup.episodes)]
    return [*paper, *(table for table in ours if table is not None and table.rows), *further]


def write_report(
    places: Sequence[str | Path], out: str | Path, matcher: str | None = None, scene_seed: int | None = None
) -> Path:
    """Reads every episodes.jsonl below `places`; returns the HTML page."""
    sources = [Path(place) for place in places]
    found = find_episodes(sources)
    own = [e for e in found if not e.camera and e.shown.masks == "simulator"]
    lookup, measured = Lookup(own or found, matcher, scene_seed), Measured.find(sources)
    parts = len(FIGURES) + 1
    with claimed(Path(out), "figures") as folder, tqdm(total=parts, desc="report", unit="part", disable=None) as bar:
        figures: dict[str, str] = {}
        for name, drawn in FIGURES.items():
            bar.set_postfix_str(f"figure: {name}")
            figures |= draw_all(lookup, {name: drawn}, folder / "figures")
            bar.update()
        bar.set_postfix_str("tables")
        tables = complete(lookup, measured)
        if (elsewhere := strangers(found)).rows:
            tables.append(elsewhere)
        bar.update()
        write_text(folder / "REPORT.md", markdown(lookup, tables, figures))
        write_text(folder / "report.html", page(lookup, tables, figures))
    return folder / "report.html"
