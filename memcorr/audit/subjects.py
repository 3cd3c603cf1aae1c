"""What is audited: one of memcorr's policies, or what `module:callable` names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..demos.store import Demonstration
from ..errors import UserError, imported
from ..evaluation.evaluate import Subject, find_subject
from ..following.step import Relation
from ..policy.plan import Follower, Request, initial_noise
from ..policy.policy import load_policy
from ..policy.servo import SERVO
from ..spec import WORLD_TASKS, Array
from ..worlds.gym_env import frame_of
from .online import Listener


def is_callable_name(text: str) -> bool:
    """`module:callable`, and no folder of that name."""
    return ":" in text and not Path(text).exists()


def named(text: str, given: Sequence[str] = ()) -> Any:
    """What `module:name` names, from the working directory too; with arguments `given`, what it makes of them."""
    found = imported(text, "MODULE:CALLABLE")
    if not callable(found):
        raise UserError(f"{text} is a {type(found).__name__}, not a callable (observation, condition) -> actions")
    made = found(*given) if given else found
    if not callable(made):
        raise UserError(f"{text} made a {type(made).__name__} of {' '.join(given)}, not a callable")
    return made


def can_be_asked(subject: Subject) -> bool:
    """Whether it plans from frames alone: other scripted ones know the world."""
    return subject.recipe is not None or subject.policy == SERVO


class Ours:
    """A memcorr policy as a callable: the condition is a demonstration, or None."""

    def __init__(self, policy: str, matcher: str = "embedded") -> None:
        subject = find_subject(policy)
        if not can_be_asked(subject):
            raise UserError(f"{policy} is scripted: it can be audited in rollouts, not on recorded data")
        self.policy, self.matcher = load_policy(policy, "cpu"), matcher
        self.name = subject.experiment
        self.followers: dict[Path, Follower] = {}
        self.seed = 0

    def reset(self, seed: int) -> None:
        self.seed = seed

    def __call__(self, observation: Mapping[str, Any], condition: Demonstration | None) -> Array:
        frame, elapsed = frame_of(dict(observation)), int(observation["elapsed"])
        noise = initial_noise(self.seed, elapsed)
        if self.policy.design.visual:
            number = 0 if condition is None else WORLD_TASKS[condition.world].index(condition.task)
            request = Request(Relation(frame), noise, task=number, empty=condition is None)
        elif condition is None:
            request = Request(Relation(frame), noise, empty=True)
        else:
            if condition.path not in self.followers:
                self.followers[condition.path] = self.policy.follow(condition, self.matcher)
            return self.followers[condition.path].plan(frame, elapsed, noise=noise).actions
        return np.asarray(self.policy.plan([request])[0].actions)


def listener(text: str, given: Sequence[str], matcher: str) -> Listener:
    if is_callable_name(text):
        return named(text, given)
    if given:
        raise UserError(f"--given is for a callable that makes a policy; {text} is one of memcorr's")
    return Ours(text, matcher)
