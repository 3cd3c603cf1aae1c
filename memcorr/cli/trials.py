"""The verb for everybody's policies: does it listen?"""

from __future__ import annotations

from pathlib import Path
from typing import cast

import tyro

from ..runs import CORES
from ..spec import DOOR, SPEC, TestSet
from .options import Count, Processes, Seed, app, verb


@verb(app)
def audit(
    policy: tyro.conf.Positional[str],
    given: tuple[str, ...] = (),
    world: str = DOOR,
    condition: str = "validation",
    scenes: tuple[Seed, ...] = (),
    scene_seed: Seed = 0,
    online: bool = True,
    episodes: tuple[Path, ...] = (),
    environment: str = "",
    tasks: tuple[str, ...] = (),
    executed: Count = SPEC.executed,
    data: Path | None = None,
    every: Count = 5 * SPEC.executed,
    references: Path | None = None,
    matcher: str = "embedded",
    empty: bool = True,
    name: str = "",
    out: Path = Path("runs/audit"),
    workers: Processes = CORES,
) -> None:
    """Does a conditional policy listen? Right, empty and opposite conditions with paired intervals; a page and a JSON.

    Args:
        policy: shipped, the folder of a run, a scripted one, or MODULE:CALLABLE, any callable (observation, condition)
            -> actions, found from the working directory too. In memcorr's worlds the observation is that of its
            Gymnasium environment, with the steps made as "elapsed"; the condition is a demonstration, or None.
        given: With MODULE:CALLABLE, arguments from which that callable makes the policy, such as a checkpoint's path.
        world: One of the ten worlds.
        condition: validation, boundary, extreme, camera or combined.
        scenes: Numbers of single scenes (seeds, with --environment); all if none is given.
        scene_seed: Draws fresh scenes of the same condition; the fixed sets are seed 0.
        online: Roll it out. With --no-online, recorded data alone.
        episodes: Roll nothing out: judge what `memcorr evaluate` left in these places, of POLICY or of the experiment
            of that name.
        environment: MODULE:CALLABLE, which makes a Gymnasium environment of a task; `info` says "success". The policy
            is then shown the task's name, or None.
        tasks: Of that environment; conditions are exchanged between them.
        executed: Actions of an answer that are made before it looks again (of MODULE:CALLABLE).
        data: Recordings (a store; see `memcorr import`) for the offline half: error, and direction of the first chunk.
        every: Rows between two that are judged offline.
        references: Store whose pair 0 is shown; as in `memcorr evaluate` if not given, offline that of DATA itself.
        matcher: For memcorr's own policies.
        empty: Whether it is also shown nothing; not for policies that were never trained without a condition.
        name: What the page calls it.
        out: Folder of audit.html, audit.png and audit.json. Rollouts of memcorr's own policies continue after an
            interruption; others begin anew, because nobody knows whether the policy is still the same.
        workers: Processes, for memcorr's own policies. The rows are the same for any number.
    """
    from ..audit.audit import Online
    from ..audit.audit import audit as run
    from ..audit.page import lines

    where = cast(TestSet, condition)  # checked where the scenes are drawn
    rolled = Online(world, where, scene_seed, scenes, environment, tasks, executed, workers) if online else None
    result = run(
        policy,
        out,
        given=given,
        online=rolled,
        episodes=episodes,
        data=data,
        every=every,
        references=references,
        matcher=matcher,
        empty=empty,
        name=name,
    )
    print("\n".join(lines(result)))
    print(f"wrote {out / 'audit.html'}, audit.png and audit.json; open the page in a browser")
