"""`memcorr match`: the correspondence cache of the mixed training stage.

10,000 training rows (all 160 of frame 0, and 9,840 distinct others) matched once by a real matcher.
A cache is a folder: `cache.json` says how it was made and from which demonstrations,
`cache.safetensors` holds the arrays, `errors.json` the error table.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray
from tqdm import tqdm

from ..demos.phase import closest_frames, training_reference, windows
from ..demos.store import Demonstration, Store, demonstration_path
from ..errors import UserError
from ..files import Form, digest_of, read_arrays, read_json, write_arrays, write_json
from ..folders import claimed
from ..machine import threads
from ..spec import PUBLISHED_CACHE_MM, PUBLISHED_CACHE_POINTS, SPEC, TASKS, Array, Lifting, TieBreak
from ..workers import CORES, Workers, spread
from .lift import match_frames, prepare_references
from .matcher import Matcher, load_matcher, matcher_label, weights_digest
from .matches import Matches, residuals

Count = Annotated[int, Meta(ge=1, le=10**9)]
FORMS = {
    **{name: Form("int64", ("R",)) for name in ("demonstration", "anchor", "reference_frame")},
    **{name: Form("float64", ("R", SPEC.points, 3)) for name in ("p_ref", "p_live", "residual", "p_live_true")},
    "confidence": Form("float64", ("R", SPEC.points)),
    "valid": Form("bool", ("R", SPEC.points)),
}
ABOUT = "a description of a cache", "delete the folder and run `memcorr match` again"
AGAIN = "delete it and run the same `memcorr match` again"


@dataclass(frozen=True)
class CacheSettings:
    """`cache.json`: what a cache was made from, and how."""

    demonstrations: str  # their fingerprint
    pairs: Count
    rows: Count  # asked for; a small store has fewer
    matcher: str = ""
    weights: str = ""  # of the embedded matcher
    seed: int = SPEC.cache_seed
    tie_break: TieBreak = "elapsed"
    lifting: Lifting = "rigid"


@dataclass(frozen=True)
class Cache:
    """R = 10,000 training rows with their measured matches.

    Rows are (demonstration, anchor) pairs: `demonstration` indexes `store.demonstrations(range(80))`
    (pair-major, open before close), `anchor` is the query frame, `reference_frame` the frame of the
    reference demonstration (same task, next pair).
    """

    demonstration: NDArray[np.int64]  # (R,)
    anchor: NDArray[np.int64]  # (R,)
    reference_frame: NDArray[np.int64]  # (R,)
    matches: Matches  # (R, 16, ...)
    residual: Array  # (R, 16, 3) measured minus true live point, metres; meaningful where valid
    p_live_true: Array  # (R, 16, 3) the reference points carried by the door's true motion
    lifting: Lifting = "rigid"


def choose_rows(
    demonstrations: int | Sequence[int], rows: int = SPEC.cache_rows, seed: int = SPEC.cache_seed
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(demonstration, anchor): every frame 0, then distinct other rows without replacement, sorted.

    `demonstrations` are so many of the usual length, or their lengths."""
    lengths = [SPEC.episode_steps] * demonstrations if isinstance(demonstrations, int) else demonstrations
    counts = np.array([windows(length) for length in lengths])
    first = np.cumsum(counts) - counts
    others = np.delete(np.arange(counts.sum()), first)
    wanted = min(rows - len(first), len(others))
    if wanted < 0:
        raise UserError(f"--rows {rows}: give at least one row per demonstration ({len(first)})")
    drawn = np.random.default_rng(seed).choice(others, wanted, replace=False)
    chosen = np.sort(np.concatenate([first, drawn]))
    of = np.searchsorted(first, chosen, side="right") - 1
    return of, chosen - first[of]


def fingerprint(store: Store, pairs: int) -> str:
    """SHA-256 over the bytes of the training demonstrations."""
    digest = hashlib.sha256()
    for path in (demonstration_path(store.root, pair, task) for pair in range(pairs) for task in store.tasks):
        digest.update(bytes.fromhex(digest_of(path, "run the same `memcorr collect` again to complete the store")))
    return digest.hexdigest()


def match_demonstration(
    matcher: Matcher,
    query: Demonstration,
    reference: Demonstration,
    anchors: NDArray[np.int64],
    tie_break: TieBreak,
    lifting: Lifting,
) -> dict[str, NDArray]:
    """The cache rows of one query demonstration."""
    frames = closest_frames(query.joint[anchors], anchors, reference.joint, tie_break)
    unique, of_row = np.unique(frames, return_inverse=True)
    prepared = prepare_references(matcher, reference.frames(unique))
    matches = match_frames(matcher, [prepared[k] for k in of_row], query.frames(anchors), lifting)
    if query.object_pose is None or reference.object_pose is None:
        raise UserError(f"{query.path} or its reference has no object_pose, which the error table needs")
    residual = residuals(matches, reference.object_pose[frames], query.object_pose[anchors])
    rows = {"anchor": anchors, "reference_frame": frames, **vars(matches)}
    return rows | {"residual": residual, "p_live_true": matches.p_live - residual}


RIGHT_MM = 10.0  # the error below which a point is called right: what confidence is the probability of


def auc(score: Array, positive: NDArray[np.bool_]) -> float:
    """Area under the ROC curve: P(score of a right answer > score of a wrong one), ties count half."""
    order = np.argsort(score, kind="stable")
    _, inverse, counts = np.unique(score[order], return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    n_pos, n_neg = int(positive.sum()), int((~positive).sum())
    if n_pos == 0 or n_neg == 0:
        return float("nan")
    return float((ranks[positive[order]].sum() - n_pos * (n_pos + 1) / 2) / (n_pos * n_neg))


def error_table(matcher: str, residual: Array, valid: NDArray[np.bool_]) -> dict[str, str | int | float]:
    """Pools the valid points of all rows."""
    mm = 1e3 * np.linalg.norm(residual, axis=-1)[valid]
    p95, p99 = np.percentile(mm, 95), np.percentile(mm, 99)
    errors = {"median_mm": np.median(mm), "mean_mm": np.mean(mm), "p95_mm": p95, "p99_mm": p99}
    rounded = {name: round(float(value), 3) for name, value in errors.items()}
    return {"matcher": matcher, "rows": len(valid), "valid_points": int(valid.sum()), **rounded}


@dataclass(frozen=True)
class Matching:
    """What a worker does with a stream of (demonstration, its anchors, where its rows go)."""

    store: Store
    matcher: str
    settings: CacheSettings

    def __call__(self, jobs: Iterator[tuple[int, NDArray[np.int64], Path]]) -> Iterator[None]:
        with threads(1):
            matcher = load_matcher(self.matcher)
            for d, anchors, path in jobs:
                query = self.store.demonstration(d // len(TASKS), self.store.tasks[d % len(TASKS)])
                reference = self.store.demonstration(training_reference(query.pair, self.settings.pairs), query.task)
                how = self.settings.tie_break, self.settings.lifting
                rows = match_demonstration(matcher, query, reference, anchors, *how)
                write_arrays(path, {"demonstration": np.full(len(anchors), d), **rows})
                yield


def build_cache(
    store: Store,
    out: Path,
    matcher: str,
    *,
    pairs: int = SPEC.train_pairs,
    rows: int = SPEC.cache_rows,
    seed: int = SPEC.cache_seed,
    tie_break: TieBreak = "elapsed",
    lifting: Lifting = "rigid",
    workers: Workers = CORES,
    draw: Callable[[Cache], None] | None = None,
) -> dict:
    """Makes or completes a cache; the same arguments give the same bytes. Returns its error table. `draw` may add
    pictures while the folder is still ours."""
    if not 1 <= pairs <= len(store):
        raise UserError(f"--pairs {pairs}: {store.root} has {len(store)}; collect more or give fewer")
    lengths = [len(d) for d in store.demonstrations(range(pairs))]  # complains before anything is written
    name = matcher_label(matcher)
    settings = CacheSettings(
        matcher=name,
        weights=weights_digest(matcher),
        demonstrations=fingerprint(store, pairs),
        pairs=pairs,
        rows=rows,
        seed=seed,
        tie_break=tie_break,
        lifting=lifting,
    )
    demonstration, anchor = choose_rows(lengths, rows, seed)
    load_matcher(matcher)  # so does this
    with claimed(out):
        manifest, shards = out / "cache.json", [out / f"shard-{d:03d}.safetensors" for d in range(len(TASKS) * pairs)]
        if manifest.exists() and read_json(manifest, CacheSettings, *ABOUT) != settings:
            raise UserError(f"{out} holds a cache of other settings, weights or demonstrations; choose another --out")
        if not manifest.exists() and any(path.exists() for path in (out / "cache.safetensors", *shards)):
            raise UserError(f"{out} holds a cache without its cache.json; choose another --out")
        write_json(manifest, asdict(settings))
        if not (out / "cache.safetensors").exists():
            jobs = [(d, anchor[demonstration == d], s) for d, s in enumerate(shards) if not s.exists()]
            work = Matching(store, matcher, settings)
            total, done = len(shards), len(shards) - len(jobs)
            with closing(spread(work, jobs, workers)) as results:
                for _ in tqdm(results, f"match {name}", total=total, initial=done, unit="demo"):
                    pass
            parts = [read_arrays(s, AGAIN, FORMS).arrays for s in shards]
            write_arrays(out / "cache.safetensors", {k: np.concatenate([p[k] for p in parts]) for k in FORMS})
        for s in shards:  # a run that was killed just here has left them
            s.unlink(missing_ok=True)
        cache = read_cache(out, store)
        if not cache.matches.valid.any():
            raise UserError(f"{name} found no point of any row again; is the object in the masks of {store.root}?")
        right = 1e3 * np.linalg.norm(cache.residual, axis=-1)[cache.matches.valid] < RIGHT_MM
        area = auc(cache.matches.confidence[cache.matches.valid], right)
        table = error_table(name, cache.residual, cache.matches.valid) | {
            "auc": None if right.all() or not right.any() else round(area, 4),
            "lifting": lifting,
            "weights": settings.weights,
        }
        write_json(out / "errors.json", table)
        if draw is not None:
            draw(cache)
    return table


def read_cache(folder: Path, store: Store) -> Cache:
    """The cache in `folder`, which must have been made from exactly these demonstrations."""
    if not (folder / "cache.safetensors").exists():
        raise UserError(f"{folder} holds no correspondence cache; make one with `memcorr match --out {folder}`")
    settings = read_json(folder / "cache.json", CacheSettings, *ABOUT)
    if settings.pairs > len(store) or settings.demonstrations != fingerprint(store, settings.pairs):
        raise UserError(f"{folder} was made from other demonstrations than {store.root}; run `memcorr match` anew")
    a = read_arrays(folder / "cache.safetensors", AGAIN, FORMS).arrays
    lengths = [len(d) for d in store.demonstrations(range(settings.pairs))]
    counts = [windows(length) for length in lengths]
    if len(a["anchor"]) != min(settings.rows, sum(counts)):
        raise UserError(f"{folder} does not hold the rows that its cache.json speaks of; delete it and match again")
    limits: dict[str, float] = {"demonstration": len(TASKS) * settings.pairs, "anchor": max(counts)}
    limits |= {"reference_frame": max(lengths), "confidence": 1 + 1e-9}
    for name, limit in limits.items():
        if not (a[name].min() >= 0 and a[name].max() < limit):
            raise UserError(f"{folder / 'cache.safetensors'} is damaged ({name} is out of range); {AGAIN}")
    matches = Matches(a["p_ref"], a["p_live"], a["confidence"], a["valid"])
    own = {name: a[name] for name in ("demonstration", "anchor", "reference_frame", "residual", "p_live_true")}
    return Cache(**own, matches=matches, lifting=settings.lifting)


def beside_the_paper(table: dict) -> str:
    """The error table as text, with the paper's figures for RoMa v2 on its own rows."""
    lines = [f"{'3D error, mm':14}{table['matcher']:>12}{'paper':>12}"]
    lines += [f"{key[:-3]:14}{table[key]:12.2f}{value:12.2f}" for key, value in PUBLISHED_CACHE_MM.items()]
    return "\n".join([*lines, f"{'valid points':14}{table['valid_points']:12}{PUBLISHED_CACHE_POINTS:12}"])
