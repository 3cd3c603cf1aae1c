"""The calibrated camera: project and lift are inverse, and agree with the simulator's own rays."""

from __future__ import annotations

import numpy as np
import pytest

from memcorr.frames import Camera, look_at
from memcorr.spec import SPEC
from memcorr.worlds.gl import mujoco
from memcorr.worlds.pairs import PAIRS
from memcorr.worlds.scenes import Scene
from memcorr.worlds.world import CAMERA_FOVY, CAMERA_OFFSET, World, camera_pose

DOOR = PAIRS["door"]
CAMERA_TARGET = np.array(DOOR.look_at)
CAMERA_POSITION = CAMERA_TARGET + CAMERA_OFFSET


def test_project_after_lift_is_the_identity() -> None:
    rng = np.random.default_rng(0)
    camera = Camera.from_fovy(CAMERA_FOVY, SPEC.image_size, camera_pose(DOOR, 15))
    uv = rng.uniform(-0.5, 127.5, (1000, 2))
    depth = rng.uniform(0.3, 3.0, 1000)
    uv_again, depth_again = camera.project(camera.lift(uv, depth))
    np.testing.assert_allclose(uv_again, uv, atol=1e-6)
    np.testing.assert_allclose(depth_again, depth, atol=1e-9)


def test_look_at_is_upright_and_centred() -> None:
    T = look_at(CAMERA_POSITION, CAMERA_TARGET)
    np.testing.assert_allclose(T[:3, :3] @ T[:3, :3].T, np.eye(3), atol=1e-12)
    assert np.linalg.det(T[:3, :3]) == pytest.approx(1)
    assert T[2, 1] < 0  # the image's down axis points down in the world
    uv, depth = Camera.from_fovy(45, 128, T).project(CAMERA_TARGET)
    np.testing.assert_allclose(uv, [63.5, 63.5])  # between the four middle pixels
    assert depth == pytest.approx(np.linalg.norm(CAMERA_TARGET - CAMERA_POSITION))


def test_azimuth_keeps_height_and_distance() -> None:
    for azimuth in (-25, -15, 15, 25):
        T = camera_pose(DOOR, azimuth)
        assert T[2, 3] == pytest.approx(CAMERA_POSITION[2])
        assert np.linalg.norm(T[:3, 3] - CAMERA_TARGET) == pytest.approx(
            np.linalg.norm(CAMERA_POSITION - CAMERA_TARGET)
        )
    forward = camera_pose(DOOR, 0)[:3, 2], camera_pose(DOOR, 15)[:3, 2]
    turn = np.arctan2(forward[1][1], forward[1][0]) - np.arctan2(forward[0][1], forward[0][0])
    assert np.degrees(turn) == pytest.approx(15)


@pytest.mark.parametrize("azimuth", [-15.0, 0.0, 15.0])
def test_lifted_door_pixels_agree_with_mj_ray(world: World, azimuth: float) -> None:
    errors = []
    for u in ((0.0, 0.0), (1.0, 0.0), (0.3, 1.0)):
        world.reset(Scene("camera", 0, 0, u, azimuth))
        frame = world.observe()
        rows, columns = np.nonzero(frame.mask)
        uv = np.stack([columns, rows], axis=-1)
        points = frame.camera.lift(uv, frame.depth[rows, columns])
        origin = frame.camera.T_world_cam[:3, 3]
        seen = np.array([0, 0, 0, 0, 0, 1], np.uint8)  # the door's visible geoms
        geom = np.zeros(1, np.int32)
        for p in points:
            ray = p - origin
            distance = mujoco.mj_ray(world.renderer.model, world.data, origin, ray, seen, 1, -1, geom)
            errors.append(abs(distance - 1) * np.linalg.norm(ray))
    assert np.percentile(errors, 99) < 0.2e-3


def test_half_a_pixel_would_be_noticed(world: World) -> None:
    """The ray test above can fail: without pixel centres the error is millimetres."""
    world.reset(Scene("camera", 0, 0, (0.5, 0.5)))
    frame = world.observe()
    rows, columns = np.nonzero(frame.mask)
    uv = np.stack([columns, rows], axis=-1)
    depth = frame.depth[rows, columns]
    shift = np.linalg.norm(frame.camera.lift(uv, depth) - frame.camera.lift(uv - 0.5, depth), axis=1)
    assert shift.mean() > 3e-3
