"""Run by LeRobot's own Python (`test_lerobot_plugin.py`): what LeRobot asks of a policy and of an environment's file.

python inside_lerobot.py STORE ENV_FILE
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lerobot.configs import RTCAttentionSchedule
from lerobot.envs.utils import _call_make_env, _import_hub_module, _normalize_hub_result, preprocess_observation
from lerobot.policies.rtc.action_queue import ActionQueue
from lerobot.policies.rtc.configuration_rtc import RTCConfig
from lerobot.rollout.inference.rtc import _normalize_prev_actions_length, supports_rtc_inference
from lerobot_policy_memcorr.configuration_memcorr import MemCorrConfig, unpacked
from lerobot_policy_memcorr.modeling_memcorr import MemCorrPolicy, frames

Batch = dict[str, Any]


def an_environment_comes_from_one_file(env_file: Path) -> tuple[Any, Batch]:
    module = _import_hub_module(str(env_file), "somebody/memcorr")
    suites = _normalize_hub_result(_call_make_env(module, n_envs=1, use_async_envs=False, cfg=None))
    (suite, tasks), *_ = suites.items()
    assert suite == "door" and list(tasks) == [0, 1], suites
    env = tasks[1]
    observation, _ = env.reset(seed=[0])
    batch: Batch = preprocess_observation(observation)
    batch["task"] = list(env.call("task_description"))
    assert batch["task"] == ["close"]
    return env, batch


def actions_under_way_are_continued(policy: MemCorrPolicy, seen: Batch) -> None:
    """As LeRobot's thread does it: a queue, what is left of it, filled up with zeros."""
    assert supports_rtc_inference(policy)
    queue = ActionQueue(RTCConfig(execution_horizon=10, prefix_attention_schedule=RTCAttentionSchedule.LINEAR))
    seen = {key: value for key, value in seen.items() if key != "observation.elapsed"}  # no robot knows it
    first = policy.predict_action_chunk(seen, inference_delay=0, prev_chunk_left_over=None)
    queue.merge(first[0].clone(), first[0].clone(), 0, 0)
    for _ in range(8):
        queue.get()
    left = queue.get_left_over()
    assert left is not None
    delay = 3
    given = _normalize_prev_actions_length(left, target_steps=10)  # two rows of zeros
    second = policy.predict_action_chunk(seen, inference_delay=delay, prev_chunk_left_over=given)
    assert torch.equal(second[0, :delay], first[0, 8 : 8 + delay]) and policy._planned.elapsed == 8
    assert not torch.equal(second[0, delay : 8 + delay], first[0, 8 + delay :][:8])
    index = queue.get_action_index()
    for _ in range(delay):
        queue.get()
    queue.merge(second[0].clone(), second[0].clone(), delay, index)
    third = policy.predict_action_chunk(seen, inference_delay=0, prev_chunk_left_over=queue.get_left_over())
    assert policy._planned.elapsed == 8 + delay and torch.isfinite(third).all()
    longer = torch.zeros(10, 4, dtype=third.dtype)  # one action is left, and planning took longer than it lasted
    longer[:1] = third[0, 15:]
    late = policy.predict_action_chunk(seen, inference_delay=5, prev_chunk_left_over=longer)
    assert torch.equal(late[0, :1], third[0, 15:]) and late[0, 1:5].abs().sum() > 0
    policy.reset()


def an_exchanged_reference_drops_what_was_planned(policy: MemCorrPolicy, seen: Batch) -> None:
    other = {**seen, "task": ["open"]}
    policy.select_action(seen)
    assert len(policy._queue) == 7
    policy.select_action(seen)
    assert len(policy._queue) == 6
    policy.select_action(other)
    assert len(policy._queue) == 7  # planned anew, for the other reference
    unclocked = {key: value for key, value in seen.items() if key != "observation.elapsed"}
    policy.reset()
    for _ in range(3):
        policy.select_action(unclocked)
    policy.drop_queued_actions()
    assert not policy._queue and policy._episodes
    policy.select_action(unclocked)
    assert policy._planned.elapsed == 3 and len(policy._queue) == 7
    policy.reset()


def depth_and_intrinsics_have_lerobots_names(seen: Batch) -> None:
    (ours,) = frames(seen)
    theirs = {k: v for k, v in seen.items() if k not in ("observation.images.depth", "observation.camera.K")}
    millimetres = (1000 * seen["observation.images.depth"]).round().to(torch.int32).numpy().astype(np.uint16)
    theirs["observation.images.rgb_depth"] = torch.from_numpy(millimetres)
    theirs["observation.intrinsics"] = {"rgb": seen["observation.camera.K"].reshape(-1, 3, 3)}
    (found,) = frames(theirs)
    assert np.abs(found.depth - ours.depth).max() <= 0.00051 and np.array_equal(found.camera.K, ours.camera.K)
    theirs["observation.images.rgb_depth"] = torch.from_numpy(np.moveaxis(millimetres, 1, -1))  # (B, H, W, 1)
    assert np.array_equal(frames(theirs)[0].depth, found.depth)


def rows_have_losses_of_their_own(policy: MemCorrPolicy, seen: Batch) -> None:
    row = {key: value for key, value in seen.items() if key not in ("observation.elapsed", "observation.noise_key")}
    twice = {k: torch.cat([v, v]) if torch.is_tensor(v) else [*v, *v] for k, v in row.items()}
    twice |= {"action": torch.zeros(2, 16, 4), "timestamp": torch.tensor([0.0, 0.5])}
    torch.manual_seed(0)
    losses, _ = policy.forward(twice, reduction="none")
    torch.manual_seed(0)
    loss, _ = policy.forward(twice)
    assert losses.shape == (2,) and losses[0] != losses[1] and torch.isclose(losses.mean(), loss)


if __name__ == "__main__":
    env, packed = an_environment_comes_from_one_file(Path(sys.argv[2]))
    policy = MemCorrPolicy(MemCorrConfig(references=sys.argv[1], device="cpu", slots=1)).eval()
    chunk = policy.predict_action_chunk(packed)  # nested, as it comes out of an environment without processors
    policy.reset()
    seen = unpacked(packed)
    assert torch.equal(policy.predict_action_chunk(seen), chunk) and chunk.shape == (1, 16, 4)
    policy.reset()
    actions_under_way_are_continued(policy, seen)
    an_exchanged_reference_drops_what_was_planned(policy, seen)
    depth_and_intrinsics_have_lerobots_names(seen)
    rows_have_losses_of_their_own(policy, seen)
    env.close()
    print("all is as LeRobot asks for it")
