"""`memcorr data check` leaves good data alone: ten worlds, cameras turned, depth as a real camera has it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from memcorr.demos.store import Store, read_demonstration, write_demonstration
from memcorr.evaluation.sensors import noisy, with_holes
from memcorr.recordings.check.report import examine
from memcorr.spec import WORLD_TASKS
from memcorr.worlds.expert import act
from memcorr.worlds.scenes import demonstration_scenes
from memcorr.worlds.world import World

REFERENCES = Path(__file__).parents[2] / "results/references"


@pytest.mark.parametrize("task", sorted(path.name for path in (REFERENCES / "metaworld").iterdir()))
def test_no_false_alarm_in_a_stock_task(task: str) -> None:
    """Open fingers at the place of the gripper, a hand behind a wall, and recordings as people make them."""
    for demonstration in Store.open(REFERENCES / "metaworld" / task).present():
        found = examine(demonstration)
        assert not found, [f.line() for f in found]


@pytest.mark.long
@pytest.mark.parametrize("world", WORLD_TASKS)
def test_no_false_alarm_in_any_world(world: str, tmp_path: Path) -> None:
    """As it is, with the camera turned, and with the depth of a real camera: noise, and a tenth of it missing."""
    simulated, rng = World(world), np.random.default_rng(0)
    for task, azimuth in zip(WORLD_TASKS[world], (0.0, 20.0), strict=True):
        scene = replace(demonstration_scenes(pairs=1, world=world)[0], camera_azimuth_deg=azimuth)
        simulated.reset(scene)
        seen, done = [], []
        for _ in range(120):
            seen.append(simulated.observe())
            done.append(act(simulated, task))
            simulated.step(done[-1])
        real = [replace(f, depth=with_holes(noisy(f.depth, 1.0, rng), 0.1, rng)) for f in seen]
        for number, version in enumerate((seen, real)):
            path = tmp_path / f"pair-{number:03d}-{task}.h5"
            write_demonstration(
                path, version, np.stack(done), None, None, pair=number, task=task, u=scene.u, world=world
            )
            found = examine(read_demonstration(path))
            assert not found, [f.line() for f in found]
    simulated.renderer.close()
