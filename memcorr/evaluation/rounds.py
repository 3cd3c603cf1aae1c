"""What every policy has to do in the contest: fresh scenes, on which nothing was chosen.

A learned policy for many objects stands beside those who learned less or nothing. All are given the same frames and
references; the expert sees the simulator's truth, and shows what can be reached at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..spec import DOOR, TRAINED_WORLDS, WORLD_TASKS, TestSet
from ..worlds.disturbances import Disturbance
from ..worlds.scenes import SUITE
from .episodes import Episode
from .intervention import PLAIN, Intervention, ReferenceChoice

SCENE_SEED = 577_215
EXCHANGED_AFTER = 48  # control steps
HELD_OUT_WORLDS = tuple(world for world in WORLD_TASKS if world not in TRAINED_WORLDS)
# Each at the sizes of the report's curves.
SENSOR_FAULTS: dict[str, tuple[float, ...]] = {
    "depth-noise": (1, 4, 8),
    "depth-holes": (0.1, 0.2, 0.4),
    "mask-erode": (1, 2, 4),
    "mask-dilate": (2, 4, 8),
    "mask-late": (3, 5, 7),
    "extrinsics": (1, 2, 4),
    "azimuth": (10, 20, 30),
    "elevation": (5, 10, 20),
}


@dataclass(frozen=True)
class Round:
    """What every policy has to do: the same scenes in several worlds, both tasks."""

    name: str
    worlds: Sequence[str]
    scenes: range
    conditions: tuple[TestSet, ...] = ("boundary",)
    reference: ReferenceChoice = "correct"
    swap: int = 0
    disturbances: tuple[Disturbance, ...] = ()  # one after the other; none: as the scenes have it

    @property
    def rollouts(self) -> int:
        return 2 * len(self.worlds) * len(self.conditions) * len(self.scenes) * max(1, len(self.disturbances))

    @property
    def shown(self) -> Intervention:
        return replace(PLAIN, reference=self.reference, swap=self.swap)

    def disturbed(self, row: Episode) -> bool:
        """Whether in a rollout goes wrong what should: a kind and size of the round's, or else the scene's own."""
        if self.disturbances:
            return row.disturbance in map(str, self.disturbances)
        own = SUITE[row.scene % len(SUITE)] if row.condition == "disturbed" else ""
        return row.disturbance == (str(Disturbance.parse(own)) if own else "")

    def has(self, row: Episode) -> bool:
        """Whether a rollout belongs to it, whichever policy made it."""
        return (
            row.scene_seed == SCENE_SEED
            and row.world in self.worlds
            and row.scene in self.scenes
            and row.condition in self.conditions
            and (row.shown.reference, row.shown.swap) == (self.reference, self.swap)
            and self.disturbed(row)
        )


EVERYWHERE = tuple(WORLD_TASKS)
ROUNDS = (
    Round("trained worlds", TRAINED_WORLDS, range(12)),
    Round("held-out worlds", HELD_OUT_WORLDS, range(12)),
    Round("the door's four shifts", (DOOR,), range(12), ("boundary", "extreme", "camera", "combined")),
    Round("opposite reference (should be 0)", EVERYWHERE, range(4), reference="opposite"),
    Round("disturbed", EVERYWHERE, range(48), ("disturbed",)),
    Round("reference exchanged after 48 steps", EVERYWHERE, range(6), swap=EXCHANGED_AFTER),
    *(
        Round(
            f"sensors: {kind} {', '.join(f'{size:g}' for size in sizes)}",
            TRAINED_WORLDS,
            range(3),
            ("disturbed",),
            disturbances=tuple(Disturbance(kind, size) for size in sizes),
        )
        for kind, sizes in SENSOR_FAULTS.items()
    ),
)
