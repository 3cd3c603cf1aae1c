"""Practice scenes for the embedded matcher: many Meta-World objects, everything randomised.

A *group* is one object in one look (colours, textures): a rigid body of one of Meta-World's scenes,
seen in a handful of views that differ in joint angles, positions, camera, light and where the robot
is. Any two views of a group make a training pair whose exact warp follows from depth, cameras and
the body's poses. Colours are drawn anew for most groups, so colour cannot be relied on.
"""

from __future__ import annotations

import colorsys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save
from tqdm import tqdm

from ...frames import Camera, Frame, look_at
from ...runs import claimed, spread, written_whole
from ...spec import SPEC, Array
from ...worlds.gl import mujoco
from ...worlds.pairs import PAIRS
from ...worlds.render import Renderer
from ...worlds.world import CAMERA_FOVY, CAMERA_NAME, CAMERA_OFFSET, MOCAP_QUAT, build_model

# Everything that shares the door's meshes is left out when the door is held out.
DOOR_RELATIVES = ("sawyer_door_pull", "sawyer_door_lock")
OTHER_SCENES = (
    "sawyer_assembly_peg",
    "sawyer_basketball",
    "sawyer_box",
    "sawyer_button_press",
    "sawyer_button_press_topdown",
    "sawyer_coffee",
    "sawyer_dial",
    "sawyer_drawer",
    "sawyer_faucet",
    "sawyer_hammer",
    "sawyer_handle_press",
    "sawyer_handle_press_sideways",
    "sawyer_laptop",
    "sawyer_lever_pull",
    "sawyer_peg_insertion_side",
    "sawyer_peg_unplug_side",
    "sawyer_plate_slide",
    "sawyer_shelf_placing",
    "sawyer_soccer",
    "sawyer_stick_obj",
    "sawyer_window",
    "sawyer_window_horizontal",
)
SCENERY = {"world", "base", "mocap", "tablelink", "RetainingWall"}  # top-level bodies that are no objects
DOOR, NEAR = "sawyer_door_pull", "@near"  # the door as the policy's camera sees it, in `NEAR` scenes
LOOKS_AT = np.array(PAIRS["door"].look_at)  # the door's camera
VIEWS = 6
MIN_PIXELS = 120


@dataclass(frozen=True)
class Group:
    """Views of one rigid object in one look."""

    frames: list[Frame]
    T_world_object: Array  # (views, 4, 4)


def robot_postures(count: int, seed: int) -> Array:
    """Arm joints (count, 9) with the hand at random places above the table."""
    model = build_model(DOOR)
    data = mujoco.MjData(model)
    model.body("door").pos[:] = (3.0, 3.0, 0.15)  # out of the way
    rng = np.random.default_rng(seed)
    postures = []
    for _ in range(count):
        data.mocap_pos[0] = rng.uniform((-0.3, 0.42, 0.10), (0.3, 0.85, 0.42))
        data.mocap_quat[0] = MOCAP_QUAT
        grip = rng.uniform(-1, 1)
        data.ctrl[:] = grip, -grip
        mujoco.mj_step(model, data, nstep=250)
        postures.append(data.qpos[:9].copy())
    return np.stack(postures)


def candidates(model: mujoco.MjModel) -> list[int]:
    """Bodies that can be the object: seen, and neither robot nor furniture."""
    seen = (model.geom_group <= 2) & (model.geom_rgba[:, 3] > 0) & (model.geom_type != mujoco.mjtGeom.mjGEOM_PLANE)
    bodies = np.unique(model.geom_bodyid[seen])
    return [int(b) for b in bodies if model.body(model.body_rootid[b]).name not in SCENERY]


def random_colour(rng: np.random.Generator) -> Array:
    return np.array(colorsys.hsv_to_rgb(rng.uniform(), rng.uniform(0, 0.9), rng.uniform(0.15, 1.0)))


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
    """Where a group's views scatter: all draws are in [-1, 1] or [0, 1] and scaled where they are used."""

    joints: Array  # (joints,) position within the range, [0, 1]
    place: Array  # (bodies, 2)
    camera: Array  # (3,) azimuth, elevation, distance
    near: bool  # only the policy's own camera, turned about its axis

    @staticmethod
    def draw(model: mujoco.MjModel, near: bool, rng: np.random.Generator) -> Around:
        return Around(rng.uniform(0, 1, model.njnt), rng.uniform(-1, 1, (model.nbody, 2)), rng.uniform(-1, 1, 3), near)


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

    Two views of a group differ by up to a quarter of a joint's range, 14 cm and 34 degrees of azimuth.
    """
    mujoco.mj_resetData(model, data)
    data.qpos[:9] = postures[rng.integers(len(postures))]
    for j in range(model.njnt):
        first = model.jnt_qposadr[j]
        if model.body(model.body_rootid[model.jnt_bodyid[j]]).name in SCENERY:
            continue
        share = np.clip(around.joints[j] + rng.uniform(-0.12, 0.12), 0, 1)
        if model.jnt_type[j] == mujoco.mjtJoint.mjJNT_FREE:
            data.qpos[first : first + 2] += rng.uniform(-0.07, 0.07, 2)
            yaw = share - 0.5
            turned = np.empty(4)
            turn = np.array([np.cos(yaw / 2), 0, 0, np.sin(yaw / 2)])
            mujoco.mju_mulQuat(turned, turn, data.qpos[first + 3 : first + 7])
            data.qpos[first + 3 : first + 7] = turned
        elif model.jnt_type[j] != mujoco.mjtJoint.mjJNT_BALL:
            lo, hi = model.jnt_range[j] if model.jnt_limited[j] else (-0.6, 0.6)
            data.qpos[first] = lo + share * (hi - lo)
    roots = [b for b in range(1, model.nbody) if model.body_parentid[b] == 0 and model.body(b).name not in SCENERY]
    for b in roots:
        model.body_pos[b, :2] = stock.body_pos[b, :2] + 0.03 * around.place[b] + rng.uniform(-0.07, 0.07, 2)
    x, y, z = CAMERA_OFFSET
    wobble = rng.uniform(-1, 1, 3)
    heading, elevation, distance = np.arctan2(y, x), np.arctan2(z, np.hypot(x, y)), np.linalg.norm([x, y, z])
    if around.near:
        heading += np.radians(20 * wobble[0])
    else:
        heading += np.radians(15 * around.camera[0] + 17 * wobble[0])
        elevation += np.radians(6 * around.camera[1] + 3 * wobble[1])
        distance *= 0.88 + 0.22 * around.camera[2] + 0.06 * wobble[2]
    offset = distance * np.array(
        [np.cos(elevation) * np.cos(heading), np.cos(elevation) * np.sin(heading), np.sin(elevation)]
    )
    mujoco.mj_kinematics(model, data)
    target = LOOKS_AT
    if not around.near:
        target = (LOOKS_AT if around.place[body, 0] > 0 else data.xipos[body]) + rng.uniform(-0.04, 0.04, 3)
    T = look_at(target + offset, target)
    camera = model.camera(CAMERA_NAME).id
    model.cam_pos[camera] = T[:3, 3]
    mujoco.mju_mat2Quat(model.cam_quat[camera], (T[:3, :3] * np.array([1.0, -1.0, -1.0])).flatten())
    model.cam_fovy[camera] = CAMERA_FOVY + (0.0 if around.near else rng.uniform(-3, 3))
    mujoco.mj_camlight(model, data)


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
    near = scene.endswith(NEAR)
    stock = build_model(scene.removesuffix(NEAR))
    bodies = [stock.body("door_link").id] if near else candidates(stock)
    renderer = Renderer(stock, CAMERA_NAME, bodies[0])
    model = renderer.model  # the copy that is drawn; physics are not needed
    data = mujoco.MjData(model)
    rows: dict[str, list[NDArray]] = {k: [] for k in ("rgb", "depth", "mask", "K", "T_world_cam", "T_world_object")}
    made = tries = 0
    while made < groups and tries < 20 * groups:
        tries += 1
        body = int(rng.choice(bodies))
        renderer.set_object(body)
        randomise_look(model, stock, rng, keep=0.6 if near else 0.3)
        randomise_light(model, stock, rng)
        around = Around.draw(model, near, rng)
        views: list[tuple[NDArray, ...]] = []
        for _ in range(3 * VIEWS):
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
    with written_whole(path) as temporary:
        temporary.write_bytes(save({key: np.stack(values) for key, values in rows.items()}))


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


def load_groups(path: Path) -> list[Group]:
    rows = load_file(path)
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
