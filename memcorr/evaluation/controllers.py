"""What can decide in a rollout: a policy under some intervention, replay, the expert, or nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..correspondence.matcher import load_matcher
from ..demos.store import Demonstration, Store, demonstration_path
from ..errors import UserError
from ..following.masks import Tracked
from ..following.reference import Reference
from ..following.step import Following, MatcherSource, MatchSource, Query, Relation, TruthSource, recorded_pose
from ..policy.plan import Follows, Plan, Request, initial_noise
from ..policy.policy import load_policy
from ..policy.relations import permute_pairs
from ..policy.replay import REPLAY, tracked
from ..policy.servo import SERVO
from ..spec import SPEC, TEST_SETS, Array, Task, tasks_of
from ..worlds.world import ACTION_SCALE, object_points
from .intervention import GROUND_TRUTH, NO_MATCHER, Intervention
from .rollout import SLOTS, Controller, Decision, Memory, Response, Stopwatch

NOISE = {name: number for number, name in enumerate((*TEST_SETS[:5], "demonstrations", *TEST_SETS[5:]))}
REFERENCE_PAIR = 0  # evaluation always follows the trajectories of training pair 0


class PolicyController:
    """A policy, learned or the servo, shown what the intervention says."""

    sees = True

    def __init__(
        self, policy: Follows, demonstrations: dict[Task, Demonstration], shown: Intervention, slots: int = SLOTS
    ) -> None:
        self.policy, self.shown, self.watch, self.slots = policy, shown, Stopwatch(), slots
        self.matcher = None if shown.matcher in (GROUND_TRUTH, NO_MATCHER) else load_matcher(shown.matcher)
        self.references = {task: Reference(d, self.matcher) for task, d in demonstrations.items()}
        self.following = Following(self._source(), shown.phase_from, shown.phase, policy.design.phase_costs)
        with self.watch("references"):  # every phase that a rollout can reach
            for reference in self.references.values():
                times = range(0, SPEC.episode_steps, SPEC.executed)
                reference.prepare([shown.phase(e, len(reference)) for e in times])

    def _source(self) -> MatchSource | None:
        if self.shown.matcher == GROUND_TRUTH and self.references:
            world = next(iter(self.references.values())).demonstration.world
            return TruthSource(object_points(world))
        return None if self.matcher is None else MatcherSource(self.matcher, self.shown.lifting, self.slots)

    def decide(self, decisions: Sequence[Decision]) -> list[Response]:
        shown = self.shown
        if shown.masks == "carried":
            with self.watch("masks"):
                decisions = [self._masked(decision) for decision in decisions]
        tasks = [shown.supplied(d.job.task, d.job.scene.world, d.elapsed) for d in decisions]
        with self.watch("match"):
            relations = self._relations(decisions, tasks)
        requests = []
        for decision, task, relation in zip(decisions, tasks, relations, strict=True):
            number = tasks_of(decision.job.scene.world).index(task)
            if relation.matches is not None and shown.pairing == "permuted":
                relation = replace(relation, matches=permute_pairs(relation.matches))
            noise = rollout_noise(self.policy.seed, decision)
            requests.append(Request(relation, noise, number, shown.reference == "empty"))
        with self.watch("sample"):
            plans = self.policy.plan(requests, self.slots)
        answers = zip(decisions, tasks, relations, plans, strict=True)
        return [
            Response(
                replace(plan, stuck=relation.stuck),
                relation.error_mm(decision.T_world_object),
                self._remembered(decision, task, relation),
            )
            for decision, task, relation, plan in answers
        ]

    def _relations(self, decisions: Sequence[Decision], tasks: Sequence[Task]) -> list[Relation]:
        if not self.references:
            return [Relation(d.observation.frame) for d in decisions]
        queries = []
        for decision, task in zip(decisions, tasks, strict=True):
            reference, memory = self.references[task], decision.memory
            before = memory.progress.get(reference)
            queries.append(Query(decision.observation, reference, decision.elapsed, before, memory.began))
        return self.following.step(queries)

    def _masked(self, decision: Decision) -> Decision:
        """With the mask of the first frame, which was drawn by hand, carried to this one."""
        frame, memory = decision.observation.frame, decision.memory
        if memory.tracked is None:
            assert self.matcher is not None
            return replace(decision, memory=replace(memory, tracked=Tracked(self.matcher, frame, frame.mask)))
        return replace(decision, frame=replace(frame, mask=memory.tracked.look(frame)))

    def _remembered(self, decision: Decision, task: Task, relation: Relation) -> Memory:
        memory, began = decision.memory, decision.memory.began or decision.observation
        progress = {**memory.progress, self.references[task]: relation.progress} if self.references else {}
        return replace(memory, began=began, progress=progress)


def rollout_noise(train_seed: int, decision: Decision) -> NDArray[np.float32]:
    """From training seed, scene, task and replan index, and nothing else."""
    scene = decision.job.scene
    task = tasks_of(scene.world).index(decision.job.task)
    return initial_noise(train_seed, NOISE[scene.condition], scene.seed, scene.index, task, decision.replan)


class ExpertController:
    """The oracle: the scripted expert behind the same rollouts, so that a lost success is the harness's fault."""

    sees = False

    def decide(self, decisions: Sequence[Decision]) -> list[Response]:
        return [Response(None) for _ in decisions]


class ZerosController:
    """Never moves, so that any success would be invented by the harness."""

    sees = False

    def decide(self, decisions: Sequence[Decision]) -> list[Response]:
        return [Response(Plan(np.zeros((SPEC.chunk, SPEC.action_dim)))) for _ in decisions]


class ReplayController:
    """The baseline that needs no learning: the reference's hand path, moved by how far the object stands from
    where it stood, tracked. It looks when a reference is begun; what happens later it never learns of."""

    def __init__(self, demonstrations: dict[Task, Demonstration], shown: Intervention) -> None:
        matcher = None if shown.matcher == GROUND_TRUTH else load_matcher(shown.matcher)
        self.shown, self.sees = shown, matcher is not None
        self.following = None if matcher is None else Following(MatcherSource(matcher, shown.lifting), clock=_first)
        self.references = {task: Reference(d, matcher) for task, d in demonstrations.items()}

    def decide(self, decisions: Sequence[Decision]) -> list[Response]:
        return [self._answer(decision) for decision in decisions]

    def _answer(self, decision: Decision) -> Response:
        task = self.shown.supplied(decision.job.task, decision.job.scene.world, decision.elapsed)
        reference, memory = self.references[task], decision.memory
        shift, relation = memory.shifts.get(reference), None
        if shift is None:
            shift, relation = self._look(reference, decision)
            memory = replace(memory, shifts={**memory.shifts, reference: shift})
        tape, t = reference.demonstration, min(self.shown.begun(decision.elapsed), len(reference) - 1)
        missing = tape.robot_state[t, :3] + shift - decision.robot_state[:3]
        actions = tracked(tape.action, t, missing / ACTION_SCALE)
        if relation is None:
            return Response(Plan(actions, t), memory=memory)
        return Response(Plan(actions, t, relation.matches), relation.error_mm(decision.T_world_object), memory)

    def _look(self, reference: Reference, decision: Decision) -> tuple[Array, Relation | None]:
        """How far the object is displaced from the first frame: truly, or as the matcher sees it (the median of its
        valid points; nothing if there are too few)."""
        if self.following is None:
            T_ref = recorded_pose(reference.demonstration)[0]
            return decision.T_world_object[:3, 3] - T_ref[:3, 3], None
        (relation,) = self.following.step([Query(decision.observation, reference, 0)])
        matches = relation.matches
        assert matches is not None
        if matches.valid.sum() < SPEC.min_valid:
            return np.zeros(3), relation
        return np.median((matches.p_live - matches.p_ref)[matches.valid], axis=0), relation


def _first(elapsed: int, length: int) -> int:
    """A clock that stands still."""
    return 0


REPLAYS = (REPLAY, "replay-truth")
SCRIPTED = ("expert", "zeros", *REPLAYS, SERVO)


def make_controller(policy: str | Path, data: Path, shown: Intervention, checkpoint: str = "") -> Controller:
    """Called in the process that rolls out. `policy` is a scripted one's name or a checkpoint's folder, whose
    weights must still be those of the digest `checkpoint` if one is given."""
    name = str(policy)
    if name in REPLAYS:
        return ReplayController(_references(data), shown)
    if name in ("expert", "zeros"):
        return ExpertController() if name == "expert" else ZerosController()
    loaded = load_policy(policy, "cpu")  # bits, and so rows, would depend on the device
    if checkpoint and loaded.digest != checkpoint:
        raise UserError(f"{policy} was replaced meanwhile; rows so far are of the old one: choose another --out")
    followed = not loaded.design.visual and shown.reference != "empty"
    return PolicyController(loaded, _references(data) if followed else {}, shown)


def _references(data: Path) -> dict[Task, Demonstration]:
    store = Store.open(data)
    there = [
        t for t in store.tasks if demonstration_path(store.root, REFERENCE_PAIR, t).exists()
    ]  # own data: any tasks
    return {task: store.demonstration(REFERENCE_PAIR, task) for task in there}
