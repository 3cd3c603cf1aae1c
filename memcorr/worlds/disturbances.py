"""What can go wrong in an episode, one line each: the object, the hand, the controls, the sensors.

A disturbance is a kind and a size, "bump=0.05". It belongs to the scene, happens whoever controls the robot,
and is drawn from the scene alone: the same rollout is disturbed in the same way every time.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..errors import UserError
from ..spec import Array

if TYPE_CHECKING:
    from .scenes import Scene
    from .world import World


@dataclass(frozen=True)
class Kind:
    usual: float  # size if none is given
    largest: float
    words: str
    whole: bool = False  # sizes are whole numbers


KINDS: dict[str, Kind] = {
    "other-task": Kind(48, 150, "so many steps of the other task were done before the episode begins", whole=True),
    "start": Kind(0.2, 1.0, "the joint starts at this share of its neutral range, 0 beside the second task's goal"),
    "set-back": Kind(0.5, 1.0, "the object is set back to its start once it is this share of the way to being done"),
    "bump": Kind(0.05, 0.2, "the hand is pushed by so many metres in mid-episode"),
    "shift": Kind(0.03, 0.1, "the object's base is moved by so many metres in mid-episode"),
    "action-noise": Kind(0.3, 2.0, "Gaussian noise of this deviation on every displacement, in units of action"),
    "delay": Kind(3, 20, "actions reach the robot so many steps late", whole=True),
    "depth-noise": Kind(1.0, 20.0, "depth noise as an RGB-D camera has it, times this"),
    "depth-holes": Kind(0.1, 0.9, "share of the pixels without depth, most at the edges of things"),
    "mask-erode": Kind(1, 10, "the mask loses so many pixels at its outline", whole=True),
    "mask-dilate": Kind(2, 10, "the mask gains so many pixels around its outline", whole=True),
    "mask-late": Kind(3, 8, "the mask is so many steps old", whole=True),
    "extrinsics": Kind(1.0, 10.0, "the camera is believed to be elsewhere: by 1 degree and 5 mm, times this"),
    "azimuth": Kind(20.0, 90.0, "the camera is turned by so many degrees, to either side"),
    "orbit": Kind(20.0, 90.0, "the same, but about the object's base instead of the point that the camera looks at"),
    "elevation": Kind(10.0, 45.0, "the camera is raised or lowered by so many degrees"),
}
FAULTS = ("depth-noise", "depth-holes", "mask-erode", "mask-dilate", "mask-late", "extrinsics")
VIEWPOINTS = ("azimuth", "orbit", "elevation")
SENSORS = (*FAULTS, *VIEWPOINTS)
EARLIEST, LATEST = 15, 60  # steps between which the hand is pushed or the base moved
CAMERA_ERROR_DEG, CAMERA_ERROR_M = 1.0, 0.005


@dataclass(frozen=True)
class Disturbance:
    kind: str
    size: float

    def __str__(self) -> str:
        return f"{self.kind}={self.size:g}"

    @staticmethod
    def parse(text: str) -> Disturbance:
        """ "bump", or "bump=0.08"."""
        name, given, size = text.partition("=")
        if name not in KINDS:
            raise UserError(f"--disturb {text}: choose from {', '.join(KINDS)}")
        kind = KINDS[name]
        try:
            value = float(size) if given else kind.usual
        except ValueError:
            value = float("nan")
        if not 0 <= value <= kind.largest or (kind.whole and value != int(value)):
            raise UserError(
                f"--disturb {text}: {kind.words}; give a {'whole ' * kind.whole}number up to {kind.largest:g}"
            )
        return Disturbance(name, value)


def drawn(scene: Scene, kind: str) -> np.random.Generator:
    """What this scene's disturbance of a kind is drawn from."""
    return np.random.default_rng([scene.seed, scene.index, *map(zlib.crc32, (scene.condition.encode(), kind.encode()))])


class Events:
    """What happens to the object and the hand in one rollout, step by step."""

    def __init__(self, scene: Scene, disturbances: tuple[Disturbance, ...] | None = None) -> None:
        self.sizes = {d.kind: d.size for d in (scene.disturbances if disturbances is None else disturbances)}
        self.scene = scene
        self.set_back_done = False

    def after(self, world: World, step: int) -> None:
        """Called when `step` control steps have been done."""
        if (
            "set-back" in self.sizes
            and not self.set_back_done
            and world.pair.done(world.joint) >= self.sizes["set-back"]
        ):
            self.set_back_done = True
            world.set_joint(world.pair.start)
        if "bump" in self.sizes:
            rng = drawn(self.scene, "bump")
            if step == rng.integers(EARLIEST, LATEST):
                direction = rng.normal(size=3)
                direction[2] = 0.5 * abs(direction[2])  # not through the table
                world.push_hand(self.sizes["bump"] * direction / np.linalg.norm(direction))
        if "shift" in self.sizes:
            rng = drawn(self.scene, "shift")
            if step == rng.integers(EARLIEST, LATEST):
                angle = rng.uniform(0, 2 * np.pi)
                world.move_base(self.sizes["shift"] * np.array([np.cos(angle), np.sin(angle), 0.0]))

    def action(self, executed: list[Array], wanted: Array, step: int) -> Array:
        """What reaches the robot when `wanted` is sent; `executed` are the actions sent before it."""
        late = int(self.sizes.get("delay", 0))
        sent = [*executed, wanted]
        action = sent[-1 - late] if late < len(sent) else np.append(np.zeros(3), wanted[3])
        if noise := self.sizes.get("action-noise"):
            rng = np.random.default_rng([*drawn(self.scene, "action-noise").integers(2**31, size=2), step])
            action = action + np.append(noise * rng.standard_normal(3), 0.0)
        return action
