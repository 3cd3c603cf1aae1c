"""What one client does costs the others little: courses, uploads, handshakes, requests of who is gone."""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memcorr.demos.store import Store
from memcorr.serve.protocol import FRAME, encode, read_message
from memcorr.worlds.gym_env import observation_of

from .conftest import Client, Server, serving

PENDING = 128
STRICT = f"""
import logging, sys
from pathlib import Path
from memcorr.serve.server import ServerSettings, serve_policy
logging.basicConfig(level="INFO", format="%(message)s")
settings = ServerSettings(port=0, pending={PENDING}, uploaded_bytes=30 * 2**20, uploaded_frames=int(sys.argv[2]))
serve_policy("servo", Path(sys.argv[1]), "embedded", settings)
"""


@pytest.fixture(scope="module")
def server(store: Store, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("fair") / "log"
    with serving(log, str(store.root), "40", program=("-c", STRICT)) as running:
        yield running


@pytest.fixture(scope="module")
def seen(store: Store) -> dict[str, Any]:
    return observation_of(store.demonstration(1, "close").frame(20))


def recording(store: Store, frames: int) -> dict[str, np.ndarray]:
    shown = [observation_of(f) for f in store.demonstration(0, "close").frames(range(frames))]
    action = store.demonstration(0, "close").action[:frames]
    return {name: np.stack([f[name] for f in shown]) for name in FRAME} | {"action": action}


def test_an_upload_is_counted_whole_and_holds_nothing_else(store: Store) -> None:
    mine = recording(store, 5)
    wide = {**mine, "action": np.zeros((5, 100_000), np.float32)}
    upload = read_message(encode({"reference": {"name": "mine", **wide}})).reference
    assert upload is not None and not isinstance(upload, str) and upload.images is not None
    held = [*upload.images.values(), upload.K, upload.T_world_cam, upload.robot_state, upload.gripper, upload.action]
    assert upload.nbytes == sum(array.nbytes for array in held) > 4_000_000
    assert all(array.flags.owndata for array in held), "the message could not go"


def test_uploads_are_limited_in_bytes_and_in_frames_a_minute(server: Server, store: Store) -> None:
    few, wide = recording(store, 3), np.zeros((3, 700_000), np.float64)  # 17 MB of action
    with server.client() as client, server.client() as other:
        assert client.infer(reference={"name": "one", **few, "action": wide})["reference"] == "one"
        assert "as many uploaded references as it may" in other.infer(reference={"name": "two", **few, "action": wide})
        assert other.infer(reference={"name": "two", **few})["reference"] == "two"
    more = {name: np.concatenate([array] * 10) for name, array in few.items()}
    with server.client() as client:
        assert client.infer(reference={"name": "more", **more})["reference"] == "more"
        answer = client.infer(reference={"name": "again", **more})
        assert "40 uploaded frames a minute: try again in" in answer, answer


def test_half_open_handshakes_make_way(server: Server, seen: dict) -> None:
    lines = server.log.read_text().count("\n")
    strangers = []
    for _ in range(3 * PENDING):
        stranger = socket.create_connection(("127.0.0.1", server.port))
        stranger.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n")
        strangers.append(stranger)
    began = time.monotonic()
    with server.client() as client:
        assert client.infer(reset=True)["elapsed"] == 0
    assert time.monotonic() - began < 3
    descriptors = len(list(Path(f"/proc/{server.process.pid}/fd").iterdir()))
    for stranger in strangers:
        stranger.close()
    assert descriptors < 100 + PENDING
    for _ in range(300):  # no HTTP at all
        with socket.create_connection(("127.0.0.1", server.port)) as stranger:
            stranger.sendall(b"\x16\x03\x01\r\n\r\n")
    with server.client() as client:
        assert client.infer(reset=True)["elapsed"] == 0
    assert server.log.read_text().count("\n") - lines <= 101


def timed(client: Client, **content: Any) -> float:
    began = time.perf_counter()
    answer = client.infer(**content)
    assert not isinstance(answer, str), answer
    return time.perf_counter() - began


@pytest.mark.long
def test_who_is_gone_is_not_waited_for(store: Store) -> None:
    """Six bring recordings and leave at once; who chooses a reference then waits for one of them at most."""
    mine = recording(store, 150)
    log = Path(store.root).parent / "gone.log"
    with serving(log, str(store.root), "100000", program=("-c", STRICT)) as server, server.client() as good:
        alone = timed(good, reference="pair-000-open")
        for _ in range(6):
            with server.client() as leaves:
                leaves.socket.send(encode({"reference": {"name": "mine", **mine}}))
                time.sleep(0.3)  # it is heard
        behind = timed(good, reference="pair-001-open")
    print(f"a reference is ready after {alone:.1f} s alone, {behind:.1f} s behind six who left")
    assert behind < 3 * alone + 1


@pytest.mark.long
def test_a_good_client_is_served_beside_one_that_swaps_references_without_pause(store: Store, tmp_path: Path) -> None:
    brought = [recording(store, 60), recording(store, 90)]

    def swap(server: Server, stop: threading.Event, swaps: list[int]) -> None:
        seen = observation_of(store.demonstration(0, "open").frame(0))
        with server.client() as client:
            for n in itertools.count():
                if stop.is_set():
                    return
                named = f"pair-00{n // 2 % 2}-{'open' if n % 2 else 'close'}"
                chosen = named if n % 3 else {"name": f"mine-{n}", **brought[n % 2]}
                client.infer(**seen, reference=chosen)
                swaps[0] += 1

    def p50(client: Client, seconds: float) -> float:
        took, began = list[float](), time.monotonic()
        while time.monotonic() - began < seconds:
            took.append(timed(client, **observation_of(frame), elapsed=8 * (len(took) % 8)))
        return float(np.median(took))

    frame = store.demonstration(1, "close").frame(20)
    with serving(tmp_path / "log", str(store.root), "1000", program=("-c", STRICT)) as server, server.client() as good:
        assert good.infer(reference="pair-001-close")["elapsed"] == 0
        p50(good, 2)
        stop, swaps = threading.Event(), [0]
        attacker = threading.Thread(target=swap, args=(server, stop, swaps))
        alone = p50(good, 10)
        attacker.start()
        beside = p50(good, 30)
        stop.set()
        attacker.join()
        again = p50(good, 10)
    print(f"p50 {1e3 * alone:.0f} ms alone, {1e3 * beside:.0f} ms beside {swaps[0]} swaps, {1e3 * again:.0f} ms after")
    assert swaps[0] > 2 and beside <= 3 * max(alone, again)
