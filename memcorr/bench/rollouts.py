"""Cases of `memcorr bench` for closed-loop rollouts, batched over environment slots and processes.

Ours: one process per core (at most two), eight environment slots each. The baseline runs one rollout at a time in one
process, with the very same parts in batches of one: what batching and the second process bring, and nothing else.
The policy is untrained, so that every rollout takes all 25 decisions.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import shutil
import statistics
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..demos.collect import record
from ..demos.store import Demonstration, demonstration_path, read_demonstration
from ..evaluation.controllers import PolicyController
from ..evaluation.intervention import Intervention
from ..evaluation.rollout import SLOTS, Job, Stopwatch, roll_out
from ..following.step import Observation, Query
from ..machine import keep_freed_memory
from ..policy.checkpoint import Checkpoint, Design
from ..policy.condition import Condition, Normalisation
from ..policy.networks.diffusion import Prefix
from ..policy.networks.sampler import TransformerSampler
from ..policy.networks.transformer import ActionTransformer
from ..policy.policy import Policy, load_policy, load_trained
from ..policy.servo import SERVO
from ..spec import SPEC, TASKS, Task
from ..workers import CORES
from ..worlds.scenes import demonstration_scenes, evaluation_scenes
from ..worlds.world import shared_world
from .networks import TOLERANCE
from .run import Case, Result, milliseconds
from .straightforward import StraightforwardMatcher, from_ours, straightforward_sample

WORKERS = min(2, CORES)


class StraightforwardSampler:
    def __init__(self, sampler: TransformerSampler, design: Design) -> None:
        self.network = from_ours(sampler.network).eval()
        self.how = design.guidance, design.schedule, design.ddim_steps, design.predicts

    @torch.inference_mode()
    def sample(self, condition: Condition, noise: Tensor, prefix: Prefix | None = None) -> Tensor:
        assert prefix is None, "nothing is continued here"
        return straightforward_sample(self.network, condition, noise, *self.how)


def untrained_policy(demonstrations: dict[Task, Demonstration]) -> Policy:
    state = np.concatenate([d.robot_state for d in demonstrations.values()])
    still = np.zeros(SPEC.action_dim), np.full(SPEC.action_dim, 0.05)  # hardly moves: never succeeds
    normalisation = Normalisation(
        state.mean(axis=0), np.maximum(state.std(axis=0), 1e-3), *still, np.zeros(()), np.ones(())
    )
    torch.manual_seed(0)
    return Policy(Checkpoint(Design(), 0, ActionTransformer().eval().requires_grad_(False), normalisation))


def _serve(requests: Connection, slots: int, root: Path) -> None:
    """Runs as many rollouts as asked for; answers where the time went."""
    keep_freed_memory()
    torch.set_num_threads(1)
    demonstrations = {task: read_demonstration(demonstration_path(root, 0, task)) for task in TASKS}
    controller = PolicyController(untrained_policy(demonstrations), demonstrations, Intervention(), slots)
    jobs = [Job(scene, task) for scene in evaluation_scenes("combined") for task in TASKS]
    with contextlib.suppress(EOFError):  # the parent process is gone
        while count := requests.recv():
            watch = controller.watch = Stopwatch()
            outcomes = list(roll_out(shared_world(), controller, iter(jobs[:count]), slots, watch))
            assert len(outcomes) == count and not any(outcome.success for _, outcome in outcomes)
            requests.send(dict(watch.seconds))


class Team:
    """Processes that stand ready, so that starting them is never measured."""

    def __init__(self, slots: int, size: int, count: int, root: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self.count, self.pipes = count, []
        self.spent: dict[str, float] = {}
        for _ in range(size):
            here, there = context.Pipe()
            context.Process(target=_serve, args=(there, slots, root), daemon=True).start()
            self.pipes.append(here)

    def run(self) -> None:
        for pipe in self.pipes:
            pipe.send(self.count)
        for pipe in self.pipes:
            for name, seconds in pipe.recv().items():
                self.spent[name] = self.spent.get(name, 0.0) + seconds


def recorded() -> Path:
    """Pair 0, removed when this process ends."""
    root = Path(tempfile.mkdtemp(prefix="memcorr-bench-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    for task in TASKS:
        record(root, demonstration_scenes()[0], task)
    return root


def rollouts() -> Case:
    """Milliseconds per rollout of 25 decisions."""
    root, per_turn = recorded(), 4  # rollouts of the baseline; a turn of ours takes some 10 s
    ours, single = Team(SLOTS, WORKERS, SLOTS, root), Team(1, 1, per_turn, root)

    def note(result: Result) -> str:
        total = sum(ours.spent.values())
        shares = ", ".join(f"{name} {100 * s / total:.0f} %" for name, s in sorted(ours.spent.items()))
        rate = 6e4 / result.ours_ms
        return f"{rate:.0f} rollouts of 25 decisions per minute, {WORKERS} processes of {SLOTS} slots; {shares}"

    return Case(
        ours.run,
        single.run,
        "one rollout at a time: the same parts, batches of one; embedded matcher",
        rounds=6,
        ours_items=WORKERS * SLOTS,
        baseline_items=per_turn,
        note=note,
    )


def take_up() -> Case:
    """Following a reference of 200 frames by what is seen: until its first plan, against 30 live plans."""
    torch.set_num_threads(1)
    world, servo = shared_world(), load_policy(SERVO)
    shown = read_demonstration(demonstration_path(recorded(), 0, TASKS[0]))
    world.reset(evaluation_scenes("combined")[0])
    frame = world.observe()
    followed = servo.follow(shown)
    followed.plan(frame, 0)
    plans = 30

    def live() -> None:
        for _ in range(plans):
            followed.plan(frame, 0)

    return Case(
        lambda: servo.follow(shown).plan(frame, 0),
        live,
        f"{plans} live plans of the servo, one match each; {len(shown)} frames, one thread",
        rounds=5,
    )


def replan(policy: str = "shipped") -> Case:
    """One live decision, from images to chunk: one at a time, one thread."""
    torch.set_num_threads(1)
    world = shared_world()
    shown = read_demonstration(demonstration_path(recorded(), 0, TASKS[0]))
    world.reset(evaluation_scenes("combined")[0])
    frame = world.observe()
    ours = load_trained(policy, "cpu").follow(shown)
    theirs = load_trained(policy, "cpu")
    plain = theirs.follow(shown, StraightforwardMatcher())
    assert isinstance(theirs.sampler, TransformerSampler)
    theirs.sampler = StraightforwardSampler(theirs.sampler, theirs.design)
    plans = [follower.plan(frame, 0) for follower in (ours, plain)]
    apart = float(np.abs(plans[0].actions - plans[1].actions).max())
    assert apart < TOLERANCE and plans[0].phase == plans[1].phase, f"not the same plan: {apart:.2g} apart"

    def note(result: Result) -> str:
        query, following = Query(Observation(frame), ours.reference, 0), ours.planner.following
        matching = statistics.median(milliseconds(lambda: following.step([query])) for _ in range(15))
        return f"of these, matching and lifting {matching:.1f} ms; the two plans are {apart:.1g} apart"

    return Case(
        lambda: ours.plan(frame, 0),
        lambda: plain.plan(frame, 0),
        f"both images through the network at every look, {theirs.design.evaluations} evaluations of the policy's; "
        "one thread",
        note=note,
    )
