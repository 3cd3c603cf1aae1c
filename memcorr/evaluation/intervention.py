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

    def supplied(self, task: Task, world: str) -> Task:
        """The task of the reference that is supplied when `task` is asked for."""
        return opposite(task, world) if self.reference == "opposite" else task

    def phase(self, elapsed: int, length: int) -> int:
        """j_k of a reference of `length` frames."""
        return reference_phase(elapsed, length, self.phase_speed, self.phase_offset)

    @property
    def usual_phase(self) -> bool:
        return (self.phase_offset, self.phase_speed, self.phase_from) == (0, 1.0, "elapsed")
