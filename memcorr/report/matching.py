"""How well the points are found: our matcher beside the paper's RoMa v2, like for like, and in all ten worlds.

Reads the error tables that `memcorr match` (errors.json) and `memcorr matcher evaluate` (matching.json) leave
beside the rollouts; what happens in closed loop comes from the rollouts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..files import read_json
from ..spec import PUBLISHED_CACHE_MM, PUBLISHED_CACHE_POINTS, SPEC, WORLD_TASKS, Lifting
from . import paper
from .lookup import Lookup, Matching, matching, setting_of
from .tables import NOT_MEASURED, Table

CACHE, LIVE = "errors.json", "matching.json"
ANGLES = {"validation": "0°", "camera": "±15°"}
COLUMNS: dict[tuple[str, Lifting], str] = {
    ("embedded", "paper"): "embedded, lifted as in the paper",
    ("embedded", "rigid"): "embedded, ours",
    ("embedded", "object"): "embedded, ours without the rigid fit",
    ("flow", "rigid"): "flow, ours",
}


@dataclass(frozen=True, kw_only=True)
class Errors:
    """3D errors over the valid points of some rows."""

    rows: int
    valid_points: int
    median_mm: float
    mean_mm: float
    p95_mm: float
    p99_mm: float


@dataclass(frozen=True, kw_only=True)
class CacheErrors(Errors):
    """errors.json of a cache."""

    matcher: str
    lifting: Lifting
    auc: float | None = None


@dataclass(frozen=True, kw_only=True)
class LiveErrors(Errors):
    """One setting of matching.json."""

    matcher: str
    lifting: Lifting
    world: str
    setting: str
    first_frame: Errors


@dataclass(frozen=True)
class Live:
    tables: list[LiveErrors]


@dataclass(frozen=True)
class Measured:
    """Error tables found beside the rollouts."""

    cache: list[CacheErrors]
    live: list[LiveErrors]

    @staticmethod
    def find(places: Sequence[Path]) -> Measured:
        folders = [place for place in places if place.is_dir()]
        caches = [path for place in folders for path in sorted(place.rglob(CACHE))]
        lives = [path for place in folders for path in sorted(place.rglob(LIVE))]
        remedy = "make it again, or take it away"
        return Measured(
            [read_json(path, CacheErrors, "an error table", remedy) for path in caches],
            [table for path in lives for table in read_json(path, Live, "a list of error tables", remedy).tables],
        )


def like_for_like(lookup: Lookup, measured: Measured) -> Table:
    """Door: the cache rows, and the closed loop of the main policy."""
    of = {(t.matcher, t.lifting): t for t in measured.cache}
    rows: list[tuple[str, ...]] = []
    names = {"median_mm": "median", "mean_mm": "mean", "p95_mm": "95th percentile", "p99_mm": "99th percentile"}
    for key, theirs in PUBLISHED_CACHE_MM.items():
        cells = [f"{getattr(of[c], key):.2f} mm" if c in of else NOT_MEASURED for c in COLUMNS]
        rows.append((f"10,000 training rows, {names[key]}", f"{theirs:.2f} mm", *cells))
    points = [f"{of[c].valid_points:,}" if c in of else NOT_MEASURED for c in COLUMNS]
    rows.append(("valid points of 160,000", f"{PUBLISHED_CACHE_POINTS:,}", *points))
    areas = [f"{of[c].auc:.3f}" if c in of and of[c].auc is not None else NOT_MEASURED for c in COLUMNS]
    rows.append(("AUC of confidence for an error below 10 mm", "not reported", *areas))
    for condition, (error, fallbacks, decisions) in paper.MATCHING.items():
        name = paper.CONDITION_NAMES[condition].lower()
        found = [_rollouts(lookup, condition, *column) for column in COLUMNS]
        means = [NOT_MEASURED if m is None or m.mean_error_mm is None else f"{m.mean_error_mm:.2f} mm" for m in found]
        rows.append((f"policy rollouts, {name}: mean over decisions", f"{error:.2f} mm", *means))
        shares = [f"{m.fallbacks}/{m.decisions}" if m is not None else NOT_MEASURED for m in found]
        rows.append((f"policy rollouts, {name}: fallback decisions", f"{fallbacks}/{decisions}", *shares))
    return Table(
        "Matching error, door, like for like",
        "RoMa v2 is the paper's, on its own renderings. Lifted as in the paper: bilinear depth, every answer used, "
        "confidence as it comes. Ours: depth from the object's own pixels, no answer where the matcher has no trust, "
        "points moved to where the one rigid motion that most agree on carries their references. The matcher "
        "“embedded” practised on Meta-World's other objects and on made-up assemblies; it has never seen a door, "
        "nor any object of the ten worlds.",
        ("Quantity", "RoMa v2, paper", *COLUMNS.values()),
        tuple(rows),
    )


def _rollouts(lookup: Lookup, condition: str, matcher: str, lifting: Lifting) -> Matching | None:
    setting = replace(paper.MAIN, condition=condition).showing(matcher=matcher, lifting=lifting)
    rows = [e for e in lookup.episodes if setting_of(e) == setting and e.scene_seed == lookup.scene_seed]
    return matching(rows) if rows else None


def in_all_worlds(measured: Measured) -> Table | None:
    """First frame and expert rollouts, straight and turned camera."""
    of = {(t.world, t.setting, t.matcher): t for t in measured.live if t.lifting == "rigid"}
    rows = []
    for world in WORLD_TASKS:
        for setting, angle in ANGLES.items():
            tables = [of.get((world, setting, matcher)) for matcher in ("embedded", "flow")]
            if not any(tables):
                continue
            firsts = [t and t.first_frame for t in tables]
            rows.append((world, angle, *map(_errors, (*firsts, *tables))))
    if not rows:
        return None
    header = ("World", "Camera", *(f"{m}: {when}" for when in ("first frame", "rollout") for m in ("embedded", "flow")))
    return Table(
        "Matching error in ten worlds, none of which the matcher practised on",
        "Median / mean / 95th percentile in millimetres, and the share of valid points. Training positions, references "
        "of pair 0, elapsed-time phase; the expert executes both tasks. Both matchers lifted our way.",
        header,
        tuple(rows),
    )


def _errors(table: Errors | None) -> str:
    if table is None:
        return NOT_MEASURED
    share = 100 * table.valid_points / (SPEC.points * table.rows)
    return f"{table.median_mm:.1f} / {table.mean_mm:.1f} / {table.p95_mm:.1f}, {share:.0f} %"
