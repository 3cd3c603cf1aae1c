"""The verbs for any policy: does it listen, and is it better than another one?"""

from __future__ import annotations

import json as json_
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

import tyro

from ..spec import DOOR, SPEC, TestSet
from ..workers import CORES
from .options import Count, MatcherName, Points, Processes, Scenes, app, verb


@dataclass(frozen=True)
class Rolled(Scenes):
    """Where it is rolled out; with --environment, scenes are its seeds."""

    online: bool = True
    """Roll it out. With --no-online, recorded data alone."""
    world: str = DOOR
    """One of the ten worlds."""
    condition: str = "validation"
    """validation, boundary, extreme, camera or combined."""
    environment: str = ""
    """MODULE:CALLABLE, which makes a Gymnasium environment of a task; `info` says "success". The policy is then shown
    the task's name, or None."""
    tasks: tuple[str, ...] = ()
    """Of that environment; conditions are exchanged between them."""
    false_tasks: tuple[str, ...] = ()
    """Names that the environment's policy is told falsely."""
    executed: Count = SPEC.executed
    """Actions of an answer that are made before it looks again (of MODULE:CALLABLE)."""
    episodes: tuple[Path, ...] = ()
    """Roll nothing out: judge what `memcorr evaluate` left in these places, of POLICY or of the experiment of that
    name."""
    workers: Processes = CORES
    """Processes, for memcorr's own policies. The rows are the same for any number."""


@dataclass(frozen=True)
class Recorded:
    """The offline half: error, and direction of the first chunk, on recorded data."""

    data: Path | None = None
    """Recordings: a store; see `memcorr import`."""
    every: Count = 5 * SPEC.executed
    """Rows between two that are judged."""


@dataclass(frozen=True)
class Conditions:
    """What it is shown."""

    references: Path | None = None
    """Store whose pair 0 is shown; as in `memcorr evaluate` if not given, offline that of DATA itself."""
    matcher: MatcherName = "embedded"
    empty: bool = True
    """Whether it is also shown nothing; not for policies that were never trained without a condition."""
    noise: bool = True
    """Whether it is also given noise in place of all camera images."""
    false: bool = True
    """Whether it is also shown a false reference, of another object; not for policies that are told a task's name."""
    false_references: Path | None = None
    """Store whose pair 0 is the false reference; if not given, in memcorr's worlds, the next world's, recorded into OUT
    where there is none."""


@verb(app)
def audit(
    policy: tyro.conf.Positional[str],
    given: tuple[str, ...] = (),
    name: str = "",
    out: Path = Path("runs/audit"),
    *,
    rollouts: Rolled,
    recordings: Recorded,
    reference: Conditions,
) -> None:
    """Does a conditional policy listen, and look? Right and wrong conditions, paired; a checklist, a page and a JSON.

    Args:
        policy: shipped, the folder of a run, a scripted one, or MODULE:CALLABLE, any callable (observation, condition)
            -> actions, found from the working directory too. In memcorr's worlds the observation is that of its
            Gymnasium environment, with the steps made as "elapsed"; the condition is a demonstration, or None.
        given: With MODULE:CALLABLE, arguments from which that callable makes the policy, such as a checkpoint's path.
        name: What the page calls it.
        out: Folder of audit.html, audit.png and audit.json. Rollouts of memcorr's own policies continue after an
            interruption; others begin anew, because the policy may have changed.
    """
    from ..audit.audit import Online
    from ..audit.audit import audit as run
    from ..audit.page import lines

    r = rollouts
    where = cast(TestSet, r.condition)  # checked where the scenes are drawn
    names = (r.environment, r.tasks, r.false_tasks)
    online = Online(r.world, where, r.scene_seed, r.scenes, *names, r.executed, r.workers)
    result = run(
        policy,
        out,
        given=given,
        online=online if r.online else None,
        episodes=r.episodes,
        data=recordings.data,
        every=recordings.every,
        references=reference.references,
        matcher=reference.matcher,
        empty=reference.empty,
        noise=reference.noise,
        false=reference.false,
        false_references=reference.false_references,
        name=name,
    )
    print("\n".join(lines(result)))
    print(f"wrote {out / 'audit.html'}, audit.png and audit.json; open the page in a browser")


@verb(app)
def compare(
    a: tyro.conf.Positional[Path],
    b: tyro.conf.Positional[Path],
    where: tuple[str, ...] = (),
    of_a: tuple[str, ...] = (),
    of_b: tuple[str, ...] = (),
    matters: Points = 10.0,
    json: bool = False,
) -> None:
    """Is A better than B, worse, or can these rollouts not tell? And how many more would?

    Args:
        a: Rollouts: episodes.jsonl or a folder of them, or LeRobot's eval_info.json.
        b: Others of the same scenes and tasks. LeRobot's pair by number: both need the same --seed.
        where: Only rows with NAME=VALUE, such as condition=boundary; several may be given.
        of_a: The same for A alone, such as reference=opposite, where it holds more than one kind of rollouts.
        of_b: The same for B alone.
        matters: Percentage points that would matter.
        json: Print a list of what was found instead of lines.
    """
    from ..report.compare import compare

    found = compare(a, b, where, of_a, of_b, matters)
    print(json_.dumps([asdict(one) for one in found], indent=2) if json else "\n".join(one.line() for one in found))
    unmatched = found[-1].difference.unmatched
    if unmatched and not json:
        print(f"{unmatched} rollouts have no partner on the other side and are left out")
