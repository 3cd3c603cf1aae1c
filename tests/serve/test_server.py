"""`memcorr serve`, run as a person runs it: right answers, own references and clocks, limits, a clean end."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from memcorr.cli import main
from memcorr.correspondence.matcher import load_matcher
from memcorr.demos.store import Store
from memcorr.errors import UserError
from memcorr.following.step import Observation, Query
from memcorr.frames import Frame
from memcorr.policy.policy import load_policy
from memcorr.serve.inference import KEPT, PREPARED, Inference, ServedReference
from memcorr.serve.protocol import FRAME, encode
from memcorr.serve.server import ServerSettings
from memcorr.spec import SPEC
from memcorr.worlds.gym_env import observation_of

from .conftest import KEY, ROOT, SLOTS, Expected, Server, serving


@pytest.fixture(scope="module")
def frame(store: Store) -> Frame:
    return store.demonstration(1, "close").frame(20)


@pytest.fixture(scope="module")
def seen(frame: Frame) -> dict[str, Any]:
    return observation_of(frame)


@pytest.mark.long
def test_every_client_gets_the_bits_of_its_own_reference_in_any_company(
    server: Server, expected: Expected, frame: Frame, seen: dict
) -> None:
    names = ["pair-000-open", "pair-000-close", "pair-001-open"]

    def episode(name: str) -> list[dict]:
        with server.client() as client:
            return [client.infer(**seen, reference=name) for _ in range(4)]

    with ThreadPoolExecutor(3) as pool:
        answers = dict(zip(names, pool.map(episode, names), strict=True))
    for name in names:
        for look, answer in enumerate(answers[name]):
            assert np.array_equal(answer["actions"], expected(name, frame, *range(0, 8 * look + 1, 8)))
            assert (answer["reference"], answer["elapsed"]) == (name, 8 * look)
            assert 0 < answer["confidence"] <= 1 and not answer["fallback"] and answer["valid_points"] >= 4
    timings = [answer["server_timing"] for name in names for answer in answers[name]]
    assert max(t["company"] for t in timings) > 1
    assert all(t["infer_ms"] > 0 and t["wait_ms"] >= 0 for t in timings)


def test_a_client_resets_swaps_and_sets_its_clock(
    server: Server, expected: Expected, frame: Frame, seen: dict, store: Store
) -> None:
    with server.client() as client:
        assert client.metadata["references"][:2] == ["pair-000-open", "pair-000-close"]
        assert (client.metadata["executed"], client.metadata["policy"]["name"]) == (8, load_policy().design.name)
        assert client.infer(**seen) == "no reference chosen: name one of the metadata's references, or upload one"
        assert client.infer(reference="pair-000-open", elapsed=40) == {"reference": "pair-000-open", "elapsed": 40}
        assert np.array_equal(client.infer(**seen)["actions"], expected("pair-000-open", frame, 40))
        for wrong in ({"reference": "pair-777-open"}, {**seen, "reference": "pair-000-close", "K": np.zeros((3, 3))}):
            assert isinstance(client.infer(**wrong), str)
        answer = client.infer(reference="pair-000-open", elapsed=None)
        assert answer == {"reference": "pair-000-open", "elapsed": 48}, "what was refused changed nothing"
        swapped = client.infer(**seen, reference="pair-000-close")
        follower = load_policy(device="cpu").follow(store.demonstration(0, "open"), slots=SLOTS)
        follower.plan(frame, 40)
        follower.swap(store.demonstration(0, "close"))
        assert swapped["elapsed"] == 0 and np.array_equal(swapped["actions"], follower.plan(frame, 0).actions)
        assert client.infer(reset=True) == {"reference": "pair-000-close", "elapsed": 0}
        late = client.infer(**seen, elapsed=10**6)
        assert 0 <= late["phase"] <= SPEC.last_anchor
        other = client.infer(**seen, elapsed=0, seed=3)
        assert not np.array_equal(other["actions"], swapped["actions"])


def recording(store: Store) -> dict[str, np.ndarray]:
    frames = [observation_of(f) for f in store.demonstration(0, "close").frames(range(SPEC.episode_steps))]
    images = {name: np.stack([f[name] for f in frames]) for name in FRAME}
    return images | {"action": store.demonstration(0, "close").action}


def test_an_uploaded_reference_is_followed_like_a_stored_one_by_its_owner_alone(
    server: Server, expected: Expected, frame: Frame, seen: dict, store: Store
) -> None:
    mine = recording(store)
    with server.client() as client, server.client() as stranger:
        assert client.infer(reference={"name": "mine", **mine}) == {"reference": "mine", "elapsed": 0}
        client.infer(elapsed=8)
        assert np.array_equal(client.infer(**seen)["actions"], expected("pair-000-close", frame, 8))
        assert "there is no reference 'mine'" in stranger.infer(**seen, reference="mine")
        assert "of its own" in client.infer(reference={"name": "pair-000-open", **mine})
        for n in range(4):  # four are kept
            few = {name: array[:3] for name, array in mine.items()}
            assert client.infer(reference={"name": f"other-{n}", **few})["reference"] == f"other-{n}"
        assert "no reference 'mine'" in client.infer(reference="mine")


def test_too_little_in_sight_is_a_fallback_not_an_error(server: Server, seen: dict) -> None:
    with server.client() as client:
        answer = client.infer(**{**seen, "mask": np.zeros_like(seen["mask"])}, reference="pair-000-open")
        assert answer["fallback"] and answer["confidence"] == 0.0 and np.isfinite(answer["actions"]).all()


def test_health_is_told_to_anybody_and_plans_to_those_with_the_key(server: Server) -> None:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/healthz") as answer:
        assert (answer.status, answer.read()) == (200, b"OK\n")
    address = f"ws://127.0.0.1:{server.port}"
    wrong: list[dict[str, str]] = [
        {},
        *({"Authorization": text} for text in ("Api-Key ", f"Api-Key {KEY}x", KEY, f"Bearer {KEY}", "Api-Key é")),
    ]
    page = {"Authorization": f"Api-Key {KEY}", "Origin": "http://a-page.example"}  # with the key, from a browser
    for status, headers in (*((401, headers) for headers in wrong), (403, page)):
        with pytest.raises(InvalidStatus) as refusal, connect(address, additional_headers=headers):
            pass
        assert refusal.value.response.status_code == status
    with pytest.raises(urllib.error.HTTPError):
        urllib.request.urlopen(f"http://127.0.0.1:{server.port}/")


def test_an_open_address_needs_a_good_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError, match=r"0\.0\.0\.0 is open to others: give --key-file"):
        ServerSettings(host="0.0.0.0")
    with pytest.raises(UserError, match="at least 16"):
        ServerSettings(host="0.0.0.0", key="short")
    assert ServerSettings(host="::1").key is None and ServerSettings(host="robot.example", key=KEY).key == KEY
    for options, words in (
        (("--host", "0.0.0.0"), "open to others"),
        (("--key-file", str(tmp_path / "none")), "cannot be read"),
    ):
        monkeypatch.setattr(sys, "argv", ["memcorr", "serve", *options])
        with pytest.raises(SystemExit) as stop:
            main()
        told = capsys.readouterr().err
        assert stop.value.code == 2 and words in told and told.count("\n") == 1, told


IMPATIENT = """
import logging, sys
from pathlib import Path
from memcorr.serve.server import ServerSettings, serve_policy
logging.basicConfig(level="INFO", format="%(message)s")
settings = ServerSettings(port=0, message_bytes=2**20, clients=3, patience=1.0)
serve_policy("shipped", Path(sys.argv[1]), "embedded", settings)
"""


@pytest.mark.long
def test_limits_hold_and_the_end_is_clean(store: Store, seen: dict, tmp_path: Path) -> None:
    """Long messages, slow senders, too many clients, a damaged file, a taken port, SIGTERM: one after the other."""
    shutil.copytree(store.root, tmp_path / "store")
    damaged = tmp_path / "store" / "pair-001-open.h5"
    damaged.write_bytes(damaged.read_bytes()[:1000])
    with serving(tmp_path / "log", str(tmp_path / "store"), program=("-c", IMPATIENT)) as server:
        with server.client() as client:
            client.socket.send(bytes(2**20 + 1))
            with pytest.raises(ConnectionClosed) as closed:
                client.socket.recv(10)
            assert closed.value.rcvd is not None and closed.value.rcvd.code == 1009
        slow = [half_a_handshake(server), half_a_message(server)]
        began = time.monotonic()
        with server.client() as good:
            assert "actions" in good.infer(**seen, reference="pair-000-open")
            for sender in slow:
                sender.settimeout(20)
                while sender.recv(4096):  # until the server hangs up
                    pass
                sender.close()
            assert time.monotonic() - began < 20
            while server.log.read_text().count("a client left") < 2:
                time.sleep(0.1)
            message = good.infer(**seen, reference="pair-001-open")
            assert message == "reference 'pair-001-open' cannot be read; the server's log says why"
            assert str(damaged) in server.log.read_text()
            assert "actions" in good.infer(**seen)
            with server.client(), server.client():
                with pytest.raises(InvalidStatus) as refusal:
                    server.client()
                assert refusal.value.response.status_code == 503
            command = [sys.executable, "-m", "memcorr", "serve", "--port", str(server.port)]
            second = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
            assert second.returncode == 2 and f"port {server.port}" in second.stderr, second.stderr
            good.socket.send(encode({**seen, "reset": True}))
            server.process.send_signal(signal.SIGTERM)
            with pytest.raises(ConnectionClosed) as closed:
                while True:
                    good.socket.recv(20)
            assert closed.value.rcvd is not None and closed.value.rcvd.code == 1001
        assert server.process.wait(20) == 0
        lines = server.log.read_text().splitlines()
        assert lines[-1] == "stopped" and not [line for line in lines if "Traceback" in line]


def half_a_handshake(server: Server) -> socket.socket:
    sender = socket.create_connection(("127.0.0.1", server.port))
    sender.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n")
    return sender


def half_a_message(server: Server) -> socket.socket:
    """A frame of 100,000 bytes of which a hundred arrive."""
    sender = socket.create_connection(("127.0.0.1", server.port))
    sender.sendall(
        b"GET / HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
    )
    sender.sendall(b"\x82\xff" + (100_000).to_bytes(8, "big") + bytes(4) + bytes(100))
    return sender


def test_a_served_reference_stays_small_and_looks_ahead(store: Store) -> None:
    class Counting:
        name, batches = "counting", 0

        def encode(self, crops: np.ndarray) -> list[int]:
            self.batches += 1
            return [0] * len(crops)

    matcher = Counting()
    reference = ServedReference(store.demonstration(0, "open"), matcher)  # type: ignore[arg-type]
    for j in range(0, SPEC.last_anchor + 1, SPEC.executed):
        reference.at(j)
    assert matcher.batches == 3, "24 looks, eight at a time"
    for j in range(SPEC.last_anchor + 1):
        reference.at(j)
        assert len(reference._prepared) <= KEPT + 8


def test_few_references_stay_prepared(checkpoints: dict[str, str], store: Store) -> None:
    demonstration = store.demonstration(0, "open")
    inference = Inference(load_policy(checkpoints["memcorr"]), load_matcher("flow"))
    references = [ServedReference(demonstration, inference.matcher) for _ in range(PREPARED + 2)]
    for reference in references:
        inference.plan([Query(Observation(demonstration.frame(0)), reference, 0)], [0])
    assert [bool(r._prepared) for r in references] == [False] * 2 + [True] * PREPARED


def test_only_policies_that_follow_a_reference_are_served(checkpoints: dict[str, str]) -> None:
    with pytest.raises(UserError, match="only relation policies are served"):
        Inference(load_policy(checkpoints["visual-unet"]), None)


def test_motion_alone_is_served_without_a_matcher(checkpoints: dict[str, str], store: Store) -> None:
    policy, demonstration = load_policy(checkpoints["motion-literal"]), store.demonstration(0, "open")
    inference, frame = Inference(policy, load_matcher("flow")), demonstration.frame(0)
    assert inference.matcher is None
    (plan,) = inference.plan([Query(Observation(frame), ServedReference(demonstration, None), 24)], [0])
    assert np.array_equal(plan.actions, policy.follow(demonstration).plan(frame, 24).actions) and plan.phase == 24
