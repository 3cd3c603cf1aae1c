"""Rollouts of any policy in any environment, under the right and under other conditions, and with noise for images.

    from memcorr.audit.online import GymEnvironment, audit_online

    trials = audit_online(policy, GymEnvironment(make, ("open", "close"), seeds=range(20)), conditions)

`policy(observation, condition)` answers with actions, (A,) or (k, A); `conditions` says what it is shown for each task,
None is shown for none. `make(task)` is a Gymnasium environment whose `reset(seed=n)` gives the same start for every
task, and whose `info` says "success" (or "is_success").
"""

from __future__ import annotations

import random
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import gymnasium
import numpy as np
from numpy.typing import NDArray

from ..errors import UserError
from ..evaluation.evaluate import list_jobs
from ..evaluation.rollout import Job, first_chunk_direction
from ..spec import DOOR, SPEC, Array, Task, TestSet
from ..worlds.gym_env import observation_of
from ..worlds.scenes import Scene
from ..worlds.world import shared_world
from .evidence import USUAL, Shown, Trial

Listener = Callable[[Any, Any], Any]  # (observation, condition) -> actions; `reset(seed)` is called if it has one


class Environment(Protocol):
    @property
    def tasks(self) -> Sequence[Task]: ...

    @property
    def scenes(self) -> Sequence[Any]:
        """Starts, each the same for all tasks."""
        ...

    def begin(self, scene: Any, task: Task) -> None: ...

    def observe(self) -> Any: ...

    def step(self, action: Array) -> tuple[bool, bool]:
        """(over, success)."""
        ...

    def direction(self, scene: Any, executed: Array) -> Task | None:
        """Which task's first chunk the executed one resembles; None where it cannot be told."""
        ...


class GymEnvironment:
    """Any Gymnasium environment, one per task; scenes are its seeds."""

    def __init__(self, make: Callable[[Task], gymnasium.Env], tasks: Sequence[Task], seeds: Sequence[int]) -> None:
        self.environments = {task: make(task) for task in tasks}
        self.tasks, self.scenes = tuple(tasks), tuple(seeds)

    def begin(self, scene: int, task: Task) -> None:
        self.current = self.environments[task]
        self.observation, _ = self.current.reset(seed=scene)

    def observe(self) -> Any:
        return self.observation

    def step(self, action: Array) -> tuple[bool, bool]:
        space = self.current.action_space
        given = action.astype(space.dtype) if isinstance(space, gymnasium.spaces.Box) else action
        self.observation, _, terminated, truncated, info = self.current.step(given)
        flags = [name for name in ("success", "is_success") if name in info]
        if not flags:
            raise UserError(f"{self.current}: info has neither success nor is_success, so nothing can be judged")
        success = bool(info[flags[0]])
        return success or terminated or truncated, success

    def direction(self, scene: int, executed: Array) -> None:
        return None


class WorldEnvironment:
    """One of memcorr's worlds. Observations are those of its Gymnasium environment, and `elapsed`, the steps made."""

    def __init__(
        self,
        world: str = DOOR,
        condition: TestSet = "validation",
        seed: int = 0,
        scenes: Sequence[int] = (),
    ) -> None:
        self.world = shared_world(world)
        jobs = list_jobs([condition], seed, (), scenes, world)
        self.tasks, self.scenes = self.world.pair.tasks, list(dict.fromkeys(job.scene for job in jobs))
        if any(scene.disturbances for scene in self.scenes):
            raise UserError("--condition disturbed: what goes wrong there is for `memcorr evaluate` alone")

    def begin(self, scene: Scene, task: Task) -> None:
        self.world.reset(scene)
        self.task, self.elapsed = task, 0

    def observe(self) -> dict[str, Any]:
        return {**observation_of(self.world.observe()), "elapsed": self.elapsed}

    def step(self, action: Array) -> tuple[bool, bool]:
        if not np.isfinite(action).all():
            return True, False
        self.world.step(action)
        self.elapsed += 1
        diverged = self.world.diverged
        success = self.world.success(self.task) and not diverged
        return success or diverged or self.elapsed >= SPEC.episode_steps, success

    def direction(self, scene: Scene, executed: Array) -> Task:
        return first_chunk_direction(self.world, Job(scene, self.task), executed)


def scene_name(scene: Any) -> str:
    return f"{scene.condition} {scene.index}" if isinstance(scene, Scene) else str(scene)


def other_task(task: Task, tasks: Sequence[Task]) -> Task:
    """Of two the other one; of more the next."""
    return tasks[(list(tasks).index(task) + 1) % len(tasks)]


def shown_for(
    task: Task, tasks: Sequence[Task], shown: Shown, conditions: Mapping[Task, Any], false: Sequence[Any] = ()
) -> Any:
    """The condition itself; `false` are those of another object, the nth in place of the nth task's."""
    if shown == "false":
        return false[list(tasks).index(task) % len(false)]
    return None if shown == "empty" else conditions[other_task(task, tasks) if shown == "opposite" else task]


def noised(observation: Any, rng: np.random.Generator) -> Any:
    """The observation with noise for every image, whatever holds it: colours at random, pixels of anything else
    (depth, a mask) shuffled. An image is an array of at least 16 x 16."""
    if isinstance(observation, Mapping):
        return {name: noised(value, rng) for name, value in observation.items()}
    if not isinstance(observation, np.ndarray) or sum(size >= 16 for size in observation.shape) < 2:
        return observation
    if observation.dtype == np.uint8:
        return rng.integers(0, 256, observation.shape, np.uint8)
    return rng.permutation(observation.ravel()).reshape(observation.shape)


def has_images(observation: Any) -> bool:
    if isinstance(observation, Mapping):
        return any(map(has_images, observation.values()))
    return noised(observation, np.random.default_rng()) is not observation


def begin_episode(policy: Listener, *key: str) -> np.random.Generator:
    """The same noise for every condition: its own, if it has `reset(seed)`, and whatever it draws from the global
    generators of random, numpy and torch. What is returned draws images of noise."""
    seed = zlib.crc32(" ".join(key).encode())
    random.seed(seed)
    np.random.seed(seed)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)
    reset = getattr(policy, "reset", None)
    if reset is not None:
        reset(seed)
    return np.random.default_rng(seed)


def chunk_of(answer: Any) -> NDArray[np.float64]:
    """Actions (k, A), whatever array or tensor they came as."""
    if hasattr(answer, "detach"):
        answer = answer.detach().cpu().numpy()
    chunk = np.atleast_2d(np.asarray(answer, np.float64))
    if chunk.ndim != 2 or not len(chunk):
        raise UserError(f"the policy answered with shape {chunk.shape}: give actions (k, A), or one (A,)")
    return chunk


def audit_online(
    policy: Listener,
    environment: Environment,
    conditions: Mapping[Task, Any],
    *,
    shown: Sequence[Shown] = USUAL,
    executed: int = SPEC.executed,
    longest: int = 10_000,
    false: Sequence[Any] = (),
) -> Iterator[Trial]:
    """One trial for every scene, task and condition; `false` are conditions of another object. Of each answer at most
    `executed` actions are made before the next look."""
    if len(environment.tasks) < 2:
        raise UserError("an audit exchanges conditions: the environment needs at least two tasks")
    for scene in environment.scenes:
        for task in environment.tasks:
            for choice in shown:
                rng = begin_episode(policy, scene_name(scene), task)
                environment.begin(scene, task)
                if choice == "noise" and not has_images(environment.observe()):
                    continue
                condition = shown_for(task, environment.tasks, choice, conditions, false)
                made: list[Array] = []
                over = success = False
                while not over and len(made) < longest:
                    seen = environment.observe()
                    seen = noised(seen, rng) if choice == "noise" else seen
                    for action in chunk_of(policy(seen, condition))[:executed]:
                        over, success = environment.step(action)
                        made.append(action)
                        if over:
                            break
                direction = environment.direction(scene, np.stack(made))
                yield Trial(scene_name(scene), task, choice, success, len(made), direction)
