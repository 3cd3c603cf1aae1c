"""One click: the episode so far as a video and as an .rrd for Rerun, drawn again from what was remembered.

Imported when it is asked for: Rerun takes 56 MB.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import rerun as rr
import rerun.blueprint as rrb
import trimesh

from ..errors import UserError
from ..folders import claimed, written_whole
from ..show.video import FPS, SIDE, STRIP, Image, caption, confidence_colour, towards, write_film
from ..spec import Array
from .episode import Episode, Instant, Sight
from .panel import picture
from .shapes import ARROWS, arrows, shapes
from .stage import APART

JPEG = 90
MOST = 100  # recordings in a folder


def record(episode: Episode, out: Path, progress: Callable[[float], None]) -> tuple[Path, Path]:
    """Writes both files, named after the world and the next free number; `progress` gets the share done."""
    world = episode.world.pair.name
    with claimed(out):
        number = 1
        while any((out / f"{world}-{number:03d}.{ending}").exists() for ending in ("mp4", "rrd")):
            number += 1
        if number > MOST:
            raise UserError(f"{out} holds {MOST} recordings of {world} already: move some away")
        film, log = (out / f"{world}-{number:03d}.{ending}" for ending in ("mp4", "rrd"))
        instants = [*episode.past, episode.now]
        with written_whole(log) as temporary, closing(Log(temporary, episode)) as rerun:

            def pictures() -> Iterator[Image]:
                for i, instant in enumerate(instants):
                    sights = episode.see(instant)
                    rerun.write(instant, sights)
                    page = titled(world, instant, sights)
                    yield from [page] * (FPS if i == len(instants) - 1 else 1)
                    progress((i + 1) / len(instants))

            write_film(film, pictures(), (2 * SIDE, STRIP + len(episode.now.slots) * SIDE))
    return film, log


def titled(world: str, instant: Instant, sights: Sequence[Sight]) -> Image:
    """One picture of the video: a slot below the other."""
    title = f"{sights[0].slot.name} above, {sights[-1].slot.name} below   {world}   step {instant.step}"
    title += f"   reference: {instant.guide.words}, begun at step {instant.begun}"
    title += "".join(f"   {event}" for event in instant.events)
    states = (
        f"{s.slot.name}: {towards(world, s.progress)}{', SUCCESS' * (s.slot.first_success is not None)}" for s in sights
    )
    return caption(np.concatenate([picture(sight) for sight in sights]), title, "      ".join(states))


class Log:
    """An .rrd file: meshes once, then poses, pictures, points, arrows and numbers at every step."""

    def __init__(self, path: Path, episode: Episode) -> None:
        self.stream = rr.RecordingStream("memcorr_lab")
        names = [slot.name for slot in episode.now.slots]
        self.stream.save(path, default_blueprint=_blueprint(names))
        self.stream.log("world", rr.ViewCoordinates.RIGHT_HAND_Z_UP, static=True)
        self.offsets = {name: i * APART for i, name in enumerate(names)}
        solids = shapes(episode.world.model)
        self.bodies = sorted({solid.body for solid in solids})
        for name, offset in self.offsets.items():
            self.stream.log(f"world/{name}", rr.Transform3D(translation=offset), static=True)
            for i, solid in enumerate(solids):
                normals = trimesh.Trimesh(solid.vertices, solid.faces, process=False).vertex_normals
                mesh = rr.Mesh3D(
                    vertex_positions=solid.vertices,
                    triangle_indices=solid.faces,
                    vertex_normals=normals,
                    albedo_factor=solid.colour,
                )
                self.stream.log(f"world/{name}/body-{solid.body}/{i}", mesh, static=True)
        self._poses: dict[str, Array] = {}

    def write(self, instant: Instant, sights: Sequence[Sight]) -> None:
        self.stream.set_time("step", sequence=instant.step)
        for event in instant.events:
            self.stream.log("events", rr.TextLog(event))
        for sight in sights:
            self._slot(sight)

    def _slot(self, sight: Sight) -> None:
        log, name = self.stream.log, sight.slot.name
        poses = np.concatenate([sight.positions, sight.wxyz], axis=1)
        for body in self.bodies:
            if name not in self._poses or not np.array_equal(self._poses[name][body], poses[body]):
                turn = rr.Quaternion(xyzw=np.roll(sight.wxyz[body], -1))
                log(f"world/{name}/body-{body}", rr.Transform3D(translation=sight.positions[body], quaternion=turn))
        self._poses[name] = poses
        camera, frame = f"world/{name}/camera", sight.frame
        T = frame.camera.T_world_cam
        log(camera, rr.Transform3D(translation=T[:3, 3], mat3x3=T[:3, :3]))
        height, width = frame.depth.shape
        log(camera, rr.Pinhole(image_from_camera=frame.camera.K, resolution=[width, height], image_plane_distance=0.2))
        log(f"{camera}/rgb", rr.Image(frame.rgb).compress(jpeg_quality=JPEG))
        log(f"{name}/seen", rr.Image(picture(sight)).compress(jpeg_quality=JPEG))
        for words, segments in arrows(sight).items():
            vectors = segments[:, 1] - segments[:, 0]
            shown = rr.Arrows3D(origins=segments[:, 0], vectors=vectors, colors=ARROWS[words], radii=0.0015)
            log(f"world/{name}/arrows/{re.sub('[^a-z]+', '-', words)}", shown)
        plan = None if sight.slot.answer is None else sight.slot.answer.plan
        if plan is not None and plan.matches is not None:
            valid = plan.matches.valid
            colours = [confidence_colour(c) for c in plan.matches.confidence[valid]]
            log(f"world/{name}/points", rr.Points3D(plan.matches.p_live[valid], colors=colours, radii=0.005))
            log(f"{name}/confidence", rr.Scalars(plan.confidence))
        if plan is not None and plan.phase is not None:
            log(f"{name}/phase", rr.Scalars(plan.phase))
        if sight.match_error_mm is not None:
            log(f"{name}/match-error-mm", rr.Scalars(sight.match_error_mm))
        log(f"{name}/progress", rr.Scalars(sight.progress))
        log(f"{name}/success", rr.Scalars(float(sight.slot.success)))

    def close(self) -> None:
        self.stream.flush()
        self.stream.disconnect()


def _blueprint(names: Sequence[str]) -> rrb.Blueprint:
    pictures = [rrb.Spatial2DView(origin=f"{name}/seen", name=name) for name in names]
    numbers = ("progress", "match-error-mm", "confidence", "phase")
    plots = [rrb.TimeSeriesView(contents=[f"{name}/{number}" for name in names], name=number) for number in numbers]
    space = rrb.Spatial3DView(origin="world", name="both slots")
    return rrb.Blueprint(
        rrb.Vertical(rrb.Horizontal(space, rrb.Vertical(*pictures)), rrb.Horizontal(*plots), row_shares=[3, 1]),
        collapse_panels=True,
    )
