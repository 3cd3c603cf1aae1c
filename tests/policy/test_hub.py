"""Sharing: what would be sent loads again, and a name on the Hub is a policy. No network."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

import memcorr
from memcorr.errors import UserError
from memcorr.policy.hub import CARD, is_repository, publish, stage
from memcorr.policy.policy import SHIPPED, load_trained

ROOT = Path(__file__).parents[2]


def header(card: str) -> dict:
    _, front, body = card.split("---\n", 2)
    assert body.strip().startswith("# ")
    return yaml.safe_load(front)


@pytest.mark.parametrize("name", ["shipped", "memcorr", "visual-unet"])
def test_what_is_sent_is_the_policy_and_a_card(name: str, checkpoints: dict[str, str], tmp_path: Path) -> None:
    folder = SHIPPED if name == "shipped" else Path(checkpoints[name])
    files = stage(folder, tmp_path, "org/name")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(path.name for path in files)
    assert memcorr.load_policy(tmp_path).digest == memcorr.load_policy(folder).digest
    card = (tmp_path / CARD).read_text()
    assert header(card)["library_name"] == "memcorr" and header(card)["license"] == "mit"
    assert 'load_policy("org/name")' in card and ("1,612,804 parameters" in card or name == "visual-unet")


def test_a_dry_run_sends_nothing_and_says_what(checkpoints: dict[str, str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "memcorr", "publish", checkpoints["memcorr"], "--dry-run"]
    offline = {"HF_ENDPOINT": "http://127.0.0.1:9", "PATH": "", "PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=offline)
    assert result.returncode == 0, result.stderr
    assert "model.safetensors" in result.stdout and "nothing was sent" in result.stdout
    for repo, words in ((None, "--repo is missing"), ("name", "give ORG/NAME"), ("a/b/c", "give ORG/NAME")):
        with pytest.raises(UserError, match=words):
            publish(Path(checkpoints["memcorr"]), repo)
    with pytest.raises(UserError, match="holds no policy"):
        publish(tmp_path, "org/name", dry_run=True)


def test_a_name_on_the_hub_is_a_policy(checkpoints: dict[str, str], tmp_path: Path) -> None:
    """The real library, with what it fetched before; it is told to stay off the network."""
    commit, repository = "0" * 40, tmp_path / "hub" / "models--org--name"
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    stage(Path(checkpoints["memcorr"]), snapshot, "org/name")
    code = """
import memcorr
print(memcorr.load_policy("org/name").digest)
try:
    memcorr.load_policy("org/another")
except memcorr.UserError as problem:
    print(problem)
"""
    environment = {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "PATH": "", "PYTHONPATH": str(ROOT)}
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    digest, refusal = result.stdout.splitlines()
    assert digest == memcorr.load_policy(checkpoints["memcorr"]).digest
    assert refusal.startswith("org/another holds no policy, neither here nor on the Hub (")


def test_a_mistyped_folder_is_not_looked_up_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    assert is_repository("org/name")
    assert not any(is_repository(name) for name in ("runs/name", "name", "a/b/c", "/org/name", "../name", "org/"))
    with pytest.raises(UserError, match="runs/name holds no policy: give the folder"):
        memcorr.load_policy("runs/name")
    assert np.isfinite(load_trained("shipped").normalisation.state_mean).all()
