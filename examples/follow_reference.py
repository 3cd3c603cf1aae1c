"""The shipped policy on the package's own Gymnasium environment, following the reference you pick.

    python examples/follow_reference.py --show close --seed 7

Nothing tells the policy the task but the recording it is shown: show another one and it does the other thing.
"""

from __future__ import annotations

from pathlib import Path

import gymnasium
import tyro

import memcorr
from memcorr.demos.collect import collect
from memcorr.spec import Task
from memcorr.worlds.gym_env import frame_of


def main(show: Task = "close", seed: int = 7, references: Path = Path("demo/demos")) -> None:
    """Follow one recording in one scene.

    Args:
        show: Which recording the policy is shown.
        seed: Draws the scene: the door elsewhere, the camera turned.
        references: Store of demonstrations; its pair 0 is recorded first if need be.
    """
    if not references.exists():
        collect(references, pairs=1, workers=1)
    reference = memcorr.Store.open(references).demonstration(pair=0, task=show)
    follower = memcorr.load_policy().follow(reference)
    env = gymnasium.make("memcorr.worlds.gym_env:memcorr/Door-v0", task=show, condition="combined")
    observation, _ = env.reset(seed=seed)
    elapsed, over = 0, False
    while not over:
        plan = follower.plan(frame_of(observation), elapsed)
        print(
            f"step {elapsed:3}: frame {plan.phase} of the reference, {plan.valid_points} points matched, "
            f"confidence {plan.confidence:.2f}" + (", too few: planned without the reference" if plan.fallback else "")
        )
        for action in plan.actions[:8]:  # execute half of the chunk, then look again
            observation, _, terminated, truncated, info = env.step(action)
            elapsed += 1
            over = terminated or truncated
            if over:
                break
    print(f"{'done' if info['success'] else 'not done'} after {elapsed} steps: shown how to {show} the door")


if __name__ == "__main__":
    tyro.cli(main)
