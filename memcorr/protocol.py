"""Every constant of the paper, once.

Modules take their horizons, counts and ranges from `PROTOCOL`; nothing else in the package
spells these numbers out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Task = Literal["open", "close"]
TASKS: tuple[Task, Task] = ("open", "close")

Condition = Literal["validation", "boundary", "extreme", "camera", "combined"]
DepthSampling = Literal["object", "bilinear"]


def opposite(task: Task) -> Task:
    return "close" if task == "open" else "open"


@dataclass(frozen=True)
class Protocol:
    """Section "Experimental Protocol" and the appendices."""

    # Observation
    image_size: int = 128  # pixels, square
    state_dim: int = 9  # end effector and two fingertips, metres, world frame
    action_dim: int = 4  # displacement in units of 1 cm per step, gripper command; all in [-1, 1]

    # Demonstrations
    pairs: int = 100
    train_pairs: int = 80  # pairs 0-79 train, 80-99 validate
    episode_steps: int = 200
    door_start: float = -0.7854  # rad

    # Policy horizons
    chunk: int = 16  # predicted actions
    executed: int = 8  # executed before the next replan
    future_offsets: tuple[int, ...] = (0, 5, 10, 15)  # tau_l, frames of the reference
    points: int = 16

    # Table "Training and test distributions": bands of the normalised door position u
    band_train: tuple[float, float] = (0.2, 0.8)
    band_boundary: tuple[tuple[float, float], tuple[float, float]] = ((0.05, 0.15), (0.85, 0.95))
    band_extreme: tuple[tuple[float, float], tuple[float, float]] = ((0.0, 0.05), (0.95, 1.0))
    camera_shift_deg: float = 15.0
    door_x: tuple[float, float] = (0.0, 0.10)  # metres, u_x = 0 and 1
    door_y: tuple[float, float] = (0.85, 0.95)  # metres, u_y = 0 and 1
    door_z: float = 0.15

    @property
    def last_anchor(self) -> int:
        """Last frame (184) whose action window and largest future offset stay in bounds."""
        return self.episode_steps - max(self.chunk, self.future_offsets[-1] + 1)

    @property
    def windows_per_episode(self) -> int:
        return self.last_anchor + 1


PROTOCOL = Protocol()
