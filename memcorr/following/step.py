"""One step from (frame, reference, progress) to (relation, progress): the only way from what is seen to a policy.

    following = Following(MatcherSource(matcher), phase="seen")
    (relation,) = following.step([Query(observation, reference, elapsed=0)])
    (relation,) = following.step([Query(observation, reference, elapsed=8, before=relation.progress)])

Point pairs come from a source: a matcher, or a simulator that knows the truth. The phase is the paper's clock, or found
by what the live scene looks like (`course`). Nothing is remembered here: who follows keeps `relation.progress`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from ..correspondence.lift import BATCH, match_frames
from ..correspondence.matcher import Matcher
from ..correspondence.matches import Matches, ground_truth_matches, motion_of, residuals, retimed
from ..correspondence.rigid import inverse
from ..demos.phase import reference_phase
from ..demos.store import Demonstration
from ..errors import UserError
from ..frames import Frame
from ..spec import Array, Lifting, PhaseSource
from .course import USUAL, Course, PhaseCosts, Progress, expected_phase, seen_phase
from .doubts import Witness
from .reference import Reference

Clock = Callable[[int, int], int]  # elapsed steps and frames of the reference -> frame


@dataclass(frozen=True)
class Observation:
    """What is seen at one instant. The pose is simulator truth, for `TruthSource` and diagnostics alone."""

    frame: Frame
    object_pose: Array | None = None  # (4, 4)


@dataclass(frozen=True)
class Query:
    """What one decision of a follower asks."""

    observation: Observation
    reference: Reference
    elapsed: int  # control steps since the reference was begun
    before: Progress | None = None  # of the last relation; None at the first query
    began: Observation | None = None  # the episode's first, where the reference is begun in the middle of one


@dataclass(frozen=True)
class Relation:
    """How the live scene relates to a reference; without one, only what is seen."""

    frame: Frame
    reference: Demonstration | None = None
    phase: int | None = None  # j, the reference's current frame
    matches: Matches | None = None  # (16, ...) between that frame and the live one; None where nothing is matched
    motion: Array | None = None  # (4, 4) from that frame's points to the live ones; None with fewer than four of them
    progress: Progress | None = None  # for the next query, where the phase is by what is seen
    looked_at: int | None = None  # the frame that was really matched,
    measured: Matches | None = None  # and what came of it
    witness: Witness | None = None  # of that frame
    stuck: str = ""  # why nothing more is to be expected

    @property
    def recorded(self) -> int | None:
        """The phase as a frame of the recording, which may be followed at another pace."""
        if self.phase is None or self.reference is None or self.reference.recorded is None:
            return self.phase
        return int(self.reference.recorded[self.phase])

    @property
    def returning(self) -> bool:
        """The hand is off the reference's track and on its way back to before the contact."""
        return self.progress is not None and self.progress.returning

    def error_mm(self, object_pose: Array) -> float | None:
        """Mean 3D error of the valid points, from simulator truth; None where there is none."""
        if self.measured is None or self.reference is None or self.reference.object_pose is None:
            return None
        residual = residuals(self.measured, self.reference.object_pose[self.looked_at], object_pose)
        valid = self.measured.valid
        return float((1e3 * np.linalg.norm(residual, axis=-1))[valid].mean()) if valid.any() else None


class MatchSource(Protocol):
    """Where point pairs come from."""

    def match(self, references: Sequence[tuple[Reference, int]], observations: Sequence[Observation]) -> Matches:
        """Matches (B, 16, ...) between frame j of each reference and each observation."""
        ...

    def course(self, reference: Reference) -> Course: ...


@dataclass(frozen=True)
class MatcherSource:
    """A frozen matcher; batches have one size, so that a result never depends on its company."""

    matcher: Matcher
    lifting: Lifting = "rigid"
    batch: int = BATCH

    def match(self, references: Sequence[tuple[Reference, int]], observations: Sequence[Observation]) -> Matches:
        prepared = [reference.at(j) for reference, j in references]
        return match_frames(self.matcher, prepared, [o.frame for o in observations], self.lifting, self.batch)

    def course(self, reference: Reference) -> Course:
        return reference.course


@dataclass(frozen=True)
class TruthSource:
    """The simulator: fixed points of the object, carried by its pose."""

    points: Array  # (16, 3) in the moving body's frame

    def match(self, references: Sequence[tuple[Reference, int]], observations: Sequence[Observation]) -> Matches:
        T_ref = np.stack([recorded_pose(reference.demonstration)[j] for reference, j in references])
        T_live = [o.object_pose for o in observations]
        return ground_truth_matches(self.points, T_ref, np.stack([T for T in T_live if T is not None]))

    def course(self, reference: Reference) -> Course:
        demonstration = reference.demonstration
        return Course.of_poses(self.points, recorded_pose(demonstration), demonstration.gripper)


def recorded_pose(demonstration: Demonstration) -> Array:
    """The object's pose (T, 4, 4) in a recording of a simulator."""
    if demonstration.object_pose is None:
        raise UserError(f"{demonstration.path} has no object_pose, which evaluation needs")
    return demonstration.object_pose


class Following:
    """How references are followed: by which source and which phase."""

    def __init__(
        self,
        source: MatchSource | None,
        phase: PhaseSource = "elapsed",
        clock: Clock = reference_phase,
        costs: PhaseCosts = USUAL,
    ) -> None:
        self.source, self.clock, self.costs = source, clock, costs
        self.seen = phase == "seen" and source is not None

    def step(self, queries: Sequence[Query]) -> list[Relation]:
        """The relation of each query, one to one; none depends on the others."""
        if not queries:
            return []
        if self.seen:
            queries = [
                self._begun(replace(query, reference=query.reference.at_pace(self.costs.pace))) for query in queries
            ]
        phases = [self._expected(query) for query in queries]
        if self.source is None:
            pairs = zip(queries, phases, strict=True)
            return [Relation(query.observation.frame, query.reference.demonstration, j) for query, j in pairs]
        references = [(query.reference, j) for query, j in zip(queries, phases, strict=True)]
        matches = self.source.match(references, [query.observation for query in queries])
        return [self._related(query, j, matches[i]) for i, (query, j) in enumerate(zip(queries, phases, strict=True))]

    def _expected(self, query: Query) -> int:
        """The frame to look at: by the clock, or about as many on as steps were made since the last query, the nearest
        one in which the object is seen well."""
        length = len(query.reference)
        if not self.seen:
            return self.clock(query.elapsed, length)
        j = expected_phase(query.before, query.elapsed, length)
        if isinstance(self.source, MatcherSource) and not query.reference.is_clear(j):
            clear = [k for k in query.reference.matched_frames if query.reference.is_clear(k)]
            j = min(clear, key=lambda k: abs(k - j))
        return j

    def _begun(self, query: Query) -> Query:
        """A reference that is begun in the middle of an episode knows how the object stood at its beginning."""
        if query.before is not None or query.began is None:
            return query
        assert self.source is not None
        matches = self.source.match([(query.reference, 0)], [query.began])[0]
        first = self._related(Query(query.began, query.reference, 0), 0, matches).progress
        assert first is not None
        return replace(query, before=replace(first, elapsed=query.elapsed, since=query.elapsed, began=query.elapsed))

    def _related(self, query: Query, j: int, matches: Matches) -> Relation:
        """Where in its reference the live scene is, and the matches as if the frame found had been looked at.

        Where too little is seen, the phase stays.
        """
        assert self.source is not None
        frame, reference = query.observation.frame, query.reference.demonstration
        motion = motion_of(matches)
        witness = query.reference.witnesses.get(j)
        known = Relation(frame, reference, j, matches, motion, looked_at=j, measured=matches, witness=witness)
        if not self.seen:
            return known
        if motion is None:  # nothing is seen: nothing is learned
            before = (
                Progress(0, None, since=query.elapsed, began=query.elapsed) if query.before is None else query.before
            )
            progress = replace(before, elapsed=query.elapsed)
            return replace(known, phase=before.phase, progress=progress, stuck=progress.stuck(self.costs))
        course = self.source.course(query.reference)
        progress = seen_phase(course, motion @ course.motion[j], frame.gripper, query.before, query.elapsed, self.costs)
        along = course.motion[progress.phase] @ np.linalg.inv(course.motion[j])
        found, at = retimed(matches, along), progress.phase
        motion = motion @ inverse(along)
        stuck = progress.stuck(self.costs)
        return replace(known, phase=at, matches=found, motion=motion, progress=progress, stuck=stuck)
