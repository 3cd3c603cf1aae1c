"""Somebody else's recordings of the door, as LeRobot's tools would leave them: another camera, no simulator truth.

    python examples/strangers_door.py recordings/stranger --pairs 20

160 x 120 pixels from another place and with another lens, depth with noise and holes, demonstrations of 120 to 260 rows
at various speeds, no joint, no pose of the object, and no masks but one per recording, drawn as a coarse polygon on its
first frame. docs/own-data.md goes on from there. `--truth STORE` keeps what only a simulator knows, to compare with.
"""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import tyro
from numpy.typing import NDArray
from PIL import Image
from tqdm import tqdm

from memcorr.demos.store import LAYOUT, Store, demonstration_path, read_demonstration, write_demonstration
from memcorr.evaluation.sensors import noisy, with_holes
from memcorr.files import write_json
from memcorr.frames import Camera, Frame, look_at
from memcorr.recordings.export import export_lerobot
from memcorr.spec import Task
from memcorr.worlds.expert import act
from memcorr.worlds.scenes import Scene, demonstration_scenes
from memcorr.worlds.world import View, World

HEIGHT, WIDTH, FPS = 120, 160, 80
CAMERA = Camera.from_fovy(36.0, (HEIGHT, WIDTH), look_at(np.array([0.92, 0.34, 0.95]), np.array([-0.01, 0.64, 0.13])))
SEED = 20_26  # of positions, speeds and noise; not those of our own demonstrations
COARSE = 1.5  # pixels by which a mask drawn by hand may cut corners


def record(
    world: World, scene: Scene, task: Task, rng: np.random.Generator, path: Path, shortest: int, longest: int
) -> None:
    """At a speed of its own, until it is done and a little longer."""
    speed, rest = rng.uniform(0.7, 1.2), int(rng.integers(10, 140))
    world.reset(scene)
    frames: list[Frame] = []
    actions, joints, poses, done = [], [], [], 0
    while len(frames) < longest and (len(frames) < shortest or done < rest):
        frame = world.observe()
        depth = with_holes(noisy(frame.depth, 1.0, rng), 0.1, rng)
        frames.append(replace(frame, depth=depth))
        joints.append(world.joint)
        poses.append(world.T_world_object)
        action = act(world, task) * np.array([speed, speed, speed, 1.0])
        actions.append(action)
        world.step(action)
        done = done + 1 if world.success(task) else 0
    time = np.arange(len(frames)) / FPS
    truth = np.stack(actions), np.array(joints), np.stack(poses)
    write_demonstration(path, frames, *truth, pair=scene.index, task=task, u=scene.u, time=time)


def forget(path: Path, bare: Path, first_masks: Path) -> None:
    """The same recording as a stranger has it: no joint, no pose, and of all masks only the first, drawn by hand."""
    d = read_demonstration(path)
    frames = d.frames(range(len(d)))
    Image.fromarray(drawn(frames[0].mask)).save(first_masks / f"{path.stem}.png")
    blank = [replace(frame, mask=np.zeros((HEIGHT, WIDTH), bool)) for frame in frames]
    about: dict[str, Any] = {"u": (math.nan, math.nan), "pair": d.pair, "task": d.task, "world": "my-door"}
    write_demonstration(bare / path.name, blank, d.action, None, None, **about, time=d.time)


def drawn(mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """As somebody would draw it: a polygon with few corners around each part."""
    outlines, _ = cv2.findContours(mask.astype(np.uint8), cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_NONE)
    corners = [cv2.approxPolyDP(outline, COARSE, True) for outline in outlines if len(outline) > 4]
    return cv2.fillPoly(np.zeros(mask.shape, np.uint8), corners, 1) > 0


def main(
    out: tyro.conf.Positional[Path],
    pairs: int = 20,
    truth: Path | None = None,
    shortest: int = 120,
    longest: int = 260,
) -> None:
    """Record the dataset.

    Args:
        out: Folder that is made.
        pairs: Positions of the door; each is opened and closed once, from one start.
        truth: Folder for a store of the same recordings with the simulator's masks, joint and object pose; those
            that are there already are not recorded again.
        shortest: Rows of a recording at least.
        longest: Rows of a recording at most; with fewer than 150 it may end before the door does.
    """
    world = World("door", View.of(CAMERA, HEIGHT, WIDTH))
    tasks, bare = world.pair.tasks, Path(tempfile.mkdtemp())
    known = truth or bare / "truth"
    for folder in (out / "first-masks", known):
        folder.mkdir(parents=True, exist_ok=True)
    for scene in tqdm(demonstration_scenes(SEED, pairs), "record", unit="pair"):
        for k, task in enumerate(tasks):
            path = demonstration_path(known, scene.index, task)
            if not path.exists():
                record(world, scene, task, np.random.default_rng([SEED, scene.index, k]), path, shortest, longest)
            forget(path, bare, out / "first-masks")
    write_json(known / "collection.json", {"layout": LAYOUT, "pairs": pairs, "world": "door"})
    collection = {"layout": LAYOUT, "pairs": pairs, "world": "my-door", "tasks": list(tasks)}
    write_json(bare / "collection.json", collection)
    export_lerobot(Store.open(bare), out)
    shutil.rmtree(bare)
    (out / "meta/memcorr.json").unlink()  # a stranger has none
    (out / "mapping.json").write_text(json.dumps({"pairs": [[2 * i, 2 * i + 1] for i in range(pairs)]}))
    K = CAMERA.K.copy()
    K[:2, 2] -= 0.5  # as a calibration with OpenCV has it
    calibration = {"K": K.tolist(), "image_size": [WIDTH, HEIGHT], "pixel_centre": 0}
    calibration["T_world_cam"] = CAMERA.T_world_cam.tolist()
    (out / "calibration.json").write_text(json.dumps(calibration, indent=2))
    print(f"wrote {2 * pairs} recordings to {out}")


if __name__ == "__main__":
    tyro.cli(main)
