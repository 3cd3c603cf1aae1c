from __future__ import annotations

import contextlib
import signal

import numpy as np
import pytest
import torch

from memcorr.correspondence.cache import Cache
from memcorr.correspondence.matches import Matches, residuals
from memcorr.correspondence.rigid import carried
from memcorr.demos.collect import collect
from memcorr.demos.store import Store
from memcorr.policy.checkpoint import write_model
from memcorr.training.dataset import Dataset, load_dataset, measure
from memcorr.training.experiments import EXPERIMENTS, Config, Experiment
from memcorr.worlds.world import World
from tests.costs import (  # noqa: F401
    kept,
    pytest_fixture_setup,
    pytest_runtest_call,
    pytest_runtest_makereport,
    pytest_runtest_setup,
)

# Started in the background, a shell lets Ctrl-C be ignored, here and in every process started from here.
with contextlib.suppress(ValueError):  # not the main thread
    signal.signal(signal.SIGINT, signal.default_int_handler)
torch.set_num_threads(1)  # small networks: a second thread on a busy machine only waits


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Untrained networks are the same in every run, whichever tests came before."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def world() -> World:
    """One world for all tests: one GL context per process."""
    return World()


@pytest.fixture(scope="session")
def store() -> Store:
    """Two real pairs, recorded by two workers. Not to be written to: it is kept."""
    return Store.open(kept("store", "memcorr.demos", lambda root: collect(root, pairs=2, workers=2)))


@pytest.fixture(scope="session")
def dataset(store: Store) -> Dataset:
    """Both pairs as training rows, with images."""
    return load_dataset(store, range(2), Experiment(), images=True)


@pytest.fixture(scope="session")
def cache(dataset: Dataset) -> Cache:
    """What a matcher with 10 mm of error might have measured: all frames 0 and random other rows."""
    rng, rows = np.random.default_rng(0), 200
    first = np.concatenate(dataset.first_rows(np.arange(dataset.pairs)))
    others = rng.choice(np.setdiff1d(np.arange(len(dataset)), first), rows - len(first), replace=False)
    chosen = np.sort(np.concatenate([first, others]))
    d, anchor = dataset.windows.demonstration[chosen], dataset.windows.anchor[chosen]
    j = dataset.reference_frame[chosen]
    p_ref = dataset.own_matches(chosen).p_ref + rng.normal(scale=0.02, size=(rows, 16, 3))
    T_ref, T_live = dataset.object_pose[dataset.reference[d], j], dataset.object_pose[d, anchor]
    p_true = carried(T_live @ np.linalg.inv(T_ref), p_ref)
    p_live = p_true + rng.normal(scale=0.01, size=p_true.shape)
    matches = Matches(p_ref, p_live, rng.random((rows, 16)), rng.random((rows, 16)) < 0.9)
    return Cache(d, anchor, j, matches, residuals(matches, T_ref, T_live), p_true)


@pytest.fixture(scope="session")
def checkpoints(dataset: Dataset, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Untrained policies with the statistics of real demonstrations."""
    root = tmp_path_factory.mktemp("checkpoints")
    normalisation = measure([dataset])
    for name in ("memcorr", "motion-literal", "visual-transformer", "visual-unet"):
        torch.manual_seed(0)
        experiment = EXPERIMENTS[name]
        update = experiment.total_updates
        write_model(root / name, Config(experiment, 42, "none").json(), experiment.build(), normalisation, update)
    return {path.name: str(path) for path in root.iterdir()}
