"""The policy: MemCorr's own planner behind LeRobot's interface, and its loss on LeRobot's batches."""

from __future__ import annotations

import json
from collections import deque
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lerobot.policies import PreTrainedPolicy
from lerobot.utils.constants import ACTION, OBS_STATE
from torch import Tensor
from torch.nn import functional as F

from memcorr.correspondence.matcher import load_matcher
from memcorr.demos.store import Demonstration, Store, read_demonstration
from memcorr.errors import UserError
from memcorr.files import converted
from memcorr.following.course import Progress
from memcorr.following.reference import Reference
from memcorr.following.step import Look, Observation, Relation
from memcorr.frames import Camera, Frame
from memcorr.policy.checkpoint import Checkpoint, Design
from memcorr.policy.condition import Normalisation
from memcorr.policy.networks.diffusion import q_sample, velocity
from memcorr.policy.plan import Planner, Request, initial_noise
from memcorr.policy.policy import Policy, load_trained
from memcorr.spec import SPEC

from .configuration_memcorr import RGB, MemCorrConfig

Batch = dict[str, Any]


@dataclass
class Followed:
    """One environment's episode under way."""

    began: Observation  # its first frame
    progress: dict[Reference, Progress | None] = field(default_factory=dict)  # in each reference that it was shown


class MemCorrPolicy(PreTrainedPolicy):
    """Follows, for every environment of a batch, the recording of the task that it is told.

    A task that is told as "" is no condition at all.
    """

    config_class = MemCorrConfig
    name = "memcorr"

    def __init__(
        self,
        config: MemCorrConfig,
        dataset_stats: dict[str, Any] | None = None,
        dataset_meta: Any = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(config)
        self.config: MemCorrConfig = config
        if dataset_meta is not None:
            config.fps = float(dataset_meta.fps)
        config.validate_features()
        checkpoint = self._begin(dataset_stats)
        config.design, config.train_seed = json.dumps(asdict(checkpoint.design)), checkpoint.seed
        self.network = checkpoint.network
        for name, value in asdict(checkpoint.normalisation).items():
            self.register_buffer(f"normalisation_{name}", torch.from_numpy(np.array(value, np.float64)))
        self.design = checkpoint.design
        if self.design.visual:
            raise UserError(f"{self.design.name} follows no reference; lerobot_policy_memcorr is for those that do")
        self.matcher = load_matcher(config.matcher) if self.design.needs_matches else None
        self._followed: dict[str, Reference] = {}
        self._planner: Planner | None = None
        self.reset()

    def _begin(self, dataset_stats: dict[str, Any] | None) -> Checkpoint:
        """What there is before weights are read, if they are: read back, as it was made, or fresh."""
        config = self.config
        if config.design:  # about to be filled by LeRobot, normalisation included
            design = converted(json.loads(config.design), Design)
            return Checkpoint(design, config.train_seed, design.build(), _unit())
        if config.weights:
            made = load_trained(config.weights, "cpu")
            return Checkpoint(made.design, made.seed, made.network, made.normalisation)
        if not dataset_stats:
            raise UserError("--policy.weights= begins with fresh weights, and needs a dataset: lerobot-train")
        return Checkpoint(Design(), 0, Design().build(), _measured(dataset_stats))

    @property
    def planner(self) -> Planner:
        """Made when it is first asked for, of the weights as they are then; new after a training step."""
        if self._planner is None:
            values = {f.name: getattr(self, f"normalisation_{f.name}").cpu().numpy() for f in fields(Normalisation)}
            made = Checkpoint(self.design, self.config.train_seed, self.network, Normalisation(**values))
            self._policy = Policy(made)
            self._planner = Planner(self._policy, self.matcher, self.config.lanes)
        return self._planner

    def get_optim_params(self) -> Any:
        return self.network.parameters()

    def train(self, mode: bool = True) -> MemCorrPolicy:
        self._planner = None
        return super().train(mode)

    def reset(self) -> None:
        """A new episode in every environment."""
        self._queue: deque[Tensor] = deque()
        self._episodes: dict[int, Followed] = {}
        self._replan = 0

    # What is shown

    def reference(self, task: str) -> Reference:
        if task not in self._followed:
            self._followed[task] = Reference(self._recording(task), self.matcher)
        return self._followed[task]

    def _recording(self, task: str) -> Demonstration:
        if self.config.reference:
            return read_demonstration(Path(self.config.reference))
        if not self.config.references:
            raise UserError("memcorr follows a recording: give --policy.references=STORE or --policy.reference=FILE")
        store = Store.open(self.config.references)
        if task not in store.tasks:
            raise UserError(f"{store.root} has no recording of {task!r}, only of {', '.join(store.tasks)}")
        return store.demonstration(0, task)

    # Acting

    @torch.no_grad()
    def predict_action_chunk(self, batch: Batch, **kwargs: Any) -> Tensor:
        """(B, 16, 4), float64. Every call is one look of every environment."""
        found = frames(batch)
        tasks = [self.config.reference or task for task in _tasks(batch, len(found))]
        noises = self._noises(batch, len(found))
        clock = self._replan * self.config.n_action_steps
        elapsed = [int(e) for e in batch["observation.elapsed"].ravel()] if "observation.elapsed" in batch else None
        self._replan += 1
        told = [self._look(i, tasks[i], frame, elapsed[i] if elapsed else clock) for i, frame in enumerate(found)]
        looks = {i: look for i, look in enumerate(told) if look is not None}
        requests = [Request(Relation(frame), noise, empty=True) for frame, noise in zip(found, noises, strict=True)]
        for i, relation in zip(looks, self.planner.following.step(list(looks.values())), strict=True):
            requests[i] = Request(relation, noises[i])
            self._episodes[i].progress[looks[i].reference] = relation.progress
        plans = self.planner.policy.plan(requests, self.config.lanes)
        return torch.from_numpy(np.stack([plan.actions for plan in plans]))

    def _look(self, environment: int, task: str, frame: Frame, elapsed: int) -> Look | None:
        """What this environment sees, with what is remembered of its episode; step 0 begins another, whatever is told.
        None if no task is."""
        seen = Observation(frame)
        if begins := not elapsed or environment not in self._episodes:
            self._episodes[environment] = Followed(seen)
        if not task:
            return None
        episode, reference = self._episodes[environment], self.reference(task)
        return Look(seen, reference, elapsed, episode.progress.get(reference), None if begins else episode.began)

    def select_action(self, batch: Batch, **kwargs: Any) -> Tensor:
        """
        step      0 1 2 3 4 5 6 7   8 9 ...
        looks at  0                 8          n_action_steps = 8
        plans     0 ........... 15  8 .... 23  horizon = 16
        acts      0 1 2 3 4 5 6 7   8 9 ...
        """
        if not self._queue:
            chunk = self.predict_action_chunk(batch)
            self._queue.extend(chunk[:, : self.config.n_action_steps].unbind(1))
        return self._queue.popleft()

    def _noises(self, batch: Batch, count: int) -> list[np.ndarray]:
        """As in `memcorr evaluate`, if the environment says which scene it is; else by place and number of the plan."""
        keys = batch.get("observation.noise_key")
        rows = [(i,) for i in range(count)] if keys is None else [tuple(map(int, key)) for key in keys]
        return [initial_noise(self.config.train_seed, *row, self._replan) for row in rows]

    # Learning

    def forward(self, batch: Batch) -> tuple[Tensor, dict[str, float]]:
        """The standard objective on rows of a dataset: points are matched with the reference of the row's task at the
        frame of the same time, conditions dropped now and then."""
        if self.design.phase != "elapsed":
            raise UserError(f"{self.design.name} finds its phase by what is seen; train it with `memcorr train`")
        found, tasks = frames(batch), _tasks(batch, len(batch[ACTION]))
        planner, policy = self.planner, self._policy
        references = [self.reference(task) for task in tasks]
        elapsed = (batch["timestamp"].ravel() * self.config.fps).round()  # LeRobot hands on no frame_index
        looks = [
            Look(Observation(frame), reference, int(e))
            for frame, reference, e in zip(found, references, elapsed, strict=True)
        ]
        relations = planner.following.step(looks)
        noise = np.zeros((SPEC.chunk, SPEC.action_dim), np.float32)
        dropped = torch.rand(len(found)) < self.config.condition_dropout
        requests = [Request(r, noise, empty=bool(drop)) for r, drop in zip(relations, dropped, strict=True)]
        action = batch[ACTION].double().cpu().numpy()
        x_0 = torch.from_numpy(policy.normalisation.action(action))
        t, eps = torch.randint(0, SPEC.diffusion_steps, (len(found),)), torch.randn_like(x_0)
        z_t = q_sample(x_0, eps, t, self.design.schedule)
        target = eps if self.design.predicts == "noise" else velocity(x_0, eps, t, self.design.schedule)
        device = next(self.network.parameters()).device
        answer = self.network(z_t.to(device), t.to(device), policy.condition(requests).to(device))
        loss = F.mse_loss(answer, target.to(device))
        seen = float(np.mean([np.mean(r.matches.valid) for r in relations if r.matches is not None] or [0.0]))
        return loss, {"valid_points": seen}


def frames(batch: Batch) -> list[Frame]:
    """What was seen, row by row, from an environment or from a dataset of `memcorr export lerobot`."""
    needed = (RGB, "observation.images.depth", "observation.images.mask", "observation.camera.K", "observation.gripper")
    if missing := [key for key in needed if key not in batch]:
        raise UserError(f"memcorr needs {', '.join(missing)}; `memcorr export lerobot` and --env.type=memcorr have it")
    rgb = batch[RGB].cpu()
    colours = rgb if rgb.dtype == torch.uint8 else (rgb * 255).round().to(torch.uint8)
    pixels = colours.permute(0, 2, 3, 1).numpy()
    depth = batch["observation.images.depth"].float().cpu().numpy()[:, 0]
    mask = batch["observation.images.mask"].float().cpu().numpy()[:, 0] > 0.5
    numbers = {
        name: batch[key].double().cpu().numpy()
        for name, key in (
            ("K", "observation.camera.K"),
            ("T", "observation.camera.T_world_cam"),
            ("gripper", "observation.gripper"),
            ("state", "observation.state_exact" if "observation.state_exact" in batch else OBS_STATE),
        )
    }
    return [
        Frame(
            np.ascontiguousarray(pixels[i]),
            depth[i],
            mask[i],
            Camera(numbers["K"][i].reshape(3, 3), numbers["T"][i].reshape(4, 4)),
            numbers["state"][i],
            numbers["gripper"][i],
        )
        for i in range(len(pixels))
    ]


def _tasks(batch: Batch, count: int) -> list[str]:
    told = batch.get("task", "")
    return [told] * count if isinstance(told, str) else list(told)


def _unit() -> Normalisation:
    n, m = SPEC.state_dim, SPEC.action_dim
    return Normalisation(np.zeros(n), np.ones(n), np.zeros(m), np.ones(m), np.array(0.0), np.array(1.0))


def _measured(stats: dict[str, Any]) -> Normalisation:
    """From the statistics of a dataset."""
    state, action = ({k: np.asarray(stats[key][k], np.float64) for k in ("mean", "std")} for key in (OBS_STATE, ACTION))
    return Normalisation(
        state["mean"],
        np.maximum(state["std"], SPEC.state_std_floor),
        action["mean"],
        np.maximum(action["std"], SPEC.action_std_floor),
        np.array(0.0),
        np.array(1.0),
    )
