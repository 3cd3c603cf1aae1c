"""What a robot can check before it moves: every usual fault is seen at the first frame."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import memcorr
from memcorr.correspondence.matches import Matches
from memcorr.demos.store import Store
from memcorr.errors import UserError
from memcorr.evaluation.sensors import WRONG_SETUPS
from memcorr.following.doubts import QUANTILES, Witness, at_first_look, colour_quantiles, doubt, hand_surface
from memcorr.following.step import Relation
from memcorr.policy.checkpoint import Design
from memcorr.policy.plan import LARGEST_CHANGE, Guard, Plan
from memcorr.policy.servo import Servo
from memcorr.worlds.scenes import evaluation_scenes
from memcorr.worlds.world import World

WORDS = {  # in what is said of each
    "extrinsics inverted": "camera",
    "extrinsics transposed": "camera",
    "extrinsics 10 cm off in x": "do not fit",
    "extrinsics 10 cm off in y": "do not fit",
    "extrinsics 10 cm too high": "camera",
    "extrinsics 10 cm too low": "camera",
    "intrinsics of another size": "camera.K",
    "blue before red": "red and blue",
    "depth constant": "everywhere",
    "no depth": "too little",
}


@pytest.mark.parametrize("fault", WRONG_SETUPS)
def test_usual_faults_are_named_at_the_first_frame(fault: str, store: Store, world: World) -> None:
    change, word = WRONG_SETUPS[fault], WORDS[fault]
    world.reset(evaluation_scenes("combined", seed=7)[0])
    good = world.observe()
    for task in ("open", "close"):
        follower = memcorr.load_policy().follow(store.demonstration(0, task))
        plan = follower.plan(change(good), 0)
        assert plan.fallback and word in plan.reason, plan.reason
        plan = follower.plan(good, 0)
        assert not plan.fallback and not plan.reason and not plan.doubt


def test_one_odd_frame_on_the_way_stops_nothing_two_do(store: Store, world: World) -> None:
    world.reset(evaluation_scenes("combined", seed=7)[0])
    good = world.observe()
    odd = WRONG_SETUPS["extrinsics 10 cm off in x"](good)
    follower = memcorr.load_policy().follow(store.demonstration(0, "open"))
    assert not follower.plan(good, 0).fallback
    plan = follower.plan(odd, 8)
    assert plan.doubt and not plan.fallback
    assert follower.plan(odd, 16).fallback
    assert not follower.plan(good, 24).fallback


def test_an_object_stands_on_its_table(store: Store) -> None:
    """Points that are lifted, tilted or far away are no object of this recording."""
    frame = store.demonstration(0, "open").frame(0)
    rng = np.random.default_rng(0)
    p = rng.uniform(0, 0.2, (16, 3))

    def reason(T: np.ndarray) -> str:
        matches = Matches(p, p @ T[:3, :3].T + T[:3, 3], np.full(16, 0.9), np.ones(16, bool))
        return doubt(frame, Witness.of(frame), Relation(frame, matches=matches, motion=T))

    T = np.eye(4)
    assert not reason(T)
    for change, word in ((0.1, "above"), (-0.1, "below")):
        T = np.eye(4)
        T[2, 3] = change
        assert word in reason(T)
    T = np.eye(4)
    T[0, 3] = 0.9
    assert "0.9 m from" in reason(T)
    T = np.eye(4)
    T[1:3, 1:3] = [[0.5, -0.866], [0.866, 0.5]]
    assert "tilted by 60" in reason(T)


def test_matches_that_hardly_agree_are_another_object_at_the_first_look_alone() -> None:
    """Later the hand may hide what tells: no reason to stop."""
    design, p = Servo().design, np.zeros((16, 3))
    plans = [Plan(np.zeros((16, 4)), 0, Matches(p, p, np.full(16, c), np.ones(16, bool))) for c in (0.9, 0.2)]
    sure, unsure = plans
    assert "another object" in Guard().passed(unsure, 0, design)[0].reason
    plan, guard = Guard().passed(sure, 0, design)
    for elapsed in (8, 16, 24):
        plan, guard = guard.passed(unsure, elapsed, design)
        assert not plan.reason


def test_an_object_of_other_colours_or_height_is_another_one_at_the_first_look(store: Store) -> None:
    """Brighter light is none; nor is an object that looks otherwise in the middle of an episode."""
    frame = store.demonstration(0, "open").frame(0)
    recorded = Witness.of(frame)
    assert not at_first_look(frame, recorded)
    brighter = replace(frame, rgb=np.clip(frame.rgb * 1.2, 0, 255).astype(np.uint8))
    assert not at_first_look(brighter, recorded)
    painted = replace(frame, rgb=np.where(frame.mask[..., None], 255 - frame.rgb, frame.rgb))
    assert "colours" in at_first_look(painted, recorded)
    higher = replace(frame, depth=np.where(frame.mask, 0.9 * frame.depth, frame.depth))
    assert "top is +" in at_first_look(higher, recorded)
    assert not at_first_look(replace(frame, mask=np.zeros_like(frame.mask)), recorded)
    follower = memcorr.load_policy("servo").follow(store.demonstration(0, "open"))
    assert "another object" in follower.plan(painted, 0).reason
    assert not follower.plan(frame, 0).reason
    follower.swap(store.demonstration(0, "close"))
    assert not follower.plan(painted, 0).reason


def test_every_point_of_the_hand_is_where_the_camera_has_it_at_the_first_look(store: Store) -> None:
    """At the gripper's pixel there is the object by chance, as deep as the hand was: its fingertips tell."""
    frame = store.demonstration(0, "open").frame(0)
    recorded = Witness.of(frame)
    assert len(recorded.hands) == 4
    state = frame.robot_state + np.array([0.0, 0.0, 0.0, 0.0, 0.0, 0.3, 0.0, 0.0, -0.3])
    assert "do not fit" in at_first_look(replace(frame, robot_state=state), recorded)
    assert not at_first_look(replace(frame, robot_state=np.zeros(4)), recorded), "of other robots only the gripper"
    past = replace(recorded, hands=(0.3, *recorded.hands[1:]))
    assert not at_first_look(frame, past), "the recording's camera saw past the hand"
    _, far = frame.camera.project(frame.gripper[None])
    covered = np.zeros_like(frame.mask)
    v, u = np.nonzero(frame.depth > far[0] + 0.2)
    covered[v, u] = True
    elsewhere = replace(frame, mask=covered, gripper=frame.camera.lift(np.array([[u[0], v[0]]]), far)[0])
    assert hand_surface(elsewhere) is None, "taken for hidden"
    seen = hand_surface(elsewhere, behind=True)
    assert seen is not None and seen > 0.1


def test_the_front_of_the_hand_is_found_where_the_gripper_is(store: Store) -> None:
    demonstration = store.demonstration(0, "close")
    surfaces = [hand_surface(frame) for frame in demonstration.frames(range(0, 60, 12))]
    assert all(s is not None and -0.12 < s < 0.02 for s in surfaces)
    frame = demonstration.frame(0)
    assert hand_surface(replace(frame, gripper=frame.gripper + np.array([0, 0, 1.0]))) == np.inf
    assert hand_surface(replace(frame, mask=np.ones_like(frame.mask))) is None, "the object hides it"


def test_a_file_cannot_raise_what_a_robot_is_asked_for(store: Store) -> None:
    class Strong(Servo):
        def __init__(self) -> None:
            super().__init__()
            self.design = replace(self.design, action_limit=50.0)

    reference = store.demonstration(0, "open")
    with pytest.raises(UserError, match="action_limit=50"):
        Strong().follow(reference)
    assert Strong().follow(reference, action_limit=50.0)


def test_no_plan_jumps_away_from_what_was_executed_last() -> None:
    design, rng = Design(), np.random.default_rng(0)
    calm = Plan(np.zeros((16, 4)))
    wild = Plan(np.tile([1.0, -1.0, 0.3, 1.0], (16, 1)))
    first, guard = Guard().passed(calm, 0, design)
    assert np.array_equal(first.actions, calm.actions)
    jumped, guard = guard.passed(wild, 8, design)
    assert np.abs(np.diff(jumped.actions[:, :3], axis=0, prepend=np.zeros((1, 3)))).max() <= LARGEST_CHANGE + 1e-12
    assert np.array_equal(jumped.actions[2:], wild.actions[2:]) and (jumped.actions[:, 3] == 1).all()
    near = Plan(wild.actions + rng.uniform(-0.1, 0.1, (16, 4)))
    assert np.array_equal(guard.passed(near, 16, design)[0].actions, near.actions), "what does not jump is left alone"
    assert np.array_equal(Guard().passed(wild, 0, design)[0].actions, wild.actions), "an episode begins as planned"


@pytest.mark.parametrize("shape", [(1, 1), (7, 5), (128, 128)])
def test_colour_quantiles_are_numpys(shape: tuple[int, int]) -> None:
    rgb = np.random.default_rng(0).integers(0, 256, (*shape, 3), np.uint8) // 3
    assert np.allclose(colour_quantiles(rgb), np.quantile(rgb.reshape(-1, 3), QUANTILES, axis=0), atol=1e-9)
