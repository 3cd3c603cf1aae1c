"""What can stand behind a rollout: a trained policy under some intervention, the expert, or nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..correspondence.lift import match_frames
from ..correspondence.matcher import load_matcher
from ..correspondence.matches import Matches, ground_truth_matches, join_matches, located, residuals
from ..correspondence.recorded.masks import Tracked
from ..demos.course import Course, Progress, expected_phase
from ..demos.store import Demonstration, Store, demonstration_path
from ..errors import UserError
from ..frames import Frame
from ..policy.policy import Plan, Policy, Reference, Request, beside, hurried, initial_noise, load_policy
from ..policy.relations import permute_pairs
from ..spec import SPEC, TEST_SETS, WORLD_TASKS, Array, Task
from ..worlds.pairs import find_pair
from ..worlds.world import ACTION_SCALE
from .intervention import GROUND_TRUTH, NO_MATCHER, Intervention
from .rollout import LANES, Answer, Controller, Decision, Job, Stopwatch

NOISE = {name: number for number, name in enumerate((*TEST_SETS[:5], "demonstrations", *TEST_SETS[5:]))}
REFERENCE_PAIR = 0  # evaluation always follows the trajectories of training pair 0


class PolicyController:
    """A trained policy, shown what the intervention says."""

    looks = True

    def __init__(
        self, policy: Policy | None, demonstrations: dict[Task, Demonstration], shown: Intervention, lanes: int = LANES
    ) -> None:
        self.policy, self.shown, self.watch, self.lanes = policy, shown, Stopwatch(), lanes
        matcher = None if shown.matcher in (GROUND_TRUTH, NO_MATCHER) else load_matcher(shown.matcher)
        self.matcher = matcher
        self.references = {task: Reference(d, matcher) for task, d in demonstrations.items()}
        self.progress: dict[tuple[Job, Reference], Progress] = {}  # of the rollouts under way, where it is seen
        self.tracked: dict[Job, Tracked] = {}  # of the rollouts under way, where masks are carried
        with self.watch("references"):  # every phase that a rollout can reach
            for reference in self.references.values():
                looks = range(0, SPEC.episode_steps, SPEC.executed)
                reference.prepare([shown.phase(e, len(reference)) for e in looks])

    def decide(self, decisions: Sequence[Decision]) -> list[Answer]:
        if self.shown.masks == "carried":
            with self.watch("masks"):
                decisions = [self._masked(decision) for decision in decisions]
        tasks = [self.shown.supplied(d.job.task, d.job.scene.world, d.elapsed) for d in decisions]
        followed: list[tuple[Reference, int]] = []
        if self.references:
            references = [self.references[task] for task in tasks]
            phases = [self._expected(d, r) for d, r in zip(decisions, references, strict=True)]
            followed = list(zip(references, phases, strict=True))
        with self.watch("match"):
            matches = self._match(followed, decisions)
        errors = [None] * len(decisions) if matches is None else match_errors(matches, followed, decisions)
        if matches is not None and self.shown.phase_from == "seen":
            followed, matches = self._seen(followed, matches, decisions)
        if matches is not None and self.shown.pairing == "permuted":
            matches = permute_pairs(matches)
        with self.watch("sample"):
            requests = []
            for i, decision in enumerate(decisions):
                reference, j = (followed[i][0].demonstration, followed[i][1]) if followed else (None, None)
                seed, empty = self.policy.seed if self.policy else 0, self.shown.reference == "empty"
                noise = rollout_noise(seed, decision)
                point_pairs = None if matches is None else matches[i]
                number = WORLD_TASKS[decision.job.scene.world].index(tasks[i])
                now = self.progress.get((decision.job, followed[i][0])) if followed else None
                returning = now is not None and now.returning
                requests.append(Request(seen(decision), noise, reference, j, point_pairs, number, empty, returning))
            plans = self._plan(requests)
        return [Answer(plan, error) for plan, error in zip(plans, errors, strict=True)]

    def _masked(self, decision: Decision) -> Decision:
        """With the mask of the first look, which somebody drew, carried to this one."""
        frame, job = seen(decision), decision.job
        if decision.replan == 0:
            assert self.matcher is not None
            self.tracked[job] = Tracked(self.matcher, frame, frame.mask)
            return decision
        return replace(decision, frame=replace(frame, mask=self.tracked[job].look(frame)))

    def _plan(self, requests: Sequence[Request]) -> list[Plan]:
        assert self.policy is not None
        return self.policy.plan(requests, self.lanes)

    def _expected(self, decision: Decision, reference: Reference) -> int:
        """The frame to look at: by the clock, or as many steps on as were made since the last look."""
        if self.shown.phase_from == "elapsed":
            return self.shown.phase(decision.elapsed, len(reference))
        key = decision.job, reference
        if decision.replan == 0:
            for other in self.references.values():
                self.progress.pop((decision.job, other), None)
        if key not in self.progress and decision.began is not None:
            self.progress[key] = self._taken_up(decision.began, reference, decision.elapsed)
        return expected_phase(self.progress.get(key), decision.elapsed, len(reference))

    def _taken_up(self, began: Decision, reference: Reference, elapsed: int) -> Progress:
        """At the start of a reference that takes over now, knowing how the object stood when the episode began."""
        with self.watch("match"):
            matches = self._match([(reference, 0)], [began])
        assert matches is not None
        return located(matches[0], self._course(reference, began), 0, seen(began).gripper, None, 0)[0].taken_up(elapsed)

    def _seen(
        self, followed: list[tuple[Reference, int]], matches: Matches, decisions: Sequence[Decision]
    ) -> tuple[list[tuple[Reference, int]], Matches]:
        """The frames that the live scenes look like, and the matches as if these had been looked at."""
        chosen, moved = [], []
        for i, ((reference, j), decision) in enumerate(zip(followed, decisions, strict=True)):
            course, before = self._course(reference, decision), self.progress.get((decision.job, reference))
            progress, found = located(matches[i], course, j, seen(decision).gripper, before, decision.elapsed)
            self.progress[decision.job, reference] = progress
            chosen.append((reference, progress.phase))
            moved.append(_one(found))
        return chosen, join_matches(*moved)

    def _course(self, reference: Reference, decision: Decision) -> Course:
        if self.shown.matcher != GROUND_TRUTH:
            return reference.course
        demonstration, points = reference.demonstration, find_pair(decision.job.scene.world).points
        assert demonstration.object_pose is not None
        return Course.of_poses(points, demonstration.object_pose, demonstration.gripper)

    def _match(self, followed: list[tuple[Reference, int]], decisions: Sequence[Decision]) -> Matches | None:
        """Measured or true point pairs; None where nothing is matched."""
        if self.shown.matcher == GROUND_TRUTH:
            points = find_pair(decisions[0].job.scene.world).points
            return ground_truth_matches(points, *true_poses(followed, decisions))
        if self.matcher is None:
            return None
        references = [reference.at(j) for reference, j in followed]
        frames = [seen(decision) for decision in decisions]
        return match_frames(self.matcher, references, frames, self.shown.lifting, self.lanes)


def seen(decision: Decision) -> Frame:
    assert decision.frame is not None, "a policy looks"
    return decision.frame


def true_poses(followed: list[tuple[Reference, int]], decisions: Sequence[Decision]) -> tuple[Array, Array]:
    """The object's pose (B, 4, 4) in the supplied reference frames and in the live scenes; simulator truth."""
    poses = []
    for reference, j in followed:
        pose = reference.demonstration.object_pose
        if pose is None:
            raise UserError(f"{reference.demonstration.path} has no object_pose, which evaluation needs")
        poses.append(pose[j])
    return np.stack(poses), np.stack([decision.T_world_object for decision in decisions])


def match_errors(
    matches: Matches, followed: list[tuple[Reference, int]], decisions: Sequence[Decision]
) -> list[float | None]:
    """Mean 3D error of each decision's valid points, millimetres, from simulator truth; of recordings nobody knows."""
    if any(reference.demonstration.object_pose is None for reference, _ in followed):
        return [None] * len(decisions)
    error = 1e3 * np.linalg.norm(residuals(matches, *true_poses(followed, decisions)), axis=-1)
    return [float(e[v].mean()) if v.any() else None for e, v in zip(error, matches.valid, strict=True)]


def rollout_noise(train_seed: int, decision: Decision) -> NDArray[np.float32]:
    """From training seed, scene, task and replan index, and nothing else."""
    scene = decision.job.scene
    task = WORLD_TASKS[scene.world].index(decision.job.task)
    return initial_noise(train_seed, NOISE[scene.condition], scene.seed, scene.index, task, decision.replan)


class ExpertController:
    """The oracle: the scripted expert behind the same rollouts, so that a lost success is the harness's fault."""

    looks = False

    def decide(self, decisions: Sequence[Decision]) -> list[Answer]:
        return [Answer(None) for _ in decisions]


class ZerosController:
    """Never moves, so that any success would be invented by the harness."""

    looks = False

    def decide(self, decisions: Sequence[Decision]) -> list[Answer]:
        return [Answer(Plan(np.zeros((SPEC.chunk, SPEC.action_dim)))) for _ in decisions]


class ReplayController:
    """The baseline that needs no learning: the reference's hand path, moved by how far the object stands from
    where it stood, tracked. It looks once, at the start; what happens later it never learns of."""

    def __init__(self, demonstrations: dict[Task, Demonstration], shown: Intervention) -> None:
        matcher = None if shown.matcher == GROUND_TRUTH else load_matcher(shown.matcher)
        self.shown, self.matcher, self.looks = shown, matcher, matcher is not None
        self.references = {task: Reference(d, matcher) for task, d in demonstrations.items()}
        self.shifts: dict[Job, tuple[Array, Matches | None]] = {}  # of the rollouts under way

    def decide(self, decisions: Sequence[Decision]) -> list[Answer]:
        return [self._answer(decision) for decision in decisions]

    def _answer(self, decision: Decision) -> Answer:
        reference = self.references[self.shown.supplied(decision.job.task, decision.job.scene.world)]
        if decision.replan == 0:
            self.shifts[decision.job] = self._look(reference, decision)
        shift, matches = self.shifts[decision.job]
        tape, t = reference.demonstration, min(decision.elapsed, len(reference) - 1)
        steps = np.minimum(t + np.arange(SPEC.chunk), len(tape) - 1)
        actions = tape.action[steps].copy()
        missing = tape.robot_state[t, :3] + shift - decision.robot_state[:3]  # metres, spread over the steps to come
        actions[:, :3] += missing / SPEC.executed / ACTION_SCALE
        actions[:, :3] /= np.maximum(np.linalg.norm(actions[:, :3], axis=1, keepdims=True), 1.0)
        if matches is None or decision.replan:  # its one look was at the start
            return Answer(Plan(actions, t))
        return Answer(Plan(actions, t, matches), match_errors(_one(matches), [(reference, 0)], [decision])[0])

    def _look(self, reference: Reference, decision: Decision) -> tuple[Array, Matches | None]:
        """How far the object is displaced at the first frame: truly, or as the matcher sees it (the median of its
        valid points; nothing if there are too few)."""
        if self.matcher is None:
            T_ref, T_live = true_poses([(reference, 0)], [decision])
            return T_live[0, :3, 3] - T_ref[0, :3, 3], None
        matches = match_frames(self.matcher, [reference.at(0)], [seen(decision)], self.shown.lifting)[0]
        if matches.valid.sum() < SPEC.min_valid:
            return np.zeros(3), matches
        return np.median((matches.p_live - matches.p_ref)[matches.valid], axis=0), matches


class ServoController(PolicyController):
    """The baseline that reacts but has not learned: from where the scene is seen to be, what the reference's hand was
    told, and straight back to its path. What memcorr-many's actions are relative to, and nothing else."""

    def __init__(self, demonstrations: dict[Task, Demonstration], shown: Intervention) -> None:
        super().__init__(None, demonstrations, shown)

    def _plan(self, requests: Sequence[Request]) -> list[Plan]:
        chunks = [np.clip(beside(request), -1.0, 1.0) for request in requests]
        chunks = [hurried(chunk) if r.returning else chunk for chunk, r in zip(chunks, requests, strict=True)]
        return [Plan(chunk, r.phase, r.matches) for chunk, r in zip(chunks, requests, strict=True)]


def _one(matches: Matches) -> Matches:
    """A batch of one."""
    return Matches(matches.p_ref[None], matches.p_live[None], matches.confidence[None], matches.valid[None])


REPLAYS, SERVO = ("replay", "replay-truth"), "servo"
SCRIPTED = ("expert", "zeros", *REPLAYS, SERVO)


def make_controller(policy: str | Path, data: Path, shown: Intervention, checkpoint: str = "") -> Controller:
    """Called in the process that rolls out. `policy` is a scripted one's name or a checkpoint's folder, whose
    weights must still be those of the digest `checkpoint` if one is given."""
    name = str(policy)
    if name in REPLAYS:
        return ReplayController(_references(data), shown)
    if name == SERVO:
        return ServoController(_references(data), shown)
    if name in SCRIPTED:
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
