"""A video of one rollout: the reference, the live view, the matches and the relation vectors.

Every control step is a frame. The left half shows the reference at its current phase, the right half
the live camera; lines join matched points, red where the matcher doubts them and green where it does
not. Vectors of the relations, in the colours of the paper's overview: live gripper around live geometry
(green), reference anchor (orange), future motion (purple), scene displacement (blue). The path that
the denoised chunk asks for is yellow, its executed half thick.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import cv2
import imageio_ffmpeg
import matplotlib
import numpy as np
from numpy.typing import NDArray

from ..errors import UserError
from ..files import content_of
from ..folders import written_whole
from ..frames import Camera, Frame
from ..policy.plan import Plan
from ..spec import SPEC, WORLD_TASKS, Array, stock_task
from ..worlds.world import ACTION_SCALE
from .story import Story, Supplied

SCALE, STRIP, FPS = 4, 80, 20
SIDE = SPEC.image_size * SCALE
Colour = tuple[int, int, int]
GREEN, ORANGE, PURPLE, BLUE = (80, 200, 90), (240, 150, 40), (170, 90, 220), (70, 140, 250)
YELLOW, WHITE = (250, 230, 60), (255, 255, 255)
LEGEND: tuple[tuple[str, Colour], ...] = (
    ("live point to gripper", GREEN),
    ("the same in the reference", ORANGE),
    ("reference's future motion", PURPLE),
    ("displacement between scenes", BLUE),
    ("planned path", YELLOW),
)
CONFIDENCE = matplotlib.colormaps["RdYlGn"]
Image = NDArray[np.uint8]


def pixels(camera: Camera, points: Array) -> NDArray[np.int32]:
    uv, _ = camera.project(points)
    return np.round((np.asarray(uv) + 0.5) * SCALE).astype(np.int32)


def enlarged(frame: Frame) -> Image:
    image = cv2.resize(frame.rgb, (SIDE, SIDE), interpolation=cv2.INTER_CUBIC)
    return np.ascontiguousarray(image, np.uint8)


def arrow(image: Image, a: NDArray, b: NDArray, colour: Colour) -> None:
    cv2.arrowedLine(image, tuple(map(int, a)), tuple(map(int, b)), colour, 1, cv2.LINE_AA, tipLength=0.06)


def confidence_colour(confidence: float) -> Colour:
    r, g, b, _ = CONFIDENCE(confidence, bytes=True)
    return int(r), int(g), int(b)


def planned_path(gripper: Array, actions: Array) -> Array:
    """Where the chunk's displacements lead the gripper, (17, 3) metres, world frame."""
    steps = ACTION_SCALE * np.clip(actions[:, :3], -1, 1)
    return gripper + np.concatenate([np.zeros((1, 3)), np.cumsum(steps, axis=0)])


def draw(live: Frame, reference: Supplied | None, plan: Plan | None, since: int = 0) -> Image:
    """Reference left, live right. `since`: steps of the plan already executed."""
    right = enlarged(live)
    left = np.full_like(right, 40) if reference is None else enlarged(reference.frame)
    matches = plan.matches if plan else None
    if reference is None or matches is None:
        return _with_path(np.concatenate([left, right], axis=1), live, plan, since)
    for a, b in pairwise(pixels(reference.frame.camera, reference.future)):
        arrow(left, a, b, PURPLE)
    valid = matches.valid
    p_ref = pixels(reference.frame.camera, matches.p_ref[valid])
    p_live = pixels(live.camera, matches.p_live[valid])
    elsewhere = pixels(live.camera, matches.p_ref[valid])  # the reference's points, seen in the live view
    g_ref, g_live = (pixels(f.camera, f.gripper[None])[0] for f in (reference.frame, live))
    for r, q, e in zip(p_ref, p_live, elsewhere, strict=True):
        arrow(left, r, g_ref, ORANGE)
        arrow(right, q, g_live, GREEN)
        arrow(right, e, q, BLUE)
    both = np.ascontiguousarray(np.concatenate([left, right], axis=1))
    for r, q, confidence in zip(p_ref, p_live, matches.confidence[valid], strict=True):
        colour = confidence_colour(confidence)
        end = (int(q[0]) + SIDE, int(q[1]))
        cv2.line(both, tuple(map(int, r)), end, colour, 1, cv2.LINE_AA)
        for centre in (tuple(map(int, r)), end):
            cv2.circle(both, centre, 3, colour, -1, cv2.LINE_AA)
    return _with_path(both, live, plan, since)


def _with_path(both: Image, live: Frame, plan: Plan | None, since: int) -> Image:
    if plan is not None:
        path = pixels(live.camera, planned_path(live.gripper, plan.actions[since:])) + np.array([SIDE, 0])
        for i, (a, b) in enumerate(pairwise(path)):
            width = 2 if since + i < SPEC.executed else 1
            cv2.line(both, tuple(map(int, a)), tuple(map(int, b)), YELLOW, width, cv2.LINE_AA)
    return both


def caption(image: Image, title: str, now: str) -> Image:
    strip = np.full((STRIP, image.shape[1], 3), 24, np.uint8)
    font = cv2.FONT_HERSHEY_SIMPLEX
    for i, line in enumerate((title, now)):
        cv2.putText(strip, line, (10, 20 + 24 * i), font, 0.5, WHITE, 1, cv2.LINE_AA)
    x = 10
    for text, colour in LEGEND:
        cv2.putText(strip, text, (x, STRIP - 11), font, 0.45, colour, 1, cv2.LINE_AA)
        x += cv2.getTextSize(text, font, 0.45, 1)[0][0] + 24
    return np.concatenate([strip, image])


def towards(world: str, progress: float) -> str:
    """Progress in words, such as "45 % of the way to open"; in a task of Meta-World how far the object moved."""
    if stock_task(world):
        return f"moved by {100 * progress:.1f} cm"
    first, second = WORLD_TASKS[world]
    return f"{100 * abs(progress):.0f} % of the way to {first if progress >= 0 else second}"


def pictures(story: Story) -> Iterator[Image]:
    row, reference = story.row, story.row.shown.reference
    wrong = f"   {row.disturbance}" if row.disturbance else ""
    swapped = f", after step {row.shown.swap}" if row.shown.swap else ""
    title = f"{row.experiment}   {row.world}, {row.condition} scene {row.scene}{wrong}   task: {row.task}"
    title += f"   reference: {reference}{swapped}"
    for step, moment in enumerate(story.moments):
        k = moment.decision
        supplied = story.references[k]
        since = min(step - k * SPEC.executed, SPEC.chunk - 1)
        picture = draw(moment.live, supplied, story.answers[k].plan, since)
        shown = f"reference: {supplied.task}, frame {supplied.j}" if supplied else "no reference"
        now = f"{shown}      live: step {step}, {towards(row.world, moment.progress)}"
        picture = caption(picture, title, now + ("      SUCCESS" if moment.success else ""))
        yield from [picture] * (FPS if step == len(story.moments) - 1 else 1)


def write_video(story: Story, out: Path) -> Path:
    """The story as an mp4 in the folder `out`."""
    return write_film(out / f"{story.name}.mp4", pictures(story), (2 * SIDE, SIDE + STRIP))


def write_film(path: Path, pictures: Iterator[Image], size: tuple[int, int]) -> Path:
    """Pictures of `size` (width, height) as an mp4."""
    with written_whole(path) as temporary:
        try:
            writer = imageio_ffmpeg.write_frames(
                str(temporary), size, fps=FPS, macro_block_size=2, output_params=["-f", "mp4"], ffmpeg_log_level="error"
            )
            with closing(writer):
                writer.send(None)
                for picture in pictures:
                    writer.send(np.ascontiguousarray(picture))
        except (OSError, RuntimeError) as problem:  # it ended before the last picture
            raise UserError(f"{path} could not be written: ffmpeg failed ({ffmpeg_words(problem)})") from None
        if not is_whole(content_of(temporary)):  # it may end early and say nothing
            raise UserError(f"{path} could not be written: ffmpeg left half a video; is the disk full?")
    return path


def ffmpeg_words(problem: Exception) -> str:
    """The last thing it said before it ended."""
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    return lines[-1][:150] if lines else type(problem).__name__


def is_whole(video: bytes | bytearray) -> bool:
    """Whether the boxes of an mp4 fill the file, the index (moov, written last) among them."""
    at, names = 0, set()
    while at + 8 <= len(video):
        size, name = int.from_bytes(video[at : at + 4], "big"), bytes(video[at + 4 : at + 8])
        if size < 8:  # a box of 64-bit size is larger than any video of ours
            return False
        names.add(name)
        at += size
    return at == len(video) and {b"ftyp", b"mdat", b"moov"} <= names
