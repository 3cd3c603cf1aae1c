"""A Ray cluster of two nodes on this machine's loopback addresses, and what a local run gives."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from memcorr.demos.store import Store
from memcorr.evaluation.episodes import EPISODES
from tests.test_folders import processes, until

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
PATIENCE = 3600  # seconds: a machine that is busy with other things is no verdict


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Cluster:
    """Raylets are ended one by one: `ray stop` would end everybody's."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.mark = folder, f"MEMCORR_RAYLETS={folder}"
        self.address = f"127.0.0.2:{free_port()}"
        self.environment = {
            **os.environ,
            "MEMCORR_RAYLETS": str(folder),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": "0" * 63 + "7",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_worker_niceness": "0",  # 15 otherwise, which a busy machine never serves
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
        }

    def start(self, number: int) -> None:
        """Node 0 is the head. The raylet aborts if its agents are slow to start: then once more."""
        port = self.address.rpartition(":")[2]
        where = ["--address", self.address] if number else ["--head", "--port", port, "--temp-dir", str(self.folder)]
        where += [] if number else ["--include-dashboard=false"]
        here = f"127.0.0.{2 + number}"
        common = ["--num-cpus=1", "--object-store-memory=80000000", "--include-log-monitor=false"]
        command = [str(BIN / "ray"), "start", "--node-ip-address", here, *where, *common]
        for _ in range(4):
            before = set(processes(self.mark))
            result = subprocess.run(command, env=self.environment, capture_output=True, text=True)
            if result.returncode == 0:
                return
            self.kill(set(processes(self.mark)) - before)
        pytest.skip(f"this machine is too busy to start Ray: {result.stderr[-300:]}")

    def raylet(self, number: int) -> int:
        """The process of a node."""
        (found,) = [
            p
            for p, line in processes(self.mark).items()
            if "raylet/raylet" in line.split(" ")[0] and f"--node_ip_address=127.0.0.{2 + number} " in line
        ]
        return found

    def tasks(self, number: int) -> list[int]:
        """Processes of a node that are at work on a unit."""
        return [p for p, line in children(self.raylet(number)).items() if line.startswith("ray::call")]

    def kill(self, numbers: set[int]) -> None:
        for number in numbers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)

    def end(self) -> None:
        while alive := set(processes(self.mark)):
            self.kill({child for process in alive for child in children(process)} | alive)
            time.sleep(0.1)


def children(parent: int) -> dict[int, str]:
    """Command lines by number. Ray's workers write their titles over their environments, so a mark does not last."""
    found = {}
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int((place / "stat").read_text().rpartition(")")[2].split()[1]) == parent:
                found[int(place.name)] = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    return found


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    pytest.importorskip("ray")
    if not sys.platform.startswith("linux"):
        pytest.skip("only Linux answers on all of 127.0.0.0/8")
    made = Cluster(Path(f"/tmp/memcorr-ray-{os.getpid()}"))  # sockets in it must have short names
    made.folder.mkdir()
    try:
        made.start(0)
        yield made
    finally:
        made.end()
        subprocess.run(["rm", "-rf", str(made.folder)], check=True)


COMMANDS = {
    "evaluate": "evaluate POLICY --data STORE --condition boundary --scenes 0 1 2",
    "sweep": "sweep --experiments debug --seeds 1 2 --set updates=[30,0] --data STORE --device cpu"
    " --condition boundary --scenes 0 --matcher ground-truth",
}


@pytest.fixture(scope="session")
def command(store: Store, checkpoints: dict[str, str]) -> Callable[[str], list[str]]:
    names = {"POLICY": checkpoints["memcorr"], "STORE": str(store.root)}

    def words(verb: str) -> list[str]:
        return [sys.executable, "-m", "memcorr", *(names.get(word, word) for word in COMMANDS[verb].split())]

    return words


@pytest.fixture(scope="session")
def alone(command: Callable[[str], list[str]], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """What a local run leaves."""
    root = tmp_path_factory.mktemp("alone")

    def folder(verb: str) -> Path:
        if not (root / verb).exists():
            environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
            subprocess.run([*command(verb), "--out", str(root / verb)], env=environment, check=True, cwd=root)
        return root / verb

    return folder


def contents(root: Path) -> dict[str, Any]:
    """Rollouts but for their seconds, and every byte of weights and training states."""
    found: dict[str, Any] = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        if path.name == EPISODES:
            rows = [json.loads(line) for line in path.read_text().splitlines()]
            found[name] = [{k: v for k, v in row.items() if k != "seconds"} for row in rows]
        elif path.suffix == ".safetensors":
            found[name] = path.read_bytes()
    return found


def waited(condition: Callable[[], object]) -> None:
    assert until(condition, PATIENCE)
