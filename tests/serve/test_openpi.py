"""The client that robots already have: the real openpi-client, in its own environment, against the real server."""

from __future__ import annotations

import multiprocessing
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from memcorr.demos.store import Store
from memcorr.serve.protocol import decode, encode
from memcorr.spec import SPEC
from memcorr.worlds.gym_env import observation_of
from memcorr.worlds.scenes import evaluation_scenes
from memcorr.worlds.world import World

from .conftest import KEY, ROOT, Server, serving

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def server(store: Store, key_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """As for one robot: every option but the key at its default."""
    options = ("--references", str(store.root), "--port", "0", "--key-file", str(key_file))
    with serving(tmp_path_factory.mktemp("server") / "log", *options) as running:
        yield running


def run(python: Path, program: str, world: World | None = None) -> tuple[int, str, str]:
    """Runs a program in openpi's environment while the world plays its robot; code, output, errors."""
    ours, theirs = multiprocessing.Pipe()
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(HERE), "ROBOT": str(theirs.fileno())}
    process = subprocess.Popen(
        [str(python), "-c", program],
        env=environment,
        pass_fds=[theirs.fileno()],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    theirs.close()
    if world is not None:
        play(world, ours)
    out, errors = process.communicate(timeout=300)
    ours.close()
    return process.returncode, out, errors


def play(world: World, pipe: multiprocessing.connection.Connection) -> None:
    """The robot's side of `robot.py`, until the program ends: the door moved, the camera turned."""
    task = ""
    while True:
        try:
            asked = decode(pipe.recv_bytes())
        except EOFError:
            return
        answer: dict = {}
        if asked["do"] == "begin":
            task = asked["task"]
            world.reset(evaluation_scenes("combined", seed=7)[0])
        elif asked["do"] == "observe":
            answer = {name: np.asarray(array) for name, array in observation_of(world.observe()).items()}
        elif asked["do"] == "execute":
            world.step(asked["action"])
        else:
            answer = {"done": world.success(task)}
        pipe.send_bytes(encode(answer))


def program(server: Server, key: str | None) -> str:
    """All client code of the document, one after the other, at our server."""
    text = "".join(re.findall(r"```python\n(.*?)```", (ROOT / "docs/serve.md").read_text(), re.S))
    address = 'WebsocketClientPolicy("127.0.0.1", 8000)'
    assert text.count(address) == 1
    return text.replace(address, f'WebsocketClientPolicy("127.0.0.1", {server.port}, api_key={key!r})')


@pytest.mark.long
def test_openpis_client_closes_the_door_swaps_the_reference_and_brings_its_own(
    openpi: Path, server: Server, world: World, store: Store, tmp_path: Path
) -> None:
    shown = [observation_of(frame) for frame in store.demonstration(1, "open").frames(range(SPEC.episode_steps))]
    recording: dict = {name: np.stack([frame[name] for frame in shown]) for name in shown[0]}
    np.savez(tmp_path / "mine.npz", **recording)
    code, out, errors = run(openpi, program(server, KEY).replace("mine.npz", str(tmp_path / "mine.npz")), world)
    assert code == 0, errors
    names, closed, begun, swapped, mine = out.splitlines()
    assert "pair-001-close" in names
    assert closed.startswith("pair-000-close done")
    # Whether the policy makes good what it began wrongly is not the client's matter: the shipped one, whose phase is a
    # clock, does not here.
    assert begun == "pair-000-open not done after 8 steps" and swapped.startswith("pair-000-close ")
    assert mine.startswith("mine done")


@pytest.mark.parametrize("key", ["a-wrong-key-of-good-length", None])
def test_openpis_client_is_told_that_its_key_is_wrong(key: str | None, openpi: Path, server: Server) -> None:
    code, out, errors = run(openpi, program(server, key).replace("from robot import Robot", ""))
    assert (code, out) == (1, "") and "HTTP 401" in errors.splitlines()[-1]


def test_openpis_client_raises_what_was_wrong_and_goes_on(openpi: Path, server: Server) -> None:
    tried = f"""
from openpi_client.websocket_client_policy import WebsocketClientPolicy
client = WebsocketClientPolicy("127.0.0.1", {server.port}, api_key={KEY!r})
try:
    client.infer({{"prompt": "close the door"}})
except RuntimeError as problem:
    print(str(problem).splitlines()[-1])
print(client.infer({{"reference": "pair-000-close"}}))
"""
    code, out, errors = run(openpi, tried)
    assert code == 0, errors
    refused, answer = out.splitlines()
    assert refused.startswith("unknown field 'prompt': choose from rgb, depth")
    assert answer == "{'reference': 'pair-000-close', 'elapsed': 0}"
