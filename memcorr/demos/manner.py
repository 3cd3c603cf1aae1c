"""Recordings as people make them: too fast, with a pause, cut at the goal, with the object hidden at first.

A manner of recording, to see what a follower makes of it: `memcorr collect --speed 2 --pause 160 --cut --hidden 10`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..errors import UserError
from ..frames import Frame
from ..spec import Array

PAUSES_AT = 40  # steps of the recording at its usual speed
NEARER_M, GREY = 0.2, 128  # what stands in front of a hidden object
SLOWEST, FASTEST, LONGEST = 0.25, 4.0, 1000


@dataclass(frozen=True)
class Manner:
    """How the expert is recorded."""

    speed: float = 1.0  # times its displacements, as far as the robot makes them
    pause: int = 0  # steps for which it stands still on its way
    cut: bool = False  # the recording ends with the first success
    hidden: int = 0  # first frames in which something stands in front of the object

    def __post_init__(self) -> None:
        if not SLOWEST <= self.speed <= FASTEST:
            raise UserError(f"--speed {self.speed:g}: give a number from {SLOWEST:g} to {FASTEST:g}")
        for name, steps in (("pause", self.pause), ("hidden", self.hidden)):
            if not 0 <= steps <= LONGEST:
                raise UserError(f"--{name} {steps}: give a whole number from 0 to {LONGEST}")

    def __str__(self) -> str:
        parts = [f"speed={self.speed:g}"] if self.speed != 1 else []
        parts += [f"{name}={n}" for name, n in (("pause", self.pause), ("hidden", self.hidden)) if n]
        return " ".join([*parts, *["cut"] * self.cut])

    def steps(self, usual: int) -> int:
        """How long the recording may take."""
        return int(usual * max(1.0, 1 / self.speed)) + self.pause

    def command(self, wanted: Array, sent: Sequence[Array]) -> Array:
        """The action in place of what the expert wants next; `sent` are those before."""
        start = round(PAUSES_AT / self.speed)
        if start <= len(sent) < start + self.pause:
            return np.append(np.zeros(3), sent[-1][3:])
        if self.speed == 1:
            return wanted
        return np.append(np.clip(self.speed * wanted[:3], -1.0, 1.0), wanted[3:])

    def seen(self, frame: Frame, t: int) -> Frame:
        """What the camera sees at step t."""
        if t >= self.hidden:
            return frame
        rgb, depth = frame.rgb.copy(), frame.depth.copy()
        rgb[frame.mask], depth[frame.mask] = GREY, depth[frame.mask] - NEARER_M
        return replace(frame, rgb=rgb, depth=depth, mask=np.zeros_like(frame.mask))


PLAINLY = Manner()
