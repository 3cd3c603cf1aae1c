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
from torch import Tensor
from tqdm import tqdm

from ...errors import UserError
from ...files import Form, appending, forget_later_rows, read_arrays, read_json, write_arrays, write_json
from ...folders import claimed
from ...frames import Frame
from ...spec import SPEC, Lifting
from ...workers import CORES
from ..lift import BATCH, Crop, crop_object, lift_query, measure, prepare_references
from ..matcher import Doubt, Matcher
from ..matches import Matches, carried, join_matches, residuals
from .matcher import EmbeddedMatcher, images, trust_evidence
from .network import RADIUS, SIZE, Located, MatchNetwork, Pyramid
from .practice import HELD_OUT, SCENES, VIEWS, Group, is_assembly, load_groups, render_practice

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class MatcherConfig:
    seed: int = 0
    steps: int = 4500
    batch: int = 8  # pairs
    points: int = 64  # asked for per pair, on the object
    table: int = 24  # and on the table around it
    learning_rate: float = 7e-4
    weight_decay: float = 1e-4
    scenes: tuple[str, ...] = SCENES  # Meta-World's, to practise on
    held_out: tuple[str, ...] = HELD_OUT  # never practised on: what choices are made by, and confidence
    groups: int = 40  # per scene
    assemblies: int = 100  # models of made-up objects, as many groups of each
    assembly_share: float = 0.65  # of the pairs
    right_mm: float = 10.0  # what confidence is the probability of
    look_every: int = 500  # steps between looks at the held-out objects
    look: int = 24  # batches of such a look
    calibration: int = 100  # further batches, to calibrate confidence with

    @property
    def practised(self) -> tuple[str, ...]:
        return (*self.scenes, *(f"assembly-{k:03d}" for k in range(self.assemblies)))


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
    p_moved = carried(group.T_world_object[b] @ np.linalg.inv(group.T_world_object[a]), p_object)
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
        self.config = config
        scenes = (*config.practised, *config.held_out)
        paths = render_practice(folder, dict.fromkeys(scenes, config.groups), config.seed, workers)
        groups = {scene: load_groups(path) for scene, path in zip(scenes, paths, strict=True)}
        self.held_out = [group for scene in config.held_out for group in groups.pop(scene)]
        self.stock = [group for scene, some in groups.items() if not is_assembly(scene) for group in some]
        self.made_up = [group for scene, some in groups.items() if is_assembly(scene) for group in some]

    def batch(self, step: int, held_out: bool = False) -> list[Pair]:
        rng = np.random.default_rng([self.config.seed, step])
        pairs: list[Pair] = []
        points, table = self.config.points, self.config.table
        while len(pairs) < self.config.batch:
            made_up = not self.stock or (self.made_up and rng.uniform() < self.config.assembly_share)
            groups = self.held_out if held_out else self.made_up if made_up else self.stock
            a, b = rng.integers(VIEWS, size=2)  # a view may meet itself, cut differently
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
    about = out / "config.json"
    if about.exists() and read_json(about, MatcherConfig, "a configuration of a matcher") != config:
        raise UserError(f"{out} holds a matcher trained with another configuration; choose another --out")
    weights = out / "embedded.safetensors"
    if weights.exists():
        log.info(f"{weights} is finished; nothing to do")
        return weights
    write_json(about, asdict(config))
    practice = Practice(config, out / "practice", workers)
    torch.manual_seed(config.seed)
    network = MatchNetwork().train()
    network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.AdamW(
        network.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay, fused=True
    )
    start = resume(out / "state.safetensors", network, optimizer)
    metrics_file = out / "metrics.jsonl"
    forget_later_rows(metrics_file, "step", start)
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
            with appending(metrics_file) as write:
                write(json.dumps({"step": step + 1, "loss": loss.item(), **metrics}) + "\n")
            bar.set_postfix(loss=f"{loss.item():.2f}", px=f"{metrics['median_px']:.2f}")
        if (step + 1) % config.look_every == 0:
            with appending(metrics_file) as write:
                write(json.dumps({"step": step + 1, **look_at_held_out(network, practice)}) + "\n")
        if (step + 1) % save_every == 0:
            save_state(out / "state.safetensors", network, optimizer, step + 1)
    matcher = EmbeddedMatcher(network=network.eval())
    network.calibration.copy_(calibrate(matcher, practice.held_out, config))
    notes = {"practised": json.dumps(config.practised), "held_out": json.dumps(config.held_out)}
    half = {k: v.half() if v.is_floating_point() else v for k, v in network.state_dict().items()}
    write_arrays(weights, {k: v.numpy() for k, v in half.items()}, notes)
    log.info(f"wrote {weights} ({weights.stat().st_size / 1e6:.1f} MB)")
    return weights


def locate(network: MatchNetwork, pairs: list[Pair], rng: np.random.Generator) -> Located:
    crops = [photometric(c.rgb, rng) for c in (*(p.crop_a for p in pairs), *(p.crop_b for p in pairs))]
    both = network.encode(images(np.stack(crops)))
    a, b = (Pyramid(*(f[s] for f in (both.f2, both.f4, both.f8))) for s in halves(len(pairs)))
    return network.locate(a, b, torch.from_numpy(np.stack([p.uv_a for p in pairs])))


@torch.no_grad()
def look_at_held_out(network: MatchNetwork, practice: Practice) -> dict[str, float]:
    """Errors on objects that are never practised on: what choices are made by."""
    network.eval()
    miss, error = [], []
    for step in range(practice.config.look):
        pairs = practice.batch(step, held_out=True)
        located = locate(network, pairs, np.random.default_rng([practice.config.seed, step, 2]))
        for uv, pair in zip(located.uv.double().numpy(), pairs, strict=True):
            p, valid = lift_query(pair.frame_b, pair.crop_b, uv)
            asked = pair.visible & (np.arange(len(uv)) < practice.config.points)
            miss.append(np.linalg.norm(uv - pair.uv_b, axis=-1)[asked])
            error.append(1e3 * np.linalg.norm(p - pair.p_b, axis=-1)[asked & valid])
    network.train()
    px, mm = np.concatenate(miss), np.concatenate(error)
    errors = {"held_out_median_px": float(np.median(px)), "held_out_within_2px": float((px < 2).mean())}
    if len(mm):
        errors |= {"held_out_median_mm": float(np.median(mm)), "held_out_p95_mm": float(np.percentile(mm, 95))}
    return errors


@dataclass(frozen=True)
class Exam:
    """Sixteen points at a time, as deployment asks for them, between two views of objects held out."""

    matches: Matches  # (B, 16, ...), confidence in the locations
    doubt: Doubt
    error_mm: NDArray[np.float64]  # (B, 16)


def examine(matcher: Matcher, groups: list[Group], lifting: Lifting, batches: int, seed: int) -> Exam:
    """The whole path from frames to lifted points; each view meets another of its group."""
    rng = np.random.default_rng([seed, 3])
    parts, doubts, errors = [], [], []
    for _ in range(batches):
        chosen = [(groups[rng.integers(len(groups))], *rng.choice(VIEWS, 2, replace=False)) for _ in range(BATCH)]
        references = prepare_references(matcher, [group.frames[a] for group, a, _ in chosen])
        matches, doubt = measure(matcher, references, [group.frames[b] for group, _, b in chosen], lifting)
        poses = (np.stack([group.T_world_object[(a, b)[k]] for group, a, b in chosen]) for k in (0, 1))
        parts.append(matches)
        doubts.append(doubt)
        errors.append(1e3 * np.linalg.norm(residuals(matches, *poses), axis=-1))
    joined = Doubt(*(np.concatenate([getattr(d, name) for d in doubts]) for name in Doubt.__dataclass_fields__))
    return Exam(join_matches(*parts), joined, np.concatenate(errors))


def calibrate(matcher: Matcher, held_out: list[Group], config: MatcherConfig) -> Tensor:
    """The numbers (8,) that turn `trust_evidence` into the odds of being right, from objects held out."""
    evidence, right = [], []
    liftings: tuple[Lifting, ...] = ("object", "rigid")
    for lifting in liftings:
        exam = examine(matcher, held_out, lifting, config.calibration, config.seed)
        valid = exam.matches.valid
        evidence.append(trust_evidence(exam.matches.confidence, exam.doubt)[valid])
        right.append(exam.error_mm[valid] < config.right_mm)
    x, y = torch.from_numpy(np.concatenate(evidence)), torch.from_numpy(np.concatenate(right)).double()
    return logistic_regression(x, y)


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
    tensors = {f"network.{k}": v for k, v in network.state_dict().items()}
    for i, p in enumerate(network.parameters()):
        for key in ("exp_avg", "exp_avg_sq", "step"):
            tensors[f"optimizer.{i}.{key}"] = optimizer.state[p][key]
    write_arrays(path, {name: tensor.numpy() for name, tensor in tensors.items()}, {"step": step})


def resume(path: Path, network: MatchNetwork, optimizer: torch.optim.Optimizer) -> int:
    """Restores weights and optimiser; returns the step to continue with."""
    if not path.exists():
        return 0
    forms = {
        f"network.{k}": Form("float32" if v.is_floating_point() else "int64", tuple(v.shape))
        for k, v in network.state_dict().items()
    }
    for i, p in enumerate(network.parameters()):
        forms |= {f"optimizer.{i}.{k}": Form("float32", tuple(p.shape)) for k in ("exp_avg", "exp_avg_sq")}
        forms[f"optimizer.{i}.step"] = Form("float32", ())
    read = read_arrays(path, "delete it to begin again, or choose another --out", forms)
    tensors = {name: torch.from_numpy(array) for name, array in read.arrays.items()}
    prefix = "network."
    network.load_state_dict({k[len(prefix) :]: v for k, v in tensors.items() if k.startswith(prefix)})
    for i, p in enumerate(network.parameters()):
        moments = {k: tensors[f"optimizer.{i}.{k}"] for k in ("exp_avg", "exp_avg_sq")}
        # In the parameter's own memory order: the fused optimiser walks through both side by side.
        optimizer.state[p] = {k: torch.empty_like(p, requires_grad=False).copy_(v) for k, v in moments.items()}
        optimizer.state[p]["step"] = tensors[f"optimizer.{i}.step"].clone()
    return int(tensors["optimizer.0.step"].item())
