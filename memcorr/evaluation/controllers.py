"""What can stand behind a rollout: a trained policy under some intervention, the expert, or nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..correspondence.matcher import load_matcher
from ..correspondence.matches import Matches, ground_truth_matches, residuals
from ..demos.store import Demonstration, Store
from ..errors import UserError
from ..frames import Frame
from ..policy.policy import Plan, Planner, Policy, Reference, Request, initial_noise, load_policy
from ..policy.relations import permute_pairs
from ..spec import SPEC, TASKS, TEST_SETS, Array, Task
from ..worlds.scenes import HANDLE_POINTS
from .intervention import GROUND_TRUTH, NO_MATCHER, Intervention
from .rollout import LANES, Answer, Controller, Decision, Stopwatch

REFERENCE_PAIR = 0  # evaluation always follows the trajectories of training pair 0


class PolicyController:
    """A trained policy, shown what the intervention says."""

    looks = True

    def __init__(
        self, policy: Policy, demonstrations: dict[Task, Demonstration], shown: Intervention, lanes: int = LANES
    ) -> None:
        self.policy, self.shown, self.watch = policy, shown, Stopwatch()
        matcher = None if shown.matcher in (GROUND_TRUTH, NO_MATCHER) else load_matcher(shown.matcher)
        self.planner = Planner(policy, matcher, lanes, shown.depth_sampling)
        self.references = {task: Reference(d, matcher) for task, d in demonstrations.items()}
        with self.watch("references"):  # every phase that a rollout can reach
            for reference in self.references.values():
                looks = range(0, SPEC.episode_steps, SPEC.executed)
                reference.prepare([shown.phase(e, len(reference)) for e in looks])

    def decide(self, decisions: Sequence[Decision]) -> list[Answer]:
        tasks = [self.shown.supplied(decision.job.task) for decision in decisions]
        followed: list[tuple[Reference, int]] = []
        if self.references:
            references = [self.references[task] for task in tasks]
            phases = [self.shown.phase(d.elapsed, len(r)) for d, r in zip(decisions, references, strict=True)]
            followed = list(zip(references, phases, strict=True))
        with self.watch("match"):
            matches = self._match(followed, decisions)
        errors = [None] * len(decisions) if matches is None else match_errors(matches, followed, decisions)
        if matches is not None and self.shown.pairing == "permuted":
            matches = permute_pairs(matches)
        with self.watch("sample"):
            requests = []
            for i, decision in enumerate(decisions):
                gripper, j = (followed[i][0].demonstration.gripper, followed[i][1]) if followed else (None, None)
                noise, empty = rollout_noise(self.policy.seed, decision), self.shown.reference == "empty"
                point_pairs = None if matches is None else matches[i]
                requests.append(Request(seen(decision), noise, gripper, j, point_pairs, tasks[i], empty))
            plans = self.planner.plan(requests)
        return [Answer(plan, error) for plan, error in zip(plans, errors, strict=True)]

    def _match(self, followed: list[tuple[Reference, int]], decisions: Sequence[Decision]) -> Matches | None:
        """Measured or true point pairs; None where nothing is matched."""
        if self.shown.matcher == GROUND_TRUTH:
            return ground_truth_matches(HANDLE_POINTS, *true_poses(followed, decisions))
        return self.planner.match(followed, [seen(decision) for decision in decisions])


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
    return np.stack(poses), np.stack([decision.T_world_door for decision in decisions])


def match_errors(
    matches: Matches, followed: list[tuple[Reference, int]], decisions: Sequence[Decision]
) -> list[float | None]:
    """Mean 3D error of each decision's valid points, millimetres, from simulator truth."""
    error = 1e3 * np.linalg.norm(residuals(matches, *true_poses(followed, decisions)), axis=-1)
    return [float(e[v].mean()) if v.any() else None for e, v in zip(error, matches.valid, strict=True)]


def rollout_noise(train_seed: int, decision: Decision) -> NDArray[np.float32]:
    """From training seed, scene, task and replan index, and nothing else."""
    scene = decision.job.scene
    condition = (*TEST_SETS, "demonstrations").index(scene.condition)
    return initial_noise(
        train_seed, condition, scene.seed, scene.index, TASKS.index(decision.job.task), decision.replan
    )


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


SCRIPTED: dict[str, type[ExpertController] | type[ZerosController]] = {
    "expert": ExpertController,
    "zeros": ZerosController,
}


def make_controller(policy: str | Path, data: Path, shown: Intervention, checkpoint: str = "") -> Controller:
    """Called in the process that rolls out. `policy` is a scripted one's name or a checkpoint's folder, whose
    weights must still be those of the digest `checkpoint` if one is given."""
    if str(policy) in SCRIPTED:
        return SCRIPTED[str(policy)]()
    loaded = load_policy(policy, "cpu")  # bits, and so rows, would depend on the device
    if checkpoint and loaded.digest != checkpoint:
        raise UserError(f"{policy} was replaced meanwhile; rows so far are of the old one: choose another --out")
    demonstrations: dict[Task, Demonstration] = {}
    if not loaded.design.visual and shown.reference != "empty":
        store = Store.open(data)
        demonstrations = {task: store.demonstration(REFERENCE_PAIR, task) for task in TASKS}
    return PolicyController(loaded, demonstrations, shown)
