"""A world: one of Meta-World's scenes, one model for both of its tasks.

    world = World("door")
    world.reset(scene)
    frame = world.observe()          # RGB, depth, mask, camera
    world.step(action)               # one control step of 12.5 ms
    world.success("open")            # Meta-World's official flag

The physics are Meta-World's own (mocap weld, 5 substeps of 2.5 ms, 1 cm per unit of action);
the reward, the observation stack and the second forward pass of its `step` are left out.
The task appears only in `success`, so nothing else can leak it. What differs between worlds is data (`pairs`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.spatial.transform import Rotation

from ..errors import UserError
from ..frames import Camera, Frame, look_at
from ..spec import DOOR, SPEC, Array, Task, steps_of, stock_task
from .gl import mujoco
from .pairs import Pair, find_pair
from .render import Renderer
from .scenes import Scene

FRAME_SKIP = 5
ACTION_SCALE = 0.01  # metres per unit of action and step
MOCAP_LOW = np.array([-0.5, 0.40, 0.05])
MOCAP_HIGH = np.array([0.5, 1.0, 0.5])
MOCAP_QUAT = np.array([1.0, 0.0, 1.0, 0.0])
WELD = np.array([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0, 0.0, 0.0, 0.0, 5.0])
DIVERGED = (mujoco.mjtWarning.mjWARN_BADQPOS, mujoco.mjtWarning.mjWARN_BADQVEL, mujoco.mjtWarning.mjWARN_BADQACC)
GRIPPER_COMMAND = 0.2  # keeps the fingers closed; the same in all tasks, at all times
SETTLE_STEPS = 400
AWAY = np.array([5.0, 5.0, 0.0])  # where an object is parked while the hand settles

CAMERA_NAME = "memcorr"
CAMERA_OFFSET = np.array([0.75, 0.1, 0.85]) - np.array([0.0, 0.6, 0.15])  # of the door's camera from what it looks at
CAMERA_FOVY = 45.0
PICTURE = 320  # pixels of one side of a picture for people


@dataclass(frozen=True)
class View:
    """A user's own camera instead of the pair's own; hashable, so that worlds can be shared."""

    position: tuple[float, float, float]  # metres, world frame
    rotation: tuple[float, ...]  # 9, row by row: OpenCV camera axes -> world
    fovy: float  # degrees
    size: tuple[int, int]  # height and width, pixels

    @staticmethod
    def of(camera: Camera, height: int, width: int) -> View:
        """The same camera, if it can be drawn: square pixels, its principal point in the middle."""
        K, T = camera.K, camera.T_world_cam
        off = max(abs(K[0, 2] - width / 2), abs(K[1, 2] - height / 2))
        if abs(K[0, 0] / K[1, 1] - 1) > 1e-3 or off > 0.5 or abs(K[0, 1]) > 1e-6:
            raise UserError(
                "the camera cannot be drawn: fx and fy have to be equal, cx and cy in the middle of the image"
            )
        fovy = float(np.degrees(2 * np.arctan(0.5 * height / K[1, 1])))
        x, y, z = map(float, T[:3, 3])
        return View((x, y, z), tuple(map(float, T[:3, :3].ravel())), fovy, (height, width))

    @property
    def T_world_cam(self) -> Array:
        T = np.eye(4)
        T[:3, :3], T[:3, 3] = np.reshape(self.rotation, (3, 3)), self.position
        return T


def turned_pose(T_world_cam: Array, target: Array, azimuth_deg: float, elevation_deg: float = 0.0) -> Array:
    """A camera's pose after turning it about the vertical axis through `target`, and up."""
    T, offset = T_world_cam.copy(), T_world_cam[:3, 3] - target
    level = np.cross(offset, [0.0, 0.0, 1.0])
    up = Rotation.from_rotvec(np.radians(elevation_deg) * level / max(float(np.linalg.norm(level)), 1e-9))
    R = (Rotation.from_rotvec([0.0, 0.0, np.radians(azimuth_deg)]) * up).as_matrix()
    T[:3, :3], T[:3, 3] = R @ T[:3, :3], target + R @ offset
    return T


def camera_pose(pair: Pair, azimuth_deg: float = 0.0, elevation_deg: float = 0.0) -> Array:
    """`T_world_cam` (OpenCV axes) after turning the camera about the vertical axis through what it looks at, and up."""
    target, offset = np.array(pair.look_at), CAMERA_OFFSET * pair.distance
    if elevation_deg:
        e, flat = np.radians(elevation_deg), np.linalg.norm(offset[:2])
        up, out = offset[2] * np.cos(e) + flat * np.sin(e), flat * np.cos(e) - offset[2] * np.sin(e)
        offset = np.append(offset[:2] / flat * out, up)
    a = np.radians(azimuth_deg)
    R_z = np.array([[np.cos(a), -np.sin(a), 0.0], [np.sin(a), np.cos(a), 0.0], [0.0, 0.0, 1.0]])
    return look_at(target + R_z @ offset, target)


def build_model(scene: str, furnish: Callable[[mujoco.MjSpec], None] | None = None) -> mujoco.MjModel:
    """One of Meta-World's scenes, plus one calibrated camera and whatever `furnish` adds."""
    package = find_spec("metaworld")  # located, not imported: its import takes seconds
    assert package is not None and package.origin is not None
    spec = mujoco.MjSpec.from_file(str(Path(package.origin).parent / "assets/sawyer_xyz" / f"{scene}.xml"))
    spec.worldbody.add_camera(name=CAMERA_NAME, fovy=CAMERA_FOVY)
    if furnish is not None:
        furnish(spec)
    model = spec.compile()
    model.eq_data[model.eq_type == mujoco.mjtEq.mjEQ_WELD] = WELD
    return model


class World:
    """One simulated scene. Rendering starts lazily: one GL context per process."""

    def __init__(self, pair: Pair | str = DOOR, view: View | None = None) -> None:
        self.pair = pair = find_pair(pair) if isinstance(pair, str) else pair
        self.view = view  # instead of the pair's own camera
        self.model = model = build_model(pair.scene)
        self.data = mujoco.MjData(model)
        self._placed = [(model.body(name).id, np.array(offset)) for name, offset in pair.placed.items()]
        self._body = self._find_body(pair.body)
        self._joint = model.joint(pair.joint).id
        self._qpos, self._qvel = int(model.jnt_qposadr[self._joint]), int(model.jnt_dofadr[self._joint])
        self.free = model.jnt_type[self._joint] == mujoco.mjtJoint.mjJNT_FREE
        self._hand = model.body("hand").id
        self._fingers = [model.site("rightEndEffector").id, model.site("leftEndEffector").id]
        self._camera = model.camera(CAMERA_NAME).id
        self.place = np.zeros(3)  # p(u), moved along when the base is
        self._start = self._settle()

    def _find_body(self, name: str) -> int:
        if not name.startswith("child:"):
            return self.model.body(name).id
        parent = self.model.body(name.removeprefix("child:")).id
        return int(np.flatnonzero(self.model.body_parentid == parent)[0])

    @cached_property
    def renderer(self) -> Renderer:
        if self.view is None:
            return Renderer(self.model, CAMERA_NAME, self._body)
        self.model.cam_fovy[self._camera] = self.view.fovy
        return Renderer(self.model, CAMERA_NAME, self._body, self.view.size)

    @cached_property
    def _large(self) -> Renderer:
        return Renderer(self.model, CAMERA_NAME, self._body, PICTURE)

    def picture(self) -> NDArray[np.uint8]:
        """What the policy's camera sees, with more pixels, for people (PICTURE, PICTURE, 3)."""
        return self._large.render(self.data, PICTURE)[0]

    def _settle(self) -> Array:
        """The robot at rest at the shared start, as a full MuJoCo integration state; `reset` places the object."""
        if self.pair.parked:
            for body, _ in self._placed:
                self.model.body_pos[body] = AWAY
        self.data.mocap_pos[0] = self.pair.hand
        self.data.mocap_quat[0] = MOCAP_QUAT
        self.data.ctrl[:] = GRIPPER_COMMAND, -GRIPPER_COMMAND
        mujoco.mj_step(self.model, self.data, nstep=SETTLE_STEPS * FRAME_SKIP)
        self.data.qvel[:] = 0.0
        return self.snapshot()

    def reset(self, scene: Scene) -> None:
        """The physical configuration of `scene`; the same bits for both tasks."""
        if scene.world != self.pair.name:
            raise ValueError(f"a scene of {scene.world} cannot be put into the world {self.pair.name}")
        self.restore(scene, self._start)
        for joint, value in self.pair.still.items():
            self._set(self.model.joint(joint).id, value)
        self.set_joint(self.pair.start if scene.start is None else self.pair.start_at(scene.start))

    def snapshot(self) -> Array:
        """The full integration state: with its scene and `place`, all that the future depends on."""
        spec = mujoco.mjtState.mjSTATE_INTEGRATION
        state = np.empty(mujoco.mj_stateSize(self.model, spec))
        mujoco.mj_getState(self.model, self.data, state, spec)
        return state

    def restore(self, scene: Scene, state: Array, place: Array | None = None) -> None:
        """Back to a snapshot taken in `scene`, with the object's base at `place` if it was moved since; going on
        from there gives the same bits as never having left."""
        mujoco.mj_setState(self.model, self.data, state, mujoco.mjtState.mjSTATE_INTEGRATION)
        self.put(self.pair.place(scene.u) if place is None else place)
        for warning in DIVERGED:
            self.data.warning[warning].number = 0
        mujoco.mj_kinematics(self.model, self.data)
        self.set_camera(scene.camera_azimuth_deg, scene.camera_elevation_deg, scene.camera_orbit_deg)

    def put(self, place: Array) -> None:
        """The object's base to another place; what stands free on it stays where it is."""
        self.place = np.array(place)
        for body, offset in self._placed:
            self.model.body_pos[body] = place + offset

    def move_base(self, shift: Array) -> None:
        """The object's base, and whatever belongs to it, somewhere else in mid-episode."""
        self.put(self.place + shift)
        if self.free:
            self.data.qpos[self._qpos : self._qpos + 3] += shift
        mujoco.mj_kinematics(self.model, self.data)

    def push_hand(self, by: Array) -> None:
        """The hand, somewhere else: what holds it moves at once, and it follows."""
        self.data.mocap_pos[0] = np.clip(self.data.mocap_pos[0] + by, MOCAP_LOW, MOCAP_HIGH)

    @property
    def diverged(self) -> bool:
        """Whether the physics broke down since the last reset. MuJoCo then starts over from the model's
        default pose, in which the door is closed: a false success if this were not checked."""
        return any(self.data.warning[warning].number for warning in DIVERGED)

    def set_joint(self, q: float) -> None:
        """Puts the object by hand where its joint has the value `q`, at rest."""
        if self.free:
            self.data.qpos[self._qpos : self._qpos + 7] = *(self.place + np.array([0.0, q, 0.0])), 1.0, 0.0, 0.0, 0.0
            self.data.qvel[self._qvel : self._qvel + 6] = 0.0
        else:
            self._set(self._joint, q)
        mujoco.mj_kinematics(self.model, self.data)

    def _set(self, joint: int, q: float) -> None:
        self.data.qpos[self.model.jnt_qposadr[joint]] = q
        self.data.qvel[self.model.jnt_dofadr[joint]] = 0.0

    def set_camera(self, azimuth_deg: float, elevation_deg: float = 0.0, orbit_deg: float = 0.0) -> None:
        """Turned about the point that it looks at, and up; then about the object's base."""
        if self.view is None:
            T = camera_pose(self.pair, azimuth_deg, elevation_deg)
        else:
            T = turned_pose(self.view.T_world_cam, np.array(self.pair.look_at), azimuth_deg, elevation_deg)
        if orbit_deg:
            T = turned_pose(T, self.place, orbit_deg)
        R_mujoco = T[:3, :3] * np.array([1.0, -1.0, -1.0])  # MuJoCo cameras look along -z, y up
        self.model.cam_pos[self._camera] = T[:3, 3]
        mujoco.mju_mat2Quat(self.model.cam_quat[self._camera], R_mujoco.flatten())
        mujoco.mj_camlight(self.model, self.data)

    @property
    def steps(self) -> int:
        """Of an episode."""
        return steps_of(self.pair.name)

    @staticmethod
    def checked(action: NDArray[np.floating]) -> Array:
        a = np.asarray(action, np.float64)
        if a.shape != (SPEC.action_dim,) or not math.isfinite(a @ a):
            raise ValueError(f"an action is {SPEC.action_dim} finite numbers, not {action!r}")
        return a

    def step(self, action: NDArray[np.floating]) -> None:
        """One control step: move the mocap by up to 1 cm per axis, five substeps of physics."""
        a = self.checked(action)
        a = np.minimum(np.maximum(a, -1.0), 1.0)  # as np.clip, in a tenth of the time
        wanted = self.data.mocap_pos[0] + ACTION_SCALE * a[:3]
        self.data.mocap_pos[0] = np.minimum(np.maximum(wanted, MOCAP_LOW), MOCAP_HIGH)
        self.data.mocap_quat[0] = MOCAP_QUAT
        self.data.ctrl[:] = a[3], -a[3]
        mujoco.mj_step(self.model, self.data, nstep=FRAME_SKIP)
        mujoco.mj_kinematics(self.model, self.data)  # mj_step leaves poses one substep stale

    @property
    def hand(self) -> Array:
        """Position of the end effector, metres, world frame."""
        return self.data.xpos[self._hand].copy()

    @property
    def robot_state(self) -> Array:
        """s: end effector, right and left fingertip, metres, world frame (9)."""
        return np.concatenate([self.data.xpos[self._hand], self.data.site_xpos[self._fingers].ravel()])

    @property
    def gripper(self) -> Array:
        """g: the point midway between the fingertips, metres, world frame (3)."""
        return self.data.site_xpos[self._fingers].mean(axis=0)

    @property
    def joint(self) -> float:
        """The object's joint in its own unit (rad or metres). Never shown to a policy."""
        if self.free:
            return float(self.data.qpos[self._qpos + 1] - self.place[1])
        return float(self.data.qpos[self._qpos])

    @property
    def progress(self) -> float:
        """0 at the start, 1 at the first task's goal, -1 at the second's. Never shown to a policy."""
        return self.pair.progress(self.joint)

    @property
    def T_world_object(self) -> Array:
        """Pose of the moving body (4x4); the door's origin is its hinge. Never shown to a policy."""
        T = np.eye(4)
        T[:3, :3] = self.data.xmat[self._body].reshape(3, 3)
        T[:3, 3] = self.data.xpos[self._body]
        return T

    def advanced(self, point: Array, by: float) -> Array:
        """Where a point of the moving body will be when the joint has moved on by `by`."""
        if self.free:
            return point + by * np.array([0.0, 1.0, 0.0])
        body = self.model.jnt_bodyid[self._joint]
        R = self.data.xmat[body].reshape(3, 3)
        axis = R @ self.model.jnt_axis[self._joint]
        if self.model.jnt_type[self._joint] == mujoco.mjtJoint.mjJNT_SLIDE:
            return point + by * axis
        r = point - (self.data.xpos[body] + R @ self.model.jnt_pos[self._joint])
        c, s = np.cos(by), np.sin(by)
        return point - r + c * r + s * np.cross(axis, r) + (1 - c) * axis * (axis @ r)

    def success(self, task: Task) -> bool:
        """Meta-World's success flag of the task in the current state."""
        flag = self.pair.flags[task]
        target = self.place if flag.target == "place" else self._point(flag.target)
        gap = (self._point(flag.point) + np.array(flag.offset)) - (target + np.array(flag.target_offset))
        return bool((np.linalg.norm(gap) if flag.axis is None else abs(gap[flag.axis])) <= flag.radius)

    def _point(self, name: str) -> Array:
        kind, _, of = name.partition(":")
        return getattr(self.data, kind)(of).xpos

    def observe(self) -> Frame:
        """What the policy may see: RGB-D, visible mask of the object, camera, robot state, gripper."""
        size = SPEC.image_size if self.view is None else self.view.size
        rgb, depth, mask, camera = self.renderer.render(self.data, size)
        return Frame(rgb, depth, mask, camera, self.robot_state, self.gripper)


def shared_world(name: str = DOOR, view: View | None = None) -> World:
    """The world of this name in this process; the renderers of several share nothing but the process."""
    return _shared(name, view)


def object_points(name: str) -> Array:
    """The points (16, 3) of ground truth in the frame of the moving body."""
    return shared_world(name).pair.points if stock_task(name) else find_pair(name).points


def make_world(name: str, view: View | None = None) -> World:
    """One of the ten pairs, or a task of Meta-World."""
    if stock_task(name):
        from .stock import StockWorld

        return StockWorld(name, view)
    return World(name, view)


_shared = cache(make_world)  # would take a view that is left out for another than None
