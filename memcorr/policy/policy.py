"""A trained policy: observation and reference in, action chunk out. No simulator anywhere.

    follower = memcorr.load_policy().follow(demonstration)    # the shipped policy and the reference you pick
    plan = follower.plan(frame, elapsed)                      # execute eight of plan.actions, look again

`Planner` does the same for many decisions at once; evaluation runs on it. Task identity reaches a
relation policy only through the reference; a visual policy is given the task instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from ..correspondence.lift import ReferenceFrame, match_frames, prepare_references
from ..correspondence.matcher import Matcher, load_matcher
from ..correspondence.matches import Matches, located
from ..correspondence.recorded.rows import seen_course
from ..demos.course import Course, Progress, expected_phase
from ..demos.phase import reference_phase
from ..demos.store import Demonstration
from ..errors import UserError
from ..frames import Frame, check_frame
from ..runs import choose_device, padded
from ..spec import SPEC, Array, Lifting
from .checkpoint import CONFIG, MODEL, Checkpoint, Design, read_checkpoint
from .condition import Condition, Images, build_condition, own_state, shrink
from .hub import downloaded, is_repository
from .relations import Relations, build_relations, continued, empty_relations
from .sampler import make_sampler

HURRY = 1.7  # times as fast as planned, on the way back to a reference's gate
USUAL_ERROR = 0.2  # of what a network adds to the continued reference, in units of the largest action
SHIPPED = Path(__file__).parent / "shipped"  # config.json and model.safetensors of the shipped policy


def initial_noise(*key: int, width: int = SPEC.action_dim) -> NDArray[np.float32]:
    """The Gaussian chunk (16, 4) that a sample starts from: a pure function of non-negative integers."""
    return np.random.default_rng(key).standard_normal((SPEC.chunk, width), np.float32)


@dataclass(frozen=True)
class Request:
    """One chunk to be planned: what is seen, what is shown, and the noise that the sample starts from."""

    frame: Frame
    noise: NDArray[np.float32]  # (16, 4)
    reference: Demonstration | None = None  # without one the condition is empty
    phase: int | None = None  # j, the reference's current frame
    matches: Matches | None = None  # between that frame and the live one
    task: int | None = None  # 0 or 1, for visual policies, which have no reference
    empty: bool = False  # drop the condition
    returning: bool = False  # the hand was lost and is on its way back, through free space


def beside(request: Request, width: int = SPEC.action_dim, action_cm: float = 1.0) -> Array:
    """What would continue the reference, (16, A): what the actions of some designs are relative to."""
    chunk = np.zeros((SPEC.chunk, width))
    r, reference = request, request.reference
    if reference is not None and r.phase is not None and r.matches is not None and not r.empty:
        followed = r.frame.gripper, reference.gripper, r.phase, commands(reference, action_cm)
        chunk[:, :3] = continued(r.matches, *followed) / action_cm
    return chunk


def trusted(added: Array, limit: float = 1.0) -> Array:
    """What the network adds (..., 16, A), as far as it stands out of the network's usual error: displacements d shrink
    by max(0, 1 - (sigma / |d|)^2), |d| over the eight steps to come (James and Stein's estimate, around no addition).

    Next to nothing has to be added where the reference can simply be continued, and much where it cannot.
    """
    squared = (added[..., : SPEC.executed, :3] ** 2).sum(axis=-1).mean(axis=-1)[..., None, None]
    share = np.maximum(0.0, 1.0 - (USUAL_ERROR * limit) ** 2 / np.maximum(squared, 1e-12))
    return np.concatenate([share * added[..., :3], added[..., 3:]], axis=-1)


def hurried(chunk: Array, limit: float = 1.0) -> Array:
    """Through free space as fast as the robot may: what was lost was time, and experts leave themselves headroom."""
    length = np.linalg.norm(chunk[:, :3], axis=1, keepdims=True)
    factor = np.clip(limit / np.maximum(length, 1e-9), 1.0, HURRY)
    return np.concatenate([chunk[:, :3] * factor, chunk[:, 3:]], axis=1)


def commands(demonstration: Demonstration, action_cm: float = 1.0) -> Array:
    """What the hand was told (T, 3), centimetres per step; where that is unknown or no displacement, how it moved."""
    if not action_cm or demonstration.action.shape[1] < 3:
        return 100 * np.diff(demonstration.gripper, axis=0, append=demonstration.gripper[-1:])
    return demonstration.action[:, :3] * action_cm


@dataclass(frozen=True)
class Plan:
    """Sixteen actions, and how well the reference behind them was seen."""

    actions: Array  # (16, 4) in the robot's units, each component in [-1, 1]; the first eight are for now
    phase: int | None = None  # frame of the reference that it follows; None without a reference
    matches: Matches | None = None  # the sixteen point pairs it was shown; None where nothing was matched
    progress: Progress | None = None  # to be handed to the next look, where the phase is by what is seen

    @property
    def valid_points(self) -> int:
        return 0 if self.matches is None else int(self.matches.valid.sum())

    @property
    def confidence(self) -> float:
        """Mean over the valid points, 0 to 1; 0 without any."""
        return float(self.matches.confidence[self.matches.valid].mean()) if self.matches and self.valid_points else 0.0

    @property
    def fallback(self) -> bool:
        """Fewer than four valid points: planned from the robot's state alone, without the reference."""
        return self.matches is not None and self.valid_points < SPEC.min_valid


class Policy:
    """Plans chunks of 16 actions, one or many at a time."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.design: Design = checkpoint.design
        self.seed, self.digest = checkpoint.seed, checkpoint.digest
        self.network, self.normalisation = checkpoint.network, checkpoint.normalisation
        self.device = next(self.network.parameters()).device
        d = self.design
        self.sampler = make_sampler(self.network, d.guidance, d.schedule, d.ddim_steps, d.predicts)

    def follow(self, reference: Demonstration, matcher: str | Matcher = "embedded", lanes: int = 1) -> Follower:
        """This policy bound to a reference; `Follower.swap` exchanges it at run time.

        `matcher` is a name, a file of the embedded one's weights, or any object that is a `Matcher`.
        `lanes` is the batch that a plan is computed in: evaluation uses 8, whose bits differ in the last place.
        """
        return Follower(self, reference, matcher, lanes)

    def condition(self, requests: Sequence[Request]) -> Condition:
        """What the network is shown, (B, ...)."""
        state = own_state(np.stack([r.frame.robot_state for r in requests]), self.design.state)
        if self.design.visual:
            tasks = [r.task for r in requests if r.task is not None]
            if len(tasks) < len(requests):
                raise ValueError("a visual policy needs the task")
            shrunk = [shrink(r.frame.rgb, r.frame.depth, r.frame.mask) for r in requests]
            images = Images(*(np.stack([getattr(s, k) for s in shrunk]) for k in ("rgb", "depth", "mask")))
            condition = build_condition(self.normalisation, state, images=images, task=np.array(tasks))
        else:
            relations = [self._relations(r) for r in requests]
            stacked = Relations(np.stack([r.tokens for r in relations]), np.stack([r.valid for r in relations]))
            condition = build_condition(self.normalisation, state, relations=stacked)
        return condition.drop(torch.tensor([r.empty for r in requests]))

    def _relations(self, request: Request) -> Relations:
        r, reference = request, request.reference
        if reference is None or r.phase is None:
            return empty_relations()
        followed = reference.gripper, r.phase, self.design.representation, commands(reference, self.design.action_cm)
        return build_relations(r.matches, r.frame.gripper, *followed)

    def plan(self, requests: Sequence[Request], lanes: int = 1) -> list[Plan]:
        """One plan per request, computed in batches of `lanes`: the same bits whoever else is in the batch."""
        plans: list[Plan] = []
        for index in padded(len(requests), lanes):
            batch = [requests[i] for i in index]
            z = torch.from_numpy(np.stack([r.noise for r in batch])).to(self.device)
            sampled = self.sampler.sample(self.condition(batch).to(self.device), z)
            d = self.design
            chunks = self.normalisation.original_action(sampled.cpu().numpy().astype(np.float64))
            if d.actions == "relative":
                followed = np.stack([beside(r, d.action_dim, d.action_cm) for r in batch])
                chunks = followed + trusted(chunks, d.action_limit)
            chunks = np.clip(chunks, -d.action_limit, d.action_limit)
            for chunk, r in zip(chunks, batch, strict=True):
                plans.append(Plan(hurried(chunk, d.action_limit) if r.returning else chunk, r.phase, r.matches))
        return plans[: len(requests)]


class Reference:
    """A demonstration to follow; its frames are prepared for the matcher once, when they are first needed."""

    def __init__(self, demonstration: Demonstration, matcher: Matcher | None) -> None:
        if len(demonstration) < 2:
            raise UserError(f"{demonstration.path}: a reference has at least two frames")
        for name in ("gripper", "action"):  # what a policy may continue
            if not np.isfinite(getattr(demonstration, name)).all():
                raise UserError(f"{demonstration.path}: the reference's {name} holds NaN or infinity")
        self.demonstration, self.matcher = demonstration, matcher
        self._prepared: dict[int, ReferenceFrame] = {}

    def __len__(self) -> int:
        return len(self.demonstration)

    def prepare(self, phases: Sequence[int]) -> None:
        missing = sorted({j for j in phases if j not in self._prepared})
        if self.matcher is None or not missing:
            return
        frames = self.demonstration.frames(missing)
        for j, frame in zip(missing, frames, strict=True):
            check_frame(frame, f"{self.demonstration.path}, frame {j}", self.demonstration.robot_state.shape[1])
        self._prepared |= zip(missing, prepare_references(self.matcher, frames), strict=True)

    def at(self, j: int) -> ReferenceFrame:
        self.prepare([j])
        return self._prepared[j]

    @cached_property
    def course(self) -> Course:
        """How its object moved, as the matcher sees it; made once."""
        assert self.matcher is not None
        return seen_course(self.matcher, self.demonstration, self._all_at)

    def _all_at(self, phases: Sequence[int]) -> list[ReferenceFrame]:
        self.prepare(phases)
        return [self._prepared[j] for j in phases]


@dataclass(frozen=True)
class Look:
    """One decision of somebody who follows a reference."""

    frame: Frame
    reference: Reference
    elapsed: int  # control steps since the reference was begun
    before: Progress | None = None  # of the last plan; None at the first look
    began: Frame | None = None  # the first of the episode, where this reference is taken up in the middle of one
    seed: int = 0  # draws the noise of the sample
    noise: NDArray[np.float32] | None = None  # (16, 4) if it is given instead


class Planner:
    """Match, relate, sample: the one path from frames and references to plans, for any number at once."""

    def __init__(self, policy: Policy, matcher: Matcher | None, lanes: int = 1, lifting: Lifting = "rigid") -> None:
        self.policy, self.matcher, self.lanes, self.lifting = policy, matcher, lanes, lifting

    def match(self, shown: Sequence[tuple[Reference, int]], frames: Sequence[Frame]) -> Matches | None:
        """Point pairs (B, 16, ...) between frame j of each reference and the live frames; None without a matcher."""
        if self.matcher is None:
            return None
        references = [reference.at(j) for reference, j in shown]
        return match_frames(self.matcher, references, frames, self.lifting, self.lanes)

    def plan(self, requests: Sequence[Request]) -> list[Plan]:
        return self.policy.plan(requests, self.lanes)

    def follow(self, looks: Sequence[Look]) -> list[Plan]:
        """What continues each reference from what is seen, one to one."""
        seen = self.policy.design.phase == "seen" and self.matcher is not None
        if seen:
            looks = [self._taken_up(look) for look in looks]
        shown = [(look.reference, self._expected(look, seen)) for look in looks]
        matches = self.match(shown, [look.frame for look in looks])
        requests, progress = [], []
        for i, (look, (reference, j)) in enumerate(zip(looks, shown, strict=True)):
            point_pairs, now = None if matches is None else matches[i], None
            if seen and point_pairs is not None:
                where = reference.course, j, look.frame.gripper, look.before, look.elapsed
                now, point_pairs = located(point_pairs, *where)
                j = now.phase
            width = self.policy.design.action_dim
            noise = initial_noise(look.seed, look.elapsed, width=width) if look.noise is None else look.noise
            returning = now is not None and now.returning
            requests.append(Request(look.frame, noise, reference.demonstration, j, point_pairs, returning=returning))
            progress.append(now)
        return [replace(plan, progress=now) for plan, now in zip(self.plan(requests), progress, strict=True)]

    def _taken_up(self, look: Look) -> Look:
        """A reference that is begun now, but in an episode that is not, knows how the object stood at its beginning."""
        if look.before is not None or look.began is None:
            return look
        matches = self.match([(look.reference, 0)], [look.began])
        assert matches is not None
        first, _ = located(matches[0], look.reference.course, 0, look.began.gripper, None, 0)
        return replace(look, before=first.taken_up(look.elapsed))

    @staticmethod
    def _expected(look: Look, seen: bool) -> int:
        length = len(look.reference)
        return expected_phase(look.before, look.elapsed, length) if seen else reference_phase(look.elapsed, length)


class Follower:
    """A relation policy that follows one reference; images are matched at every plan."""

    def __init__(
        self, policy: Policy, reference: Demonstration, matcher: str | Matcher = "embedded", lanes: int = 1
    ) -> None:
        if policy.design.visual:
            raise UserError(f"{policy.design.name} follows no reference: it is given the task")
        loaded = load_matcher(matcher) if isinstance(matcher, str) else matcher
        used = loaded if policy.design.needs_matches else None
        self.reference, self.planner = Reference(reference, used), Planner(policy, used, lanes, policy.design.lifting)
        self.progress: Progress | None = None  # of the episode under way
        self.began: Frame | None = None  # its first frame
        self.swapped = False  # since the last plan

    def swap(self, reference: Demonstration) -> None:
        """Follows another reference from the next plan on, in the middle of the episode; its steps may be counted
        from here on or from the start of the episode."""
        self.reference, self.progress, self.swapped = Reference(reference, self.reference.matcher), None, True

    def plan(self, frame: Frame, elapsed: int, seed: int = 0, noise: NDArray[np.float32] | None = None) -> Plan:
        """What continues the reference from `frame`, `elapsed` control steps after the start.

        A frame that cannot be right (wrong shape or type, NaN in the robot's state, depth in millimetres)
        is a ValueError that says so. With an empty mask, or too little of the object in sight, the plan
        comes from the robot's state alone and its `fallback` is true: a careful robot then stands still.
        `seed` draws the noise of the sample, unless `noise` (16, 4) is given. `elapsed` 0 begins an episode.
        """
        check_frame(frame, state_dim=self.planner.policy.design.state_dim)
        if not elapsed and not self.swapped:
            self.progress, self.began = None, None
        look = Look(frame, self.reference, elapsed, self.progress, self.began, seed, noise)
        plan = self.planner.follow([look])[0]
        if not np.isfinite(plan.actions).all():  # the last gate before a robot
            raise ValueError("the plan holds NaN or infinity: the frame, robot_state or gripper cannot be right")
        self.progress, self.began, self.swapped = plan.progress, self.began or frame, False
        return plan


def policy_folder(policy: str | Path) -> Path:
    """Where a policy lies: "shipped", the folder of a run, or org/name on the Hub (then it is fetched)."""
    folder = SHIPPED if str(policy) == "shipped" else Path(policy)
    if not (folder / CONFIG).exists() and not (folder / MODEL).exists():
        if folder == SHIPPED:
            raise UserError(f"this memcorr ships no policy ({folder} is missing); train one with `memcorr train`")
        if is_repository(str(policy)):
            return downloaded(str(policy))
        raise UserError(f"{policy} holds no policy: give the folder of a run, or shipped")
    return folder


def load_policy(policy: str | Path = "shipped", device: str = "auto") -> Policy:
    """The shipped one, or from a run folder, its `stage-one` folder, a folder with its two files, or the Hub."""
    return Policy(read_checkpoint(policy_folder(policy), choose_device(device)))
