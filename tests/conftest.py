from __future__ import annotations

from pathlib import Path

import pytest

from memcorr.collect import collect
from memcorr.demos import Store
from memcorr.sim import DoorWorld


@pytest.fixture(scope="session")
def world() -> DoorWorld:
    """One world for all tests: one GL context per process."""
    return DoorWorld()


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Two real pairs, recorded by two workers."""
    root: Path = tmp_path_factory.mktemp("demos") / "store"
    collect(root, pairs=2, workers=2)
    return Store.open(root)
