"""docs/robot.md: its client drives a simulated robot; masks are carried; the stop signal is what its table says.

The table is printed, and compared, by `python -m pytest -s -n 0 tests/serve/test_robot.py -k table`.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import memcorr
from memcorr.correspondence.matcher import load_matcher
from memcorr.demos.store import Store
from memcorr.evaluation.sensors import WRONG_SETUPS
from memcorr.following.masks import Tracked
from memcorr.frames import Frame
from memcorr.serve.protocol import Refused, encode, read_message
from memcorr.worlds.gym_env import observation_of
from memcorr.worlds.scenes import evaluation_scenes
from memcorr.worlds.world import World

from .conftest import ROOT, Server, serving
from .test_openpi import run

PAGE = ROOT / "docs/robot.md"
SCENES = 20


@pytest.fixture(scope="module")
def server(store: Store, tmp_path_factory: pytest.TempPathFactory) -> Any:
    options = ("servo", "--references", str(store.root), "--port", "0", "--masks", "carried")
    with serving(tmp_path_factory.mktemp("robot") / "log", *options) as running:
        yield running


@pytest.fixture(scope="module")
def frames(store: Store) -> list[Frame]:
    return store.demonstration(1, "close").frames((0, 8, 16))


def test_a_mask_is_needed_once_per_episode_and_carried_from_there(server: Server, frames: list[Frame]) -> None:
    sent = [{k: v for k, v in observation_of(f).items() if k != "mask"} for f in frames]
    mask = observation_of(frames[0])["mask"]
    tracked = Tracked(load_matcher("embedded"), frames[0], frames[0].mask)
    follower = memcorr.load_policy("servo").follow(Store.open(server_store(server)).demonstration(0, "close"))
    with server.client() as client:
        assert client.metadata["masks"] == "carried"
        client.infer(reset=True, reference="pair-000-close")
        assert "frame lacks mask" in client.infer(**sent[0])
        answers = [client.infer(**sent[0], mask=mask), client.infer(**sent[1]), client.infer(**sent[2])]
        client.infer(reset=True)
        assert "frame lacks mask" in client.infer(**sent[0])
    carried = [frames[0], *(replace(f, mask=tracked.look(f)) for f in frames[1:])]
    right = [follower.plan(f, 8 * n).actions for n, f in enumerate(carried)]
    for answer, actions in zip(answers, right, strict=True):
        assert np.array_equal(answer["actions"], actions) and not answer["fallback"]


def server_store(server: Server) -> Path:
    return Path(server.process.args[server.process.args.index("--references") + 1])  # type: ignore[index, union-attr, arg-type]


def test_depth_comes_as_the_camera_has_it_with_its_scale(frames: list[Frame]) -> None:
    seen = observation_of(frames[0])
    raw = {**seen, "depth": np.rint(1000 * seen["depth"]).astype(np.uint16)}
    frame = read_message(encode({**raw, "depth_scale": 0.001})).frame
    assert frame is not None and frame.depth.dtype == np.float32
    assert np.abs(frame.depth - frames[0].depth).max() < 0.0006
    for wrong, words in (
        (raw, "depth of uint16 needs depth_scale, metres per unit: 0.001 for millimetres"),
        ({**raw, "depth_scale": 1000.0}, "needs depth_scale"),
        ({**raw, "depth_scale": float("nan")}, "needs depth_scale"),
        ({**seen, "depth_scale": 0.001}, "depth_scale is for frame.depth of uint16, not float32"),
    ):
        with pytest.raises(Refused, match=re.escape(words)):
            read_message(encode(wrong))
    recording = {name: np.stack([observation_of(f)[name] for f in frames]) for name in seen}
    raw_depth = np.rint(1000 * recording["depth"]).astype(np.uint16)
    brought = {"name": "mine", **recording, "depth": raw_depth, "depth_scale": 0.001}
    upload = read_message(encode({"reference": brought})).reference
    assert upload is not None and not isinstance(upload, str)
    assert np.abs(upload.frame(2).depth - frames[2].depth).max() < 0.0006


def test_without_carried_masks_every_frame_needs_one(frames: list[Frame], store: Store) -> None:
    from memcorr.serve.sessions import Library, Session

    seen = {k: v for k, v in observation_of(frames[0]).items() if k != "mask"}
    message = read_message(encode({**seen, "reference": "pair-000-close"}))
    session = Session().heard(message, Library(store, None))
    with pytest.raises(Refused, match="every frame needs it"):
        session.query(message)


@pytest.mark.long
def test_the_client_of_the_page_closes_the_door_and_stops_where_it_should(
    openpi: Path, server: Server, world: World
) -> None:
    """Then with a live camera whose pose is wrong by 10 cm: nothing moves."""
    (text,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    assert len([line for line in text.splitlines() if line.strip()]) <= 32
    address = 'WebsocketClientPolicy("127.0.0.1", 8000)'
    program = text.replace(address, f'WebsocketClientPolicy("127.0.0.1", {server.port})')
    assert program.count(str(server.port)) == 1
    program = program.replace("from robot import Robot", "from robot import DepthRobot as Robot")
    program += """
class Moved(Robot):
    moves = 0
    def observe(self):
        seen = super().observe()
        T = seen["T_world_cam"].copy()
        T[0, 3] += 0.1
        return {**seen, "T_world_cam": T}
    def execute(self, action):
        Moved.moves += 1
print(episode(Moved("close"), "pair-000-close"), Moved.moves)
"""
    code, out, errors = run(openpi, program, world)
    assert code == 0, errors
    followed, stopped = out.splitlines()
    assert followed == "done"
    assert stopped.startswith("stopped: camera and gripper do not fit") and stopped.endswith(" 0")


def rates(store: Store, world: World) -> dict[str, tuple[int, int, str]]:
    """Of first looks: how many are stopped, of how many, and an example of the words."""
    followers = {task: memcorr.load_policy().follow(store.demonstration(0, task)) for task in ("open", "close")}
    found: dict[str, tuple[int, int, str]] = {}
    for scene in evaluation_scenes("combined", seed=11)[:SCENES]:
        world.reset(scene)
        good = world.observe()
        for task, follower in followers.items():
            other = followers["close" if task == "open" else "open"]
            faults = {"nothing is wrong": good, **{name: change(good) for name, change in WRONG_SETUPS.items()}}
            plans = {name: follower.plan(frame, 0) for name, frame in faults.items()}
            plans["the reference of the opposite task"] = other.plan(good, 0)
            for name, plan in plans.items():
                stopped, count, words = found.get(name, (0, 0, ""))
                found[name] = stopped + plan.fallback, count + 1, words or plan.reason
    return found


@pytest.mark.long
def test_the_table_of_the_page_is_what_is_measured(store: Store, world: World) -> None:
    found = rates(store, world)
    rows = [f"| {name} | {words or '–'} | {stopped}/{count} |" for name, (stopped, count, words) in found.items()]
    print("\n".join(rows))
    page = PAGE.read_text()
    assert not [row for row in rows if f"| {row.split('|')[1].strip()} |" not in page]
    for name, (stopped, count, _) in found.items():
        (line,) = re.findall(rf"^\| {re.escape(name)} \|.*$", page, re.M)
        assert line.endswith(f"| {stopped}/{count} |"), (line, stopped)
    assert found["nothing is wrong"][0] == 0
