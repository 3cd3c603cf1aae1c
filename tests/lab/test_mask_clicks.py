"""A mask by clicking in the lab: shown, then used by the policy's slot in place of the simulator's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import cv2
import numpy as np
import pytest

from memcorr.demos.store import Store
from memcorr.errors import UserError
from memcorr.following.masks import overlap
from memcorr.frames import Frame

pytest.importorskip("viser", reason="memcorr[lab] is not installed")

import viser

from memcorr.lab.clicks import met
from memcorr.lab.lab import Lab
from memcorr.lab.panel import Order

EYE = np.array([0.3, -0.6, 0.9])  # of whoever clicks


@pytest.fixture
def lab(store: Store, tmp_path: Path) -> Iterator[Lab]:
    made = Lab("shipped", "embedded", store.root, None, tmp_path)
    server = viser.ViserServer("127.0.0.1", 0, verbose=False)
    made.begin(server)
    yield made
    server.stop()


def towards(frame: Frame, column: int, row: int) -> tuple[np.ndarray, np.ndarray]:
    """The ray of a click on that pixel's surface, from the camera's own place."""
    at = frame.camera.lift(np.array([[column, row]]), frame.depth[[row], [column]])[0]
    origin = frame.camera.T_world_cam[:3, 3]
    return origin, at - origin


def innermost(mask: np.ndarray) -> tuple[int, int]:
    depth = cv2.distanceTransform(np.pad(mask, 1).astype(np.uint8), cv2.DIST_L2, 5)[1:-1, 1:-1]
    row, column = np.unravel_index(depth.argmax(), depth.shape)
    return int(column), int(row)


def test_a_click_meets_the_surface_that_the_camera_sees(lab: Lab) -> None:
    frame = lab.episode.see()[0].frame
    for column, row in (innermost(frame.mask), (20, 100), (100, 40)):
        found = met(towards(frame, column, row), frame)
        assert found is not None and np.abs(np.subtract(found, (column, row))).max() <= 1
    assert met((EYE, np.array([0.0, 0.0, 1.0])), frame) is None  # into the sky


def test_the_mask_is_shown_before_the_policy_carries_it(lab: Lab) -> None:
    frame = lab.episode.see()[0].frame
    blank = lab.panel.masked.image.copy()
    with pytest.raises(UserError, match="hold Ctrl and click"):
        lab.obey(Order("mask", "use"))
    origin, direction = (tuple(map(float, a)) for a in towards(frame, *innermost(frame.mask)))
    lab.clicked("on the object", viser.SceneClickEvent(None, 0, origin, direction, (0.5, 0.5), "cmd/ctrl"))  # type: ignore[arg-type]
    (order,) = lab.orders(0)
    lab.obey(order)
    missing = frame.mask & ~lab.clicks.mask(frame)
    lab.obey(Order("on the object", towards(frame, *innermost(missing))))
    clicked = lab.clicks.mask(frame)
    assert overlap(clicked[None], frame.mask[None])[0] > 0.5 and not np.array_equal(lab.panel.masked.image, blank)
    assert all(slot.memory.tracked is None for slot in lab.episode.now.slots)  # shown, not used
    lab.obey(Order("mask", "use"))
    policy, replay = lab.episode.now.slots
    assert policy.memory.tracked is not None and replay.memory.tracked is None
    assert np.array_equal(policy.memory.tracked.frame.mask, clicked)
    for _ in range(9):
        lab.episode.advance()
    policy, _ = lab.episode.now.slots
    assert policy.answer is not None and policy.answer.plan is not None and policy.answer.plan.valid_points >= 4
    assert policy.memory.tracked is not None and len(policy.memory.tracked.history) > 1  # carried to the next look
    with pytest.raises(UserError, match="before the first step"):
        lab.obey(Order("mask", "clear"))
    lab.obey(Order("run", "reset"))
    assert all(slot.memory.tracked is None for slot in lab.episode.now.slots)
    lab.episode.look()
    assert lab.episode.now.slots[0].memory.tracked is None  # the simulator's again
