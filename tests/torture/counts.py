"""What was done and what broke; counts of several runs add up in a file of rows."""

from __future__ import annotations

import collections
import json
import time
from pathlib import Path

from memcorr.machine import provenance


class Counts(collections.Counter[str]):
    """How often what happened, printed now and then."""

    EVERY = 60.0  # seconds

    def __init__(self, part: str, seed: int) -> None:
        super().__init__()
        self.part, self.seed, self.begun, self.printed = part, seed, time.monotonic(), time.monotonic()

    def __setitem__(self, what: str, number: int) -> None:
        super().__setitem__(what, number)
        if time.monotonic() - self.printed > self.EVERY:
            self.printed = time.monotonic()
            print(f"  {self.part}, {self.seconds} s: {self.main()}", flush=True)

    def broken(self, what: str) -> None:
        print(f"  BROKEN {what}", flush=True)
        self[f"BROKEN {what[:300]}"] += 1

    @property
    def seconds(self) -> int:
        return round(time.monotonic() - self.begun)

    def main(self) -> str:
        return ", ".join(f"{number} {what}" for what, number in list(self.items())[:3])

    def add_to(self, path: Path) -> None:
        row = {"part": self.part, "seed": self.seed, "seconds": self.seconds, "commit": provenance()["commit"]}
        with open(path, "a") as file:
            file.write(json.dumps({**row, "counts": dict(self)}) + "\n")


def summed(path: Path) -> dict[str, collections.Counter[str]]:
    """The counts of all runs in a file, by part."""
    total: dict[str, collections.Counter[str]] = {}
    for line in path.read_text().splitlines():
        row = json.loads(line)
        total.setdefault(row["part"], collections.Counter()).update(row["counts"])
    return total


def table(total: dict[str, collections.Counter[str]]) -> str:
    return "\n".join(
        f"{part}\n" + "\n".join(f"  {n:6} {what}" for what, n in sorted(c.items())) for part, c in total.items()
    )
