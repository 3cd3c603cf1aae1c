"""What verbs write and read, of every kind: how one is made, and how it is read into something to compare."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from ..test_files import SIZE, Kind, frame, write_small


def real_kinds(here: Path) -> tuple[Kind, ...]:
    """What verbs write, beside the small files of the tests."""
    import torch

    from memcorr.correspondence import cache, evaluate
    from memcorr.correspondence.embedded import practice, train
    from memcorr.correspondence.embedded.matcher import WEIGHTS, load_network
    from memcorr.correspondence.embedded.network import MatchNetwork
    from memcorr.demos.store import Store, demonstration_path
    from memcorr.files import read_arrays, read_json, write_arrays, write_json
    from memcorr.policy.checkpoint import forms_of, read_checkpoint, read_tensors, write_model, write_tensors
    from memcorr.policy.policy import SHIPPED
    from memcorr.report.matching import CacheErrors
    from memcorr.training.experiments import Config

    cpu, rng = torch.device("cpu"), np.random.default_rng(0)
    (here / "demos").mkdir()
    for task in ("open", "close"):
        write_small(demonstration_path(here / "demos", 0, task), task=task)
    write_json(here / "demos/collection.json", {"layout": 1, "pairs": 1})
    store = Store.open(here / "demos")

    def arrays_of(read: Any) -> object:
        return {name: array.tobytes() for name, array in read.items()}

    def rewrite(path: Path) -> None:
        checkpoint = read_checkpoint(SHIPPED, cpu)
        config = Config.read(SHIPPED)
        write_model(path.parent, config.json(), checkpoint.network, checkpoint.normalisation, checkpoint.update)

    def policy(path: Path) -> object:
        c = read_checkpoint(path.parent, cpu)
        weights = {name: tensor.numpy().tobytes() for name, tensor in c.network.state_dict().items()}
        norms = [np.asarray(value).tobytes() for value in dataclasses.asdict(c.normalisation).values()]
        return weights, norms, c.design, c.seed, c.update

    def matcher(path: Path) -> object:
        return arrays_of({name: tensor.numpy() for name, tensor in load_network(path).state_dict().items()})

    def weights(path: Path) -> None:
        arrays = {name: tensor.half().numpy() for name, tensor in MatchNetwork().state_dict().items() if tensor.dim()}
        shipped = read_arrays(WEIGHTS, "").arrays
        write_arrays(path, {name: arrays.get(name, shipped[name]) for name in shipped})

    small = {
        "weights": torch.rand(1000),
        "ema": torch.rand(1000),
        "step": torch.tensor(3.0),
        "running": torch.rand(3, 2),
    }

    def state(path: Path) -> object:
        tensors, metadata, _ = read_tensors(path, forms_of(small))
        return arrays_of({name: tensor.numpy() for name, tensor in tensors.items()}), metadata["update"]

    def write_cache(path: Path) -> None:
        rows = 2  # one of each recording: they are shorter than two chunks
        write_json(
            path.parent / "cache.json", dataclasses.asdict(cache.CacheSettings(cache.fingerprint(store, 1), 1, rows))
        )
        shapes = {name: (rows, *map(int, form.shape[1:])) for name, form in cache.FORMS.items()}
        arrays = {n: rng.integers(0, 2, shapes[n]).astype(form.dtype) for n, form in cache.FORMS.items()}
        arrays["anchor"][:] = 0
        write_arrays(path.parent / "cache.safetensors", arrays)

    def cached(path: Path) -> object:
        found = cache.read_cache(path.parent, store)
        return arrays_of({"p": found.matches.p_live, "r": found.residual, "a": found.anchor}), found.lifting

    def write_practice(path: Path) -> None:
        shapes = {n: (1, *map(int, form.shape[1:])) for n, form in practice.FORMS.items()}
        write_arrays(path, {n: rng.integers(0, 2, shapes[n]).astype(f.dtype) for n, f in practice.FORMS.items()})

    def groups(path: Path) -> object:
        return [[(f.rgb.tobytes(), f.depth.tobytes()) for f in group.frames] for group in practice.load_groups(path)]

    errors: dict[str, Any] = {"rows": 8, "valid_points": 99, "matcher": "flow", "lifting": "rigid", "auc": 0.75}
    errors |= {"median_mm": 1.5, "mean_mm": 2.5, "p95_mm": 5.5, "p99_mm": 9.5}
    live = errors | {"world": "door", "setting": "camera", "scene_seed": 0}
    config = dataclasses.asdict(train.MatcherConfig())
    return (
        Kind("model.safetensors", rewrite, policy),
        Kind.of_text("config.json", rewrite, policy),
        Kind("state.safetensors", lambda path: write_tensors(path, small, {"update": 3}), state),
        Kind.of_text("cache.json", write_cache, cached),
        Kind("embedded.safetensors", weights, matcher),
        Kind("practice.safetensors", write_practice, groups),
        Kind.of_text(
            "matcher.json", lambda p: write_json(p, config), lambda p: read_json(p, train.MatcherConfig, "a matcher's")
        ),
        Kind.of_text(
            "errors.json", lambda p: write_json(p, errors), lambda p: read_json(p, CacheErrors, "a table", "drop it")
        ),
        Kind.of_text("matching.json", lambda p: write_json(p, {"tables": [live]}), evaluate._present),
        *measured_kinds(here),
        *exported_kinds(here),
    )


def measured_kinds(here: Path) -> tuple[Kind, ...]:
    """Matches of recordings without poses, and what a matcher's training continues from."""
    import torch

    from memcorr.correspondence.embedded import train
    from memcorr.demos.store import Store, demonstration_path
    from memcorr.files import write_arrays, write_json
    from memcorr.following import measured as rows

    length, root, rng = 20, here / "recorded", np.random.default_rng(0)
    root.mkdir()
    for task in ("open", "close"):
        write_small(demonstration_path(root, 0, task), task=task, frames=length, world="mine", object_pose=None)
    write_json(root / "collection.json", {"layout": 1, "pairs": 1, "world": "mine", "tasks": ["open", "close"]})
    store = Store.open(root)
    chosen = rows.chosen(store, 1, "elapsed")
    settings = rows.MatchingSettings(rows.fingerprint(chosen), (length, length), 1, "elapsed", "flow", "", "rigid")
    sizes = {"R": settings.rows, "E": 3, "T": 2 * length, "D": 2}

    def write(path: Path) -> None:
        write_json(path.parent / rows.MEASURED, dataclasses.asdict(settings))
        shapes = {
            name: [sizes[n] if isinstance(n, str) else n for n in form.shape] for name, form in rows.FORMS.items()
        }
        arrays = {name: rng.integers(0, 2, shapes[name]).astype(form.dtype) for name, form in rows.FORMS.items()}
        write_arrays(path.parent / rows.ROWS, arrays)

    def read(path: Path) -> object:
        found = rows.read_measured(path.parent, store)
        arrays = (found.reference_frame, found.matches.p_live, found.disagreement, found.points, *found.motion)
        return found.settings, [array.tobytes() for array in arrays]

    def fresh() -> tuple[Any, torch.optim.Optimizer]:
        torch.manual_seed(0)
        network = torch.nn.Linear(40, 20)
        return network, torch.optim.AdamW(network.parameters())

    def save(path: Path) -> None:
        network, optimizer = fresh()
        network(torch.ones(40)).sum().backward()
        optimizer.step()
        train.save_state(path, network, optimizer, 1)

    def resume(path: Path) -> object:
        network, optimizer = fresh()
        step = train.resume(path, network, optimizer)
        moments = [optimizer.state[p][k].numpy().tobytes() for p in network.parameters() for k in ("exp_avg", "step")]
        return step, moments, [p.detach().numpy().tobytes() for p in network.parameters()]

    return (
        Kind.of_text(rows.MEASURED, write, read),
        Kind(rows.ROWS, write, read),
        Kind("matcher-state.safetensors", save, resume),
    )


def exported_kinds(here: Path) -> tuple[Kind, ...]:
    """A LeRobotDataset that was exported, and is imported again; a recording of ROS 2, which has sums of its own."""
    from memcorr.recordings.lerobot import OWN

    table = "chunk-000/file-000.parquet"
    names = (OWN, "meta/info.json", "meta/tasks.parquet", f"meta/episodes/{table}", f"data/{table}")
    store = source_of_exports(here)
    datasets = [
        Kind(f"dataset/{name}", lambda path: write_dataset(store, path), read_dataset, sealed=name != OWN)
        for name in names
    ]
    return (*datasets, Kind("bags/pair-000-open.mcap", write_bags, read_bags))


def strange_kinds(here: Path) -> tuple[Kind, ...]:
    """The same without our sums: what is wrong may be impossible to see, but nothing raises more than one line."""
    from memcorr.recordings.lerobot import OWN

    def write(path: Path) -> None:
        write_dataset(store, path)
        (above(path, "dataset") / OWN).unlink()

    table, store = "chunk-000/file-000.parquet", source_of_exports(here)
    names = ("meta/info.json", "meta/tasks.parquet", f"meta/episodes/{table}", f"data/{table}")
    datasets = [Kind(f"dataset/{name}", write, read_dataset) for name in names]
    sidecars = [Kind(f"bags/{name}.json", write_bags, read_bags) for name in ("mapping", "calibration")]
    return (*datasets, *sidecars)


def above(path: Path, name: str) -> Path:
    return next(parent for parent in path.parents if parent.name == name)


def imported(out: Path) -> object:
    return {path.name: path.read_bytes() for path in sorted(out.iterdir()) if path.suffix in (".h5", ".json")}


def source_of_exports(here: Path) -> Path:
    from memcorr.demos.store import demonstration_path
    from memcorr.files import write_json

    root = here / "exports"
    if not root.exists():
        root.mkdir()
        for task in ("open", "close"):
            write_small(demonstration_path(root, 0, task), task=task)
        write_json(root / "collection.json", {"layout": 1, "pairs": 1})
    return root


def write_dataset(store: Path, path: Path) -> None:
    from memcorr.demos.store import Store
    from memcorr.recordings.export import export_lerobot

    export_lerobot(Store.open(store), above(path, "dataset"))


def read_dataset(path: Path) -> object:
    from memcorr.recordings.sidecars import import_recordings

    root = above(path, "dataset")
    shutil.rmtree(root.parent / "imported", ignore_errors=True)
    import_recordings("lerobot", root, root.parent / "imported")
    return imported(root.parent / "imported")


def write_bags(path: Path) -> None:
    """One short recording, with a mapping and a calibration that the page on own data shows."""
    from ..recordings.conftest import blocks, write_bag

    calibration, _, mapping = (json.loads(block) for block in blocks("json"))
    root = above(path, "bags")
    frames = [frame(k) for k in range(6)]
    with (root / "pair-000-open.mcap").open("wb") as f:
        write_bag(f, frames, np.zeros((6, 4)), ())
    said = {key: value for key, value in mapping.items() if key != "T_world_cam"}
    (root / "mapping.json").write_text(json.dumps(said))
    (root / "calibration.json").write_text(json.dumps({**calibration, "image_size": [SIZE, SIZE]}))


def read_bags(path: Path) -> object:
    from memcorr.recordings.sidecars import import_recordings

    root = above(path, "bags")
    shutil.rmtree(root.parent / "imported", ignore_errors=True)
    import_recordings("mcap", root, root.parent / "imported")
    return imported(root.parent / "imported")
