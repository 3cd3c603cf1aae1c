"""`make torture`: prints counts; exit code 1 if anything broke.

    python -m tests.torture                               # everything, at the counts that the project promises
    python -m tests.torture files frames                  # some of it
    python -m tests.torture kills --times 0.1             # a tenth as often
    python -m tests.torture kills --verbs report train    # of some verbs; one that is named twice has two turns
    python -m tests.torture races kills races --times .5  # in this order, on what was made once
    python -m tests.torture races --add counts.jsonl      # counts of several runs add up in a file; Ctrl-C keeps them

commands  bad command lines: one line, exit code 2, nothing written
files     damaged files of every kind, through the readers that everything uses: told in one line, or harmless
frames    wrong frames: refused, or a finite chunk that says when it had no reference
kills     kill -9 at random moments of every verb, until it gets through: the result of an undisturbed run, no orphan
writes    a disk that refuses at random: nothing is published that is not whole, then the same result
races     two of the same verb on one folder: the result of one
"""

from __future__ import annotations

import argparse
import collections
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .children import MARK, orphans, restarted
from .counts import Counts, summed, table
from .inputs import commands, files, frames
from .verbs import kills, races, writes

PARTS: dict[str, tuple[Callable[[Path, int, list[str], Counts], None], int]] = {
    "commands": (commands, 1000),
    "files": (files, 2400),
    "frames": (frames, 1000),
    "kills": (kills, 200),
    "writes": (writes, 50),
    "races": (races, 50),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help="some of them; all if none is given")
    parser.add_argument("--times", type=float, default=1.0, help="of the usual counts")
    parser.add_argument("--verbs", nargs="*", default=[], help="of kills, writes and races; all if none is given")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 10**6)
    parser.add_argument("--add", type=Path, help="file that the counts are added to, and summed from")
    given = parser.parse_args()
    if unknown := [part for part in given.parts if part not in PARTS]:
        parser.error(f"no part {unknown[0]}")
    if MARK not in os.environ:
        with tempfile.TemporaryDirectory(prefix="memcorr-torture-") as folder:
            return restarted(sys.argv[1:], Path(folder))
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what was done counts
    print(f"seed {given.seed}", flush=True)
    total: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="memcorr-torture-") as folder:
        for number, name in enumerate(given.parts or PARTS):
            counts = Counts(name, given.seed + number)
            total.setdefault(name, collections.Counter())
            try:
                tortured(counts, Path(folder) / str(number), given)
            except KeyboardInterrupt:
                print("interrupted", flush=True)
                for orphan in orphans():
                    os.kill(orphan, signal.SIGKILL)
                break
            finally:
                total[name].update(counts)
    if given.add:
        total = summed(given.add)
        print(f"--- in all\n{table(total)}")
    broken = sum(n for counts in total.values() for what, n in counts.items() if what.startswith("BROKEN"))
    print("nothing broke" if not broken else f"{broken} broke")
    return int(bool(broken))


def tortured(counts: Counts, folder: Path, given: argparse.Namespace) -> None:
    """One part, with its counts printed, and added to a file if asked for; also if it is interrupted."""
    part, count = PARTS[counts.part]
    random.seed(f"{counts.seed} {counts.part}")
    home = os.getcwd()
    folder.mkdir()
    try:
        part(folder, max(1, round(count * given.times)), given.verbs, counts)
    finally:
        os.chdir(home)
        print(f"{table({counts.part: counts})}\n  {counts.seconds} s", flush=True)
        if given.add:
            counts.add_to(given.add)


if __name__ == "__main__":
    sys.exit(main())
