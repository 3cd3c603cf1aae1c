"""The policy: MemCorr's own planner behind LeRobot's interface, and its loss on LeRobot's batches."""

from __future__ import annotations

import json
from collections import deque
from dataclasses import asdict, dataclass, field, fields, replace
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
from memcorr.following.step import Observation, Query, Relation
from memcorr.frames import Camera, Frame
from memcorr.policy.checkpoint import Checkpoint, Design
from memcorr.policy.condition import Normalisation
from memcorr.policy.networks.diffusion import q_sample, velocity
from memcorr.policy.plan import Planner, Request, initial_noise
from memcorr.policy.policy import Policy, load_trained
from memcorr.spec import SPEC

from .configuration_memcorr import EXACT, RGB, MemCorrConfig, unpacked

Batch = dict[str, Any]
NEEDED = (
    *(RGB, "observation.images.depth", "observation.images.mask"),
    *("observation.camera.K", "observation.camera.T_world_cam", "observation.gripper"),
)


@dataclass(frozen=True)
class Planned:
    """The last chunk, and the control steps that were done when it began."""

    chunk: Tensor
    elapsed: int


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
            self._planner = Planner(self._policy, self.matcher, self.config.slots)
        return self._planner

    def get_optim_params(self) -> Any:
        return self.network.parameters()

    def train(self, mode: bool = True) -> MemCorrPolicy:
        self._planner = None
        return super().train(mode)

    def reset(self) -> None:
        """A new episode in every environment."""
        self._queue: deque[Tensor] = deque()
        self._dropped = 0  # actions of the last chunk that nobody made
        self._told: list[str] = []
        self._planned: Planned | None = None
        self._episodes: dict[int, Followed] = {}
        self._replan = 0

    def drop_queued_actions(self) -> None:
        """Looks again before the next action, as after an exchange of the reference; the episode goes on."""
        self._dropped += len(self._queue)
        self._queue.clear()

    def supports_rtc(self) -> bool:
        """Real-time chunking: actions that are made while it plans are in-painted."""
        return True

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
    def predict_action_chunk(
        self,
        batch: Batch,
        inference_delay: int | None = None,
        prev_chunk_left_over: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """(B, 16, 4), float64. Every call is one look of every environment.

        In real-time chunking `prev_chunk_left_over` (T, 4) or (B, T, 4) is what was still to be done of the last chunk
        when this look was taken, zeros behind it. Its first `inference_delay` actions are made while this is planned:
        the new chunk begins with them and continues them.
        """
        batch = unpacked(batch) if EXACT in batch else batch
        found = frames(batch)
        left = self._left_over(prev_chunk_left_over, len(found))
        tasks = [self.config.reference or task for task in _tasks(batch, len(found))]
        noises = self._noises(batch, len(found))
        clock = self._clock(left)
        elapsed = [int(e) for e in batch["observation.elapsed"].ravel()] if "observation.elapsed" in batch else None
        self._replan += 1
        told = [self._look(i, tasks[i], frame, elapsed[i] if elapsed else clock) for i, frame in enumerate(found)]
        looks = {i: look for i, look in enumerate(told) if look is not None}
        requests = [Request(Relation(frame), noise, empty=True) for frame, noise in zip(found, noises, strict=True)]
        for i, relation in zip(looks, self.planner.following.step(list(looks.values())), strict=True):
            requests[i] = Request(relation, noises[i])
            self._episodes[i].progress[looks[i].reference] = relation.progress
        if inference_delay and left is not None:
            made = left[:, :inference_delay].double().cpu().numpy()
            requests = [replace(request, prefix=some) for request, some in zip(requests, made, strict=True)]
        plans = self.planner.policy.plan(requests, self.config.slots)
        chunk = torch.from_numpy(np.stack([plan.actions for plan in plans]))
        self._planned, self._dropped = Planned(chunk, clock), 0
        return chunk

    @staticmethod
    def _left_over(given: Tensor | None, count: int) -> Tensor | None:
        """(B, T, 4) without the zeros that LeRobot fills up with; None if nothing is left."""
        if given is None:
            return None
        left = given if given.ndim == 3 else given[None].expand(count, -1, -1)
        real = (left != 0).any(dim=2).any(dim=0).nonzero()
        return left[:, : int(real.max()) + 1] if len(real) else None

    def _clock(self, left: Tensor | None) -> int:
        """Control steps since the episode began: what is left of the last chunk says how much of it was done. Without
        that, looks are `n_action_steps` apart, less what was dropped."""
        if self._planned is None:
            return 0
        usual = self._planned.elapsed + self.config.n_action_steps - self._dropped
        if left is None:
            return usual
        chunk = self._planned.chunk.to(left)
        for done in range(chunk.shape[1]):
            both = min(left.shape[1], chunk.shape[1] - done)
            if torch.equal(chunk[:, done : done + both], left[:, :both]):
                return self._planned.elapsed + done
        return usual

    def _look(self, environment: int, task: str, frame: Frame, elapsed: int) -> Query | None:
        """What this environment sees, with what is remembered of its episode; step 0 begins another, whatever is told.
        None if no task is."""
        seen = Observation(frame)
        if begins := not elapsed or environment not in self._episodes:
            self._episodes[environment] = Followed(seen)
        if not task:
            return None
        episode, reference = self._episodes[environment], self.reference(task)
        return Query(seen, reference, elapsed, episode.progress.get(reference), None if begins else episode.began)

    def select_action(self, batch: Batch, **kwargs: Any) -> Tensor:
        """
        step      0 1 2 3 4 5 6 7   8 9 ...
        looks at  0                 8          n_action_steps = 8
        plans     0 ........... 15  8 .... 23  horizon = 16
        acts      0 1 2 3 4 5 6 7   8 9 ...
        """
        told = _tasks(batch, 1)
        if told != self._told:
            self.drop_queued_actions()
        self._told = told
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

    def forward(self, batch: Batch, reduction: str = "mean") -> tuple[Tensor, dict[str, float]]:
        """The standard objective on rows of a dataset: points are matched with the reference of the row's task at the
        frame of the same time, conditions dropped now and then. With the reduction "none" a loss for every row."""
        if reduction not in ("mean", "none"):
            raise UserError(f"reduction {reduction!r}: mean or none")
        if self.design.phase != "elapsed":
            raise UserError(f"{self.design.name} finds its phase by what is seen; train it with `memcorr train`")
        found, tasks = frames(batch), _tasks(batch, len(batch[ACTION]))
        planner, policy = self.planner, self._policy
        references = [self.reference(task) for task in tasks]
        elapsed = (batch["timestamp"].ravel() * self.config.fps).round()  # LeRobot hands on no frame_index
        looks = [
            Query(Observation(frame), reference, int(e))
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
        losses = F.mse_loss(answer, target.to(device), reduction="none").mean(dim=(1, 2))
        loss = losses.mean() if reduction == "mean" else losses
        seen = float(np.mean([np.mean(r.matches.valid) for r in relations if r.matches is not None] or [0.0]))
        return loss, {"valid_points": seen}


def frames(batch: Batch) -> list[Frame]:
    """What was seen, row by row, from an environment or from a dataset of `memcorr export lerobot`."""
    batch = dict(batch)
    if f"{RGB}_depth" in batch:  # LeRobot's own name: a sibling of the camera
        batch.setdefault("observation.images.depth", batch[f"{RGB}_depth"])
    intrinsics = batch.get("observation.intrinsics", batch.get("intrinsics"))
    if intrinsics and RGB.rpartition(".")[2] in intrinsics:
        batch.setdefault("observation.camera.K", torch.as_tensor(intrinsics[RGB.rpartition(".")[2]]))
    if missing := [key for key in NEEDED if key not in batch]:
        raise UserError(
            f"memcorr needs {', '.join(missing)}; `memcorr export lerobot` and --env.type=memcorr have it. Depth may "
            f"also be {RGB}_depth (millimetres if integers), the camera's matrix be in observation['intrinsics']"
        )
    rgb = batch[RGB].cpu()
    colours = rgb if rgb.dtype == torch.uint8 else (rgb * 255).round().to(torch.uint8)
    pixels = colours.permute(0, 2, 3, 1).numpy()
    depth = metres(batch["observation.images.depth"], len(pixels))
    mask = batch["observation.images.mask"].float().cpu().numpy()[:, 0] > 0.5
    numbers = {
        name: np.broadcast_to(array, (len(pixels), *array.shape[1:])) if len(array) == 1 else array
        for name, array in (
            ("K", _numbers(batch["observation.camera.K"], 9)),
            ("T", _numbers(batch["observation.camera.T_world_cam"], 16)),
            ("gripper", _numbers(batch["observation.gripper"], 3)),
            ("state", _numbers(batch["observation.state_exact" if "observation.state_exact" in batch else OBS_STATE])),
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


def metres(depth: Tensor, count: int) -> np.ndarray:
    """(B, H, W) float32, of (B, 1, H, W) or (B, H, W, 1), in metres or, as integers, in millimetres."""
    values = depth.cpu().numpy()
    values = (values / 1000 if np.issubdtype(values.dtype, np.integer) else values).astype(np.float32)
    if values.shape[-1] == 1:
        values = np.moveaxis(values, -1, 1)
    return values.reshape(count, *values.shape[-2:])


def _numbers(given: Tensor, size: int = -1) -> np.ndarray:
    """(B, size) float64, of whatever shape they came in; without a size as they are."""
    values = given.double().cpu().numpy()
    return values.reshape(-1, size) if size > 0 else values


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
