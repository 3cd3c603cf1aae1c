"""`memcorr.load_policy`: what a practitioner calls."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import memcorr
from memcorr.batches import Batches
from memcorr.checkpoints import Config, write_model
from memcorr.conditions import stack_conditions
from memcorr.controllers import Intervention, PolicyController, make_controller
from memcorr.dataset import Dataset
from memcorr.demos import Store
from memcorr.errors import UserError
from memcorr.experiments import EXPERIMENTS
from memcorr.matching import match_references
from memcorr.normalisation import measure
from memcorr.policy import Policy, initial_noise
from memcorr.protocol import TASKS
from memcorr.rollout import Decision, Job
from memcorr.scenes import evaluation_scenes
from memcorr.sim import DoorWorld

NAMES = [name for name in EXPERIMENTS if name != "debug"]


@pytest.fixture(scope="module")
def folders(dataset: Dataset, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """An untrained checkpoint of every experiment."""
    root = tmp_path_factory.mktemp("policies")
    normalisation = measure(dataset.windows, dataset.images)
    for name in NAMES:
        experiment = EXPERIMENTS[name]
        write_model(root / name, Config(experiment, 42, "none"), experiment.build(), normalisation, update=0)
    return {name: root / name for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_live_conditions_are_the_training_conditions(
    name: str, folders: dict[str, Path], dataset: Dataset, store: Store
) -> None:
    policy = memcorr.load_policy(folders[name])
    row = int(dataset.rows(np.array([1]), np.array([77]))[0])  # pair 0, closing
    rows = np.array([row])
    batches = Batches(dataset, policy.normalisation, policy.experiment)
    trained = batches.condition(rows, dataset.ground_truth(rows))
    matches = dataset.ground_truth(np.array(row))  # no batch axis, as in a rollout
    live = policy.condition(
        store.demonstration(0, "close").frame(77),
        matches=matches if policy.needs_matches else None,
        gripper_ref=store.demonstration(1, "close").gripper,
        j=int(dataset.reference_frame[row]),
        task="close",
    )
    for field in dataclasses.fields(trained):
        a, b = getattr(trained, field.name), getattr(live, field.name)
        assert (a is None and b is None) or torch.equal(a, b), field.name


@pytest.mark.parametrize("name", NAMES)
def test_chunks_are_actions_of_the_robot(name: str, folders: dict[str, Path], store: Store, dataset: Dataset) -> None:
    policy = memcorr.load_policy(folders[name], device="cpu")
    demonstration = store.demonstration(0, "open")
    condition = policy.condition(
        demonstration.frame(0),
        matches=dataset.ground_truth(np.array(0)),
        gripper_ref=demonstration.gripper,
        task="open",
    )
    pair = stack_conditions([condition, condition])
    noise = np.stack([initial_noise(42, 0), initial_noise(42, 1)])
    chunks = policy.plan(pair, noise)
    assert chunks.shape == (2, 16, 4) and np.abs(chunks).max() <= 1
    assert not np.array_equal(chunks[0], chunks[1])
    assert np.array_equal(chunks, policy.plan(pair, noise))


def test_an_empty_reference_is_a_dropped_condition(folders: dict[str, Path], store: Store, dataset: Dataset) -> None:
    policy = memcorr.load_policy(folders["memcorr"])
    demonstration = store.demonstration(0, "open")
    frame, noise = demonstration.frame(0), initial_noise(1)[None]
    full = policy.condition(frame, matches=dataset.ground_truth(np.array(0)), gripper_ref=demonstration.gripper)
    empty = policy.condition(frame)
    assert not empty.keep.any()
    assert np.array_equal(policy.plan(empty, noise), policy.plan(full.drop(), noise))
    assert not np.array_equal(policy.plan(empty, noise), policy.plan(full, noise))


def test_a_follower_plans_what_the_rollout_plans(folders: dict[str, Path], store: Store, world: DoorWorld) -> None:
    """The practitioner's path and the evaluation's are one: same phase, same matches, same relations."""
    scene = evaluation_scenes("combined")[0]
    world.reset(scene)
    for action in (0.3, 0.0, -0.2, 0.2), (0.1, 0.1, -0.3, 0.2):
        world.step(np.array(action))
    frame, elapsed = world.observe(), 16
    policy = memcorr.load_policy(folders["memcorr"])
    chunks = {}
    for task in TASKS:
        reference = store.demonstration(0, task)
        decision = Decision(Job(scene, task), 2, elapsed, frame, world.T_world_door)
        controller = make_controller(folders["memcorr"], store.root, Intervention())
        assert isinstance(controller, PolicyController)
        (plan,) = controller.decide([decision])
        follower = policy.follow(reference)
        chunks[task] = follower.plan(frame, elapsed)
        assert np.array_equal(chunks[task], follower.plan(frame, elapsed))
        assert follower.matcher is not None
        matches = match_references(follower.matcher, [follower._prepared[elapsed]], [frame])[0]
        assert plan.matches is not None and np.allclose(matches.p_live, plan.matches.p_live, atol=1e-4)
        condition = policy.condition(frame, matches=plan.matches, gripper_ref=reference.gripper, j=elapsed)
        assert np.allclose(chunks[task], policy.plan(condition, initial_noise(0, elapsed)[None])[0], atol=1e-2)
    assert not np.allclose(chunks["open"], chunks["close"], atol=1e-2)
    with pytest.raises(UserError, match="follows no reference"):
        memcorr.load_policy(folders["visual-unet"]).follow(reference)


def test_noise_is_a_pure_function_of_its_key() -> None:
    assert np.array_equal(initial_noise(42, 3, 1, 7), initial_noise(42, 3, 1, 7))
    assert not np.array_equal(initial_noise(42, 3, 1, 7), initial_noise(42, 3, 7, 1))
    many = np.stack([initial_noise(0, i) for i in range(500)])
    assert abs(many.mean()) < 0.02 and abs(many.std() - 1) < 0.02


def test_a_policy_needs_no_simulator() -> None:
    code = "import sys, memcorr.policy; assert not {'mujoco', 'metaworld', 'gymnasium'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_damaged_checkpoints_are_named(folders: dict[str, Path], tmp_path: Path) -> None:
    source = folders["memcorr"]
    config, model = (source / name for name in ("config.json", "model.safetensors"))

    def load(config_text: str | None, model_bytes: bytes | None) -> Policy:
        folder = tmp_path / "damaged"
        folder.mkdir(exist_ok=True)
        for name, content in (("config.json", config_text), ("model.safetensors", model_bytes)):
            (folder / name).unlink(missing_ok=True)
            if content is not None:
                (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        return memcorr.load_policy(folder)

    good_text, good_bytes = config.read_text(), model.read_bytes()
    assert load(good_text, good_bytes).experiment.name == "memcorr"
    for text, content, message in (
        (None, good_bytes, "config.json is missing"),
        (good_text, None, "model.safetensors does not exist"),
        (good_text, good_bytes[:5000], "is damaged"),
        (good_text, b"", "is damaged"),
        (good_text[:50], good_bytes, "not valid JSON"),
        ("{}", good_bytes, "not a configuration"),
        (good_text.replace('"format": 1', '"format": 2'), good_bytes, "this memcorr reads 1"),
        (good_text.replace('"network": "memcorr"', '"network": "visual-unet"'), good_bytes, "does not fit"),
    ):
        with pytest.raises(UserError, match=message):
            load(text, content)
    with pytest.raises(UserError, match="holds no policy"):
        memcorr.load_policy(tmp_path / "nowhere")
