"""Who may steer the lab, and what happens when somebody sends it nonsense.

MEMCORR_FUZZ=2000 python -m pytest -s -n 0 tests/lab/test_visitors.py     # instead of 60 messages
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

pytest.importorskip("viser", reason="memcorr[lab] is not installed")

import msgspec
import viser
import zstandard
from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from memcorr.demos.store import Store
from memcorr.errors import UserError
from memcorr.evaluation.controllers import ZerosController
from memcorr.lab.episode import REMEMBERED, Episode, Guide
from memcorr.lab.panel import MOST_ORDERS, Order, Panel
from memcorr.lab.record import MOST, record
from memcorr.lab.visitors import guarded, welcome
from memcorr.worlds.pairs import find_pair
from memcorr.worlds.scenes import evaluation_scenes
from memcorr.worlds.world import World

ROOT = Path(__file__).parents[2]
GROWTH = 512  # megabytes; where software draws, a lab has 1 GB before the first message
MESSAGES = int(os.environ.get("MEMCORR_FUZZ", "60"))
SPOKEN = f"viser-v{viser.__version__}"


@pytest.mark.parametrize(
    ("host", "origin", "right"),
    [
        ("127.0.0.1:8080", "http://127.0.0.1:8080", True),
        ("127.0.0.1:8080", None, True),
        ("localhost:9", "http://localhost:9", True),
        ("[::1]:8080", "http://[::1]:8080", True),
        ("192.168.1.7:8080", "http://192.168.1.7:8080", True),
        ("robot.example:8080", "http://robot.example:8080", True),  # given as --host
        ("127.0.0.1:8080", "http://a-page.example", False),
        ("127.0.0.1:8080", "http://127.0.0.1:8081", False),
        ("127.0.0.1:8080", "null", False),
        ("127.0.0.1:8080", "http://[", False),
        ("a-page.example:8080", "http://a-page.example:8080", False),  # its name was pointed here meanwhile
        ("127.0.0.1.a-page.example:8080", "http://127.0.0.1.a-page.example:8080", False),
        ("[", None, False),
        ("", None, False),
        (None, None, False),
    ],
)
def test_a_page_from_elsewhere_is_not_welcome(host: str | None, origin: str | None, right: bool) -> None:
    given = {name: value for name, value in (("Host", host), ("Origin", origin)) if value is not None}
    assert welcome(Headers(given), "robot.example") is right


@pytest.fixture
def server() -> Iterator[viser.ViserServer]:
    with contextlib.redirect_stdout(io.StringIO()), guarded("127.0.0.1"):
        begun = viser.ViserServer("127.0.0.1", 0, verbose=False)
    yield begun
    with contextlib.redirect_stdout(io.StringIO()):
        begun.stop()


def test_the_server_turns_a_strange_page_away(server: viser.ViserServer) -> None:
    address = f"ws://127.0.0.1:{server.get_port()}"
    for origin in ("http://a-page.example", "null", f"http://127.0.0.1:{server.get_port() + 1}"):
        with pytest.raises(InvalidStatus) as refusal, connect(address, subprotocols=[SPOKEN], origin=origin):  # type: ignore[list-item, arg-type]
            pass
        assert refusal.value.response.status_code == 403
    own = f"http://127.0.0.1:{server.get_port()}"
    with connect(address, subprotocols=[SPOKEN], origin=own) as page:  # type: ignore[list-item, arg-type]
        assert page.recv(10)


def test_what_a_page_sends_is_a_number_in_range_or_one_of_the_choices(server: viser.ViserServer) -> None:
    inbox: SimpleQueue[Order] = SimpleQueue()
    panel = Panel(server, inbox, find_pair("door"), ("a", "b"), 0.5)
    panel.check(Order("speed", 20.0))
    slider = panel._sliders["speed"][0]
    for wrong in (float("nan"), float("inf"), 0.0, -5.0, "fast", None, [1.0]):
        slider._impl.value = wrong
        with pytest.raises(UserError, match="speed: a number from 1 to 80"):
            panel.check(Order("speed", wrong))
    for what in ("run", "object", "base", "hand", "page", "world"):
        for nonsense in ("nonsense", None, 3, ["+x"]):
            with pytest.raises(UserError, match=f"{what}: choose"):
                panel.check(Order(what, nonsense))


def test_orders_that_nobody_takes_are_not_kept_forever(server: viser.ViserServer) -> None:
    inbox: SimpleQueue[Order] = SimpleQueue()
    panel = Panel(server, inbox, find_pair("door"), ("a", "b"), 0.5)
    send = panel._tell("run", "step")
    for _ in range(2 * MOST_ORDERS):
        with contextlib.suppress(StopIteration):
            send(None).send(None)
    assert inbox.qsize() == MOST_ORDERS


def test_recordings_are_limited_in_length_and_number(store: Store, world: World, tmp_path: Path) -> None:
    guide = Guide(store.demonstration(0, "open"), {"a": ZerosController(), "b": ZerosController()})
    episode = Episode(world, evaluation_scenes("combined")[0], guide)
    for _ in range(3):
        episode.past.append(episode.now)
    assert episode.past.maxlen == REMEMBERED
    for n in range(1, MOST + 1):
        (tmp_path / f"door-{n:03d}.mp4").touch()
    with pytest.raises(UserError, match="100 recordings of door already"):
        record(episode, tmp_path, lambda share: None)
    assert len(list(tmp_path.iterdir())) == MOST


class Page:
    """What a browser says and hears."""

    def __init__(self, address: str) -> None:
        self._open = ExitStack()
        self.socket = self._open.enter_context(connect(address, subprotocols=[SPOKEN], max_size=None))  # type: ignore[list-item]
        camera: dict[str, Any] = {"wxyz": [1.0, 0.0, 0.0, 0.0], "fov": 1.0, "near": 0.1, "far": 10.0}
        camera |= {name: [0.0, 0.0, 1.0] for name in ("position", "look_at", "up_direction")}
        self.say(type="ViewerCameraMessage", image_height=480, image_width=640, **camera)  # before, it is nobody
        self.controls: dict[str, dict[str, Any]] = {}
        self.reading = ""

    def close(self) -> None:
        self._open.close()

    def hear(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            try:
                data = self.socket.recv(left)
            except TimeoutError:
                return
            assert isinstance(data, bytes)
            packed = data[16 : 16 + int.from_bytes(data[8:16], "little")]
            for message in msgspec.msgpack.decode(zstandard.ZstdDecompressor().decompress(packed))["messages"]:
                if "props" in message and "uuid" in message:
                    self.controls[message["uuid"]] = message
                content = message.get("updates", message.get("props", {})).get("content", "")
                if "following" in content:
                    self.reading = content

    def say(self, **message: Any) -> None:
        self.socket.send(msgspec.msgpack.encode(message))

    def update(self, uuid: str, **updates: Any) -> None:
        self.say(type="GuiUpdateMessage", uuid=uuid, updates=updates)

    def find(self, *options: str) -> str:
        return next(u for u, m in self.controls.items() if tuple(m["props"].get("options") or ()) == options)


def nonsense(rng: random.Random) -> Any:
    numbers = [float("nan"), float("inf"), -1e300, 1e300, 0.0, -1.0, 2.5, 2**62, True, None]
    return rng.choice([*numbers, "", "x" * 5000, "open", "+x", [1, 2], [], {"a": 1}, ["play"], b"\x00\xff", "../.."])


def sent(page: Page, rng: random.Random, kept: set[str]) -> None:
    """One message: mostly a control's value, else another property, another type, or no message at all."""
    dice, uuid = rng.random(), rng.choice(list(page.controls))
    if dice < 0.6:
        page.update(uuid, value=nonsense(rng))
    elif dice < 0.7 and uuid not in kept:
        page.update(uuid, **{rng.choice(["props", "min", "step", "removed", "no-such", "sync_cb"]): nonsense(rng)})
    elif dice < 0.8:
        kind = rng.choice(["ViewerCameraMessage", "ScenePointerMessage", "FileTransferPart", "GuiButtonHoldMessage"])
        page.say(type=kind, uuid=uuid, updates=nonsense(rng))
    elif dice < 0.9:
        page.update(rng.choice(["", "no-such", uuid + "x"]), value=nonsense(rng))
    else:
        page.socket.send(rng.randbytes(rng.randrange(200)))
    page.socket.ping().wait(60)  # it is heard


def megabytes(process: subprocess.Popen) -> float:
    pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


@pytest.mark.long
def test_nonsense_neither_ends_nor_stops_the_lab(store: Store, tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = [sys.executable, "-m", "memcorr", "lab", "--data", str(store.root), "--out", str(tmp_path)]
    with log.open("w") as out:
        alone = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen([*command, "--port", "0"], cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, env=alone)
    try:
        while (found := re.search(r"open http://(\S+)", log.read_text())) is None:
            assert process.poll() is None, log.read_text()
            time.sleep(0.2)
        address, rng = f"ws://{found[1]}", random.Random(0)
        first = Page(address)
        first.hear(5)
        begun = megabytes(process)
        run = first.find("play", "pause", "step", "reset")
        controls, closed = first.controls, 0
        first.close()
        page = Page(address)
        for _ in range(MESSAGES):
            page.controls = controls
            try:
                sent(page, rng, {run})
                while True:  # what a browser would draw
                    page.socket.recv(0)
            except TimeoutError:
                pass
            except ConnectionClosed:  # no message at all
                closed += 1
                page = Page(address)
        page.close()
        last = Page(address)
        last.hear(3)
        before = step_of(last.reading)
        last.update(run, value="pause")
        last.update(run, value="step")
        for _ in range(300):
            last.hear(2)
            if step_of(last.reading) != before:
                break
        assert step_of(last.reading) != before, log.read_text()[-3000:]
        memory = megabytes(process)
        last.close()
        print(f"{MESSAGES} messages, {closed} connections closed, {begun:.0f} MB at first, {memory:.0f} MB")
        assert process.poll() is None and closed > 0
        assert memory < begun + GROWTH
    finally:
        process.terminate()
        process.wait(60)


def step_of(reading: str) -> int:
    found = re.search(r"step (\d+), u", reading)
    return int(found[1]) if found else -1
