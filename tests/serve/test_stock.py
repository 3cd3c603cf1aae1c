"""One recording of a task of Meta-World's own, followed over the wire in another placement."""

from __future__ import annotations

from pathlib import Path

import pytest

from memcorr.spec import SPEC
from memcorr.worlds.gym_env import observation_of
from memcorr.worlds.scenes import evaluation_scenes
from memcorr.worlds.stock import StockWorld
from memcorr.worlds.world import shared_world
from tests.serve.conftest import ROOT, serving

NAME = "metaworld/button-press"


@pytest.mark.long
def test_the_served_servo_presses_a_button_that_stands_elsewhere(tmp_path: Path) -> None:
    recording = ROOT / "results/references" / NAME
    world = shared_world(NAME)
    assert isinstance(world, StockWorld)
    world.reset(evaluation_scenes("validation", seed=7, world=NAME)[0])
    with (
        serving(tmp_path / "log", "servo", "--references", str(recording), "--port", "0") as server,
        server.client() as client,
    ):
        client.infer(reset=True, reference="pair-000-button-press")
        for _ in range(40):
            answer = client.infer(**observation_of(world.observe()))
            assert not answer["fallback"], answer["reason"]
            for action in answer["actions"][: SPEC.executed]:
                world.step(action)
                if world.success("button-press"):
                    return
    raise AssertionError("the button was not pressed")
