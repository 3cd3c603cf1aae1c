"""The scripted expert: hover, descend, push, hold; and start over when it was thrown off.

It works in the frame of the moving body, so the same few numbers (`pairs.Grip`) serve every position.
Everything it does is a smooth function of the current state (hand, object): no timers and no hidden stage,
because a policy that sees only the current state should be able to learn it, and because it then recovers
from whatever moves the hand or the object. Speed is limited by the length of the displacement, never by
clipping single components, so the direction of motion is kept and the actions stay well inside [-1, 1].
"""

from __future__ import annotations

import numpy as np

from ..spec import DOOR, Array, Task, opposite
from .pairs import Grip
from .scenes import Scene
from .stock import StockWorld
from .world import GRIPPER_COMMAND, MOCAP_LOW, World

GAIN = 8.0  # action per metre of error
REACH = MOCAP_LOW[:2] + 0.01  # never press against the edge of the workspace
SPEED = 0.6  # longest displacement per step, in units of action
WORK = 0.19  # height of the hand while it pushes the door (its fingertips are 45 mm lower)


def begin(world: World, scene: Scene, task: Task) -> None:
    """Resets the world; where the other task was under way before this one, it is left off in the middle."""
    world.reset(scene)
    before = next((int(d.size) for d in scene.disturbances if d.kind == "other-task"), 0)
    for _ in range(before):
        world.step(act(world, opposite(task, scene.world)))


def smoothstep(x: float, lo: float, hi: float) -> float:
    """0 below `lo`, 1 above `hi`, smooth in between."""
    t = min(max((x - lo) / (hi - lo), 0.0), 1.0)
    return t * t * (3 - 2 * t)


def act(world: World, task: Task) -> Array:
    """The expert's action (4) in the world's current state."""
    if isinstance(world, StockWorld):
        return world.expert()
    grip, hand = world.pair.grips[task], world.hand
    plan = _door if world.pair.name == DOOR else _any
    target, off_track = plan(world, grip, hand), _off_track(world, grip, hand)
    if off_track > 0:  # straight up first, then across
        risen = smoothstep(hand[2], grip.hover - grip.risen[0], grip.hover - grip.risen[1])
        away = np.append(hand[:2], grip.hover)
        target = target + off_track * (1 - risen) * (away - target)
    displacement = GAIN * (target - hand)
    displacement *= min(1.0, SPEED / max(float(np.linalg.norm(displacement)), 1e-9))
    return np.append(displacement, GRIPPER_COMMAND)


def waypoints(world: World, grip: Grip, hand: Array) -> tuple[Array, Array, Array]:
    """Approach and contact point of the hand, metres, world frame, and the direction from one to the other.

    Where a bar is in the way, the hand comes down before it, on top of the object; and wherever on the object
    it then stands, there its contact is: it presses and drags.
    """
    T = world.T_world_object
    if grip.slope is not None or world.free:
        moved = T[:3, 3] + (0.0 if grip.slope is None else (world.joint - world.pair.start) * np.array(grip.slope))
        approach, contact = np.array(grip.approach) + moved, np.array(grip.contact) + moved
    else:
        approach, contact = (T[:3, :3] @ np.array(point) + T[:3, 3] for point in (grip.approach, grip.contact))
    along = (contact - approach) / np.linalg.norm(contact - approach)
    barred = max(float((world.place - approach) @ along) - grip.bar, 0.0)
    dragged = float(np.clip((hand - contact) @ along, 0.0, grip.drag))
    return approach + barred * along, contact + dragged * along, along


def _off_track(world: World, grip: Grip, hand: Array) -> float:
    """0 where the push can begin or go on, 1 where a hand that is low stands on the wrong side of it."""
    _, contact, along = waypoints(world, grip, hand)
    offset = hand - contact
    ahead = float(offset @ along)
    sideways = float(np.linalg.norm((offset - ahead * along)[:2]))
    return max(smoothstep(ahead, *grip.beyond), smoothstep(sideways, *grip.sideways))


def _any(world: World, grip: Grip, hand: Array) -> Array:
    """Where the hand should be next."""
    approach, contact, along = waypoints(world, grip, hand)
    drop = grip.hover - approach[2]
    lowered = smoothstep(grip.hover - hand[2], grip.lower[0] * drop, grip.lower[1] * drop)
    push = lowered
    if grip.engage is not None:
        push *= 1 - smoothstep(float((contact - hand) @ along), *grip.engage)
    target = approach + lowered * (contact - approach)
    ahead = push * float(np.clip(grip.goal - world.joint, -grip.lead, grip.lead))
    target = world.advanced(target, ahead) if grip.slope is None else target + ahead * np.array(grip.slope)
    away = float(np.linalg.norm(hand[:2] - approach[:2]))
    target[2] += (grip.hover - target[2]) * smoothstep(away, *grip.funnel) * (1 - lowered)
    return np.append(np.maximum(target[:2], [-1.0, REACH[1]]), target[2])


def _door(world: World, grip: Grip, hand: Array) -> Array:
    """The same for the door, in its hinge's frame: written first, and kept to the bit, because the paper's
    demonstrations are made of it."""
    hinge, angle = world.T_world_object[:3, 3], world.joint
    lowered = smoothstep(grip.hover - hand[2], 0.5 * (grip.hover - WORK), 0.9 * (grip.hover - WORK))
    aim = angle + lowered * float(np.clip(grip.goal - angle, -grip.lead, grip.lead))
    along, approach_front, contact_front = grip.approach[0], -grip.approach[1], -grip.contact[1]
    front = approach_front + lowered * (contact_front - approach_front)
    target = np.maximum(in_hinge_frame(hinge, aim, along, front), REACH)
    approach = in_hinge_frame(hinge, angle, along, approach_front)
    away = float(np.linalg.norm(hand[:2] - approach))
    height = WORK + (grip.hover - WORK) * smoothstep(away, *grip.funnel) * (1 - lowered)
    return np.append(target, height)


def in_hinge_frame(hinge: Array, angle: float, along: float, front: float) -> Array:
    """(x, y) of a point given along and in front of the door at hinge angle `angle`."""
    c, s = np.cos(angle), np.sin(angle)
    return np.array([hinge[0] + c * along + s * front, hinge[1] + s * along - c * front])
