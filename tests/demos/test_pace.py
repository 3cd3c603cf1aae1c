"""Recordings as people make them, and at which pace they are followed."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from memcorr.demos.collect import record
from memcorr.demos.manner import Manner
from memcorr.demos.pace import USUAL_PACE, durations, is_cut, paced, pauses, speeds
from memcorr.demos.remarks import remarks
from memcorr.demos.store import Demonstration, Store, demonstration_path, read_demonstration
from memcorr.errors import UserError
from memcorr.spec import SPEC
from memcorr.worlds.scenes import demonstration_scenes
from tests.costs import kept


def recorded(manner: Manner) -> Demonstration:
    """The door of pair 0 closed in this manner."""
    scene = demonstration_scenes(0)[0]
    name = "-".join(["manner", *str(manner).split()])

    def build(root: Path) -> None:
        root.mkdir(parents=True)
        record(root, scene, "close", manner)

    root = kept(name, "memcorr.demos", build)
    return read_demonstration(demonstration_path(root, 0, "close"))


def travelled(d: Demonstration) -> np.ndarray:
    return np.asarray(d.action[:, :3].sum(axis=0))


def test_what_can_be_followed_stays_as_it_is(store: Store) -> None:
    for task in ("open", "close"):
        d = store.demonstration(0, task)
        assert paced(d) is d
        assert remarks(d) == []


def test_a_fast_recording_is_slowed_and_leads_to_the_same_place(store: Store) -> None:
    d = store.demonstration(0, "close")
    fast = dataclasses.replace(d, action=np.append(2.5 * d.action[:, :3], d.action[:, 3:], axis=1))
    slow = paced(fast)
    assert speeds(slow).max() <= USUAL_PACE.fastest * USUAL_PACE.tolerated
    assert np.allclose(travelled(slow), travelled(fast), atol=0.1)  # a millimetre
    assert slow.recorded is not None and (np.diff(slow.recorded) >= 0).all()
    assert slow.recorded[0] == 0 and slow.recorded[-1] == len(d) - 1
    assert np.array_equal(slow.frames([40])[0].rgb, d.frames([int(slow.recorded[40])])[0].rgb)
    assert "fast" in remarks(fast)[0]
    assert paced(slow) is slow


def test_actions_that_are_no_displacements_are_left_as_they_are(store: Store) -> None:
    d = store.demonstration(0, "close")
    joints = dataclasses.replace(d, action=np.full((len(d), 7), 2.0))
    assert paced(joints) is joints and not any("fast" in remark for remark in remarks(joints))


def test_a_pause_is_cut_but_not_where_the_gripper_closes() -> None:
    d = recorded(Manner(pause=160))
    assert "pauses" in remarks(d)[0]
    short = paced(d)
    assert len(d) - len(short) >= 130
    assert np.allclose(travelled(short), travelled(d), atol=1e-9)
    creeping = np.concatenate([np.zeros(50), np.linspace(0, 0.04, 150), np.full(len(d) - 200, 0.04)])
    crept = dataclasses.replace(d, gripper=d.gripper + creeping[:, None] * [1.0, 0.0, 0.0])
    assert (durations(crept)[60:190] == 1).all()  # slow is not still
    closing = d.action.copy()
    closing[60:100, 3] = np.linspace(-1, 1, 40)  # the gripper works while the hand stands
    kept_there = durations(dataclasses.replace(d, action=closing))[60:100]
    assert (kept_there == 1).all() and (durations(d)[60:100] == 0).any()


def test_a_recording_that_is_cut_can_be_planned_to_its_end() -> None:
    d = recorded(Manner(cut=True))
    assert is_cut(d) and any("cut short" in remark for remark in remarks(d))
    longer = paced(d)
    assert len(longer) == len(d) + SPEC.chunk
    assert longer.recorded is not None and (longer.recorded[-SPEC.chunk :] == len(d) - 1).all()
    last = np.linalg.norm(longer.action[-SPEC.chunk :, :3], axis=1)
    assert (np.diff(last) < 0).all()


def test_a_faster_recording_is_shorter_and_pauses_make_it_longer(store: Store) -> None:
    usual = store.demonstration(0, "close")
    fast = recorded(Manner(speed=2, cut=True))
    assert len(fast) < 0.75 * len(recorded(Manner(cut=True)))
    assert np.abs(fast.action[:, :3]).max() <= 1.0
    assert pauses(recorded(Manner(pause=160)))[50:200].all() and not pauses(usual)[5:60].any()


def test_an_object_that_is_hidden_at_first_is_named() -> None:
    d = recorded(Manner(hidden=10))
    assert not d.frames([9])[0].mask.any() and d.frames([10])[0].mask.any()
    assert remarks(d) == ["hidden at first: its object is not seen before frame 16"]
    assert d.disturbances == "hidden=10"


@pytest.mark.parametrize("wrong", [{"speed": 0.0}, {"speed": 9.0}, {"pause": -1}, {"hidden": 10**6}])
def test_manners_that_make_no_sense_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UserError, match=next(iter(wrong))):
        Manner(**wrong)  # type: ignore[arg-type]


def test_a_recording_from_arrays_is_followed_like_one_from_a_file(store: Store) -> None:
    d = store.demonstration(0, "open")
    frames = d.frames(range(len(d)))
    rgb, depth, mask = (np.stack([getattr(f, name) for f in frames]) for name in ("rgb", "depth", "mask"))
    mine = Demonstration.of(rgb, depth, mask, d.K[0], d.T_world_cam[0], d.gripper, d.action, d.robot_state)
    for ours, theirs in zip(mine.frames([0, 50]), d.frames([0, 50]), strict=True):
        for name in ("rgb", "depth", "mask", "robot_state", "gripper"):
            assert np.array_equal(getattr(ours, name), getattr(theirs, name))
    with pytest.raises(ValueError, match="depth"):
        Demonstration.of(rgb, depth[:-1], mask, d.K[0], d.T_world_cam[0], d.gripper, d.action)
