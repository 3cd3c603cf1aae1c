"""Training: the optimiser, interruption at any moment, and refusing what is not this run."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from memcorr.bench.straightforward import StraightforwardTraining, from_ours
from memcorr.cli import main
from memcorr.correspondence.cache import Cache
from memcorr.demos.store import Store
from memcorr.errors import UserError
from memcorr.files import converted
from memcorr.policy.checkpoint import read_tensors
from memcorr.policy.networks.transformer import ActionTransformer
from memcorr.training import loading
from memcorr.training.batches import Batches
from memcorr.training.dataset import Simulated, measure
from memcorr.training.experiments import EXPERIMENTS, MAIN, Experiment, changed, find_experiment
from memcorr.training.loop import Run, loss_of, train
from memcorr.training.metrics import Metrics
from memcorr.training.optimiser import Weights
from tests.test_folders import Raise, taken

TINY = dataclasses.replace(EXPERIMENTS["debug"], batch=8, updates=(14, 10))
ONE_PAIR = dataclasses.replace(TINY, train_pairs=1, updates=(4, 2))  # leaves one pair for validation


@pytest.fixture
def cached(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A `--cache` folder whose content is the synthetic cache."""
    monkeypatch.setattr(loading, "read_cache", lambda folder, store: cache)
    return Path("cache")


@pytest.fixture
def cached_literally(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same, lifted as in the paper."""
    literal = dataclasses.replace(cache, lifting="paper")
    monkeypatch.setattr(loading, "read_cache", lambda folder, store: literal)
    return Path("cache")


def contents(folder: Path) -> dict[str, str]:
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def assert_same_weights(a: Path, b: Path) -> None:
    for name in ("state.safetensors", "model.safetensors", "stage-one/model.safetensors"):
        first, second = (read_tensors(folder / name) for folder in (a, b))
        assert first[1] == second[1]
        assert first[0].keys() == second[0].keys()
        for key in first[0]:
            assert torch.equal(first[0][key], second[0][key]), (name, key)


CHILD = """
import os, pickle, signal, sys
from pathlib import Path
from memcorr.training import loading
from memcorr.training import loop as training

experiment, data, out, cache, moment = pickle.load(open(sys.argv[1], "rb"))
loading.read_cache = lambda folder, store: cache
training.SAVE_EVERY = 4
saves, write = 0, Path.write_bytes

def write_bytes(path, content):  # tensors alone are written like this
    global saves
    saves += 1
    write(path, content)
    if saves == moment:  # in the middle of a save: half the file is there
        os.truncate(path, os.path.getsize(path) // 2)
        os.kill(os.getpid(), signal.SIGKILL)

Path.write_bytes = write_bytes
training.train(experiment, data, 42, out, Path("cache"))
"""


@pytest.fixture(scope="module")
def uninterrupted(store: Store, cache: Cache, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "whole"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "read_cache", lambda folder, store: cache)
        train(TINY, store.root, 42, out, Path("cache"))
    return out


@pytest.mark.long
@pytest.mark.parametrize(
    "moment", ["any", 3, 9, 10]
)  # 3rd file: a state; 9th: stage one's model; 10th: stage two's first state
def test_a_killed_run_continues_bit_for_bit(
    moment: str | int, uninterrupted: Path, store: Store, cache: Cache, cached: Path, tmp_path: Path
) -> None:
    """N updates, kill -9, M updates: every weight as after N + M updates in one go."""
    out = tmp_path / "run"
    (tmp_path / "arguments").write_bytes(pickle.dumps((TINY, store.root, out, cache, moment)))
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(tmp_path / "arguments")], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    if moment == "any":
        while not (out / "model.safetensors").exists() and child.poll() is None:
            time.sleep(0.01)
        time.sleep(0.1)
        child.kill()
    _, errors = child.communicate(timeout=120)
    assert child.returncode == -signal.SIGKILL, errors.decode()
    with safe_open(out / "state.safetensors", "pt") as f:
        assert 0 < int(f.metadata()["update"]) < TINY.total_updates
    train(TINY, store.root, 42, out, cached)
    assert_same_weights(out, uninterrupted)
    rows = [json.loads(line)["update"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert rows == sorted(set(rows))  # nothing is reported twice


def test_a_finished_run_says_so_and_does_nothing(
    uninterrupted: Path, store: Store, cached: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    before = contents(uninterrupted)
    train(TINY, store.root, 42, uninterrupted, cached)
    assert "finished after 24 updates" in caplog.text
    assert contents(uninterrupted) == before


def test_ctrl_c_saves_between_two_updates(
    store: Store, cached: Path, uninterrupted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    advance = Run.advance

    def interrupted(self: Run) -> None:
        if self.update == 5:
            os.kill(os.getpid(), signal.SIGINT)
        advance(self)

    with monkeypatch.context() as patch:
        patch.setattr(Run, "advance", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train(TINY, store.root, 42, tmp_path / "run", cached)
    assert read_tensors(tmp_path / "run/state.safetensors")[1]["update"] == "6"
    train(TINY, store.root, 42, tmp_path / "run", cached)
    assert_same_weights(tmp_path / "run", uninterrupted)


def test_without_a_cache_stage_one_is_the_end_until_there_is_one(
    store: Store, cached: Path, uninterrupted: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    out = tmp_path / "run"
    train(TINY, store.root, 42, out)
    assert "--cache" in caplog.text
    assert contents(out / "stage-one") == contents(uninterrupted / "stage-one")
    train(TINY, store.root, 42, out, cached)
    assert_same_weights(out, uninterrupted)


def test_stage_two_of_another_recipe_may_follow_the_same_stage_one(
    store: Store, cached: Path, uninterrupted: Path, tmp_path: Path
) -> None:
    assert [e.name for e in EXPERIMENTS.values() if e.begins_like(MAIN)] == ["memcorr", "memcorr-literal"]
    other, stage_one = dataclasses.replace(TINY, name="other", phase_errors=None), uninterrupted / "stage-one"
    train(TINY, store.root, 42, tmp_path / "same", cached, stage_one=stage_one)
    assert_same_weights(tmp_path / "same", uninterrupted)
    train(other, store.root, 42, tmp_path / "whole", cached)
    train(other, store.root, 42, tmp_path / "second", cached, stage_one=stage_one)
    assert_same_weights(tmp_path / "second", tmp_path / "whole")
    for wrong, seed, folder, words in (
        (dataclasses.replace(TINY, paired=False), 42, stage_one, "not the end of a stage one"),
        (TINY, 42, uninterrupted, "not the end of a stage one"),
        (TINY, 43, stage_one, "another seed"),
        (TINY, 42, tmp_path, "holds no policy"),
    ):
        with pytest.raises(UserError, match=words):
            train(wrong, store.root, seed, tmp_path / f"wrong-{seed}-{wrong.paired}", cached, stage_one=folder)


def test_stage_two_starts_from_the_ema_with_a_fresh_optimiser(dataset: Simulated, cache: Cache, tmp_path: Path) -> None:
    weights = Weights(ActionTransformer(), ActionTransformer(), TINY, torch.device("cpu"))
    batches = Batches(dataset, measure([dataset]), TINY)
    for update in range(3):
        weights.step(loss_of(weights.network, batches.draw(42, update)))
    assert not torch.equal(weights.flat, weights.ema)
    weights.begin_stage(1)
    assert torch.equal(weights.flat, weights.ema)
    assert not any(moment.any() for moment in weights.moments.values())
    assert weights.optimizer.param_groups[0]["lr"] == 5e-5


def test_our_update_equals_the_straightforward_one(dataset: Simulated) -> None:
    """AdamW, clipping and EMA over one flat buffer, against torch's own parameter by parameter."""
    experiment = dataclasses.replace(TINY, gradient_norm=0.5)  # small enough to clip
    batches = Batches(dataset, measure([dataset]), experiment)
    network = ActionTransformer()
    theirs = StraightforwardTraining(from_ours(network), experiment)
    weights = Weights(network, ActionTransformer(), experiment, torch.device("cpu"))
    for update in range(4):
        batch = batches.draw(42, update)
        loss = loss_of(network, batch)
        assert weights.step(loss) > 0.5
        assert loss.item() == pytest.approx(theirs.step(batch), abs=1e-5)
    for ours, other in ((network, list(theirs.network.parameters())), (weights.ema_network, theirs.ema)):
        names = [name for name, _ in theirs.network.named_parameters()]
        expected = dict(zip(names, other, strict=True))
        for name, p in from_ours(ours).named_parameters():
            if "in_proj_bias" not in name:  # holds the key bias, which changes no output: noise there is harmless
                assert torch.allclose(p, expected[name], atol=2e-5), name


def test_validation_is_reported_apart_for_standard_and_paired(store: Store, tmp_path: Path) -> None:
    train(ONE_PAIR, store.root, 42, tmp_path / "run")
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    (validation,) = [row for row in rows if "validation_standard" in row]
    assert validation["update"] == 4 and validation["validation_standard"] > 0 and validation["validation_paired"] > 0
    (losses,) = [row for row in rows if "loss_standard" in row]
    assert losses["loss_paired"] > 0 and losses["stage"] == 1
    assert list((tmp_path / "run/tensorboard").iterdir())


@pytest.mark.parametrize(
    "name", ["visual-transformer", "visual-unet", "motion-literal", "centroid-literal", "standard-literal"]
)
def test_every_experiment_trains(name: str, store: Store, cached_literally: Path, tmp_path: Path) -> None:
    experiment = dataclasses.replace(EXPERIMENTS[name], train_pairs=2, batch=8, updates=(2, 2))
    train(experiment, store.root, 42, tmp_path / "run", cached_literally)
    assert read_tensors(tmp_path / "run/model.safetensors")[1]["update"] == "4"


def test_seeds_give_different_runs(store: Store, tmp_path: Path) -> None:
    tiny = dataclasses.replace(TINY, updates=(2, 2))
    for seed in (42, 43):
        train(tiny, store.root, seed, tmp_path / str(seed))
    a, b = (read_tensors(tmp_path / str(seed) / "model.safetensors")[0]["network.out.weight"] for seed in (42, 43))
    assert not torch.allclose(a, b)


def test_dry_run_prints_config_and_parameter_total(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["memcorr", "train", "memcorr", "--out", str(tmp_path / "run"), "--dry-run"])
    main()
    printed = json.loads(capsys.readouterr().out)
    assert printed["parameters"] == 1_612_804 and printed["seed"] == 42
    assert converted(printed["experiment"], Experiment) == MAIN
    assert not (tmp_path / "run").exists()


def test_one_number_of_updates_is_stage_ones() -> None:
    assert changed(MAIN, {"updates": "5"}).updates == (5, 0)
    assert changed(MAIN, {"updates": "[5,3]"}).updates == (5, 3)
    with pytest.raises(UserError, match="--set updates=many"):
        changed(MAIN, {"updates": "many"})


def test_experiments_differ_from_the_main_one_only_where_the_paper_says() -> None:
    unet: dict[str, object] = {"network": "visual-unet", "paired": False, "condition_dropout": 0.0, "guidance": 1.0}
    literal: dict[str, object] = {
        "phase_errors": None,
        "lifting": "paper",
        "residual_limit_mm": 20.034,
    }
    differences: dict[str, dict[str, object]] = {
        "memcorr": {},
        "memcorr-literal": literal,
        "memcorr-cosine": literal | {"schedule": "cosine"},
        "standard-literal": literal | {"paired": False},
        "standard-cosine": literal | {"paired": False, "schedule": "cosine"},
        "motion-literal": literal | {"representation": "motion"},
        "centroid-literal": literal | {"representation": "centroid"},
        "visual-transformer": {"network": "visual-transformer"},
        "visual-unet": unet,
        "visual-unet-cosine": unet | {"schedule": "cosine"},
        "debug": {"train_pairs": 2, "batch": 16, "updates": (12, 6)},
    }
    assert {*differences, "memcorr-many", "memcorr-measured"} == set(
        EXPERIMENTS
    )  # which are no variants of the paper's
    main = dataclasses.asdict(MAIN)
    for name, fields in differences.items():
        other = dataclasses.asdict(find_experiment(name))
        assert {k: v for k, v in other.items() if main[k] != v and k != "name"} == fields, name
    assert (MAIN.lifting, MAIN.tie_break, MAIN.schedule, MAIN.residual_limit_mm) == ("rigid", "elapsed", "linear", None)
    assert (MAIN.batch, MAIN.updates, MAIN.learning_rate) == (128, (20_000, 10_000), (3e-4, 5e-5))
    assert (MAIN.betas, MAIN.epsilon, MAIN.weight_decay) == ((0.9, 0.999), 1e-8, 1e-4)
    assert (MAIN.gradient_norm, MAIN.ema, MAIN.condition_dropout, MAIN.guidance) == (10.0, 0.999, 0.1, 1.5)


def test_mistakes_are_named_and_nothing_is_touched(
    store: Store, uninterrupted: Path, cached: Path, cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = contents(uninterrupted)
    with pytest.raises(UserError, match="another seed"):
        train(TINY, store.root, 43, uninterrupted, cached)
    with pytest.raises(UserError, match="another experiment"):
        train(dataclasses.replace(TINY, paired=False), store.root, 42, uninterrupted, cached)
    with pytest.raises(UserError, match="memcorr collect"):
        train(TINY, tmp_path / "nothing", 42, uninterrupted, cached)
    with pytest.raises(UserError, match="holds 2 pairs"):
        train("memcorr", store.root, 42, uninterrupted, cached)
    with pytest.raises(UserError, match="unknown experiment 'memcor'"):
        train("memcor", store.root, 42, uninterrupted, cached)
    for seed in ("x", -1, 1.5, True):
        with pytest.raises(UserError, match="whole number"):
            train(TINY, store.root, seed, uninterrupted, cached)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="choose auto, cpu or cuda"):
        train(TINY, store.root, 42, uninterrupted, cached, device="tpu")
    monkeypatch.setattr(loading, "read_cache", lambda folder, store: dataclasses.replace(cache, lifting="paper"))
    with pytest.raises(UserError, match="memcorr match --lifting rigid"):
        train(TINY, store.root, 42, uninterrupted, cached)
    other = dataclasses.replace(cache, p_live_true=cache.p_live_true + 0.1)
    monkeypatch.setattr(loading, "read_cache", lambda folder, store: other)
    with pytest.raises(UserError, match="other data"):
        train(TINY, store.root, 42, uninterrupted, cached)
    assert contents(uninterrupted) == before


def test_weights_that_are_no_numbers_end_the_run_and_the_saved_state_is_kept(store: Store, tmp_path: Path) -> None:
    """A loss says so one update later; a state that is saved in between would be the last."""
    wild = dataclasses.replace(ONE_PAIR, learning_rate=(1e39, 1e39), updates=(1, 0))
    with pytest.raises(UserError, match=r"holds values that are not finite after update 1; the last saved state"):
        train(wild, store.root, 42, tmp_path / "run")
    assert not list((tmp_path / "run").glob("*.safetensors"))


def test_a_full_disk_under_tensorboard_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread raises, too, which once was a traceback beside the line."""
    said: list[object] = []
    monkeypatch.setattr(threading, "excepthook", said.append)
    full = Raise(OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr("tensorboard.summary.writer.record_writer.RecordWriter.write", full)
    with pytest.raises(OSError, match=r"could not be written \(No space left on device\); is the disk full") as told:
        metrics = Metrics(tmp_path, 0)
        for update in range(1000):
            metrics.write(update, loss=1.0)
    assert told.value.filename == str(tmp_path / "tensorboard") and not said


def test_a_damaged_state_is_named_and_kept(store: Store, tmp_path: Path) -> None:
    out = tmp_path / "run"
    train(ONE_PAIR, store.root, 42, out)
    state = out / "state.safetensors"
    state.write_bytes(state.read_bytes()[:1000])
    before = contents(out)
    with pytest.raises(UserError, match=r"state\.safetensors is damaged"):
        train(ONE_PAIR, store.root, 42, out)
    assert contents(out) == before
    (out / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config\.json is not a configuration"):
        train(ONE_PAIR, store.root, 42, out)


def test_one_folder_serves_one_process(store: Store, tmp_path: Path) -> None:
    with taken(tmp_path / "run"), pytest.raises(UserError, match="another memcorr"):
        train(TINY, store.root, 42, tmp_path / "run")


@pytest.mark.parametrize(
    ("arguments", "needle"),
    [
        (("memcorr", "--seed", "abc"), "--seed 'abc': give a whole number"),
        (("memcorr", "--data", "nowhere"), "nowhere holds no demonstrations"),
        (("nonsense",), "unknown experiment 'nonsense'"),
    ],
)
def test_the_command_line_answers_mistakes_in_one_line(
    arguments: tuple[str, ...],
    needle: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["memcorr", "train", *arguments])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and needle in lines[0]
    assert not list(tmp_path.iterdir())
