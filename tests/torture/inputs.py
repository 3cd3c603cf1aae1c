"""What comes in from outside: command lines, files, frames."""

from __future__ import annotations

import dataclasses
import os
import random
import shutil
from pathlib import Path

import numpy as np

from memcorr.errors import UserError
from memcorr.frames import Frame

from ..test_files import KINDS, Kind, damaged, told_or_harmless
from .children import ended, load, start, told
from .counts import Counts
from .kinds import real_kinds, strange_kinds

ZEROS = str(Path(__file__).parents[2] / "results/zeros")


# Command lines


def bad_lines() -> list[list[str]]:
    """Every option of every verb with values that it cannot take."""
    whole = ["", "x", "1.5", "nan", "-inf", "1e3", "½", "0x10", "--", "[]", str(2**64), "-1"]
    count = [*whole, "0", "-5", str(10**12)]
    speed = ["", "x", "nan", "inf", "-inf", "-1", "1e400", "--", "1,5"]
    name = ["", "nonsense", "../x", "ALL"]
    word = [*name, "None"]  # which is nothing given, where that may be
    missing = ["nowhere", "/dev/null", "/proc/nothing", ""]
    cluster = ["nonsense", "", "nowhere.invalid", "127.0.0.1:0", "127.0.0.1:x", "localjobs"]
    recipe = [
        *("batch", "batch=", "batch=3", "batch=-4", "batch=true", "batch=1e9", "batch=1000000000", "nonsense=1"),
        *("name=x", "=", "=1", "updates=5", "updates=[1]", "updates=[1,-2]", "learning_rate=nan", "betas=[]", "ema=-1"),
        *("betas=[1,1]", "ema=1", "ema=2", "learning_rate=[-1,0]", "epsilon=-1", "guidance=1e400", "noises=0"),
        *("network=magic", "representation=half", "tie_break=", "phase_errors=[1]", "phase_errors=[5,-5]", "paired=1"),
        *("guidance=null", "ddim_steps=1", "ddim_steps=101", "ddim_steps=0.5", "worlds=[]", 'worlds=["moon"]'),
        *('worlds=["door","door"]', "worlds=door", "condition_dropout=1.5", "off_track=2", "references=0", "schedule="),
        *("references=1000", "noises=1000000", "paired_every=1", "phase=later", "state=", "turned=1"),
        *(
            "predicts=future",
            "lifting=up",
            "train_pairs=0",
            "disturbed=yes",
            "resampled_errors=-1",
            "residual_limit_mm=x",
        ),
    ]
    options: dict[tuple[str, ...], dict[str, list[str]]] = {
        ("collect",): {"--seed": whole, "--pairs": count, "--workers": count, "--world": word},
        ("collect", "--disturbed"): {"--seed": whole, "--pairs": count, "--world": word, "": ["x", "--disturbed=2"]},
        ("match", "--data", "nowhere"): {
            "--pairs": count,
            "--rows": count,
            "--workers": count,
            "--lifting": word,
            "--tie-break": word,
            "--phase": word,
        },
        ("match",): {"--data": missing},
        ("train", "debug"): {
            "--seed": whole,
            "--threads": [*count, "100000"],
            "--device": word,
            "--data": missing,
            "--disturbed": missing,
            "--cache": missing,
            "--stage-one": missing,
        },
        ("train", "memcorr"): {"--set": recipe},
        ("train", "memcorr-many"): {
            "--data": missing,
            "--disturbed": missing,
            "--cache": missing,
            "--set": ["batch=4", "batch=60", "worlds=[]", "phase_errors=[6,-6]", "off_track=-1", "ddim_steps=1"],
        },
        ("train", "memcorr-many", "--cache", "nowhere", "--disturbed", "nowhere"): {"--data": missing},
        ("train",): {"": ["nonsense", "", "../x"]},
        ("evaluate", "expert"): {
            "--scene-seed": whole,
            "--scenes": [*(value for value in whole if value != "--"), "99999"],  # none, ended by --, are all
            "--workers": count,
            "--phase-speed": speed,
            "--phase-offset": [v for v in whole if v != "-1"],
            "--phase": [*name, "seen"],
            "--swap": [*whole, "8", "7", "-8"],
            "--reference": word,
            "--condition": word,
            "--world": word,
            "--lifting": name,
            "--matcher": word,
            "--masks": word,
            "--camera": missing,
            "--cluster": cluster,
            "--disturb": [*word, "bump=", "bump=x", "bump=nan", "bump=inf", "=", "bump=1=2", "start=-5", "delay=-1"],
            "--tasks": [*word, "lock"],
        },
        ("evaluate", "replay"): {
            "--swap": ["8", "-8"],
            "--phase": ["seen"],
            "--phase-offset": ["3"],
            "--phase-speed": ["2"],
            "--reference": ["empty"],
            "": ["--permute-pairs"],
        },
        ("evaluate", "servo"): {"--phase-offset": ["3"], "--reference": ["empty"], "--swap": ["-8", "3", "200"]},
        ("evaluate", "shipped"): {
            "--swap": ["3", "-8", "200", "1000000"],
            "--matcher": [*word, "none", "/dev/null", "nowhere.safetensors"],
            "--world": word,
        },
        ("evaluate", "shipped", "--phase", "seen"): {"--phase-offset": ["1"], "--phase-speed": ["2"]},
        ("evaluate", "shipped", "--reference", "empty"): {
            "--phase": ["seen"],
            "--swap": ["8"],
            "": ["--permute-pairs"],
        },
        ("evaluate",): {"": ["", "nonsense", "../x", "/dev/null", "nowhere/model.safetensors"]},
        ("report",): {"": missing, "--scene-seed": whole},
        ("report", ZEROS): {"--matcher": name, "--scene-seed": ["5", *whole]},
        ("reproduce",): {
            "--tier": word,
            "--workers": count,
            "--threads": count,
            "--matcher": ["nonsense", "nowhere.safetensors"],
        },
        ("demo",): {
            "--scene": [*whole, "25"],
            "--scene-seed": whole,
            "--workers": count,
            "--policy": [*word, "expert", "zeros", "replay"],
        },
        ("serve",): {
            "": ["nonsense", "", "../x"],
            "--port": [*whole, "65536", "-5"],
            "--slots": [*whole, "2", "3", "0"],
            "--clients": count,
            "--megabytes": count,
            "--threads": count,
            "--device": word,
            "--references": missing,
            "--key-file": missing,
            "--host": ["0.0.0.0", "", "nonsense.invalid"],
        },
        ("sweep", "--data", "nowhere"): {
            "--experiments": name,
            "--seeds": whole,
            "--set": recipe,
            "--condition": word,
            "--reference": word,
            "--matcher": ["nonsense", "nowhere.safetensors"],
            "--world": word,
            "--scene-seed": whole,
            "--scenes": [*whole, "99999"],
            "--device": word,
            "--threads": count,
            "--workers": count,
            "--cluster": cluster,
        },
        ("audit", "shipped"): {
            "--condition": word,
            "--world": word,
            "--scenes": [*(value for value in whole if value != "--"), "99999"],
            "--scene-seed": whole,
            "--episodes": missing,
            "--environment": ["nonsense", "no.module:x", "os:path", ":", "os:"],
            "--executed": count,
            "--data": missing,
            "--every": count,
            "--references": missing,
            "--matcher": ["nonsense", "nowhere.safetensors", "none"],
            "--workers": count,
            "": ["--no-online"],
        },
        ("audit",): {"": ["", "nonsense", "../x", "os:", ":path", "nowhere:x", "os:sep", "expert", "/dev/null"]},
        ("lab", "--port", "0"): {
            "--world": word[:-1],
            "--data": missing,
            "--matcher": ["nonsense", "nowhere.safetensors", "none"],
            "--host": ["nonsense.invalid"],
            "": ["nonsense", "../x", "expert"],
        },
        ("lab",): {"--port": [*whole, "65536", "-5"]},
        ("data", "mask"): {"": missing, "--segmenter": ["nonsense", ""], "--weights": missing},
        ("data", "mask", "nowhere"): {"--segmenter": name, "--weights": missing, "--first-masks": missing},
        ("publish",): {"": ["", "nonsense", "../x"]},
        ("data", "check"): {"": missing},
        ("data",): {"": ["nonsense", ""]},
        ("import", "lerobot", "--out", "x"): {"": missing, "--mapping": missing},
        ("import", "mcap", "--out", "x"): {"": missing, "--calibration": missing},
        ("export", "lerobot", "nowhere", "--out", "x"): {"--fps": speed},
        ("export", "lerobot", "--out", "x"): {"": missing},
        ("bench",): {"": ["nonsense", "", "observe-moon"]},
        ("matcher", "train"): {"--seed": whole, "--steps": count, "--threads": count, "--workers": count},
        ("matcher", "evaluate"): {
            "": ["nonsense"],
            "--scene-seed": whole,
            "--matcher": ["nonsense", "no.safetensors"],
            "--world": word,
            "--lifting": word,
        },
        ("matcher",): {"": ["nonsense", "", "--x"]},
        (): {"": ["nonsense", "", "--x", "-", "collect x", "Collect"]},
    }
    lines = []
    for verb, some in options.items():
        for option, values in some.items():
            lines += [[*verb, *([option] if option else []), value] for value in values]
            if option:
                lines += [[*verb, option.upper(), "1"], [*verb, option[1:] + "x", "1"]]
            if option not in ("", "--scenes", "--tasks", "--disturb", "--set", "--episodes"):  # these may be empty
                lines.append([*verb, option])
    return lines


def commands(here: Path, count: int, chosen: list[str], counts: Counts) -> None:
    load()
    lines, errors = bad_lines(), here / "errors.txt"
    random.shuffle(lines)
    (here / "empty").mkdir()
    os.chdir(here / "empty")
    for line in lines[:count]:
        code = ended(start(line, errors), within=300)
        seen = told(errors)
        if code == 2 and len(seen) == 1 and seen[0].startswith("memcorr: "):
            counts["bad command lines told in one line"] += 1
        else:
            counts.broken(f"{line}: exit {code} {seen[-2:]}")
        if left := [path for path in (here / "empty").rglob("*") if path.is_file()]:
            counts.broken(f"{line} wrote {left[0].name}")
            shutil.rmtree(here / "empty")
            (here / "empty").mkdir()
            os.chdir(here / "empty")


# Files


def files(here: Path, count: int, chosen: list[str], counts: Counts) -> None:
    """Ours are told or harmless. A tenth as many of strangers' that carry no sums: told, or nothing wrong to see."""
    ours, strange = (*KINDS, *real_kinds(here)), strange_kinds(here)
    for number, kind in enumerate((*ours, *strange)):
        of_ours = number < len(ours)
        path = here / f"files-{number}" / kind.name
        path.parent.mkdir(parents=True)
        kind.write(path)
        good, undamaged = path.read_bytes(), kind.read(path)
        for _ in range(-(-count // len(ours)) if of_ours else -(-count // 10 // len(strange))):
            size = random.choice([1, 8, 300, 5000])
            content = damaged(good, random.randrange(6), random.random(), random.randint(0, size))
            if content == good:
                continue
            counts["damaged files" if of_ours else "damaged files of strangers"] += 1
            try:
                seen = (
                    told_or_harmless(kind, path, content, undamaged) if of_ours else told_or_taken(kind, path, content)
                )
                counts[f"{kind.name}{'' if of_ours else ', of a stranger'}: {seen}"] += 1
            except Exception as problem:
                counts.broken(f"{kind.name}: {type(problem).__name__}: {str(problem)[:100]}")


def told_or_taken(kind: Kind, path: Path, content: bytes) -> str:
    path.write_bytes(content)
    try:
        kind.read(path)
    except UserError as problem:
        assert "\n" not in str(problem) and str(path.parents[-2]) in str(problem), problem
        return "refused"
    return "taken"


# Frames


def frames(here: Path, count: int, chosen: list[str], counts: Counts) -> None:
    """Of a real recording, to two policies: the shipped one, and one whose phase and actions come from what is seen."""
    import torch

    import memcorr
    from memcorr.demos.store import Store
    from memcorr.policy.checkpoint import read_checkpoint, write_model
    from memcorr.policy.policy import SHIPPED
    from memcorr.training.experiments import EXPERIMENTS, Config

    load(("door",))
    if ended(start(["collect", "--pairs", "1", "--workers", "1"], here / "errors.txt", here / "store")) != 0:
        raise SystemExit(f"collect does not work here: {told(here / 'errors.txt')}")
    reference = Store.open(here / "store").demonstration(0, "open")
    many = dataclasses.replace(EXPERIMENTS["memcorr-many"], ddim_steps=2)
    write_model(
        here / "many",
        Config(many, 42, "").json(),
        many.build(),
        read_checkpoint(SHIPPED, torch.device("cpu")).normalisation,
        0,
    )
    followers = [memcorr.load_policy(policy).follow(reference) for policy in ("shipped", here / "many")]
    rng = np.random.default_rng(random.randrange(2**32))
    good = reference.frames(range(0, len(reference), 12))
    for follower in followers:
        assert not follower.plan(good[0], 0).fallback
    for _ in range(count):
        wrong = wrong_frame(good[int(rng.integers(len(good)))], rng)
        follower = followers[int(rng.random() < 0.7)]  # the quicker one more often
        counts["wrong frames"] += 1
        try:
            plan = follower.plan(wrong, int(rng.integers(300)))
        except (ValueError, UserError) as problem:
            named = any(word in str(problem) for word in ("rgb", "depth", "mask", "camera", "robot_state", "gripper"))
            if named:
                counts["refused by name"] += 1
            else:
                counts.broken(str(problem)[:80])
            continue
        except Exception as problem:
            counts.broken(f"{type(problem).__name__}: {str(problem)[:80]}")
            continue
        if not np.isfinite(plan.actions).all() or np.abs(plan.actions).max() > 1:
            counts.broken("not an action")
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
