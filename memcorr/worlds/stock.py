"""Any of Meta-World's fifty tasks as a world: its own scene, scripted policy, success flag and placements.

    world = shared_world("metaworld/button-press")

Nothing of Meta-World is changed; a camera is added. There is one task and no pair. The mask shows the bodies that the
scripted policy moves, and the camera looks at the first of them. Where the goal does not move with the object, one
recording cannot tell where it is: "metaworld/push" says so, and "metaworld/push-along" moves the goal along.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import UserError
from ..spec import STOCK, STOCK_STEPS, Array, Task, stock_task
from .disturbances import FAULTS, drawn
from .gl import mujoco
from .render import Renderer
from .scenes import Scene
from .world import CAMERA_NAME, DIVERGED, View, World, build_model

ALONG = "-along"
MOVED_M, TURNED_RAD = 0.005, 0.05  # a body that moved by so much in the scripted policy's hands is part of the object
ROBOT, TABLE = "base", ("world", "tablelink", "RetainingWall", "mocap")
DISTURBED = ("bump", "action-noise", "delay", *FAULTS, "azimuth", "elevation")  # what needs no joint and no base
SAME_M, FOLLOWS_M = 1e-6, 0.02
DRAWS = 100  # placements that Meta-World may refuse in a row


@dataclass(frozen=True)
class StockTask:
    """What stands in place of a `Pair`: a name, a task, and what the camera looks at."""

    name: str  # metaworld/push-along
    look_at: tuple[float, float, float]
    points: Array  # (16, 3) on the surface of the object, in its frame
    distance: float = 0.6

    @property
    def tasks(self) -> tuple[Task]:
        return (stock_task(self.name),)

    def progress(self, q: float) -> float:
        """Metres that the object moved: how many are needed, Meta-World alone knows."""
        return q


def environment(name: str) -> tuple[Any, Any, bool]:
    """Meta-World's environment and scripted policy of "metaworld/NAME", and whether its goal is moved along."""
    from metaworld.env_dict import ALL_V3_ENVIRONMENTS
    from metaworld.policies import ENV_POLICY_MAP

    task = stock_task(name)
    along = task.endswith(ALONG)
    key = f"{task.removesuffix(ALONG)}-v3"
    if key not in ALL_V3_ENVIRONMENTS:
        known = ", ".join(k.removesuffix("-v3") for k in ALL_V3_ENVIRONMENTS)
        raise UserError(f"unknown world {name!r}: {STOCK}NAME, where NAME is one of {known}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        env = ALL_V3_ENVIRONMENTS[key]()
    env._partially_observable = False
    env._set_task_called = True
    env.max_path_length = 10**9  # the rollout counts its steps itself
    scripted: Any = ENV_POLICY_MAP[key]
    return env, scripted(), along


@dataclass(frozen=True)
class Snapshot:
    """All that the future of a stock world depends on."""

    physics: Any  # mujoco.MjData, whole: Meta-World reads derived quantities as its last step left them
    places: tuple[Array, ...]  # of bodies and sites in the model
    own: dict[str, Any]  # what Meta-World's environment remembers
    success: bool
    stood: Array  # (4, 4) of the object when the episode began


class StockWorld(World):
    """A task of Meta-World behind the interface of a `World`."""

    free = True  # nothing is known of joints

    def __init__(self, name: str, view: View | None = None) -> None:
        self.name = name
        self.env, self.policy, self.along = environment(name)
        self.view = view
        self.model = self.env.model = build_model(self.env.model_name.split("/")[-1].removesuffix(".xml"))
        self.data = self.env.data = mujoco.MjData(self.model)
        self.env.init_qpos, self.env.init_qvel = self.data.qpos.copy(), self.data.qvel.copy()
        self._hand = self.model.body("hand").id
        self._fingers = [self.model.site("rightEndEffector").id, self.model.site("leftEndEffector").id]
        self._camera = self.model.camera(CAMERA_NAME).id
        self.place, self._success, self._stood = np.zeros(3), False, np.eye(4)
        self._goal_apart: Array | None = None  # (3,) from the object to its goal, where that is moved along
        self._base_stood: Array | None = None  # (3,) where the object is moved with its goal: middle
        self._names = [n for n, v in self.env.__dict__.items() if n not in ("model", "data", "mujoco_renderer")]
        self._bodies = self._moved_bodies()
        self._body = self._bodies[0]
        if self.along:
            self._move_goal_along()
        self._check_goal()
        self._put(self._placements(np.random.default_rng(0), middle=True))
        middle = self.data.xpos[self._body] if self._geoms is None else self.data.geom_xpos[self._geoms].mean(axis=0)
        x, y, z = (float(v) for v in middle)
        self.pair = StockTask(name, (x, y, z), self._surface())  # type: ignore[assignment]

    # Where things stand

    def _placements(self, rng: np.random.Generator, middle: bool = False) -> Iterator[Array]:
        """What Meta-World's own reset would draw, one vector after the other; the middle of its range first."""
        low, high = self._range
        for _ in range(DRAWS):
            place = (low + high) / 2 if middle else rng.uniform(low, high)
            if self._goal_apart is not None:
                place[len(low) // 2 :] = place[: len(low) // 2] + self._goal_apart
            yield place
            middle = False
        raise UserError(f"{self.name}: Meta-World refuses {DRAWS} placements in a row")

    @cached_property
    def _range(self) -> tuple[Array, Array]:
        return self.env._random_reset_space.low, self.env._random_reset_space.high

    @property
    def _object_is_drawn(self) -> bool:
        """Or the goal alone."""
        low, high = self._range
        return bool(np.abs(high[:3] - low[:3]).max() > SAME_M)

    def _put(self, placements: Iterator[Array]) -> Array:
        """Meta-World's own reset with the first placement that it accepts, which is returned."""
        env, accepted = self.env, np.zeros(0)

        def draw() -> Array:
            nonlocal accepted
            accepted = next(placements)
            return accepted.copy()

        env._freeze_rand_vec, env._get_state_rand_vec = False, draw
        env.reset_model()
        env._get_state_rand_vec = accepted.copy
        env.reset()
        del env._get_state_rand_vec
        env._last_rand_vec = accepted
        if self._base_stood is not None:  # the goal alone is drawn: what it belongs to is moved with it
            low, high = self._range
            self.model.body_pos[self._base] = self._base_stood + (accepted - (low + high) / 2)[3:]
            mujoco.mj_forward(self.model, self.data)
        self._success = False
        return accepted

    @property
    def _base(self) -> int:
        return int(self.model.body_rootid[self._bodies[0]])

    def _check_goal(self) -> None:
        """Where the goal does not follow the object, a recording of one place says nothing of another."""
        if self._goal_follows():
            return
        remedy = ""
        if not self.along:
            self._move_goal_along()
            remedy = f"; {self.name}{ALONG} moves the goal along with the object" if self._goal_follows() else ""
        raise UserError(
            f"{self.name}: its goal stands elsewhere each time, seen from its object, so one recording cannot tell "
            f"where it is{remedy}"
        )

    def _goal_follows(self) -> bool:
        rng, apart = np.random.default_rng(0), []
        for _ in range(4):
            self._put(self._placements(rng))
            apart.append(self.env._target_pos - self.data.xpos[self._body])
        return bool(np.ptp(apart, axis=0).max() < FOLLOWS_M)

    def _move_goal_along(self) -> None:
        """From now on it stands to the object as in the middle of both ranges, or as in the first placement that
        Meta-World accepts."""
        self.along = True
        if len(self._range[0]) != 6:
            return
        accepted = self._put(self._placements(np.random.default_rng(0), middle=True))
        if self._object_is_drawn:
            self._goal_apart = accepted[3:] - accepted[:3]
        elif not self.model.body_dofnum[self._base]:
            self._base_stood = self.model.body_pos[self._base].copy()

    def _moved_bodies(self) -> list[int]:
        """The bodies that the scripted policy moves, in the order in which they begin to."""
        self._put(self._placements(np.random.default_rng(0), middle=True))
        robot = self.model.body(ROBOT).id
        loose = [
            body
            for body in range(self.model.nbody)
            if self.model.body_rootid[body] != robot and self.model.body(body).name not in TABLE
        ]
        mujoco.mj_forward(self.model, self.data)
        places, turns = self.data.xpos[loose].copy(), self.data.xquat[loose].copy()
        began: dict[int, int] = {}
        for t in range(STOCK_STEPS):
            self.step(self.expert())
            shift = np.linalg.norm(self.data.xpos[loose] - places, axis=1)
            angle = 2 * np.arccos(np.clip(np.abs((self.data.xquat[loose] * turns).sum(axis=1)), 0, 1))
            for body, moved in zip(loose, (shift > MOVED_M) | (angle > TURNED_RAD), strict=True):
                if moved and self._drawn_geoms(body):
                    began.setdefault(body, t)
            if self._success:
                break
        if not began:
            raise UserError(
                f"{self.name}: its scripted policy moves nothing but the robot, so one recording cannot tell where its "
                f"goal is"
            )
        return sorted(began, key=lambda body: (began[body], body))

    def _drawn_geoms(self, body: int) -> list[int]:
        ids = np.flatnonzero((self.model.geom_bodyid == body) & (self.model.geom_group <= 2))
        return [int(i) for i in ids]

    @cached_property
    def _geoms(self) -> list[int] | None:
        return self._drawn_geoms(self._body) or None

    def _surface(self) -> Array:
        """Sixteen points (16, 3) of the object, in its frame: corners of the boxes around its geoms, far apart."""
        corners = []
        R, t = self.data.xmat[self._body].reshape(3, 3), self.data.xpos[self._body]
        for geom in self._geoms or []:
            centre, half = self.model.geom_aabb[geom, :3], self.model.geom_aabb[geom, 3:]
            signs = np.stack(np.meshgrid(*[(-1, 1)] * 3, indexing="ij"), -1).reshape(-1, 3)
            world = (centre + signs * half) @ self.data.geom_xmat[geom].reshape(3, 3).T + self.data.geom_xpos[geom]
            corners.append((world - t) @ R)
        points = np.concatenate(corners)
        chosen = [0]
        while len(chosen) < 16:
            apart = np.linalg.norm(points[:, None] - points[chosen], axis=-1).min(axis=1)
            chosen.append(int(apart.argmax()))
        return points[chosen]

    # The interface of a world

    @cached_property
    def renderer(self) -> Renderer:
        size = 128 if self.view is None else self.view.size
        if self.view is not None:
            self.model.cam_fovy[self._camera] = self.view.fovy
        renderer = Renderer(self.model, CAMERA_NAME, self._body, size)
        renderer.set_object(*self._bodies)
        return renderer

    def reset(self, scene: Scene) -> None:
        if scene.world != self.pair.name:
            raise ValueError(f"a scene of {scene.world} cannot be put into the world {self.pair.name}")
        for d in scene.disturbances:
            if d.kind not in DISTURBED:
                raise UserError(f"--disturb {d.kind}: {scene.world} can be disturbed by {', '.join(DISTURBED)} alone")
        placements = self._placements(drawn(scene, "placement"))
        self._put(placements)
        while scene.condition == "demonstrations" and not self._expert_succeeds():
            self._put(placements)  # only a success is worth following
        self._clear()
        self._stood = self.T_world_object
        self.set_camera(scene.camera_azimuth_deg, scene.camera_elevation_deg)

    def _clear(self) -> None:
        for warning in DIVERGED:
            self.data.warning[warning].number = 0

    def _expert_succeeds(self) -> bool:
        """Tries it, and puts everything back."""
        start = self.snapshot()
        for _ in range(STOCK_STEPS):
            self.step(self.expert())
            if self._success:
                break
        succeeded = self._success
        self._back_to(start)
        return succeeded

    def snapshot(self) -> Any:
        own = {name: copy.deepcopy(getattr(self.env, name)) for name in self._names if self._changes(name)}
        return Snapshot(
            copy.copy(self.data), tuple(array.copy() for array in self._places), own, self._success, self._stood
        )

    def _changes(self, name: str) -> bool:
        kinds = (np.ndarray, float, int, bool, tuple, type(None), np.floating)
        return isinstance(getattr(self.env, name, object()), kinds)

    @property
    def _places(self) -> tuple[Array, ...]:
        return self.model.body_pos, self.model.body_quat, self.model.site_pos

    def restore(self, scene: Scene, state: Any, place: Array | None = None) -> None:
        self._back_to(state)
        self.set_camera(scene.camera_azimuth_deg, scene.camera_elevation_deg)

    def _back_to(self, state: Snapshot) -> None:
        for array, value in zip(self._places, state.places, strict=True):
            array[:] = value
        for name, value in state.own.items():
            setattr(self.env, name, copy.deepcopy(value))
        self._success, self._stood = state.success, state.stood
        self.data = self.env.data = copy.copy(state.physics)
        self._clear()

    def step(self, action: NDArray[np.floating]) -> None:
        *_, info = self.env.step(self.checked(action))
        self._success = bool(info["success"])

    def expert(self) -> Array:
        """The action (4) of Meta-World's scripted policy, as far as the robot executes it."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it will be clipped
            return np.clip(self.policy.get_action(self.env._get_obs().copy()), -1.0, 1.0)

    def success(self, task: Task) -> bool:
        return self._success

    @property
    def joint(self) -> float:
        """How far the object's points moved on average since the episode began, metres."""
        there, then = (self.pair.points @ T[:3, :3].T + T[:3, 3] for T in (self.T_world_object, self._stood))
        return float(np.linalg.norm(there - then, axis=1).mean())

    def move_base(self, shift: Array) -> None:
        raise UserError(f"{self.pair.name}: its base cannot be moved")

    def set_joint(self, q: float) -> None:
        raise UserError(f"{self.pair.name}: its joint cannot be set")
