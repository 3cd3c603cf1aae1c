"""`memcorr demo`: a learned policy follows one recording of a door; the servo, which learned nothing, follows one of a
window and of a handle, also when disturbed.

Records the reference demonstrations, rolls out chapter by chapter, and leaves videos and one self-contained page
that explains what was seen.
"""

from __future__ import annotations

import base64
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from ..demos.collect import collect
from ..errors import UserError
from ..evaluation.episodes import Episode
from ..evaluation.evaluate import evaluate, find_subject, usual
from ..evaluation.intervention import Intervention, ReferenceChoice
from ..files import content_of
from ..folders import claimed, write_text, written_whole
from ..frames import Camera
from ..policy.servo import SERVO
from ..spec import DOOR, SPEC, WORLD_TASKS, Array, Task, TestSet
from ..worlds.disturbances import Disturbance
from ..worlds.pairs import find_pair
from ..worlds.scenes import evaluation_scenes
from .story import Story, watch
from .video import pictures, planned_path, write_video

log = logging.getLogger(__name__)
TEMPLATE = Path(__file__).parent / "demo.html"
FARTHEST = 1.3  # progress at which the chart ends


@dataclass(frozen=True)
class Chapter:
    """One thing to see: a world, what goes wrong in it, and which references are handed over."""

    title: str
    world: str
    condition: TestSet = "combined"
    references: tuple[ReferenceChoice, ...] = ("correct",)
    disturbance: str = ""
    swap: int = 0
    policy: str = ""  # instead of the one that the demonstration is of


CHAPTERS: tuple[Chapter, ...] = (
    Chapter("learned policy: a door, elsewhere and seen from another side", DOOR, references=("correct", "opposite")),
    Chapter("servo, not learned: a window", "window", policy=SERVO),
    Chapter("servo: a handle is set back on the way", "handle", "boundary", disturbance="set-back", policy=SERVO),
    Chapter("servo: another reference in mid-episode", "handle", "boundary", swap=48, policy=SERVO),
)


def demo(out: Path, policy: str, scenes: int, scene_seed: int, workers: int) -> Path:
    """Returns the page."""
    available = min(len(evaluation_scenes(chapter.condition, scene_seed)) for chapter in CHAPTERS)
    if not 1 <= scenes <= available:
        raise UserError(f"--scenes {scenes}: give 1 to {available}")
    subject = find_subject(policy)
    if subject.policy != SERVO and not (subject.recipe and subject.recipe.needs_matches):
        raise UserError(f"--policy {policy}: the demonstration needs one that follows a reference by its points")
    with claimed(out):  # until its last file is there
        return tell(out, policy, scenes, scene_seed, workers)


def tell(out: Path, policy: str, scenes: int, scene_seed: int, workers: int) -> Path:
    """Records, rolls out, films and writes down."""
    counts, stories, videos = [], [], []
    for chapter in CHAPTERS:
        who = chapter.policy or policy
        data = out / ("demos" if chapter.world == DOOR else f"demos-{chapter.world}")
        collect(data, pairs=1, seed=0, workers=1, world=chapter.world)
        for choice in chapter.references:
            shown = usual(who, Intervention(reference=choice, swap=chapter.swap))
            rows = evaluate(
                who,
                out,
                conditions=[chapter.condition],
                shown=shown,
                world=chapter.world,
                disturbances=[Disturbance.parse(chapter.disturbance)] if chapter.disturbance else [],
                scene_seed=scene_seed,
                scenes=range(scenes),
                data=data,
                workers=workers,
            )
            counts += [count(rows, chapter, choice, task) for task in WORLD_TASKS[chapter.world]]
            stories.append(watch(who, shown, rows[0], data))
            videos.append(write_video(stories[-1], out))
            log.info("\n".join(sentence(c) for c in counts[-2:]))
    strip = filmstrip(stories, out / "demo.jpg")
    page = out / "demo.html"
    titles = [chapter.title for chapter in CHAPTERS for _ in chapter.references]
    content = {
        "counts": counts,
        "executed": SPEC.executed,
        "stories": [as_content(*parts) for parts in zip(titles, stories, videos, strict=True)],
    }
    write_text(page, content_of(TEMPLATE).decode().replace("{{DATA}}", json.dumps(content).replace("</", "<\\/")))
    written = ", ".join(path.name for path in (*videos, strip))
    log.info(f"wrote {written} and the page {page}: open it in a browser")
    return page


def filmstrip(stories: Sequence[Story], path: Path) -> Path:
    """One row per story: how it starts, how it goes on, how it ends."""
    rows = []
    for story in stories:
        last = len(story.moments) - 1
        chosen = [p for i, p in enumerate(pictures(story)) if i in (0, round(0.6 * last), last)]
        rows.append(
            np.concatenate([cv2.resize(p, None, fx=0.5, fy=0.5, interpolation=cv2.INTER_AREA) for p in chosen], 1)
        )
    ok, jpeg = cv2.imencode(".jpg", cv2.cvtColor(np.concatenate(rows), cv2.COLOR_RGB2BGR))
    assert ok
    with written_whole(path) as temporary:
        temporary.write_bytes(jpeg.tobytes())
    return path


def count(rows: Sequence[Episode], chapter: Chapter, choice: ReferenceChoice, task: Task) -> dict[str, Any]:
    """Successes, and first chunks that go the way of the reference supplied at the start."""
    here = [row for row in rows if row.task == task]
    return {
        "title": chapter.title,
        "reference": choice,
        "task": task,
        "successes": sum(row.success for row in here),
        "following": sum(r.first_chunk_direction == r.shown.supplied(task, r.world, 0) for r in here),
        "rollouts": len(here),
    }


def sentence(c: dict[str, Any]) -> str:
    follows = f"first chunk follows {c['following']}/{c['rollouts']}"
    return (
        f"{c['task']:6} {c['reference']:8} reference   done {c['successes']}/{c['rollouts']}   {follows}   {c['title']}"
    )


def as_content(title: str, story: Story, video: Path) -> dict[str, Any]:
    """A story as the page's script reads it; pixels are those of the 128x128 images."""
    row = story.row
    first, second = WORLD_TASKS[row.world]
    return {
        "title": f"{title}: {row.task}"
        + (f", shown how to {story.reference_task}" * (row.task != story.reference_task)),
        "task": row.task,
        "goals": [first, second],
        "goal": [round(100 * progress, 1) for progress in goal(row.world, row.task)],
        "video": as_url(content_of(video), "video/mp4"),
        "progress": [round(100 * m.progress, 1) for m in story.moments],
        "swap": row.shown.swap,
        "decisions": [decision(story, k) for k in range(len(story.answers))],
    }


def goal(world: str, task: Task) -> tuple[float, float]:
    """Progress between which the task's flag is true, to the end of the chart."""
    pair = find_pair(world)
    bounds = sorted(pair.progress(q) for q in pair.neutral)
    return (bounds[1], FARTHEST) if task == pair.tasks[0] else (-FARTHEST, bounds[0])


def decision(story: Story, k: int) -> dict[str, Any]:
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
        "reference_image": image_url(reference.frame.rgb),
        "live_image": image_url(live.rgb),
        "points": [dict(zip(("reference", "live", "elsewhere", "confidence"), p, strict=True)) for p in points],
        "gripper_reference": pixels(seen, reference.frame.gripper[None])[0],
        "gripper_live": pixels(live.camera, live.gripper[None])[0],
        "future": pixels(seen, reference.future),
        "path": pixels(live.camera, planned_path(live.gripper, plan.actions)),
        "chunk": plan.actions[:, :3].round(3).tolist(),
        "error_mm": answer.match_error_mm,
    }


def pixels(camera: Camera, points: Array) -> list[list[float]]:
    """Image coordinates with the origin at the corner, as SVG counts."""
    uv, _ = camera.project(points)
    return (np.asarray(uv) + 0.5).round(2).tolist()


def image_url(rgb: NDArray[np.uint8]) -> str:
    ok, png = cv2.imencode(".png", cv2.cvtColor(rgb, cv2.COLOR_RGB2BGR))
    assert ok
    return as_url(png.tobytes(), "image/png")


def as_url(content: bytes | bytearray, kind: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"
