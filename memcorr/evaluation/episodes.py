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
from typing import Annotated, get_type_hints

import msgspec
from msgspec import Meta

from ..errors import UserError
from ..files import decoded, read_rows
from ..folders import write_text
from ..spec import DOOR, TEST_SETS, WORLD_TASKS, Task, tasks_of
from .intervention import Intervention

EPISODES = "episodes.jsonl"
Count = Annotated[int, Meta(ge=0)]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a rollout ended, and diagnostics that no policy ever saw."""

    success: bool = False
    steps: Count = 0
    replans: Count = 0
    fallback_replans: Count = 0
    stuck_replans: Count = 0  # decisions that said that nothing more is to be expected
    mean_match_error_mm: Annotated[float, Meta(ge=0)] | None = None  # over the decisions with at least one valid point
    first_chunk_direction: Task = ""  # or '' when nothing moved
    final_joint: float = 0.0  # in its own unit
    seconds: float = 0.0  # from its first look to its end, other slots' turns included; differs between two runs
    matched_replans: Count = 0  # decisions behind mean_match_error_mm
    final_progress: float | None = None  # 0 start, 1 and -1 the two goals; a task of Meta-World: metres


@dataclass(frozen=True, kw_only=True)
class Episode(Outcome):
    """One rollout: who, where, what was shown, and how it ended."""

    experiment: str  # or "expert", "zeros"
    train_seed: int | None  # None for scripted controllers
    condition: str
    scene: Count  # index within the condition
    scene_seed: Count
    u: tuple[float, float]  # normalised position
    camera_azimuth_deg: float
    task: Task  # success is judged by it
    shown: Intervention
    world: str = DOOR
    disturbance: str = ""  # "bump=0.05", several joined by "+"
    stage: str = "final"  # of the checkpoint: stage-one, final, unfinished, or scripted
    checkpoint: str = ""  # first digits of the SHA-256 of the weights,
    reference_file: str = ""  # of the supplied demonstration
    recording: str = ""  # what was out of the ordinary when the reference was recorded, "speed=2"
    camera: str = ""  # first digits of a digest of a user's own camera; '' for the world's own
    matcher_weights: str = ""  # and of the embedded matcher's weights; '' where they were not written down

    @property
    def key(self) -> tuple:
        """What was rolled out, in the order of the file."""
        shown = self.shown
        return (
            list(WORLD_TASKS).index(self.world) if self.world in WORLD_TASKS else len(WORLD_TASKS),
            self.world,
            self.experiment,
            self.stage,
            -1 if self.train_seed is None else self.train_seed,
            TEST_SETS.index(self.condition) if self.condition in TEST_SETS else len(TEST_SETS),
            shown.reference,
            shown.matcher,
            shown.pairing,
            shown.lifting,
            shown.phase_offset,
            shown.phase_speed,
            shown.phase_from,
            shown.swap,
            shown.masks,
            self.camera,
            self.recording,
            self.disturbance,
            self.scene_seed,
            self.scene,
            self.task,
        )

    @property
    def files(self) -> dict[str, str]:
        """Which files the row was made from."""
        return {
            "checkpoint": self.checkpoint,
            "reference": self.reference_file,
            "matcher": self.matcher_weights,
        }

    def line(self) -> str:
        content = dataclasses.asdict(self)
        content |= content.pop("shown")
        return json.dumps({name: content[name] for name in COLUMNS}, allow_nan=False) + "\n"


COLUMNS = (
    *("experiment", "train_seed", "condition", "scene", "scene_seed", "u", "camera_azimuth_deg", "task"),
    *("reference", "matcher", "phase_offset", "phase_speed", "success", "steps", "replans", "fallback_replans"),
    *("mean_match_error_mm", "first_chunk_direction", "final_joint", "seconds"),
    *("stage", "checkpoint", "pairing", "lifting", "matched_replans", "reference_file", "matcher_weights"),
    *("world", "disturbance", "final_progress", "phase_from", "swap", "masks", "camera", "recording", "stuck_replans"),
)
_SHOWN = [f.name for f in dataclasses.fields(Intervention)]
_TYPES = get_type_hints(Episode, include_extras=True) | get_type_hints(Intervention, include_extras=True)
# A row as it stands in the file: the fields of `Episode` and of what was shown, side by side.
Row = msgspec.defstruct("Row", [(name, _TYPES[name]) for name in COLUMNS])


def parse(line: bytes) -> Episode:
    """A rollout, or a ValueError that says why it is none."""
    row = msgspec.structs.asdict(decoded(line, Row))
    if row["task"] not in tasks_of(row["world"]):
        raise ValueError(f"{row['world']} has no task {row['task']!r}")
    return Episode(shown=Intervention(*(row.pop(name) for name in _SHOWN)), **row)


def read_episodes(path: Path) -> list[Episode]:
    """All rollouts of a file; a missing file has none."""
    return [episode for _, episode in read_rows(path, parse, "a rollout")]


def write_episodes(path: Path, episodes: Iterable[Episode]) -> None:
    """The whole file anew, sorted, whole or not at all."""
    write_text(path, "".join(e.line() for e in sorted(episodes, key=lambda e: e.key)))


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
