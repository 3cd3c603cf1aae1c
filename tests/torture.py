"""`make torture`: what the tests do for seconds, for as long as you like. Prints counts; exit code 1 if anything broke.

    python -m tests.torture                      # everything, at the counts that the project promises
    python -m tests.torture files frames         # some of it
    python -m tests.torture kills --times 0.1    # a tenth as often

commands  bad command lines: one line, exit code 2, nothing written
files     damaged files of every kind, through the readers that everything uses: told in one line, or harmless
frames    wrong frames: refused, or a finite chunk that says when it had no reference
kills     kill -9 at random moments of every verb, until it gets through: the result of an undisturbed run, no orphan
writes    a file system that refuses at random sizes: nothing is published that is not whole, then the same result
races     two of the same verb on one folder: the result of one

Verbs run in forked children of a process that has loaded everything, so that moments fall into the work.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from memcorr.errors import UserError
from memcorr.frames import Frame

from .test_files import KINDS, Kind, damaged, told_or_harmless
from .test_runs import processes, until

MARK = "MEMCORR_TORTURE"
Counts = collections.Counter[str]


# Children


def run(arguments: list[str], errors: Path, limit: int | None = None) -> int:
    """Starts `memcorr ARGUMENTS` in a forked child whose standard error goes to a file; returns its number."""
    child = os.fork()
    if child:
        return child
    code = 70
    try:
        os.setsid()
        sink = os.open(errors, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(sink, 2)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        from memcorr.cli import main

        sys.argv = ["memcorr", *arguments]
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
        main()
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stderr.flush()
        os._exit(code)


def ended(child: int, within: float) -> int | None:
    """The child's exit code; None if it was killed after `within` seconds."""
    end = time.monotonic() + within
    while True:
        number, status = os.waitpid(child, os.WNOHANG)
        if number:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return None
        time.sleep(0.005)


def told(errors: Path) -> list[str]:
    """What a person sees: progress bars overwrite themselves."""
    lines = errors.read_text(errors="replace").replace("\r", "\n").splitlines()
    return [line for line in lines if line.strip() and "%|" not in line]


def orphans() -> list[int]:
    return [number for number in processes(f"{MARK}={os.environ[MARK]}\0") if number != os.getpid()]


def results(folder: Path) -> dict[str, bytes]:
    """The files of a folder; what names the time or is TensorBoard's is left out."""
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
            found[name] = b"\n".join(line.split(b'"updates_per_second"')[0] for line in path.read_bytes().splitlines())
        else:
            found[name] = path.read_bytes()
    return found


@dataclasses.dataclass(frozen=True)
class Verb:
    """A command that makes a folder, and what it makes when nothing disturbs it."""

    name: str
    arguments: list[str]
    seconds: float
    expected: dict[str, bytes]


def verbs(here: Path, chosen: list[str]) -> Iterator[Verb]:
    """Each verb with one worker, and where there are workers with two; run once undisturbed."""
    store = here / "store"
    lines = {
        "collect": ["collect", "--pairs", "1", "--workers", "1"],
        "collect-2": ["collect", "--pairs", "1", "--workers", "2"],
        "match": ["match", "--data", str(store), "--pairs", "2", "--rows", "8", "--matcher", "flow", "--workers", "1"],
        "match-2": [
            "match",
            "--data",
            str(store),
            "--pairs",
            "2",
            "--rows",
            "8",
            "--matcher",
            "flow",
            "--workers",
            "2",
        ],
        "train": ["train", "debug", "--data", str(store), "--set", "batch=8"],
        "evaluate": ["evaluate", "replay", "--data", str(store), "--scenes", "0", "1", "2", "--workers", "1"],
        "report": ["report", str(Path(__file__).parents[1] / "results/zeros")],
        "demo": ["demo", "--scenes", "1", "--workers", "1"],
    }
    lines = {name: line for name, line in lines.items() if not chosen or name in chosen}
    if any(str(store) in line for line in lines.values()):
        line = ["collect", "--pairs", "2", "--workers", "1", "--out", str(store)]
        if ended(run(line, here / "errors"), 600) != 0:
            raise SystemExit(f"collect does not work here: {(here / 'errors').read_text()}")
    for name, line in lines.items():
        out, start = here / f"undisturbed-{name}", time.monotonic()
        code = ended(run([*line, "--out", str(out)], here / "errors"), 600)
        if code != 0:
            raise SystemExit(f"{name} does not work here: {(here / 'errors').read_text()}")
        yield Verb(name, line, time.monotonic() - start, results(out))


def judged(verb: Verb, out: Path, errors: Path, counts: Counts) -> None:
    """The verb once more, undisturbed, must end with what it would have made at once."""
    code = ended(run([*verb.arguments, "--out", str(out)], errors), 600)
    found = results(out) if code == 0 else {}
    if code != 0 or found != verb.expected:
        differing = sorted(k for k in found.keys() | verb.expected.keys() if found.get(k) != verb.expected.get(k))
        counts[f"BROKEN {verb.name}: exit {code} {differing[:3]} {told(errors)[-1:]}"] += 1


def kills(here: Path, count: int, chosen: list[str], counts: Counts) -> None:
    everything = list(verbs(here, chosen))
    median = sorted(verb.seconds for verb in everything)[len(everything) // 2]
    everything = [verb for verb in everything if verb.seconds < 3 * median] * 3 + [
        verb for verb in everything if verb.seconds >= 3 * median
    ]
    for k in range(10**9):
        if counts["kill -9"] >= count:
            break
        verb = everything[k % len(everything)]
        out, errors = here / f"kill-{k}", here / "errors"
        for _ in range(6):  # then it may finish
            code = ended(run([*verb.arguments, "--out", str(out)], errors), random.uniform(0, 1.1) * verb.seconds)
            if code is None:
                counts["kill -9"] += 1
                counts[f"kill -9, {verb.name}"] += 1
                if not until(lambda: not orphans(), 5):
                    counts["BROKEN: orphans"] += len(orphans())
            elif code != 0:
                counts[f"BROKEN {verb.name} after kill -9: exit {code} {told(errors)[-1:]}"] += 1
            if code is not None or counts["kill -9"] >= count:
                break
        judged(verb, out, errors, counts)
        counts["sequences compared byte for byte"] += 1
        shutil.rmtree(out, ignore_errors=True)


def writes(here: Path, count: int, chosen: list[str], counts: Counts) -> None:
    everything = [verb for verb in verbs(here, chosen) if not verb.name.endswith("-2")]
    for k in range(10**9):
        if counts["refused writes"] >= count:
            break
        verb = everything[k % len(everything)]
        out, errors = here / f"write-{k}", here / "errors"
        largest = max(map(len, verb.expected.values()))
        code = ended(
            run([*verb.arguments, "--out", str(out)], errors, int(random.uniform(0.01, 1.0) ** 2 * largest)), 600
        )
        if code == 0:
            counts["no write was refused"] += 1
        elif code == 2 and len(told(errors)) == 1:
            counts["refused writes"] += 1
            counts[f"refused writes, {verb.name}"] += 1
        else:
            counts[f"BROKEN {verb.name} after a refused write: exit {code} {told(errors)[-2:]}"] += 1
            counts["refused writes"] += 1
        for name, content in (results(out) if out.exists() else {}).items():
            appended = name.endswith(".jsonl")
            if not appended and content != verb.expected.get(name):
                counts[f"BROKEN {verb.name} published {name}, not whole"] += 1
        judged(verb, out, errors, counts)
        shutil.rmtree(out, ignore_errors=True)


def races(here: Path, count: int, chosen: list[str], counts: Counts) -> None:
    everything = [verb for verb in verbs(here, chosen) if not verb.name.endswith("-2")]
    for k in range(count):
        verb, out = everything[k % len(everything)], here / f"race-{k}"
        children = []
        for n in range(2):
            children.append(run([*verb.arguments, "--out", str(out)], here / f"errors-{n}"))
            time.sleep(random.choice([0, 0.05, 0.3]) * verb.seconds)
        for n, child in enumerate(children):
            code = ended(child, 600)
            lines = told(here / f"errors-{n}")
            if code == 0:
                counts["did its work"] += 1
            elif code == 2 and len(lines) == 1 and "another memcorr" in lines[0]:
                counts["was told to wait"] += 1
            else:
                counts[f"BROKEN {verb.name} in a race: exit {code} {lines[-2:]}"] += 1
        judged(verb, out, here / "errors", counts)
        counts["races"] += 1
        shutil.rmtree(out, ignore_errors=True)


# Command lines


def bad_lines() -> list[list[str]]:
    """Every option of every verb with values that it cannot take."""
    whole = ["", "x", "1.5", "nan", "-inf", "1e3", "½", "0x10", "--", "[]", str(2**64), "-1"]
    count = [*whole, "0", "-5", str(10**12)]
    speed = ["", "x", "nan", "inf", "-inf", "-1", "1e400", "--", "1,5"]
    word = ["", "nonsense", "../x", "ALL", "None"]
    missing = ["nowhere", "/dev/null", "/proc/nothing", ""]
    options: dict[tuple[str, ...], dict[str, list[str]]] = {
        ("collect",): {"--seed": whole, "--pairs": count, "--workers": count, "--world": word},
        ("match", "--data", "nowhere"): {"--pairs": count, "--rows": count, "--workers": count, "--lifting": word},
        ("match",): {"--data": missing},
        ("train", "debug"): {"--seed": whole, "--threads": [*count, "100000"], "--device": word, "--data": missing},
        ("train", "memcorr"): {
            "--set": [
                *(
                    "batch",
                    "batch=",
                    "batch=3",
                    "batch=-4",
                    "batch=true",
                    "batch=1e9",
                    "nonsense=1",
                    "name=x",
                    "=",
                    "=1",
                ),
                *("updates=5", "updates=[1]", "updates=[1,-2]", "learning_rate=nan", "betas=[]", "paired=1", "ema=-1"),
                *("network=magic", "representation=half", "tie_break=", "phase_errors=[1]", "guidance=null"),
            ],
        },
        ("train",): {"": ["nonsense", "", "../x"]},
        ("evaluate", "expert"): {
            "--scene-seed": whole,
            "--scenes": [*whole[:-1], "-1", "99999"],
            "--workers": count,
            "--phase-speed": speed,
            "--phase-offset": [v for v in whole if v != "-1"],
            "--reference": word,
            "--condition": word,
            "--world": word,
            "--lifting": word,
            "--matcher": word,
            "--disturb": [*word, "bump=", "bump=x", "bump=nan", "bump=inf", "=", "bump=1=2", "start=-5", "delay=-1"],
            "--tasks": [*word, "lock"],
        },
        ("evaluate",): {"": ["", "nonsense", "../x", "/dev/null", "nowhere/model.safetensors"]},
        ("report",): {"": missing, "--scene-seed": whole},
        ("report", str(Path(__file__).parents[1] / "results/zeros")): {
            "--matcher": word,
            "--scene-seed": ["5", *whole],
        },
        ("reproduce",): {"--tier": word, "--workers": count, "--threads": count},
        ("demo",): {"--scenes": [*count, "26"], "--scene-seed": whole, "--workers": count, "--policy": word},
        ("bench",): {"": ["nonsense", "", "observe-moon"]},
        ("matcher", "train"): {"--seed": whole, "--steps": count, "--threads": count, "--workers": count},
        ("matcher", "evaluate"): {"": ["nonsense"], "--scene-seed": whole, "--matcher": ["nonsense", "no.safetensors"]},
        ("matcher",): {"": ["nonsense", "", "--x"]},
        (): {"": ["nonsense", "", "--x", "-", "collect x", "Collect"]},
    }
    lines = []
    for verb, some in options.items():
        for option, values in some.items():
            lines += [[*verb, *([option] if option else []), value] for value in values]
            if option:
                lines += [[*verb, option.upper(), "1"], [*verb, option[1:] + "x", "1"]]
            if option not in ("", "--scenes", "--tasks", "--disturb"):  # these may be empty
                lines.append([*verb, option])
    return lines


def commands(here: Path, count: int, chosen: list[str], counts: Counts) -> None:
    lines = bad_lines()
    random.shuffle(lines)
    (here / "empty").mkdir()
    os.chdir(here / "empty")
    for line in lines[: max(count, 1)]:
        code = ended(run(line, here / "errors"), 60)
        seen = told(here / "errors")
        if code == 2 and len(seen) == 1 and seen[0].startswith("memcorr: "):
            counts["bad command lines told in one line"] += 1
        else:
            counts[f"BROKEN {line}: exit {code} {seen[-2:]}"] += 1
        if left := [path for path in (here / "empty").rglob("*") if path.is_file()]:
            counts[f"BROKEN {line} wrote {left[0].name}"] += 1
            shutil.rmtree(here / "empty")
            (here / "empty").mkdir()
            os.chdir(here / "empty")


# Files


def real_kinds(here: Path) -> tuple[Kind, ...]:
    """What verbs write, beside the small files of the tests."""
    import torch

    from memcorr.correspondence.embedded.matcher import WEIGHTS, load_network
    from memcorr.correspondence.embedded.network import MatchNetwork
    from memcorr.files import read_arrays, write_arrays
    from memcorr.policy.checkpoint import read_checkpoint, write_model
    from memcorr.policy.policy import SHIPPED
    from memcorr.training.experiments import Config

    def rewrite(path: Path) -> None:
        checkpoint = read_checkpoint(SHIPPED, torch.device("cpu"))
        config = Config.read(SHIPPED)
        write_model(path.parent, config.json(), checkpoint.network, checkpoint.normalisation, checkpoint.update)

    def policy(path: Path) -> object:
        c = read_checkpoint(path.parent, torch.device("cpu"))
        weights = {name: tensor.numpy().tobytes() for name, tensor in c.network.state_dict().items()}
        norms = [np.asarray(value).tobytes() for value in dataclasses.asdict(c.normalisation).values()]
        return weights, norms, c.design, c.seed, c.update

    def matcher(path: Path) -> object:
        return {name: tensor.numpy().tobytes() for name, tensor in load_network(path).state_dict().items()}

    def weights(path: Path) -> None:
        arrays = {name: tensor.half().numpy() for name, tensor in MatchNetwork().state_dict().items() if tensor.dim()}
        shipped = read_arrays(WEIGHTS, "").arrays
        write_arrays(path, {name: arrays.get(name, shipped[name]) for name in shipped})

    return (
        Kind("model.safetensors", rewrite, policy),
        Kind("config.json", rewrite, policy),
        Kind("embedded.safetensors", weights, matcher),
    )


def files(here: Path, count: int, chosen: list[str], counts: Counts) -> None:
    kinds = (*KINDS, *real_kinds(here))
    for kind in kinds:
        folder = here / f"files-{kind.name}"
        folder.mkdir()
        path = folder / kind.name
        kind.write(path)
        good, undamaged = path.read_bytes(), kind.read(path)
        for _ in range(-(-count // len(kinds))):
            size = random.choice([1, 8, 300, 5000])
            content = damaged(good, random.randrange(6), random.random(), random.randint(0, size))
            if content == good:
                continue
            counts["damaged files"] += 1
            try:
                counts[f"{kind.name}: {told_or_harmless(kind, path, content, undamaged)}"] += 1
            except Exception as problem:
                counts[f"BROKEN {kind.name}: {type(problem).__name__}: {str(problem)[:100]}"] += 1


# Frames


def frames(here: Path, count: int, chosen: list[str], counts: Counts) -> None:
    import memcorr
    from memcorr.demos.store import read_demonstration

    from .test_files import frame, write_small

    store = here / "reference"
    store.mkdir()
    reference = read_demonstration(write_small(store / "pair-000-open.h5", size=128))
    follower = memcorr.load_policy().follow(reference)
    rng = np.random.default_rng(random.randrange(2**32))
    for _ in range(count):
        wrong = wrong_frame(frame(int(rng.integers(6)), 128), rng)
        counts["wrong frames"] += 1
        try:
            plan = follower.plan(wrong, int(rng.integers(300)))
        except (ValueError, UserError) as problem:
            named = any(word in str(problem) for word in ("rgb", "depth", "mask", "camera", "robot_state", "gripper"))
            counts["refused by name" if named else f"BROKEN: {str(problem)[:80]}"] += 1
            continue
        except Exception as problem:
            counts[f"BROKEN: {type(problem).__name__}: {str(problem)[:80]}"] += 1
            continue
        if not np.isfinite(plan.actions).all() or np.abs(plan.actions).max() > 1:
            counts["BROKEN: not an action"] += 1
        else:
            counts["planned without the reference, and said so" if plan.fallback else "planned"] += 1


def wrong_frame(good: Frame, rng: np.random.Generator) -> Frame:
    """`good` with one to three fields wrong in value, type or shape."""
    values = [np.nan, np.inf, -np.inf, 1e30, -1e30, 1e-30, 0.0, -1.0, 255.0, 1000.0]
    for _ in range(int(rng.integers(1, 4))):
        name = str(rng.choice(["rgb", "depth", "mask", "robot_state", "gripper", "K", "T_world_cam"]))
        inside = name in ("K", "T_world_cam")
        array = np.array(getattr(good.camera if inside else good, name), copy=True)
        how = int(rng.integers(7))
        if how == 0 and array.ndim:
            array = array[:-1]
        elif how == 1:
            array = array.astype(rng.choice(["float64", "int64", "bool", "complex128", "uint8"]))
        elif how == 2:
            array = np.full_like(array, rng.choice(values)) if array.dtype.kind == "f" else np.zeros_like(array)
        elif how == 3 and array.dtype.kind == "f":
            array.flat[int(rng.integers(array.size))] = rng.choice(values)
        elif how == 4 and array.dtype.kind == "f":
            array = array * rng.choice([1e3, 1e-3, -1.0])
        elif how == 5:
            array = array[None]
        elif how == 6:
            array = rng.permutation(array.ravel()).reshape(array.shape)
        if inside:
            good = dataclasses.replace(good, camera=dataclasses.replace(good.camera, **{name: array}))
        else:
            good = dataclasses.replace(good, **{name: array})  # type: ignore[arg-type]
    return good


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
    given = parser.parse_args()
    if MARK not in os.environ:  # in the environment that every child inherits: that is how orphans are found
        return subprocess.run(
            [sys.executable, "-m", "tests.torture", *sys.argv[1:]], env={**os.environ, MARK: str(os.getpid())}
        ).returncode
    import torch

    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    random.seed(given.seed)
    print(f"seed {given.seed}", flush=True)
    broken = 0
    for name in given.parts or PARTS:
        part, count = PARTS[name]
        start, home = time.monotonic(), os.getcwd()
        counts: Counts = collections.Counter()
        with tempfile.TemporaryDirectory(prefix="memcorr-torture-") as folder:
            try:
                part(Path(folder), max(1, round(count * given.times)), given.verbs, counts)
            except KeyboardInterrupt:  # what was done counts
                print("interrupted")
            finally:
                os.chdir(home)
        print(f"{name}, {time.monotonic() - start:.0f} s", flush=True)
        for what, number in sorted(counts.items()):
            print(f"  {number:6} {what}", flush=True)
            broken += number * what.startswith("BROKEN")
    print("nothing broke" if not broken else f"{broken} broke")
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
