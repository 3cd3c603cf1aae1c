"""The scripted expert: hover, descend, push along the hinge's arc, hold.

It works in the frame of the moving door, so the same few numbers serve every door position.
Everything it does is a smooth function of the current state (hand, door angle): no timers and
no hidden stage, because a policy that sees only the current state should be able to learn it.
Speed is limited by the length of the displacement, never by clipping single components, so
the direction of motion is kept and the actions stay well inside [-1, 1].
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..spec import Array, Task
from .world import GRIPPER_COMMAND, MOCAP_LOW, World


@dataclass(frozen=True)
class Grip:
    """Where the hand works, in the door's frame: metres along the door from the hinge (`along`)
    and in front of it (`front`; the handle's bar lies at 0.10 to 0.14)."""

    along: float
    approach_front: float  # where it comes down
    contact_front: float  # where its fingers touch the surface that they push
    goal: float  # door angle to reach and hold, rad


GRIPS: dict[Task, Grip] = {
    "open": Grip(along=0.28, approach_front=-0.11, contact_front=-0.045, goal=-1.6),
    "close": Grip(along=0.24, approach_front=0.12, contact_front=0.065, goal=-0.06),
}
HOVER = 0.36  # height of the hand above the table while it moves across, metres
WORK = 0.19  # height of the hand while it pushes (its fingertips are 45 mm lower)
FUNNEL = (0.02, 0.07)  # horizontal distance to the approach point where the descent ends, begins
GAIN = 8.0  # action per metre of error
REACH = MOCAP_LOW[:2] + 0.01  # never press against the edge of the workspace
SPEED = 0.6  # longest displacement per step, in units of action
LEAD = 0.35  # how far ahead of the door's angle the hand aims, rad


def smoothstep(x: float, lo: float, hi: float) -> float:
    """0 below `lo`, 1 above `hi`, smooth in between."""
    t = min(max((x - lo) / (hi - lo), 0.0), 1.0)
    return t * t * (3 - 2 * t)


def in_world(hinge: Array, angle: float, along: float, front: float) -> Array:
    """(x, y) of a point given in the frame of the door at hinge angle `angle`."""
    c, s = np.cos(angle), np.sin(angle)
    return np.array([hinge[0] + c * along + s * front, hinge[1] + s * along - c * front])


def expert_action(task: Task, hand: Array, hinge: Array, angle: float) -> Array:
    """The action (4) for a hand at `hand` (3) and a door hinged at `hinge` with joint `angle`."""
    grip = GRIPS[task]
    lowered = smoothstep(HOVER - hand[2], 0.5 * (HOVER - WORK), 0.9 * (HOVER - WORK))
    aim = angle + lowered * float(np.clip(grip.goal - angle, -LEAD, LEAD))
    front = grip.approach_front + lowered * (grip.contact_front - grip.approach_front)
    target = np.maximum(in_world(hinge, aim, grip.along, front), REACH)

    approach = in_world(hinge, angle, grip.along, grip.approach_front)
    away = float(np.linalg.norm(hand[:2] - approach))
    height = WORK + (HOVER - WORK) * smoothstep(away, *FUNNEL) * (1 - lowered)

    displacement = GAIN * (np.append(target, height) - hand)
    displacement *= min(1.0, SPEED / max(float(np.linalg.norm(displacement)), 1e-9))
    return np.append(displacement, GRIPPER_COMMAND)


def act(world: World, task: Task) -> Array:
    """The expert's action in the world's current state."""
    return expert_action(task, world.hand, world.T_world_door[:3, 3], world.door_joint)
