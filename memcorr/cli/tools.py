"""The verbs around the pipeline: what a person looks at, measures or mends."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import tyro

from ..errors import UserError, needs
from ..spec import DOOR, PUBLISHED_ONLINE_MM, SPEC
from ..workers import CORES
from .options import (
    ActionLimit,
    Count,
    Device,
    LiftingName,
    MatcherName,
    PolicyName,
    Port,
    Processes,
    Seed,
    Work,
    app,
    matcher_app,
    verb,
)


@verb(app)
def demo(
    out: Path = Path("demo"),
    policy: PolicyName = "shipped",
    scene: Seed = 0,
    scene_seed: Seed = 0,
    workers: Processes = CORES,
) -> None:
    """Watch the learned policy and the servo follow recordings of a door, and the servo those of other objects: eight
    rollouts on one page. Takes a minute.

    Args:
        out: Folder for everything that is made.
        scene: Which scene of each condition, counted from 0.
        scene_seed: Draws fresh scenes; the fixed set is seed 0.
        workers: Processes.
    """
    from ..show.demo import demo

    demo(out, policy, scene, scene_seed, workers)


@verb(app)
def bench(names: tyro.conf.Positional[tuple[str, ...]] = (), json: bool = False) -> None:
    """Speed as ratios against named baselines, measured interleaved in this very run.

    Args:
        names: What to measure; everything if none is given. replan:RUN is of another policy than the shipped one.
        json: Print a list of {name, ours_ms, baseline, baseline_ms, ratio} instead of a table.
    """
    from ..bench.run import as_json, run

    results = run(names, None if json else print)
    if json:
        print(as_json(results))


@verb(app)
def serve(
    policy: tyro.conf.Positional[PolicyName] = "shipped",
    references: Path | None = None,
    matcher: MatcherName = "embedded",
    host: str = "127.0.0.1",
    port: Port = 8000,
    key_file: Path | None = None,
    slots: Literal[1, 4, 8, 16] | None = None,
    threads: Processes = 1,
    clients: Count = 32,
    megabytes: Count = 32,
    action_limit: ActionLimit = 1.0,
    masks: Literal["sent", "carried"] = "sent",
    device: Device = "auto",
) -> None:
    """Serve a policy to robots over websockets, in openpi's protocol, until Ctrl-C or SIGTERM.

    Args:
        references: Store whose demonstrations clients may choose by name; without one they upload theirs.
        host: Address to listen on. Any but this machine's own needs a key.
        port: 0 takes any that is free; the first line printed says which.
        key_file: File with the key that clients must send (openpi's api_key).
        slots: Clients planned for together; less is padded, so that a client's plans do not depend on the others. 1 on
            a CPU, where more cost nearly as much as they save; 8 on CUDA.
        threads: Torch's.
        clients: Connections at a time.
        action_limit: Largest component of an action that a policy's file may ask for; others are refused.
        masks: Whether every frame comes with the object's mask, or the first of an episode, which is then carried along
            by the matcher and depth.
        megabytes: Longest message. A reference of 200 frames of 128 x 128 pixels has 26.
    """
    with needs("serve"):
        from ..serve.server import ServerSettings, read_key, serve_policy

    key = None if key_file is None else read_key(key_file)
    settings = ServerSettings(host, port, key, megabytes * 2**20, clients=clients)
    serve_policy(policy, references, matcher, settings, slots, threads, device, action_limit, masks)


@verb(app)
def lab(
    policy: tyro.conf.Positional[PolicyName] = "shipped",
    world: str | None = None,
    data: Path | None = None,
    matcher: MatcherName = "embedded",
    out: Path = Path("lab"),
    host: str = "127.0.0.1",
    port: Port = 8080,
) -> None:
    """An interactive page: move the object and the camera, swap the reference, push; memcorr and replay side by side.

    Args:
        world: One of the ten worlds; the one that DATA is of, or door. The page can change it.
        data: Demonstrations to choose references from. If not given: those that `memcorr collect` made, or, where
            there are none, one pair that is recorded into OUT first.
        out: Folder for videos and .rrd files.
        host: Address to listen on. There is no key: anyone who reaches it can steer.
        port: 0 takes any that is free; the first line printed says which.
    """
    with needs("lab"):
        from ..lab.lab import run_lab

    run_lab(policy, world, data, matcher, out, host, port)


@verb(app)
def publish(
    policy: tyro.conf.Positional[str], repo: str | None = None, private: bool = False, dry_run: bool = False
) -> None:
    """Put a policy on the Hugging Face Hub: config, weights and a card; `load_policy("org/name")` reads it back.

    Args:
        policy: Folder of a run (its stage-one folder for stage one), or shipped.
        repo: ORG/NAME on the Hub; made if it does not exist.
        private: Make it visible to its owners alone.
        dry_run: Print the card and what would be sent, without network.
    """
    from ..policy.hub import publish
    from ..policy.policy import policy_folder

    print(publish(policy_folder(policy), repo, private, dry_run))


@verb(app)
def doctor() -> None:
    """What this machine has and what it lacks; exit code 2 if something needed is missing."""
    from .doctor import examine

    works = True
    for enough, finding in examine():
        print(finding)
        works &= enough
    if not works:
        raise UserError("something that memcorr needs is missing, see above")


@verb(matcher_app, "train")
def matcher_train(
    out: Path = Path("runs/matcher"),
    seed: Seed = 0,
    steps: Count = 4500,
    threads: Processes = 1,
    workers: Processes = CORES,
) -> None:
    """Train the embedded matcher on rendered practice scenes; the same command continues.

    Args:
        out: Folder for practice scenes, training state and weights.
        seed: Draws scenes, pairs and initial weights.
        steps: Optimiser steps.
        threads: Threads of the training itself.
        workers: Processes that render the practice scenes.
    """
    from ..correspondence.embedded.train import MatcherConfig, train
    from ..machine import threads as torch_threads

    with torch_threads(threads):
        train(MatcherConfig(seed=seed, steps=steps), out, workers)


@verb(matcher_app, "evaluate")
def matcher_evaluate(
    settings: tyro.conf.Positional[tuple[str, ...]] = (),
    matcher: MatcherName = "embedded",
    world: str = DOOR,
    lifting: LiftingName = "rigid",
    scene_seed: Seed = 0,
    out: Path = Path("data/matching"),
    photographs: bool = False,
    *,
    work: Work,
) -> None:
    """Measure a matcher's 3D error on live scenes, the paper's conditions and harder ones; or on real photographs.

    Args:
        settings: validation, boundary, extreme, camera, combined, camera-25, recoloured, relit; all if none given.
            Of photographs: mild, strong (homographies, light, noise), stereo (two eyes, with true depth).
        world: One of the ten worlds, or all of them.
        scene_seed: Draws the scenes; the fixed sets are seed 0.
        out: Folder of matching.json, a list of error tables; those that are there are kept, and made anew if asked for.
            Of photographs: photographs.json.
        photographs: Measure on the pictures inside scikit-image (`pip install 'memcorr[photographs]'`), in one process;
            world and lifting mean nothing then, and the seed draws the crops.
    """
    if photographs:
        from ..correspondence.photographs.evaluate import in_words, measure_photographs

        for table in measure_photographs(settings, matcher, scene_seed, out):
            print(f"{table['matcher']:10} {in_words(table)}")
        return

    from ..correspondence.evaluate import measure_all

    for table in measure_all(settings, world, matcher, lifting, scene_seed, out, work.find()):
        paper = PUBLISHED_ONLINE_MM.get(table["setting"]) if table["world"] == DOOR else None
        print(
            f"{table['world']:11} {table['setting']:12} mean over decisions {table['mean_over_decisions_mm']:6.2f} mm"
            f" (paper {f'{paper:.2f}' if paper else 'unmeasured'})  median {table['median_mm']:.2f}"
            f"  p95 {table['p95_mm']:.2f}  p99 {table['p99_mm']:.2f}"
            f"  valid {100 * table['valid_points'] / (SPEC.points * table['rows']):.1f} %"
            f"  fallback {table['fallback_decisions']}/{table['rows']}"
        )


app.command(
    matcher_app, name="matcher", help="Train the embedded matcher, or measure a matcher on live scenes or photographs."
)
