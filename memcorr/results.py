"""Measured rollouts, looked up by the settings of the paper."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .episodes import Episode
from .errors import UserError
from .paper import MATCHED, Setting
from .protocol import PROTOCOL, opposite

STAND_INS = ("embedded", "romav2", "flow")  # who stands in for the paper's matcher, in order of preference
MOVED = 0.01  # rad by which a door must have moved to have gone anywhere


@dataclass(frozen=True)
class Matching:
    """Diagnostics of a group of rollouts, pooled over their decisions."""

    mean_error_mm: float | None
    fallbacks: int
    decisions: int


class Results:
    """All rollouts of a report: one matcher and one set of scenes fill the paper's tables."""

    def __init__(self, episodes: Sequence[Episode], matcher: str | None = None, scene_seed: int | None = None) -> None:
        if not episodes:
            raise UserError("there is no rollout to report; run `memcorr evaluate` first")
        self.episodes = list(episodes)
        measured = {e.matcher for e in episodes}
        self.matcher = matcher or next((m for m in STAND_INS if m in measured), STAND_INS[0])
        seeds = {e.scene_seed for e in episodes}
        self.scene_seed = scene_seed if scene_seed is not None else min(seeds)
        self._groups: dict[tuple, list[Episode]] = defaultdict(list)
        for e in self.episodes:
            self._groups[self._key(setting_of(e), e.scene_seed, e.depth_sampling)].append(e)
        self._used: set[tuple] = set()

    @staticmethod
    def _key(setting: Setting, scene_seed: int, depth_sampling: str) -> tuple:
        return (setting, scene_seed, depth_sampling)

    def of(self, setting: Setting) -> list[Episode]:
        """The rollouts of a setting; none if it was not measured."""
        wanted = setting
        if setting.matcher == MATCHED:
            wanted = Setting(**{**vars(setting), "matcher": self.matcher})
        key = self._key(wanted, self.scene_seed, "object")
        self._used.add(key)
        return self._groups.get(key, [])

    def further(self) -> list[tuple[Setting, int, str, list[Episode]]]:
        """Groups of rollouts that no table or figure has asked for."""
        left = [key for key in self._groups if key not in self._used]
        return [(*key, self._groups[key]) for key in sorted(left, key=lambda k: (str(k[0]), k[1], k[2]))]

    def phases(self, condition: str, what: str) -> list[tuple[float, list[Episode]]]:
        """(offset or speed, rollouts) of the main policy with the other one at its default."""
        base = Setting(condition=condition)
        values = {getattr(e, what) for e in self.episodes if e.condition == condition}
        settings = [(v, Setting(**{**vars(base), what: v})) for v in sorted(values)]
        return [(v, rows) for v, setting in settings if (rows := self.of(setting))]


def setting_of(e: Episode) -> Setting:
    return Setting(e.experiment, e.condition, e.stage, e.reference, e.matcher, e.pairing, e.phase_offset, e.phase_speed)


def matching(episodes: Sequence[Episode]) -> Matching:
    """Every decision weighs the same, as in the paper."""
    weights = [e.matched_replans or (e.replans if e.mean_match_error_mm is not None else 0) for e in episodes]
    errors = [e.mean_match_error_mm or 0.0 for e in episodes]
    mean = float(np.average(errors, weights=weights)) if sum(weights) else None
    return Matching(mean, sum(e.fallback_replans for e in episodes), sum(e.replans for e in episodes))


def supplied(e: Episode) -> str:
    """The behaviour that the supplied reference shows."""
    return e.task if e.reference == "correct" else opposite(e.task)  # type: ignore[arg-type]


def first_chunk_follows(e: Episode) -> bool:
    return e.first_chunk_direction == supplied(e)


def door_follows(e: Episode) -> bool:
    """Whether the door ended on the supplied reference's side of its start."""
    moved = e.final_joint - PROTOCOL.door_start
    return moved < -MOVED if supplied(e) == "open" else moved > MOVED
