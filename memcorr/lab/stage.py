"""The 3D scene on the page: every slot's robot and object, the camera, the points and arrows of the plan in force."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import viser
from scipy.spatial.transform import Rotation

from ..show.video import confidence_colour
from ..spec import Array
from ..worlds.world import CAMERA_FOVY, World
from .episode import Sight
from .shapes import ARROWS, COARSE, Shape, arrows, shapes

APART = np.array([1.5, 0.0, 0.0])  # metres between slots
EYE = np.array([0.45, -2.0, 2.1])  # of who opens the page, from the middle of what is looked at
POINT, SHAFT, HEAD = 0.012, 0.0012, 0.004  # metres
STILL = 1e-6  # metres and quaternions: less has not moved


class Actor:
    """The nodes of one slot in the scene tree."""

    def __init__(self, scene: viser.SceneApi, name: str, offset: Array, solids: Sequence[Shape]) -> None:
        root = f"/{name}"
        scene.add_frame(root, show_axes=False, position=offset)
        nodes = sorted({solid.body for solid in solids})
        self.bodies = {body: scene.add_frame(f"{root}/body-{body}", show_axes=False) for body in nodes}
        for i, solid in enumerate(solids):
            node = f"{root}/body-{solid.body}/{i}"
            look: dict[str, Any] = {"color": solid.colour, "side": "double", "material": "toon3"}
            scene.add_mesh_simple(node, solid.vertices, solid.faces, **look, cast_shadow=False, receive_shadow=False)
        scene.add_label(f"{root}/name", name, position=(0.0, 0.6, 0.85), anchor="bottom-center")
        one = np.zeros((1, 3), np.float32)  # none would be an error in the browser
        self.points = scene.add_point_cloud(
            f"{root}/points", one, one, point_size=POINT, point_shape="circle", precision="float32", visible=False
        )
        self.arrows = {
            words: scene.add_arrows(
                f"{root}/arrows/{words}",
                np.zeros((0, 2, 3)),
                colour,
                shaft_radius=SHAFT,
                head_radius=HEAD,
                head_length=2 * HEAD,
            )
            for words, colour in ARROWS.items()
        }
        self._poses: Array | None = None  # (bodies, 7) on the page

    def show(self, sight: Sight) -> None:
        poses = np.concatenate([sight.positions, sight.wxyz], axis=1)
        for body, node in self.bodies.items():  # most of them never move
            if self._poses is None or np.abs(poses[body] - self._poses[body]).max() > STILL:
                node.position, node.wxyz = sight.positions[body], sight.wxyz[body]
        self._poses = poses
        for words, segments in arrows(sight).items():
            if not np.array_equal(self.arrows[words].points, segments.astype(np.float32)):
                self.arrows[words].points = segments.astype(np.float32)
        plan = None if sight.slot.answer is None else sight.slot.answer.plan
        matches = None if plan is None else plan.matches
        self.points.visible = matches is not None and bool(matches.valid.any())
        if matches is not None and self.points.visible:
            self.points.points = matches.p_live[matches.valid].astype(np.float32)
            colours = [confidence_colour(c) for c in matches.confidence[matches.valid]]
            self.points.colors = np.array(colours, np.uint8)


class Stage:
    """Made anew for every world; belongs to the thread that owns the simulation."""

    def __init__(self, server: viser.ViserServer, world: World, names: Sequence[str]) -> None:
        scene = server.scene
        scene.reset()
        scene.set_up_direction("+z")
        # Without a graphics card shadows and reflections take seconds, physical materials half of every frame.
        scene.configure_default_lights(cast_shadow=False)
        scene.configure_environment_map(hdri=None)
        solids = shapes(world.model, COARSE)
        self.actors = {name: Actor(scene, name, i * APART, solids) for i, name in enumerate(names)}
        self.camera = scene.add_camera_frustum(
            f"/{names[0]}/camera", float(np.radians(CAMERA_FOVY)), 1.0, scale=0.15, thickness=0.006
        )
        self._T_world_cam: Array = np.zeros((4, 4))  # on the page
        middle = np.array(world.pair.look_at) + APART * (len(names) - 1) / 2
        server.initial_camera.look_at = middle
        server.initial_camera.position = middle + EYE

    def show(self, sights: Sequence[Sight]) -> None:
        for sight in sights:
            self.actors[sight.slot.name].show(sight)
        T_world_cam = sights[0].frame.camera.T_world_cam
        if not np.array_equal(T_world_cam, self._T_world_cam):
            x, y, z, w = Rotation.from_matrix(T_world_cam[:3, :3]).as_quat()
            self.camera.position, self.camera.wxyz = T_world_cam[:3, 3], np.array([w, x, y, z])
            self._T_world_cam = T_world_cam
