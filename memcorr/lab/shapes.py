"""What the 3D scene is made of: the geoms of a MuJoCo model as triangles, one mesh for each body and colour, and the
vectors that a policy is shown as arrows."""

from __future__ import annotations

from collections import defaultdict
from copy import copy
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import trimesh
from numpy.typing import NDArray

from ..show.video import BLUE, GREEN, LEGEND, ORANGE, PURPLE, YELLOW, Colour, planned_path
from ..spec import Array
from ..worlds.gl import mujoco
from ..worlds.render import LARGE_MESH, coarsen
from .episode import Sight

FINE, COARSE = 0.006, 0.025  # metres; smaller details of the robot are left out, of a recording and on the page
SEEN = 0.01  # of opacity
ARROWS: dict[str, Colour] = dict(LEGEND)  # by what they mean
Geom = mujoco.mjtGeom


@dataclass(frozen=True)
class Shape:
    """Triangles of one colour that move with one body."""

    body: int
    colour: tuple[int, int, int]
    vertices: NDArray[np.float32]  # (n, 3) metres, body frame
    faces: NDArray[np.uint32]  # (m, 3)


def shapes(model: mujoco.MjModel, cell: float = FINE) -> list[Shape]:
    """Everything that the cameras see except the floor, which has no end."""
    model = copy(model)
    for mesh in np.flatnonzero(model.mesh_facenum > LARGE_MESH):
        coarsen(model, int(mesh), cell)
    parts = defaultdict(list)
    for geom in range(model.ngeom):
        rgba = colour(model, geom)
        if model.geom_group[geom] <= 2 and rgba[3] > SEEN and model.geom_type[geom] != Geom.mjGEOM_PLANE:
            rgb = tuple(int(c) for c in np.round(255 * np.clip(rgba[:3], 0, 1)))
            parts[int(model.geom_bodyid[geom]), rgb].append(triangles(model, geom))
    return [_joined(body, rgb, pieces) for (body, rgb), pieces in parts.items()]


def colour(model: mujoco.MjModel, geom: int) -> Array:
    """Its colour (4,); a texture counts as its mean."""
    material = model.geom_matid[geom]
    if material < 0:
        return np.array(model.geom_rgba[geom])
    rgba = np.array(model.mat_rgba[material])
    texture = model.mat_texid[material, mujoco.mjtTextureRole.mjTEXROLE_RGB]
    if texture >= 0:
        first, channels = model.tex_adr[texture], model.tex_nchannel[texture]
        size = int(model.tex_width[texture]) * int(model.tex_height[texture]) * int(channels)
        rgba[:3] *= model.tex_data[first : first + size].reshape(-1, channels)[:, :3].mean(axis=0) / 255
    return rgba


def triangles(model: mujoco.MjModel, geom: int) -> tuple[Array, NDArray[np.int64]]:
    """Vertices (n, 3) in the frame of the geom's body, and faces (m, 3)."""
    kind, size = model.geom_type[geom], model.geom_size[geom]
    if kind == Geom.mjGEOM_MESH:
        mesh = model.geom_dataid[geom]
        first, count = model.mesh_faceadr[mesh], model.mesh_facenum[mesh]
        used, faces = np.unique(model.mesh_face[first : first + count], return_inverse=True)
        vertices = model.mesh_vert[model.mesh_vertadr[mesh] + used]
        faces = faces.reshape(-1, 3)
    else:
        solid = _solid(kind, size)
        vertices, faces = np.array(solid.vertices), np.array(solid.faces)
    R = np.zeros(9)
    mujoco.mju_quat2Mat(R, model.geom_quat[geom])
    return vertices @ R.reshape(3, 3).T + model.geom_pos[geom], faces


def _solid(kind: int, size: Array) -> trimesh.Trimesh:
    if kind == Geom.mjGEOM_BOX:
        return trimesh.creation.box(extents=2 * size)
    if kind == Geom.mjGEOM_CYLINDER:
        return trimesh.creation.cylinder(radius=size[0], height=2 * size[1], sections=24)
    if kind == Geom.mjGEOM_CAPSULE:
        return trimesh.creation.capsule(radius=size[0], height=2 * size[1], count=(12, 12))
    ball = trimesh.creation.icosphere(subdivisions=2)
    return ball.apply_scale(size if kind == Geom.mjGEOM_ELLIPSOID else np.full(3, size[0]))


def _joined(body: int, rgb: tuple[int, ...], pieces: list[tuple[Array, NDArray[np.int64]]]) -> Shape:
    starts = np.cumsum([0, *(len(vertices) for vertices, _ in pieces)])
    faces = np.concatenate([faces + start for (_, faces), start in zip(pieces, starts, strict=False)])
    vertices = np.concatenate([vertices for vertices, _ in pieces])
    red, green, blue = rgb
    return Shape(body, (red, green, blue), vertices.astype(np.float32), faces.astype(np.uint32))


def arrows(sight: Sight) -> dict[str, Array]:
    """Segments (n, 2, 3) in metres, world frame, by the words of the legend; none before the first look."""
    of = {colour: words for words, colour in LEGEND}
    found = {words: np.zeros((0, 2, 3)) for words in ARROWS}
    plan = None if sight.slot.answer is None else sight.slot.answer.plan
    if plan is None:
        return found
    g_live = sight.frame.gripper
    found[of[YELLOW]] = np.array(list(pairwise(planned_path(g_live, plan.actions[sight.slot.since :]))))
    if sight.supplied is not None:
        found[of[PURPLE]] = np.array(list(pairwise(sight.supplied.future)))
    if sight.supplied is not None and plan.matches is not None:
        p_ref, p_live = (p[plan.matches.valid] for p in (plan.matches.p_ref, plan.matches.p_live))
        g_ref = np.broadcast_to(sight.supplied.frame.gripper, p_ref.shape)
        found[of[GREEN]] = np.stack([p_live, np.broadcast_to(g_live, p_live.shape)], axis=1)
        found[of[ORANGE]] = np.stack([p_ref, g_ref], axis=1)
        found[of[BLUE]] = np.stack([p_ref, p_live], axis=1)
    return found
