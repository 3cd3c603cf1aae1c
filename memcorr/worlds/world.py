"""The world: Meta-World's Door scene, one model for opening and closing.

    world = World()
    world.reset(scene)
    frame = world.observe()          # RGB, depth, mask, camera
    world.step(action)               # one control step of 12.5 ms
    world.success("open")            # Meta-World's official flag

The physics are Meta-World's own (mocap weld, 5 substeps of 2.5 ms, 1 cm per unit of action);
the reward, the observation stack and the second forward pass of its `step` are left out.
The task appears only in `success`, so nothing else can leak it.
"""

from __future__ import annotations

from functools import cache, cached_property
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..frames import Frame, look_at
from ..spec import SPEC, Array, Task
from .gl import mujoco
from .render import Renderer
from .scenes import Scene

FRAME_SKIP = 5
ACTION_SCALE = 0.01  # metres per unit of action and step
MOCAP_LOW = np.array([-0.5, 0.40, 0.05])
MOCAP_HIGH = np.array([0.5, 1.0, 0.5])
MOCAP_QUAT = np.array([1.0, 0.0, 1.0, 0.0])
WELD = np.array([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0, 0.0, 0.0, 0.0, 5.0])
DIVERGED = (mujoco.mjtWarning.mjWARN_BADQPOS, mujoco.mjtWarning.mjWARN_BADQVEL, mujoco.mjtWarning.mjWARN_BADQACC)
TARGET_OFFSET: dict[Task, Array] = {"open": np.array([-0.3, -0.45, 0.0]), "close": np.array([0.2, -0.2, 0.0])}

# The shared start. Meta-World's own (0, .6, .2) is inside the half-open door; this one touches
# nothing anywhere in [0, 1]^2 and lies between the two approaches (LOG.md).
HAND_START = np.array([0.03, 0.57, 0.36])
GRIPPER_COMMAND = 0.2  # keeps the fingers closed; the same in both tasks, at all times
SETTLE_STEPS = 400

CAMERA_NAME = "memcorr"
CAMERA_POSITION = np.array([0.75, 0.1, 0.85])
CAMERA_TARGET = np.array([0.0, 0.6, 0.15])  # azimuth turns about the vertical axis through it
CAMERA_FOVY = 45.0


def camera_pose(azimuth_deg: float) -> Array:
    """`T_world_cam` (OpenCV axes) after turning the camera about the vertical axis."""
    a = np.radians(azimuth_deg)
    R_z = np.array([[np.cos(a), -np.sin(a), 0.0], [np.sin(a), np.cos(a), 0.0], [0.0, 0.0, 1.0]])
    return look_at(CAMERA_TARGET + R_z @ (CAMERA_POSITION - CAMERA_TARGET), CAMERA_TARGET)


def build_model(scene: str = "sawyer_door_pull") -> mujoco.MjModel:
    """One of Meta-World's scenes, the Door's by default, plus one calibrated camera."""
    package = find_spec("metaworld")  # located, not imported: its import takes seconds
    assert package is not None and package.origin is not None
    spec = mujoco.MjSpec.from_file(str(Path(package.origin).parent / "assets/sawyer_xyz" / f"{scene}.xml"))
    spec.worldbody.add_camera(name=CAMERA_NAME, fovy=CAMERA_FOVY)
    model = spec.compile()
    model.eq_data[model.eq_type == mujoco.mjtEq.mjEQ_WELD] = WELD
    return model


class World:
    """One simulated door. Rendering starts lazily: one GL context per process."""

    def __init__(self) -> None:
        self.model = build_model()
        self.data = mujoco.MjData(self.model)
        self._door_body = self.model.body("door").id
        self._door_link = self.model.body("door_link").id
        self._door_qpos = self.model.joint("doorjoint").qposadr[0]
        self._door_qvel = self.model.joint("doorjoint").dofadr[0]
        self._handle = self.model.geom("handle").id
        self._hand = self.model.body("hand").id
        self._fingers = [self.model.site("rightEndEffector").id, self.model.site("leftEndEffector").id]
        self._camera = self.model.camera(CAMERA_NAME).id
        self._start = self._settle()

    @cached_property
    def renderer(self) -> Renderer:
        return Renderer(self.model, CAMERA_NAME, self._door_link)

    def _settle(self) -> Array:
        """The robot at rest at the shared start, as a full MuJoCo integration state.

        The door stays closed meanwhile, out of the hand's way; `reset` places it.
        """
        self.data.mocap_pos[0] = HAND_START
        self.data.mocap_quat[0] = MOCAP_QUAT
        self.data.ctrl[:] = GRIPPER_COMMAND, -GRIPPER_COMMAND
        mujoco.mj_step(self.model, self.data, nstep=SETTLE_STEPS * FRAME_SKIP)
        self.data.qvel[:] = 0.0
        return self.snapshot()

    def reset(self, scene: Scene) -> None:
        """The physical configuration of `scene`; the same bits for both tasks."""
        self.restore(scene, self._start)
        self.set_door_joint(SPEC.door_start)
        self.set_camera_azimuth(scene.camera_azimuth_deg)

    def snapshot(self) -> Array:
        """The full integration state: with its scene, all that the future depends on."""
        spec = mujoco.mjtState.mjSTATE_INTEGRATION
        state = np.empty(mujoco.mj_stateSize(self.model, spec))
        mujoco.mj_getState(self.model, self.data, state, spec)
        return state

    def restore(self, scene: Scene, state: Array) -> None:
        """Back to a snapshot taken in `scene`; going on from there gives the same bits as never having left."""
        mujoco.mj_setState(self.model, self.data, state, mujoco.mjtState.mjSTATE_INTEGRATION)
        self.model.body_pos[self._door_body] = scene.door_position
        for warning in DIVERGED:
            self.data.warning[warning].number = 0
        mujoco.mj_kinematics(self.model, self.data)
        self.set_camera_azimuth(scene.camera_azimuth_deg)

    @property
    def diverged(self) -> bool:
        """Whether the physics broke down since the last reset. MuJoCo then starts over from the model's
        default pose, in which the door is closed: an invented success unless somebody looks here."""
        return any(self.data.warning[warning].number for warning in DIVERGED)

    def set_door_joint(self, angle: float) -> None:
        """Place the door by hand, at rest (used by `reset` and by tests)."""
        self.data.qpos[self._door_qpos] = angle
        self.data.qvel[self._door_qvel] = 0.0
        mujoco.mj_kinematics(self.model, self.data)

    def set_camera_azimuth(self, azimuth_deg: float) -> None:
        T = camera_pose(azimuth_deg)
        R_mujoco = T[:3, :3] * np.array([1.0, -1.0, -1.0])  # MuJoCo cameras look along -z, y up
        self.model.cam_pos[self._camera] = T[:3, 3]
        mujoco.mju_mat2Quat(self.model.cam_quat[self._camera], R_mujoco.flatten())
        mujoco.mj_camlight(self.model, self.data)

    def step(self, action: NDArray[np.floating]) -> None:
        """One control step: move the mocap by up to 1 cm per axis, five substeps of physics."""
        a = np.asarray(action, np.float64)
        if a.shape != (SPEC.action_dim,) or not np.isfinite(a).all():
            raise ValueError(f"an action is {SPEC.action_dim} finite numbers, not {action!r}")
        a = np.clip(a, -1.0, 1.0)
        self.data.mocap_pos[0] = np.clip(self.data.mocap_pos[0] + ACTION_SCALE * a[:3], MOCAP_LOW, MOCAP_HIGH)
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
    def door_joint(self) -> float:
        """Hinge angle in rad: 0 closed, about -1.6 open. Never shown to a policy."""
        return float(self.data.qpos[self._door_qpos])

    @property
    def T_world_door(self) -> Array:
        """Pose of the moving door (4x4); its origin is the hinge. Never shown to a policy."""
        T = np.eye(4)
        T[:3, :3] = self.data.xmat[self._door_link].reshape(3, 3)
        T[:3, 3] = self.data.xpos[self._door_link]
        return T

    def success(self, task: Task) -> bool:
        """Meta-World's success flag of door-open or door-close in the current state."""
        offset = self.data.geom_xpos[self._handle] - (self.model.body_pos[self._door_body] + TARGET_OFFSET[task])
        distance = abs(offset[0]) if task == "open" else np.linalg.norm(offset)
        return bool(distance <= SPEC.success_radius)

    def touching(self) -> bool:
        """Whether anything touches the door in the current state."""
        mujoco.mj_forward(self.model, self.data)
        touched = self.model.body_rootid[self.model.geom_bodyid[self.data.contact.geom]]
        return bool((touched == self._door_body).any())

    def observe(self) -> Frame:
        """What the policy may see: RGB-D, visible door mask, camera, robot state, gripper."""
        rgb, depth, mask, camera = self.renderer.render(self.data, SPEC.image_size)
        return Frame(rgb, depth, mask, camera, self.robot_state, self.gripper)


@cache
def shared_world() -> World:
    """The world of this process, and so its one GL context."""
    return World()
