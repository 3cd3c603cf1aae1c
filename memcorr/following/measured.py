"""`memcorr match` of recordings without truth: every row matched to its reference, as a rollout would.

Each demonstration follows the next one of the same task with a look every eight steps, from each of its first eight
frames on: so every row is looked at once, in the order and by the functions of a live rollout. What it cost to be wrong
is asked of the matcher itself: a quarter of the rows are matched back again, and where the two ways disagree is by how
much points are moved in training. A cache is a folder: `measured.json` says how it was made and from what,
`measured.safetensors` holds the arrays, `agreement.json` the table.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from ..correspondence.cache import error_table
from ..correspondence.lift import match_frames, prepare_references
from ..correspondence.matcher import Matcher, load_matcher, matcher_label, weights_digest
from ..correspondence.matches import Matches, motion_of, residuals
from ..correspondence.rigid import carried, inverse
from ..demos.pace import paced
from ..demos.phase import next_of_same_task, windows
from ..demos.store import Demonstration, Store
from ..errors import UserError
from ..files import Form, digest_of, read_arrays, read_json, write_arrays, write_json
from ..folders import claimed
from ..machine import threads
from ..spec import SPEC, Array, Lifting, PhaseSource
from ..workers import CORES, Workers, spread
from .course import USUAL, PhaseCosts, Progress
from .reference import Reference
from .step import Following, MatcherSource, Observation, Query

MEASURED, ROWS, TABLE = "measured.json", "measured.safetensors", "agreement.json"
AGAIN = "delete the folder and run the same `memcorr match` again"
BACK_EVERY = 4  # rows, one of which is also matched back
BACK = SPEC.executed // BACK_EVERY  # of one look, together: a batch of the usual size would be three quarters padding
FORMS = {
    "reference_frame": Form("int64", ("R",)),
    "p_ref": Form("float64", ("R", SPEC.points, 3)),
    "p_live": Form("float64", ("R", SPEC.points, 3)),
    "confidence": Form("float64", ("R", SPEC.points)),
    "valid": Form("bool", ("R", SPEC.points)),
    "disagreement": Form("float64", ("E", SPEC.points, 3)),
    "motion": Form("float64", ("T", 4, 4)),
    "points": Form("float64", ("D", 3)),
}


@dataclass(frozen=True)
class MatchingSettings:
    """`measured.json`: what a cache was made from, and how."""

    demonstrations: str  # their fingerprint
    lengths: tuple[int, ...]  # of each, frames
    pairs: int
    phase: PhaseSource
    matcher: str
    weights: str  # of the embedded matcher
    lifting: Lifting
    phase_costs: PhaseCosts = USUAL

    @property
    def rows(self) -> int:
        return sum(windows(length) for length in self.lengths)


@dataclass(frozen=True)
class Measured:
    """R rows of D demonstrations, all of them, in order: what a matcher saw of the references."""

    settings: MatchingSettings
    reference_frame: NDArray[np.int64]  # (R,) j, where the reference was seen to be
    matches: Matches  # (R, 16, ...) between that frame and the row's
    disagreement: Array  # (E, 16, 3) metres, world: errors of the size that two ways of matching show
    motion: list[Array]  # D times (T, 4, 4): carries points of the first frame to each
    points: Array  # (D, 3) middle of the object in the first frame, metres


def chosen(store: Store, pairs: int | None, phase: PhaseSource) -> list[Demonstration]:
    """What is there of the first so many pairs, or of all, as it is followed; recorded data need not be complete."""
    limit = len(store) if pairs is None else pairs
    found = [d for d in store.present() if d.pair < limit]
    if not found:
        raise UserError(f"{store.root} holds no demonstrations of its first {limit} pairs")
    for d in found:
        if len(d) <= SPEC.chunk:
            raise UserError(f"{d.path} has {len(d)} rows: at least {SPEC.chunk + 1} are needed to learn from")
    return [paced(d, USUAL.pace) for d in found] if phase == "seen" else found


def fingerprint(demonstrations: Sequence[Demonstration]) -> str:
    digest = hashlib.sha256()
    for d in demonstrations:
        digest.update(bytes.fromhex(digest_of(d.path)))
    return digest.hexdigest()


def follow(
    matcher: Matcher, query: Demonstration, reference: Demonstration, phase: PhaseSource, lifting: Lifting
) -> dict[str, NDArray]:
    """All rows of one demonstration, matched to another as if it had been followed."""
    shown, every = Reference(reference, matcher), SPEC.executed
    following = Following(MatcherSource(matcher, lifting), phase)
    before: dict[int, Progress | None] = {}
    relations, differ = [], []
    for start in range(0, windows(len(query)), every):
        anchors = range(start, min(start + every, windows(len(query))))
        live = query.frames(anchors)
        queries = [
            Query(Observation(frame), shown, k, before.get(k % every)) for k, frame in zip(anchors, live, strict=True)
        ]
        found = following.step(queries)
        before = {k % every: relation.progress for k, relation in zip(anchors, found, strict=True)}
        back = [(r, r.measured) for k, r in zip(anchors, found, strict=True) if k % BACK_EVERY == 0 and r.measured]
        returned = match_frames(
            matcher,
            prepare_references(matcher, [r.frame for r, _ in back], BACK),
            reference.frames([r.looked_at or 0 for r, _ in back]),
            lifting,
            BACK,
        )
        differ += [e for n, (_, m) in enumerate(back) if (e := disagreement(m, returned[n])) is not None]
        relations += found
    course = shown.course
    middle = course.points.mean(axis=0) if len(course.points) else np.zeros(3)
    matches = [r.matches for r in relations if r.matches is not None]
    return {
        "reference_frame": np.array([r.phase for r in relations]),
        **{name: np.stack([getattr(m, name) for m in matches]) for name in Matches.__dataclass_fields__},
        "disagreement": np.stack(differ) if differ else np.zeros((0, SPEC.points, 3)),
        "motion": course.motion,  # of the reference: put in its place by `build_measured`
        "points": middle[None],
    }


def disagreement(forward: Matches, backward: Matches) -> Array | None:
    """By how much live points (16, 3) differ from where the way back puts them, as one of two errors of the same size:
    divided by the square root of 2. Metres; None where either way sees too little."""
    T = motion_of(backward)
    if T is None or forward.valid.sum() < SPEC.min_valid:
        return None
    gap = (forward.p_live - carried(inverse(T), forward.p_ref)) / np.sqrt(2)
    return np.where(forward.valid[:, None], gap, 0.0)


@dataclass(frozen=True)
class Matching:
    """What a worker does with a stream of (demonstration, its reference, where its rows go)."""

    matcher: str
    phase: PhaseSource
    lifting: Lifting

    def __call__(self, jobs: Iterator[tuple[Demonstration, Demonstration, Path]]) -> Iterator[None]:
        with threads(1):
            matcher = load_matcher(self.matcher)
            for query, reference, path in jobs:
                write_arrays(path, follow(matcher, query, reference, self.phase, self.lifting))
                yield


def build_measured(
    store: Store,
    out: Path,
    matcher: str,
    *,
    pairs: int | None = None,
    phase: PhaseSource = "seen",
    lifting: Lifting = "rigid",
    workers: Workers = CORES,
) -> dict[str, Any]:
    """Makes or completes a cache; the same arguments give the same bytes. Returns its table."""
    demonstrations = chosen(store, pairs, phase)
    for d in demonstrations:
        if not Reference(d, None).visible.any():
            raise UserError(f"{d.path} has no mask of the object; draw them with `memcorr data mask {store.root}`")
    reference = next_of_same_task([d.task for d in demonstrations])
    settings = MatchingSettings(
        fingerprint(demonstrations),
        tuple(len(d) for d in demonstrations),
        len(store) if pairs is None else pairs,
        phase,
        matcher_label(matcher),
        weights_digest(matcher),
        lifting,
    )
    load_matcher(matcher)  # complains before anything is written
    with claimed(out):
        manifest, shards = out / MEASURED, [out / f"{d.name}.safetensors" for d in demonstrations]
        if manifest.exists() and read_json(manifest, MatchingSettings, "a description of matches", AGAIN) != settings:
            raise UserError(f"{out} holds matches of other settings, weights or demonstrations; choose another --out")
        if (out / "cache.json").exists() or (not manifest.exists() and (out / ROWS).exists()):
            raise UserError(f"{out} holds another cache; choose another --out")
        write_json(manifest, asdict(settings))
        if not (out / ROWS).exists():
            jobs = [
                (d, demonstrations[r], shard)
                for d, r, shard in zip(demonstrations, reference, shards, strict=True)
                if not shard.exists()
            ]
            work = Matching(matcher, phase, lifting)
            done = len(shards) - len(jobs)
            with closing(spread(work, jobs, workers)) as results:
                for _ in tqdm(results, f"match {settings.matcher}", total=len(shards), initial=done, unit="demo"):
                    pass
            parts = [read_arrays(shard, AGAIN, FORMS).arrays for shard in shards]
            whole = {name: np.concatenate([p[name] for p in parts]) for name in FORMS}
            followed = {int(r): part for r, part in zip(reference, parts, strict=True)}  # everyone is followed by one
            whole |= {n: np.concatenate([followed[r][n] for r in range(len(parts))]) for n in ("motion", "points")}
            write_arrays(out / ROWS, whole)
            for shard in shards:
                shard.unlink()
        found = read_measured(out, store)
        table = measured_table(found) | true_errors(found, demonstrations, reference)
        write_json(out / TABLE, table)
    return table


def measured_table(found: Measured) -> dict[str, Any]:
    """What is known without truth: how much was seen, and how far two ways of matching are apart."""
    apart = 1e3 * np.linalg.norm(found.disagreement, axis=-1)
    apart = apart[apart > 0]
    sizes = {"median_mm": 50, "p95_mm": 95, "p99_mm": 99}
    blind = int((found.matches.valid.sum(axis=1) < SPEC.min_valid).sum())
    return {
        "matcher": found.settings.matcher,
        "lifting": found.settings.lifting,
        "phase": found.settings.phase,
        "rows": len(found.reference_frame),
        "valid_points": int(found.matches.valid.sum()),
        "rows_without_condition": blind,
        "disagreement": {n: round(float(np.percentile(apart, q)), 3) for n, q in sizes.items()} if len(apart) else {},
        "weights": found.settings.weights,
    }


def in_words(table: dict[str, Any]) -> str:
    """The table as text."""
    lines = [
        f"{table['rows']} rows, {table['valid_points']} valid points; "
        f"{table['rows_without_condition']} rows saw too little"
    ]
    for name, what in (("disagreement", "forward against backward"), ("true_error", "true 3D error")):
        if sizes := table.get(name):
            lines.append(f"{what}, mm: " + ", ".join(f"{key[:-3]} {value:.2f}" for key, value in sizes.items()))
    return "\n".join(lines)


def true_errors(
    found: Measured, demonstrations: Sequence[Demonstration], reference: NDArray[np.int64]
) -> dict[str, Any]:
    """The error of the same points, where a simulator knows it: for the reader alone; no training uses it."""
    if any(d.object_pose is None for d in demonstrations):
        return {}
    T_ref, T_live, first = [], [], 0
    for d, r in zip(demonstrations, reference, strict=True):
        pose, n = demonstrations[r].object_pose, windows(len(d))
        assert pose is not None and d.object_pose is not None
        T_ref.append(pose[found.reference_frame[first : first + n]])
        T_live.append(d.object_pose[:n])
        first += n
    residual = residuals(found.matches, np.concatenate(T_ref), np.concatenate(T_live))
    table = error_table(found.settings.matcher, residual, found.matches.valid)
    return {"true_error": {name: value for name, value in table.items() if name.endswith("_mm")}}


def read_measured(folder: Path, store: Store) -> Measured:
    """The matches in `folder`, which must have been made from exactly these demonstrations."""
    if not (folder / ROWS).exists():
        what = "a cache made with simulator truth" if (folder / "cache.json").exists() else "no matches"
        raise UserError(
            f"{folder} holds {what}; make those of recordings with `memcorr match --measured --data {store.root}`"
        )
    settings = read_json(folder / MEASURED, MatchingSettings, "a description of matches", AGAIN)
    demonstrations = chosen(store, settings.pairs, settings.phase)
    if settings.demonstrations != fingerprint(demonstrations):
        raise UserError(f"{folder} was made from other demonstrations than {store.root}; run `memcorr match` anew")
    a = read_arrays(folder / ROWS, AGAIN, FORMS).arrays
    sizes = len(a["valid"]), len(a["motion"]), len(a["points"])
    if sizes != (settings.rows, sum(settings.lengths), len(settings.lengths)):
        raise UserError(f"{folder} does not hold the rows that its {MEASURED} speaks of; {AGAIN}")
    if not (a["reference_frame"].min() >= 0 and a["reference_frame"].max() < max(settings.lengths)):
        raise UserError(f"{folder / ROWS} is damaged (reference_frame is out of range); {AGAIN}")
    motion = np.split(a["motion"], np.cumsum(settings.lengths)[:-1])
    matches = Matches(a["p_ref"], a["p_live"], a["confidence"], a["valid"])
    return Measured(settings, a["reference_frame"], matches, a["disagreement"], list(motion), a["points"])
