"""One policy for many objects: those it was trained on, those it never saw, and a reference exchanged on the way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ..evaluation.episodes import Episode
from ..spec import HELD_OUT_WORLDS, LAST_WORLDS, TRAINED_WORLDS, WORLD_TASKS
from ..worlds.disturbances import Disturbance
from ..worlds.scenes import SUITE
from .lookup import Lookup, first_chunk_follows
from .paper import CONDITION_NAMES
from .robustness import MANY, NAMES, SEEING, Contenders, magnitude
from .statistics import paired_difference, rollout_identity
from .tables import NOT_MEASURED, Table, count, ours

ROLES = (
    ("trained", TRAINED_WORLDS),
    ("never trained on", HELD_OUT_WORLDS),
    ("never trained on, looked at once", LAST_WORLDS),
)
MOVING = ("set-back", "bump", "shift")  # the object or the hand, after the start
OTHERS = {"servo": "Servo, not learned", "replay": "Replay, matcher", "memcorr": "Door-only policy"}


def objects(lookup: Lookup) -> list[Table]:
    """A table for every set of scenes on which the policy was measured in another world than the door."""
    rows = [e for e in lookup.episodes if _plain(e)]
    wanted = {(e.condition, e.scene_seed) for e in rows if e.experiment == MANY and e.world not in TRAINED_WORLDS}
    return [_objects(condition, seed, rows) for condition, seed in sorted(wanted)]


def _objects(condition: str, scene_seed: int, episodes: Sequence[Episode]) -> Table:
    here = [e for e in episodes if (e.condition, e.scene_seed) == (condition, scene_seed)]
    measured = {(e.world, e.scene, e.task) for e in here if e.experiment == MANY}

    def of(name: str, worlds: Sequence[str], reference: str = "correct") -> list[Episode]:
        who = (name, reference)
        found = [e for e in here if (e.experiment, e.shown.reference) == who and e.world in worlds]
        return [e for e in found if (e.world, e.scene, e.task) in measured]

    def row(label: str, role: str, worlds: Sequence[str]) -> tuple[str, ...]:
        followed, opposed = of(MANY, worlds), of(MANY, worlds, "opposite")
        others = (ours(of(name, worlds)) for name in OTHERS)
        return label, role, ours(followed), _share(followed, first_chunk_follows), ours(opposed), *others

    rows = []
    for role, worlds in ROLES:
        present = [world for world in WORLD_TASKS if world in worlds and of(MANY, (world,))]
        rows += [row(world, role, (world,)) for world in present]
        if len(present) > 1:
            rows.append(row("all of these", role, present))
    return Table(
        f"One policy, many objects: {CONDITION_NAMES[condition].lower()}, scene seed {scene_seed}",
        "memcorr-many with one reference per task (pair 0 of each world), the embedded matcher and the phase from "
        "what is seen. Beside it, on the same scenes: the servo that its actions are relative to (the reference's "
        "commands from the phase that is seen, and straight back to its path; it reacts and has learned nothing), "
        "replay of the reference, and the policy that was trained on the door alone.",
        ("World", "Role", "Success", "First chunk right", "Opposite reference", *OTHERS.values()),
        tuple(rows),
    )


def swaps(lookup: Lookup) -> Table | None:
    """The other task's reference first, exchanged on the way."""
    rows = [e for e in lookup.episodes if e.shown.swap and e.experiment == MANY and e.stage == "final"]
    if not rows:
        return None
    lines = []
    for world in WORLD_TASKS:
        for swap in sorted({e.shown.swap for e in rows if e.world == world}):
            here = [e for e in rows if (e.world, e.shown.swap) == (world, swap)]
            role = next(role for role, worlds in ROLES if world in worlds)
            lines.append((world, role, str(swap), ours(here)))
    lines.append(("all of these", "", "", ours(rows)))
    return Table(
        "Another reference in mid-episode",
        "The policy first follows the reference of the other task; after so many control steps it is handed the right "
        "one. Success is judged by the latter, within the 200 steps of an episode, those before included.",
        ("World", "Role", "Exchanged after", "New goal reached"),
        tuple(lines),
    )


def reactions(lookup: Lookup) -> Table | None:
    """Something goes wrong in the worlds it was trained on, all of them pooled; the others on the same scenes."""
    who = Contenders(lookup)
    mine = [e for e in who.rows if (e.experiment, e.condition) == (MANY, "disturbed") and e.world in TRAINED_WORLDS]
    mine = [e for e in mine if in_suite(e) or magnitude(e.disturbance)[0] in MOVING]
    if not mine:
        return None
    measured = {rollout_identity(unseeded(e)) for e in mine}
    others = {
        name: [e for e in who.rows if e.experiment == name and rollout_identity(unseeded(e)) in measured]
        for name in ("replay", "servo", "expert")
    }

    def line(label: str, wanted: Callable[[Episode], bool]) -> tuple[str, ...]:
        ours_, *theirs = ([e for e in rows if wanted(e)] for rows in (mine, *others.values()))
        gap = paired_difference(*([unseeded(e) for e in rows] for rows in (ours_, theirs[0])))
        above = NOT_MEASURED if gap is None else f"{gap.points:+.1f} [{gap.low:.1f}, {gap.high:.1f}]"
        return label, ours(ours_), *map(ours, theirs), above

    kinds = dict.fromkeys(sorted((e.disturbance for e in mine), key=magnitude))
    lines = [line(kind or "nothing", lambda e, kind=kind: e.disturbance == kind) for kind in kinds]  # type: ignore[misc]
    moving = "the suite's, what moves the object or the hand after the start"
    lines.append(line(moving, lambda e: in_suite(e) and magnitude(e.disturbance)[0] in MOVING))
    lines.append(line("all of the suite's", in_suite))
    seeds = ", ".join(str(seed) for seed in sorted({e.scene_seed for e in mine}))
    return Table(
        "Something goes wrong: one policy, the worlds it was trained on",
        f"Condition disturbed, scene seed {seeds}, {len({e.world for e in mine})} worlds pooled, training positions, "
        "both tasks, judged within 200 steps; each of the others on those of the same scenes where it was measured.",
        ("What goes wrong", NAMES[MANY], *(NAMES[name] for name in others), "minus replay, points"),
        tuple(lines),
    )


def in_suite(e: Episode) -> bool:
    """Whether this is what the condition itself lets go wrong in this scene."""
    kind = SUITE[e.scene % len(SUITE)]
    return e.disturbance == (str(Disturbance.parse(kind)) if kind else "")


def unseeded(e: Episode) -> Episode:
    """To be matched with who was never trained."""
    return replace(e, train_seed=None)


def strangers(episodes: Sequence[Episode]) -> Table | None:
    """Seen by another camera, or with masks that were carried: recordings of somebody else's."""
    rows = [e for e in episodes if e.camera or e.shown.masks != "simulator"]
    if not rows:
        return None
    groups: dict[tuple[str, ...], list[Episode]] = {}
    for e in rows:
        what = f"{e.condition}, seed {e.scene_seed}", e.disturbance, e.shown.reference
        groups.setdefault((e.experiment, e.camera, e.shown.masks, *what), []).append(e)
    return Table(
        "A stranger's recordings",
        "References and live scenes seen by another camera; masks of live frames are the simulator's, or its first one "
        "carried by the matcher. docs/own-data.md has the commands.",
        ("Policy", "Camera", "Live masks", "Scenes", "Sensors", "Reference", "Success"),
        tuple((*key, ours(here)) for key, here in sorted(groups.items())),
    )


def _plain(e: Episode) -> bool:
    usual = e.shown.phase_from == ("seen" if e.experiment in SEEING else "elapsed")
    shown = (e.shown.pairing, e.shown.phase_offset, e.shown.phase_speed, e.shown.swap, e.disturbance)
    known = e.experiment == MANY or e.experiment in OTHERS
    return (
        known and usual and shown == ("kept", 0, 1.0, 0, "") and e.shown.lifting == "rigid" and e.stage != "unfinished"
    )


def _share(episodes: Sequence[Episode], right: Callable[[Episode], bool]) -> str:
    return count(sum(map(right, episodes)), len(episodes)) if episodes else NOT_MEASURED
