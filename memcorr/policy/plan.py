"""What a policy is asked and what it answers, and the follower that a user holds in hand.

Whatever plans (a diffusion policy, the servo) takes the same `Request` and gives the same `Plan`.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ..correspondence.matcher import Matcher, load_matcher
from ..correspondence.matches import Matches
from ..demos.remarks import remarks
from ..demos.store import Demonstration
from ..errors import UserError
from ..following.course import Progress
from ..following.doubts import PATIENCE, another_object, at_first_look, doubt
from ..following.reference import Reference
from ..following.step import Following, MatcherSource, Observation, Query, Relation
from ..frames import Frame, check_frame
from ..spec import SPEC, Array
from .checkpoint import Design

log = logging.getLogger(__name__)
ACTION_LIMIT = 1.0  # of what a robot is asked for, whatever a policy's file says; only the caller raises it
LARGEST_CHANGE = 0.75  # between an action and the one before it in another plan, of the largest action


def initial_noise(*key: int, width: int = SPEC.action_dim) -> NDArray[np.float32]:
    """The Gaussian chunk (16, 4) that a sample starts from: a pure function of non-negative integers."""
    return np.random.default_rng(key).standard_normal((SPEC.chunk, width), np.float32)


@dataclass(frozen=True)
class Request:
    """One chunk to be planned: how the scene relates to the reference, and the noise that the sample starts from."""

    relation: Relation
    noise: NDArray[np.float32]  # (16, 4)
    task: int | None = None  # 0 or 1, for visual policies, which have no reference
    empty: bool = False  # drop the condition
    prefix: Array | None = None  # (d, 4) in the robot's units: made while this is planned, so its first d actions


@dataclass(frozen=True)
class Plan:
    """Sixteen actions, and how well the reference behind them was seen."""

    actions: Array  # (16, 4) in the robot's units, each component in [-1, 1]; the first eight are for now
    phase: int | None = None  # frame of the recording that it follows; None without a reference
    matches: Matches | None = None  # the sixteen point pairs it was shown; None where nothing was matched
    progress: Progress | None = None  # to be handed to the next query, where the phase is by what is seen
    doubt: str = ""  # what looks wrong with this frame alone
    at_first: str = ""  # the same, of what is compared at the first frame of an episode alone
    stuck: str = ""  # why nothing more is to be expected of this episode
    reason: str = ""  # why it should not be executed: stuck, a doubt at the first frame of an episode, or two in a row

    @property
    def valid_points(self) -> int:
        return 0 if self.matches is None else int(self.matches.valid.sum())

    @property
    def confidence(self) -> float:
        """Mean over the valid points, 0 to 1; 0 without any."""
        return float(self.matches.confidence[self.matches.valid].mean()) if self.matches and self.valid_points else 0.0

    @property
    def lost(self) -> bool:
        """The hand is off the reference's track, and on its way back to before the contact."""
        return self.progress is not None and self.progress.returning

    @property
    def unmatched(self) -> bool:
        """Fewer than four valid points: planned from the robot's state alone, without the reference."""
        return self.matches is not None and self.valid_points < SPEC.min_valid

    @property
    def fallback(self) -> bool:
        """A careful robot stands still: `reason` says why."""
        return self.unmatched or bool(self.reason)


class Follows(ABC):
    """Anything that follows references: the learned policies and the servo."""

    design: Design
    seed: int  # of its training
    digest: str  # of its weights
    device: str = "cpu"  # the kind that it computes on

    @abstractmethod
    def plan(self, requests: Sequence[Request], slots: int = 1) -> list[Plan]:
        """One plan per request, computed in batches of `slots`: the same bits whoever else is in the batch."""

    def follow(
        self,
        reference: Demonstration,
        matcher: str | Matcher = "embedded",
        slots: int = 1,
        action_limit: float = ACTION_LIMIT,
    ) -> Follower:
        """This policy bound to a reference; `Follower.swap` exchanges it at run time.

        `matcher` is a name, a file of the embedded one's weights, or any object that is a `Matcher`.
        `slots` is the batch that a plan is computed in: evaluation uses 8, whose bits differ in the last place.
        A policy whose file allows larger actions than `action_limit` is refused.
        """
        return Follower(self, reference, matcher, slots, action_limit)


class Planner:
    """A policy with its way of following: queries in, plans out, for any number at once."""

    def __init__(
        self, policy: Follows, matcher: Matcher | None, slots: int = 1, action_limit: float = ACTION_LIMIT
    ) -> None:
        d = policy.design
        if d.action_limit > action_limit:
            raise UserError(
                f"{d.name} plans actions of up to {d.action_limit:g}, beyond {action_limit:g}: if the robot may be "
                f"asked for that, say so (action_limit={d.action_limit:g}, or serve --action-limit {d.action_limit:g})"
            )
        source = MatcherSource(matcher, d.lifting, slots) if matcher is not None and d.needs_matches else None
        self.policy, self.slots = policy, slots
        self.following = Following(source, d.phase, costs=d.phase_costs)

    def plan(self, queries: Sequence[Query], noises: Sequence[NDArray[np.float32]]) -> list[Plan]:
        """What continues each reference from what is seen, one to one."""
        relations = self.following.step(queries)
        plans = self.policy.plan([Request(r, z) for r, z in zip(relations, noises, strict=True)], self.slots)
        return [doubted(*each) for each in zip(plans, queries, relations, strict=True)]


def doubted(plan: Plan, query: Query, relation: Relation) -> Plan:
    """The plan with what speaks against it. Some signs are looked for at the first frame of an episode alone."""
    plan, frame = replace(plan, stuck=relation.stuck), relation.frame
    if (recorded := relation.witness) is None:
        return plan
    at_first = at_first_look(frame, recorded) if query.began is None else ""
    return replace(plan, doubt=doubt(frame, recorded, relation), at_first=at_first)


@dataclass(frozen=True)
class Guard:
    """What is remembered from one plan to the next so that a robot is not asked for nonsense."""

    doubts: int = 0  # frames in a row that looked wrong
    actions: Array | None = None  # (16, A) of the last plan
    elapsed: int = 0  # control steps when it was made
    midway: bool = False  # no plan of this reference yet, but the episode is under way

    def passed(self, plan: Plan, elapsed: int, design: Design) -> tuple[Plan, Guard]:
        """The plan with its `reason`, and without a jump from the action that was executed last."""
        first = self.actions is None  # look at this reference
        if first and plan.valid_points and not plan.doubt:
            plan = replace(plan, doubt=another_object(plan.confidence) or ("" if self.midway else plan.at_first))
        doubts = self.doubts + 1 if plan.doubt else 0
        now = first or doubts >= PATIENCE or plan.unmatched
        actions = plan.actions
        if self.actions is not None and elapsed > self.elapsed and design.action_cm:
            last = self.actions[min(elapsed - self.elapsed, SPEC.chunk) - 1]
            actions = without_jump(actions, last, LARGEST_CHANGE * design.action_limit)
        plan = replace(plan, actions=actions, reason=(plan.doubt if now else "") or plan.stuck)
        return plan, Guard(doubts, actions, elapsed)


def without_jump(actions: Array, last: Array, change: float) -> Array:
    """`actions` (16, A) whose displacements approach their plan by at most `change` per step from `last` (A) on."""
    if np.abs(actions[0, :3] - last[:3]).max() <= change:
        return actions
    limited = actions.copy()
    for k in range(len(limited)):
        limited[k, :3] = last[:3] + np.clip(actions[k, :3] - last[:3], -change, change)
        last = limited[k]
    return limited


def continued(chunk: Array, prefix: Array | None) -> Array:
    """The chunk (16, A) with the actions that are made in any case in their places, to the bit."""
    if prefix is None:
        return chunk
    d = min(len(prefix), len(chunk))
    return np.concatenate([prefix[:d], chunk[d:]])


class Follower:
    """A policy that follows one reference; images are matched at every plan.

    `remarks` say what about the recording will make it hard to follow.
    """

    remarks: list[str]

    def __init__(
        self,
        policy: Follows,
        reference: Demonstration,
        matcher: str | Matcher = "embedded",
        slots: int = 1,
        action_limit: float = ACTION_LIMIT,
    ) -> None:
        if policy.design.visual:
            raise UserError(f"{policy.design.name} follows no reference: it is given the task")
        loaded = load_matcher(matcher) if isinstance(matcher, str) else matcher
        used = loaded if policy.design.needs_matches else None
        self.planner = Planner(policy, used, slots, action_limit)
        self.reference = self._taken_up(Reference(reference, used))
        self.progress: Progress | None = None  # of the episode under way
        self.began: Observation | None = None  # its first frame
        self.swapped = False  # since the last plan
        self.guard = Guard()

    def _taken_up(self, reference: Reference) -> Reference:
        self.remarks = remarks(reference.demonstration, self.planner.following.costs.pace)
        for remark in self.remarks:
            log.warning(f"{reference.demonstration.path}: {remark}")
        return reference

    def swap(self, reference: Demonstration) -> None:
        """Follows another reference from the next plan on, in the middle of the episode; its steps may be counted
        from here on or from the start of the episode."""
        self.reference = self._taken_up(Reference(reference, self.reference.matcher))
        self.progress, self.swapped, self.guard = None, True, Guard(midway=self.began is not None)

    def plan(self, frame: Frame, elapsed: int, seed: int = 0, noise: NDArray[np.float32] | None = None) -> Plan:
        """What continues the reference from `frame`, `elapsed` control steps after the start.

        A frame that cannot be right (wrong shape or type, NaN in the robot's state, depth in millimetres)
        is a ValueError that says so. What looks wrong (too little of the object in sight, a camera that does not
        fit the hand, another object) makes `fallback` true and gives a `reason`: a careful robot then stands still.
        `seed` draws the noise of the sample, unless `noise` (16, 4) is given. `elapsed` 0 begins an episode.
        """
        design = self.planner.policy.design
        check_frame(frame, state_dim=design.state_dim)
        if not elapsed and not self.swapped:
            self.progress, self.began = None, None
        if noise is None:
            noise = initial_noise(seed, elapsed, width=design.action_dim)
        query = Query(Observation(frame), self.reference, elapsed, self.progress, self.began)
        guard = self.guard if elapsed or self.swapped else Guard()
        (plan,) = self.planner.plan([query], [noise])
        plan, self.guard = guard.passed(plan, elapsed, design)
        if not np.isfinite(plan.actions).all():  # the last gate before a robot
            raise ValueError("the plan holds NaN or infinity: the frame, robot_state or gripper cannot be right")
        self.progress, self.began, self.swapped = plan.progress, self.began or query.observation, False
        return plan
