"""`memcorr audit`: right and wrong conditions, and noise for images; online and offline, one page and one JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from tqdm import tqdm

from ..demos.collect import find_references
from ..demos.store import Demonstration, Store
from ..errors import UserError
from ..evaluation.controllers import REFERENCE_PAIR, SCRIPTED
from ..evaluation.episodes import Episode, find_episodes
from ..evaluation.evaluate import evaluate, find_subject, normalised, usual
from ..evaluation.intervention import Intervention, ReferenceChoice
from ..folders import claimed
from ..machine import threads
from ..spec import DOOR, SPEC, WORLD_TASKS, Task, TestSet
from .evidence import SHOWN, Findings, Shown, Trial, checklist, of_predictions, of_trials, verdict
from .offline import audit_offline
from .online import Environment, GymEnvironment, Listener, WorldEnvironment, audit_online
from .page import Audit, write_audit
from .subjects import can_be_asked, is_callable_name, listener, named


@dataclass(frozen=True)
class Online:
    """Where rollouts are made: one of memcorr's worlds, or a user's own environment."""

    world: str = DOOR
    condition: TestSet = "validation"
    scene_seed: int = 0
    scenes: tuple[int, ...] = ()
    environment: str = ""  # module:callable, task -> Gymnasium environment
    tasks: tuple[Task, ...] = ()  # of that environment
    false_tasks: tuple[Task, ...] = ()  # what it is told that the environment does not have
    executed: int = SPEC.executed
    workers: int = 1

    @property
    def words(self) -> str:
        if self.environment:
            return f"{self.environment}, seeds {' '.join(map(str, self.scenes))}"
        return f"{self.world}, {self.condition} scenes of seed {self.scene_seed}"


def audit(
    policy: str,
    out: Path,
    *,
    given: Sequence[str] = (),
    online: Online | None = None,
    episodes: Sequence[Path] = (),
    data: Path | None = None,
    every: int = 5 * SPEC.executed,
    references: Path | None = None,
    matcher: str = "embedded",
    empty: bool = True,
    noise: bool = True,
    false: bool = True,
    false_references: Path | None = None,
    name: str = "",
) -> Audit:
    """Rollouts if `online` says where, or those that `episodes` hold; recorded data if there is `data`.

    False references are pair 0 of `false_references`; in memcorr's worlds, if not given, of the next world.
    """
    if online is None and data is None:
        raise UserError("--no-online leaves nothing to audit: give --data, a store of recordings")
    left_out = {name for name, wanted in (("empty", empty), ("noise", noise), ("false", false)) if not wanted}
    shown = tuple(choice for choice in SHOWN if choice not in left_out)
    store = None if data is None else Store.open(data)
    foreign = is_callable_name(policy)
    subject = None if foreign or (episodes and data is None) else find_subject(policy)
    who, seed, checkpoint = policy, None, ""
    if subject:
        who, seed, checkpoint = subject.experiment, subject.train_seed, subject.checkpoint
    if subject and online is not None and not episodes:
        for choice in evaluated(shown):  # complains before anything is rolled out
            normalised(subject, usual(policy, Intervention(choice, matcher)))
    findings: list[Findings] = []
    with threads(1):
        asked = listener(policy, given, matcher) if (foreign and not episodes) or data is not None else None
        if online is not None and episodes:
            rows, words = earlier(who, episodes, online, checkpoint)
            seed, checkpoint = rows[0].train_seed, rows[0].checkpoint
            findings.append(of_trials([as_trial(row) for row in rows], words))
        elif online is not None:
            trials = (
                foreign_trials(asked, online, shown, references, false_references, out)
                if foreign and asked is not None
                else our_trials(policy, online, shown, references, false_references, matcher, out)
            )
            findings.append(of_trials(trials, online.words))
        if store is not None and asked is not None:
            findings.append(recorded(asked, store, every, references, false_references, shown))
    checks = tuple(checklist(findings))
    result = Audit(name or who, policy, tuple(given), seed, checkpoint, *verdict(findings), checks, tuple(findings))
    with claimed(out):
        write_audit(result, out)
    return result


def earlier(experiment: str, places: Sequence[Path], where: Online, checkpoint: str) -> tuple[list[Episode], str]:
    """Rollouts that `memcorr evaluate` has made already, of one experiment and undisturbed, and where they are from."""
    rows = [
        row
        for row in find_episodes(places)
        if (row.experiment, row.condition, row.world) == (experiment, where.condition, where.world)
        and row.scene_seed == where.scene_seed
        and (not where.scenes or row.scene in where.scenes)
        and row.checkpoint.startswith(checkpoint)
        and row.shown.usual_phase
        and (row.shown.pairing, row.shown.swap, row.disturbance) == ("kept", 0, "")
    ]
    chosen = under_all(rows)
    if not chosen:
        who = f"{experiment} {checkpoint}".strip()
        raise UserError(
            f"--episodes: no rollouts of {who} on {where.words}, under the right and the opposite reference"
        )
    first = chosen[0]
    stage = f", {first.stage}" if first.stage != "final" else ""
    matcher = next(row.shown.matcher for row in chosen if row.shown.reference != "empty")
    return chosen, f"{where.words}, matcher {matcher}{stage}"


def under_all(rows: Sequence[Episode]) -> list[Episode]:
    """The largest set of rows that differ in nothing but scene, task and what was shown; of equals the final stage."""
    groups: dict[tuple, list[Episode]] = {}
    for row in rows:
        groups.setdefault((row.stage, row.train_seed, row.shown.matcher, row.shown.lifting), []).append(row)
    best: list[Episode] = []
    for (stage, seed, *_), group in sorted(groups.items(), key=lambda item: str(item[0])):
        if {row.shown.reference for row in group} >= {"correct", "opposite"}:
            empty = [r for r in rows if (r.stage, r.train_seed, r.shown.reference) == (stage, seed, "empty")]
            both = {row.key: row for row in [*group, *empty]}  # nothing is matched where nothing is shown
            best = max(best, list(both.values()), key=lambda some: (len(some), bool(some) and some[0].stage == "final"))
    return best


def as_trial(row: Episode) -> Trial:
    scene = f"{row.condition} {row.scene}"
    return Trial(scene, row.task, row.shown.reference, row.success, row.steps, row.first_chunk_direction)


def evaluated(shown: Sequence[Shown]) -> list[ReferenceChoice]:
    """Those that `memcorr evaluate` knows."""
    return [choice for choice in get_args(ReferenceChoice) if choice in shown]


def our_trials(
    policy: str,
    online: Online,
    shown: Sequence[Shown],
    references: Path | None,
    false_references: Path | None,
    matcher: str,
    out: Path,
) -> list[Trial]:
    """`memcorr evaluate` under each condition that it knows, into OUT/episodes.jsonl, which an interrupted audit
    continues; the others as for any policy."""
    if online.environment:
        raise UserError(f"--environment is for policies named MODULE:CALLABLE; {policy} runs in memcorr's own worlds")
    trials: list[Trial] = []
    for choice in evaluated(shown):
        if policy in SCRIPTED and choice == "empty":
            continue  # a replay of nothing
        rows = evaluate(
            policy,
            out,
            conditions=(online.condition,),
            shown=usual(policy, Intervention(choice, matcher)),
            world=online.world,
            scene_seed=online.scene_seed,
            scenes=online.scenes,
            data=references,
            workers=online.workers,
        )
        trials += [as_trial(row) for row in rows]
    subject = find_subject(policy)
    rest = [choice for choice in shown if choice not in evaluated(shown)]
    if subject.recipe is not None and subject.recipe.visual:
        rest = [choice for choice in rest if choice != "false"]  # a task's code is of no object
    if rest and can_be_asked(subject):
        trials += foreign_trials(listener(policy, (), matcher), online, rest, references, false_references, out)
    return trials


def foreign_trials(
    policy: Listener,
    online: Online,
    shown: Sequence[Shown],
    references: Path | None,
    false_references: Path | None,
    out: Path,
) -> list[Trial]:
    conditions: dict[Task, Any]
    environment: Environment
    false: list[Any] = []
    if online.environment:
        if len(online.tasks) < 2 or not online.scenes:
            raise UserError("--environment needs --tasks A B, whose conditions are exchanged, and --scenes 0 1 ...")
        environment = GymEnvironment(named(online.environment), online.tasks, online.scenes)
        conditions, false = {task: task for task in online.tasks}, list(online.false_tasks)
    else:
        environment = WorldEnvironment(online.world, online.condition, online.scene_seed, online.scenes)
        conditions = dict(of_store(Store.open(references or find_references(out, online.world))))
        if "false" in shown:
            place = false_references or find_references(out, next_world(online.world))
            false = list(of_store(Store.open(place)).values())
    shown = [choice for choice in shown if false or choice != "false"]
    total = len(environment.scenes) * len(environment.tasks) * len(shown)
    rolled = audit_online(policy, environment, conditions, shown=shown, executed=online.executed, false=false)
    return list(tqdm(rolled, "audit online", total, unit="rollout"))


def next_world(world: str) -> str:
    names = list(WORLD_TASKS)
    return names[(names.index(world) + 1) % len(names)] if world in names else DOOR


def recorded(
    policy: Listener,
    store: Store,
    every: int,
    references: Path | None,
    false_references: Path | None,
    shown: Sequence[Shown],
) -> Findings:
    source = Store.open(references) if references else store
    same = source.root.resolve() == store.root.resolve()
    false = list(of_store(Store.open(false_references)).values()) if false_references and "false" in shown else []
    answers = audit_offline(
        policy,
        store,
        of_store(source),
        shown=[choice for choice in shown if false or choice != "false"],
        every=every,
        without=[REFERENCE_PAIR] if same else [],
        false=false,
    )
    rows = list(tqdm(answers, "audit offline", unit="row"))
    where = f"{len({a.scene for a in rows})} pairs of {store.root.name}, every {every} rows"
    return of_predictions(rows, where)


def of_store(store: Store) -> dict[Task, Demonstration]:
    """The condition of each task: the demonstration that evaluation follows, too."""
    return {task: store.demonstration(REFERENCE_PAIR, task) for task in store.tasks}
