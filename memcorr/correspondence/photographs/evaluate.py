"""`memcorr matcher evaluate --photographs`: how far off a matcher is on real pictures.

Shares of points within 1, 2 and 4 pixels of the 128 x 128 crop; for the stereo pair also millimetres, lifted with the
true depth at the located pixel. Nothing is fitted: these are the matcher's own answers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct
from tqdm import tqdm

from ...errors import UserError
from ...files import read_json, write_json
from ...folders import claimed
from ...machine import threads
from ...spec import Array
from ..cache import auc
from ..matcher import Matcher, load_matcher, matcher_label, weights_digest
from .views import SETTINGS, STEREO, PhotoPair, pairs, pictures_digest

WITHIN = (1, 2, 4)  # pixels
COUNT = 2  # pairs of each photograph and setting
TABLES = "photographs.json"


class Table(Struct, frozen=True, forbid_unknown_fields=True):
    matcher: str
    weights: str  # of the embedded matcher
    setting: str
    seed: int
    pictures: str  # digests
    pairs: int
    points: int
    within_1px: float
    within_2px: float
    within_4px: float
    median_px: float
    auc_2px: float | None = None  # of the matcher's confidence, for being within 2 pixels
    median_mm: float | None = None  # where depth is true
    p95_mm: float | None = None


def measure_photographs(
    settings: Sequence[str], matcher: str, seed: int, out: Path, count: int = COUNT
) -> Iterator[dict[str, Any]]:
    """Tables of every setting as they come; each goes into `out`/photographs.json."""
    if unknown := [setting for setting in settings if setting not in SETTINGS]:
        raise UserError(f"unknown setting {unknown[0]!r}: choose from {', '.join(SETTINGS)}")
    loaded, pictures = load_matcher(matcher), pictures_digest()  # complain before anything is written
    about = {"matcher": matcher_label(matcher), "weights": weights_digest(matcher), "seed": seed, "pictures": pictures}
    with claimed(out), threads(1):
        for setting in settings or SETTINGS:
            table = about | {"setting": setting, **evaluate(loaded, list(pairs(setting, seed, count)))}
            kept = {identity(t): t for t in present(out / TABLES)} | {identity(table): table}
            write_json(out / TABLES, {"tables": [kept[key] for key in sorted(kept)]})
            yield table


def identity(table: dict[str, Any]) -> tuple[str, str, int]:
    return table["matcher"], table["setting"], table["seed"]


def present(path: Path) -> list[dict[str, Any]]:
    """Tables that were measured before."""
    if not path.exists():
        return []
    read = read_json(path, dict[str, list[Table]], "a list of error tables", "delete it").get("tables", [])
    tables = [{name: getattr(table, name) for name in Table.__struct_fields__} for table in read]
    return [{name: value for name, value in table.items() if value is not None} for table in tables]


def evaluate(matcher: Matcher, some: Sequence[PhotoPair]) -> dict[str, Any]:
    """Errors over all points; a point without an answer is infinitely far off."""
    missed, confidences, metres = [], [], []
    for pair in tqdm(some, matcher.name, unit="pair", leave=False):
        reference = matcher.encode(pair.reference[None])
        located, confidence = matcher.match(reference, pair.pixels[None], pair.query[None])
        answered = np.isfinite(located[0]).all(axis=-1)
        missed.append(np.where(answered, np.linalg.norm(located[0] - pair.truth, axis=-1), np.inf))
        confidences.append(confidence[0])
        if pair.lifted_error is not None:
            metres.append(pair.lifted_error(np.where(answered[:, None], located[0], -1e6)))
    px = np.concatenate(missed)
    table: dict[str, Any] = {
        "pairs": len(some),
        "points": len(px),
        **{f"within_{limit}px": rounded((px < limit).mean()) for limit in WITHIN},
        "median_px": rounded(np.median(px)),
    }
    if 0 < (px < 2).sum() < len(px):
        table["auc_2px"] = rounded(auc(np.concatenate(confidences), px < 2))
    if metres:
        mm = 1e3 * np.concatenate(metres)
        mm = mm[np.isfinite(mm)]
        table |= {"median_mm": rounded(np.median(mm)), "p95_mm": rounded(np.percentile(mm, 95))}
    return table


def rounded(value: Array | float) -> float:
    return round(float(value), 4)


def in_words(table: dict[str, Any]) -> str:
    """One line for people."""
    shares = ", ".join(f"{limit} px {100 * table[f'within_{limit}px']:5.1f} %" for limit in WITHIN)
    depth = f"  median {table['median_mm']:.1f} mm, p95 {table['p95_mm']:.1f}" if table["setting"] == STEREO else ""
    area = f"  AUC {table['auc_2px']:.3f}" if "auc_2px" in table else ""
    return f"{table['setting']:7} within {shares}  median {table['median_px']:5.2f} px{area}{depth}"
