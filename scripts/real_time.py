"""Real-time chunking in MemCorr's worlds, with LeRobot's own queue: successes, and how actions jump where chunks meet.

    python scripts/real_time.py STORE --scenes 5        # LeRobot's Python, with the plugin

Three ways to drive: the world waits for each plan; it does not, and the first actions of each plan are simply too late;
it does not, and each plan continues what is done meanwhile.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
from lerobot.configs import RTCAttentionSchedule
from lerobot.envs.utils import NEW_ROLLOUT_OPTION, preprocess_observation
from lerobot.policies.rtc.action_queue import ActionQueue
from lerobot.policies.rtc.configuration_rtc import RTCConfig
from lerobot.rollout.inference.rtc import _normalize_prev_actions_length
from lerobot_policy_memcorr.configuration_memcorr import MemCorrConfig
from lerobot_policy_memcorr.environment import MemCorrEnvConfig
from lerobot_policy_memcorr.modeling_memcorr import MemCorrPolicy

EXECUTED, HORIZON = 8, 13  # actions between two looks; what is left of a chunk when it is planned anew, and delay


def drive(env: Any, policy: MemCorrPolicy, scene: int, delay: int, continues: bool) -> tuple[bool, list[float]]:
    """Success, and the largest component by which the first action of each chunk differs from the one before."""
    queue = ActionQueue(RTCConfig(execution_horizon=HORIZON, prefix_attention_schedule=RTCAttentionSchedule.LINEAR))
    observation, _ = env.reset(seed=[scene], options={NEW_ROLLOUT_OPTION: True})
    policy.reset()
    jumps: list[float] = []
    previous, since, due, waiting = None, EXECUTED, 0, None
    while True:
        if since >= EXECUTED and waiting is None:
            batch = preprocess_observation(observation) | {"task": list(env.call("task_description"))}
            left = queue.get_left_over()
            late = 0 if left is None else delay
            if left is not None:
                left = _normalize_prev_actions_length(left, target_steps=HORIZON)
            held = {"inference_delay": late, "prev_chunk_left_over": left} if continues else {}
            waiting, due, index = policy.predict_action_chunk(batch, **held)[0], late, queue.get_action_index()
        if waiting is not None and due == 0:
            queue.merge(waiting.clone(), waiting.clone(), late, index)
            waiting, since, fresh = None, late, True
        else:
            fresh = False
        due -= waiting is not None
        action = queue.get()
        assert action is not None
        if fresh and previous is not None:
            jumps.append(float((action - previous)[:3].abs().max()))
        previous, since = action, since + 1
        observation, _, terminated, truncated, _ = env.step(action[None].numpy())
        if terminated[0] or truncated[0]:
            return bool(terminated[0]), jumps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store")
    parser.add_argument("--scenes", type=int, default=5)
    parser.add_argument("--delay", type=int, default=3, help="control steps that planning takes")
    parser.add_argument("--condition", default="combined")
    given = parser.parse_args()
    policy = MemCorrPolicy(MemCorrConfig(references=given.store, device="cpu", slots=1)).eval()
    suites = MemCorrEnvConfig(condition=given.condition, look_every=1).create_envs(1)
    for words, delay, continues in (
        ("it waits", 0, False),
        (f"{given.delay} steps late", given.delay, False),
        (f"{given.delay} steps late, continued", given.delay, True),
    ):
        driven = [
            drive(env, policy, scene, delay, continues)
            for env in next(iter(suites.values())).values()
            for scene in range(given.scenes)
        ]
        jumps = np.concatenate([found for _, found in driven])
        print(
            f"{words:28} {sum(done for done, _ in driven)}/{len(driven)} done; where chunks meet actions jump by "
            f"{jumps.mean():.3f} in the mean, p95 {np.percentile(jumps, 95):.3f}, of {len(jumps)}",
            flush=True,
        )


if __name__ == "__main__":
    main()
