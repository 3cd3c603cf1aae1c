"""Nonsense by the thousand, and right answers to the good clients throughout.

The suite sends a few hundred messages; all of them, 16 clients for two minutes, and the figures:

    MEMCORR_FULL=1 python -m pytest -s -n 0 tests/serve/test_fuzz.py
"""

from __future__ import annotations

import os
import random
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from websockets.exceptions import ConnectionClosed

from memcorr.demos.store import Store
from memcorr.serve.protocol import FRAME, encode
from memcorr.serve.server import FAILED
from memcorr.worlds.gym_env import observation_of

from .conftest import SLOTS, Client, Expected, Server, serving

FULL = bool(os.environ.get("MEMCORR_FULL"))
MESSAGES, GOOD, BAD, SECONDS = (10_000, 16, 8, 120.0) if FULL else (400, 3, 2, 0.0)
LOOKS = 3  # of a good client's episode
NAMES = ("pair-000-open", "pair-000-close")
LIMIT = 2**20

Observation = dict[str, Any]
Fuzz = Callable[[random.Random, Observation], bytes | str]


def raw(seen: Observation, name: str, **changes: Any) -> bytes:
    """The observation with one array's wire form changed."""
    wire = msgpack.unpackb(encode(seen), strict_map_key=False)
    wire[name] |= {key.encode(): value for key, value in changes.items()}
    return msgpack.packb(wire)


def truncated(rng: random.Random, seen: Observation) -> bytes:
    data = encode(seen)
    return data[: rng.randrange(len(data))]


def flipped(rng: random.Random, seen: Observation) -> bytes:
    """Some bytes changed, mostly where structure is."""
    data = bytearray(encode({name: seen[name] for name in (*FRAME[3:], *FRAME[:3])}))
    for _ in range(rng.randint(1, 20)):
        data[rng.randrange(900 if rng.random() < 0.8 else len(data))] = rng.randrange(256)
    return bytes(data)


def wrong_dtype(rng: random.Random, seen: Observation) -> bytes:
    names = ["|O", "O", "<c8", ">f8", "<f2", "<U3", "|S9", "|V4", "<M8[ns]", "f8,f8", "object", "", "x" * 300, 7, None]
    return raw(seen, rng.choice(FRAME), dtype=rng.choice([*names, ["a", "<f8"], {"names": ["a"], "formats": ["O"]}]))


def wrong_shape(rng: random.Random, seen: Observation) -> bytes:
    sizes = [0, 1, 2, 3, 9, 128, -1, 2**31, 2**62, 1.5, True, None, "3"]
    shape = [rng.choice(sizes) for _ in range(rng.randint(0, 6))]
    return raw(seen, rng.choice(FRAME), shape=rng.choice([shape, shape, shape, 5, "ab", None, {"a": 1}]))


def reshaped(rng: random.Random, seen: Observation) -> bytes:
    name = rng.choice(FRAME)
    shape = tuple(rng.choice([0, 1, 2, 5, 64]) for _ in range(rng.randint(0, 4)))
    return encode({**seen, name: np.zeros(shape, seen[name].dtype)})


def not_finite(rng: random.Random, seen: Observation) -> bytes:
    name = rng.choice(FRAME[3:])
    array = seen[name].copy()
    array.flat[rng.randrange(array.size)] = rng.choice([np.nan, np.inf, -np.inf])
    return encode({**seen, name: array})


def wrong_field(rng: random.Random, seen: Observation) -> bytes:
    value = rng.choice([None, True, -1, 2**64 - 1, 1.5, "x" * 1000, b"\x00" * 1000, [1, 2], {"name": 3}, {}])
    return msgpack.packb({rng.choice(["reference", "elapsed", "seed", "reset", "rgb", "prompt", "x" * 999]): value})


def noise(rng: random.Random, seen: Observation) -> bytes:
    return rng.randbytes(rng.randrange(300))


def nested(rng: random.Random, seen: Observation) -> bytes:
    return rng.choice([b"\x91", b"\x81\xa1a"]) * rng.randrange(1, 3000) + b"\xc0"


def text(rng: random.Random, seen: Observation) -> str:
    return "".join(chr(rng.randrange(32, 5000)) for _ in range(rng.randrange(50)))


def claims_more(rng: random.Random, seen: Observation) -> bytes:
    """Headers that announce gigabytes."""
    return rng.choice([b"\xdd", b"\xdf", b"\xc6", b"\xdb", b"\xc9"]) + b"\x7f\xff\xff\xff" + rng.randbytes(20)


def extreme(rng: random.Random, seen: Observation) -> bytes:
    """What passes every check and means nothing: it is planned for, or refused in words."""
    size, number = rng.choice([1, 2, 3, 40]), rng.choice([0.0, 1e-300, 1.3, 99.0, -99.0, 1e8, -1e300])
    small = {
        "rgb": np.zeros((size, size, 3), np.uint8),
        "depth": np.full((size, size), rng.choice([0.0, 1e-30, 99.0, np.nan]), np.float32),
        "mask": np.ones((size, size), bool),
    }
    far, K = np.eye(4), np.eye(3)
    far[:3, 3] = number
    K[0, 0] = K[1, 1] = abs(number) or 1e5
    changes: list[dict[str, Any]] = [
        small,
        {"robot_state": np.full(9, number)},
        {"gripper": np.full(3, number)},
        {"T_world_cam": far},
        {"K": K},
    ]
    return encode({**seen, **rng.choice(changes), "reference": NAMES[0], "elapsed": rng.choice([0, 8, 16, 10**9])})


def bad_upload(rng: random.Random, seen: Observation) -> bytes:
    recording = {name: np.stack([seen[name]] * 3) for name in FRAME}
    name = rng.choice(FRAME)
    wrong = rng.choice([recording[name][:1], recording[name][:0], recording[name].astype(np.int64), np.zeros(())])
    return encode({"reference": {"name": "mine", **recording, name: wrong}})


def oversized(rng: random.Random, seen: Observation) -> bytes:
    return bytes(LIMIT + rng.randrange(1, 1000))


CHEAP: tuple[Fuzz, ...] = (
    truncated,
    flipped,
    wrong_dtype,
    wrong_shape,
    reshaped,
    not_finite,
    wrong_field,
    noise,
    nested,
    text,
    claims_more,
    bad_upload,
)


def chosen(rng: random.Random) -> Fuzz:
    """Mostly what is refused at once; now and then what costs a plan, or the connection."""
    dice = rng.random()
    return extreme if dice < 0.02 else oversized if dice < 0.05 else rng.choice(CHEAP)


def attack(server: Server, seed: int, count: int, seen: Observation) -> Counter[str]:
    """Every message is answered: in words, with a finite plan if it happened to be good, or by closing with 1009."""
    rng, client, tally = random.Random(seed), Client(server), Counter[str]()
    for _ in range(count):
        fuzz = chosen(rng)
        data = fuzz(rng, seen)
        try:
            answer = client.said(data)
        except ConnectionClosed as closed:
            assert len(data) > LIMIT and closed.rcvd is not None and closed.rcvd.code == 1009, (fuzz, closed)
            tally["closed with 1009"] += 1
            client = Client(server)
            continue
        if isinstance(answer, str):
            assert "Traceback" not in answer and "\n" not in answer and len(answer) < 400, (fuzz, answer)
            tally["failed" if answer == FAILED else "refused"] += 1
        else:
            assert np.isfinite(answer.get("actions", np.zeros(1))).all(), fuzz
            tally["planned" if "actions" in answer else "taken"] += 1
    client.socket.close()
    return tally


def dawdle(server: Server, stop: threading.Event) -> Counter[str]:
    """Clients that send a handshake a byte at a time, and go away before it is whole."""
    tally = Counter[str]()
    begin = b"GET / HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    while not stop.is_set():
        with socket.create_connection(("127.0.0.1", server.port)) as slow:
            tally["slow"] += 1
            for byte in begin[: 5 if tally["slow"] % 2 else None]:
                if stop.wait(0.02):
                    break
                slow.sendall(bytes([byte]))
    return tally


def behave(
    server: Server, name: str, seen: Observation, right: list[np.ndarray], enough: threading.Event
) -> Counter[str]:
    """Episode after episode; each answer compared with what the library plans itself."""
    tally = Counter[str]()
    with server.client() as client:
        while not enough.is_set() or not tally:
            client.infer(reset=True, reference=name)
            for look in range(LOOKS):
                began = time.perf_counter()
                answer = client.infer(**seen)
                assert answer["elapsed"] == 8 * look and np.array_equal(answer["actions"], right[look]), (name, look)
                tally["right answers"] += 1
                tally["milliseconds"] += round(1e3 * (time.perf_counter() - began))
    return tally


@pytest.mark.long
def test_nonsense_harms_nobody(store: Store, expected: Expected, tmp_path: Path) -> None:
    frames = [store.demonstration(1, task).frame(10) for task in ("open", "close")]
    seen = [observation_of(frame) for frame in frames]
    right = {
        (n, i): [expected(n, frames[i], *range(0, 8 * k + 1, 8)) for k in range(LOOKS)] for n in NAMES for i in range(2)
    }
    options = ("--references", str(store.root), "--port", "0", "--slots", str(SLOTS), "--megabytes", "1")
    tally = Counter[str]()
    with serving(tmp_path / "log", *options) as server:
        with server.client() as client:
            for name in NAMES:
                client.infer(**seen[0], reference=name)
        before, began, enough = server.rss_mb, time.monotonic(), threading.Event()
        with ThreadPoolExecutor(GOOD + BAD + 1) as pool:
            others = [pool.submit(dawdle, server, enough)]
            for i in range(GOOD):
                name, view = NAMES[i % 2], i // 2 % 2
                others.append(pool.submit(behave, server, name, seen[view], right[name, view], enough))
            bad = [pool.submit(attack, server, i, MESSAGES // BAD, seen[0]) for i in range(BAD)]
            try:
                tally.update(sum((attacker.result() for attacker in bad), Counter()))
                time.sleep(max(SECONDS - (time.monotonic() - began), 0.0))
            finally:
                enough.set()
            tally.update(sum((client.result() for client in others), Counter()))
        after, took = server.rss_mb, time.monotonic() - began
        with server.client() as client:
            answer = client.infer(**seen[1], reference=NAMES[0])
            assert np.array_equal(answer["actions"], right[NAMES[0], 1][0])
        assert server.process.poll() is None
        log = server.log.read_text()
    answers = tally["right answers"]
    print(
        f"\n{MESSAGES} messages and {GOOD} clients for {took:.0f} s: {dict(tally)}; "
        f"{tally['milliseconds'] / answers:.0f} ms per right answer; memory {before:.0f} -> {after:.0f} MB"
    )
    assert tally["failed"] == 0, re.findall(r"^\w+(?:Error|Exception).*", log, re.M)
    assert "Traceback" not in log
    assert answers >= GOOD * LOOKS and tally["refused"] > MESSAGES // 2 and tally["closed with 1009"] > 0
    assert after < before + 200
