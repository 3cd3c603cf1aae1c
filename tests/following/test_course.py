"""The phase from what is seen: follows the clock while all goes well, and the scene when it does not."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from scipy.spatial.transform import Rotation

from memcorr.correspondence.matches import ground_truth_matches, motion_of, retimed
from memcorr.correspondence.rigid import interpolated
from memcorr.demos.store import Demonstration, Store
from memcorr.following.course import Course, Progress, expected_phase, seen_phase
from memcorr.spec import SPEC, TASKS, Array, Task, opposite
from memcorr.worlds.pairs import HANDLE_POINTS


def poses(demonstration: Demonstration) -> Array:
    assert demonstration.object_pose is not None
    return demonstration.object_pose


def course_of(demonstration: Demonstration) -> Course:
    return Course.of_poses(HANDLE_POINTS, poses(demonstration), demonstration.gripper)


def follow(course: Course, motions: Array, gripper: Array, noise: float = 0.0) -> list[int]:
    """The phase at every replan of a live demonstration."""
    before: Progress | None = None
    rng, phases = np.random.default_rng(0), []
    for t in range(0, len(motions), SPEC.executed):
        motion = motions[t].copy()
        motion[:3, 3] += rng.normal(0, noise, 3)
        before = seen_phase(course, motion, gripper[t], before, t)
        phases.append(before.phase)
    return phases


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("noise", [0.0, 0.003])
def test_undisturbed_it_is_the_clock(store: Store, task: Task, noise: float) -> None:
    """A door elsewhere, moved by an expert of the same speed: within two replans of the elapsed steps."""
    course, live = course_of(store.demonstration(0, task)), store.demonstration(1, task)
    phases = follow(course, poses(live) @ np.linalg.inv(poses(store.demonstration(0, task))[0]), live.gripper, noise)
    clock = np.minimum(np.arange(0, len(live), SPEC.executed), SPEC.last_anchor)
    assert np.abs(np.array(phases) - clock)[clock < 80].max() <= 2 * SPEC.executed


def test_looks_are_at_every_eighth_frame_of_any_reference() -> None:
    assert expected_phase(None, 40, 200) == 0
    for length in (17, 120, 200, 263):
        for phase in range(0, length - 16):
            j = expected_phase(Progress(phase, np.zeros(3), 80), 88, length)
            assert j % 8 == 0 and j <= length - 16 and abs(j - min(phase + 8, length - 16)) < 8


@pytest.mark.parametrize("task", TASKS)
def test_a_reference_at_another_speed_is_followed(store: Store, task: Task) -> None:
    course, live = course_of(store.demonstration(0, task)), store.demonstration(1, task)
    motions = poses(live) @ np.linalg.inv(poses(store.demonstration(0, task))[0])
    slow = np.repeat(np.arange(100), 2)  # the live scene takes twice as long
    phases = follow(course, motions[slow], live.gripper[slow])
    assert np.abs(np.array(phases) - slow[:: SPEC.executed]).max() <= 2 * SPEC.executed


@pytest.mark.parametrize("task", TASKS)
def test_a_door_that_is_set_back_takes_the_phase_along(store: Store, task: Task) -> None:
    course, live = course_of(store.demonstration(0, task)), store.demonstration(1, task)
    motions = poses(live) @ np.linalg.inv(poses(store.demonstration(0, task))[0])
    half = int(np.argmax(np.abs(live.joint - live.joint[0]) > 0.4)) // SPEC.executed * SPEC.executed
    undisturbed = follow(course, motions[: half + 9], live.gripper)
    motions[half + 1 :] = motions[0]
    phases = follow(course, motions[: half + 9], live.gripper)
    moved = int(np.argmax(np.abs(store.demonstration(0, task).joint - live.joint[0]) > 0.05))
    assert undisturbed[-1] > moved + SPEC.executed and phases[-1] <= moved


@pytest.mark.parametrize("task", TASKS)
def test_a_lost_hand_returns_to_where_the_reference_came_down(store: Store, task: Task) -> None:
    """On the wrong side of the door no frame fits: the phase waits at the pre-contact frame until the hand is back."""
    reference, live = store.demonstration(0, task), store.demonstration(0, opposite(task, "door"))
    course = course_of(reference)
    height = reference.gripper[:, 2]
    contact = int(np.argmax(np.abs(reference.joint - reference.joint[0]) > 0.02))
    before = course.pre_contact_frame()
    assert 0 < before < contact and height[contact] + 0.03 < height[before] < height[0] - 0.03
    wrong = live.gripper[int(np.argmax(np.abs(live.joint - live.joint[0]) > 0.02))]  # where the other task pushes
    begun = Progress(60, np.zeros(3), 60)
    lost = seen_phase(course, np.eye(4), wrong, begun, 68)
    assert lost.returning and lost.phase == before
    beside = seen_phase(course, np.eye(4), wrong + np.array([0, 0, 0.05]), lost, 76)
    assert beside.returning and beside.phase == before
    found = seen_phase(course, np.eye(4), reference.gripper[before - 2], beside, 84)
    assert not found.returning and abs(found.phase - before) <= SPEC.executed
    assert not seen_phase(course, np.eye(4), reference.gripper[contact] + [0.02, 0, 0], begun, 68).returning


@pytest.mark.parametrize("task", TASKS)
def test_the_last_return_is_waited_for(store: Store, task: Task) -> None:
    """Four times a hand goes back to before the contact; it is lost when it is off-track once more."""
    reference, live = store.demonstration(0, task), store.demonstration(0, opposite(task, "door"))
    course = course_of(reference)
    wrong = live.gripper[int(np.argmax(np.abs(live.joint - live.joint[0]) > 0.02))]
    progress = Progress(60, np.zeros(3), 60, furthest=60, since=60)
    for n in range(4):
        lost = seen_phase(course, np.eye(4), wrong, progress, progress.elapsed + 8)
        assert lost.returning and lost.returns == n + 1 and not lost.stuck()
        found = seen_phase(course, np.eye(4), reference.gripper[course.pre_contact_frame()], lost, lost.elapsed + 56)
        assert not found.returning and not found.stuck(), "a return takes its time, and then there is progress again"
        progress = dataclasses.replace(found, phase=60, elapsed=found.elapsed + 16)
    again = seen_phase(course, np.eye(4), wrong, progress, progress.elapsed + 8)
    assert not again.returning and again.stuck() == "the hand was off its track 5 times"
    later = seen_phase(course, np.eye(4), wrong, again, again.elapsed + 8)
    assert later.stuck() == again.stuck()


def sliding() -> Course:
    """A drawer that is pushed in by 10 cm between frames 40 and 65, by a hand that keeps to it until frame 160."""
    slide = np.tile(np.eye(4), (180, 1, 1))
    slide[40:, 1, 3] = np.minimum(np.arange(140) * 0.001, 0.12)
    hand = slide[:, :3, 3] + [0.0, -0.1, 0.0]
    hand[:40] = np.linspace([0, -0.3, 0.2], [0, -0.1, 0.0], 40)
    return Course(np.random.default_rng(0).normal(size=(16, 3)) * 0.05, slide, hand)


def test_an_object_that_is_set_back_is_no_episode_that_does_not_get_on() -> None:
    """What had been reached is reached again, which takes longer than a hand may stand; one that stands is stuck."""
    course, progress = sliding(), Progress(0, None)
    seen = [*range(0, 140, 8), *[k for _ in range(2) for k in range(48, 144, 8)], 144, 152]
    for n, k in enumerate(seen):
        progress = seen_phase(course, course.motion[k], course.gripper[k], progress if n else None, 8 * n)
        assert abs(progress.phase - k) <= SPEC.executed and not progress.stuck(), (n, k)
    assert progress.set_backs == 2
    for n in range(len(seen), len(seen) + 18):
        progress = seen_phase(course, course.motion[100], course.gripper[100], progress, 8 * n)
    assert progress.stuck().startswith("no progress for")
    for n in range(9):  # for ever pushed in and back again
        k = 48 + 40 * (n % 2)
        progress = seen_phase(course, course.motion[k], course.gripper[k], progress, 500 + 8 * n)
    assert progress.set_backs == 3 and progress.stuck()


def test_a_reference_that_is_taken_up_later_knows_how_the_object_stood() -> None:
    """A drawer that was pulled out by 6 cm is not one that stands 6 cm nearer."""
    points, slide = np.random.default_rng(0).normal(size=(16, 3)) * 0.05, np.zeros((100, 4, 4))
    slide[:] = np.eye(4)
    slide[40:, 1, 3] = np.minimum(np.arange(60) * 0.004, 0.1)  # pushed in by 10 cm
    course = Course(
        points,
        slide,
        np.concatenate([np.linspace([0, -0.3, 0.2], [0, -0.1, 0.0], 40), slide[40:, :3, 3] - [0, 0.1, 0]]),
    )
    now = np.eye(4)
    now[1, 3] = 0.06
    first = seen_phase(course, np.eye(4), course.gripper[0], None, 0)
    hand = course.gripper[40] + [0, 0.06, 0]
    assert seen_phase(course, now, hand, dataclasses.replace(first, elapsed=48), 48).phase > 50
    assert seen_phase(course, now, hand, None, 48).phase < 50


def test_motions_between_looks_are_interpolated(store: Store) -> None:
    whole = poses(store.demonstration(0, "open")) @ np.linalg.inv(poses(store.demonstration(0, "open"))[0])
    looks = [*range(0, 199, 8), 199]
    made = interpolated(looks, [whole[j] for j in looks], 200)
    np.testing.assert_allclose(made[looks], whole[looks], atol=1e-9)
    assert np.abs(made - whole).max() < 0.02
    np.testing.assert_array_equal(interpolated([0], [np.eye(4)], 3), np.tile(np.eye(4), (3, 1, 1)))


def test_retimed_points_are_those_of_the_other_frame(store: Store) -> None:
    demonstration, live = store.demonstration(0, "close"), store.demonstration(1, "close")
    course = course_of(demonstration)
    at = [ground_truth_matches(HANDLE_POINTS, poses(demonstration)[j], poses(live)[70]) for j in (30, 75)]
    moved = retimed(at[0], course.motion[75] @ np.linalg.inv(course.motion[30]))
    np.testing.assert_allclose(moved.p_ref, at[1].p_ref, atol=1e-9)
    np.testing.assert_array_equal(moved.p_live, at[1].p_live)


def test_motion_of_matches_is_the_motion() -> None:
    T = np.eye(4)
    T[:3, :3], T[:3, 3] = Rotation.from_rotvec([0.1, -0.4, 0.2]).as_matrix(), (0.1, 0.2, -0.3)
    matches = ground_truth_matches(HANDLE_POINTS, np.eye(4), T)
    found = motion_of(matches)
    assert found is not None
    np.testing.assert_allclose(found, T, atol=1e-9)
    matches.valid[3:] = False
    assert motion_of(matches) is None
