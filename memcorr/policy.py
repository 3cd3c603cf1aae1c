"""A trained policy: observation and reference in, action chunk out. No simulator anywhere.

    follower = memcorr.load_policy().follow(demonstration)    # the shipped policy and the reference you pick
    chunk = follower.plan(frame, elapsed)                     # (16, 4); execute eight, look again

`Policy.condition` and `Policy.plan` are its two halves, for those who batch.

Task identity reaches a relation policy only through the reference; a visual policy is given the
task instead and ignores the reference.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from .camera import Array
from .checkpoints import CONFIG, MODEL, Config, read_model
from .conditions import Condition
from .demos import Demonstration
from .devices import choose_device
from .errors import UserError
from .experiments import Experiment
from .frames import Frame
from .images import network_image, shrink
from .matchers import load_matcher
from .matches import Matches
from .matching import Reference, match_references, prepare_references
from .normalisation import Normalisation
from .protocol import PROTOCOL, TASKS, Task
from .references import reference_phase
from .relations import TOKENS, build_relations, empty_relations
from .sampler import make_sampler

SHIPPED = Path(__file__).parent / "weights" / "policy"  # config.json and model.safetensors of the shipped policy


def initial_noise(*key: int) -> NDArray[np.float32]:
    """The Gaussian chunk (16, 4) that a sample starts from: a pure function of non-negative integers."""
    return np.random.default_rng(key).standard_normal((PROTOCOL.chunk, PROTOCOL.action_dim), np.float32)


class Policy:
    """Plans chunks of 16 actions, one or many at a time."""

    def __init__(self, config: Config, network: nn.Module, normalisation: Normalisation) -> None:
        self.config, self.network, self.normalisation = config, network, normalisation
        self.device = next(network.parameters()).device
        self.sampler = make_sampler(network, self.experiment.guidance)

    @property
    def experiment(self) -> Experiment:
        return self.config.experiment

    @property
    def needs_matches(self) -> bool:
        """Whether a matcher has to run: not for images, nor for motion alone."""
        return not self.experiment.visual and self.experiment.representation != "motion"

    def follow(self, reference: Demonstration, matcher: str = "embedded") -> Follower:
        """This policy bound to a reference; make another one to swap the reference at run time."""
        return Follower(self, reference, matcher)

    def condition(
        self,
        frame: Frame,
        *,
        matches: Matches | None = None,
        gripper_ref: Array | None = None,
        j: int = 0,
        task: Task | None = None,
    ) -> Condition:
        """The condition of one live frame, a batch of one; `conditions.stack_conditions` joins several.

        Relation policies read the reference: `matches` between its frame `j` and the live frame,
        and its whole gripper trajectory `gripper_ref` (T, 3), world frame. Without a reference the
        condition is empty. Visual policies read `task`. `Condition.drop` empties either kind (the
        U-Net ignores that: it was never trained without).
        """
        state = torch.from_numpy(self.normalisation.state(frame.robot_state))[None]
        if not self.experiment.visual:
            if gripper_ref is None:
                relations = empty_relations()
            else:
                representation = self.experiment.representation
                relations = build_relations(matches, frame.gripper, gripper_ref, j, representation)
            tokens, valid = torch.from_numpy(relations.tokens), torch.from_numpy(relations.valid)
            return Condition(state, valid[None], tokens=tokens[None])
        if task is None:
            raise ValueError("a visual policy needs the task")
        n = self.normalisation
        image = network_image(shrink(frame.rgb, frame.depth, frame.mask), float(n.depth_mean), float(n.depth_std))
        one_hot = torch.eye(len(TASKS))[[TASKS.index(task)]]
        keep = torch.ones(1, TOKENS, dtype=torch.bool)
        return Condition(state, keep, image=torch.from_numpy(image)[None], task=one_hot)

    def plan(self, condition: Condition, noise: NDArray[np.float32]) -> Array:
        """Chunks (B, 16, 4) in the robot's units, each component in [-1, 1].

        The same inputs in a batch of the same size give the same bits, whoever else is in it.
        """
        z = torch.from_numpy(np.ascontiguousarray(noise, np.float32)).to(self.device)
        x_0 = self.sampler.sample(condition.to(self.device), z)
        return self.normalisation.original_action(x_0.cpu().numpy().astype(np.float64))


class Follower:
    """A relation policy that follows one reference; images are matched at every plan."""

    def __init__(self, policy: Policy, reference: Demonstration, matcher: str = "embedded") -> None:
        if policy.experiment.visual:
            raise UserError(f"{policy.experiment.name} follows no reference: it is given the task")
        self.policy, self.reference = policy, reference
        self.matcher = load_matcher(matcher) if policy.needs_matches else None
        self._prepared: dict[int, Reference] = {}

    def plan(self, frame: Frame, elapsed: int, seed: int = 0) -> Array:
        """The chunk (16, 4) that continues the reference from `frame`, `elapsed` control steps after the start."""
        j, matches = reference_phase(elapsed), None
        if self.matcher:
            if j not in self._prepared:
                (self._prepared[j],) = prepare_references(self.matcher, [self.reference.frame(j)])
            matches = match_references(self.matcher, [self._prepared[j]], [frame])[0]
        condition = self.policy.condition(frame, matches=matches, gripper_ref=self.reference.gripper, j=j)
        return self.policy.plan(condition, initial_noise(seed, elapsed)[None])[0]


def policy_folder(policy: str | Path) -> Path:
    """Where a policy lies: "shipped", or the folder of a run."""
    folder = SHIPPED if str(policy) == "shipped" else Path(policy)
    if not (folder / CONFIG).exists() and not (folder / MODEL).exists():
        if folder == SHIPPED:
            raise UserError(f"this memcorr ships no policy ({folder} is missing); train one with `memcorr train`")
        raise UserError(f"{policy} holds no policy: give the folder of a run, or shipped")
    return folder


def load_policy(policy: str | Path = "shipped", device: str = "auto") -> Policy:
    """The shipped one, or from a run folder, its `stage-one` folder or a folder with its two files."""
    return Policy(*read_model(policy_folder(policy), choose_device(device)))
