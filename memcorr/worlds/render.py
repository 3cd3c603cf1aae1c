"""RGB, metric depth and the visible mask of one object (the door) in two cheap passes.

Pass one draws everything and reads colour and depth together. Pass two draws the object alone
and reads depth: a pixel shows the object exactly where both depths agree. Shadows, reflections
and multisampling are off (multisampling would average depth across edges), sites are hidden (the
goal site would tell the task), and the sky, of one colour, is filled in where nothing was drawn. On
a software renderer vertices cost more than pixels, so the robot's meshes are drawn coarser than a
pixel can show. The renderer draws from a copy of the model: physics never sees any of this.
"""

from __future__ import annotations

import atexit
from copy import copy

import numpy as np
from numpy.typing import NDArray

from ..frames import Camera
from .gl import mujoco, open_context

SKY = (127, 126, 122)  # Meta-World's skybox
OBJECT_GROUP = 5  # groups 0-2 hold what is seen, 4 the collision shapes
LARGE_MESH = 2000  # faces; only the robot's meshes have more
COARSE = 0.006  # metres; a pixel covers about 8 mm of the door

Size = int | tuple[int, int]  # one side of a square image, or (height, width); pixels


def both_sides(size: Size) -> tuple[int, int]:
    """Height and width."""
    return (size, size) if isinstance(size, int) else size


def coarsen(model: mujoco.MjModel, mesh: int, cell: float) -> None:
    """Draw `mesh` with one vertex per cell of a grid; faces that collapse are dropped."""
    first, count = model.mesh_vertadr[mesh], model.mesh_vertnum[mesh]
    cells = np.floor(model.mesh_vert[first : first + count] / cell).astype(np.int64)
    _, representative, of_vertex = np.unique(cells, axis=0, return_index=True, return_inverse=True)
    rows = slice(model.mesh_faceadr[mesh], model.mesh_faceadr[mesh] + model.mesh_facenum[mesh])
    faces = representative[of_vertex.ravel()][model.mesh_face[rows]]
    a, b, c = faces.T
    _, unique = np.unique(np.sort(faces, axis=1), axis=0, return_index=True)
    keep = np.intersect1d(np.flatnonzero((a != b) & (b != c) & (a != c)), unique)
    kept = slice(rows.start, rows.start + len(keep))
    model.mesh_facenormal[kept] = model.mesh_facenormal[rows][keep]
    model.mesh_face[kept] = faces[keep]
    model.mesh_facenum[mesh] = len(keep)


class Renderer:
    """Owns the process's GL context. Make one per process, in the process that uses it."""

    def __init__(self, model: mujoco.MjModel, camera: str, object_body: int, max_size: Size = 128) -> None:
        self.model = model = copy(model)
        model.vis.quality.offsamples = 0
        height, width = both_sides(max_size)
        model.vis.global_.offwidth, model.vis.global_.offheight = width, height
        self._camera = model.camera(camera).id
        self._viewpoint = mujoco.MjvCamera()
        self._viewpoint.type = mujoco.mjtCamera.mjCAMERA_FIXED
        self._viewpoint.fixedcamid = self._camera

        self._groups = model.geom_group.copy()
        self.set_object(object_body)
        for mesh in np.flatnonzero(model.mesh_facenum > LARGE_MESH):
            coarsen(model, int(mesh), COARSE)

        self._everything, self._object_only = mujoco.MjvOption(), mujoco.MjvOption()
        self._everything.geomgroup[OBJECT_GROUP] = 1
        self._object_only.geomgroup[:] = 0
        self._object_only.geomgroup[OBJECT_GROUP] = 1
        for option in (self._everything, self._object_only):
            option.sitegroup[:] = 0
        self._scene = mujoco.MjvScene(model, maxgeom=1000)
        for flag in ("SHADOW", "REFLECTION", "SKYBOX", "HAZE"):
            self._scene.flags[getattr(mujoco.mjtRndFlag, f"mjRND_{flag}")] = 0

        self._gl, self._context = open_context(model, max(height, width))
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self._context)
        self._context.readDepthMap = mujoco.mjtDepthMap.mjDEPTH_ZEROFAR
        atexit.register(self.close)  # before the interpreter takes the GL libraries away

    def set_object(self, *bodies: int) -> None:
        """The object whose visible pixels are the mask: the geoms of one rigid body, or of several."""
        self.model.geom_group[:] = self._groups
        self.model.geom_group[np.isin(self.model.geom_bodyid, bodies) & (self._groups <= 2)] = OBJECT_GROUP

    def camera(self, data: mujoco.MjData, size: Size) -> Camera:
        """Intrinsics from the field of view, extrinsics from the camera's current pose."""
        T = np.eye(4)
        T[:3, :3] = data.cam_xmat[self._camera].reshape(3, 3) * np.array([1.0, -1.0, -1.0])
        T[:3, 3] = data.cam_xpos[self._camera]
        return Camera.from_fovy(float(self.model.cam_fovy[self._camera]), size, T)

    def render(
        self, data: mujoco.MjData, size: Size
    ) -> tuple[NDArray[np.uint8], NDArray[np.float32], NDArray[np.bool_], Camera]:
        """RGB (H, W, 3), metric depth (H, W), object mask (H, W), camera."""
        camera = self.camera(data, size)
        self._gl.make_current()
        rgb = np.empty((*both_sides(size), 3), np.uint8)
        z_all = self._draw(data, self._everything, size, rgb)
        z_object = self._draw(data, self._object_only, size, None)
        rgb[z_all == 0] = SKY
        mask = (z_object > 0) & (z_object == z_all)
        return rgb[::-1].copy(), self._metric(z_all)[::-1].copy(), mask[::-1].copy(), camera

    def _draw(
        self, data: mujoco.MjData, option: mujoco.MjvOption, size: Size, rgb: NDArray[np.uint8] | None
    ) -> NDArray[np.float32]:
        """Draws what `option` selects; returns the raw (reversed, 0 = far) depth buffer."""
        mujoco.mjv_updateScene(self.model, data, option, None, self._viewpoint, mujoco.mjtCatBit.mjCAT_ALL, self._scene)
        height, width = both_sides(size)
        view = mujoco.MjrRect(0, 0, width, height)
        mujoco.mjr_render(view, self._scene, self._context)
        depth = np.empty((height, width), np.float32)
        mujoco.mjr_readPixels(rgb, depth, view, self._context)
        return depth

    def _metric(self, z: NDArray[np.float32]) -> NDArray[np.float32]:
        """Reversed depth buffer (1 at the near plane, 0 at infinity's side) to metres; 0 = no return."""
        extent = self.model.stat.extent
        near = np.float32(self.model.vis.map.znear * extent)
        far = np.float32(self.model.vis.map.zfar * extent)
        # Inverse of the OpenGL projection in reversed-Z mode, float32 coefficients as glFrustum's.
        c = np.float32(0.5) * ((far + near) / (far - near)) - np.float32(0.5)
        d = (far * near) / (far - near)
        return np.where(z > 0, d / (z.astype(np.float64) + c), 0.0).astype(np.float32)

    def close(self) -> None:
        """Frees the GL context; safe to call twice."""
        atexit.unregister(self.close)
        self._context.free()
        self._gl.free()
