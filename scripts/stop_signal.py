"""Counts the stop signal over whole rollouts: how often it stops a good episode, and when it stops a bad one.

    python scripts/stop_signal.py                       # rows that are there already are kept; then the table
    python scripts/stop_signal.py --scene-seed 7        # what thresholds are chosen on, in another file
    python scripts/stop_signal.py --table               # of what is there, nothing is rolled out

The servo follows one recording of each task in the ten worlds. A good episode is one that succeeds when the signal is
not obeyed; any `fallback` in it is a false stop. With a fault, the first `fallback` ends the episode, as on a robot.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path

import numpy as np
from tqdm import tqdm

from memcorr.correspondence.matcher import Matcher, load_matcher
from memcorr.correspondence.rigid import carried
from memcorr.demos.collect import collect
from memcorr.demos.store import Store
from memcorr.evaluation.rollout import Decision, Job, Response, roll_out
from memcorr.evaluation.sensors import WRONG_SETUPS
from memcorr.files import appending, decoded, read_rows
from memcorr.folders import claimed, write_text
from memcorr.following.course import Progress
from memcorr.following.reference import Reference
from memcorr.following.step import Query
from memcorr.frames import Frame
from memcorr.machine import threads
from memcorr.policy.plan import Guard, Plan, Planner, initial_noise
from memcorr.policy.servo import Servo
from memcorr.spec import DOOR, WORLD_TASKS
from memcorr.worlds.scenes import Scene, evaluation_scenes
from memcorr.worlds.world import object_points, shared_world

ROOT = Path(__file__).parents[1]
OUT, SEED = ROOT / "results/stop-signal", 577215
NOTHING, DISTURBED = "nothing is wrong", "disturbed"
GOOD = (NOTHING, DISTURBED)
FLICKER, OTHER = "mask mirrored in every second frame", "the reference of another object"
UNDISTURBED_SCENES, DISTURBED_SCENES = 10, 12  # of each world, both tasks
ALIKE = ({"plate", "plate-side"}, {"handle", "handle-side"})  # the same object, moved otherwise


@dataclass(frozen=True, kw_only=True)
class Row:
    """One rollout."""

    case: str
    world: str
    task: str
    scene: int
    disturbance: str = ""
    reference: str = ""  # "window/open", where it is another object's
    success: bool = False
    plans: int = 0
    stops: int = 0  # of them that were `fallback`
    first: int | None = None  # the first such plan, 0 is the first look
    reason: str = ""  # and its words
    kind: str = ""  # "doubt", "stuck" or "unmatched"
    doubts: int = 0  # plans with a doubt, whether or not it stopped
    returning: int = 0  # plans of a hand on its way back
    hand_cm: float = 0.0  # how far the hand had been from where it began, by the first stop or the end
    object_cm: float = 0.0  # and the object's points

    @property
    def key(self) -> tuple[str, str, str, int, str]:
        return self.case, self.world, self.task, self.scene, self.reference


def mirrored(frame: Frame, replan: int) -> Frame:
    return replace(frame, mask=frame.mask[:, ::-1].copy()) if replan % 2 else frame


@dataclass
class Obedient:
    """The servo with the guard of `Follower`, one rollout at a time."""

    references: dict[str, Reference]  # by world and task
    matcher: Matcher
    obeys: bool = False
    change: Callable[[Frame, int], Frame] = lambda frame, replan: frame
    supplied: str = ""  # another reference than the task's
    sees: bool = True
    guard: Guard = field(default_factory=Guard)
    progress: Progress | None = None
    plans: list[tuple[Plan, float, float]] = field(default_factory=list)  # and how far hand and object were by then
    began: tuple[np.ndarray, np.ndarray] = (np.zeros(3), np.eye(4))

    def __post_init__(self) -> None:
        self.planner = Planner(Servo(), self.matcher)

    def decide(self, decisions: Sequence[Decision]) -> list[Response]:
        (d,) = decisions
        frame = self.change(d.observation.frame, d.replan)
        if d.replan == 0:
            self.guard, self.progress, self.plans = Guard(), None, []
            self.began = d.robot_state[:3], d.T_world_object
        reference = self.references[self.supplied or f"{d.job.scene.world}/{d.job.task}"]
        query = Query(replace(d.observation, frame=frame), reference, d.elapsed, self.progress)
        (plan,) = self.planner.plan([query], [initial_noise(0)])
        plan, self.guard = self.guard.passed(plan, d.elapsed, self.planner.policy.design)
        self.progress = plan.progress
        points = object_points(d.job.scene.world)
        there, then = carried(d.T_world_object, points), carried(self.began[1], points)
        far = np.linalg.norm(d.robot_state[:3] - self.began[0]), np.linalg.norm(there - then, axis=-1).mean()
        self.plans.append((plan, 100 * float(far[0]), 100 * float(far[1])))
        if self.obeys and plan.fallback:  # an action that is no number ends a rollout
            return [Response(Plan(np.full_like(plan.actions, np.nan)))]
        return [Response(plan)]


def counted(case: str, job: Job, watched: Obedient, success: bool) -> Row:
    plans = [plan for plan, *_ in watched.plans]
    stops = [i for i, plan in enumerate(plans) if plan.fallback]
    first = stops[0] if stops else None
    upto = watched.plans[: len(plans) if first is None else first + 1]
    at = plans[first] if first is not None else Plan(np.zeros(0))
    kind = "unmatched" if at.unmatched else "stuck" if at.reason and at.reason == at.stuck else "doubt"
    return Row(
        case=case,
        world=job.scene.world,
        task=job.task,
        scene=job.scene.index,
        disturbance="+".join(map(str, job.scene.disturbances)),
        reference=watched.supplied,
        success=success,
        plans=len(plans),
        stops=len(stops),
        first=first,
        reason=at.reason,
        kind=kind if stops else "",
        doubts=sum(bool(plan.doubt) for plan in plans),
        returning=sum(plan.lost for plan in plans),
        hand_cm=round(max(hand for _, hand, _ in upto), 1),
        object_cm=round(max(moved for *_, moved in upto), 1),
    )


def disturbed_in(world: str, seed: int) -> list[Scene]:
    """Twelve scenes; in the ten worlds together each kind of disturbance comes eight times."""
    number = list(WORLD_TASKS).index(world)
    scenes = [scene for scene in evaluation_scenes("disturbed", seed, world=world) if scene.disturbances]
    return scenes[DISTURBED_SCENES * number : DISTURBED_SCENES * (number + 1)]


def cases(world: str, seed: int) -> Iterator[tuple[str, Job, str]]:
    """Every rollout of a world: its case, and the reference if it is another object's."""
    tasks, combined = WORLD_TASKS[world], evaluation_scenes("combined", seed, world=world)
    for case, scenes in ((NOTHING, combined[:UNDISTURBED_SCENES]), (DISTURBED, disturbed_in(world, seed))):
        yield from ((case, Job(scene, task), "") for scene in scenes for task in tasks)
    for number, case in enumerate((*WRONG_SETUPS, FLICKER)):
        for n, task in enumerate(tasks):
            for k in range(2 if case == FLICKER else 1):
                yield case, Job(combined[(number + n + k) % len(combined)], task), ""
    for n, other in enumerate(w for w in WORLD_TASKS if w != world and {w, world} not in ALIKE):
        yield OTHER, Job(combined[n % len(combined)], tasks[n % 2]), f"{other}/{WORLD_TASKS[other][n // 2 % 2]}"


def find_references(data: Path, matcher: Matcher) -> dict[str, Reference]:
    found = {}
    for world, tasks in WORLD_TASKS.items():
        folder = ROOT / "results/references" if world == DOOR else data / world
        if not (folder / "collection.json").exists():
            collect(folder, pairs=1, workers=1, world=world)
        store = Store.open(folder)
        found |= {f"{world}/{task}": Reference(store.demonstration(0, task), matcher) for task in tasks}
    return found


def roll(out: Path, data: Path, seed: int, only: Sequence[str]) -> None:
    path = out / f"seed-{seed}.jsonl"
    with claimed(out), threads(1):
        done = {row.key for row in read(path)}
        write_text(path, "".join(map(line, read(path))))  # without the half line that a killed run may have left
        of_worlds = [list(cases(world, seed)) for world in WORLD_TASKS]
        jobs = [one for turn in zip_longest(*of_worlds) for one in turn if one is not None]  # each world has its turn
        jobs = [one for one in jobs if not only or one[0] in only]
        jobs.sort(
            key=lambda one: (one[0] in GOOD) + 2 * (one[0] == FLICKER)
        )  # what ends at the first look is soon done
        missing = [
            one for one in jobs if (one[0], one[1].scene.world, one[1].task, one[1].scene.index, one[2]) not in done
        ]
        matcher = load_matcher("embedded")
        references = find_references(data, matcher) if missing else {}
        with appending(path) as append:
            for case, job, other in tqdm(missing, "stop signal", unit="rollout"):
                change = mirrored if case == FLICKER else lambda f, _, case=case: WRONG_SETUPS.get(case, _same)(f)
                watched = Obedient(references, matcher, case not in (*GOOD, FLICKER), change, other)
                ((_, outcome),) = roll_out(shared_world(job.scene.world), watched, iter([job]), slots=1)
                row = counted(case, job, watched, outcome.success)
                append(line(row))


def line(row: Row) -> str:
    """Without what is as usual."""
    usual = {f.name: f.default for f in dataclasses.fields(Row)}
    said = {name: value for name, value in dataclasses.asdict(row).items() if value != usual[name]}
    return json.dumps(said, ensure_ascii=False) + "\n"


def _same(frame: Frame) -> Frame:
    return frame


def read(path: Path) -> list[Row]:
    def parse(line: bytes) -> Row:
        return decoded(line, Row)

    return [row for _, row in read_rows(path, parse, "a rollout")]


def table(rows: Iterable[Row]) -> str:
    """Markdown."""
    rows, lines = list(rows), []
    for case in dict.fromkeys(row.case for row in rows):
        here = [row for row in rows if row.case == case]
        stopped = [row for row in here if row.stops]
        words = max((row.reason for row in stopped), key=[row.reason for row in stopped].count, default="–")
        good = [row for row in here if row.success]
        if case in GOOD:
            false = [row for row in good if row.stops]
            bad = [row for row in here if not row.success]
            lines.append(f"| {case}: good episodes stopped | {words if false else '–'} | {len(false)}/{len(good)} |")
            if bad:
                lines.append(f"| {case}: failures stopped | {words} | {sum(r.stops > 0 for r in bad)}/{len(bad)} |")
            continue
        first = sum(row.first == 0 for row in here)
        later = [row for row in stopped if row.first]
        when = f", {len(later)} later, the last at plan {max(row.first or 0 for row in later)}" if later else ""
        lines.append(f"| {case} | {words} | {len(stopped)}/{len(here)}: {first} at the first look{when} |")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scene-seed", type=int, default=SEED)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--data", type=Path, default=ROOT / "runs/stop-signal", help="references of the other worlds")
    parser.add_argument("--cases", nargs="*", default=(), help="some of them")
    parser.add_argument("--table", action="store_true", help="only print it")
    given = parser.parse_args()
    if not given.table:
        roll(given.out, given.data, given.scene_seed, given.cases)
    print(table(read(given.out / f"seed-{given.scene_seed}.jsonl")))
