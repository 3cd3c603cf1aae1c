"""Who follows well, beside whom: the contest of learned and not learned, and one recording of each stock task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..evaluation.episodes import Episode
from ..evaluation.rounds import ROUNDS, SCENE_SEED, Round
from ..spec import STOCK, stock_task
from .robustness import NAMES
from .statistics import paired_difference
from .tables import NOT_MEASURED, Table, ours

# Column: experiment and stage of its rows.
CONTENDERS = {
    "memcorr-many, fresh weights": ("memcorr-many", "unfinished"),
    "memcorr-many, learned": ("memcorr-many", "final"),
    "memcorr, learned on the door alone": ("memcorr", "final"),
    "Servo, not learned": ("servo", "scripted"),
    "Replay, not learned": ("replay", "scripted"),
    "Expert (sees everything)": ("expert", "scripted"),
}
LEARNED = "memcorr-many, learned"
OTHERS = ("Servo, not learned", "Replay, not learned")  # whom it is compared with, rollout by rollout


def contest(episodes: Sequence[Episode], matcher: str) -> Table | None:
    """A row per round; at its end the learned policy minus those who learned nothing. None before two took part."""
    fresh = [e for e in episodes if e.scene_seed == SCENE_SEED and e.shown.matcher in (matcher, "none")]
    rows_of = {name: [e for e in fresh if (e.experiment, e.stage) == who] for name, who in CONTENDERS.items()}
    names = [name for name, rows in rows_of.items() if any(one.has(e) for one in ROUNDS for e in rows)]
    if len(names) < 2:
        return None
    others = [name for name in OTHERS if {name, LEARNED} <= set(names)]
    table = []
    for one in ROUNDS:
        here = {name: [e for e in rows_of[name] if one.has(e)] for name in names}
        if any(here.values()):
            cells = (_cell(one, name, here[name]) for name in names)
            table.append((one.name, *cells, *(_ahead(here[LEARNED], here[other]) for other in others)))
    return Table(
        "The contest",
        f"Fresh scenes of seed {SCENE_SEED}, both tasks, pooled over the worlds of a round. Nothing was chosen on "
        "them. No policy was trained on window, faucet or lock. Sensor faults at each of the sizes. "
        "The last columns are percentage points within matched rollouts: where the interval lies below zero, who "
        "learned nothing is ahead.",
        ("Round", *names, *(f"learned minus {name.split(',')[0].lower()}" for name in others)),
        tuple(table),
    )


def _cell(one: Round, name: str, rows: Sequence[Episode]) -> str:
    """The expert follows no reference and looks at no sensor: some rounds are not for it."""
    theirs = name.startswith("Expert") and bool(one.swap or one.disturbances or one.reference != "correct")
    return "–" if theirs else ours(rows)


def _ahead(learned: Sequence[Episode], other: Sequence[Episode]) -> str:
    """Training seeds do not pair with who was never trained: rollouts are matched by scene and task."""
    sides = ([replace(e, train_seed=None) for e in rows] for rows in (learned, other))
    found = paired_difference(*sides)
    return NOT_MEASURED if found is None else f"{found.points:+.1f} [{found.low:.1f}, {found.high:.1f}]"


# Those that the follower was worked on with; Meta-World's others were not looked at.
TASKS = (
    *("button-press", "button-press-wall", "dial-turn", "disassemble", "push-along", "drawer-open", "handle-pull"),
    *("plate-slide-along", "faucet-close", "pick-place-along"),
)
VARIED = "button-press"  # the task whose recordings were also made in other manners


def one_recording(episodes: Sequence[Episode]) -> Table | None:
    """A row per task and manner of recording, a column for each who followed; failures that said so beside them."""
    here = [e for e in episodes if stock_task(e.world) and not e.disturbance and e.stage in ("final", "scripted")]
    names = [name for name in NAMES if any(e.experiment == name for e in here)]
    order = {task: n for n, task in enumerate(TASKS)}
    groups = sorted(
        {(e.world.removeprefix(STOCK), e.recording) for e in here if e.experiment != "expert"},
        key=lambda g: (bool(g[1]), order.get(g[0], len(order)), g),
    )

    def cell(name: str, task: str, recording: str) -> str:
        recording = "" if name == "expert" else recording  # follows none
        return _said([e for e in here if (e.experiment, e.world, e.recording) == (name, STOCK + task, recording)])

    rows = [
        (task, recording or "as it is", *(cell(name, task, recording) for name in names)) for task, recording in groups
    ]
    if not rows:
        return None
    plain = [e for e in here if not e.recording]
    rows.append(("all", "as it is", *(_said([e for e in plain if e.experiment == n]) for n in names)))
    return Table(
        "One recording, stock tasks",
        "Meta-World's own tasks, flags and placements. One recording of its scripted policy as that policy makes it, "
        "or in another manner; 20 other placements. “-along”: the goal, which Meta-World draws freely, is moved along "
        "with the object, as one recording cannot tell where it is otherwise. “said so”: failures in which the plan "
        "said that it was stuck. No learned policy has been trained on these tasks.",
        ("Task", "Recording", *(NAMES[n] for n in names)),
        tuple(rows),
    )


def _said(episodes: Sequence[Episode]) -> str:
    failed = [e for e in episodes if not e.success]
    said = sum(e.stuck_replans > 0 for e in failed)
    return ours(episodes) + (f"; {said} of {len(failed)} said so" if said else "")
