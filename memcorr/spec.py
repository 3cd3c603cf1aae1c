"""Every constant of the paper, once, and the few types that everything shares.

Modules take their horizons, counts, ranges and rates from `SPEC`; nothing else in the package
spells these numbers out. What the paper leaves open (our camera, expert, matcher) stays with its owner.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from .errors import UserError

Array = NDArray[np.float64]

# The paper's world is the door; the others are ours. Each has two tasks that undo each other.
Task = str
DOOR = "door"
WORLD_TASKS: dict[str, tuple[Task, Task]] = {
    DOOR: ("open", "close"),
    "drawer": ("open", "close"),
    "window": ("open", "close"),
    "faucet": ("open", "close"),
    "lock": ("unlock", "lock"),
    "handle": ("pull", "press"),
    "handle-side": ("pull", "press"),
    "plate": ("slide", "back"),
    "plate-side": ("slide", "back"),
    "coffee": ("push", "pull"),
}
TASKS = WORLD_TASKS[DOOR]
STOCK_STEPS = 500  # of an episode there, Meta-World's own horizon
STOCK = "metaworld/"  # any of Meta-World's own tasks is a world, too: metaworld/button-press
# One policy for many objects learns from these; it never sees the others, and nothing is chosen on them. The lock is
# looked at once, at the very end.
TRAINED_WORLDS = (DOOR, "drawer", "handle", "handle-side", "plate", "plate-side", "coffee")
HELD_OUT_WORLDS, LAST_WORLDS = ("window", "faucet"), ("lock",)

# "Training and test distributions"; the command line calls them conditions.
TestSet = Literal["validation", "boundary", "extreme", "camera", "combined", "disturbed"]
TEST_SETS: tuple[TestSet, ...] = get_args(TestSet)

# How located points become points in space (correspondence/lift); "paper" is to the letter.
Lifting = Literal["rigid", "object", "paper"]
# How noise grows with the timestep: the paper's, and the squared cosine of Diffusion Policy, which ends in noise alone.
Schedule = Literal["linear", "cosine"]
StateKind = Literal["absolute", "relative"]  # the robot's own state: where it is, or only how it is
# What a network is asked for: the noise (the paper), or the velocity sqrt(alpha_bar) eps - sqrt(1 - alpha_bar) x_0,
# which tells the action also where there is nothing but noise.
Prediction = Literal["noise", "velocity"]
PhaseSource = Literal["elapsed", "seen"]  # which frame of the reference is now: by the clock, or by what is seen
TieBreak = Literal["elapsed", "first"]  # between reference frames with the same joint (demos/phase)
Band = tuple[float, float]


def stock_task(world: str) -> Task:
    """The task of one of Meta-World's own, "metaworld/push"; '' for any other world."""
    return world.removeprefix(STOCK) if world.startswith(STOCK) else ""


def tasks_of(world: str) -> tuple[Task, ...]:
    """Of a simulated world: two that undo each other, or the one of Meta-World's; of any other world none is known."""
    return (stock_task(world),) if stock_task(world) else WORLD_TASKS.get(world, ())


def opposite(task: Task, world: str = DOOR) -> Task:
    """The other task of the world."""
    if len(tasks := tasks_of(world)) < 2:
        raise UserError(f"{world} has one task, so there is no opposite of it")
    return tasks[1] if task == tasks[0] else tasks[0]


@dataclass(frozen=True)
class Spec:
    """Sections "Method" and "Experimental Protocol", and the appendices."""

    # Observation
    image_size: int = 128  # pixels, square
    state_dim: int = 9  # end effector and two fingertips, metres, world frame
    action_dim: int = 4  # displacement in units of 1 cm per step, gripper command; all in [-1, 1]

    # Demonstrations
    pairs: int = 100
    train_pairs: int = 80  # pairs 0-79 train, 80-99 validate
    episode_steps: int = 200
    door_start: float = -0.7854  # rad
    success_radius: float = 0.08  # metres

    # Correspondence, lifting and fallback
    crop_padding: int = 12  # pixels around the tight box of the mask
    points: int = 16
    min_valid: int = 4  # fewer valid points than this empty the whole condition
    cache_rows: int = 10_000
    cache_seed: int = 43001

    # Policy
    chunk: int = 16  # predicted actions
    executed: int = 8  # executed before the next replan
    future_offsets: tuple[int, ...] = (0, 5, 10, 15)  # tau_l, frames of the reference
    token_fields: int = 18
    visual_size: int = 64  # pixels of what the visual policies see
    visual_depth_limit: float = 5.0  # standardised depth is clipped to +-5
    state_std_floor: float = 1e-3
    action_std_floor: float = 5e-2

    # Diffusion
    diffusion_steps: int = 100
    beta_first: float = 1e-4
    beta_last: float = 2e-2
    ddim_steps: int = 20
    clean_limit: float = 5.0  # predicted clean actions are clipped to +-5
    guidance: float = 1.5
    paired_timesteps: tuple[int, int] = (80, 99)  # inclusive: high noise, where z_t says least about the clean action

    # Optimisation
    seeds: tuple[int, ...] = (42, 43, 44)
    batch: int = 128
    updates: tuple[int, int] = (20_000, 10_000)  # stage one, stage two
    learning_rate: tuple[float, float] = (3e-4, 5e-5)
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    weight_decay: float = 1e-4
    gradient_norm: float = 10.0
    ema: float = 0.999
    condition_dropout: float = 0.1  # on standard updates only

    # Table "Training and test distributions": bands of the normalised door position u
    band_train: Band = (0.2, 0.8)
    band_boundary: tuple[Band, Band] = ((0.05, 0.15), (0.85, 0.95))
    band_extreme: tuple[Band, Band] = ((0.0, 0.05), (0.95, 1.0))
    camera_shift_deg: float = 15.0
    door_x: Band = (0.0, 0.10)  # metres, u_x = 0 and 1
    door_y: Band = (0.85, 0.95)  # metres, u_y = 0 and 1
    door_z: float = 0.15
    boundary_scenes: int = 50
    shifted_scenes: int = 25  # of each stronger shift

    # Evaluation statistics
    resamples: int = 100_000

    @property
    def tokens(self) -> int:
        return self.points * len(self.future_offsets)

    @property
    def last_anchor(self) -> int:
        """Last frame (184) whose action window and largest future offset stay in bounds."""
        return self.episode_steps - max(self.chunk, self.future_offsets[-1] + 1)

    @property
    def windows_per_episode(self) -> int:
        return self.last_anchor + 1


SPEC = Spec()

# RoMa v2 as published, millimetres: over all valid points of the authors' cache, and the mean over decisions.
PUBLISHED_CACHE_MM = {"median_mm": 3.72, "mean_mm": 7.95, "p95_mm": 20.03, "p99_mm": 79.62}
PUBLISHED_CACHE_POINTS = 149_063
PUBLISHED_RESIDUAL_MM = 20.034  # the 95th percentile, exactly: residuals up to here are resampled in stage two
PUBLISHED_ONLINE_MM: dict[str, float] = {"boundary": 11.78, "combined": 43.66}


def steps_of(world: str) -> int:
    """Of an episode: the paper's 200, in a task of Meta-World its 500."""
    return STOCK_STEPS if stock_task(world) else SPEC.episode_steps
