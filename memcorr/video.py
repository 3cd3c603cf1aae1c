"""A video of one rollout: the reference, the live view, the matches and the relation vectors.

The rollout is run again, which gives the same one, and watched: every control step is a frame. The
left half shows the reference at its current phase, the right half the live camera; lines join matched
points. Vectors of the relations, in the colours of the paper's overview: live gripper around live
geometry (green), reference anchor (orange), future motion (purple), scene displacement (blue).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray

from .camera import Array, Camera
from .controllers import Correspondence, Intervention, PolicyController, make_controller, phase
from .episodes import Episode
from .errors import UserError
from .evaluation import find_subject, list_jobs, settle
from .expert import act
from .files import output_folder, written_whole
from .frames import Frame
from .matches import Matches
from .protocol import PROTOCOL, Task, opposite
from .rollout import Controller, Decision, Job, Plan, roll_out
from .sim import DoorWorld, shared_world

SCALE, STRIP, FPS = 4, 56, 20
SIDE = PROTOCOL.image_size * SCALE
GREEN, ORANGE, PURPLE, BLUE, WHITE = (80, 200, 90), (240, 150, 40), (170, 90, 220), (70, 140, 250), (255, 255, 255)
Image = NDArray[np.uint8]


class Watcher:
    """Stands between rollout and controller: remembers decisions, plans and what was matched."""

    looks = True

    def __init__(self, controller: Controller) -> None:
        self.controller = controller
        self.seen: list[tuple[Decision, Plan]] = []

    def decide(self, decisions: Sequence[Decision]) -> list[Plan]:
        plans = self.controller.decide(decisions)
        self.seen += zip(decisions, plans, strict=True)
        return plans


def pixels(camera: Camera, points: Array) -> NDArray[np.int32]:
    uv, _ = camera.project(points)
    return np.round((np.asarray(uv) + 0.5) * SCALE).astype(np.int32)


def enlarged(frame: Frame) -> Image:
    image = cv2.resize(frame.rgb, (SIDE, SIDE), interpolation=cv2.INTER_CUBIC)
    return np.ascontiguousarray(image, np.uint8)


def arrow(image: Image, a: NDArray, b: NDArray, colour: tuple[int, int, int]) -> None:
    cv2.arrowedLine(image, tuple(map(int, a)), tuple(map(int, b)), colour, 1, cv2.LINE_AA, tipLength=0.06)


def caption(image: Image, lines: Sequence[str]) -> Image:
    strip = np.full((STRIP, image.shape[1], 3), 24, np.uint8)
    for i, line in enumerate(lines):
        cv2.putText(strip, line, (10, 22 + 24 * i), cv2.FONT_HERSHEY_SIMPLEX, 0.5, WHITE, 1, cv2.LINE_AA)
    return np.concatenate([strip, image])


def draw(live: Frame, reference: Frame | None, gripper_ref: Array, j: int, matches: Matches | None) -> Image:
    """One picture: reference left, live right."""
    right = enlarged(live)
    left = np.full_like(right, 40) if reference is None else enlarged(reference)
    if reference is not None:
        future = pixels(reference.camera, gripper_ref[j + np.array(PROTOCOL.future_offsets)])
        for a, b in pairwise(future):
            arrow(left, a, b, PURPLE)
    if reference is not None and matches is not None and matches.valid.any():
        valid = matches.valid
        p_ref, p_live = pixels(reference.camera, matches.p_ref[valid]), pixels(live.camera, matches.p_live[valid])
        moved = pixels(live.camera, matches.p_ref[valid])  # where the reference's points are in the live view
        g_ref, g_live = (pixels(f.camera, f.gripper[None])[0] for f in (reference, live))
        for r, q, m in zip(p_ref, p_live, moved, strict=True):
            arrow(left, r, g_ref, ORANGE)
            arrow(right, q, g_live, GREEN)
            arrow(right, m, q, BLUE)
        both = np.ascontiguousarray(np.concatenate([left, right], axis=1))
        for r, q in zip(p_ref, p_live, strict=True):
            end = (int(q[0]) + SIDE, int(q[1]))
            cv2.line(both, tuple(map(int, r)), end, (210, 210, 210), 1, cv2.LINE_AA)
            for centre in (tuple(map(int, r)), end):
                cv2.circle(both, centre, 3, WHITE, -1, cv2.LINE_AA)
        return both
    return np.concatenate([left, right], axis=1)


def replay(world: DoorWorld, job: Job, seen: Sequence[tuple[Decision, Plan]]) -> Iterator[tuple[int, Frame]]:
    """(decision number, live frame) before every step of a rollout that was watched."""
    world.reset(job.scene)
    for k, (_, plan) in enumerate(seen):
        for i in range(PROTOCOL.executed):
            yield k, world.observe()
            world.step(act(world, job.task) if plan.actions is None else plan.actions[i])
            if world.success(job.task):
                yield k, world.observe()
                return


def pictures(world: DoorWorld, job: Job, watcher: Watcher, shown: Intervention, title: str) -> Iterator[Image]:
    controller = watcher.controller
    references: dict[int, Frame] = {}
    correspondence: Correspondence | None = None
    task: Task = opposite(job.task) if shown.reference == "opposite" else job.task
    demonstrations = {}
    if isinstance(controller, PolicyController):
        correspondence, demonstrations = controller.correspondence, controller.demonstrations
    matches: dict[int, Matches] = {}
    for step, (k, live) in enumerate(replay(world, job, watcher.seen)):
        decision = watcher.seen[k][0]
        j = phase(decision.elapsed, shown)
        if demonstrations and k not in references:
            references[k] = demonstrations[task].frame(j)
        if correspondence is not None and k not in matches:
            found = correspondence.match([task], [j], [decision])
            matches[k] = Matches(found.p_ref[0], found.p_live[0], found.confidence[0], found.valid[0])
        gripper = demonstrations[task].gripper if demonstrations else np.zeros((1, 3))
        picture = draw(live, references.get(k), gripper, j, matches.get(k))
        done = world.success(job.task)
        reference = f"reference: {task}, frame {j}" if demonstrations else "no reference"
        now = f"{reference}      live: step {step}, door {np.degrees(world.door_joint):.0f} deg"
        picture = caption(picture, [title, now + ("      SUCCESS" if done else "")])
        yield from [picture] * (FPS if done else 1)


def write_video(policy: str, shown: Intervention, row: Episode, data: Path, out: Path) -> Path:
    """The rollout of `row` as an mp4 in `out`."""
    try:
        import imageio_ffmpeg
    except ImportError:
        raise UserError("videos need ffmpeg: pip install imageio-ffmpeg") from None
    subject = find_subject(policy)
    shown = settle(subject, shown)
    (job,) = list_jobs([row.condition], row.scene_seed, [row.task], [row.scene])  # type: ignore[list-item]
    world, watcher = shared_world(), Watcher(make_controller(subject.policy, data, shown))
    for _ in roll_out(world, watcher, iter([job])):
        pass
    name = f"{row.experiment}-{row.condition}-{row.scene}-{row.task}-{row.reference}.mp4"
    path = output_folder(out) / name
    title = f"{row.experiment}   {row.condition} scene {row.scene}   task: {row.task}   reference: {row.reference}"
    with written_whole(path) as temporary:
        size = (2 * SIDE, SIDE + STRIP)
        writer = imageio_ffmpeg.write_frames(
            str(temporary), size, fps=FPS, macro_block_size=2, output_params=["-f", "mp4"], ffmpeg_log_level="error"
        )
        writer.send(None)
        for picture in pictures(world, job, watcher, shown, title):
            writer.send(np.ascontiguousarray(picture))
        writer.close()
    return path
