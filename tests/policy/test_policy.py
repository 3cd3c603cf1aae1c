"""`memcorr.load_policy`: what a practitioner calls."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load, save

import memcorr
from memcorr.correspondence.flow import FlowMatcher
from memcorr.demos.store import Demonstration, Store, read_demonstration, write_demonstration
from memcorr.errors import UserError
from memcorr.evaluation.controllers import make_controller, rollout_noise
from memcorr.evaluation.evaluate import evaluate, usual
from memcorr.evaluation.intervention import GROUND_TRUTH, Intervention
from memcorr.evaluation.rollout import SLOTS, Decision, Job, Memory
from memcorr.following.step import Observation, Query, Relation
from memcorr.frames import Camera, Frame
from memcorr.policy.checkpoint import write_model
from memcorr.policy.networks.diffusion import ddim_sample
from memcorr.policy.plan import Request, initial_noise
from memcorr.policy.policy import Policy, load_trained
from memcorr.spec import TASKS
from memcorr.training.batches import Batches
from memcorr.training.dataset import Simulated, measure
from memcorr.training.experiments import EXPERIMENTS, Config
from memcorr.worlds.scenes import evaluation_scenes
from memcorr.worlds.world import World
from tests.test_files import quick
from tests.torture.inputs import wrong_frame

NAMES = [name for name in EXPERIMENTS if name != "debug"]


@pytest.fixture(scope="module")
def folders(dataset: Simulated, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """An untrained checkpoint of every experiment."""
    root = tmp_path_factory.mktemp("policies")
    for name in NAMES:
        experiment = EXPERIMENTS[name]
        normalisation = measure([dataset], experiment)
        torch.manual_seed(42)  # as a training with this seed begins
        write_model(root / name, Config(experiment, 42, "none").json(), experiment.build(), normalisation, update=0)
    return {name: root / name for name in NAMES}


def request(
    policy: Policy, dataset: Simulated, demonstration: Demonstration, row: int, reference: Demonstration, noise: int = 0
) -> Request:
    """What a live rollout would ask for where training has `row`, with true matches."""
    anchor, j = int(dataset.windows.anchor[row]), int(dataset.reference_frame[row])
    matches = dataset.own_matches(np.array(row)) if policy.design.needs_matches else None  # no batch axis
    frame = demonstration.frame(anchor)
    return Request(Relation(frame, reference, j, matches), initial_noise(42, noise), TASKS.index(demonstration.task))


@pytest.mark.parametrize("name", NAMES)
def test_live_conditions_are_the_training_conditions(
    name: str, folders: dict[str, Path], dataset: Simulated, store: Store
) -> None:
    policy = load_trained(folders[name])
    row = int(dataset.rows(np.array([1]), np.array([77]))[0])  # pair 0, closing
    rows = np.array([row])
    batches = Batches(dataset, policy.normalisation, EXPERIMENTS[name])
    trained = batches.condition(rows, dataset.own_matches(rows))
    live = policy.condition(
        [request(policy, dataset, store.demonstration(0, "close"), row, store.demonstration(1, "close"))]
    )
    for field in dataclasses.fields(trained):
        a, b = getattr(trained, field.name), getattr(live, field.name)
        assert (a is None and b is None) or torch.equal(a, b), field.name


@pytest.mark.parametrize("name", NAMES)
def test_chunks_are_actions_of_the_robot(name: str, folders: dict[str, Path], store: Store, dataset: Simulated) -> None:
    policy = load_trained(str(folders[name]), device="cpu")
    a, b = (store.demonstration(pair, "open") for pair in (0, 1))
    requests = [request(policy, dataset, a, 0, b, noise) for noise in (0, 1)]
    plans = policy.plan(requests, slots=2)
    chunks = np.stack([plan.actions for plan in plans])
    assert chunks.shape == (2, 16, 4) and np.abs(chunks).max() <= 1
    assert not np.array_equal(chunks[0], chunks[1])
    assert all(np.array_equal(x.actions, y.actions) for x, y in zip(plans, policy.plan(requests, 2), strict=True))


def test_a_policy_samples_as_its_design_says(folders: dict[str, Path], store: Store, dataset: Simulated) -> None:
    """Schedule, steps, guidance and what is predicted: one full network evaluation after the other, by hand."""
    policy = load_trained(folders["memcorr-many"], "cpu")
    design = policy.design
    assert (design.schedule, design.predicts, design.guidance) == ("cosine", "velocity", 1.0)
    asked = request(policy, dataset, store.demonstration(0, "open"), 40, store.demonstration(1, "open"))
    condition, noise = policy.condition([asked]), torch.from_numpy(asked.noise)[None]
    with torch.no_grad():
        x_0 = ddim_sample(lambda z, t: policy.network(z, t, condition), noise, "cosine", design.ddim_steps, "velocity")
    by_hand = policy.normalisation.original_action(x_0[0].double().numpy())
    assert np.allclose(policy.plan([asked])[0].actions, np.clip(by_hand, -1, 1), atol=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_an_untrained_network_fails(name: str, folders: dict[str, Path], store: Store, tmp_path: Path) -> None:
    """What succeeds with fresh weights was not learned, and is no policy. True relations: nothing else is to blame."""
    shown = usual(folders[name], Intervention(matcher=GROUND_TRUTH))
    rows = evaluate(folders[name], tmp_path, conditions=["boundary"], shown=shown, scenes=range(4), data=store.root)
    assert len(rows) == 8 and sum(row.success for row in rows) <= 1


def test_an_empty_reference_is_a_dropped_condition(folders: dict[str, Path], store: Store, dataset: Simulated) -> None:
    policy = load_trained(folders["memcorr"])
    full = request(policy, dataset, store.demonstration(0, "open"), 0, store.demonstration(1, "open"))
    nothing = Request(Relation(full.relation.frame), full.noise)
    assert not policy.condition([nothing]).keep.any()
    chunks = [policy.plan([r])[0].actions for r in (full, nothing, dataclasses.replace(full, empty=True))]
    assert np.array_equal(chunks[1], chunks[2]) and not np.array_equal(chunks[0], chunks[1])


@pytest.mark.parametrize("name", ["memcorr", pytest.param("memcorr-many", marks=pytest.mark.long)])
def test_a_follower_plans_what_the_rollout_plans(
    name: str, folders: dict[str, Path], store: Store, world: World
) -> None:
    """The practitioner's path and the evaluation's are one, bit for bit, by the clock and by what is seen."""
    scene = evaluation_scenes("combined")[0]
    world.reset(scene)
    for action in (0.3, 0.0, -0.2, 0.2), (0.1, 0.1, -0.3, 0.2):
        world.step(np.array(action))
    frame, elapsed = world.observe(), 16
    policy = memcorr.load_policy(folders[name])
    chunks = {}
    for task in TASKS:
        decision = Decision(Job(scene, task), 2, elapsed, frame, world.T_world_object, world.robot_state)
        controller = make_controller(folders[name], store.root, usual(folders[name]))
        (answer,) = controller.decide([decision])
        follower = policy.follow(store.demonstration(0, task), slots=SLOTS)
        plan = follower.plan(frame, elapsed, noise=rollout_noise(42, decision))
        assert answer.plan is not None and np.array_equal(plan.actions, answer.plan.actions)
        assert plan.matches is not None and answer.plan.matches is not None
        assert np.array_equal(plan.matches.p_live, answer.plan.matches.p_live)
        assert plan.phase == answer.plan.phase and (plan.phase == 16 or name == "memcorr-many")
        assert (plan.fallback, plan.valid_points) == (False, answer.plan.valid_points)
        assert 0 < plan.confidence <= 1
        chunks[task] = policy.follow(store.demonstration(0, task)).plan(frame, elapsed).actions
    assert not np.allclose(chunks["open"], chunks["close"], atol=1e-2)
    with pytest.raises(UserError, match="follows no reference"):
        memcorr.load_policy(folders["visual-unet"]).follow(store.demonstration(0, "open"))


@pytest.mark.long
def test_a_chunk_continues_the_actions_that_are_made_while_it_is_planned(store: Store) -> None:
    """The shipped policy, late by four steps: its next action jumps less than without the prefix, in the mean."""
    policy, jumps = load_trained(), np.zeros(2)
    for task in TASKS:
        d = store.demonstration(1, task)
        follower, moves = policy.follow(store.demonstration(0, task)), d.action
        relations = follower.planner.following.step(
            [Query(Observation(d.frame(t)), follower.reference, t) for t in range(8, 72, 16)]
        )
        for number, relation in enumerate(relations):
            t = 8 + 16 * number
            made = np.clip(moves[t : t + 4] * 0.7, -1, 1)  # slower than it would itself
            for noise in range(6):
                asked = Request(relation, initial_noise(noise, t))
                free, bound = (
                    policy.plan([request])[0].actions for request in (asked, dataclasses.replace(asked, prefix=made))
                )
                assert np.array_equal(bound[:4], made) and not np.array_equal(bound[4:], free[4:])
                jumps += [np.abs(chunk[4, :3] - made[3, :3]).max() for chunk in (free, bound)]
    assert jumps[1] < jumps[0], jumps


def test_an_exchanged_reference_is_taken_up_as_in_a_rollout(
    folders: dict[str, Path], store: Store, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`Follower.swap` and `evaluate --swap` hold the new reference against the first frame of the episode, alike."""
    monkeypatch.setattr("memcorr.policy.plan.LARGEST_CHANGE", 2.0)  # what is not trained jumps
    folder, scene = folders["memcorr-many"], evaluation_scenes("combined")[0]
    controller = make_controller(folder, store.root, usual(folder, Intervention(swap=8)))
    follower = memcorr.load_policy(folder).follow(store.demonstration(0, "close"), slots=SLOTS)
    world.reset(scene)
    memory = Memory()
    for look in range(3):
        poses = world.T_world_object, world.robot_state
        decision = Decision(Job(scene, "open"), look, 8 * look, world.observe(), *poses, memory)
        (answer,) = controller.decide([decision])
        if look == 1:
            follower.swap(store.demonstration(0, "open"))
        assert decision.frame is not None and answer.plan is not None
        plan = follower.plan(decision.frame, 8 * look, noise=rollout_noise(42, decision))
        assert np.array_equal(plan.actions, answer.plan.actions) and plan.phase == answer.plan.phase
        memory = answer.memory
        for action in plan.actions[:8]:
            world.step(action)


@pytest.mark.parametrize("length", [2, 10, 16, 17, 120, 260])
def test_references_of_any_length_are_followed_to_their_end(
    length: int, folders: dict[str, Path], store: Store, tmp_path: Path
) -> None:
    whole = store.demonstration(0, "open")
    kept = [min(t, len(whole) - 1) for t in range(length)]
    path = tmp_path / "short.h5"
    write_demonstration(
        path, whole.frames(kept), whole.action[kept], whole.joint[kept], None, pair=0, task="open", u=whole.u
    )
    follower = memcorr.load_policy(folders["memcorr"]).follow(read_demonstration(path), matcher=FlowMatcher())
    phases = []
    for elapsed in (0, 8, 112, 199, 1000):
        plan = follower.plan(whole.frame(0), elapsed)
        assert np.isfinite(plan.actions).all() and not plan.unmatched
        phases.append(plan.phase)
    assert phases == sorted(phases) and phases[-1] == max(length - 16, 0)  # type: ignore[type-var]


def changed(frame: Frame, **changes: object) -> Frame:
    return dataclasses.replace(frame, **changes)  # type: ignore[arg-type]


NAN = float("nan")
WRONG: dict[str, tuple[Callable[[Frame], Frame], str]] = {
    "NaN state": (lambda f: changed(f, robot_state=np.full(9, NAN)), "robot_state holds NaN"),
    "infinite gripper": (lambda f: changed(f, gripper=np.array([0.0, np.inf, 0.0])), "gripper holds NaN"),
    "gripper in another galaxy": (lambda f: changed(f, gripper=np.full(3, 1e30)), "gripper reaches 1e\\+30"),
    "absurd focal length": (
        lambda f: changed(f, camera=Camera(1e9 * f.camera.K, f.camera.T_world_cam)),
        "pixels are expected",
    ),
    "state of one number": (lambda f: changed(f, robot_state=np.zeros(1)), "robot_state must have shape"),
    "state as a list": (lambda f: changed(f, robot_state=[0.0] * 9), "robot_state must be an array"),
    "depth in millimetres": (lambda f: changed(f, depth=1000 * f.depth), "millimetres"),
    "absurd depth": (lambda f: changed(f, depth=np.full_like(f.depth, 1e30)), "metres are expected"),
    "negative depth": (lambda f: changed(f, depth=-f.depth), "never negative"),
    "integer depth": (lambda f: changed(f, depth=f.depth.astype(np.uint16)), "depth must be an array"),
    "colours in [0, 1]": (lambda f: changed(f, rgb=(f.rgb / 255).astype(np.float32)), "scale colours"),
    "grey image": (lambda f: changed(f, rgb=f.rgb[..., 0]), "rgb must have shape"),
    "smaller image": (lambda f: changed(f, rgb=f.rgb[:64, :64]), "rgb must have shape"),
    "mask of bytes": (lambda f: changed(f, mask=f.mask.astype(np.uint8)), "mask must be an array of bool"),
    "NaN camera": (lambda f: changed(f, camera=Camera(f.camera.K, np.full((4, 4), NAN))), "T_world_cam holds NaN"),
    "camera of zeros": (lambda f: changed(f, camera=Camera(np.zeros((3, 3)), f.camera.T_world_cam)), "focal lengths"),
    "camera of image sizes": (
        lambda f: changed(f, camera=Camera(np.diag([1.2, 1.2, 1.0]), f.camera.T_world_cam)),
        "pixels are expected",
    ),
    "state in millimetres": (lambda f: changed(f, robot_state=1000 * f.robot_state), "robot_state reaches .*metres"),
    "sheared camera": (lambda f: changed(f, camera=Camera(f.camera.K, 2 * f.camera.T_world_cam)), "no rigid"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_frame_that_cannot_be_right_is_named(what: str, folders: dict[str, Path], store: Store) -> None:
    make, words = WRONG[what]
    reference = store.demonstration(0, "open")
    follower = memcorr.load_policy(folders["memcorr"]).follow(reference, matcher=FlowMatcher())
    with pytest.raises(ValueError, match=words):
        follower.plan(make(reference.frame(0)), 0)


def test_any_wrong_frame_is_named_or_answered_with_actions(folders: dict[str, Path], store: Store) -> None:
    reference = store.demonstration(0, "open")
    follower = memcorr.load_policy(folders["memcorr"]).follow(reference, matcher=FlowMatcher())
    good, seen = reference.frames(range(0, 200, 25)), {"named": 0, "answered": 0}

    @quick
    @given(st.integers(0, 2**32 - 1), st.integers(0, 7), st.integers(0, 300))
    def check(seed: int, k: int, elapsed: int) -> None:
        try:
            plan = follower.plan(wrong_frame(good[k], np.random.default_rng(seed)), elapsed)
        except ValueError as problem:
            assert re.search(r"rgb|depth|mask|camera|robot_state|gripper", str(problem))
            seen["named"] += 1
        else:
            assert np.isfinite(plan.actions).all() and np.abs(plan.actions).max() <= 1
            seen["answered"] += 1

    check()
    assert min(seen.values()) > 5, seen


def test_without_the_object_in_sight_the_plan_says_so(folders: dict[str, Path], store: Store) -> None:
    reference = store.demonstration(0, "open")
    frame = reference.frame(0)
    follower = memcorr.load_policy(folders["memcorr"]).follow(reference, matcher=FlowMatcher())
    assert not follower.plan(frame, 0).fallback
    for blind in (
        changed(frame, mask=np.zeros_like(frame.mask)),
        changed(frame, depth=np.zeros_like(frame.depth)),
        changed(frame, depth=np.full_like(frame.depth, NAN)),
    ):
        plan = follower.plan(blind, 0)
        assert plan.fallback and plan.confidence == 0 and plan.valid_points == 0
        assert np.isfinite(plan.actions).all()


def test_a_reference_that_cannot_be_right_is_named(folders: dict[str, Path], store: Store) -> None:
    policy, reference = memcorr.load_policy(folders["memcorr"]), store.demonstration(0, "open")
    gripper = reference.gripper.copy()
    gripper[7] = NAN
    with pytest.raises(UserError, match="gripper holds NaN"):
        policy.follow(dataclasses.replace(reference, gripper=gripper), matcher=FlowMatcher())
    action = reference.action.copy()
    action[7, 0] = np.inf
    with pytest.raises(UserError, match="action holds NaN or infinity"):
        policy.follow(dataclasses.replace(reference, action=action), matcher=FlowMatcher())
    with pytest.raises(UserError, match="at least two frames"):
        policy.follow(dataclasses.replace(reference, action=reference.action[:1]), matcher=FlowMatcher())


def test_noise_is_a_pure_function_of_its_key() -> None:
    assert np.array_equal(initial_noise(42, 3, 1, 7), initial_noise(42, 3, 1, 7))
    assert not np.array_equal(initial_noise(42, 3, 1, 7), initial_noise(42, 3, 7, 1))
    many = np.stack([initial_noise(0, i) for i in range(500)])
    assert abs(many.mean()) < 0.02 and abs(many.std() - 1) < 0.02


def test_a_policy_needs_no_simulator() -> None:
    code = "import sys, memcorr.policy.policy; assert not {'mujoco', 'metaworld', 'gymnasium'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_reading_a_policy_leaves_no_weight_to_chance(folders: dict[str, Path]) -> None:
    """Its network is built without initial values; whatever the file does not hold is as in a fresh one."""
    for name in ("memcorr", "visual-transformer", "visual-unet"):
        network = load_trained(folders[name], "cpu").network
        saved = load((folders[name] / "model.safetensors").read_bytes())
        state = network.state_dict()
        assert all(torch.equal(state[key], saved[f"network.{key}"]) for key in state)
        assert {key for key, _ in network.named_parameters()} <= set(state)
        fresh = dict(EXPERIMENTS[name].build().named_buffers())
        assert all(torch.equal(value, fresh[key]) for key, value in network.named_buffers() if key not in state)


def with_nan(model: bytes) -> bytes:
    tensors = load(model)
    tensors["network.out.bias"][0] = NAN
    return save(tensors, {"update": "0"})


def test_damaged_checkpoints_are_named(folders: dict[str, Path], tmp_path: Path) -> None:
    source = folders["memcorr"]
    config, model = (source / name for name in ("config.json", "model.safetensors"))

    def loaded(config_text: str | None, model_bytes: bytes | None) -> Policy:
        folder = tmp_path / "damaged"
        folder.mkdir(exist_ok=True)
        for name, content in (("config.json", config_text), ("model.safetensors", model_bytes)):
            (folder / name).unlink(missing_ok=True)
            if content is not None:
                (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        return load_trained(folder)

    good_text, good_bytes = config.read_text(), model.read_bytes()
    assert loaded(good_text, good_bytes).design.name == "memcorr"
    for text, content, message in (
        (None, good_bytes, "config.json is missing"),
        (good_text, None, "model.safetensors does not exist"),
        (good_text, good_bytes[:5000], "is damaged"),
        (good_text, b"", "is damaged"),
        (good_text[:50], good_bytes, "config.json is not a configuration"),
        ("{}", good_bytes, "not a configuration"),
        (good_text.replace('"format": 1', '"format": 2'), good_bytes, r"format 1 \(format: invalid enum value 2\)"),
        (good_text.replace('"name": "memcorr"', '"name": "../escaped/evil"'), good_bytes, "experiment.name"),
        (good_text.replace('"network": "memcorr"', '"network": "visual-unet"'), good_bytes, "does not fit"),
        (good_text.replace('"network": "memcorr"', '"network": "magic"'), good_bytes, r"experiment\.network: .*magic"),
        (good_text, with_nan(good_bytes), "not finite"),
    ):
        with pytest.raises(UserError, match=message):
            loaded(text, content)
    with pytest.raises(UserError, match="holds no policy"):
        memcorr.load_policy(tmp_path / "nowhere")
