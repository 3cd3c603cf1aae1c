"""Ten paired worlds as data: one Meta-World scene each, one start, two tasks that undo each other.

Everything that differs from world to world stands here and nowhere else; `World(pair)`, the expert, the
scenes and the disturbances read it. Positions are metres in the world frame unless said otherwise. The
flags are Meta-World's own (tests compare them with its classes), the grips and cameras are ours (LOG.md).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from ..errors import UserError
from ..spec import SPEC, STOCK, WORLD_TASKS, Array, Band, Task, stock_task, tasks_of
from .points import POINTS

Vector = tuple[float, float, float]
ZERO: Vector = (0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Flag:
    """Official success: |(point + offset) - (target + target_offset)| <= radius, along one axis or in all three.

    Points are named "geom:x", "site:x" or "body:x"; the target "place" is where the object was put.
    """

    point: str
    radius: float
    offset: Vector = ZERO
    target: str = "place"
    target_offset: Vector = ZERO
    axis: int | None = None  # 0 x, 1 y, 2 z; None: Euclidean


@dataclass(frozen=True)
class Grip:
    """How the expert's hand works on the object: waypoints in the frame of the moving body, metres."""

    approach: Vector  # where the hand comes down
    contact: Vector  # where its fingers touch what they push
    goal: float  # joint value to reach and hold
    lead: float  # how far ahead of the joint the hand aims, in the joint's unit
    hover: float = 0.25  # height of the hand while it moves across
    funnel: Band = (0.015, 0.045)  # horizontal distance to the approach point where the descent ends, begins
    lower: Band = (0.5, 0.9)  # share of the drop at which the push begins, is full
    slope: Vector | None = None  # world-aligned waypoints that move by so much per unit of joint, not with the body
    engage: Band | None = None  # distance still to go to the contact: the push waits until the hand is there
    beyond: Band = (0.015, 0.03)  # distance past the contact at which a low hand starts over
    sideways: Band = (0.035, 0.06)  # the same, sideways from the line through approach and contact
    risen: Band = (0.05, 0.02)  # below the hovering height: where a hand that starts over begins to move across, does
    bar: float = np.inf  # how far behind the place, looking along the push, the hand can still come down
    drag: float = 0.0  # how far past the contact the hand stands on the object and drags it by friction


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A scene with a shared start and two tasks."""

    name: str
    scene: str  # Meta-World's file
    placed: dict[str, Vector]  # top-level bodies and their offsets from the place p(u)
    x: Band = (-0.05, 0.05)  # of p(u), u_x = 0 and 1
    y: Band
    z: float = 0.0
    body: str  # the moving body: mask and ground truth; "child:NAME" is the unnamed child of NAME
    joint: str | int  # its joint, by name or number; of a mug, which is free, y relative to the place counts
    start: float  # joint value that both tasks start from
    flags: dict[str, Flag]  # by task, in the order of `tasks`
    grips: dict[str, Grip]
    neutral: Band  # joint values between which neither flag is true
    hand: Vector  # where the hand starts
    points: Array = field(repr=False, compare=False)  # (16, 3) ground truth in the frame of the moving body
    still: dict[str | int, float] = field(default_factory=dict)  # other joints of the object at the start
    look_at: Vector = (0.0, 0.6, 0.15)  # azimuth and elevation turn about it
    distance: float = 0.6  # of the camera, relative to the door's
    parked: bool = True  # out of the way while the hand settles

    @property
    def tasks(self) -> tuple[str, str]:
        return WORLD_TASKS[self.name]

    def place(self, u: tuple[float, float]) -> Array:
        """p(u): where the object stands, metres."""
        x, y = (lo + v * (hi - lo) for v, (lo, hi) in zip(u, (self.x, self.y), strict=True))
        return np.array([x, y, self.z])

    def progress(self, q: float) -> float:
        """0 at the start, 1 where the first task's expert holds, -1 where the second's does."""
        first, second = (self.grips[task].goal - self.start for task in self.tasks)
        moved = q - self.start
        return moved / first if moved * first > 0 else -moved / second

    def done(self, q: float) -> float:
        """0 at the start, 1 where a flag becomes true, whichever is nearer in the direction moved."""
        low, high = self.neutral
        return (q - self.start) / ((high if q > self.start else low) - self.start)

    def start_at(self, share: float) -> float:
        """The joint at a share of the neutral range: 0 next to the second task's goal, 1 next to the first's."""
        low, high = self.neutral
        first, _ = (self.grips[task].goal for task in self.tasks)
        return low + (share if first > self.start else 1 - share) * (high - low)


# The bar, the stem and the base of the door's handle (x along the door from the hinge, y behind it, z up).
HANDLE_POINTS: Array = np.array(
    [(x, -0.12 + dy, dz) for x in (0.31, 0.35, 0.40, 0.45) for dy, dz in ((0.0, 0.019), (-0.019, 0.0))]
    + [(0.325, y, dz) for y in (-0.10, -0.06, -0.03) for dz in (0.013, -0.013)]
    + [(0.30, -0.018, 0.0), (0.35, -0.018, 0.0)]
)
assert HANDLE_POINTS.shape == (SPEC.points, 3)

# fmt: off
_DOOR = Pair(
    name="door", scene="sawyer_door_pull", placed={"door": ZERO},
    x=SPEC.door_x, y=SPEC.door_y, z=SPEC.door_z, hand=(0.03, 0.57, 0.36),
    distance=1.0, parked=False,
    body="door_link", joint="doorjoint", start=SPEC.door_start, neutral=(-1.383, -0.178),
    points=HANDLE_POINTS,
    flags={
        "open": Flag("geom:handle", SPEC.success_radius, target_offset=(-0.3, -0.45, 0.0), axis=0),
        "close": Flag("geom:handle", SPEC.success_radius, target_offset=(0.2, -0.2, 0.0)),
    },
    grips={
        "open": Grip(
            (0.28, 0.11, 0.04), (0.28, 0.045, 0.04), -1.6, 0.35, hover=0.36, funnel=(0.02, 0.07), risen=(0.085, 0.06),
        ),
        "close": Grip((0.24, -0.12, 0.04), (0.24, -0.065, 0.04), -0.06, 0.35, hover=0.36, funnel=(0.02, 0.07)),
    },
)
_DRAWER = Pair(
    name="drawer", scene="sawyer_drawer", placed={"drawer": ZERO},
    y=(0.80, 0.90), hand=(0.0, 0.575, 0.25),
    look_at=(0.01, 0.7, 0.1), distance=0.7,
    body="drawer_link", joint="goal_slidey", start=-0.08, neutral=(-0.160, -0.0315),
    points=POINTS["drawer"],
    flags={
        "open": Flag("body:drawer_link", 0.03, (0.0, -0.16, 0.0), target_offset=(0.0, -0.36, 0.09)),
        "close": Flag("body:drawer_link", 0.065, (0.0, -0.16, 0.05), target_offset=(0.0, -0.16, 0.09)),
    },
    grips={
        "open": Grip((0.0, -0.1205, 0.01), (0.0, -0.128, 0.01), -0.17, 0.06, beyond=(0.012, 0.02)),
        "close": Grip((0.0, -0.25, 0.01), (0.0, -0.182, 0.01), -0.01, 0.06, beyond=(0.014, 0.022)),
    },
)
_WINDOW = Pair(
    name="window", scene="sawyer_window_horizontal", placed={"window": ZERO},
    y=(0.75, 0.85), z=0.16, hand=(0.086, 0.67, 0.32),
    look_at=(0.04, 0.77, 0.15),
    body="windowb_a", joint="window_slide", start=0.1, neutral=(0.04, 0.19),
    points=POINTS["window"],
    flags={
        "open": Flag("site:handleOpenStart", 0.05, target_offset=(0.2, 0.0, 0.0), axis=0),
        "close": Flag("site:handleCloseStart", 0.05, axis=0),
    },
    grips={
        "open": Grip((-0.10, -0.09, 0.03), (-0.037, -0.09, 0.03), 0.2, 0.06, hover=0.32, beyond=(0.008, 0.015)),
        "close": Grip((0.072, -0.09, 0.03), (0.009, -0.09, 0.03), 0.01, 0.06, hover=0.32),
    },
)
_FAUCET = Pair(
    name="faucet", scene="sawyer_faucet", placed={"faucetBase": ZERO},
    y=(0.775, 0.875), hand=(0.0, 0.695, 0.25),
    look_at=(0.01, 0.75, 0.13),
    body="faucet_link2", joint="knob_Joint_1", start=0.0, neutral=(-1.26, 1.38),
    points=POINTS["faucet"],
    flags={
        "open": Flag("site:handleStartOpen", 0.07, (-0.04, 0.0, 0.02), target_offset=(0.175, 0.0, 0.125)),
        "close": Flag("site:handleStartClose", 0.07, (0.0, 0.0, -0.01), target_offset=(-0.175, 0.0, 0.125)),
    },
    grips={
        "open": Grip((-0.09, -0.13, 0.01), (-0.036, -0.13, 0.01), 1.5, 0.35, funnel=(0.02, 0.07)),
        "close": Grip((0.09, -0.13, 0.01), (0.036, -0.13, 0.01), -1.5, 0.35, funnel=(0.02, 0.07)),
    },
)
_LOCK = Pair(
    name="lock", scene="sawyer_door_lock", placed={"door": ZERO},
    y=(0.775, 0.875), z=0.15, hand=(0.055, 0.61, 0.30),
    look_at=(0.04, 0.68, 0.18),
    body="lock_link", joint=9, start=0.785, neutral=(0.377, 1.197),
    points=POINTS["lock"],
    flags={
        "unlock": Flag("site:lockStartUnlock", 0.02, target="body:lock_link", target_offset=(0.1, 0.0, 0.0), axis=0),
        "lock": Flag("site:lockStartLock", 0.02, target="body:lock_link", target_offset=(0.0, 0.0, -0.1), axis=2),
    },
    grips={
        "unlock": Grip(
            (-0.035, -0.14, -0.13), (-0.010, -0.062, -0.13), 0.15, 0.7, hover=0.30, slope=(-0.036, 0.0, -0.037),
            engage=(0.02, 0.05),
        ),
        "lock": Grip(
            (0.15, -0.05, 0.018), (0.059, -0.05, 0.018), 1.4, 0.5, hover=0.30, slope=(-0.055, 0.0, 0.0),
            beyond=(0.01, 0.02),
        ),
    },
)
_HANDLE = Pair(
    name="handle", scene="sawyer_handle_press", placed={"box": ZERO},
    y=(0.80, 0.90), hand=(0.0, 0.60, 0.25),
    look_at=(0.01, 0.67, 0.1),
    body="handle_link", joint=9, start=-0.06, neutral=(-0.077, -0.042),
    points=POINTS["handle"],
    flags={
        "pull": Flag("site:goalPull", 0.05, target="site:handleRight", axis=2),
        "press": Flag("site:handleStart", 0.02, target="site:goalPress", axis=2),
    },
    grips={
        "pull": Grip((0.0, -0.26, 0.0), (0.0, -0.19, 0.0), 0.0, 0.06, engage=(0.025, 0.05)),
        "press": Grip((0.0, -0.15, 0.10), (0.0, -0.15, 0.07), -0.1, 0.04),
    },
)
_HANDLE_SIDE = replace(
    _HANDLE,
    name="handle-side", scene="sawyer_handle_press_sideways",
    x=(-0.35, -0.25), y=(0.65, 0.75), hand=(-0.05, 0.70, 0.25),
    look_at=(-0.11, 0.69, 0.1),
    neutral=(-0.077, -0.0435),
    flags=_HANDLE.flags | {"pull": Flag("site:handleCenter", 0.08, target="site:goalPull")},
    grips=_HANDLE.grips | {"pull": replace(_HANDLE.grips["pull"], contact=(0.0, -0.18, 0.0))},
)
_PLATE = Pair(
    name="plate", scene="sawyer_plate_slide",
    placed={"puck_channel": (0.0, 0.0, 0.015), "puck_goal": (0.0, 0.30, 0.0)},
    y=(0.55, 0.65), hand=(0.0, 0.69, 0.25),
    look_at=(0.01, 0.68, 0.03), distance=0.7,
    body="child:puck_channel", joint="goal_slidey", start=0.09, still={"goal_slidex": 0.0}, neutral=(0.070, 0.232),
    points=POINTS["plate"],
    flags={
        "slide": Flag("geom:puck", 0.07, target_offset=(0.0, 0.30, 0.0)),
        "back": Flag("geom:puck", 0.07, target_offset=(0.0, 0.0, 0.015)),
    },
    # The net's bar keeps the palm before it, so a plate deep in the net is out of reach from behind: "back" comes
    # down on top of it and drags it out.
    grips={
        "slide": Grip(
            (0.0, -0.12, 0.04), (0.0, -0.073, 0.04), 0.29, 0.075, funnel=(0.02, 0.07), lower=(0.7, 0.96),
            risen=(0.14, 0.10),
        ),
        "back": Grip(
            (0.0, 0.078, 0.04), (0.0, 0.062, 0.04), 0.03, 0.06, funnel=(0.02, 0.07), lower=(0.7, 0.92), bar=0.168,
            drag=0.12,
        ),
    },
)
_PLATE_SIDE = replace(
    _PLATE,
    name="plate-side", scene="sawyer_plate_slide_sideway",
    placed={"puck_channel": (0.0, 0.0, 0.015), "puck_goal": (-0.25, 0.0, 0.0)},
    x=(0.0, 0.1), hand=(0.0, 0.60, 0.25),
    look_at=(0.03, 0.59, 0.03),
    joint="goal_slidex", start=-0.03, still={"goal_slidey": 0.0}, neutral=(-0.182, 0.031),
    flags={
        "slide": Flag("geom:puck", 0.07, target_offset=(-0.25, 0.0, 0.0)),
        "back": Flag("geom:puck", 0.07, target_offset=(0.1, 0.0, 0.015)),
    },
    grips={
        "slide": Grip(
            (0.11, 0.0, 0.04), (0.066, 0.0, 0.04), -0.2, 0.075, funnel=(0.02, 0.07), lower=(0.7, 0.96),
            risen=(0.14, 0.10),
        ),
        "back": Grip(
            (-0.088, 0.0, 0.04), (-0.066, 0.0, 0.04), 0.1, 0.06, funnel=(0.02, 0.07), lower=(0.7, 0.92), bar=0.118,
            drag=0.12,
        ),
    },
)
_COFFEE = Pair(
    name="coffee", scene="sawyer_coffee", placed={"coffee_machine": (0.0, 0.22, 0.0)},
    y=(0.70, 0.80), hand=(0.0, 0.64, 0.25),
    look_at=(0.01, 0.63, 0.04),
    body="mug", joint=0, start=-0.11, neutral=(-0.13, -0.07),
    points=POINTS["coffee"],
    flags={
        "push": Flag("body:obj", 0.07),
        "pull": Flag("body:obj", 0.07, target_offset=(0.0, -0.20, 0.0)),
    },
    # "push" goes only just past its flag: a mug set back from further on has its middle behind the finger and is
    # thrown aside by the simulator.
    grips={
        "push": Grip((0.0, -0.10, 0.07), (0.0, -0.051, 0.07), -0.06, 0.05, funnel=(0.02, 0.07), lower=(0.7, 0.96)),
        "pull": Grip(
            (0.0, 0.057, 0.07), (0.0, 0.041, 0.07), -0.165, 0.05, funnel=(0.02, 0.07), lower=(0.7, 0.96),
            beyond=(0.009, 0.015),
        ),
    },
)
# fmt: on
_ALL = (_DOOR, _DRAWER, _WINDOW, _FAUCET, _LOCK, _HANDLE, _HANDLE_SIDE, _PLATE, _PLATE_SIDE, _COFFEE)
PAIRS: dict[str, Pair] = {pair.name: pair for pair in _ALL}
assert list(PAIRS) == list(WORLD_TASKS)


def find_pair(name: str) -> Pair:
    if name not in PAIRS:
        raise UserError(f"unknown world {name!r}: choose one of {', '.join(PAIRS)}, or {STOCK}NAME")
    return PAIRS[name]


def find_tasks(world: str) -> tuple[Task, ...]:
    """Of a pair, or of one of Meta-World's own tasks."""
    return tasks_of(world) if stock_task(world) else find_pair(world).tasks
