"""A trained policy: observation and reference in, action chunk out. No simulator anywhere.

    follower = memcorr.load_policy().follow(demonstration)    # the shipped policy and the reference you pick
    plan = follower.plan(frame, elapsed)                      # execute eight of plan.actions, look again

Task identity reaches a relation policy only through the reference; a visual policy is given the task instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from ..errors import UserError
from ..machine import choose_device, padded
from ..spec import SPEC
from .checkpoint import CONFIG, MODEL, Checkpoint, Design, read_checkpoint
from .condition import Condition, Images, build_condition, own_state, shrink
from .hub import downloaded, is_repository
from .networks.diffusion import Prefix
from .networks.sampler import make_sampler
from .plan import Follows, Plan, Request, continued
from .relations import Relations, build_relations, empty_relations
from .replay import REPLAY, Replay
from .servo import SERVO, Servo, commands

SHIPPED = Path(__file__).parent / "shipped"  # config.json and model.safetensors of the shipped policy


class Policy(Follows):
    """Plans chunks of 16 actions by diffusion, one or many at a time."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.design: Design = checkpoint.design
        self.seed, self.digest = checkpoint.seed, checkpoint.digest
        self.network, self.normalisation = checkpoint.network, checkpoint.normalisation
        where = next(self.network.parameters()).device
        self.device, self._where = where.type, where
        d = self.design
        self.sampler = make_sampler(self.network, d.guidance, d.schedule, d.ddim_steps, d.predicts)

    def condition(self, requests: Sequence[Request]) -> Condition:
        """What the network is shown, (B, ...)."""
        frames = [r.relation.frame for r in requests]
        state = own_state(np.stack([frame.robot_state for frame in frames]), self.design.state)
        if self.design.visual:
            tasks = [r.task for r in requests if r.task is not None]
            if len(tasks) < len(requests):
                raise ValueError("a visual policy needs the task")
            shrunk = [shrink(frame.rgb, frame.depth, frame.mask) for frame in frames]
            images = Images(*(np.stack([getattr(s, k) for s in shrunk]) for k in ("rgb", "depth", "mask")))
            condition = build_condition(self.normalisation, state, images=images, task=np.array(tasks))
        else:
            relations = [self._tokens(r) for r in requests]
            stacked = Relations(np.stack([r.tokens for r in relations]), np.stack([r.valid for r in relations]))
            condition = build_condition(self.normalisation, state, relations=stacked)
        return condition.drop(torch.tensor([r.empty for r in requests]))

    def _tokens(self, request: Request) -> Relations:
        r = request.relation
        if r.reference is None or r.phase is None:
            return empty_relations()
        d, recorded = self.design, commands(r.reference, self.design.action_cm)
        return build_relations(
            r.matches, r.frame.gripper, r.reference.gripper, r.phase, d.representation, recorded, d.tracking
        )

    def plan(self, requests: Sequence[Request], slots: int = 1) -> list[Plan]:
        plans: list[Plan] = []
        limit = self.design.action_limit
        for index in padded(len(requests), slots):
            batch = [requests[i] for i in index]
            z = torch.from_numpy(np.stack([r.noise for r in batch])).to(self._where)
            sampled = self.sampler.sample(self.condition(batch).to(self._where), z, self._prefix(batch))
            chunks = self.normalisation.original_action(sampled.cpu().numpy().astype(np.float64))
            for chunk, request in zip(np.clip(chunks, -limit, limit), batch, strict=True):
                r = request.relation
                plans.append(Plan(continued(chunk, request.prefix), r.recorded, r.matches, r.progress))
        return plans[: len(requests)]

    def _prefix(self, batch: Sequence[Request]) -> Prefix | None:
        """Of those that continue what is being done; None if none do."""
        if all(request.prefix is None for request in batch):
            return None
        chunk = np.zeros((len(batch), SPEC.chunk, self.design.action_dim))
        held = np.zeros(chunk.shape[:2], bool)
        for i, request in enumerate(batch):
            if request.prefix is not None:
                d = min(len(request.prefix), SPEC.chunk)
                chunk[i, :d], held[i, :d] = request.prefix[:d], True
        made = torch.from_numpy(self.normalisation.action(chunk)).to(self._where)
        return Prefix(made, torch.from_numpy(held).to(self._where))


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


def load_policy(policy: str | Path = "shipped", device: str = "auto") -> Follows:
    """The shipped one; "servo" or "replay", which need no training; or from a run folder, its `stage-one` folder, a
    folder with its two files, or the Hub."""
    unlearned = {SERVO: Servo, REPLAY: Replay}.get(str(policy))
    return load_trained(policy, device) if unlearned is None else unlearned()


def load_trained(policy: str | Path = "shipped", device: str = "auto") -> Policy:
    """A diffusion policy, with its network."""
    return Policy(read_checkpoint(policy_folder(policy), choose_device(device)))
