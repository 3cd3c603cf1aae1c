"""Practice scenes for the embedded matcher: objects that no evaluation shows, everything randomised.

A *group* is one object in one look (colours, textures): a rigid body of one of Meta-World's other scenes,
or of an assembly made up for the purpose, seen in a handful of views that differ in joints, positions,
camera, light and where the robot is. Any two views of a group make a training pair whose exact warp follows
from depth, cameras and the body's poses. No mesh and no texture of the ten worlds' objects is ever drawn.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from ...files import Form, read_arrays, write_arrays
from ...folders import claimed
from ...frames import Camera, Frame, look_at
from ...spec import SPEC, Array
from ...workers import spread
from ...worlds.gl import mujoco
from ...worlds.render import Renderer
from ...worlds.world import CAMERA_NAME, MOCAP_QUAT, build_model
from .assemblies import BASE, PART, add_assembly, add_textures, assemble, paint, random_colour

# Meta-World's scenes whose objects are in none of the ten worlds, neither whole nor by a mesh.
SCENES = (
    "sawyer_assembly_peg",
    "sawyer_basketball",
    "sawyer_bin_picking",
    "sawyer_button_press",
    "sawyer_button_press_topdown",
    "sawyer_dial",
    "sawyer_hammer",
    "sawyer_laptop",
    "sawyer_peg_insertion_side",
    "sawyer_peg_unplug_side",
    "sawyer_pick_place_v3",
    "sawyer_shelf_placing",
    "sawyer_shelf_removing",
    "sawyer_soccer",
    "sawyer_sweep_tool",
)
HELD_OUT = ("sawyer_box", "sawyer_lever_pull", "sawyer_stick_obj", "assembly-900", "assembly-901", "assembly-902")
EMPTY_SCENE = "sawyer_reach_v3"  # what assemblies stand in; its block is put away
AWAY = (5.0, 5.0, 0.0)
SCENERY = {"world", "base", "mocap", "tablelink", "RetainingWall"}  # top-level bodies that are no objects
VIEWS = 6
MIN_PIXELS = 40


def is_assembly(scene: str) -> bool:
    """Names like assembly-017: the number draws its meshes."""
    return scene.startswith("assembly-")


@dataclass(frozen=True)
class Group:
    """Views of one rigid object in one look."""

    frames: list[Frame]
    T_world_object: Array  # (views, 4, 4)


def build_practice(scene: str, seed: int) -> mujoco.MjModel:
    """One of Meta-World's scenes or an assembly, with textures of our own."""
    rng = np.random.default_rng([seed, *scene.encode()])

    def furnish(spec: mujoco.MjSpec) -> None:
        add_textures(spec)
        if is_assembly(scene):
            add_assembly(spec, rng)

    model = build_model(EMPTY_SCENE if is_assembly(scene) else scene, furnish)
    paint(model, rng)
    if is_assembly(scene):
        joint = model.joint("objjoint")
        model.qpos0[joint.qposadr[0] : joint.qposadr[0] + 3] = AWAY
    return model


def robot_joints(model: mujoco.MjModel) -> NDArray[np.int64]:
    """Where the arm's and the fingers' joints are in qpos: not always first."""
    of_robot = [model.body(model.body_rootid[b]).name == "base" for b in model.jnt_bodyid]
    return model.jnt_qposadr[np.array(of_robot)].astype(np.int64)


def robot_postures(count: int, seed: int) -> Array:
    """Arm joints (count, 9) with the hand at random places above the table."""
    model = build_model(EMPTY_SCENE)
    data = mujoco.MjData(model)
    data.qpos[model.joint("objjoint").qposadr[0] :][:3] = AWAY
    joints = robot_joints(model)
    rng = np.random.default_rng(seed)
    postures = []
    for _ in range(count):
        data.mocap_pos[0] = rng.uniform((-0.3, 0.42, 0.10), (0.3, 0.85, 0.42))
        data.mocap_quat[0] = MOCAP_QUAT
        grip = rng.uniform(-1, 1)
        data.ctrl[:] = grip, -grip
        mujoco.mj_step(model, data, nstep=250)
        postures.append(data.qpos[joints].copy())
    return np.stack(postures)


def candidates(model: mujoco.MjModel) -> list[int]:
    """Bodies that can be the object: seen, and neither robot nor furniture; of an assembly mostly its part."""
    if any(model.body(b).name == PART for b in range(model.nbody)):
        return [model.body(PART).id] * 3 + [model.body(BASE).id]
    seen = (model.geom_group <= 2) & (model.geom_rgba[:, 3] > 0) & (model.geom_type != mujoco.mjtGeom.mjGEOM_PLANE)
    bodies = np.unique(model.geom_bodyid[seen])
    return [int(b) for b in bodies if model.body(model.body_rootid[b]).name not in SCENERY]


def randomise_look(model: mujoco.MjModel, stock: mujoco.MjModel, rng: np.random.Generator, keep: float = 0.3) -> None:
    """Colours and textures of everything; a share `keep` of the groups has the stock look."""
    model.mat_rgba[:], model.geom_rgba[:], model.mat_texid[:] = stock.mat_rgba, stock.geom_rgba, stock.mat_texid
    if rng.uniform() < keep:
        return
    rgb = mujoco.mjtTextureRole.mjTEXROLE_RGB
    textures = np.unique(stock.mat_texid[:, rgb])
    for m in range(model.nmat):
        if rng.uniform() < 0.7:
            model.mat_rgba[m, :3] = random_colour(rng)
        if rng.uniform() < 0.4:
            model.mat_texid[m, rgb] = rng.choice(textures)
        model.mat_specular[m], model.mat_shininess[m] = rng.uniform(0, 1, 2)
    plain = np.flatnonzero(model.geom_matid < 0)
    for g in plain[rng.uniform(size=len(plain)) < 0.5]:
        model.geom_rgba[g, :3] = random_colour(rng)


def randomise_light(model: mujoco.MjModel, stock: mujoco.MjModel, rng: np.random.Generator) -> None:
    """Another light altogether."""
    model.vis.headlight.ambient[:] = rng.uniform(0.2, 0.55)
    model.vis.headlight.diffuse[:] = rng.uniform(0.2, 0.6)
    model.light_diffuse[:] = rng.uniform(0.05, 0.5, (model.nlight, 1))
    directions = stock.light_dir + rng.normal(0, 0.6, (model.nlight, 3))
    directions[:, 2] = -np.abs(directions[:, 2]) - 0.1
    model.light_dir[:] = directions / np.linalg.norm(directions, axis=1, keepdims=True)


def vary_light(model: mujoco.MjModel, rng: np.random.Generator) -> None:
    """The same light a little later."""
    model.vis.headlight.ambient[:] *= rng.uniform(0.85, 1.15)
    model.light_diffuse[:] *= rng.uniform(0.8, 1.2, (model.nlight, 1))


@dataclass(frozen=True)
class Around:
    """What a group's views scatter around."""

    joints: Array  # (joints,) position within the range, [0, 1]
    place: Array  # (2,) metres
    height: float  # metres above where the scene has it
    heading: float  # of the camera, radians
    elevation: float
    pixels: float  # that the object's diameter covers
    fovy: float  # degrees

    @staticmethod
    def draw(model: mujoco.MjModel, rng: np.random.Generator) -> Around:
        return Around(
            joints=rng.uniform(0, 1, model.njnt),
            place=rng.uniform((-0.12, -0.1), (0.12, 0.1)),
            height=rng.uniform(0, 0.15) if rng.uniform() < 0.4 else 0.0,
            heading=np.radians(rng.uniform(-200, 20)),  # not from behind
            elevation=np.radians(rng.uniform(15, 65)),
            pixels=float(np.exp(rng.uniform(np.log(20), np.log(110)))),
            fovy=rng.uniform(30, 60),
        )


def randomise_view(
    model: mujoco.MjModel,
    stock: mujoco.MjModel,
    data: mujoco.MjData,
    body: int,
    around: Around,
    postures: Array,
    rng: np.random.Generator,
) -> None:
    """Joints, object positions, robot posture and camera of one view.

    Two views of a group differ by up to a quarter of a joint's range, 14 cm, 17 degrees of yaw, 40 degrees of
    azimuth and 16 of elevation.
    """
    mujoco.mj_resetData(model, data)
    data.qpos[robot_joints(model)] = postures[rng.integers(len(postures))]
    for j in range(model.njnt):
        first = model.jnt_qposadr[j]
        if model.body(model.body_rootid[model.jnt_bodyid[j]]).name in SCENERY:
            continue
        share = np.clip(around.joints[j] + rng.uniform(-0.12, 0.12), 0, 1)
        if model.jnt_type[j] == mujoco.mjtJoint.mjJNT_FREE:
            data.qpos[first : first + 2] += rng.uniform(-0.07, 0.07, 2)
            _turn(data.qpos[first + 3 : first + 7], share - 0.5)
        elif model.jnt_type[j] != mujoco.mjtJoint.mjJNT_BALL:
            lo, hi = model.jnt_range[j] if model.jnt_limited[j] or model.jnt_range[j].any() else (-0.6, 0.6)
            data.qpos[first] = lo + share * (hi - lo)
    roots = [b for b in range(1, model.nbody) if model.body_parentid[b] == 0 and model.body(b).name not in SCENERY]
    for b in roots:
        model.body_pos[b] = stock.body_pos[b] + (*around.place, around.height)
        model.body_pos[b, :2] += rng.uniform(-0.07, 0.07, 2)
        model.body_quat[b] = stock.body_quat[b]
        _turn(model.body_quat[b], rng.uniform(-0.15, 0.15))
    mujoco.mj_kinematics(model, data)
    heading = around.heading + np.radians(rng.uniform(-20, 20))
    elevation = around.elevation + np.radians(rng.uniform(-8, 8))
    fovy = around.fovy + rng.uniform(-2, 2)
    pixels = around.pixels * rng.uniform(0.88, 1.12)
    focal = 0.5 * SPEC.image_size / np.tan(np.radians(fovy) / 2)
    centre, radius = bounds(model, data, body)
    distance = np.clip(2 * radius * focal / pixels, 0.3, 2.2)
    out = np.cos(elevation)
    offset = distance * np.array([out * np.cos(heading), out * np.sin(heading), np.sin(elevation)])
    target = centre + rng.uniform(-0.5, 0.5, 3) * min(radius, 0.06)
    T = look_at(target + offset, target)
    camera = model.camera(CAMERA_NAME).id
    model.cam_pos[camera] = T[:3, 3]
    mujoco.mju_mat2Quat(model.cam_quat[camera], (T[:3, :3] * np.array([1.0, -1.0, -1.0])).flatten())
    model.cam_fovy[camera] = fovy
    mujoco.mj_camlight(model, data)


def _turn(quat: Array, yaw: float) -> None:
    """Turns about the vertical axis, in place."""
    turned = np.empty(4)
    mujoco.mju_mulQuat(turned, np.array([np.cos(yaw / 2), 0, 0, np.sin(yaw / 2)]), np.array(quat))
    quat[:] = turned


def bounds(model: mujoco.MjModel, data: mujoco.MjData, body: int) -> tuple[Array, float]:
    """Centre and radius of what is drawn of a body, metres, world frame."""
    geoms = np.flatnonzero((model.geom_bodyid == body) & (model.geom_rgba[:, 3] > 0) & (model.geom_rbound > 0))
    geoms = geoms[~np.isin(model.geom_group[geoms], (3, 4))]  # not the shapes that only collide
    if not len(geoms):
        return data.xipos[body].copy(), 0.05
    low = np.min([data.geom_xpos[g] - model.geom_rbound[g] for g in geoms], axis=0)
    high = np.max([data.geom_xpos[g] + model.geom_rbound[g] for g in geoms], axis=0)
    return (low + high) / 2, float(np.linalg.norm(high - low) / 2 / np.sqrt(3))


@dataclass(frozen=True)
class Practising:
    """What a worker does with a stream of (scene, number of groups, file)."""

    seed: int
    postures: Array

    def __call__(self, jobs: Iterator[tuple[str, int, Path]]) -> Iterator[None]:
        for scene, groups, path in jobs:
            practise(scene, groups, path, self.seed, self.postures)
            yield


def practise(scene: str, groups: int, path: Path, seed: int, postures: Array) -> None:
    """Renders the groups of one scene into a file."""
    rng = np.random.default_rng([seed, *scene.encode()])
    stock = build_practice(scene, seed)
    bodies = candidates(stock)
    renderer = Renderer(stock, CAMERA_NAME, bodies[0])
    model = renderer.model  # the copy that is drawn; physics are not needed
    data = mujoco.MjData(model)
    rows: dict[str, list[NDArray]] = {k: [] for k in ("rgb", "depth", "mask", "K", "T_world_cam", "T_world_object")}
    made = tries = 0
    while made < groups and tries < 20 * groups:
        tries += 1
        body = int(rng.choice(bodies))
        renderer.set_object(body)
        randomise_look(model, stock, rng)
        if is_assembly(scene):
            assemble(model, rng)
            stock.body_pos[model.body(BASE).id] = (0.0, 0.68, rng.uniform(0.02, 0.2))
        randomise_light(model, stock, rng)
        around = Around.draw(model, rng)
        views: list[tuple[NDArray, ...]] = []
        for _ in range(2 * VIEWS):
            randomise_view(model, stock, data, body, around, postures, rng)
            vary_light(model, rng)
            rgb, depth, mask, camera = renderer.render(data, SPEC.image_size)
            if mask.sum() >= MIN_PIXELS:
                T = np.eye(4)
                T[:3, :3], T[:3, 3] = data.xmat[body].reshape(3, 3), data.xpos[body]
                views.append((rgb, depth, mask, camera.K, camera.T_world_cam, T))
            if len(views) == VIEWS:
                break
        if len(views) == VIEWS:
            made += 1
            for key, values in zip(rows, zip(*views, strict=True), strict=True):
                rows[key].append(np.stack(values))
    renderer.close()  # before the next scene makes its own: one GL context at a time
    write_arrays(path, {key: np.stack(values) for key, values in rows.items()})


def render_practice(out: Path, scenes: dict[str, int], seed: int, workers: int) -> list[Path]:
    """Groups per scene, in parallel; files that exist are kept."""
    with claimed(out):
        paths = {scene: out / f"{scene}.safetensors" for scene in scenes}
        jobs = [(scene, scenes[scene], path) for scene, path in paths.items() if not path.exists()]
        if jobs:
            work = Practising(seed, robot_postures(300, seed))
            with closing(spread(work, jobs, workers)) as results:
                for _ in tqdm(results, "practice scenes", total=len(jobs), unit="scene"):
                    pass
    return list(paths.values())


FORMS = {
    "rgb": Form("uint8", ("G", VIEWS, SPEC.image_size, SPEC.image_size, 3)),
    "depth": Form("float32", ("G", VIEWS, SPEC.image_size, SPEC.image_size)),
    "mask": Form("bool", ("G", VIEWS, SPEC.image_size, SPEC.image_size)),
    "K": Form("float64", ("G", VIEWS, 3, 3)),
    **{name: Form("float64", ("G", VIEWS, 4, 4)) for name in ("T_world_cam", "T_world_object")},
}


def load_groups(path: Path) -> list[Group]:
    rows = read_arrays(path, "delete it and run the same command again", FORMS).arrays
    nothing = np.zeros(0)
    groups = []
    for g in range(len(rows["rgb"])):
        frames = [
            Frame(
                rows["rgb"][g, v],
                rows["depth"][g, v],
                rows["mask"][g, v],
                Camera(rows["K"][g, v], rows["T_world_cam"][g, v]),
                nothing,
                nothing,
            )
            for v in range(VIEWS)
        ]
        groups.append(Group(frames, rows["T_world_object"][g]))
    return groups
