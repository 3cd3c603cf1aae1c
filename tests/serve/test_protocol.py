"""What the decoder lets in, and nothing else."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import msgpack
import numpy as np
import pytest

from memcorr.demos.store import Store
from memcorr.serve.protocol import DTYPES, FRAME, Refused, decode, encode, read_message
from memcorr.worlds.gym_env import observation_of


def array(dtype: Any = "<f8", shape: Any = (3,), data: Any = bytes(24)) -> dict:
    return {b"__ndarray__": True, b"dtype": dtype, b"shape": shape, b"data": data}


@pytest.mark.parametrize("dtype", DTYPES)
def test_arrays_arrive_as_they_were_sent(dtype: str) -> None:
    sent = np.arange(24).reshape(2, 3, 4).astype(dtype)
    got = decode(encode({"a": sent}))["a"]
    assert got.dtype == sent.dtype and np.array_equal(got, sent)


def test_a_truth_value_is_zero_or_one() -> None:
    got = decode(msgpack.packb({"mask": array("|b1", (4,), b"\x00\x01\x02\xff")}))["mask"]
    assert got.view(np.uint8).tolist() == [0, 1, 1, 1]


WRONG: dict[str, Any] = {
    "object array": array("|O", (1,), pickle.dumps(print)),
    "complex": array("<c16", (1,), bytes(16)),
    "big-endian": array(">f8"),
    "text": array("<U6", (1,)),
    "raw bytes": array("|V24", (1,)),
    "fields": array([["a", "<f8"]], (3,)),
    "a dtype that is an array": array(array()),
    "no dtype": array(None),
    "time": array("<M8[s]"),
    "too short": array(data=bytes(23)),
    "too long": array(data=bytes(25)),
    "no data": array(data=None),
    "data as text": array(data="x" * 24),
    "negative size": array(shape=(-3,)),
    "huge": array(shape=(2**40, 2**40)),
    "overflow to zero": array(shape=(2**62, 4), data=b""),
    "fraction": array(shape=(3.0,)),
    "truth as size": array(shape=(True, 3)),
    "shape of a word": array(shape="3"),
    "five axes": array(shape=(1, 1, 1, 1, 3)),
    "scalar of an object": {b"__npgeneric__": True, b"dtype": "|O", b"data": 1},
    "scalar of a list": {b"__npgeneric__": True, b"dtype": "<f8", b"data": [1.0, 2.0]},
    "extension": msgpack.ExtType(4, b"abc"),
    "long list": list(range(1000)),
    "large map": {str(i): i for i in range(1000)},
}


@pytest.mark.parametrize("name", WRONG)
def test_anything_else_is_refused(name: str) -> None:
    with pytest.raises(Refused) as refusal:
        read_message(msgpack.packb({"rgb": WRONG[name]}))
    assert len(str(refusal.value)) < 250 and "\n" not in str(refusal.value)


MANY = b"\x9f" + 15 * (b"\x9f" + 15 * (b"\x9f" + 15 * b"\x90"))  # small, and thousands of objects


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x80",
        b"\x93\x01\x02\x03",
        b"\x91" * 5000,
        MANY,
        b"\x81\x01\x02",
        b"\xdf\xff\xff\xff\xff",
        "hello",
    ],
)
def test_what_is_no_message_is_refused(data: bytes | str) -> None:
    with pytest.raises(Refused):
        read_message(data)


def test_an_observation_is_the_frame_in_any_float(store: Store) -> None:
    frame = store.demonstration(0, "open").frame(3)
    sent = observation_of(frame)
    message = read_message(encode({**sent, "elapsed": 16, "seed": 5, "reset": True, "reference": "pair-000-open"}))
    assert message.frame is not None
    assert (message.elapsed, message.seed, message.reset, message.reference) == (16, 5, True, "pair-000-open")
    for name, array in observation_of(message.frame).items():
        assert array.dtype == sent[name].dtype and np.array_equal(array, sent[name]), name
    single = {name: a.astype(np.float32) if a.dtype == np.float64 else a for name, a in sent.items()}
    again = read_message(encode(single)).frame
    assert again is not None and again.robot_state.dtype == np.float64
    assert np.allclose(again.robot_state, frame.robot_state, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gripper": None}, "frame lacks gripper"),
        ({"robot_state": np.full(9, np.nan)}, "robot_state holds NaN"),
        ({"K": [1.0, 2.0]}, "K must be an array, not list"),
        ({"mask": np.zeros((128, 128), np.uint8)}, "mask must be an array of bool"),
        ({"depth": np.full((128, 128), 900.0)}, "millimetres"),
        ({"depth": np.full((128, 128), 1e300)}, ""),
        ({"elapsed": -1}, "elapsed must be a whole number"),
        ({"elapsed": 1.5}, "elapsed must be a whole number"),
        ({"seed": True}, "seed must be a whole number"),
        ({"reset": 1}, "reset must be true or false"),
        ({"reference": 3}, "reference must be a name"),
        ({"prompt": "open"}, "unknown field 'prompt'"),
        ({"reference": {"name": "x"}}, "reference lacks rgb"),
    ],
)
def test_a_wrong_observation_is_refused_by_name(changes: dict, words: str, store: Store) -> None:
    content: dict[str, Any] = {**observation_of(store.demonstration(0, "open").frame(0)), **changes}
    data = encode({name: value for name, value in content.items() if name not in FRAME or value is not None})
    if words:
        with pytest.raises(Refused, match=words):
            read_message(data)
    else:  # too large for the precision of depth: infinite, which is "no return"
        assert not np.isfinite(dataclasses.astuple(read_message(data))[0][1]).any()


def test_an_upload_is_checked_frame_by_frame(store: Store) -> None:
    frames = [observation_of(frame) for frame in store.demonstration(0, "open").frames(range(5))]
    recording: dict[str, Any] = {name: np.stack([frame[name] for frame in frames]) for name in FRAME}
    upload = read_message(encode({"reference": {"name": "mine", **recording}})).reference
    assert upload is not None and not isinstance(upload, str) and len(upload) == 5
    assert np.array_equal(upload.frame(3).depth, frames[3]["depth"])
    broken = recording["gripper"].copy()
    broken[4] = np.inf
    for wrong, words in (
        ({"gripper": broken}, "reference, frame 4.gripper holds NaN or infinity"),
        ({"depth": recording["depth"][:4]}, "the same number in every array"),
        ({name: array[:1] for name, array in recording.items()}, "2 to 1000 frames"),
        ({"name": ""}, "needs a name"),
        ({"name": "a\nb"}, "needs a name"),
        ({"actions": np.zeros(3)}, "unknown field 'actions' of a reference"),
    ):
        with pytest.raises(Refused, match=words):
            read_message(encode({"reference": {"name": "mine", **recording, **wrong}}))
