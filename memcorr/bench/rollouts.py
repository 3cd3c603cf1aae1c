"""Cases of `memcorr bench` for closed-loop rollouts, batched over lanes and processes.

Ours: one process per core (at most two), eight lanes each. Both baselines run one rollout at a time in
one process. `rollouts` compares with the very same parts in batches of one: what batching and the second
process bring, and nothing else. `rollouts-straightforward` compares with the plain way to write it: the
reference is encoded at every replan and a chunk takes 40 full network evaluations; physics and rendering
stay the same. The policy is untrained, so that every rollout takes all 25 decisions.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from ..correspondence.lift import ReferenceFrame, prepare_references
from ..correspondence.matcher import load_matcher
from ..demos.collect import record
from ..demos.store import Demonstration, demonstration_path, read_demonstration
from ..evaluation.controllers import PolicyController
from ..evaluation.intervention import Intervention
from ..evaluation.rollout import LANES, Job, Stopwatch, roll_out
from ..following.reference import Reference
from ..following.step import Look, Observation
from ..policy.checkpoint import Checkpoint, Design
from ..policy.condition import Condition, Normalisation
from ..policy.networks.sampler import TransformerSampler
from ..policy.networks.transformer import ActionTransformer
from ..policy.policy import Policy, load_trained
from ..runs import CORES, keep_freed_memory
from ..spec import SPEC, TASKS, Task
from ..worlds.scenes import demonstration_scenes, evaluation_scenes
from ..worlds.world import shared_world
from .networks import TOLERANCE
from .run import Case, Result, milliseconds
from .straightforward import StraightforwardMatcher, from_ours, straightforward_sample

Contender = Literal["batched", "alone", "straightforward"]
WORKERS = min(2, CORES)


class StraightforwardSampler:
    def __init__(self, sampler: TransformerSampler, design: Design) -> None:
        self.network = from_ours(sampler.network).eval()
        self.how = design.guidance, design.schedule, design.ddim_steps, design.predicts

    @torch.inference_mode()
    def sample(self, condition: Condition, noise: Tensor) -> Tensor:
        return straightforward_sample(self.network, condition, noise, *self.how)


class Forgetful(Reference):
    """Encodes the reference anew at every decision, as a call on two images does."""

    def at(self, j: int) -> ReferenceFrame:
        assert self.matcher is not None
        return prepare_references(self.matcher, [self.demonstration.frame(j)], batch=1)[0]


def untrained_policy(demonstrations: dict[Task, Demonstration]) -> Policy:
    state = np.concatenate([d.robot_state for d in demonstrations.values()])
    still = np.zeros(SPEC.action_dim), np.full(SPEC.action_dim, 0.05)  # hardly moves: never succeeds
    normalisation = Normalisation(
        state.mean(axis=0), np.maximum(state.std(axis=0), 1e-3), *still, np.zeros(()), np.ones(())
    )
    torch.manual_seed(0)
    return Policy(Checkpoint(Design(), 0, ActionTransformer().eval().requires_grad_(False), normalisation))


def make(contender: Contender, root: Path, matcher: str) -> PolicyController:
    demonstrations = {task: read_demonstration(demonstration_path(root, 0, task)) for task in TASKS}
    shown, policy = Intervention(matcher=matcher), untrained_policy(demonstrations)
    controller = PolicyController(policy, demonstrations, shown, LANES if contender == "batched" else 1)
    if contender == "straightforward":
        assert isinstance(policy.sampler, TransformerSampler)
        policy.sampler = StraightforwardSampler(policy.sampler, policy.design)
        used = controller.matcher
        controller.references = {task: Forgetful(d, used) for task, d in demonstrations.items()}
    return controller


def jobs(count: int) -> Iterator[Job]:
    return iter([Job(scene, task) for scene in evaluation_scenes("combined") for task in TASKS][:count])


def _serve(requests: Connection, contender: Contender, root: Path, matcher: str) -> None:
    """Runs as many rollouts as asked for; answers where the time went."""
    keep_freed_memory()
    torch.set_num_threads(1)
    controller = make(contender, root, matcher)
    with contextlib.suppress(EOFError):  # whoever asked is gone
        while count := requests.recv():
            watch = controller.watch = Stopwatch()
            lanes = LANES if contender == "batched" else 1
            outcomes = list(roll_out(shared_world(), controller, jobs(count), lanes, watch))
            assert len(outcomes) == count and not any(outcome.success for _, outcome in outcomes)
            requests.send(dict(watch.seconds))


class Team:
    """Processes that stand ready, so that starting them is never measured."""

    def __init__(self, contender: Contender, size: int, count: int, root: Path, matcher: str) -> None:
        context = multiprocessing.get_context("spawn")
        self.count, self.pipes = count, []
        self.spent: dict[str, float] = {}
        for _ in range(size):
            here, there = context.Pipe()
            context.Process(target=_serve, args=(there, contender, root, matcher), daemon=True).start()
            self.pipes.append(here)

    def run(self) -> None:
        for pipe in self.pipes:
            pipe.send(self.count)
        for pipe in self.pipes:
            for name, seconds in pipe.recv().items():
                self.spent[name] = self.spent.get(name, 0.0) + seconds


def rollouts(baseline: Literal["alone", "straightforward"] = "alone", matcher: str = "embedded") -> Case:
    """Milliseconds per rollout of 25 decisions."""
    load_matcher(matcher)  # complains here, not in a worker, when its weights are missing
    root = Path(tempfile.mkdtemp(prefix="memcorr-bench-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    for task in TASKS:
        record(root, demonstration_scenes()[0], task)
    per_turn = {"alone": 4, "straightforward": 1}[baseline]  # rollouts; a turn of ours takes some 10 s
    ours, single = Team("batched", WORKERS, LANES, root, matcher), Team(baseline, 1, per_turn, root, matcher)

    def note(result: Result) -> str:
        total = sum(ours.spent.values())
        shares = ", ".join(f"{name} {100 * s / total:.0f} %" for name, s in sorted(ours.spent.items()))
        rate = 6e4 / result.ours_ms
        return f"{rate:.0f} rollouts of 25 decisions per minute, {WORKERS} processes of {LANES} lanes; {shares}"

    how = {
        "alone": "the same parts, batches of one",
        "straightforward": "reference encoded at every replan, 40 network evaluations",
    }[baseline]
    return Case(
        ours.run,
        single.run,
        f"one rollout at a time: {how}; {matcher} matcher",
        rounds=6,
        ours_items=WORKERS * LANES,
        baseline_items=per_turn,
        note=note,
    )


def replan(policy: str = "shipped") -> Case:
    """One live decision, from images to chunk: one at a time, one thread."""
    torch.set_num_threads(1)
    root = Path(tempfile.mkdtemp(prefix="memcorr-bench-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    record(root, demonstration_scenes()[0], TASKS[0])
    world = shared_world()
    world.reset(evaluation_scenes("combined")[0])
    frame, shown = world.observe(), read_demonstration(demonstration_path(root, 0, TASKS[0]))
    ours = load_trained(policy, "cpu").follow(shown)
    theirs = load_trained(policy, "cpu")
    plain = theirs.follow(shown, StraightforwardMatcher())
    assert isinstance(theirs.sampler, TransformerSampler)
    theirs.sampler = StraightforwardSampler(theirs.sampler, theirs.design)
    plans = [follower.plan(frame, 0) for follower in (ours, plain)]
    apart = float(np.abs(plans[0].actions - plans[1].actions).max())
    assert apart < TOLERANCE and plans[0].phase == plans[1].phase, f"not the same plan: {apart:.2g} apart"

    def note(result: Result) -> str:
        look, following = Look(Observation(frame), ours.reference, 0), ours.planner.following
        matching = statistics.median(milliseconds(lambda: following.step([look])) for _ in range(15))
        return f"of these, matching and lifting {matching:.1f} ms; the two plans are {apart:.1g} apart"

    return Case(
        lambda: ours.plan(frame, 0),
        lambda: plain.plan(frame, 0),
        f"both images through the network at every look, {theirs.design.evaluations} evaluations of the policy's; "
        "one thread",
        note=note,
    )


CASES: dict[str, Callable[..., Case]] = {
    "replan": replan,
    "rollouts": lambda: rollouts("alone"),
    "rollouts-straightforward": lambda: rollouts("straightforward"),
}
