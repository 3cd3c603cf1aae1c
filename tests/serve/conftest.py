"""Real servers in processes of their own, a plain client, and openpi's client in its own environment."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from websockets.sync.client import connect

import memcorr
from memcorr.correspondence.matcher import load_matcher
from memcorr.demos.store import Store
from memcorr.folders import claimed
from memcorr.frames import Frame
from memcorr.serve.protocol import encode

ROOT = Path(__file__).parents[2]
KEY = "a-key-that-only-the-tests-know"
SLOTS = 4
OPENPI = ("openpi-client==0.1.2", "typing_extensions")  # it imports the second without declaring it


def unpack(data: bytes) -> Any:
    """As openpi's client does."""

    def array(found: dict) -> Any:
        if b"__ndarray__" not in found:
            return found
        return np.frombuffer(found[b"data"], found[b"dtype"]).reshape(found[b"shape"])

    return msgpack.unpackb(data, object_hook=array)


@dataclass(frozen=True)
class Server:
    process: subprocess.Popen
    port: int
    log: Path
    key: str | None

    @property
    def rss_mb(self) -> float:
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20

    def client(self) -> Client:
        return Client(self)


class Client:
    """What openpi's does, and text frames as they are."""

    def __init__(self, server: Server) -> None:
        headers = {"Authorization": f"Api-Key {server.key}"} if server.key else None
        self._open, address = ExitStack(), f"ws://127.0.0.1:{server.port}"
        self.socket = self._open.enter_context(connect(address, compression=None, additional_headers=headers))
        self.metadata = unpack(self.socket.recv(60))  # type: ignore[arg-type]

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *problem: object) -> None:
        self._open.close()

    def said(self, data: bytes | str) -> Any:
        self.socket.send(data)
        answer = self.socket.recv(60)
        return answer if isinstance(answer, str) else unpack(answer)

    def infer(self, **content: Any) -> Any:
        return self.said(encode(content))


@contextmanager
def serving(log: Path, *arguments: str, program: tuple[str, ...] = ("-m", "memcorr", "serve")) -> Iterator[Server]:
    """`memcorr serve` as a person starts it, on any free port."""
    key = KEY if "--key-file" in arguments else None
    with log.open("w") as out:
        command = [sys.executable, *program, *arguments]
        process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT)
    try:
        while (found := re.search(r"serving at ws://\S+:(\d+)", log.read_text())) is None:
            assert process.poll() is None, log.read_text()
            time.sleep(0.1)
        yield Server(process, int(found[1]), log, key)
    finally:
        process.terminate()
        process.wait(30)


@pytest.fixture(scope="session")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("key") / "key"
    path.write_text(KEY + "\n")
    return path


@pytest.fixture(scope="session")
def server(store: Store, key_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The shipped policy, four slots, with a key."""
    log = tmp_path_factory.mktemp("server") / "log"
    options = ("--references", str(store.root), "--port", "0", "--slots", str(SLOTS), "--key-file", str(key_file))
    with serving(log, *options) as running:
        yield running


Expected = Callable[..., np.ndarray]


@pytest.fixture(scope="session")
def expected(store: Store) -> Expected:
    """The chunk that the library plans itself, with as many slots: (reference, frame, elapsed steps at each look)."""
    policy, matcher = memcorr.load_policy(device="cpu"), load_matcher("embedded")
    followers: dict[str, Any] = {}

    def plan(name: str, frame: Frame, *looks: int) -> np.ndarray:
        if name not in followers:
            _, pair, task = name.split("-")
            followers[name] = policy.follow(store.demonstration(int(pair), task), matcher, SLOTS)
        followers[name].progress = followers[name].began = None
        return [followers[name].plan(frame, elapsed).actions for elapsed in looks][-1]

    return plan


@pytest.fixture(scope="session")
def openpi() -> Path:
    """Python with openpi's client, which needs another numpy than ours; made once, kept in the temporary folder."""
    folder = Path(tempfile.gettempdir()) / f"memcorr-openpi-{os.getuid()}"
    python = folder / "bin" / "python"
    while not (folder / "ready").exists():
        try:
            with claimed(folder):
                venv.create(folder, with_pip=True)
                install = [str(python), "-m", "pip", "install", "--quiet", *OPENPI]
                result = subprocess.run(install, capture_output=True, text=True)
                if result.returncode:
                    pytest.skip(f"openpi's client cannot be installed from PyPI: {result.stderr.strip()[-300:]}")
                (folder / "ready").touch()
        except memcorr.UserError:  # another run is at it
            time.sleep(1)
    return python
