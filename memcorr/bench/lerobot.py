"""One chunk of ours against LeRobot's diffusion policy as it comes.

From a camera's frame to a plan, one thread each, taking turns. Ours, as shipped: match the frame with the (encoded)
reference, lift, relate, two DDIM steps. Theirs: ResNet-18 on two frames of the same size, 100 DDPM steps of its
default U-Net; random weights, which cost the same. It runs in the interpreter that MEMCORR_LEROBOT_PYTHON names, since
lerobot needs another Python. Theirs plans 64 actions and executes 32, ours 16 and 8: `note` says what
that makes per executed action.
"""

from __future__ import annotations

import atexit
import os
import subprocess
from collections.abc import Callable

import torch

from ..demos.store import demonstration_path, read_demonstration
from ..errors import UserError
from ..policy.policy import load_trained
from ..spec import SPEC, TASKS
from ..worlds.scenes import evaluation_scenes
from ..worlds.world import shared_world
from .rollouts import recorded
from .run import Case, Result

PYTHON = "MEMCORR_LEROBOT_PYTHON"
THEIRS = """
import sys
import torch
from lerobot.configs import FeatureType, PolicyFeature
from lerobot.policies.diffusion.configuration_diffusion import DiffusionConfig
from lerobot.policies.diffusion.modeling_diffusion import DiffusionPolicy

torch.set_num_threads(1)
torch.manual_seed(0)
size, state, action = map(int, sys.argv[1:])
config = DiffusionConfig(device="cpu", pretrained_backbone_weights=None)  # random: nothing is downloaded
config.input_features = {
    "observation.images.rgb": PolicyFeature(FeatureType.VISUAL, (3, size, size)),
    "observation.state": PolicyFeature(FeatureType.STATE, (state,)),
}
config.output_features = {"action": PolicyFeature(FeatureType.ACTION, (action,))}
policy = DiffusionPolicy(config).eval()
total = sum(p.numel() for p in policy.parameters())
batch = {"observation.images.rgb": torch.rand(1, 3, size, size), "observation.state": torch.rand(1, state)}
print("ready", total, config.horizon, config.n_action_steps, config.num_train_timesteps, flush=True)
for line in sys.stdin:
    policy.reset()
    with torch.inference_mode():
        policy.select_action(dict(batch))
    print("done", flush=True)
"""


def peer() -> tuple[Callable[[], str], list[int]]:
    """Asks LeRobot for a chunk; and its parameters, horizon, executed actions and denoising steps."""
    interpreter = os.environ.get(PYTHON, "")
    if not interpreter:
        raise UserError(f"{PYTHON} names no Python that has lerobot 0.6")
    environment = {**os.environ, "PYTHONPATH": "", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    sizes = map(str, (SPEC.image_size, SPEC.state_dim, SPEC.action_dim))
    try:
        process = subprocess.Popen(
            [interpreter, "-c", THEIRS, *sizes],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
    except OSError as problem:
        raise UserError(f"{PYTHON}={interpreter}: {problem.strerror}") from None
    atexit.register(process.kill)
    assert process.stdin and process.stdout and process.stderr
    ask, hear = process.stdin, process.stdout
    words = hear.readline().split()
    if words[:1] != ["ready"]:
        last = process.stderr.read().strip().splitlines()[-1:]
        raise UserError(f"{PYTHON}={interpreter} cannot run LeRobot's diffusion policy: {' '.join(last)}")

    def chunk() -> str:
        ask.write("chunk\n")
        ask.flush()
        return hear.readline()

    return chunk, [int(word) for word in words[1:]]


def lerobot_chunk() -> Case:
    theirs, (parameters, horizon, executed, steps) = peer()
    torch.set_num_threads(1)
    policy = load_trained("shipped", "cpu")
    follower = policy.follow(read_demonstration(demonstration_path(recorded(), 0, TASKS[0])))
    world = shared_world()
    world.reset(evaluation_scenes("combined")[0])
    frame = world.observe()
    own = sum(p.numel() for p in policy.network.parameters()) + sum(
        p.numel() for p in getattr(follower.reference.matcher, "network", torch.nn.Identity()).parameters()
    )

    def note(result: Result) -> str:
        ours_each, theirs_each = result.ours_ms / SPEC.executed, result.baseline_ms / executed
        return (
            f"{own / 1e6:.1f} M parameters against {parameters / 1e6:.0f} M; {SPEC.chunk} actions planned and "
            f"{SPEC.executed} executed against {horizon} and {executed}: per executed action "
            f"{theirs_each / ours_each:.1f} x"
        )

    name = f"LeRobot's diffusion policy as it comes, {parameters / 1e6:.0f} M random weights, {steps} DDPM steps"
    return Case(lambda: follower.plan(frame, 0), theirs, name, rounds=3, note=note)
