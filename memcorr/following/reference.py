"""A recording that is followed: its frames as a matcher needs them, and how its object moved."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from ..correspondence.lift import ReferenceFrame, match_frames, prepare_references
from ..correspondence.matcher import Matcher
from ..correspondence.matches import motion_of
from ..correspondence.rigid import interpolated
from ..demos.pace import Pace, paced
from ..demos.phase import last_phase
from ..demos.store import Demonstration
from ..errors import UserError
from ..frames import check_frame
from ..spec import SPEC, Array
from .course import Course
from .doubts import Witness

CLEAR, ENOUGH = 0.15, 0.01  # of the most pixels that any frame shows of the object, or of the image's, see it well


class Reference:
    """A demonstration to follow; its frames are prepared for the matcher once, when they are first needed."""

    def __init__(self, demonstration: Demonstration, matcher: Matcher | None) -> None:
        if len(demonstration) < 2:
            raise UserError(f"{demonstration.path}: a reference has at least two frames")
        for name in ("gripper", "action"):  # what a policy may continue
            if not np.isfinite(getattr(demonstration, name)).all():
                raise UserError(f"{demonstration.path}: the reference's {name} holds NaN or infinity")
        self.demonstration, self.matcher = demonstration, matcher
        self._prepared: dict[int, ReferenceFrame] = {}
        self._paced: dict[Pace, Reference] = {}
        self.witnesses: dict[int, Witness] = {}  # of the frames that are prepared

    def __len__(self) -> int:
        return len(self.demonstration)

    def at_pace(self, pace: Pace) -> Reference:
        """The recording at a speed that can be followed."""
        if pace not in self._paced:
            slowed = paced(self.demonstration, pace)
            self._paced[pace] = self if slowed is self.demonstration else type(self)(slowed, self.matcher)
        return self._paced[pace]

    @cached_property
    def visible(self) -> Array:
        """(T,) share of the image that the object fills in every frame that is looked at, 0 in the others."""
        share = np.zeros(len(self))
        for j, frame in zip(self.matched_frames, self.demonstration.frames(self.matched_frames), strict=True):
            share[j] = (frame.mask & (frame.depth > 0)).mean()
        return share

    @cached_property
    def matched_frames(self) -> list[int]:
        """Every eighth frame, and the last one that a plan begins at; beyond it nothing is looked at."""
        last = max(last_phase(len(self)), 1)
        return [*range(0, last, SPEC.executed), last]

    def prepare(self, phases: Sequence[int]) -> None:
        missing = sorted({j for j in phases if j not in self._prepared})
        if self.matcher is None or not missing:
            return
        frames = self.demonstration.frames(missing)
        for j, frame in zip(missing, frames, strict=True):
            check_frame(frame, f"{self.demonstration.path}, frame {j}", self.demonstration.robot_state.shape[1])
        self.witnesses |= {j: Witness.of(frame) for j, frame in zip(missing, frames, strict=True)}
        self._prepared |= zip(missing, prepare_references(self.matcher, frames), strict=True)

    def at(self, j: int) -> ReferenceFrame:
        self.prepare([j])
        return self._prepared[j]

    @cached_property
    def course(self) -> Course:
        """How its object moved, as the matcher sees it every eight frames; made once.

        Frames in between are interpolated; a frame in which too little is seen is left out. What is hidden at the
        beginning stands where it is first seen well.
        """
        assert self.matcher is not None
        chosen = self.matched_frames
        anchor = next(j for j in chosen if self.is_clear(j))
        chosen = [j for j in chosen if j >= anchor]
        self.prepare(chosen)
        prepared = {j: self._prepared[j] for j in chosen}
        frames = dict(zip(chosen, self.demonstration.frames(chosen), strict=True))
        links = match_frames(self.matcher, [prepared[j] for j in chosen[:-1]], [frames[j] for j in chosen[1:]])
        motion, known = [np.eye(4)], [anchor]
        for i, j in enumerate(chosen[1:]):
            near = known[-1] == chosen[i]
            link = links[i] if near else match_frames(self.matcher, [prepared[known[-1]]], [frames[j]])[0]
            if (step := motion_of(link)) is not None:
                motion.append(step @ motion[-1])
                known.append(j)
        first = prepared[anchor]
        return Course(first.p_ref[first.valid], interpolated(known, motion, len(self)), self.demonstration.gripper)

    def is_clear(self, j: int) -> bool:
        """Whether enough of the object is seen in a frame that is looked at to match it."""
        return bool(self.visible[j] >= min(CLEAR * self.visible.max(), ENOUGH))
