"""`memcorr demo`: eight rollouts, each shown once on one page.

A learned policy and the servo, which learned nothing, follow the same two recordings of a door, side by side. Then the
servo alone: an object that nobody trained on, an object that is set back on the way, a reference that is exchanged.
The references are recorded first. Every rollout is the one that `memcorr evaluate` judges in that scene.
"""

from __future__ import annotations

import base64
import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from ..demos.collect import prepare, record
from ..demos.store import Store
from ..errors import UserError
from ..evaluation.controllers import REFERENCE_PAIR
from ..evaluation.evaluate import find_subject, list_jobs, usual
from ..evaluation.intervention import Intervention
from ..files import content_of, read_json
from ..folders import claimed, write_text, written_whole
from ..frames import Camera
from ..policy.servo import SERVO
from ..spec import DOOR, SPEC, WORLD_TASKS, Array, Task, TestSet
from ..workers import Workers, spread
from ..worlds.disturbances import Disturbance
from ..worlds.expert import begin
from ..worlds.pairs import find_pair
from ..worlds.scenes import demonstration_scenes, evaluation_scenes
from ..worlds.world import PICTURE, shared_world
from .counts import COUNTS
from .story import Story, tell
from .video import pictures, planned_path, write_video

log = logging.getLogger(__name__)
TEMPLATE = Path(__file__).parent / "demo.html"
FARTHEST = 1.3  # progress at which the chart ends
EVERY = 2  # control steps from one picture of the page to the next
LEARNED = "learned"  # stands for the policy that the demonstration is of


@dataclass(frozen=True)
class Chapter:
    """One thing to see: who follows which recordings, where, and what goes wrong on the way."""

    name: str  # in counts.json
    title: str
    text: str
    world: str
    tasks: tuple[Task, ...]
    condition: TestSet = "combined"
    policies: tuple[str, ...] = (SERVO,)
    disturbance: str = ""
    swap: int = 0


CHAPTERS: tuple[Chapter, ...] = (
    Chapter(
        "door",
        "A door: learned policy and servo side by side",
        "All four begin in the same state: the door stands where it never stood in training, the camera is turned by "
        "15°. Above, both are shown how a door is opened; below, how it is closed. Nothing else tells them what to do.",
        DOOR,
        ("open", "close"),
        policies=(LEARNED, SERVO),
    ),
    Chapter(
        "window",
        "A window: nobody trained on it",
        "Neither the matcher nor any policy has practised on a window. The servo needs one recording and no training.",
        "window",
        ("open", "close"),
        "extreme",
    ),
    Chapter(
        "set-back",
        "A disturbance: set back on the way",
        "Halfway through, the handle jumps back to its start. The servo looks again every eight steps and begins anew.",
        "handle",
        ("press",),
        "boundary",
        disturbance="set-back",
    ),
    Chapter(
        "exchange",
        "An exchange: another reference",
        "After 48 steps the reference is taken away and the opposite one is handed over. From then on that one counts.",
        "handle",
        ("pull",),
        "boundary",
        swap=48,
    ),
)


@dataclass(frozen=True)
class Part:
    """The rollouts of one world, for one worker: it records the references that they follow."""

    world: str
    chapters: tuple[Chapter, ...]


@dataclass(frozen=True)
class Shown:
    """One rollout on its way to the page; without its content, it is about to begin."""

    chapter: str
    who: str  # '' while a reference is recorded
    task: Task
    content: dict[str, Any] | None = None
    strip: NDArray[np.uint8] | None = None

    def __str__(self) -> str:
        if not self.who:
            return f"recording a reference: {self.chapter}, {self.task}"
        who = "servo" if self.who == SERVO else "learned policy"
        return f"{self.chapter}: {who}, {self.task}"


@dataclass(frozen=True)
class Telling:
    """What a worker does with a stream of parts."""

    out: Path
    policy: str
    scene: int
    scene_seed: int

    def __call__(self, parts: Iterator[Part]) -> Iterator[Shown]:
        for part in parts:
            data = self.out / ("demos" if part.world == DOOR else f"demos-{part.world}")
            data.mkdir(parents=True, exist_ok=True)
            for recorded, task in prepare(data, 1, 0, part.world, disturbed=False):
                yield Shown(part.world, "", task)
                record(data, recorded, task)
            for chapter in part.chapters:
                for who in chapter.policies:
                    yield from self.rollouts(chapter, who, data)

    def rollouts(self, chapter: Chapter, who: str, data: Path) -> Iterator[Shown]:
        policy = self.policy if who == LEARNED else who
        shown = usual(policy, Intervention(swap=chapter.swap))
        wrong = [Disturbance.parse(chapter.disturbance)] if chapter.disturbance else []
        jobs = list_jobs([chapter.condition], self.scene_seed, chapter.tasks, [self.scene], chapter.world, wrong)
        yield Shown(chapter.name, who, " and ".join(chapter.tasks))
        for story in tell(policy, shown, jobs, data, EVERY):
            video = write_video(story, self.out)
            content = as_content(story, who, video, references(story, data))
            yield Shown(chapter.name, who, story.row.task, content, strip(story))


def demo(out: Path, policy: str, scene: int, scene_seed: int, workers: Workers) -> Path:
    """Returns the page."""
    available = min(len(evaluation_scenes(chapter.condition, scene_seed)) for chapter in CHAPTERS)
    if not 0 <= scene < available:
        raise UserError(f"--scene {scene}: give 0 to {available - 1}")
    subject = find_subject(policy)
    if subject.policy != SERVO and not (subject.recipe and subject.recipe.needs_matches):
        raise UserError(f"--policy {policy}: the demonstration needs one that follows a reference by its points")
    with claimed(out):  # until its last file is there
        told = show(Telling(out, policy, scene, scene_seed), workers)
        return write_page(out, told)


def show(telling: Telling, workers: Workers) -> list[Shown]:
    """All rollouts, in the order of the page; a line says what is being shown."""
    parts = [Part(world, tuple(c for c in CHAPTERS if c.world == world)) for world in dict.fromkeys(worlds())]
    order = [(c.name, who, task) for c in CHAPTERS for task in c.tasks for who in c.policies]
    told: dict[tuple[str, str, Task], Shown] = {}
    bar = tqdm(total=len(order), unit="rollout", desc="beginning")
    with bar, closing(spread(telling, parts, workers)) as events:
        for event in events:
            if event.content is None:
                bar.set_description(str(event))
                continue
            told[event.chapter, event.who, event.task] = event
            bar.update()
    for key in order:
        log.info(f"{told[key]}: {outcome(told[key].content)}")
    return [told[key] for key in order]


def worlds() -> list[str]:
    return [chapter.world for chapter in CHAPTERS]


def outcome(content: dict[str, Any] | None) -> str:
    assert content is not None
    return f"done after {content['steps']} steps" if content["success"] else f"not done in {content['steps']} steps"


def write_page(out: Path, told: Sequence[Shown]) -> Path:
    picture = filmstrip([one.strip for one in told if one.strip is not None], out / "demo.jpg")
    counts = read_json(COUNTS, dict[str, list[str]], "counts of rollouts")
    chapters = [
        {
            "title": chapter.title,
            "text": chapter.text,
            "counts": counts.get(chapter.name, []),
            "columns": len(chapter.policies) if len(chapter.policies) > 1 else len(chapter.tasks),
            "stories": [one.content for one in told if one.chapter == chapter.name],
        }
        for chapter in CHAPTERS
    ]
    page = out / "demo.html"
    content = json.dumps({"chapters": chapters, "executed": SPEC.executed, "every": EVERY}).replace("</", "<\\/")
    write_text(page, content_of(TEMPLATE).decode().replace("{{DATA}}", content))
    log.info(f"wrote {len(told)} videos and {picture} beside the page {page}: open it in a browser")
    return page


def strip(story: Story) -> NDArray[np.uint8]:
    """How it starts, how it goes on, how it ends."""
    last = len(story.moments) - 1
    chosen = [p for i, p in enumerate(pictures(story)) if i in (0, round(0.6 * last), last)]
    return np.concatenate([cv2.resize(p, None, fx=0.5, fy=0.5, interpolation=cv2.INTER_AREA) for p in chosen], 1)


def filmstrip(strips: Sequence[NDArray[np.uint8]], path: Path) -> Path:
    """One row per rollout."""
    ok, jpeg = cv2.imencode(".jpg", cv2.cvtColor(np.concatenate(strips), cv2.COLOR_RGB2BGR))
    assert ok
    with written_whole(path) as temporary:
        temporary.write_bytes(jpeg.tobytes())
    return path


def references(story: Story, data: Path) -> dict[tuple[Task, int], str]:
    """A picture of every reference frame that was supplied, drawn anew with more pixels: the recording is repeated from
    its start. Where the repetition is not the recording, the recorded image stands."""
    wanted: dict[Task, dict[int, str]] = {}
    for one in story.references:
        if one is not None:
            wanted.setdefault(one.task, {})[one.j] = image_url(one.frame.rgb)
    world = shared_world(story.row.world)
    for task, frames in wanted.items():
        recorded = Store.open(data).demonstration(REFERENCE_PAIR, task)
        begin(world, demonstration_scenes(0, 1, story.row.world)[0], task)
        for j in range(max(frames) + 1):
            if j in frames and np.array_equal(world.gripper, recorded.gripper[j]):
                frames[j] = image_url(world.picture())
            world.step(recorded.action[j])
    return {(task, j): url for task, frames in wanted.items() for j, url in frames.items()}


def as_content(story: Story, who: str, video: Path, drawn: dict[tuple[Task, int], str]) -> dict[str, Any]:
    """A story as the page's script reads it; pixels are those of the 128x128 images."""
    row = story.row
    last, shown = story.moments[-1], [one for one in story.references if one is not None]
    return {
        "who": "servo, not learned" if who == SERVO else "learned policy",
        "task": row.task,
        "shown": list(dict.fromkeys(one.task for one in shown)),  # in the order of their supply
        "goals": list(WORLD_TASKS[row.world]),
        "goal": [round(100 * progress, 1) for progress in goal(row.world, row.task)],
        "success": last.success,
        "steps": row.steps,
        "video": video.name,
        "progress": [round(100 * m.progress, 1) for m in story.moments],
        "swap": row.shown.swap,
        "pictures": [image_url(m.picture) for m in story.moments if m.picture is not None],
        "references": sorted(set(drawn.values())),
        "decisions": [decision(story, k, drawn) for k in range(len(story.answers))],
    }


def goal(world: str, task: Task) -> tuple[float, float]:
    """Progress between which the task's flag is true, to the end of the chart."""
    pair = find_pair(world)
    bounds = sorted(pair.progress(q) for q in pair.neutral)
    return (bounds[1], FARTHEST) if task == pair.tasks[0] else (-FARTHEST, bounds[0])


def decision(story: Story, k: int, drawn: dict[tuple[Task, int], str]) -> dict[str, Any]:
    answer, reference, step = story.answers[k], story.references[k], k * SPEC.executed
    plan = answer.plan
    live = story.moments[step].live
    if reference is None or plan is None or plan.matches is None:
        raise UserError("the demonstration needs a policy that follows a reference")
    seen, valid = reference.frame.camera, plan.matches.valid
    points = zip(
        pixels(seen, plan.matches.p_ref[valid]),
        pixels(live.camera, plan.matches.p_live[valid]),
        pixels(live.camera, plan.matches.p_ref[valid]),
        plan.matches.confidence[valid].round(3).tolist(),
        strict=True,
    )
    return {
        "step": step,
        "frame": reference.j,
        "reference": reference.task,
        "picture": sorted(set(drawn.values())).index(drawn[reference.task, reference.j]),
        "points": [dict(zip(("reference", "live", "elsewhere", "confidence"), p, strict=True)) for p in points],
        "gripper_reference": pixels(seen, reference.frame.gripper[None])[0],
        "gripper_live": pixels(live.camera, live.gripper[None])[0],
        "future": pixels(seen, reference.future),
        "path": pixels(live.camera, planned_path(live.gripper, plan.actions)),
        "error_mm": answer.match_error_mm,
    }


def pixels(camera: Camera, points: Array) -> list[list[float]]:
    """Image coordinates with the origin at the corner, as SVG counts."""
    uv, _ = camera.project(points)
    return (np.asarray(uv) + 0.5).round(2).tolist()


def image_url(rgb: NDArray[np.uint8]) -> str:
    quality = (
        [cv2.IMWRITE_WEBP_QUALITY, 80] if len(rgb) == PICTURE else [cv2.IMWRITE_WEBP_QUALITY, 101]
    )  # 101: lossless
    ok, image = cv2.imencode(".webp", cv2.cvtColor(rgb, cv2.COLOR_RGB2BGR), quality)
    assert ok
    return f"data:image/webp;base64,{base64.b64encode(image.tobytes()).decode()}"
