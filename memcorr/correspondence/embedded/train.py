"""`memcorr matcher train`: the embedded matcher's weights, from rendered practice scenes alone.

The same command continues an interrupted run. Every batch depends only on (seed, step).
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from safetensors.torch import load_file, save
from torch import Tensor
from tqdm import tqdm

from ...errors import UserError
from ...frames import Frame
from ...runs import CORES, claimed, read_json, write_json, written_whole
from ...spec import SPEC
from ..lift import Crop, crop_object, lift_query, relief
from ..matches import transform
from .matcher import images
from .network import RADIUS, SIZE, Located, MatchNetwork, Pyramid, trust_evidence
from .practice import DOOR, DOOR_RELATIVES, NEAR, OTHER_SCENES, VIEWS, Group, load_groups, render_practice

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class MatcherConfig:
    seed: int = 0
    steps: int = 3000
    batch: int = 8  # pairs
    points: int = 96  # asked for per pair, on the object
    table: int = 48  # and on the table around it
    learning_rate: float = 7e-4
    weight_decay: float = 1e-4
    door: bool = True  # False: neither the door nor anything that shares its meshes
    door_share: float = 0.6  # of the pairs, if the door is included
    near_after: int = 300  # steps, from which on door pairs are seen by the policy's own camera
    near_share: float = 0.8  # of the pairs, from then on
    objects: tuple[str, ...] = OTHER_SCENES  # Meta-World scenes to practise on, beside the door
    groups: int = 40  # per practice scene
    door_groups: int = 240
    right_mm: float = 10.0  # what confidence is the probability of
    calibration: int = 100  # further batches, to calibrate confidence with


@dataclass(frozen=True)
class Pair:
    """Two views of one object with exact correspondences."""

    frame_b: Frame
    crop_a: Crop
    crop_b: Crop
    uv_a: NDArray[np.float32]  # (N, 2) crop pixels
    uv_b: NDArray[np.float32]  # (N, 2) crop pixels; true also where hidden
    p_b: NDArray[np.float64]  # (N, 3) true world points in B
    inside: NDArray[np.bool_]  # (N,) projects into B's crop
    visible: NDArray[np.bool_]  # (N,) and is seen there


def make_pair(group: Group, a: int, b: int, points: int, table: int, rng: np.random.Generator) -> Pair:
    """`points` on the object, and `table` on the table top around it, which stands still.

    Deployment asks only for points on the object, but these are few and often plain; the grained
    table teaches the features early what a match is.
    """
    frame_a, frame_b = group.frames[a], group.frames[b]
    crop_a, crop_b = (crop_object(frame, random_padding(rng)) for frame in (frame_a, frame_b))
    uv_object = draw_pixels(frame_a.mask, points, rng)
    p_object = frame_a.camera.lift(uv_object, frame_a.depth[uv_object[:, 1], uv_object[:, 0]])
    p_moved = transform(group.T_world_object[b] @ np.linalg.inv(group.T_world_object[a]), p_object)
    uv_table = draw_pixels(table_pixels(frame_a, crop_a), table, rng)
    p_table = frame_a.camera.lift(uv_table, frame_a.depth[uv_table[:, 1], uv_table[:, 0]])
    uv_a, p_b = np.concatenate([uv_object, uv_table]), np.concatenate([p_moved, p_table])
    uv_b, z = frame_b.camera.project(p_b)
    located = crop_b.from_original(uv_b)
    inside = ((located >= 0) & (located <= SIZE - 1)).all(axis=-1) & (z > 0)
    seen, on_object = lift_query(frame_b, crop_b, located)
    on_object &= np.linalg.norm(seen - p_b, axis=-1) < 0.01
    columns, rows = np.clip(np.rint(uv_b), 0, SPEC.image_size - 1).astype(int).T
    on_table = ~frame_b.mask[rows, columns] & (np.abs(frame_b.depth[rows, columns] - z) < 0.01)
    visible = inside & np.where(np.arange(len(uv_a)) < len(uv_object), on_object, on_table)
    return Pair(
        frame_b,
        crop_a,
        crop_b,
        crop_a.from_original(uv_a).astype(np.float32),
        located.astype(np.float32),
        p_b,
        inside,
        visible,
    )


def draw_pixels(mask: NDArray[np.bool_], count: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """`count` pixels (column, row) of the mask, with replacement; none if it is empty."""
    rows, columns = np.nonzero(mask)
    chosen = rng.integers(len(rows), size=count) if len(rows) else np.zeros(0, np.int64)
    return np.stack([columns, rows], axis=-1)[chosen]


def table_pixels(frame: Frame, crop: Crop) -> NDArray[np.bool_]:
    """Pixels of the crop that show the table top, the plane z = 0."""
    rows, columns = np.mgrid[: frame.mask.shape[0], : frame.mask.shape[1]]
    height = frame.camera.lift(np.stack([columns, rows], axis=-1), frame.depth)[..., 2]
    across = (columns >= crop.left) & (columns < crop.left + crop.width)
    down = (rows >= crop.top) & (rows < crop.top + crop.height)
    return across & down & ~frame.mask & (frame.depth > 0) & (np.abs(height) < 0.003)


def random_padding(rng: np.random.Generator) -> tuple[int, int, int, int]:
    """Half of the crops are cut loosely: where a pixel lies in its crop must not give its match away."""
    if rng.uniform() < 0.5:
        return (SPEC.crop_padding,) * 4
    left, top, right, bottom = rng.integers(4, 45, 4)
    return int(left), int(top), int(right), int(bottom)


def photometric(rgb: NDArray[np.uint8], rng: np.random.Generator) -> NDArray[np.uint8]:
    """Exposure, contrast, white balance and noise, differently for each image."""
    x = rgb.astype(np.float32) / 255
    x = (x ** rng.uniform(0.85, 1.2) - 0.5) * rng.uniform(0.85, 1.15) + 0.5 + rng.uniform(-0.05, 0.05)
    x = x * rng.uniform(0.95, 1.05, 3).astype(np.float32) + rng.normal(0, rng.uniform(0, 0.015), x.shape)
    return (np.clip(x, 0, 1) * 255).astype(np.uint8)


class Practice:
    """The rendered groups in memory, and batches drawn from them."""

    def __init__(self, config: MatcherConfig, folder: Path, workers: int) -> None:
        scenes = dict.fromkeys(config.objects, config.groups)
        if config.door:
            scenes |= dict.fromkeys((*DOOR_RELATIVES, DOOR + NEAR), config.door_groups)
        paths = render_practice(folder, scenes, config.seed, workers)
        self.config = config
        groups = {path.stem: load_groups(path) for path in paths}
        self.near, self.door = groups.pop(DOOR + NEAR, []), groups.pop(DOOR, [])
        self.others = [group for some in groups.values() for group in some]

    def batch(self, step: int) -> list[Pair]:
        rng = np.random.default_rng([self.config.seed, step])
        pairs: list[Pair] = []
        while len(pairs) < self.config.batch:
            late = step >= self.config.near_after
            share = self.config.near_share if late else self.config.door_share
            groups = (self.near if late else self.door) if self.door and rng.uniform() < share else self.others
            a, b = rng.integers(VIEWS, size=2)  # a view may meet itself, cut differently
            points, table = self.config.points, self.config.table
            pair = make_pair(groups[rng.integers(len(groups))], a, b, points, table, rng)
            if pair.visible[:points].sum() >= 8 and len(pair.uv_a) == points + table:
                pairs.append(pair)
        return pairs


def loss_of(located: Located, pairs: list[Pair], right_mm: float) -> tuple[Tensor, dict[str, float]]:
    uv_b = torch.from_numpy(np.stack([p.uv_b for p in pairs]))
    inside = torch.from_numpy(np.stack([p.inside for p in pairs]))
    visible = torch.from_numpy(np.stack([p.visible for p in pairs]))
    # Hidden points still have a place: answering it (and not a lookalike's) lets the mask reject them.
    weight = visible.float() + 0.3 * (inside & ~visible).float()
    total = weight.sum().clamp(min=1)

    side = SIZE // 8
    cell = ((uv_b + 0.5) / 8 - 0.5).clamp(0, side - 1)
    coarse = -(grid_targets(cell, side) * located.logits.log_softmax(-1)).sum(-1)
    loss = 2 * (weight * coarse).sum() / total
    for stage in located.stages:
        offset = (uv_b - stage.origin) / stage.stride + RADIUS  # in the window's own cells
        reachable = weight * ((offset >= 0) & (offset <= 2 * RADIUS)).all(-1)
        error = F.smooth_l1_loss(stage.uv, uv_b, reduction="none", beta=0.5).sum(-1) / stage.stride
        window = -(grid_targets(offset, 2 * RADIUS + 1) * stage.correlation.log_softmax(-1)).sum(-1)
        loss = loss + (reachable * (0.5 * error + 0.5 * window)).sum() / total

    right, judged = judge(located.uv.detach().double().numpy(), pairs, right_mm)
    trust = F.binary_cross_entropy_with_logits(located.trust, right, reduction="none")
    loss = loss + (judged * trust).sum() / judged.sum().clamp(min=1)
    miss = (located.uv.detach() - uv_b).norm(dim=-1)[visible & judged.bool()]
    return loss, {
        "coarse": float((weight * coarse).sum().detach() / total),
        "median_px": float(miss.median()),
        "within_2px": float((miss < 2).float().mean()),
    }


def grid_targets(cell: Tensor, side: int) -> Tensor:
    """Bilinear weights of locations (B, N, 2), in cells, over a grid of side x side: (B, N, side^2)."""
    grid = torch.arange(side)
    wx, wy = ((1 - (cell[..., k, None] - grid).abs()).clamp(min=0) for k in (0, 1))
    return (wy[..., :, None] * wx[..., None, :]).flatten(-2)


def judge(uv: NDArray[np.float64], pairs: list[Pair], right_mm: float) -> tuple[Tensor, Tensor]:
    """Which answers lift to within `right_mm` of the truth, and which would count at all (B, N)."""
    right, judged = [], []
    for located, pair in zip(uv, pairs, strict=True):
        p, valid = lift_query(pair.frame_b, pair.crop_b, located)
        right.append(np.linalg.norm(p - pair.p_b, axis=-1) < right_mm / 1e3)
        judged.append(valid)
    return torch.from_numpy(np.stack(right)).float(), torch.from_numpy(np.stack(judged)).float()


def train(config: MatcherConfig, out: Path, workers: int = CORES, save_every: int = 100) -> Path:
    """Trains into `out`, with as many threads as torch now has; the same call continues."""
    with claimed(out):
        return _train(config, out, workers, save_every)


def _train(config: MatcherConfig, out: Path, workers: int, save_every: int) -> Path:
    resolved = json.loads(json.dumps(asdict(config)))
    if (out / "config.json").exists() and read_json(out / "config.json") != resolved:
        raise UserError(f"{out} holds a matcher trained with another configuration; choose another --out")
    weights = out / "embedded.safetensors"
    if weights.exists():
        log.info(f"{weights} is finished; nothing to do")
        return weights
    write_json(out / "config.json", resolved)
    practice = Practice(config, out / "practice", workers)
    torch.manual_seed(config.seed)
    network = MatchNetwork().train()
    network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.AdamW(
        network.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay, fused=True
    )
    start = resume(out / "state.safetensors", network, optimizer)
    metrics_file = out / "metrics.jsonl"
    bar = tqdm(range(start, config.steps), "matcher", initial=start, total=config.steps, unit="step", smoothing=0.02)
    for step in bar:
        set_learning_rate(optimizer, config, step)
        pairs = practice.batch(step)
        located = locate(network, pairs, np.random.default_rng([config.seed, step, 1]))
        loss, metrics = loss_of(located, pairs, config.right_mm)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        if step % 10 == 9:
            with metrics_file.open("a") as f:
                f.write(json.dumps({"step": step + 1, "loss": loss.item(), **metrics}) + "\n")
            bar.set_postfix(loss=f"{loss.item():.2f}", px=f"{metrics['median_px']:.2f}")
        if (step + 1) % save_every == 0:
            save_state(out / "state.safetensors", network, optimizer, step + 1)
    network.calibration.copy_(calibrate(network.eval(), practice))
    with written_whole(weights) as temporary:
        half = {k: v.half() if v.is_floating_point() else v for k, v in network.state_dict().items()}
        temporary.write_bytes(save({k: v.contiguous() for k, v in half.items()}))
    log.info(f"wrote {weights} ({weights.stat().st_size / 1e6:.1f} MB)")
    return weights


def locate(network: MatchNetwork, pairs: list[Pair], rng: np.random.Generator) -> Located:
    crops = [photometric(c.rgb, rng) for c in (*(p.crop_a for p in pairs), *(p.crop_b for p in pairs))]
    both = network.encode(images(np.stack(crops)))
    a, b = (Pyramid(*(f[s] for f in (both.f2, both.f4, both.f8))) for s in halves(len(pairs)))
    return network.locate(a, b, torch.from_numpy(np.stack([p.uv_a for p in pairs])))


@torch.no_grad()
def calibrate(network: MatchNetwork, practice: Practice) -> Tensor:
    """The four numbers that turn `trust_evidence` into the odds of being right, from further pairs."""
    config, evidence, right = practice.config, [], []
    for step in range(config.steps, config.steps + config.calibration):
        pairs = practice.batch(step)
        located = locate(network, pairs, np.random.default_rng([config.seed, step, 1]))
        uv = located.uv.double().numpy()
        is_right, judged = judge(uv, pairs, config.right_mm)
        around = [relief(p.frame_b, p.crop_b.to_original(x)) for p, x in zip(pairs, uv, strict=True)]
        x = trust_evidence(located.trust.double(), torch.from_numpy(np.stack(around)))
        evidence.append(x[judged.bool()])
        right.append(is_right[judged.bool()].double())
    return logistic_regression(torch.cat(evidence), torch.cat(right)).to(network.calibration)


def logistic_regression(x: Tensor, y: Tensor) -> Tensor:
    """w that makes sigmoid(x w) the likeliest odds of y; x (N, D), y (N,) in {0, 1}, float64."""
    w = x.new_zeros(x.shape[1])
    for _ in range(20):  # Newton's method, damped so that it stays defined when everything is right
        p = (x @ w).sigmoid()
        curvature = x.T @ (x * (p * (1 - p))[:, None]) + 1e-3 * torch.eye(len(w)).to(x)
        w = w + torch.linalg.solve(curvature, x.T @ (y - p))
    return w


def halves(n: int) -> tuple[slice, slice]:
    return slice(0, n), slice(n, 2 * n)


def set_learning_rate(optimizer: torch.optim.Optimizer, config: MatcherConfig, step: int) -> None:
    """Linear warm-up over 100 steps, then a cosine to zero."""
    warm = min(1.0, (step + 1) / 100)
    for group in optimizer.param_groups:
        group["lr"] = config.learning_rate * warm * 0.5 * (1 + np.cos(np.pi * step / config.steps))


def save_state(path: Path, network: MatchNetwork, optimizer: torch.optim.Optimizer, step: int) -> None:
    tensors = {f"network.{k}": v.contiguous() for k, v in network.state_dict().items()}
    for i, p in enumerate(network.parameters()):
        for key in ("exp_avg", "exp_avg_sq", "step"):
            tensors[f"optimizer.{i}.{key}"] = optimizer.state[p][key].contiguous()
    with written_whole(path) as temporary:
        temporary.write_bytes(save(tensors, metadata={"step": str(step)}))


def resume(path: Path, network: MatchNetwork, optimizer: torch.optim.Optimizer) -> int:
    """Restores weights and optimiser; returns the step to continue with."""
    if not path.exists():
        return 0
    tensors = load_file(path)
    prefix = "network."
    network.load_state_dict({k[len(prefix) :]: v for k, v in tensors.items() if k.startswith(prefix)})
    for i, p in enumerate(network.parameters()):
        moments = {k: tensors[f"optimizer.{i}.{k}"] for k in ("exp_avg", "exp_avg_sq")}
        # In the parameter's own memory order: the fused optimiser walks through both side by side.
        optimizer.state[p] = {k: torch.empty_like(p, requires_grad=False).copy_(v) for k, v in moments.items()}
        optimizer.state[p]["step"] = tensors[f"optimizer.{i}.step"].clone()
    return int(tensors["optimizer.0.step"].item())
