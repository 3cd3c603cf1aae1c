"""`memcorr bench`: every speed figure is a ratio against a named baseline of the same run.

Ours and the baseline take turns, so that whatever else the machine does hits both; medians.
"""

from __future__ import annotations

import json
import logging
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module

import numpy as np

from ..errors import UserError
from ..spec import SPEC

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Case:
    ours: Callable[[], object]
    baseline: Callable[[], object]
    baseline_name: str
    rounds: int = 30
    ours_items: int = 1  # that one call deals with; times are per item
    baseline_items: int = 1
    note: Callable[[Result], str] | None = None  # a remark for people, after the measurement


@dataclass(frozen=True)
class Result:
    name: str
    ours_ms: float
    baseline: str
    baseline_ms: float
    ratio: float


def observe() -> Case:
    """One observation (RGB, depth, mask) against three passes of the stock renderer."""
    from ..worlds.gl import mujoco
    from ..worlds.scenes import demonstration_scenes
    from ..worlds.world import CAMERA_NAME, World, build_model

    scene, world, stock_world = demonstration_scenes()[0], World(), World()
    stock_world.model = build_model(world.pair.scene)  # untouched by our renderer's settings
    for w in (world, stock_world):
        w.reset(scene)
    stock = mujoco.Renderer(stock_world.model, SPEC.image_size, SPEC.image_size)

    def three_passes() -> None:
        stock.update_scene(stock_world.data, CAMERA_NAME)
        stock.render()
        stock.enable_depth_rendering()
        stock.render()
        stock.enable_segmentation_rendering()
        stock.render()
        stock.disable_segmentation_rendering()

    return Case(world.observe, three_passes, "three passes of mujoco.Renderer, stock settings")


def step() -> Case:
    """One control step against Meta-World's own."""
    from metaworld.envs.sawyer_door_v3 import SawyerDoorEnvV3

    from ..worlds.scenes import demonstration_scenes
    from ..worlds.world import World

    world, env = World(), SawyerDoorEnvV3()
    world.reset(demonstration_scenes()[0])
    env._set_task_called = env._freeze_rand_vec = True
    env._partially_observable = False
    env._last_rand_vec, env.hand_init_pos = world.place, np.array(world.pair.hand)
    env.reset()
    env.max_path_length = 10**9
    action = np.random.default_rng(0).uniform(-0.3, 0.3, 4)
    theirs = f"Meta-World's {type(env).__name__}.step"
    return Case(lambda: world.step(action), lambda: env.step(action), theirs, rounds=1000)


def match() -> Case:
    """One query against an encoded reference, embedded matcher against RoMa v2 turbo as published."""
    import torch

    from ..correspondence.matcher import load_matcher
    from ..correspondence.romav2 import random_romav2

    torch.set_num_threads(1)
    roma = random_romav2()
    rng = np.random.default_rng(0)
    reference, query = rng.integers(0, 256, (2, 1, 128, 128, 3), dtype=np.uint8)
    matcher = load_matcher("embedded")
    encoded = matcher.encode(reference)
    pixels = rng.uniform(0, 127, (1, 16, 2))

    def published() -> None:
        with torch.inference_mode():
            roma.match(reference[0], query[0])

    return Case(
        lambda: matcher.match(encoded, pixels, query),
        published,
        "RoMa v2 turbo as published, float32, random weights, one thread",
        rounds=3,
    )


CASES: dict[str, tuple[str, str, tuple[int, ...]]] = {  # by name: module beside this one, function, arguments
    "observe": ("run", "observe", ()),
    "step": ("run", "step", ()),
    "match": ("run", "match", ()),
    "match:xfeat": ("networks", "match_xfeat", ()),
    "take-up": ("rollouts", "take_up", ()),
    "train-step": ("networks", "train_step", ()),
    "sample-1": ("networks", "sample", (1,)),
    "sample-32": ("networks", "sample", (32,)),
    "load-policy": ("readers", "load_policy", ()),
    "load-cache": ("readers", "load_cache", ()),
    "load-episodes": ("readers", "load_episodes", ()),
    "replan": ("rollouts", "replan", ()),  # also replan:POLICY
    "rollouts": ("rollouts", "rollouts", ()),
    "lerobot-chunk": ("lerobot", "lerobot_chunk", ()),
}


def find_case(name: str) -> Case:
    """Imports what it measures."""
    what, _, policy = name.partition(":")
    module, function, arguments = CASES[what]
    make = getattr(import_module(f".{module}", __package__), function)
    return make(*arguments, *([policy] if policy else []))


def milliseconds(f: Callable[[], object], items: int = 1) -> float:
    start = time.perf_counter()
    f()
    return 1e3 * (time.perf_counter() - start) / items


def measure(name: str, case: Case) -> Result:
    case.ours(), case.baseline()  # warm up
    times = [
        (milliseconds(case.ours, case.ours_items), milliseconds(case.baseline, case.baseline_items))
        for _ in range(case.rounds)
    ]
    mine, baseline = (statistics.median(column) for column in zip(*times, strict=True))
    return Result(name, mine, case.baseline_name, baseline, baseline / mine)


def run(names: Sequence[str], say: Callable[[str], None] | None = None) -> list[Result]:
    """Measures the named cases, or all; `say` hears about each as it is done."""
    chosen = list(names) or list(CASES)
    for name in chosen:
        if name not in CASES and not name.startswith("replan:"):
            raise UserError(f"unknown benchmark {name!r}: choose from {', '.join(CASES)}, or replan:POLICY")
    results = []
    for name in chosen:
        try:
            case = find_case(name)
        except UserError as problem:
            if names:
                raise
            log.warning(f"{name:10} not measured: {problem}")
            continue
        results.append(result := measure(name, case))
        if say:
            say(
                f"{name:10} {result.ours_ms:9.3f} ms   {result.ratio:6.1f} x faster than "
                f"{result.baseline} ({result.baseline_ms:.3f} ms)"
            )
            if case.note:
                say(f"{'':10} {case.note(result)}")
    return results


def as_json(results: Sequence[Result]) -> str:
    """A list of {name, ours_ms, baseline, baseline_ms, ratio}."""
    return json.dumps([asdict(r) for r in results], indent=2)
