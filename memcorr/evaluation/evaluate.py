"""`memcorr evaluate`: closed-loop rollouts of one policy under one intervention into `episodes.jsonl`.

A row depends on its rollout alone: workers take single rollouts from one list, every batch is padded
to the same shape, and noise comes from (training seed, scene, task, replan). So the number of workers,
an interruption or a shorter list of scenes changes which rows are there, never what they say.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tqdm import tqdm

from ..correspondence.matcher import MATCHERS, is_own, is_weights, matcher_label, weights_digest
from ..demos.collect import find_references
from ..demos.store import Store
from ..errors import UserError
from ..files import appending, digest_of
from ..folders import claimed
from ..machine import threads
from ..policy.checkpoint import MODEL, model_update
from ..policy.policy import policy_folder
from ..policy.servo import SERVO
from ..spec import DOOR, SPEC, Task, TestSet, tasks_of
from ..training.experiments import Config, Experiment
from ..workers import Workers, processes_of, spread
from ..worlds.disturbances import Disturbance
from ..worlds.pairs import find_tasks
from ..worlds.scenes import disturb, evaluation_scenes, usual_condition
from ..worlds.world import View, shared_world
from .controllers import REFERENCE_PAIR, REPLAYS, SCRIPTED, make_controller
from .episodes import EPISODES, Episode, Outcome, read_episodes, write_episodes
from .intervention import GROUND_TRUTH, NO_MATCHER, PLAIN, Intervention
from .rollout import SLOTS, Job, roll_out


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
    config, checkpoint = Config.read(folder), digest_of(folder / MODEL)[:12]
    one, total = config.experiment.updates[0], config.experiment.total_updates
    stage = {one: "stage-one", total: "final"}.get(model_update(folder) or 0, "unfinished")
    return Subject(str(folder), config.experiment.name, config.seed, stage, checkpoint, config.experiment)


def usual(policy: str | Path, shown: Intervention = PLAIN) -> Intervention:
    """`shown` with points lifted and phases found as the policy was trained to have them."""
    subject = find_subject(str(policy))
    recipe = subject.recipe
    if recipe is None:
        return replace(shown, phase_from="seen") if subject.policy == SERVO and shown.usual_phase else shown
    seen = recipe.needs_matches and shown.usual_phase and shown.reference != "empty"
    return replace(shown, lifting=recipe.lifting, phase_from=recipe.phase if seen else shown.phase_from)


def follows(subject: Subject, shown: Intervention) -> bool:
    """Whether a reference is supplied at all."""
    return subject.policy in (*REPLAYS, SERVO) or (
        subject.recipe is not None and not subject.recipe.visual and shown.reference != "empty"
    )


def normalised(subject: Subject, shown: Intervention) -> Intervention:
    """`shown` with what the policy never looks at named as such; refuses interventions without meaning."""
    known = shown.matcher in (*MATCHERS, GROUND_TRUTH, NO_MATCHER)
    if not known and not is_weights(shown.matcher) and not is_own(shown.matcher):
        names = f"{', '.join(MATCHERS)}, {GROUND_TRUTH}, MODULE:CLASS or a file of weights"
        raise UserError(f"unknown matcher {shown.matcher!r}: choose one of {names}")
    if not 0 <= shown.phase_speed < float("inf"):
        raise UserError(f"--phase-speed {shown.phase_speed}: give a number from 0 up")
    recipe = subject.recipe
    carried = shown.masks == "carried"
    if carried and (
        shown.matcher in (GROUND_TRUTH, NO_MATCHER) or not follows(subject, shown) or subject.policy in REPLAYS
    ):
        raise UserError("--masks carried: masks are carried by a matcher, for who follows a reference with one")
    if subject.policy == SERVO:
        timed = (shown.phase_offset, shown.phase_speed) != (0, 1.0)
        if timed or shown.reference == "empty" or shown.pairing != "kept" or shown.matcher == NO_MATCHER:
            raise UserError(f"{SERVO} follows a reference as it is: only the right or the opposite one")
        check_swap(shown.swap, True)
        return replace(shown, phase_from="seen")
    if subject.policy in REPLAYS:
        plain = shown.usual_phase and shown.pairing == "kept" and shown.matcher != NO_MATCHER
        if shown.reference == "empty" or not plain:
            raise UserError(f"{subject.policy} plays a reference as it is: only the right or the opposite one")
        check_swap(shown.swap, True)
        return replace(shown, matcher=GROUND_TRUTH) if subject.policy == "replay-truth" else shown
    if recipe is None and shown.reference != "correct":
        raise UserError(f"{subject.experiment} follows no reference, so --reference {shown.reference} means nothing")
    if recipe and recipe.network == "visual-unet" and shown.reference == "empty":
        raise UserError("visual-unet was never trained without its condition, so --reference empty means nothing")
    referenced = follows(subject, shown)
    matched = referenced and recipe is not None and recipe.needs_matches
    if not referenced and not shown.usual_phase:
        raise UserError(f"{subject.experiment} with reference {shown.reference} has no phase to change")
    if shown.phase_from == "seen" and not (matched and (shown.phase_offset, shown.phase_speed) == (0, 1.0)):
        raise UserError("--phase seen is estimated from point pairs: it needs a policy with pairs, and no other phase")
    check_swap(shown.swap, referenced)
    if not matched and shown.pairing != "kept":
        raise UserError(f"{subject.experiment} with reference {shown.reference} has no point pairs to permute")
    if matched and shown.matcher == NO_MATCHER:
        raise UserError(f"{subject.experiment} needs a matcher: {', '.join(MATCHERS)} or {GROUND_TRUTH}")
    if matched and shown.matcher != GROUND_TRUTH:
        return shown
    return replace(shown, matcher=shown.matcher if matched else NO_MATCHER, lifting=PLAIN.lifting)


def check_swap(swap: int, referenced: bool) -> None:
    """References are exchanged when a policy looks, and while there is an episode."""
    if swap and (not referenced or swap % SPEC.executed or not 0 < swap < SPEC.episode_steps):
        looks = f"references are exchanged when it looks, every {SPEC.executed} steps of {SPEC.episode_steps}"
        raise UserError(
            f"--swap {swap}: {looks}" if referenced else f"--swap {swap}: there is no reference to exchange"
        )


def list_jobs(
    conditions: Sequence[TestSet],
    scene_seed: int,
    tasks: Sequence[Task] = (),
    scenes: Sequence[int] = (),
    world: str = DOOR,
    disturbances: Sequence[Disturbance] = (),
) -> list[Job]:
    """Every scene of the conditions (or those numbered `scenes`) with every task, disturbed if asked for. Without
    conditions: the combined shift, or the placements of one of Meta-World's own tasks."""
    known = find_tasks(world)
    if unknown := [task for task in tasks if task not in known]:
        raise UserError(f"--tasks {unknown[0]}: the tasks of {world} are {' and '.join(known)}")
    jobs = []
    for condition in conditions or (usual_condition(world),):
        everything = evaluation_scenes(condition, scene_seed, world=world)
        if disturbances:
            everything = [disturb(scene, *disturbances) for scene in everything]
        chosen = [s for s in everything if not scenes or s.index in scenes]
        if len(chosen) < len(set(scenes)):
            first, last = everything[0].index, everything[-1].index
            raise UserError(f"--scenes {' '.join(map(str, scenes))}: {condition} has scenes {first} to {last}")
        jobs += [Job(scene, task) for scene in chosen for task in tasks or known]
    return jobs


@dataclass(frozen=True)
class Sources:
    """Digests of the files behind the rows, beside the checkpoint's."""

    references: dict[Task, str]  # of the demonstration of each task
    matcher: str
    camera: str = ""  # '' for the world's own
    recording: str = ""  # what was out of the ordinary in them

    @staticmethod
    def find(subject: Subject, shown: Intervention, data: Path | None, world: str, view: View | None = None) -> Sources:
        references: dict[Task, str] = {}
        recording = ""
        if data is not None and follows(subject, shown):
            store = Store.open(data)
            if store.world != world and tasks_of(store.world):
                raise UserError(f"{data} holds demonstrations of {store.world}, not of {world}")
            tasks = tasks_of(world)  # recordings of one's own may call the world as they like, but not its tasks
            if missing := [t for t in tasks if t not in store.tasks]:
                raise UserError(f"{data} holds no recording of the task {missing[0]} of {world}")
            followed = {t: store.demonstration(REFERENCE_PAIR, t) for t in tasks}
            references = {t: digest_of(d.path)[:12] for t, d in followed.items()}
            recording = "; ".join(dict.fromkeys(d.disturbances for d in followed.values()))
        matched = shown.matcher not in (GROUND_TRUTH, NO_MATCHER)
        camera = "" if view is None else hashlib.sha256(repr(view).encode()).hexdigest()[:12]
        return Sources(references, weights_digest(shown.matcher) if matched else "", camera, recording)


def episode(
    subject: Subject, shown: Intervention, job: Job, sources: Sources, outcome: Outcome | None = None
) -> Episode:
    """The row of a rollout; without its outcome, only what identifies it means anything."""
    return Episode(
        experiment=subject.experiment,
        train_seed=subject.train_seed,
        condition=job.scene.condition,
        scene=job.scene.index,
        scene_seed=job.scene.seed,
        u=job.scene.u,
        camera_azimuth_deg=job.scene.camera_azimuth_deg,
        world=job.scene.world,
        disturbance="+".join(map(str, job.scene.disturbances)),
        task=job.task,
        shown=shown,
        stage=subject.stage,
        checkpoint=subject.checkpoint,
        reference_file=sources.references.get(shown.supplied(job.task, job.scene.world), ""),
        matcher_weights=sources.matcher,
        camera=sources.camera,
        recording=sources.recording,
        **asdict(outcome or Outcome()),
    )


@dataclass(frozen=True)
class Rolling:
    """What a worker does with a stream of rollouts."""

    policy: str
    checkpoint: str
    data: Path
    shown: Intervention
    slots: int
    world: str
    view: View | None = None

    def __call__(self, jobs: Iterator[Job]) -> Iterator[tuple[Job, Outcome]]:
        with threads(1):  # more would round differently, and processes share the cores better
            controller = make_controller(self.policy, self.data, self.shown, self.checkpoint)
            yield from roll_out(shared_world(self.world, self.view), controller, jobs, self.slots)


def evaluate(
    policy: str | Path,
    out: str | Path,
    *,
    conditions: Sequence[TestSet] = (),
    shown: Intervention | None = None,
    tasks: Sequence[Task] = (),
    world: str = DOOR,
    disturbances: Sequence[Disturbance] = (),
    scene_seed: int = 0,
    scenes: Sequence[int] = (),
    data: str | Path | None = None,
    workers: Workers = 1,
    view: View | None = None,
) -> list[Episode]:
    """Runs what is missing and returns all rows that were asked for.

    Without `data` the references are found, or recorded, by `find_references`. `view` is a user's own camera.
    """
    if isinstance(workers, int) and workers < 1:
        raise UserError(f"--workers {workers}: give at least 1")
    if scene_seed < 0:
        raise UserError(f"--scene-seed {scene_seed}: give a whole number from 0 up")
    out, subject = Path(out), find_subject(str(policy))
    shown = normalised(subject, shown or Intervention())
    jobs = list_jobs(conditions, scene_seed, tasks, scenes, world, disturbances)
    named = replace(shown, matcher=matcher_label(shown.matcher))  # complains before references are recorded
    if data is None and follows(subject, shown):
        data = find_references(out, world)
    store = Path(data) if data is not None else None
    sources = Sources.find(subject, shown, store, world, view)
    asked = [episode(subject, named, job, sources) for job in jobs]
    wanted = {row.key: (row, job) for row, job in zip(asked, jobs, strict=True)}
    with claimed(out):
        path = out / EPISODES
        present = {e.key: e for e in read_episodes(path)}
        for key in wanted.keys() & present.keys():
            check_same_files(path, present[key], wanted[key][0])
        write_episodes(path, present.values())  # without the half line that a killed run may have left
        missing = [job for key, (_, job) in wanted.items() if key not in present]
        slots = min(SLOTS, -(-len(missing) // processes_of(workers))) or 1
        bar = tqdm(
            desc=f"{subject.experiment} {world} {shown.reference}", total=len(wanted), unit="rollout", smoothing=0.05
        )
        bar.update(len(wanted) - len(missing))
        successes = sum(present[key].success for key in wanted.keys() & present.keys())
        work = Rolling(subject.policy, subject.checkpoint, store or Path(), shown, slots, world, view)
        with appending(path) as append, bar, closing(spread(work, missing, workers, slots)) as outcomes:
            for job, outcome in outcomes:
                row = episode(subject, named, job, sources, outcome)
                append(row.line())
                present[row.key] = row
                successes += row.success
                bar.update()
                bar.set_postfix_str(f"{successes} successes")
        write_episodes(path, present.values())
    return [present[key] for key in wanted]


def check_same_files(path: Path, present: Episode, wanted: Episode) -> None:
    """A row that is there must come from the files that it would come from now, as far as it names them."""
    for what, digest in present.files.items():
        if digest and digest != wanted.files[what]:
            raise UserError(f"{path} holds rollouts with another {what} under this name; choose another --out")


def summary(rows: Sequence[Episode]) -> str:
    """Successes by condition (and disturbance) and task, one line each."""
    groups: dict[str, list[Episode]] = {}
    for row in rows:
        groups.setdefault(f"{row.condition} {row.disturbance}".strip(), []).append(row)
    lines = []
    for name, here in groups.items():
        tasks = dict.fromkeys(sorted((row.task for row in here), key=tasks_of(here[0].world).index))
        counts = [(task, [row for row in here if row.task == task]) for task in tasks]
        shares = (f"{task} {sum(r.success for r in some)}/{len(some)}" for task, some in counts)
        lines.append(f"{name:12} {100 * sum(r.success for r in here) / len(here):6.2f} %   {', '.join(shares)}")
    return "\n".join(lines)
