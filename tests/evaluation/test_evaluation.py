"""Closed-loop evaluation: rows depend on their rollout alone, successes are neither lost nor invented."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from memcorr.cli import main
from memcorr.correspondence.embedded.matcher import WEIGHTS, EmbeddedMatcher
from memcorr.correspondence.embedded.network import MatchNetwork
from memcorr.correspondence.matcher import weights_digest
from memcorr.correspondence.matches import ground_truth_matches
from memcorr.demos.collect import collect
from memcorr.demos.store import Store
from memcorr.errors import UserError
from memcorr.evaluation import controllers
from memcorr.evaluation.controllers import PolicyController, make_controller, rollout_noise
from memcorr.evaluation.episodes import EPISODES, Episode, find_episodes, read_episodes
from memcorr.evaluation.evaluate import check_same_files, evaluate, find_subject, list_jobs, normalised, usual
from memcorr.evaluation.intervention import Intervention
from memcorr.evaluation.rollout import SLOTS, Decision, Job, Response, roll_out
from memcorr.following.step import Relation
from memcorr.policy.checkpoint import write_model
from memcorr.policy.plan import Plan, Request
from memcorr.policy.policy import load_policy
from memcorr.policy.relations import build_relations, permute_pairs
from memcorr.report.lookup import first_chunk_follows
from memcorr.spec import SPEC, TASKS, TestSet
from memcorr.training.dataset import Dataset, measure
from memcorr.training.experiments import EXPERIMENTS, Config
from memcorr.worlds.pairs import HANDLE_POINTS
from memcorr.worlds.scenes import evaluation_scenes
from memcorr.worlds.world import World
from tests.test_files import ROW

TESTS: tuple[TestSet, ...] = ("boundary", "extreme", "camera", "combined")
TRUE = Intervention(matcher="ground-truth")


def actions(answer: Response) -> np.ndarray:
    assert answer.plan is not None
    return answer.plan.actions


def rows_of(folder: Path) -> list[Episode]:
    return [dataclasses.replace(e, seconds=0.0) for e in read_episodes(folder / EPISODES)]


@pytest.fixture(scope="module")
def one_worker(checkpoints: dict[str, str], store: Store, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("one-worker")
    evaluate(checkpoints["memcorr"], out, shown=TRUE, scenes=range(2), data=store.root)
    return out


def test_the_oracle_always_succeeds_and_zeros_never(tmp_path: Path) -> None:
    oracle = evaluate("expert", tmp_path, conditions=TESTS, scenes=range(3))
    assert len(oracle) == 24 and all(row.success for row in oracle)
    assert all(row.first_chunk_direction == row.task for row in oracle)
    nothing = evaluate("zeros", tmp_path, conditions=TESTS, scenes=range(1))
    assert not any(row.success for row in nothing)
    assert {(row.steps, row.replans, row.first_chunk_direction) for row in nothing} == {(200, 25, "")}
    assert len(rows_of(tmp_path)) == 32


@pytest.mark.long
def test_two_workers_write_the_rows_of_one(
    one_worker: Path, checkpoints: dict[str, str], store: Store, tmp_path: Path
) -> None:
    evaluate(checkpoints["memcorr"], tmp_path, shown=TRUE, scenes=range(2), data=store.root, workers=2)
    assert rows_of(tmp_path) == rows_of(one_worker)
    assert len(rows_of(tmp_path)) == 4


def test_one_scene_alone_gives_the_same_rows(
    one_worker: Path, checkpoints: dict[str, str], store: Store, tmp_path: Path
) -> None:
    evaluate(checkpoints["memcorr"], tmp_path, shown=TRUE, scenes=[1], tasks=["close"], data=store.root)
    assert rows_of(tmp_path) == [e for e in rows_of(one_worker) if (e.scene, e.task) == (1, "close")]


@pytest.mark.long
def test_a_killed_run_continues_without_repeating_or_losing(tmp_path: Path) -> None:
    """Killed with two workers in the middle, then its last line cut in half by hand."""
    whole = tmp_path / "whole"
    evaluate("expert", whole, scenes=range(12))
    command = [sys.executable, "-c", "from memcorr.cli import main; main()", "evaluate", "expert"]
    command += ["--out", str(tmp_path / "killed"), "--workers", "2", "--scenes", *map(str, range(12))]
    path = tmp_path / "killed" / EPISODES
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while (not path.exists() or not path.read_bytes()) and process.poll() is None:
        time.sleep(0.01)
    process.kill()
    process.wait()
    finished = path.read_bytes().splitlines(keepends=True)
    assert 0 < len(finished) < 24, "killed in the middle"
    path.write_bytes(b"".join(finished)[:-40])
    kept = read_episodes(path)
    assert len(kept) >= len(finished) - 2
    evaluate("expert", tmp_path / "killed", scenes=range(12))
    assert rows_of(tmp_path / "killed") == rows_of(whole) and len(rows_of(whole)) == 24
    assert set(kept) <= set(read_episodes(path)), "rows that were there are not rolled out again"


def test_rows_carry_the_promised_fields_in_order(one_worker: Path) -> None:
    promised = [
        "experiment",
        "train_seed",
        "condition",
        "scene",
        "scene_seed",
        "u",
        "camera_azimuth_deg",
        "task",
        "reference",
        "matcher",
        "phase_offset",
        "phase_speed",
        "success",
        "steps",
        "replans",
        "fallback_replans",
        "mean_match_error_mm",
        "first_chunk_direction",
        "final_joint",
        "seconds",
    ]
    lines = (one_worker / EPISODES).read_text().splitlines()
    for line in lines:
        assert list(json.loads(line))[: len(promised)] == promised
    row = json.loads(lines[0])
    assert (row["experiment"], row["train_seed"], row["stage"]) == ("memcorr", 42, "final")
    assert row["mean_match_error_mm"] == 0 and row["camera_azimuth_deg"] in (-15, 15)


def test_damaged_and_contradicting_files_are_named(one_worker: Path, tmp_path: Path) -> None:
    lines = (one_worker / EPISODES).read_text().splitlines(keepends=True)
    (tmp_path / EPISODES).write_text("".join([lines[0], "nonsense\n", *lines[1:]]))
    with pytest.raises(UserError, match="line 2 is not a rollout"):
        read_episodes(tmp_path / EPISODES)
    flipped = {**json.loads(lines[0]), "success": not json.loads(lines[0])["success"]}
    (tmp_path / EPISODES).write_text(json.dumps(flipped) + "\n")
    with pytest.raises(UserError, match="contradicts"):
        find_episodes([one_worker, tmp_path])
    with pytest.raises(UserError, match=r"holds no episodes\.jsonl"):
        find_episodes([tmp_path / "nowhere"])


def test_another_checkpoint_never_completes_a_file(
    one_worker: Path, checkpoints: dict[str, str], store: Store, dataset: Dataset, tmp_path: Path
) -> None:
    experiment = EXPERIMENTS["memcorr"]
    torch.manual_seed(1)
    other = tmp_path / "other"
    network = experiment.build()
    write_model(other, Config(experiment, 42, "none").json(), network, measure([dataset]), experiment.total_updates)
    with pytest.raises(UserError, match="another checkpoint"):
        evaluate(str(other), one_worker, shown=TRUE, scenes=range(2), data=store.root)


def test_other_references_never_complete_a_file(
    one_worker: Path, checkpoints: dict[str, str], store: Store, tmp_path: Path
) -> None:
    """Rows name the reference's file: other demonstrations under the same name are not the same rollout."""
    other = tmp_path / "other"
    collect(other, pairs=1, seed=5, workers=1)
    with pytest.raises(UserError, match="another reference"):
        evaluate(checkpoints["memcorr"], one_worker, shown=TRUE, scenes=range(2), data=other)


def test_other_weights_of_the_matcher_never_complete_a_file() -> None:
    """They change under one name; a row without the digest says nothing about it."""
    row = dataclasses.replace(ROW, matcher_weights="0123456789ab")
    check_same_files(Path(EPISODES), row, row)
    check_same_files(Path(EPISODES), dataclasses.replace(row, matcher_weights=""), row)
    with pytest.raises(UserError, match=r"episodes\.jsonl holds rollouts with another matcher"):
        check_same_files(Path(EPISODES), row, dataclasses.replace(row, matcher_weights="ba9876543210"))


def test_no_tasks_are_both_also_for_a_video(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--tasks` without any once left nothing to film."""
    asked: list[Any] = []

    def rolled(*_: Any, **given: Any) -> list[Episode]:
        asked.append(given)
        return [ROW]

    monkeypatch.setattr("memcorr.evaluation.evaluate.evaluate", rolled)
    monkeypatch.setattr("memcorr.show.story.watch", lambda *given: asked.append(given[2]))
    monkeypatch.setattr("memcorr.show.video.write_video", lambda *_: "a film")
    line = ["memcorr", "evaluate", "expert", "--tasks", "--video", "--data", "x", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", line)
    main()
    assert asked[0]["tasks"] == () and asked[1] == ROW
    assert {job.task for job in list_jobs(("combined",), 0, asked[0]["tasks"])} == {"open", "close"}


def test_a_checkpoint_replaced_meanwhile_is_noticed(checkpoints: dict[str, str], store: Store) -> None:
    subject = find_subject(checkpoints["memcorr"])
    make_controller(subject.policy, store.root, TRUE, subject.checkpoint)
    with pytest.raises(UserError, match="replaced meanwhile"):
        make_controller(subject.policy, store.root, TRUE, "0123456789ab")


@pytest.mark.parametrize("ending", ["\r\n", "\r", "\n"])
def test_other_line_ends_lose_nothing(
    ending: str, one_worker: Path, checkpoints: dict[str, str], store: Store, tmp_path: Path
) -> None:
    """Nor are they destroyed by the next `evaluate`, which writes the file anew."""
    text = (one_worker / EPISODES).read_text()
    (tmp_path / EPISODES).write_bytes(text.replace("\n", ending).encode())
    assert read_episodes(tmp_path / EPISODES) == read_episodes(one_worker / EPISODES)
    for end in (ending, ""):
        (tmp_path / EPISODES).write_bytes((text.rstrip("\n").replace("\n", ending) + end).encode())
        evaluate(checkpoints["memcorr"], tmp_path, shown=TRUE, scenes=range(2), data=store.root)
        assert (tmp_path / EPISODES).read_text() == text
    (tmp_path / EPISODES).write_bytes(text.rstrip("\n").encode())  # an intact last line without its end
    assert read_episodes(tmp_path / EPISODES) == read_episodes(one_worker / EPISODES)
    (tmp_path / EPISODES).write_bytes(text[:-40].encode())
    assert read_episodes(tmp_path / EPISODES) == read_episodes(one_worker / EPISODES)[:-1]


def test_evaluation_leaves_its_caller_as_it_was(tmp_path: Path) -> None:
    torch.set_num_threads(2)
    try:
        evaluate("zeros", tmp_path, scenes=[0], tasks=["open"])
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("name", "matcher"),
    [("memcorr", "embedded"), ("memcorr", "flow"), ("memcorr", "ground-truth"), ("visual-transformer", "none")],
)
def test_a_plan_does_not_depend_on_its_neighbours(
    name: str,
    matcher: str,
    checkpoints: dict[str, str],
    store: Store,
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Bit for bit: alone, in company, at any place in the batch. The embedded matcher with random weights."""
    if matcher == "embedded":
        save_file(MatchNetwork().state_dict(), tmp_path / "weights.safetensors")
        monkeypatch.setattr(controllers, "load_matcher", lambda _: EmbeddedMatcher(tmp_path / "weights.safetensors"))
    policy = load_policy(checkpoints[name], "cpu")
    demonstrations = {task: store.demonstration(0, task) for task in TASKS}
    controller = PolicyController(policy, demonstrations, Intervention(matcher=matcher))
    decisions = []
    for scene in evaluation_scenes("combined")[: SLOTS // 2]:
        for task in TASKS:
            world.reset(scene)
            decisions.append(
                Decision(Job(scene, task), 3, 24, world.observe(), world.T_world_object, world.robot_state)
            )
    together = controller.decide(decisions)
    backwards = controller.decide(decisions[::-1])[::-1]
    for decision, a, b in zip(decisions, together, backwards, strict=True):
        (alone,) = controller.decide([decision])
        assert np.array_equal(actions(a), actions(alone)) and np.array_equal(actions(a), actions(b))
        assert a.match_error_mm == alone.match_error_mm == b.match_error_mm


def test_noise_depends_on_seed_scene_task_and_replan_alone(world: World) -> None:
    scene, other = evaluation_scenes("combined")[:2]
    base = Decision(Job(scene, "open"), 2, 16, None, np.eye(4), np.zeros(9))
    noise = rollout_noise(42, base)
    late = dataclasses.replace(base, elapsed=99, T_world_object=np.zeros((4, 4)))
    assert np.array_equal(noise, rollout_noise(42, late))
    for seed, decision in (
        (43, base),
        (42, dataclasses.replace(base, replan=3)),
        (42, dataclasses.replace(base, job=Job(scene, "close"))),
        (42, dataclasses.replace(base, job=Job(other, "open"))),
        (42, dataclasses.replace(base, job=Job(dataclasses.replace(scene, seed=1), "open"))),
        (42, dataclasses.replace(base, job=Job(dataclasses.replace(scene, condition="extreme"), "open"))),
    ):
        assert not np.array_equal(noise, rollout_noise(seed, decision))


class Recorder:
    """Answers with small pushes and remembers what it was asked."""

    sees = False

    def __init__(self) -> None:
        self.asked: list[Decision] = []

    def decide(self, decisions: Sequence[Decision]) -> list[Response]:
        self.asked += decisions
        actions = np.zeros((SPEC.chunk, SPEC.action_dim))
        actions[SPEC.executed :] = np.nan  # the second half must never be executed
        return [Response(Plan(actions)) for _ in decisions]


def test_eight_of_sixteen_actions_are_executed(world: World) -> None:
    recorder = Recorder()
    jobs = list_jobs(["boundary"], 0, TASKS, [0])
    outcomes = dict(roll_out(world, recorder, iter(jobs)))
    assert [d.elapsed for d in recorder.asked if d.job == jobs[0]] == list(range(0, 200, 8))
    assert {outcome.steps for outcome in outcomes.values()} == {200}


def test_broken_physics_is_a_failure_not_a_closed_door(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MuJoCo restarts from its default pose, where the door is shut; that must not count."""
    monkeypatch.chdir(tmp_path)  # MuJoCo logs the breakdown to a file in the working directory

    class Breaks:
        sees = False

        def decide(self, decisions: Sequence[Decision]) -> list[Response]:
            world.data.qvel[:] = 1e12
            monkeypatch.setattr(world, "restore", lambda *given: None)  # goes on from the broken state
            return [Response(Plan(np.zeros((16, 4)))) for _ in decisions]

    (job,) = list_jobs(["boundary"], 0, ["close"], [0])
    ((_, outcome),) = roll_out(world, Breaks(), iter([job]))
    assert not outcome.success and outcome.steps < 200
    monkeypatch.undo()
    ((_, healthy),) = roll_out(world, Recorder(), iter([job]))
    assert healthy.steps == 200, "the next rollout starts clean"


def test_an_action_that_is_no_number_is_a_failure(world: World) -> None:
    class Nonsense:
        sees = False

        def decide(self, decisions: Sequence[Decision]) -> list[Response]:
            return [Response(Plan(np.full((16, 4), np.nan))) for _ in decisions]

    ((_, outcome),) = roll_out(world, Nonsense(), iter(list_jobs(["boundary"], 0, ["close"], [0])))
    assert (outcome.success, outcome.steps, outcome.first_chunk_direction) == (False, 1, "")


def test_interventions_change_what_the_policy_is_shown(checkpoints: dict[str, str], store: Store, world: World) -> None:
    policy = load_policy(checkpoints["memcorr"], "cpu")
    demonstrations = {task: store.demonstration(0, task) for task in TASKS}
    scene = evaluation_scenes("boundary")[0]
    world.reset(scene)
    frame, pose = world.observe(), world.T_world_object
    decision = Decision(Job(scene, "open"), 2, 16, frame, pose, frame.robot_state)

    def chunk(**changes: object) -> np.ndarray:
        shown = dataclasses.replace(Intervention(matcher="ground-truth"), **changes)  # type: ignore[arg-type]
        given = {} if shown.reference == "empty" else demonstrations
        (answer,) = PolicyController(policy, given, shown).decide([decision])
        return actions(answer)

    def expected(task: str, j: int, permuted: bool = False) -> np.ndarray:
        demonstration = store.demonstration(0, task)
        assert demonstration.object_pose is not None
        matches = ground_truth_matches(HANDLE_POINTS, demonstration.object_pose[j], pose)
        matches = permute_pairs(matches) if permuted else matches
        relations = build_relations(matches, frame.gripper, demonstration.gripper, j)
        assert relations.valid.all()
        request = Request(Relation(frame, demonstration, j, matches), rollout_noise(42, decision))
        return policy.plan([request], SLOTS)[0].actions

    assert np.array_equal(chunk(), expected("open", 16))
    assert np.array_equal(chunk(reference="opposite"), expected("close", 16))
    assert np.array_equal(chunk(phase_offset=16), expected("open", 32))
    assert np.array_equal(chunk(phase_speed=1.25), expected("open", 20))
    assert np.array_equal(chunk(pairing="permuted"), expected("open", 16, permuted=True))
    empty = chunk(reference="empty", matcher="none")
    assert not np.array_equal(empty, chunk())


def test_meaningless_interventions_are_refused(checkpoints: dict[str, str], store: Store, tmp_path: Path) -> None:
    for policy, shown, message in (
        ("shipped-not", Intervention(), "holds no policy"),
        ("expert", Intervention(reference="opposite"), "follows no reference"),
        (checkpoints["visual-unet"], Intervention(reference="empty"), "never trained without"),
        (checkpoints["visual-transformer"], Intervention(phase_offset=8), "no phase"),
        (checkpoints["motion-literal"], Intervention(pairing="permuted"), "no point pairs"),
        (checkpoints["memcorr"], Intervention(matcher="magic"), "unknown matcher"),
        (checkpoints["motion-literal"], Intervention(phase_from="seen"), "needs a policy with pairs"),
        (checkpoints["memcorr"], Intervention(phase_from="seen", phase_offset=8), "no other phase"),
    ):
        with pytest.raises(UserError, match=message):
            evaluate(policy, tmp_path, shown=shown, data=store.root)
    with pytest.raises(UserError, match="has scenes 0 to 24"):
        evaluate("expert", tmp_path, scenes=[25])
    with pytest.raises(UserError, match="holds no demonstrations"):
        evaluate(checkpoints["memcorr"], tmp_path, shown=TRUE, scenes=[0], data=tmp_path / "nowhere")


def test_a_missing_shipped_policy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memcorr.policy.policy.SHIPPED", tmp_path / "nowhere")
    with pytest.raises(UserError, match="ships no policy"):
        evaluate("shipped", tmp_path)


def test_visual_and_motion_policies_decide_without_a_matcher(
    checkpoints: dict[str, str], store: Store, world: World
) -> None:
    scene = evaluation_scenes("combined")[0]
    world.reset(scene)
    decisions = [
        Decision(Job(scene, task), 0, 0, world.observe(), world.T_world_object, world.robot_state) for task in TASKS
    ]
    for name in ("motion-literal", "visual-transformer", "visual-unet"):
        subject = find_subject(checkpoints[name])
        plans = {}
        for reference in ("correct", "opposite"):
            shown = normalised(subject, Intervention(reference=reference))
            assert shown.matcher == "none"
            plans[reference] = make_controller(subject.policy, store.root, shown).decide(decisions)
        for answer in plans["correct"]:
            assert answer.match_error_mm is None and answer.plan is not None and not answer.plan.fallback
        assert not np.array_equal(actions(plans["correct"][0]), actions(plans["opposite"][0]))


@pytest.mark.long
def test_the_shipped_policy_does_as_the_reference_shows(store: Store, tmp_path: Path) -> None:
    """Two fresh scenes of the combined shift, both tasks, right and opposite reference."""
    assert find_subject("shipped").stage == "final"
    for reference, successes in (("correct", 4), ("opposite", 0)):
        rows = evaluate(
            "shipped",
            tmp_path,
            shown=usual("shipped", Intervention(reference=reference)),  # type: ignore[arg-type]
            scene_seed=5,
            scenes=[0, 1],
            data=store.root,
        )
        assert sum(row.success for row in rows) == successes
        assert all(first_chunk_follows(row) for row in rows)


@pytest.mark.long
def test_the_phase_may_come_from_what_is_seen(store: Store, tmp_path: Path) -> None:
    """A policy that was trained on a clock does as well where nothing disturbs it; any weights will do."""
    own = tmp_path / "mine.safetensors"
    shutil.copy(WEIGHTS, own)
    shown = Intervention(matcher=str(own), phase_from="seen")
    rows = evaluate("shipped", tmp_path, conditions=["camera"], shown=shown, scene_seed=5, scenes=[0], data=store.root)
    assert all(row.success for row in rows)
    assert {row.shown.matcher for row in rows} == {f"mine-{weights_digest('embedded')[:6]}"}
    again = json.loads((tmp_path / EPISODES).read_text().splitlines()[0])
    assert (again["phase_from"], again["lifting"]) == ("seen", "rigid")
