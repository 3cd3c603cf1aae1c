"""Rollouts as a stranger's robot would have them: another camera, references without truth, masks that are carried."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest

from memcorr.demos.store import LAYOUT, Store, demonstration_path, write_demonstration
from memcorr.errors import UserError
from memcorr.evaluation.evaluate import evaluate, usual
from memcorr.evaluation.intervention import Intervention
from memcorr.evaluation.sensors import calibrated_view
from memcorr.files import write_json
from memcorr.frames import Camera, look_at
from memcorr.worlds.expert import act
from memcorr.worlds.scenes import demonstration_scenes
from memcorr.worlds.world import View, World

CAMERA = Camera.from_fovy(36.0, (120, 160), look_at(np.array([0.92, 0.34, 0.95]), np.array([-0.01, 0.64, 0.13])))


@pytest.fixture(scope="module")
def view(tmp_path_factory: pytest.TempPathFactory) -> View:
    """Through the file that a user has."""
    path = tmp_path_factory.mktemp("camera") / "calibration.json"
    K = CAMERA.K.copy()
    K[:2, 2] -= 0.5
    content = {"K": K.tolist(), "image_size": [160, 120], "pixel_centre": 0, "T_world_cam": CAMERA.T_world_cam.tolist()}
    path.write_text(json.dumps(content))
    found = calibrated_view(path)
    assert found.size == (120, 160) and np.isclose(found.fovy, 36.0)
    return found


@pytest.fixture(scope="module")
def references(view: View, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Opening and closing, seen by that camera, and nothing else known of it."""
    root, world = tmp_path_factory.mktemp("seen"), World("door", view)
    for task in world.pair.tasks:
        world.reset(demonstration_scenes()[0])
        frames, actions = [], []
        for _ in range(120):
            frames.append(world.observe())
            actions.append(act(world, task))
            world.step(actions[-1])
        about = {"pair": 0, "task": task, "u": (math.nan, math.nan), "world": "my-door"}
        write_demonstration(demonstration_path(root, 0, task), frames, np.stack(actions), None, None, **about)  # type: ignore[arg-type]
    write_json(root / "collection.json", {"layout": LAYOUT, "pairs": 1, "world": "my-door", "tasks": ["open", "close"]})
    return root


@pytest.mark.long
def test_a_reference_is_followed_through_another_camera_with_carried_masks(
    view: View, references: Path, tmp_path: Path
) -> None:
    shown = usual("servo", Intervention(masks="carried"))
    asked = {"conditions": ["boundary"], "shown": shown, "scenes": [0], "tasks": ["open"], "data": references}
    (row,) = evaluate("servo", tmp_path, view=view, **asked)  # type: ignore[arg-type]
    assert row.success and row.camera and row.shown.masks == "carried"
    assert row.mean_match_error_mm is None  # nobody knows where the reference's door was
    (again,) = evaluate("servo", tmp_path, view=view, **asked)  # type: ignore[arg-type]
    assert dataclasses.replace(again, seconds=0.0) == dataclasses.replace(row, seconds=0.0)


def test_recordings_of_other_tasks_and_masks_nobody_carries_are_refused(
    store: Store, references: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="holds no recording of the task"):
        evaluate("servo", tmp_path, world="lock", data=references, shown=Intervention())
    for policy, shown in (
        ("expert", Intervention()),
        ("replay", Intervention()),
        ("servo", Intervention(matcher="ground-truth")),
    ):
        with pytest.raises(UserError, match="masks are carried"):
            evaluate(policy, tmp_path, data=store.root, shown=dataclasses.replace(shown, masks="carried"))
