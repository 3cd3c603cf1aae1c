"""`memcorr demo`: the shipped policy opens and closes the door where it was never trained.

Records the two reference demonstrations, rolls out under the combined shift with the right and with
the opposite reference, and leaves videos and one self-contained page that explains what was seen.
"""

from __future__ import annotations

import base64
import json
import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from ..demos.collect import collect
from ..errors import UserError
from ..evaluation.episodes import Episode
from ..evaluation.evaluate import evaluate, find_subject
from ..evaluation.intervention import Intervention, ReferenceChoice
from ..files import content_of
from ..frames import Camera
from ..runs import write_text, written_whole
from ..spec import DOOR, SPEC, TASKS, Array, Task, TestSet
from ..worlds.scenes import evaluation_scenes
from .story import Story, watch
from .video import pictures, planned_path, write_video

log = logging.getLogger(__name__)
CONDITION: TestSet = "combined"
# Door joints at which Meta-World says success, rad.
GOAL: dict[str, tuple[float, float]] = {"open": (-1.815, -1.383), "close": (-0.178, 0.0)}
TEMPLATE = Path(__file__).parent / "demo.html"
# What the page tells step by step, all in the first scene.
STORIES: tuple[tuple[Task, ReferenceChoice], ...] = (("open", "correct"), ("close", "correct"), ("open", "opposite"))


def demo(out: Path, policy: str, scenes: int, scene_seed: int, workers: int) -> Path:
    """Returns the page."""
    available = len(evaluation_scenes(CONDITION, scene_seed))
    if not 1 <= scenes <= available:
        raise UserError(f"--scenes {scenes}: give 1 to {available}")
    find_subject(policy)  # complains before anything is recorded
    data = out / "demos"
    collect(data, pairs=1, seed=0, workers=1)
    rows: dict[ReferenceChoice, list[Episode]] = {}
    for choice in ("correct", "opposite"):
        rows[choice] = evaluate(
            policy,
            out,
            conditions=[CONDITION],
            shown=Intervention(reference=choice),
            scene_seed=scene_seed,
            scenes=range(scenes),
            data=data,
            workers=workers,
        )
    counts = [count(rows[choice], choice, task) for choice in rows for task in TASKS]
    log.info("\n".join(sentence(c) for c in counts))
    stories, videos = [], []
    for task, choice in STORIES:
        row = next(r for r in rows[choice] if r.task == task)
        stories.append(watch(policy, Intervention(reference=choice), row, data))
        videos.append(write_video(stories[-1], out))
    strip = filmstrip(stories[:2], out / "demo.jpg")
    page = out / "demo.html"
    content = {
        "counts": counts,
        "executed": SPEC.executed,
        "stories": [told(s, v) for s, v in zip(stories, videos, strict=True)],
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


def count(rows: Sequence[Episode], choice: ReferenceChoice, task: Task) -> dict[str, Any]:
    """Successes, and first chunks that go the way of the supplied reference."""
    here = [row for row in rows if row.task == task]
    wanted = Intervention(reference=choice).supplied(task, DOOR)
    return {
        "reference": choice,
        "task": task,
        "successes": sum(row.success for row in here),
        "following": sum(row.first_chunk_direction == wanted for row in here),
        "rollouts": len(here),
    }


def sentence(c: dict[str, Any]) -> str:
    follows = f"first chunk follows the reference in {c['following']}/{c['rollouts']}"
    return f"{c['task']:5}  {c['reference']:8} reference   done {c['successes']}/{c['rollouts']}   {follows}"


def told(story: Story, video: Path) -> dict[str, Any]:
    """A story as the page's script reads it; pixels are those of the 128x128 images."""
    row = story.row
    return {
        "title": f"asked to {row.task}, shown how to {story.reference_task}",
        "task": row.task,
        "reference": story.reference_task,
        "goal": [round(math.degrees(joint), 1) for joint in GOAL[row.task]],
        "video": as_url(content_of(video), "video/mp4"),
        "angle": [round(float(np.degrees(m.joint)), 2) for m in story.moments],
        "decisions": [decision(story, k) for k in range(len(story.answers))],
    }


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
