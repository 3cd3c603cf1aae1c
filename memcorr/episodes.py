"""`episodes.jsonl`: one line per rollout, the only thing the report is computed from.

The file is appended to while rollouts finish, in whatever order, and sorted at the end. A process
killed in the middle of a line leaves half of it; reading drops that half, and the rollout runs again.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import UserError
from .files import written_whole
from .scenes import CONDITIONS

EPISODES = "episodes.jsonl"


@dataclass(frozen=True)
class Episode:
    """One rollout. Fields without a default are promised to every reader; the rest came later."""

    experiment: str  # or "expert", "zeros"
    train_seed: int | None  # None for scripted controllers
    condition: str
    scene: int  # index within the condition
    scene_seed: int
    u: tuple[float, float]  # normalised door position
    camera_azimuth_deg: float
    task: str  # success is judged by it
    reference: str  # correct, empty, opposite
    matcher: str  # "none" where nothing was matched
    phase_offset: int
    phase_speed: float
    success: bool
    steps: int
    replans: int
    fallback_replans: int
    mean_match_error_mm: float | None  # mean over this rollout's decisions
    first_chunk_direction: str  # open, close or ''
    final_joint: float  # rad
    seconds: float  # the only field that differs between two runs
    stage: str = "final"  # of the checkpoint: stage-one, final, unfinished, or scripted
    checkpoint: str = ""  # first digits of the weights' SHA-256
    pairing: str = "kept"  # or "permuted"
    depth_sampling: str = "object"
    matched_replans: int = 0  # decisions behind mean_match_error_mm

    @property
    def key(self) -> tuple:
        """What was rolled out, in the order of the file."""
        return (
            self.experiment,
            self.stage,
            -1 if self.train_seed is None else self.train_seed,
            CONDITIONS.index(self.condition) if self.condition in CONDITIONS else len(CONDITIONS),
            self.reference,
            self.matcher,
            self.pairing,
            self.depth_sampling,
            self.phase_offset,
            self.phase_speed,
            self.scene_seed,
            self.scene,
            self.task,
        )

    def line(self) -> str:
        return json.dumps(dataclasses.asdict(self), allow_nan=False) + "\n"


_FIELDS = {f.name: f for f in dataclasses.fields(Episode)}
_REQUIRED = [f.name for f in _FIELDS.values() if f.default is dataclasses.MISSING]


def parse(content: Any) -> Episode:
    if not isinstance(content, dict):
        raise ValueError("not an object")
    if missing := [name for name in _REQUIRED if name not in content]:
        raise ValueError(f"without {', '.join(missing)}")
    known = {name: value for name, value in content.items() if name in _FIELDS}
    return Episode(**{**known, "u": tuple(content["u"])})


def read_episodes(path: Path) -> list[Episode]:
    """All rollouts of a file; a half-written last line is left out. A missing file has none."""
    if not path.exists():
        return []
    lines = path.read_bytes().splitlines(keepends=True)
    episodes = []
    for number, line in enumerate(lines, 1):
        if not line.endswith(b"\n"):  # only the last one can lack it
            break
        try:
            episodes.append(parse(json.loads(line)))
        except (ValueError, TypeError) as problem:
            raise UserError(f"{path}, line {number} is not a rollout ({problem}); repair or remove it") from None
    return episodes


def write_episodes(path: Path, episodes: Iterable[Episode]) -> None:
    """The whole file anew, sorted, whole or not at all."""
    with written_whole(path) as temporary:
        temporary.write_text("".join(e.line() for e in sorted(episodes, key=lambda e: e.key)))


def find_episodes(places: Sequence[Path]) -> list[Episode]:
    """Rollouts of all `episodes.jsonl` in and below `places`; the same rollout twice counts once."""
    found: dict[tuple, Episode] = {}
    for place in places:
        files = [place] if place.is_file() else sorted(place.rglob(EPISODES))
        if not files:
            raise UserError(f"{place} holds no {EPISODES}; make one with `memcorr evaluate RUN --out {place}`")
        for file in files:
            for episode in read_episodes(file):
                other = found.setdefault(episode.key, episode)
                if dataclasses.replace(other, seconds=0.0) != dataclasses.replace(episode, seconds=0.0):
                    raise UserError(
                        f"{file} contradicts another file about {episode.experiment} seed {episode.train_seed}, "
                        f"{episode.condition} scene {episode.scene} {episode.task}; report them apart"
                    )
    return sorted(found.values(), key=lambda e: e.key)
