"""What checking costs: our readers against the plain ones, which believe what they read."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from ..correspondence.cache import FORMS, CacheSettings, fingerprint, read_cache
from ..demos.store import LAYOUT, NUMBERS, Store, demonstration_path, write_demonstration
from ..evaluation.episodes import EPISODES, Episode, read_episodes, write_episodes
from ..evaluation.intervention import Intervention
from ..files import write_arrays, write_json
from ..frames import Camera, Frame
from ..policy.checkpoint import CONFIG, MODEL, Design, read_checkpoint, write_model
from ..policy.condition import Normalisation
from ..policy.policy import SHIPPED
from ..spec import SPEC, TASKS
from ..training.experiments import Config
from .run import Case

ROWS = 10_000


def _folder() -> tuple[tempfile.TemporaryDirectory[str], Path]:
    """Removed when the first is forgotten: who measures in it holds it."""
    held = tempfile.TemporaryDirectory(prefix="memcorr-bench-")
    return held, Path(held.name)


def load_policy() -> Case:
    """The shipped policy, sealed."""
    import torch
    from safetensors.torch import load

    held, folder = _folder()
    cpu = torch.device("cpu")
    shipped = read_checkpoint(SHIPPED, cpu)
    write_model(folder, Config.read(SHIPPED).json(), shipped.network, shipped.normalisation, shipped.update)

    def plain(held: object = held) -> None:
        config = json.loads((folder / CONFIG).read_text())
        network = Design(**{f.name: config["experiment"][f.name] for f in dataclasses.fields(Design)}).build()
        content = (folder / MODEL).read_bytes()
        tensors = load(content)
        network.load_state_dict({k.removeprefix("network."): v for k, v in tensors.items() if "network." in k})
        names = [f.name for f in dataclasses.fields(Normalisation)]
        Normalisation(**{name: tensors[f"normalisation.{name}"].numpy() for name in names})
        hashlib.sha256(content).hexdigest()  # rows name their checkpoint by it

    return Case(lambda: read_checkpoint(folder, cpu), plain, "json and safetensors.torch.load, unchecked", rounds=20)


def load_cache() -> Case:
    """A cache of the usual length and the demonstrations that it names, small ones."""
    import h5py
    from safetensors.numpy import load_file

    held, folder = _folder()
    rng, root, path = np.random.default_rng(0), folder / "demos", folder / "cache.safetensors"
    pairs = -(-ROWS // (len(TASKS) * SPEC.windows_per_episode))
    root.mkdir()
    for pair in range(pairs):
        for task in TASKS:
            frames = [_noise(rng, 28) for _ in range(SPEC.episode_steps)]
            number, pose = rng.uniform(-1, 1, (len(frames), 4)), np.tile(np.eye(4), (len(frames), 1, 1))
            where = demonstration_path(root, pair, task)
            write_demonstration(where, frames, number, number[:, 0], pose, pair=pair, task=task, u=(0.5, 0.5))
    write_json(root / "collection.json", {"layout": LAYOUT, "pairs": pairs})
    store = Store.open(root)
    write_json(folder / "cache.json", asdict(CacheSettings(fingerprint(store, pairs), pairs, ROWS)))
    shapes = {name: (ROWS, *map(int, form.shape[1:])) for name, form in FORMS.items()}
    write_arrays(path, {name: rng.integers(0, 2, shapes[name]).astype(form.dtype) for name, form in FORMS.items()})

    def ours(held: object = held) -> None:
        read_cache(folder, store)

    def plain() -> None:
        json.loads((folder / "cache.json").read_text())
        digest = hashlib.sha256()
        for pair in range(pairs):
            for task in TASKS:
                where = demonstration_path(root, pair, task)
                with h5py.File(where, "r") as f:
                    {name: f[name][:] for name in NUMBERS if name in f}  # time is optional
                    [f.attrs[name] for name in ("layout", "pair", "task", "u")]
                digest.update(hashlib.sha256(where.read_bytes()).digest())
        load_file(path)

    return Case(ours, plain, "h5py, sha256 and safetensors.numpy.load_file, unchecked", rounds=10)


def _noise(rng: np.random.Generator, size: int) -> Frame:
    rgb = rng.integers(0, 256, (size, size, 3), dtype=np.uint8)
    camera = Camera.from_fovy(45.0, size, np.eye(4))
    return Frame(rgb, rng.random((size, size), np.float32), rgb[..., 0] > 99, camera, rng.random(9), rng.random(3))


def load_episodes() -> Case:
    """Rows of rollouts."""
    held, folder = _folder()
    path = folder / EPISODES
    row = Episode(
        experiment="memcorr",
        train_seed=SPEC.seeds[0],
        condition="combined",
        scene=0,
        scene_seed=0,
        u=(0.25, 0.75),
        camera_azimuth_deg=15.0,
        task="open",
        shown=Intervention(),
        mean_match_error_mm=5.25,
    )
    write_episodes(path, [dataclasses.replace(row, scene=k, final_joint=k / 7) for k in range(ROWS)])
    shown = [f.name for f in dataclasses.fields(Intervention)]

    def believed(content: dict[str, Any]) -> Episode:
        about = Intervention(**{name: content.pop(name) for name in shown})
        return Episode(**{**content, "u": tuple(content["u"])}, shown=about)

    def plain(held: object = held) -> None:
        [believed(json.loads(line)) for line in path.read_text().splitlines()]

    return Case(lambda: read_episodes(path), plain, "json.loads, unchecked", rounds=10)
