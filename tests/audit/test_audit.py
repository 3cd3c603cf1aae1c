"""`memcorr audit`: who listens is told from who does not, on any policy and any environment, and honestly."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples.own_policy_audit import TapeRecorder
from memcorr.audit.audit import Online, audit
from memcorr.audit.evidence import (
    SHOWN,
    Prediction,
    Shown,
    Trial,
    checklist,
    of_predictions,
    of_trials,
    summarised,
    verdict,
    why_unsure,
)
from memcorr.audit.offline import audit_offline
from memcorr.audit.online import GymEnvironment, WorldEnvironment, audit_online, noised
from memcorr.demos.store import Demonstration, Store
from memcorr.errors import UserError
from memcorr.evaluation.evaluate import evaluate
from memcorr.policy.policy import load_policy
from memcorr.spec import SPEC, TASKS, Array
from memcorr.worlds.gym_env import PairEnv, observation_of
from memcorr.worlds.world import World

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tapes(store: Store) -> dict[str, Demonstration]:
    return {task: store.demonstration(0, task) for task in TASKS}


@pytest.mark.long
def test_rollouts_tell_who_listens(world: World, tapes: dict[str, Demonstration]) -> None:
    environment = WorldEnvironment("door", "validation", scenes=range(80, 85))
    attentive = of_trials(list(audit_online(TapeRecorder(), environment, tapes)), "")
    deaf = of_trials(list(audit_online(TapeRecorder(tapes["open"]), environment, tapes)), "")
    assert verdict([attentive])[0] == "listens"
    assert {level.shown: level.count for level in attentive.levels} == {"correct": 10, "empty": 0, "opposite": 0}
    assert verdict([deaf])[0] == "cannot tell"  # five scenes are too few to say that it never will
    gap, _, follows = deaf.measures
    assert (gap.value, follows.value) == (0, 50) and gap.high > 50 > gap.low
    assert [level.count for level in deaf.levels] == [5, 5, 5]  # it opens, whatever it is shown


class Clock:
    """The gym's observations do not say how late it is."""

    def __init__(self, player: TapeRecorder) -> None:
        self.player, self.elapsed, self.seeds = player, 0, []  # type: ignore[var-annotated]

    def reset(self, seed: int) -> None:
        self.elapsed = 0
        self.seeds.append((seed, np.random.random()))

    def __call__(self, observation: Mapping[str, Any], condition: Demonstration | None) -> Array:
        chunk = self.player({**observation, "elapsed": self.elapsed}, condition)
        self.elapsed += SPEC.executed
        return chunk


@pytest.mark.long
def test_any_gymnasium_environment_will_do_and_noise_is_paired(tapes: dict[str, Demonstration]) -> None:
    def make(task: str) -> PairEnv:
        return PairEnv("door", task, "validation")

    policy = Clock(TapeRecorder())
    trials = list(audit_online(policy, GymEnvironment(make, TASKS, (3,)), tapes))
    assert [(t.shown, t.success) for t in trials if t.task == "close"] == [
        ("correct", True),
        ("empty", False),
        ("opposite", False),
    ]
    assert all(t.direction is None for t in trials)  # nobody knows the expert of somebody else's environment
    assert len(set(policy.seeds)) == 2  # one for each task: the same under all three conditions, numpy's too


def test_recorded_data_tells_it_too(store: Store, tapes: dict[str, Demonstration]) -> None:
    listening = of_predictions(list(audit_offline(TapeRecorder(), store, tapes, without=[0])), "")
    correct, empty, opposite = listening.levels
    assert (
        correct.value < 0.5 < min(empty.value, opposite.value) and correct.n == 2 * 5
    )  # both tasks, every fortieth row
    assert all(m.value > 0 and m.verdict == "cannot tell" for m in listening.measures)  # one pair proves nothing
    assert listening.measures[-1].value == 100
    deaf = of_predictions(list(audit_offline(TapeRecorder(tapes["open"]), store, tapes, without=[0])), "")
    by_name = {measure.name: measure for measure in deaf.measures}
    assert by_name["action error, opposite minus correct"].value == 0
    assert by_name["chunk changes, opposite for correct"].high == 0
    assert by_name["first chunk follows what is shown"].value == 50
    with pytest.raises(UserError, match="2 numbers per action"):
        list(audit_offline(lambda observation, condition: np.zeros(2), store, tapes))


def test_where_all_scenes_are_alike_the_interval_is_not_a_point() -> None:
    few = summarised("gap", "points", 0.0, [(str(scene), 0.0) for scene in range(4)])
    assert few.low < -50 and few.high > 50 and few.verdict == "cannot tell"
    assert "4 scenes, and at least 5 are needed" in why_unsure(few)
    wide = summarised("gap", "points", 0.0, [(str(scene), 0.0) for scene in range(6)])
    assert wide.verdict == "cannot tell" and "6 scenes leave room for 20 points" in why_unsure(wide)
    many = summarised("gap", "points", 0.0, [(str(scene), 0.0) for scene in range(100)])
    assert -5 < many.low < 0 < many.high < 5 and many.verdict == "does not listen"
    sure = summarised("gap", "points", 0.0, [(str(scene), 100.0) for scene in range(10)])
    assert 60 < sure.low < 100 == sure.high and sure.verdict == "listens"
    contrary = summarised("gap", "points", 0.0, [(str(scene), -100.0) for scene in range(10)])
    assert contrary.verdict == "does the contrary"


def test_who_never_succeeds_is_judged_by_its_first_chunk() -> None:
    followed: tuple[tuple[Shown, str], ...] = (("correct", "open"), ("opposite", "close"))
    rows = [
        Trial(str(scene), "open", shown, False, 200, direction) for scene in range(20) for shown, direction in followed
    ]
    word, because = verdict([of_trials(rows, "")])
    assert word == "listens" and "first chunk" in because
    still = [Trial(row.scene, row.task, row.shown, False, 200, "") for row in rows]  # it never moves
    assert verdict([of_trials(still, "")])[0] == "does not listen"
    answers = [Prediction(str(i), "open", shown, 0, error) for i in range(9) for shown, error in PAIRED_ERRORS]
    assert verdict([of_predictions(answers, "")])[0] == "listens"


PAIRED_ERRORS: tuple[tuple[Shown, float], ...] = (("correct", 0.5), ("opposite", 0.9))


def rolled(successes: Mapping[Shown, int], scenes: int = 20) -> list[Trial]:
    return [Trial(str(n), "open", shown, n < count) for shown, count in successes.items() for n in range(scenes)]


@pytest.mark.parametrize(
    ("successes", "answers"),
    [
        (
            {"correct": 20, "empty": 0, "opposite": 0, "false": 3, "noise": 0},
            ("yes", "yes", "yes", "yes", "not asked"),
        ),
        ({"correct": 20, "opposite": 0, "false": 20, "noise": 20}, ("yes", "not asked", "no", "no", "not asked")),
        # Who hardly ever succeeds loses nothing on noise: that does not mean it is blind.
        ({"correct": 1, "opposite": 0, "noise": 1}, ("cannot tell", "not asked", "not asked", "cannot tell")),
        ({"correct": 0, "empty": 0, "opposite": 0}, ("cannot tell", "cannot tell", "not asked", "not asked")),
        ({"correct": 2, "opposite": 16}, ("no: the contrary", "not asked", "not asked", "not asked")),
    ],
)
def test_the_checklist_has_a_verdict_per_line(successes: Mapping[Shown, int], answers: tuple[str, ...]) -> None:
    checks = checklist([of_trials(rolled(successes), "")])
    assert tuple(check.answer for check in checks)[: len(answers)] == answers
    assert all(bool(check.because) == (check.answer != "not asked") for check in checks)


class Seer:
    """Plays the action of the recorded frame that looks most like what it sees; `blind` looks at the clock instead."""

    def __init__(self, blind: bool = False) -> None:
        self.blind = blind
        self.seen: dict[Path, Array] = {}

    def __call__(self, observation: Mapping[str, Any], condition: Demonstration | None) -> Array:
        if condition is None:
            return np.zeros((SPEC.executed, SPEC.action_dim))
        if condition.path not in self.seen:
            self.seen[condition.path] = np.stack([frame.rgb for frame in condition.frames(range(len(condition)))])
        gaps = np.abs(self.seen[condition.path].astype(np.int32) - observation["rgb"].astype(np.int32))
        t = observation["elapsed"] if self.blind else int(gaps.sum(axis=(1, 2, 3)).argmin())
        return condition.action[np.minimum(t + np.arange(SPEC.chunk), len(condition) - 1)]


def test_noise_for_images_tells_who_looks_and_a_false_reference_is_shown(
    store: Store, tapes: dict[str, Demonstration]
) -> None:
    def errors(policy: Seer) -> dict[str, float]:
        asked = audit_offline(policy, store, tapes, shown=SHOWN, every=16, without=[0], false=[tapes["close"]])
        found = of_predictions(list(asked), "")
        assert [level.shown for level in found.levels] == list(SHOWN)
        return {level.shown: level.value for level in found.levels}

    looks, blind = errors(Seer()), errors(Seer(blind=True))
    assert looks["noise"] > looks["correct"] + 0.2 and blind["noise"] == blind["correct"]
    assert looks["false"] > looks["correct"]  # half of the rows are of the other task


def test_noise_leaves_nothing_of_an_image_and_all_else_as_it_is(tapes: dict[str, Demonstration]) -> None:
    seen = observation_of(tapes["open"].frame(40))
    found = noised({"camera": seen, "elapsed": 3}, np.random.default_rng(0))["camera"]
    for name in ("K", "T_world_cam", "robot_state", "gripper"):
        assert found[name] is seen[name]
    assert abs(np.corrcoef(found["rgb"].ravel(), seen["rgb"].ravel())[0, 1]) < 0.02
    for name in ("depth", "mask"):
        assert (np.sort(found[name].ravel()) == np.sort(seen[name].ravel())).all()
        assert abs(np.corrcoef(found[name].ravel(), seen[name].ravel())[0, 1]) < 0.05


def test_committed_rollouts_can_be_audited(tmp_path: Path) -> None:
    """The report's +66 points, and what they hide."""
    result = audit("standard", tmp_path, online=Online(condition="boundary"), episodes=[ROOT / "results/standard-42"])
    (found,) = result.findings
    assert [(level.shown, level.count) for level in found.levels] == [("correct", 80), ("empty", 3), ("opposite", 14)]
    gap, _, follows = found.measures
    assert gap.value == 66 and 50 < follows.low < follows.high < 70
    assert result.verdict == "listens" and len(result.reservations) == 2
    content = json.loads((tmp_path / "audit.json").read_text())
    assert len(content["findings"][0]["rows"]) == 300 and content["verdict"] == "listens"
    page = (tmp_path / "audit.html").read_text()
    assert [check["answer"] for check in content["checklist"]] == ["yes", "yes", "not asked", "not asked", "yes"]
    assert "<td>looks at the camera images</td><td>not asked</td>" in page
    assert "standard: listens" in page and "data:image/png" in page and "14/100" in page


@pytest.mark.long
def test_ours_is_audited_as_it_is_evaluated(
    store: Store, checkpoints: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = checkpoints["memcorr"]
    where = Online(scenes=(80,), workers=1)
    result = audit(policy, tmp_path / "out", online=where, data=store.root, references=store.root, every=80)
    rows = evaluate(policy, tmp_path / "again", conditions=["validation"], scenes=(80,), data=store.root, workers=1)
    online, offline = result.findings
    ours = [row for row in online.rows if isinstance(row, Trial) and row.shown == "correct"]
    assert [(r.task, r.success, r.steps) for r in ours] == [(e.task, e.success, e.steps) for e in rows]
    assert len(online.rows) == 2 * 5  # a drawer was recorded as the false reference
    assert len(offline.rows) == 2 * 4 * 3  # of pair 1: pair 0 is what it is shown; no store was given as a false one
    assert "yes" not in {check.answer for check in result.checklist}  # one scene
    assert load_policy(policy).digest.startswith(result.checkpoint)


def test_a_callable_is_found_by_name_and_made_of_arguments(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine_to_audit.py").write_text(
        "import numpy as np\n"
        "def still(observation, condition):\n    return np.zeros(4)\n"
        "def scaled(by):\n    return lambda observation, condition: np.full((16, 4), float(by))\n"
        "value = 3\n"
    )
    monkeypatch.chdir(tmp_path)
    result = audit("mine_to_audit:still", tmp_path / "a", data=store.root)
    assert result.findings[0].kind == "offline" and result.verdict != "listens"
    small = audit("mine_to_audit:scaled", tmp_path / "b", given=("0.1",), data=store.root)
    large = audit("mine_to_audit:scaled", tmp_path / "c", given=("0.9",), data=store.root)
    assert small.findings[0].levels[0].value < large.findings[0].levels[0].value
    for wrong, words in (
        ("mine_to_audit:missing", "has no missing"),
        ("mine_to_audit:value", "is a int, not a callable"),
        ("nowhere_at_all:x", "No module named"),
        (":x", "names nothing"),
        (".relative:x", "names nothing"),
    ):
        with pytest.raises(UserError, match=words):
            audit(wrong, tmp_path / "d", data=store.root)
    assert str(tmp_path) not in sys.path and not (tmp_path / "d").exists()
