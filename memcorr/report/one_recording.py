"""One recording of a stock task, followed in other placements, by whoever can follow one."""

from __future__ import annotations

from collections.abc import Sequence

from ..evaluation.episodes import Episode
from ..spec import STOCK, stock_task
from .robustness import NAMES
from .tables import Table, ours

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
        return _cell([e for e in here if (e.experiment, e.world, e.recording) == (name, STOCK + task, recording)])

    rows = [
        (task, recording or "as it is", *(cell(name, task, recording) for name in names)) for task, recording in groups
    ]
    if not rows:
        return None
    plain = [e for e in here if not e.recording]
    rows.append(("all", "as it is", *(_cell([e for e in plain if e.experiment == n]) for n in names)))
    return Table(
        "One recording, stock tasks",
        "Meta-World's own tasks, flags and placements. One recording of its scripted policy as that policy makes it, "
        "or in another manner; 20 other placements. “-along”: the goal, which Meta-World draws freely, is moved along "
        "with the object, as one recording cannot tell where it is otherwise. “said so”: failures in which the plan "
        "said that it was stuck. No learned policy has been trained on these tasks.",
        ("Task", "Recording", *(NAMES[n] for n in names)),
        tuple(rows),
    )


def _cell(episodes: Sequence[Episode]) -> str:
    failed = [e for e in episodes if not e.success]
    said = sum(e.stuck_replans > 0 for e in failed)
    return ours(episodes) + (f"; {said} of {len(failed)} said so" if said else "")
