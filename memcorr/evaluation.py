"""`memcorr evaluate`: closed-loop rollouts of one policy under one intervention into `episodes.jsonl`.

A row depends on its rollout alone: workers take single rollouts from one list, every batch is padded
to the same shape, and noise comes from (training seed, scene, task, replan). So the number of workers,
an interruption or a shorter list of scenes changes which rows are there, never what they say.
"""

from __future__ import annotations

import fcntl
import hashlib
import multiprocessing
import queue
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from tqdm import tqdm

from .checkpoints import CONFIG, MODEL, Config, model_update
from .collect import find_references
from .controllers import GROUND_TRUTH, NO_MATCHER, SCRIPTED, Intervention, make_controller
from .devices import keep_freed_memory
from .episodes import EPISODES, Episode, read_episodes, write_episodes
from .errors import UserError
from .experiments import Experiment
from .files import output_folder
from .matchers import MATCHERS
from .policy import policy_folder
from .protocol import TASKS, Condition, Task
from .rollout import LANES, Job, Outcome, roll_out
from .scenes import evaluation_scenes
from .sim import shared_world

if TYPE_CHECKING:
    from multiprocessing.context import SpawnProcess


@dataclass(frozen=True)
class Subject:
    """Who is evaluated, as the rows will name it."""

    policy: str  # a scripted controller or the folder of a checkpoint
    experiment: str
    train_seed: int | None
    stage: str
    checkpoint: str
    recipe: Experiment | None  # None for scripted controllers


def find_subject(policy: str) -> Subject:
    """`policy` is shipped, expert, zeros or a folder with a checkpoint."""
    if policy in SCRIPTED:
        return Subject(policy, policy, None, "scripted", "", None)
    folder = policy_folder(policy)
    config = Config.read(folder / CONFIG)
    with (folder / MODEL).open("rb") as f:
        checkpoint = hashlib.file_digest(f, "sha256").hexdigest()[:12]
    one, total = config.experiment.updates[0], config.experiment.total_updates
    stage = {one: "stage-one", total: "final"}.get(model_update(folder) or 0, "unfinished")
    return Subject(str(folder), config.experiment.name, config.seed, stage, checkpoint, config.experiment)


def follows(subject: Subject, shown: Intervention) -> bool:
    """Whether a reference is supplied at all."""
    return subject.recipe is not None and not subject.recipe.visual and shown.reference != "empty"


def settle(subject: Subject, shown: Intervention) -> Intervention:
    """`shown` with what the policy never looks at named as such; refuses interventions without meaning."""
    if shown.matcher not in (*MATCHERS, GROUND_TRUTH, NO_MATCHER):
        raise UserError(f"unknown matcher {shown.matcher!r}: choose one of {', '.join(MATCHERS)} or {GROUND_TRUTH}")
    if shown.phase_speed < 0:
        raise UserError(f"--phase-speed {shown.phase_speed}: give a number from 0 up")
    recipe = subject.recipe
    if recipe is None and shown.reference != "correct":
        raise UserError(f"{subject.experiment} follows no reference, so --reference {shown.reference} means nothing")
    if recipe and recipe.network == "visual-unet" and shown.reference == "empty":
        raise UserError("visual-unet was never trained without its condition, so --reference empty means nothing")
    referenced = follows(subject, shown)
    matched = referenced and recipe is not None and recipe.representation != "motion"
    if not referenced and (shown.phase_offset, shown.phase_speed) != (0, 1.0):
        raise UserError(f"{subject.experiment} with reference {shown.reference} has no phase to change")
    if not matched and shown.permuted:
        raise UserError(f"{subject.experiment} with reference {shown.reference} has no point pairs to permute")
    if matched and shown.matcher == NO_MATCHER:
        raise UserError(f"{subject.experiment} needs a matcher: {', '.join(MATCHERS)} or {GROUND_TRUTH}")
    if matched and shown.matcher != GROUND_TRUTH:
        return shown
    return replace(shown, matcher=shown.matcher if matched else NO_MATCHER, depth_sampling="object")


def list_jobs(
    conditions: Sequence[Condition], scene_seed: int, tasks: Sequence[Task], scenes: Sequence[int] = ()
) -> list[Job]:
    """Every scene of the conditions (or those numbered `scenes`) with every task."""
    jobs = []
    for condition in conditions:
        everything = evaluation_scenes(condition, scene_seed)
        chosen = [s for s in everything if not scenes or s.index in scenes]
        if len(chosen) < len(set(scenes)):
            first, last = everything[0].index, everything[-1].index
            raise UserError(f"--scenes {' '.join(map(str, scenes))}: {condition} has scenes {first} to {last}")
        jobs += [Job(scene, task) for scene in chosen for task in tasks]
    return jobs


def episode(subject: Subject, shown: Intervention, job: Job, outcome: Outcome | None = None) -> Episode:
    """The row of a rollout; without its outcome, only the key means anything."""
    found = outcome or Outcome(False, 0, 0, 0, 0, None, "", 0.0, 0.0)
    return Episode(
        experiment=subject.experiment,
        train_seed=subject.train_seed,
        condition=job.scene.condition,
        scene=job.scene.index,
        scene_seed=job.scene.seed,
        u=job.scene.u,
        camera_azimuth_deg=job.scene.camera_azimuth_deg,
        task=job.task,
        reference=shown.reference,
        matcher=shown.matcher,
        phase_offset=shown.phase_offset,
        phase_speed=shown.phase_speed,
        stage=subject.stage,
        checkpoint=subject.checkpoint,
        pairing="permuted" if shown.permuted else "kept",
        depth_sampling=shown.depth_sampling,
        **asdict(found),
    )


@dataclass(frozen=True)
class Work:
    """What a worker needs to start."""

    policy: str
    data: Path
    shown: Intervention
    lanes: int

    def run(self, jobs: Iterator[Job]) -> Iterator[tuple[Job, Outcome]]:
        keep_freed_memory()
        torch.set_num_threads(1)  # more would round differently, and processes share the cores better
        return roll_out(shared_world(), make_controller(self.policy, self.data, self.shown), jobs, self.lanes)


def _worker(work: Work, jobs: multiprocessing.Queue, results: multiprocessing.Queue) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it too, and ends its workers
    parent = multiprocessing.parent_process()
    try:
        for done in work.run(iter(jobs.get, None)):
            if parent is None or not parent.is_alive():  # killed: nobody is left to write this down
                return
            results.put(done)
    except UserError as problem:
        results.put(problem)


def run_jobs(work: Work, jobs: Sequence[Job], workers: int) -> Iterator[tuple[Job, Outcome]]:
    """Outcomes as they come. One worker is this very process; more are spawned, each with its own GL context."""
    if workers == 1:
        yield from work.run(iter(jobs))
        return
    context = multiprocessing.get_context("spawn")
    waiting, results = context.Queue(), context.Queue()
    for job in (*jobs, *[None] * workers):
        waiting.put(job)
    processes: list[SpawnProcess] = [
        context.Process(target=_worker, args=(work, waiting, results), daemon=True) for _ in range(workers)
    ]
    try:
        for process in processes:
            process.start()
        left = len(jobs)
        while left:
            try:
                result = results.get(timeout=1.0)
            except queue.Empty:
                if any(p.exitcode for p in processes):  # a crash; a clean exit is 0
                    raise UserError("a worker process died (out of memory?); the same command continues") from None
                continue
            if isinstance(result, UserError):
                raise result
            left -= 1
            yield result
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.join()


@contextmanager
def claimed(out: Path) -> Iterator[Path]:
    """The episode file of `out`, for this process alone."""
    with (output_folder(out) / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # freed by the system, also after kill -9
        except OSError:
            raise UserError(f"{out} is being written by another evaluation; choose another --out") from None
        yield out / EPISODES


def evaluate(
    policy: str,
    out: Path,
    *,
    conditions: Sequence[Condition] = ("combined",),
    shown: Intervention | None = None,
    tasks: Sequence[Task] = TASKS,
    scene_seed: int = 0,
    scenes: Sequence[int] = (),
    data: Path | None = None,
    workers: int = 1,
) -> list[Episode]:
    """Runs what is missing and returns all rows that were asked for.

    Without `data` the references are found, or recorded, by `find_references`.
    """
    if workers < 1:
        raise UserError(f"--workers {workers}: give at least 1")
    if scene_seed < 0:
        raise UserError(f"--scene-seed {scene_seed}: give a whole number from 0 up")
    subject = find_subject(policy)
    shown = settle(subject, shown or Intervention())
    jobs = list_jobs(conditions, scene_seed, tasks, scenes)
    wanted = {episode(subject, shown, job).key: job for job in jobs}
    if data is None and follows(subject, shown):
        data = find_references(out)
    with claimed(out) as path:
        present = {e.key: e for e in read_episodes(path)}
        for key in wanted.keys() & present.keys():
            if present[key].checkpoint != subject.checkpoint:
                raise UserError(f"{path} holds rollouts of another checkpoint of this policy; choose another --out")
        write_episodes(path, present.values())  # without the half line that a killed run may have left
        missing = [job for key, job in wanted.items() if key not in present]
        workers = min(workers, max(1, len(missing)))
        lanes = min(LANES, -(-len(missing) // workers)) if missing else 1
        bar = tqdm(desc=f"{subject.experiment} {shown.reference}", total=len(wanted), unit="rollout", smoothing=0.05)
        bar.update(len(wanted) - len(missing))
        successes = sum(present[key].success for key in wanted.keys() & present.keys())
        with path.open("a") as file, bar:
            for job, outcome in run_jobs(Work(subject.policy, data or Path(), shown, lanes), missing, workers):
                row = episode(subject, shown, job, outcome)
                file.write(row.line())
                file.flush()
                present[row.key] = row
                successes += row.success
                bar.update()
                bar.set_postfix_str(f"{successes} successes")
        write_episodes(path, present.values())
    return [present[key] for key in wanted]


def summary(rows: Sequence[Episode]) -> str:
    """Successes by condition and task, one line each."""
    lines = []
    for condition in dict.fromkeys(row.condition for row in rows):
        here = [row for row in rows if row.condition == condition]
        counts = [(task, [row for row in here if row.task == task]) for task in TASKS]
        shares = (f"{task} {sum(r.success for r in some)}/{len(some)}" for task, some in counts if some)
        lines.append(f"{condition:12} {100 * sum(r.success for r in here) / len(here):6.2f} %   {', '.join(shares)}")
    return "\n".join(lines)
