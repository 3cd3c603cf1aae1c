"""What the LeRobot policy remembers of an episode, with the real matcher and network.

LeRobot needs another Python than this one. Of what it is, `test_lerobot_plugin.py` asks it itself; here its base
classes are empty ones, and all that is under test is this repository's.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from memcorr.demos.store import Store
from memcorr.following.step import Observation, Query
from memcorr.frames import Frame
from memcorr.policy.checkpoint import Design
from memcorr.policy.plan import initial_noise

PLUGIN = Path(__file__).parents[2] / "lerobot_policy_memcorr" / "lerobot_policy_memcorr"


class BaseConfig:
    input_features = output_features = None
    image_features = ("observation.images.rgb",)

    @classmethod
    def register_subclass(cls, name: str) -> Callable[[type], type]:
        return lambda config: config

    def __post_init__(self) -> None: ...


class BasePolicy(torch.nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    anything = types.SimpleNamespace(VISUAL=0, STATE=1, ACTION=2, ENV=3, IDENTITY=4)
    contents: dict[str, dict[str, Any]] = {
        "lerobot": {},
        "lerobot.configs": {
            "FeatureType": anything,
            "NormalizationMode": anything,
            "PolicyFeature": lambda *a: a,
            "PreTrainedConfig": BaseConfig,
        },
        "lerobot.optim": {"AdamWConfig": dict},
        "lerobot.policies": {"PreTrainedPolicy": BasePolicy},
        "lerobot.utils": {},
        "lerobot.utils.constants": {"ACTION": "action", "OBS_STATE": "observation.state"},
    }
    for name, content in contents.items():
        module = types.ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    package = types.ModuleType("memcorr_plugin")
    package.__path__ = [str(PLUGIN)]
    monkeypatch.setitem(sys.modules, "memcorr_plugin", package)
    found = dict[str, Any]()
    for name in ("configuration_memcorr", "modeling_memcorr"):
        monkeypatch.delitem(sys.modules, f"memcorr_plugin.{name}", raising=False)
        found |= vars(importlib.import_module(f"memcorr_plugin.{name}"))
    return types.SimpleNamespace(**{k: found[k] for k in ("MemCorrConfig", "MemCorrPolicy")})


@pytest.fixture
def policy(plugin: types.SimpleNamespace, store: Store) -> Any:
    """Its phase is by what is seen, which is what has to be remembered."""
    design = dataclasses.replace(Design(), phase="seen")
    config = plugin.MemCorrConfig(references=str(store.root), design=json.dumps(dataclasses.asdict(design)), slots=2)
    return plugin.MemCorrPolicy(config)


def batch(frames: list[Frame], tasks: list[str], elapsed: list[int] | None) -> dict[str, Any]:
    def stacked(*arrays: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.stack(arrays))

    found = {
        "observation.images.rgb": stacked(*(f.rgb for f in frames)).permute(0, 3, 1, 2),
        "observation.images.depth": stacked(*(f.depth for f in frames))[:, None],
        "observation.images.mask": stacked(*(f.mask for f in frames))[:, None],
        "observation.camera.K": stacked(*(f.camera.K.ravel() for f in frames)),
        "observation.camera.T_world_cam": stacked(*(f.camera.T_world_cam.ravel() for f in frames)),
        "observation.gripper": stacked(*(f.gripper for f in frames)),
        "observation.state": stacked(*(f.robot_state for f in frames)),
        "task": tasks,
    }
    return found if elapsed is None else {**found, "observation.elapsed": torch.tensor(elapsed)[:, None]}


def test_a_plan_never_has_more_than_its_sixteen_actions(plugin: types.SimpleNamespace) -> None:
    for wrong in ({"n_action_steps": 17}, {"n_action_steps": 0}, {"n_action_steps": 20, "horizon": 32}):
        with pytest.raises(ValueError, match="a plan has 16 actions"):
            plugin.MemCorrConfig(**wrong)
    assert plugin.MemCorrConfig(n_action_steps=16).n_action_steps == 16


def test_an_episode_is_remembered_per_environment_and_reference_and_forgotten_at_its_start(
    policy: Any, store: Store
) -> None:
    """Two environments; the first is told nothing when its second episode begins, and its task only later."""
    recorded = store.demonstration(1, "close")
    first, later, other = recorded.frame(0), recorded.frame(16), store.demonstration(1, "open").frame(0)
    policy.predict_action_chunk(batch([first, other], ["close", "open"], [0, 0]))
    of_first, of_other = (dict(policy._episodes[i].progress) for i in range(2))
    assert [len(of_first), len(of_other)] == [1, 1] and not set(of_first) & set(of_other)
    policy.predict_action_chunk(batch([other, other], ["", "open"], [0, 8]))
    assert not policy._episodes[0].progress and policy._episodes[1].progress[policy.reference("open")].elapsed == 8
    chunk = policy.predict_action_chunk(batch([later, other], ["close", "open"], [8, 16]))
    looks = [Query(Observation(later), policy.reference("close"), 8, None, Observation(other))]
    (right,) = policy.planner.plan(looks, [initial_noise(0, 0, 2)])
    assert np.array_equal(chunk[0].numpy(), right.actions)
    assert policy._episodes[0].progress[policy.reference("close")].phase == right.progress.phase


def test_every_chunk_counts_where_the_environment_does_not(policy: Any, store: Store) -> None:
    frame = store.demonstration(1, "close").frame(0)
    for _ in range(2):
        policy.predict_action_chunk(batch([frame], ["close"], None))
    assert policy._episodes[0].progress[policy.reference("close")].elapsed == 8
    for _ in range(9):  # the ninth looks again
        policy.select_action(batch([frame], ["close"], None))
    assert policy._episodes[0].progress[policy.reference("close")].elapsed == 24
    policy.reset()
    policy.predict_action_chunk(batch([frame], ["close"], None))
    assert policy._episodes[0].progress[policy.reference("close")].elapsed == 0
