"""Measured rollouts, looked up by the settings of the paper."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import UserError
from ..evaluation.episodes import Episode
from ..spec import DOOR, SPEC
from .paper import MAIN, MATCHED, OURS, Setting, settings

STAND_INS = ("embedded", "xfeat", "romav2", "flow")  # who stands in for the paper's matcher, in order of preference
PHASES = ("phase_offset", "phase_speed")
MOVED = 0.01  # rad by which a door must have moved to have gone anywhere


@dataclass(frozen=True)
class Matching:
    """Diagnostics of a group of rollouts, pooled over their decisions."""

    mean_error_mm: float | None
    fallbacks: int
    decisions: int


class Lookup:
    """All rollouts of a report: one matcher and one set of scenes fill the paper's tables."""

    def __init__(self, episodes: Sequence[Episode], matcher: str | None = None, scene_seed: int | None = None) -> None:
        if not episodes:
            raise UserError("there is no rollout to report; run `memcorr evaluate` first")
        self.episodes = list(episodes)
        measured = {e.shown.matcher for e in episodes}
        if matcher is not None and matcher not in measured:
            raise UserError(f"--matcher {matcher}: measured were {', '.join(sorted(measured))}")
        self.matcher = matcher or next((m for m in STAND_INS if m in measured), STAND_INS[0])
        seeds = {e.scene_seed for e in episodes}
        if scene_seed is not None and scene_seed not in seeds:
            raise UserError(f"--scene-seed {scene_seed}: measured were {', '.join(map(str, sorted(seeds)))}")
        self.scene_seed = scene_seed if scene_seed is not None else min(seeds)
        self._groups: dict[tuple[Setting, int], list[Episode]] = defaultdict(list)
        for e in self.episodes:
            self._groups[setting_of(e), e.scene_seed].append(e)

    def _meant(self, setting: Setting) -> Setting:
        """With the report's matcher where the paper has its own."""
        return setting.showing(matcher=self.matcher) if setting.shown.matcher == MATCHED else setting

    def of(self, setting: Setting) -> list[Episode]:
        """The rollouts of a setting, or none."""
        return self._groups.get((self._meant(setting), self.scene_seed), [])

    def phases(self, policy: Setting, what: str) -> list[tuple[float, Setting]]:
        """(offset or speed, setting) where the policy was measured with the other one at its default; none where only
        the default was."""
        values = {getattr(e.shown, what) for e in self.episodes if e.condition == policy.condition}
        settings = [(v, policy.showing(**{what: v})) for v in sorted(values)]
        found = [(v, setting) for v, setting in settings if self.of(setting)]
        return found if len(found) > 1 else []

    def further(self) -> list[tuple[Setting, int, list[Episode]]]:
        """Groups of rollouts that no table or figure asks for."""
        phases = {s for what in PHASES for policy in (MAIN, OURS) for _, s in self.phases(policy, what)}
        asked = {setting_of(rows[0]) for setting in settings() | phases if (rows := self.of(setting))}
        left = [key for key in self._groups if key not in {(s, self.scene_seed) for s in asked} and not beyond(key[0])]
        return [(*key, self._groups[key]) for key in sorted(left, key=_order)]


def _order(key: tuple[Setting, int]) -> tuple:
    setting, shown = key[0], key[0].shown
    what = (shown.reference, shown.matcher, shown.pairing, str(shown.phase_offset), str(shown.phase_speed))
    return (setting.experiment, setting.condition, setting.stage, *what, key[1], shown.lifting)


def beyond(setting: Setting) -> bool:
    """Whether it belongs to the tables of other worlds, of disturbances and of exchanged references."""
    return setting.world != DOOR or bool(setting.disturbance or setting.shown.swap) or setting.condition == "disturbed"


def setting_of(e: Episode) -> Setting:
    return Setting(e.experiment, e.condition, e.stage, e.shown, e.world, e.disturbance)


def matching(episodes: Sequence[Episode]) -> Matching:
    """Every decision weighs the same, as in the paper."""
    weights = [e.matched_replans or (e.replans if e.mean_match_error_mm is not None else 0) for e in episodes]
    errors = [e.mean_match_error_mm or 0.0 for e in episodes]
    mean = float(np.average(errors, weights=weights)) if sum(weights) else None
    return Matching(mean, sum(e.fallback_replans for e in episodes), sum(e.replans for e in episodes))


def first_chunk_follows(e: Episode) -> bool:
    return e.first_chunk_direction == e.shown.supplied(e.task, e.world)


def door_follows(e: Episode) -> bool:
    """Whether the door ended on the supplied reference's side of its start."""
    moved = e.final_joint - SPEC.door_start
    return moved < -MOVED if e.shown.supplied(e.task, e.world) == "open" else moved > MOVED
