"""What a policy is shown: which reference, which matcher, which phase, which pairing.

Every intervention of the paper is a field here. Rows, settings and the report contain this one
object. Success is always judged by the original task.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..demos.phase import reference_phase
from ..spec import Lifting, PhaseSource, Task, opposite

ReferenceChoice = Literal["correct", "empty", "opposite"]
Pairing = Literal["kept", "permuted"]
MaskSource = Literal["simulator", "carried"]
GROUND_TRUTH, NO_MATCHER = "ground-truth", "none"


@dataclass(frozen=True)
class Intervention:
    """The defaults are the paper's main setting."""

    reference: ReferenceChoice = "correct"
    matcher: str = "embedded"  # or another matcher, "ground-truth", or "none" where nothing is matched
    phase_offset: int = 0  # delta, frames of the reference
    phase_speed: float = 1.0  # rho
    pairing: Pairing = "kept"  # or live points exchanged among the valid pairs
    lifting: Lifting = "rigid"
    phase_from: PhaseSource = "elapsed"  # or "seen", by what the live scene looks like
    swap: int = 0  # control steps after which the reference is exchanged for this one; until then, the other task's
    masks: MaskSource = "simulator"  # of live frames; "carried": the first one, by the matcher, as on a real robot

    def supplied(self, task: Task, world: str, elapsed: int | None = None) -> Task:
        """The task of the reference that is supplied when `task` is asked for, after `elapsed` steps or in the end."""
        other = (self.reference == "opposite") != (elapsed is not None and elapsed < self.swap)
        return opposite(task, world) if other else task

    def phase(self, elapsed: int, length: int) -> int:
        """j_k of a reference of `length` frames, which begins when it is first shown."""
        return reference_phase(self.begun(elapsed), length, self.phase_speed, self.phase_offset)

    def begun(self, elapsed: int) -> int:
        """Steps since the reference that is supplied after `elapsed` steps was begun."""
        return elapsed - self.swap if elapsed >= self.swap else elapsed

    @property
    def usual_phase(self) -> bool:
        return (self.phase_offset, self.phase_speed, self.phase_from) == (0, 1.0, "elapsed")


PLAIN = Intervention()
