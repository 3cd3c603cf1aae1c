"""`memcorr collect`: the paired demonstrations, in parallel, resumable, the same bytes every time.

Each demonstration depends on its scene alone and is written whole or not at all, so neither the
number of workers nor an interruption can change what ends up in the folder.
"""

from __future__ import annotations

import logging
import resource
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from ..errors import UserError
from ..files import write_json
from ..folders import claimed
from ..spec import DOOR, SPEC, Array, Task, stock_task
from ..workers import CORES, Workers, spread
from ..worlds.disturbances import Events
from ..worlds.expert import act, begin
from ..worlds.pairs import find_tasks
from ..worlds.scenes import Scene, demonstration_scenes, disturbed_scenes
from ..worlds.world import shared_world
from .contact_sheet import write_contact_sheet
from .manner import PLAINLY, Manner
from .store import Manifest, Store, demonstration_path, find_demonstration, write_demonstration

log = logging.getLogger(__name__)
AFTERWARDS = 17  # successes in a row that end a recording of one of Meta-World's own tasks: a last chunk of sixteen


def record(root: Path, scene: Scene, task: Task, manner: Manner = PLAINLY) -> None:
    """One demonstration, from reset to disk. Runs in a worker process."""
    world, events = shared_world(scene.world), Events(scene)
    begin(world, scene, task)
    frames, joints, poses, flags = [], [], [], []
    actions: list[Array] = []
    for t in range(manner.steps(world.steps)):
        action = manner.command(act(world, task), actions)
        frames.append(manner.seen(world.observe(), t))
        joints.append(world.joint)
        poses.append(world.T_world_object)
        world.step(events.action(actions, action, t))
        actions.append(action)  # what the expert wanted, whatever the robot did
        events.after(world, t + 1)
        flags.append(world.success(task))
        last = 1 if manner.cut else AFTERWARDS
        if (manner.cut or stock_task(scene.world)) and flags[-last:] == [True] * last:
            break
    held = flags[-1] and (flags == sorted(flags) or stock_task(scene.world))  # once true, true to the end
    if world.diverged or (not held and not scene.disturbances):
        raise RuntimeError(f"the expert did not {task} and hold the {scene.world} of pair {scene.index}")
    write_demonstration(
        demonstration_path(root, scene.index, task),
        frames,
        np.stack(actions),
        np.array(joints),
        np.stack(poses),
        pair=scene.index,
        task=task,
        u=scene.u,
        world=scene.world,
        disturbances=happened(scene, manner),
    )


def happened(scene: Scene, manner: Manner) -> str:
    """What a recording says of itself."""
    return " ".join(filter(None, [*map(str, scene.disturbances), str(manner)]))


@dataclass(frozen=True)
class Recording:
    """What a worker does with a stream of (scene, task)."""

    root: Path
    manner: Manner

    def __call__(self, jobs: Iterator[tuple[Scene, Task]]) -> Iterator[None]:
        for scene, task in jobs:
            record(self.root, scene, task, self.manner)
            yield


def prepare(
    root: Path, pairs: int, seed: int, world: str, disturbed: bool, manner: Manner = PLAINLY
) -> list[tuple[Scene, Task]]:
    """Checks or writes the manifest; returns the demonstrations that are still missing."""
    drawn = disturbed_scenes if disturbed else demonstration_scenes
    scenes, tasks = drawn(seed, pairs, world), find_tasks(world)
    manifest = Manifest(1, pairs, world, seed, asdict(SPEC), disturbed=disturbed)
    path = root / "collection.json"
    if path.exists():
        present = Store(root).manifest
        for key in ("world", "seed", "disturbed"):
            there, wanted = getattr(present, key), getattr(manifest, key)
            if there != wanted:
                raise UserError(f"{root} holds demonstrations with {key} {there}, not {wanted}; choose another --out")
        if pairs < present.pairs:
            raise UserError(f"{root} already holds {present.pairs} pairs; choose another --out or --pairs")
    missing = []
    for scene in scenes:
        for task in tasks:
            file = demonstration_path(root, scene.index, task)
            if not file.exists():
                missing.append((scene, task))
                continue
            found = find_demonstration(root, world, scene.index, task)  # complains about a damaged one, too
            if found.u != scene.u:
                raise UserError(f"{file} was recorded with another seed than {seed}; choose another --out")
            if found.disturbances != happened(scene, manner):
                what = found.disturbances or "nothing"
                raise UserError(f"{file} was recorded with {what} out of the ordinary; choose another --out")
    write_json(path, asdict(manifest))
    return missing


def collect(
    root: str | Path,
    pairs: int = SPEC.pairs,
    seed: int = 0,
    workers: Workers = CORES,
    world: str = DOOR,
    disturbed: bool = False,
    manner: Manner = PLAINLY,
) -> None:
    """Records what is missing, then checks the pairs and writes the contact sheet.

    `disturbed` ones start elsewhere and are interfered with on the way: they show how to recover.
    `manner` is how the expert is recorded.
    """
    find_tasks(world), demonstration_scenes(seed, pairs, world)  # complain before a folder is made
    with claimed(Path(root)) as root:
        jobs = prepare(root, pairs, seed, world, disturbed, manner)
        wanted = pairs * len(find_tasks(world))
        done = wanted - len(jobs)
        with closing(spread(Recording(root, manner), jobs, workers)) as outcomes:
            for _ in tqdm(
                outcomes,
                f"collect {world}{', disturbed' * disturbed}",
                total=wanted,
                initial=done,
                unit="demo",
                smoothing=0.05,
            ):
                pass
        store = Store.open(root)
        log.info(describe(store))
        sheet = write_contact_sheet(store, root / "contact-sheet.png")
        log.info(f"wrote {wanted} demonstrations and {sheet.name} to {root}{peak_memory(workers)}")


def usual_store(world: str, disturbed: bool = False) -> Path:
    """Where `memcorr collect` puts a world's demonstrations by default."""
    if disturbed:
        return Path("data/disturbed") / world
    return Path("data/demos") if world == DOOR else Path("data/worlds") / world


def find_references(out: Path, world: str = DOOR) -> Path:
    """A store with pair 0, whose trajectories are the references of evaluation: the full one if it was
    collected, else one of that pair alone, recorded below `out`."""
    alone = out / ("demos" if world == DOOR else f"demos-{world}")
    if usual_store(world).exists():
        return usual_store(world)
    collect(alone, pairs=1, workers=1, world=world)
    return alone


def peak_memory(workers: Workers) -> str:
    """An upper bound: this process plus every worker at the largest worker's peak; nothing is known of a cluster's."""
    if not isinstance(workers, int):
        return ""
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    child = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return f"; peak memory at most {(own + workers * child) / 2**20:.2f} GiB"


def first_chunk_cosine(store: Store, pair: int) -> float:
    """Cosine between the displacements of the opening and the closing chunk of frame zero."""
    a, b = (store.demonstration(pair, task).action[: SPEC.chunk, :3].ravel() for task in store.tasks)
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))


def describe(store: Store) -> str:
    """The properties that the counterfactual objective stands on, measured on the store."""
    if len(store.tasks) < 2:
        lengths = [len(d) for d in store.present()]
        return f"recordings of {min(lengths)} to {max(lengths)} steps; one task, so nothing to learn it apart from"
    for pair in range(len(store)):
        a, b = (store.demonstration(pair, task) for task in store.tasks)
        frames = (a.frame(0), b.frame(0))
        same = all(np.array_equal(getattr(frames[0], k), getattr(frames[1], k)) for k in ("rgb", "depth", "mask"))
        apart = "other-task" in a.disturbances  # these begin where the other task was left off
        if not (apart or (same and np.array_equal(a.robot_state[0], b.robot_state[0]))):
            raise UserError(f"pair {pair} in {store.root} does not start from one shared state; collect it again")
    cosine = np.mean([first_chunk_cosine(store, pair) for pair in range(len(store))])
    displacement = np.concatenate([d.action[:, :3] for d in store.demonstrations(range(len(store)))])
    saturated = np.mean(np.abs(displacement) >= 0.999)
    together = sum("other-task" not in store.demonstration(i, store.tasks[0]).disturbances for i in range(len(store)))
    count = "1 pair starts" if together == 1 else f"{together} pairs start"
    return (
        f"{count} from bit-equal states and images; first-chunk cosine {'/'.join(store.tasks)} "
        f"{cosine:+.2f}; displacement components at +-1: {100 * saturated:.2f} %"
    )
