"""An episode that a person may interfere with: several slots, one start, one reference, the same pushes in all.

Slots share one world and so one GL context; a slot is a snapshot of the physics, restored for its turn, and decides
through the controllers of evaluation. Without interference it is the rollout that `memcorr evaluate` judges. What
happened is remembered step by step as snapshots, from which pictures are drawn when they are wanted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from ..demos.phase import reference_phase
from ..demos.store import Demonstration
from ..evaluation.controllers import PolicyController
from ..evaluation.rollout import Controller, Decision, Job, Memory, Response
from ..following.masks import Mask, Tracked
from ..frames import Frame
from ..show.story import Supplied
from ..spec import SPEC, Array, steps_of
from ..worlds.scenes import Scene
from ..worlds.world import World

REMEMBERED = 10 * SPEC.episode_steps  # steps of an episode that goes on and on


class Guide:
    """A reference to follow, and who follows it: one controller per slot, made once."""

    def __init__(
        self, demonstration: Demonstration, controllers: Mapping[str, Controller], usual: Guide | None = None
    ) -> None:
        self.demonstration, self.controllers = demonstration, controllers
        self.usual = usual or self  # with which another episode begins
        self._supplied: dict[int, Supplied] = {}

    @property
    def words(self) -> str:
        return f"{self.demonstration.task}, pair {self.demonstration.pair}"

    def supplied(self, j: int) -> Supplied:
        """The reference as a policy is shown it at frame j."""
        if j not in self._supplied:
            d = self.demonstration
            future = d.gripper[np.minimum(j + np.array(SPEC.future_offsets), len(d) - 1)]
            self._supplied[j] = Supplied(d.task, d.frame(j), j, future)
        return self._supplied[j]


@dataclass(frozen=True)
class Slot:
    """One controller's side of the episode after some step."""

    name: str
    state: Array  # MuJoCo's integration state
    place: Array  # where the object's base is, metres
    answer: Response | None = None  # in force; None when the next step begins with a look
    since: int = 0  # steps of it that are done
    looks: int = 0  # since the reference was begun
    success: bool = False  # now
    first_success: int | None = None  # step, since the reference was begun
    broken: bool = False  # physics broke down, or an action is no number: it stands still
    memory: Memory = field(default_factory=Memory)  # of its controller, of this episode


@dataclass(frozen=True)
class Instant:
    """The whole episode after `step` control steps."""

    step: int
    begun: int  # step at which the reference was begun
    guide: Guide
    azimuth_deg: float
    slots: tuple[Slot, ...]
    events: tuple[str, ...] = ()  # what a person did before the next step

    @property
    def elapsed(self) -> int:
        return self.step - self.begun

    @property
    def over(self) -> bool:
        """Nothing more to see, as evaluation judges it: done, broken or out of time in every slot."""
        if self.elapsed >= steps_of(self.guide.demonstration.world):
            return True
        return all(slot.broken or slot.first_success is not None for slot in self.slots)


@dataclass(frozen=True)
class Sight:
    """What there is to see of a slot: the camera's frame, the pose of every body, what was planned on."""

    slot: Slot
    frame: Frame
    positions: Array  # (bodies, 3) metres, world
    wxyz: Array  # (bodies, 4)
    progress: float
    supplied: Supplied | None  # the reference behind the plan in force; before the first look as the clock has it

    @property
    def match_error_mm(self) -> float | None:
        return None if self.slot.answer is None else self.slot.answer.match_error_mm


class Episode:
    """Belongs to one thread, the one that owns the renderer."""

    def __init__(self, world: World, scene: Scene, guide: Guide) -> None:
        self.world = world
        self.begin(scene, guide)

    def begin(self, scene: Scene, guide: Guide) -> None:
        """From the start, nothing done yet."""
        self._begin(scene, guide.usual)

    def _begin(self, scene: Scene, guide: Guide) -> None:
        self.scene = scene
        self.world.reset(scene)
        state, place = self.world.snapshot(), self.world.place
        slots = tuple(Slot(name, state, place) for name in guide.controllers)
        self.now = Instant(0, 0, guide, scene.camera_azimuth_deg, slots)
        self.past: deque[Instant] = deque(maxlen=REMEMBERED)  # one per step, each as it was when the step began

    # What a person does

    def carry(self, name: str, controller: PolicyController, mask: Mask) -> None:
        """Begins again; in the slot `name` this controller carries a mask of the first frame from look to look."""
        usual = self.now.guide.usual
        self._begin(self.scene, Guide(usual.demonstration, {**usual.controllers, name: controller}, usual))
        frame = self.see()[0].frame
        assert controller.matcher is not None
        tracked = Tracked(controller.matcher, frame, mask)
        slots = (
            replace(slot, memory=replace(slot.memory, tracked=tracked)) if slot.name == name else slot
            for slot in self.now.slots
        )
        self.now = replace(self.now, slots=tuple(slots))
        self._happened("mask: clicked")

    def follow(self, guide: Guide) -> None:
        """Another reference from here on, followed from its start; success is judged by its task."""
        if self.now.step == 0:
            self.begin(self.scene, guide)
            return
        slots = (
            replace(
                slot,
                answer=None,
                since=0,
                looks=0,
                success=False,
                first_success=None,
                memory=Memory(began=slot.memory.began),
            )
            for slot in self.now.slots
        )
        self.now = replace(self.now, guide=guide, begun=self.now.step, slots=tuple(slots))
        self._happened(f"reference: {guide.words}")

    def place(self, u: tuple[float, float]) -> None:
        """The object's base to u, also in mid-episode; at the start it is another scene."""
        if self.now.step == 0:
            return self.begin(replace(self.scene, u=u), self.now.guide)
        there = self.world.pair.place(u)
        words = f"base to u = {u[0]:.2f}, {u[1]:.2f}"
        return self.interfere(lambda world: world.move_base(there - world.place), words, "base to")

    def put_joint(self, share: float | None) -> None:
        """The joint to a share of its neutral range, None: to its usual start."""
        if self.now.step == 0:
            return self.begin(replace(self.scene, start=share), self.now.guide)
        pair = self.world.pair
        q = pair.start if share is None else pair.start_at(share)
        return self.interfere(lambda world: world.set_joint(q), f"joint to {q:.3f}", "joint to")

    def turn_camera(self, azimuth_deg: float) -> None:
        if self.now.step == 0:
            return self.begin(replace(self.scene, camera_azimuth_deg=azimuth_deg), self.now.guide)
        self.now = replace(self.now, azimuth_deg=azimuth_deg)
        return self._happened(f"camera to {azimuth_deg:g} degrees", "camera to")

    def interfere(self, act: Callable[[World], None], words: str, slider: str = "") -> None:
        """The same in every slot; no controller is informed, its next look shows it."""
        slots = []
        for slot in self.now.slots:
            self._restore(slot)
            act(self.world)
            slots.append(replace(slot, state=self.world.snapshot(), place=self.world.place))
        self.now = replace(self.now, slots=tuple(slots))
        self._happened(words, slider)

    def _happened(self, words: str, slider: str = "") -> None:
        """Remembered; of a slider on its way only where it ends."""
        before = self.now.events
        if slider and before and before[-1].startswith(slider):
            before = before[:-1]
        self.now = replace(self.now, events=(*before, words))

    # What the robots do

    def look(self) -> None:
        """Slots that have no plan look and make one, without moving yet."""
        self.now = replace(self.now, slots=tuple(self._looked(slot) for slot in self.now.slots))

    def advance(self) -> None:
        """One control step in every slot."""
        slots = tuple(self._stepped(self._looked(slot)) for slot in self.now.slots)
        self.past.append(replace(self.now, slots=tuple(map(_planned, self.now.slots, slots))))
        self.now = replace(self.now, step=self.now.step + 1, slots=slots, events=())

    def _restore(self, slot: Slot, azimuth_deg: float | None = None) -> None:
        azimuth = self.now.azimuth_deg if azimuth_deg is None else azimuth_deg
        self.world.restore(replace(self.scene, camera_azimuth_deg=azimuth), slot.state, slot.place)

    def _looked(self, slot: Slot) -> Slot:
        if slot.broken or (slot.answer is not None and slot.since < SPEC.executed):
            return slot
        guide = self.now.guide
        self._restore(slot)
        world, controller = self.world, guide.controllers[slot.name]
        frame = world.observe() if controller.sees else None
        job = Job(self.scene, guide.demonstration.task)
        (answer,) = controller.decide(
            [
                Decision(
                    job,
                    replan=slot.looks,
                    elapsed=self.now.elapsed,
                    frame=frame,
                    T_world_object=world.T_world_object,
                    robot_state=world.robot_state,
                    memory=slot.memory,
                )
            ]
        )
        return replace(slot, answer=answer, since=0, looks=slot.looks + 1, memory=answer.memory)

    def _stepped(self, slot: Slot) -> Slot:
        if slot.broken:
            return slot
        assert slot.answer is not None and slot.answer.plan is not None
        action = slot.answer.plan.actions[slot.since]
        if not np.isfinite(action).all():
            return replace(slot, broken=True)
        world, task = self.world, self.now.guide.demonstration.task
        self._restore(slot)
        world.step(action)
        success = world.success(task) and not world.diverged
        first = self.now.elapsed + 1 if success and slot.first_success is None else slot.first_success
        return replace(
            slot,
            state=world.snapshot(),
            since=slot.since + 1,
            success=success,
            first_success=first,
            broken=world.diverged,
        )

    # What is seen

    def see(self, instant: Instant | None = None) -> list[Sight]:
        """Every slot as the camera and the simulator show it, now or at an earlier instant."""
        instant = instant or self.now
        sights: list[Sight] = []
        for slot in instant.slots:
            plan = None if slot.answer is None else slot.answer.plan
            phase = None if plan is None else plan.phase
            if plan is None:  # nobody has looked yet: the frame that the clock says, rather than an empty picture
                phase = reference_phase(instant.elapsed, len(instant.guide.demonstration))
            supplied = None if phase is None else instant.guide.supplied(phase)
            if sights and slot.state is sights[-1].slot.state:  # at the start slots differ in name alone
                sights.append(replace(sights[-1], slot=slot, supplied=supplied))
                continue
            self._restore(slot, instant.azimuth_deg)
            data = self.world.data
            poses = data.xpos.copy(), data.xquat.copy()
            sights.append(Sight(slot, self.world.observe(), *poses, self.world.progress, supplied))
        return sights

    @property
    def where(self) -> str:
        """Where the object stands, in words."""
        if len(self.world.pair.tasks) < 2:
            return f"placement {self.scene.index}"
        return "u = {:.2f}, {:.2f}".format(*self.u)

    @property
    def u(self) -> tuple[float, float]:
        """Where the object's base is now, normalised."""
        pair, place = self.world.pair, self.now.slots[0].place
        (x0, x1), (y0, y1) = pair.x, pair.y
        return float((place[0] - x0) / (x1 - x0)), float((place[1] - y0) / (y1 - y0))


def _planned(before: Slot, after: Slot) -> Slot:
    """As it was before the step, with the plan that the step was taken from."""
    if after.answer is before.answer or after.broken:
        return before
    return replace(before, answer=after.answer, since=0, looks=after.looks)


def usual_share(world: World) -> float:
    """The share of the neutral range at which the joint usually starts: the inverse of `Pair.start_at`."""
    pair = world.pair
    at_zero, at_one = pair.start_at(0.0), pair.start_at(1.0)
    return (pair.start - at_zero) / (at_one - at_zero)
