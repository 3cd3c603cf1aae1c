"""What can stand behind a rollout: a trained policy under some intervention, the expert, or nothing.

The interventions of the paper are all here and all act on what the policy is *shown*: which
reference, which matcher, which phase, which pairing. Success is always judged by the original task.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from .cache import BATCH, matched_in_batches
from .conditions import stack_conditions
from .demos import Demonstration, Store
from .errors import UserError
from .matchers import load_matcher
from .matches import MIN_VALID, Matches, ground_truth_matches, residuals
from .matching import Reference, prepare_references
from .policy import Policy, initial_noise, load_policy
from .protocol import PROTOCOL, TASKS, DepthSampling, Task, opposite
from .references import reference_phase
from .relations import permute_pairs
from .rollout import LANES, Controller, Decision, Plan, Stopwatch
from .scenes import CONDITIONS

ReferenceChoice = Literal["correct", "empty", "opposite"]
GROUND_TRUTH, NO_MATCHER = "ground-truth", "none"
REFERENCE_PAIR = 0  # evaluation always follows the trajectories of training pair 0


@dataclass(frozen=True)
class Intervention:
    """What a policy is shown. The defaults are the paper's main setting."""

    reference: ReferenceChoice = "correct"
    matcher: str = "embedded"  # or another matcher, "ground-truth", or "none" where nothing is matched
    phase_offset: int = 0  # delta, frames of the reference
    phase_speed: float = 1.0  # rho
    permuted: bool = False  # live points exchanged among the valid pairs
    depth_sampling: DepthSampling = "object"


def phase(elapsed: int, shown: Intervention) -> int:
    return reference_phase(elapsed, shown.phase_speed, shown.phase_offset)


class Correspondence:
    """Matches between the supplied reference frame and the live one, measured or true."""

    def __init__(self, demonstrations: dict[Task, Demonstration], shown: Intervention) -> None:
        self.demonstrations, self.shown = demonstrations, shown
        self.matcher = None if shown.matcher == GROUND_TRUTH else load_matcher(shown.matcher)
        self.prepared: dict[tuple[Task, int], Reference] = {}
        if self.matcher:  # every phase a rollout can reach, once, in batches of constant shape
            phases = sorted({phase(e, shown) for e in range(0, PROTOCOL.episode_steps, PROTOCOL.executed)})
            for task, demonstration in demonstrations.items():
                for i in range(0, len(phases), BATCH):
                    js = [phases[min(k, len(phases) - 1)] for k in range(i, i + BATCH)]
                    made = prepare_references(self.matcher, demonstration.frames(js))
                    self.prepared |= {(task, j): reference for j, reference in zip(js, made, strict=True)}

    def poses(self, tasks: Sequence[Task], js: Sequence[int]) -> NDArray[np.float64]:
        """The door's pose in the supplied reference frames (B, 4, 4); simulator truth."""
        found = []
        for task, j in zip(tasks, js, strict=True):
            pose = self.demonstrations[task].object_pose
            if pose is None:
                raise UserError(f"{self.demonstrations[task].path} has no object_pose, which evaluation needs")
            found.append(pose[j])
        return np.stack(found)

    def match(self, tasks: Sequence[Task], js: Sequence[int], decisions: Sequence[Decision]) -> Matches:
        if self.matcher is None:
            return ground_truth_matches(self.poses(tasks, js), np.stack([d.T_world_door for d in decisions]))
        references = [self.prepared[task, j] for task, j in zip(tasks, js, strict=True)]
        frames = [d.frame for d in decisions if d.frame is not None]
        return matched_in_batches(self.matcher, references, frames, self.shown.depth_sampling)

    def diagnose(
        self, matches: Matches, tasks: Sequence[Task], js: Sequence[int], decisions: Sequence[Decision]
    ) -> list[float | None]:
        """Mean 3D error of each decision's valid points, millimetres, from simulator truth."""
        residual = residuals(matches, self.poses(tasks, js), np.stack([d.T_world_door for d in decisions]))
        error = 1e3 * np.linalg.norm(residual, axis=-1)
        return [float(e[v].mean()) if v.any() else None for e, v in zip(error, matches.valid, strict=True)]


class PolicyController:
    """A trained policy, shown what the intervention says."""

    looks = True

    def __init__(
        self, policy: Policy, demonstrations: dict[Task, Demonstration], shown: Intervention, lanes: int = LANES
    ) -> None:
        self.policy, self.demonstrations, self.shown, self.lanes = policy, demonstrations, shown, lanes
        self.watch = Stopwatch()
        with self.watch("references"):
            self.correspondence = None if shown.matcher == NO_MATCHER else Correspondence(demonstrations, shown)

    def decide(self, decisions: Sequence[Decision]) -> list[Plan]:
        shown, empty = self.shown, self.shown.reference == "empty"
        tasks: list[Task] = [opposite(d.job.task) if shown.reference == "opposite" else d.job.task for d in decisions]
        js = [phase(d.elapsed, shown) for d in decisions]
        matches, fallback = None, np.zeros(len(decisions), bool)
        errors: list[float | None] = [None] * len(decisions)
        if self.correspondence is not None:
            with self.watch("match"):
                matches = self.correspondence.match(tasks, js, decisions)
            errors = self.correspondence.diagnose(matches, tasks, js, decisions)
            fallback = matches.valid.sum(axis=-1) < MIN_VALID
            if shown.permuted:
                matches = permute_pairs(matches)
        rows = [None if matches is None else matches[i] for i in range(len(decisions))]
        with self.watch("sample"):
            conditions = []
            for decision, task, j, matched in zip(decisions, tasks, js, rows, strict=True):
                assert decision.frame is not None
                condition = self.policy.condition(
                    decision.frame,
                    matches=matched,
                    gripper_ref=None if empty or self.policy.experiment.visual else self.demonstrations[task].gripper,
                    j=j,
                    task=task,
                )
                conditions.append(condition.drop() if empty else condition)
            noise = [rollout_noise(self.policy.config.seed, decision) for decision in decisions]
            missing = self.lanes - len(decisions)
            batch = stack_conditions(conditions + conditions[-1:] * missing)
            chunks = self.policy.plan(batch, np.stack(noise + noise[-1:] * missing))
        return [Plan(chunks[i], errors[i], bool(fallback[i]), rows[i]) for i in range(len(decisions))]


def rollout_noise(train_seed: int, decision: Decision) -> NDArray[np.float32]:
    """From training seed, scene, task and replan index, and nothing else."""
    scene = decision.job.scene
    condition = (*CONDITIONS, "demonstrations").index(scene.condition)
    return initial_noise(
        train_seed, condition, scene.seed, scene.index, TASKS.index(decision.job.task), decision.replan
    )


class ExpertController:
    """The oracle: the scripted expert behind the same rollouts, so that a lost success is the harness's fault."""

    looks = False

    def decide(self, decisions: Sequence[Decision]) -> list[Plan]:
        return [Plan(None) for _ in decisions]


class ZerosController:
    """Never moves, so that any success would be invented by the harness."""

    looks = False

    def decide(self, decisions: Sequence[Decision]) -> list[Plan]:
        return [Plan(np.zeros((PROTOCOL.chunk, PROTOCOL.action_dim))) for _ in decisions]


SCRIPTED: dict[str, type[ExpertController] | type[ZerosController]] = {
    "expert": ExpertController,
    "zeros": ZerosController,
}


def make_controller(policy: str | Path, data: Path, shown: Intervention) -> Controller:
    """Called in the process that rolls out. `policy` is a scripted one's name or a checkpoint's folder."""
    if str(policy) in SCRIPTED:
        return SCRIPTED[str(policy)]()
    loaded = load_policy(policy, "cpu")  # bits, and so rows, would depend on the device
    demonstrations: dict[Task, Demonstration] = {}
    if not loaded.experiment.visual and shown.reference != "empty":
        store = Store.open(data)
        demonstrations = {task: store.demonstration(REFERENCE_PAIR, task) for task in TASKS}
    return PolicyController(loaded, demonstrations, shown)
