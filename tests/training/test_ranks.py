"""Several processes, one batch: what torchrun trains is what one process trains, up to the rounding of a sum."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from memcorr.correspondence.cache import Cache, build_cache
from memcorr.demos.store import Store
from memcorr.errors import UserError
from memcorr.files import read_arrays
from memcorr.training.batches import Batch, Batches
from memcorr.training.dataset import Simulated, measure
from memcorr.training.experiments import EXPERIMENTS, Experiment
from memcorr.training.loop import STATE, loss_of, train
from memcorr.training.mixture import Mixture, Resampled
from memcorr.training.optimiser import Weights
from memcorr.training.ranks import Ranks

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
DEBUG = EXPERIMENTS["debug"]


def drawn(dataset: Simulated, cache: Cache, name: str) -> Iterator[tuple[Experiment, Batch]]:
    """A standard and a paired batch of a recipe."""
    e = replace(EXPERIMENTS[name], batch=16, worlds=("door",), disturbed=False, off_track=0.0)
    resampled = Resampled.of(dataset, cache, e.resampled_errors) if e.resampled_errors else None
    mixture = None if e.visual or resampled else Mixture.join(dataset, cache)
    batches = Batches(dataset, measure([dataset], e), e, mixture, resampled)
    yield e, batches.standard(np.random.default_rng(0), e.batch)
    yield e, batches.paired(np.random.default_rng(1), e.batch // 2)


@pytest.mark.parametrize("name", ["memcorr", "visual-unet", "memcorr-many"])
@pytest.mark.parametrize("size", [2, 3])
def test_the_parts_of_a_batch_make_the_gradient_of_the_whole(
    name: str, size: int, dataset: Simulated, cache: Cache
) -> None:
    """Also in unequal parts, also where several noises share a row."""
    for e, batch in drawn(dataset, cache, name):
        weights = Weights(e.build(), e.build(), e, CPU)

        def gradient(ranks: Ranks, weights: Weights = weights, batch: Batch = batch) -> Tensor:
            part, share = ranks.part(batch)
            weights.gradient.zero_()
            (loss_of(weights.network, part) * share).backward()
            return weights.gradient.clone()

        whole = gradient(Ranks(CPU))
        parts = [gradient(Ranks(CPU, rank, size)) for rank in range(size)]
        assert all(float(part.norm()) > 0 for part in parts)
        torch.testing.assert_close(sum(parts), whole, rtol=1e-4, atol=1e-6)


def test_more_processes_than_rows_are_refused(dataset: Simulated, cache: Cache) -> None:
    _, batch = next(drawn(dataset, cache, "memcorr"))
    with pytest.raises(UserError, match="17 processes for batches of 16 rows: give torchrun fewer"):
        Ranks(CPU, 0, 17).part(batch)


def torchrun(*arguments: str, processes: int = 2) -> None:
    """As a person runs it, on this machine's own interface alone."""
    here = ["--nnodes", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"]
    command = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes), *here, "-m", "memcorr", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    result = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, timeout=3600)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("finished after") == 1, result.stdout  # one of them speaks


@pytest.mark.long
def test_two_processes_train_what_one_trains_and_resume_to_the_same_bits(store: Store, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    build_cache(store, cache, "flow", pairs=2, rows=16, workers=1)
    common = ["train", "debug", "--data", str(store.root), "--device", "cpu", "--out"]
    train("debug", store.root, 42, tmp_path / "one", cache, "cpu")
    torchrun(*common, str(tmp_path / "two"), "--cache", str(cache))
    torchrun(*common, str(tmp_path / "resumed"))  # stops after stage one
    torchrun(*common, str(tmp_path / "resumed"), "--cache", str(cache))
    one, two, resumed = (read_arrays(tmp_path / name / STATE, "") for name in ("one", "two", "resumed"))
    assert two.metadata["processes"] == "2" and two.metadata["update"] == str(DEBUG.total_updates)
    for name, array in two.arrays.items():
        np.testing.assert_array_equal(resumed.arrays[name], array, name)
    torch.manual_seed(42)
    begin = Weights(DEBUG.build(), DEBUG.build(), DEBUG, CPU).flat.numpy()
    step, apart = (np.linalg.norm(one.arrays["weights"] - other) for other in (begin, two.arrays["weights"]))
    print(f"apart {apart:.3g} after a way of {step:.3g}")
    assert 0 < apart < 1e-3 * step
    rows = [(tmp_path / name / "metrics.jsonl").read_text().count("\n") for name in ("one", "two", "resumed")]
    assert rows[0] == rows[1] == rows[2]
