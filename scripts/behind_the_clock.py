"""How far a rollout is behind the clock that picks the reference's frame: why a policy that follows it stalls.

    python scripts/behind_the_clock.py results/memcorr-literal-42 --condition boundary --task close

True relations. Per scene: success; how far the hand is at the start from the reference's, seen from the door; by how
many frames it is ahead of the clock (the reference's frame that is nearest to it, minus the one shown) at some steps;
and how far it is off the reference's course at step 64.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from memcorr.correspondence.rigid import inverse
from memcorr.demos.phase import reference_phase
from memcorr.demos.store import Demonstration, Store
from memcorr.evaluation.controllers import make_controller
from memcorr.evaluation.evaluate import list_jobs
from memcorr.evaluation.intervention import GROUND_TRUTH, Intervention
from memcorr.evaluation.rollout import Controller, Decision, Response, roll_out
from memcorr.following.step import recorded_pose
from memcorr.machine import threads
from memcorr.spec import Array
from memcorr.training.experiments import Config
from memcorr.worlds.world import shared_world

REFERENCES = Path(__file__).parents[1] / "results/references"
STEPS, COURSE = (24, 40, 56, 64, 72), 64


def from_object(pose: Array, gripper: Array) -> Array:
    """Points (..., 3) as seen from the object at poses (..., 4, 4), metres."""
    away = inverse(pose)
    return np.einsum("...ij,...j->...i", away[..., :3, :3], gripper) + away[..., :3, 3]


@dataclass
class Watched:
    """A controller that is looked at: what it decides is left as it is."""

    controller: Controller
    course: Array  # (T, 3) the reference's hand, seen from the object
    sees: bool = True
    seen: dict[int, list[tuple[int, int, float, float]]] = field(default_factory=dict)

    def decide(self, decisions: Sequence[Decision]) -> list[Response]:
        for d in decisions:
            away = 100 * np.linalg.norm(
                self.course - from_object(d.T_world_object, d.observation.frame.gripper), axis=1
            )
            j = reference_phase(d.elapsed, len(self.course))
            behind = int(away[: j + 40].argmin()) - j
            self.seen.setdefault(d.job.scene.index, []).append((d.elapsed, behind, away[j], away.min()))
        return self.controller.decide(decisions)


def watch(policy: str, condition: str, task: str, data: Path) -> None:
    lifting = Config.read(Path(policy)).experiment.lifting
    shown = Intervention(matcher=GROUND_TRUTH, lifting=lifting)
    reference: Demonstration = Store.open(data).demonstration(0, task)
    course = from_object(recorded_pose(reference), reference.gripper)
    with threads(1):
        watched = Watched(make_controller(policy, data, shown), course)
        for job, outcome in roll_out(shared_world(), watched, iter(list_jobs((condition,), 0, (task,)))):  # type: ignore[arg-type]
            seen = watched.seen[job.scene.index]
            at = {elapsed: behind for elapsed, behind, *_ in seen}
            off = {elapsed: away for elapsed, *_, away in seen}
            behind = " ".join(f"{step}: {at[step]:+d}" for step in STEPS if step in at)
            end = f"{off[COURSE]:.1f} cm off its course" if COURSE in off else ""
            words = "success" if outcome.success else "FAILED "
            print(f"scene {job.scene.index:2} {words} start {seen[0][2]:4.1f} cm away; frames ahead at {behind}; {end}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("policy")
    parser.add_argument("--condition", default="boundary")
    parser.add_argument("--task", default="close")
    parser.add_argument("--data", type=Path, default=REFERENCES)
    watch(**vars(parser.parse_args()))
