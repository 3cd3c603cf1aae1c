"""`lerobot_policy_memcorr`: LeRobot's own commands run MemCorr, and do what `memcorr evaluate` does.

Needs lerobot 0.6, which needs another Python than this one; MEMCORR_LEROBOT_PYTHON names it. memcorr and the plugin
need not be installed there: the test puts them on its path, with the metadata that LeRobot looks for.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from memcorr.demos.store import Store
from memcorr.evaluation.evaluate import evaluate, usual
from memcorr.evaluation.intervention import Intervention, ReferenceChoice
from memcorr.recordings.export import export_lerobot

ROOT = Path(__file__).parents[2]
PLUGIN = ROOT / "lerobot_policy_memcorr"
CODE = "observation.environment_state"
PYTHON = os.environ.get("MEMCORR_LEROBOT_PYTHON", "")
needs_lerobot = pytest.mark.skipif(not PYTHON, reason="MEMCORR_LEROBOT_PYTHON names no Python that has lerobot 0.6")
pytestmark = [needs_lerobot, pytest.mark.long]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which LeRobot finds the plugin."""
    metadata = tmp_path_factory.mktemp("installed") / "lerobot_policy_memcorr-0.1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: lerobot_policy_memcorr\nVersion: 0.1.0\n")
    paths = os.pathsep.join(map(str, (metadata.parent, PLUGIN, ROOT)))
    quiet = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled"}
    return {**os.environ, **quiet, "PYTHONPATH": paths, "HF_DATASETS_CACHE": str(metadata.parent / "hf")}


def lerobot(script: str, *arguments: str, environment: dict[str, str], cwd: Path) -> str:
    command = [PYTHON, "-m", f"lerobot.scripts.{script}", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=cwd)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stderr


def evaluated(
    shown: str, store: Store, scenes: int, environment: dict[str, str], out: Path, *more: str
) -> dict[str, Any]:
    lerobot(
        "lerobot_eval",
        *("--policy.type=memcorr", f"--policy.references={store.root}", "--policy.device=cpu"),
        *("--policy.push_to_hub=false", "--env.type=memcorr", "--env.condition=combined", f"--env.shown={shown}"),
        *("--env.look_every=8", "--seed=0", f"--eval.n_episodes={scenes}", f"--eval.batch_size={scenes}"),
        *("--eval.use_async_envs=false", f"--output_dir={out}"),
        environment=environment,
        cwd=out.parent,
    )
    return json.loads((out / "eval_info.json").read_text())


@pytest.mark.parametrize("shown", ["correct", "opposite"])
def test_lerobot_eval_has_the_successes_of_memcorr_evaluate(
    shown: ReferenceChoice, store: Store, installed: dict[str, str], tmp_path: Path
) -> None:
    scenes = 2
    info = evaluated(shown, store, scenes, installed, tmp_path / "theirs")
    theirs = [task["metrics"]["successes"] for task in info["per_task"]]
    rows = evaluate(
        "shipped", tmp_path, scenes=range(scenes), shown=usual("shipped", Intervention(shown)), data=store.root
    )
    ours = [[row.success for row in rows if row.task == task] for task in ("open", "close")]
    assert theirs == ours and all(flag == (shown == "correct") for some in ours for flag in some)


def test_lerobot_train_learns_and_what_it_saved_is_read_back(
    store: Store, installed: dict[str, str], tmp_path: Path
) -> None:
    export_lerobot(store, tmp_path / "door")
    lerobot(
        "lerobot_train",
        *("--policy.type=memcorr", "--policy.weights=", f"--policy.references={store.root}", "--policy.device=cpu"),
        *("--policy.push_to_hub=false", "--dataset.repo_id=local/door", f"--dataset.root={tmp_path / 'door'}"),
        *("--dataset.depth_output_unit=m", "--steps=3", "--batch_size=2", "--num_workers=0", "--log_freq=1"),
        *("--save_freq=3", f"--output_dir={tmp_path / 'trained'}", "--wandb.enable=false"),
        environment=installed,
        cwd=tmp_path,
    )
    saved = tmp_path / "trained/checkpoints/last/pretrained_model"
    config = json.loads((saved / "config.json").read_text())
    assert config["type"] == "memcorr" and json.loads(config["design"])["network"] == "memcorr"
    read = (
        "from lerobot.utils.import_utils import register_third_party_plugins; register_third_party_plugins()\n"
        "from lerobot.configs import PreTrainedConfig\n"
        "from lerobot.policies.factory import get_policy_class\n"
        f"config = PreTrainedConfig.from_pretrained({str(saved)!r})\n"
        f"policy = get_policy_class('memcorr').from_pretrained({str(saved)!r}, config=config)\n"
        "std = policy.planner.policy.normalisation.action_std\n"
        "assert (std > 0).all() and not (std == 1).all(), std\n"
    )
    result = subprocess.run([PYTHON, "-c", read], capture_output=True, text=True, env=installed, cwd=tmp_path)
    assert result.returncode == 0, result.stderr[-3000:]


def test_rows_are_coded_as_the_environment_codes_its_tasks(
    store: Store, installed: dict[str, str], tmp_path: Path
) -> None:
    """Also where the dataset counts its tasks the other way round; no image is decoded for it."""
    export_lerobot(store, tmp_path / "door")
    tasks = tmp_path / "door/meta/tasks.parquet"
    names = pq.read_table(tasks)
    pq.write_table(names.set_column(names.column_names.index("task"), "task", [["close", "open"]]), tasks)
    command = [PYTHON, "-m", "lerobot_policy_memcorr.task_code", str(tmp_path / "door"), str(tmp_path / "coded")]
    result = subprocess.run(command, capture_output=True, text=True, env=installed, cwd=tmp_path)
    assert result.returncode == 0, result.stderr[-3000:]
    (path,) = (tmp_path / "coded/data").glob("*/*.parquet")
    table = pq.read_table(path)
    assert {name for name in table.column_names if name.startswith("observation.")} == {
        "observation.images.rgb",
        "observation.state",
        "observation.environment_state",
    }
    found = {(n, *code) for n, code in zip(*(table[k].to_pylist() for k in ("task_index", CODE)), strict=True)}
    assert found == {(0, 0.0, 1.0), (1, 1.0, 0.0)}  # its first task is closing, the environment's is opening


def test_it_is_what_lerobot_asks_for(store: Store, installed: dict[str, str], tmp_path: Path) -> None:
    """Real-time chunking, dropped actions, depth and intrinsics by its names, losses per row, one file for EnvHub."""
    command = [PYTHON, str(Path(__file__).parent / "inside_lerobot.py"), str(store.root), str(PLUGIN / "env.py")]
    result = subprocess.run(command, capture_output=True, text=True, env=installed, cwd=tmp_path)
    assert result.returncode == 0, result.stderr[-3000:]
    assert "all is as LeRobot asks for it" in result.stdout


def test_the_bench_runs_against_lerobot(capsys: pytest.CaptureFixture[str]) -> None:
    from memcorr.bench.lerobot import peer

    chunk, (parameters, horizon, executed, steps) = peer()
    assert parameters > 1e8 and (horizon, executed, steps) == (64, 32, 100)
    assert chunk() == "done\n"
