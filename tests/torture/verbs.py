"""Verbs that are killed, refused their writes, and raced: each must end with what it would have made undisturbed."""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from memcorr.errors import UserError
from memcorr.files import SEAL, read_arrays, read_json

from ..test_folders import until
from .children import Trouble, disk, ended, load, orphans, processor_seconds, start, told, wait
from .counts import Counts

ROOT = Path(__file__).parents[2]
KILLS = 8  # of one folder, before it may finish
SPOKEN = 16_384  # bytes that a file must be allowed for a child to say what is wrong
GONE_WITHIN = 60.0  # seconds for whatever a killed process leaves: ffmpeg ends when nobody feeds it


def results(folder: Path) -> dict[str, bytes]:
    """The files of a folder, without what names the time; TensorBoard's are left out."""
    from memcorr.evaluation.episodes import EPISODES, read_episodes

    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_dir() or "tensorboard" in path.parts:
            continue
        name = str(path.relative_to(folder))
        if path.name == EPISODES:
            rows = read_episodes(path)
            found[name] = repr([dataclasses.replace(row, seconds=0.0) for row in rows]).encode()
        elif path.name == "metrics.jsonl":
            measured = [json.loads(line) for line in path.read_bytes().splitlines()]
            found[name] = repr(
                [{k: v for k, v in row.items() if k != "updates_per_second"} for row in measured]
            ).encode()
        else:
            found[name] = path.read_bytes()
    return found


@dataclasses.dataclass(frozen=True)
class Verb:
    """A command that makes a folder, and what it makes when nothing disturbs it."""

    name: str
    arguments: list[str]
    seconds: float  # of the processor
    writes: int  # below its folder; 0 where nobody counts them
    expected: dict[str, bytes]

    @property
    def alone(self) -> bool:
        return not self.name.endswith("-2")


def lines(here: Path) -> dict[str, list[str]]:
    """Each verb with one worker, and where there are workers with two; later ones stand on what earlier ones made."""
    store, run = here / "store", here / "undisturbed-train"
    matching = ["match", "--data", str(store), "--pairs", "2", "--rows", "8", "--matcher", "flow", "--workers"]
    long = here / "undisturbed-collect-2"  # spawned workers know of no shorter episodes
    matching_long = ["match", "--data", str(long), "--pairs", "1", "--rows", "4", "--matcher", "flow", "--workers"]
    few = ["batch=8", "updates=[3,1]", "ddim_steps=2", "guidance=1.0"]
    cache = ["--cache", str(here / "undisturbed-match")]
    rolling = ["--data", str(store), "--matcher", "flow", "--workers", "1", "--scenes", "0"]
    return {
        "report": ["report", str(ROOT / "results/zeros")],
        "collect": ["collect", "--pairs", "1", "--workers", "1"],
        "match": [*matching, "1"],
        "train": ["train", "debug", "--data", str(store), *cache, "--set", *few],
        "evaluate": ["evaluate", "replay", *rolling, "1"],
        "evaluate-policy": ["evaluate", str(run), *rolling, "--tasks", "open", "close"],
        "collect-disturbed": ["collect", "--disturbed", "--world", "drawer", "--pairs", "1", "--workers", "1"],
        "demo": ["demo", "--policy", str(run), "--workers", "1"],
        "collect-2": ["collect", "--pairs", "1", "--workers", "2"],
        "match-2": [*matching_long, "2"],
    }


NEEDS = {"match": ("store",), "train": ("store", "match"), "evaluate": ("store",), "match-2": ("collect-2",)}
NEEDS |= {"evaluate-policy": ("store", "match", "train"), "demo": ("store", "collect", "match", "train")}


MADE: dict[tuple[Path, str], Verb] = {}  # one part of the torture may use what another one has made


def verbs(here: Path, chosen: list[str]) -> Iterator[Verb]:
    """The chosen ones, each run once undisturbed."""
    home = here.parent
    known = lines(home)
    if unknown := [name for name in chosen if name not in known]:
        raise SystemExit(f"no verb {unknown[0]}: choose from {', '.join(known)}")
    wanted = [name for name in known if not chosen or name in chosen]
    needed = {need for name in wanted for need in NEEDS.get(name, ())}
    load(("door", "drawer") if "collect-disturbed" in wanted else ("door",))
    if "store" in needed and not (home / "store").exists():
        undisturbed(home / "store", ["collect", "--pairs", "2", "--workers", "1"], home)
    for name, line in known.items():
        if name not in wanted and name not in needed:
            continue
        out = home / f"undisturbed-{name}"
        if (home, name) not in MADE:
            MADE[home, name] = Verb(name, line, *undisturbed(out, line, home), results(out))
            print(f"  {name}: {MADE[home, name].seconds:.1f} s of the processor", flush=True)
        for _ in range(max(1, chosen.count(name)) if name in wanted else 0):  # named more often, chosen more often
            yield MADE[home, name]


def undisturbed(out: Path, line: list[str], here: Path) -> tuple[float, int]:
    """Seconds of the processor that it takes, and how often it writes."""
    errors, used = here / "errors.txt", 0.1
    prepare(line[0], out, here)
    child = start(line, errors, out)
    while (code := _ended_yet(child)) is _RUNNING:
        used = max(used, processor_seconds(child))
        wait(child, 0.1)
    if code != 0:
        raise SystemExit(f"memcorr {' '.join(line)} does not work here: {errors.read_text()}")
    writes = errors.with_suffix(".writes")
    return used, int(writes.read_text()) if writes.exists() else 0


def prepare(verb: str, out: Path, home: Path) -> None:
    """A demonstration finds its references recorded: how that is killed, `collect` shows."""
    if verb == "demo" and not out.exists():
        shutil.copytree(home / "undisturbed-collect", out / "demos")


_RUNNING = object()


def _ended_yet(child: int) -> object:
    number, status = os.waitpid(child, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if number else _RUNNING


def judged(verb: Verb, out: Path, errors: Path, counts: Counts, finished: bool) -> None:
    """The verb, run once more if it has not finished, must end with what it would have made at once."""
    code = 0 if finished else ended(start(verb.arguments, errors, out))
    found: dict[str, bytes] = {}
    if code == 0:
        try:
            found = results(out)
        except UserError as problem:
            counts.broken(f"{verb.name} left what it cannot read: {problem}")
    if code != 0 or found != verb.expected:
        differing = sorted(k for k in found.keys() | verb.expected.keys() if found.get(k) != verb.expected.get(k))
        counts.broken(f"{verb.name}: exit {code} {differing[:3]} {told(errors)[-1:]}")
    else:
        counts["folders that equal an undisturbed run byte for byte"] += 1
    shutil.rmtree(out, ignore_errors=True)


def turns(everything: list[Verb], counts: Counts, what: str) -> Iterator[Verb]:
    """Of the command that has had least, what has cost least so far; a turn counts too, whatever came of it."""
    taken: collections.Counter[str] = collections.Counter()

    def had(verb: Verb) -> float:
        return (counts[f"{what}, {verb.name}"] + taken[verb.name]) / everything.count(verb)

    while True:
        command = {verb.arguments[0]: 0.0 for verb in everything}
        for verb in everything:
            command[verb.arguments[0]] += had(verb) / everything.count(verb)
        verb = min(everything, key=lambda verb: (command[verb.arguments[0]], had(verb) * verb.seconds))
        taken[verb.name] += 1
        yield verb


def kills(here: Path, count: int, chosen: list[str], counts: Counts) -> None:
    """kill -9 at random moments: half of them anywhere in the work, half in the middle of a write."""
    everything = list(verbs(here, chosen))
    for k, verb in enumerate(turns(everything, counts, "kill -9")):
        out, errors, code = here / f"kill-{k}", here / "errors.txt", None
        prepare(verb.name, out, here.parent)
        for _ in range(KILLS):
            if counts["kill -9"] >= count:
                break
            writing = verb.writes > 0 and verb.alone and random.random() < 0.5
            trouble = Trouble(write=random.randint(1, verb.writes), deadly=True) if writing else None
            moment = None if writing else random.uniform(0, 1) * verb.seconds
            code = ended(start(verb.arguments, errors, out, trouble), moment)
            if code is None:
                counts["kill -9"] += 1
                counts[f"kill -9, {verb.name}"] += 1
                counts["kill -9 in the middle of a write"] += writing
                if not until(lambda: not orphans(), GONE_WITHIN):
                    counts.broken(f"{verb.name} left {len(orphans())} orphans")
            elif code != 0:
                counts.broken(f"{verb.name} after kill -9: exit {code} {told(errors)[-1:]}")
            if code is not None:
                break
        judged(verb, out, errors, counts, finished=code == 0)
        if counts["kill -9"] >= count:
            return


def whole(path: Path, name: str, expected: dict[str, bytes]) -> bool:
    """Whether a published file is one that the verb makes, now or on its way."""
    if "tensorboard" in path.parts or name.endswith(".jsonl"):  # appended to: half a line at the end is dropped
        return True
    if path.read_bytes() == expected.get(name):
        return True
    try:
        if name.endswith(".safetensors"):
            return SEAL in bytes(read_arrays(path, "").content)
        return name.endswith(".json") and bool(read_json(path, dict[str, Any], ""))
    except UserError:
        return False


def writes(here: Path, count: int, chosen: list[str], counts: Counts) -> None:
    """A disk that refuses: the Nth write, all writes from the Nth on, or large files."""
    everything = [verb for verb in verbs(here, chosen) if verb.alone]
    for k, verb in enumerate(turns(everything, counts, "refused writes")):
        if counts["refused writes"] >= count:
            return
        out, errors = here / f"write-{k}", here / "errors.txt"
        prepare(verb.name, out, here.parent)
        nth, largest = random.randint(1, max(verb.writes, 1)), max(map(len, verb.expected.values()))
        ways = [Trouble(nth), Trouble(nth, once=True)] if disk() else []
        if largest > SPOKEN:
            ways.append(Trouble(size=int(SPOKEN + random.random() ** 2 * (largest - SPOKEN))))
        if not ways:
            continue
        how = random.choice(ways)
        code = ended(start(verb.arguments, errors, out, how))
        if code == 0:
            counts["a write was refused that nobody needs (TensorBoard's, or none)"] += 1
        else:
            counts["refused writes"] += 1
            counts[f"refused writes, {verb.name}"] += 1
            if code != 2 or len(told(errors)) != 1:
                counts.broken(f"{verb.name} after a refused write ({how}): exit {code} {told(errors)[-2:]}")
        for path in sorted(out.rglob("*")) if out.exists() else []:
            name = str(path.relative_to(out))
            if path.is_file() and not whole(path, name, verb.expected):
                counts.broken(f"{verb.name} published {name}, not whole ({how})")
        judged(verb, out, errors, counts, finished=code == 0)


def races(here: Path, count: int, chosen: list[str], counts: Counts) -> None:
    """Two of the same verb on one folder."""
    everything = list(verbs(here, chosen))
    for k, verb in enumerate(turns(everything, counts, "races")):
        if counts["races"] >= count:
            return
        out, codes = here / f"race-{k}", []
        prepare(verb.name, out, here.parent)
        children = [start(verb.arguments, here / "errors-0.txt", out)]
        late = random.choice([0, 0, 0.1, 0.4, 0.8]) * verb.seconds
        until(_used(children[0], late), 600)
        children.append(start(verb.arguments, here / "errors-1.txt", out))
        for n, child in enumerate(children):
            code, errors = ended(child), here / f"errors-{n}.txt"
            codes.append(code)
            if code == 0:
                counts["did its work"] += 1
            elif code == 2 and len(told(errors)) == 1 and "another memcorr" in told(errors)[0]:
                counts["was told to wait"] += 1
            else:
                counts.broken(f"{verb.name} in a race: exit {code} {told(errors)[-2:]}")
        counts["races"] += 1
        counts[f"races, {verb.name}"] += 1
        judged(verb, out, here / "errors.txt", counts, finished=0 in codes)


def _used(child: int, seconds: float) -> Callable[[], bool]:
    """Whether it has used so much of the processor, or has ended before that."""
    over = os.WEXITED | os.WNOHANG | os.WNOWAIT
    return lambda: processor_seconds(child) >= seconds or os.waitid(os.P_PID, child, over) is not None
