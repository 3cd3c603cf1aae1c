"""Practice objects that stand in no catalogue: a base and a part that turns on a hinge or slides in it.

One compiled model has slots: geoms of the base and of the part, a bank of turned and cut meshes, a set of
textures. `assemble` fills them anew: panels with a bar for a handle, levers, trays, turned pieces with a
ring, heaps of simple shapes. So one model makes as many objects as are asked for, and no two are alike.
"""

from __future__ import annotations

import colorsys
from collections.abc import Sequence

import cv2
import numpy as np
from numpy.typing import NDArray

from ...spec import Array
from ...worlds.gl import mujoco

Vector = Sequence[float] | Array
BASE, PART, HINGE, SLIDE = "assembly", "part", "assembly_hinge", "assembly_slide"
SLOTS = {BASE: 5, PART: 9}
MESHES = 16  # per model
TEXTURES = 14
TEXTURE_SIZE = 64
BOX, CYLINDER, CAPSULE, SPHERE, MESH = (
    getattr(mujoco.mjtGeom, f"mjGEOM_{name}") for name in ("BOX", "CYLINDER", "CAPSULE", "SPHERE", "MESH")
)


def random_colour(rng: np.random.Generator) -> Array:
    return np.array(colorsys.hsv_to_rgb(rng.uniform(), rng.uniform(0, 0.9), rng.uniform(0.15, 1.0)))


# -- what is added to a scene before it is compiled


def add_assembly(spec: mujoco.MjSpec, rng: np.random.Generator) -> None:
    """Slots for one assembly, and meshes to fill them with."""
    for k in range(MESHES):
        vertices, faces = (turned if rng.uniform() < 0.6 else cut)(rng)
        spec.add_mesh(name=f"practice_{k}", uservert=vertices.ravel().tolist(), userface=faces.ravel().tolist())
    base = spec.worldbody.add_body(name=BASE)
    part = base.add_body(name=PART, explicitinertial=True, mass=1.0, inertia=[1.0, 1.0, 1.0])  # never simulated
    part.add_joint(name=HINGE, type=mujoco.mjtJoint.mjJNT_HINGE, axis=[0, 0, 1])
    part.add_joint(name=SLIDE, type=mujoco.mjtJoint.mjJNT_SLIDE, axis=[1, 0, 0])
    for body, name in ((base, BASE), (part, PART)):
        for k in range(SLOTS[name]):
            size = dict(type=BOX, size=[0.01] * 3) if k else dict(type=MESH, meshname="practice_0")
            body.add_geom(name=f"{name}_{k}", contype=0, conaffinity=0, **size)


def add_textures(spec: mujoco.MjSpec) -> None:
    """Cube textures, flat until `paint` paints them, each with a material."""
    for k in range(TEXTURES):
        name = f"practice_{k}"
        spec.add_texture(
            name=name,
            type=mujoco.mjtTexture.mjTEXTURE_CUBE,
            builtin=mujoco.mjtBuiltin.mjBUILTIN_FLAT,
            width=TEXTURE_SIZE,
            height=6 * TEXTURE_SIZE,
        )
        material = spec.add_material(name=name)
        material.textures[mujoco.mjtTextureRole.mjTEXROLE_RGB] = name


def turned(rng: np.random.Generator) -> tuple[Array, NDArray[np.int64]]:
    """A surface of revolution: cup, bowl, disc, knob, ring or vase. Vertices (V, 3) metres, faces (F, 3)."""
    radius, height, wall = rng.uniform(0.015, 0.08), rng.uniform(0.008, 0.14), rng.uniform(0.15, 0.4)
    kind = rng.integers(3)
    if kind == 0:  # hollow: up outside, down inside
        lip = rng.uniform(0.7, 1.4)
        profile = [(0.02, 0), (1, 0), (lip, 1), (lip - wall, 1), (1 - wall, wall), (0.02, wall)]
    elif kind == 1:  # a ring, its section a polygon
        angle = np.linspace(0, 2 * np.pi, 9)
        profile = list(zip(1 - wall / 2 + wall / 2 * np.cos(angle), 0.5 + 0.5 * np.sin(angle), strict=True))
        height = radius * wall
    else:  # solid, with a few waists
        levels = np.linspace(0, 1, rng.integers(3, 7))
        profile = [(0.02, 0), *((rng.uniform(0.4, 1), h) for h in levels), (0.02, 1)]
    rings, sides = np.array(profile) * (radius, height), 20
    angle = np.linspace(0, 2 * np.pi, sides, endpoint=False)
    around = np.stack([np.cos(angle), np.sin(angle)], axis=-1)
    vertices = np.concatenate([np.column_stack([r * around, np.full(sides, h)]) for r, h in rings])
    return vertices, _quads(len(rings), sides)


def cut(rng: np.random.Generator) -> tuple[Array, NDArray[np.int64]]:
    """A plate cut to a star-shaped outline (a letter, a gear, a leaf): vertices (V, 3) metres, faces (F, 3)."""
    sides = int(rng.integers(5, 14))
    angle = np.linspace(0, 2 * np.pi, sides, endpoint=False) + rng.uniform(-0.15, 0.15, sides)
    reach = rng.uniform(0.02, 0.09) * rng.uniform(0.35, 1.0, sides)
    outline = np.stack([reach * np.cos(angle) * rng.uniform(0.3, 1), reach * np.sin(angle)], axis=-1)
    thick = rng.uniform(0.008, 0.04)
    rings = [(0.02, 0.0), (1.0, 0.0), (rng.uniform(0.75, 1.0), thick), (0.02, thick)]
    vertices = np.concatenate([np.column_stack([r * outline, np.full(sides, h)]) for r, h in rings])
    return vertices, _quads(len(rings), sides)


def _quads(rings: int, sides: int) -> NDArray[np.int64]:
    """Two triangles between each two neighbours of neighbouring rings, seen from outside anticlockwise."""
    ring, side = (x.ravel() for x in np.meshgrid(np.arange(rings - 1), np.arange(sides), indexing="ij"))
    a, b = ring * sides + side, ring * sides + (side + 1) % sides
    c, d = a + sides, b + sides
    return np.concatenate([np.stack([a, b, d], axis=-1), np.stack([a, d, c], axis=-1)])


# -- what changes from object to object


def paint(model: mujoco.MjModel, rng: np.random.Generator) -> None:
    """New patterns on the added textures, and on every stock one of an object: none of those is ever seen."""
    for t in range(model.ntex):
        name, kind = model.tex(t).name, model.tex_type[t]
        if name in SCENERY_TEXTURES or kind == mujoco.mjtTexture.mjTEXTURE_SKYBOX:
            continue
        side = int(model.tex_width[t])
        faces = [pattern(side, rng) for _ in range(int(model.tex_height[t]) // side)]
        first = model.tex_adr[t]
        model.tex_data[first : first + 3 * side * side * len(faces)] = np.concatenate(faces).ravel()


SCENERY_TEXTURES = ("T_table", "T_floor", "T_wallmetal")  # of the room, in every scene


def pattern(side: int, rng: np.random.Generator) -> NDArray[np.uint8]:
    """A picture (side, side, 3): noise, grain, stripes, squares, rings, blots or almost nothing."""
    y, x = np.mgrid[:side, :side] / side
    noise = np.zeros((side, side))
    for octave in (3, 6, 12, 24):
        coarse = rng.normal(size=(octave, octave)).astype(np.float32)
        noise += rng.uniform(0, 1) * cv2.resize(coarse, (side, side), interpolation=cv2.INTER_CUBIC)
    direction, frequency = rng.uniform(0, np.pi), rng.uniform(2, 10)
    along = x * np.cos(direction) + y * np.sin(direction)
    field = (
        lambda: 0.5 + 0.3 * noise,
        lambda: 0.5 + 0.5 * np.sin(2 * np.pi * frequency * along + noise),
        lambda: ((along * frequency).astype(int) % 2).astype(float),
        lambda: ((x * frequency).astype(int) + (y * frequency).astype(int)) % 2 + 0.1 * noise,
        lambda: 0.5 + 0.5 * np.sin(2 * np.pi * frequency * np.hypot(x - 0.5, y - 0.5) + noise),
        lambda: (noise > 0.5).astype(float),
        lambda: 0.5 + 0.05 * noise,
    )[rng.integers(7)]()
    a, b = random_colour(rng), random_colour(rng)
    if rng.uniform() < 0.4:  # faint: brushed metal, paint
        b = np.clip(a + rng.normal(0, 0.08, 3), 0, 1)
    rgb = a + np.clip(field, 0, 1)[..., None] * (b - a) + rng.normal(0, rng.uniform(0, 0.04), (side, side, 1))
    return (255 * np.clip(rgb, 0, 1)).astype(np.uint8)


class Filler:
    """Fills the slots of one body with shapes; those left over are not drawn."""

    def __init__(self, model: mujoco.MjModel, body: str, rng: np.random.Generator) -> None:
        self.model, self.rng, self.used = model, rng, 0
        self.slots = [model.geom(f"{body}_{k}").id for k in range(SLOTS[body])]
        self.centres: list[Array] = []
        self.main = self.look()
        model.geom_rgba[self.slots, 3] = 0.0

    def look(self) -> tuple[int, Array]:
        """A material (-1: none) and a colour."""
        textured = self.rng.uniform() < 0.55
        material = self.model.mat(f"practice_{self.rng.integers(TEXTURES)}").id if textured else -1
        return material, random_colour(self.rng)

    def put(self, kind: int, size: Vector, at: Vector, turn: Array | None = None, mesh: int = -1) -> None:
        """One shape; half of them look like the first."""
        if self.used == len(self.slots):
            return
        model, g, rng = self.model, self.slots[self.used], self.rng
        self.used += 1
        quat = np.array([1.0, 0, 0, 0]) if turn is None else np.asarray(turn, float)
        pos = np.asarray(at, float)
        model.geom_type[g], model.geom_dataid[g] = kind, mesh
        if kind == MESH:  # a compiled mesh has been moved into a frame of its own
            moved, rotated = np.empty(3), np.empty(4)
            mujoco.mju_mulPose(moved, rotated, pos, quat, model.mesh_pos[mesh], model.mesh_quat[mesh])
            pos, quat = moved, rotated
            first = model.mesh_vertadr[mesh]
            vertices = model.mesh_vert[first : first + model.mesh_vertnum[mesh]]
            model.geom_size[g] = np.abs(vertices).max(axis=0)
        else:
            model.geom_size[g] = [*size, *[0.0] * (3 - len(size))]
        model.geom_pos[g], model.geom_quat[g] = pos, quat
        model.geom_rbound[g] = np.linalg.norm(model.geom_size[g])
        material, colour = self.main if rng.uniform() < 0.5 else self.look()
        model.geom_matid[g] = material
        model.geom_rgba[g] = (0.5, 0.5, 0.5, 1.0) if material >= 0 else (*colour, 1.0)  # grey: the material's own
        self.centres.append(pos)

    def mesh(self, at: Vector, turn: Array | None = None) -> None:
        number = int(self.rng.integers(MESHES))
        self.put(MESH, (), at, turn, self.model.mesh(f"practice_{number}").id)


def assemble(model: mujoco.MjModel, rng: np.random.Generator) -> None:
    """Another object: shapes of base and part, and the joint between them."""
    extent = float(np.exp(rng.uniform(np.log(0.03), np.log(0.2))))  # half of the part's length, metres
    base, part = Filler(model, BASE, rng), Filler(model, PART, rng)
    (_panel, _lever, _tray, _piece, _heap)[rng.choice(5, p=(0.25, 0.2, 0.15, 0.2, 0.2))](part, extent)
    centre = np.mean(part.centres, axis=0)
    depth = rng.uniform(0.1, 0.6) * extent
    size = (rng.uniform(0.4, 1.0) * extent, depth, rng.uniform(0.3, 0.9) * extent)
    base.put(BOX, size, (0.0, rng.uniform(0.01, 0.04) + depth, rng.uniform(-0.3, 0.3) * extent))
    for _ in range(rng.integers(0, 4)):
        shape = rng.choice([BOX, CYLINDER, SPHERE])
        base.put(shape, rng.uniform(0.1, 0.4, 3) * extent, rng.uniform(-1, 1, 3) * extent + (0, 0.05, 0))
    hinge, slide = model.joint(HINGE), model.joint(SLIDE)
    axis = np.eye(3)[rng.integers(3)] + rng.normal(0, 0.1, 3)
    hinge.axis[:] = slide.axis[:] = axis / np.linalg.norm(axis)
    hinge.pos[:] = rng.uniform(-1, 1, 3) * (extent, 0.02, extent)  # at an edge, or through the middle
    turns = rng.uniform() < 0.6
    hinge.range[:], slide.range[:] = ((-1.0, 1.0), (0, 0)) if turns else ((0, 0), (-0.12, 0.12))
    model.body_ipos[model.body(PART).id] = centre
    model.body_ipos[model.body(BASE).id] = np.mean(base.centres, axis=0)


# Parts. They face -y, where a base has its front; `s` is half of their length.

OUT = np.array([0.0, -1.0, 0.0])


def _handle(f: Filler, s: float, at: Array) -> None:
    """A bar on two stems, upright or level, or a knob on one."""
    rng, length, off, r = f.rng, f.rng.uniform(0.25, 0.6) * s, f.rng.uniform(0.02, 0.06), f.rng.uniform(0.004, 0.012)
    if rng.uniform() < 0.35:
        f.put(CYLINDER, (r, off / 2), at + 0.5 * off * OUT, turn_to_y())
        if rng.uniform() < 0.5:
            f.put(SPHERE, (rng.uniform(1.5, 3) * r,), at + off * OUT)
        else:
            f.mesh(at + off * OUT, turn_to_y())
        return
    upright = rng.uniform() < 0.5
    along = np.array([0.0, 0.0, 1.0]) if upright else np.array([1.0, 0.0, 0.0])
    for end in (-1, 1):
        f.put(CYLINDER, (r, off / 2), at + 0.8 * end * length * along + 0.5 * off * OUT, turn_to_y())
    bar = (r, r, length) if upright else (length, r, r)
    if rng.uniform() < 0.5:
        f.put(BOX, bar, at + off * OUT)
    else:
        f.put(CAPSULE, (r, length), at + off * OUT, None if upright else turn_to_x())


def _panel(f: Filler, s: float) -> None:
    rng, thick, tall = f.rng, f.rng.uniform(0.004, 0.02), f.rng.uniform(0.4, 1.2) * s
    f.put(BOX, (s, thick, tall), (0, 0, 0))
    _handle(f, s, np.array([rng.uniform(-0.7, 0.7) * s, -thick, rng.uniform(-0.5, 0.5) * tall]))
    for _ in range(rng.integers(0, 4)):  # trim
        wide, high = rng.uniform(0.05, 0.9), rng.uniform(0.03, 0.3)
        at = rng.uniform(-0.6, 0.6, 2) * (s, tall)
        f.put(BOX, (wide * s * 0.5, thick + 0.003, high * tall), (at[0], 0, at[1]))


def _lever(f: Filler, s: float) -> None:
    rng, r = f.rng, f.rng.uniform(0.05, 0.2) * s + 0.003
    f.put(rng.choice([BOX, CAPSULE]), (r, s) if rng.uniform() < 0.5 else (r, r, s), (0, 0, 0), turn_to_x())
    f.put(CYLINDER, (rng.uniform(1.2, 2.5) * r, rng.uniform(1, 3) * r), (-s, 0, 0), turn_to_y())
    if rng.uniform() < 0.5:
        f.put(SPHERE, (rng.uniform(1.2, 2.2) * r,), (s, 0, 0))
    else:
        f.put(BOX, rng.uniform(1, 2.5, 3) * r, (s, -r, 0))
    if rng.uniform() < 0.4:
        f.put(BOX, (0.4 * s, 1.2 * r, 0.5 * r), (rng.uniform(-0.4, 0.6) * s, 0, 0))


def _tray(f: Filler, s: float) -> None:
    rng, t, deep, tall = f.rng, f.rng.uniform(0.003, 0.01), f.rng.uniform(0.5, 1.2) * s, f.rng.uniform(0.2, 0.6) * s
    f.put(BOX, (s, deep, t), (0, 0, -tall))
    for end in (-1, 1):
        f.put(BOX, (t, deep, tall), (end * s, 0, 0))
        f.put(BOX, (s, t, tall), (0, end * deep, 0))
    _handle(f, s, np.array([rng.uniform(-0.4, 0.4) * s, -deep - t, 0.0]))


def _piece(f: Filler, s: float) -> None:
    """One to three meshes; often with a ring or a bar at the side, by which they are not symmetric."""
    rng = f.rng
    f.mesh((0, 0, 0))
    for _ in range(rng.integers(0, 3)):
        where = rng.uniform(-0.06, 0.06, 3)
        if rng.uniform() < 0.5:
            f.mesh(where, turn_to_y())
        else:
            f.put(CAPSULE, (rng.uniform(0.004, 0.012), rng.uniform(0.01, 0.06)), where, random_turn(rng))


def _heap(f: Filler, s: float) -> None:
    rng = f.rng
    for _ in range(rng.integers(2, 8)):
        kind, at = rng.choice([BOX, CYLINDER, CAPSULE, SPHERE, MESH]), rng.uniform(-0.8, 0.8, 3) * s
        if kind == MESH:
            f.mesh(at, random_turn(rng))
        else:
            f.put(kind, rng.uniform(0.08, 0.5, 3) * s, at, random_turn(rng) if rng.uniform() < 0.4 else None)


def turn_to_x() -> Array:
    """z to x."""
    return np.array([np.sqrt(0.5), 0, np.sqrt(0.5), 0])


def turn_to_y() -> Array:
    """z to -y."""
    return np.array([np.sqrt(0.5), np.sqrt(0.5), 0, 0])


def random_turn(rng: np.random.Generator) -> Array:
    quat = rng.normal(size=4)
    return quat / np.linalg.norm(quat)
