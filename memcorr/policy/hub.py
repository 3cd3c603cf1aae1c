"""Policies on the Hugging Face Hub: config, weights and a card; nothing that runs.

memcorr publish runs/memcorr-42 --repo org/name       # --dry-run: only say what would be sent
memcorr.load_policy("org/name")
"""

from __future__ import annotations

import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

from ..errors import UserError
from .checkpoint import CONFIG, MODEL, read_checkpoint, read_config

CARD = "README.md"
MISSING = "huggingface_hub is missing: pip install 'memcorr[hub]'"

HEADER = """---
license: mit
library_name: memcorr
pipeline_tag: robotics
tags:
- robotics
- imitation-learning
- diffusion-policy
---
"""
LOADING = """
## Use

```python
import memcorr

policy = memcorr.load_policy("{repo}")
plan = policy.follow(reference).plan(frame, elapsed)
```

Nothing is pickled: `{config}` says how it was made, `{model}` holds EMA weights and normalisation statistics.
"""


def is_repository(name: str) -> bool:
    """org/name, unless it begins with a folder of this machine: a mistyped path is not looked up elsewhere."""
    return re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name) is not None and not Path(name).parent.exists()


def downloaded(repo: str) -> Path:
    """The two files of a policy, from the Hub or from what was fetched before."""
    try:
        from huggingface_hub import snapshot_download
    except ModuleNotFoundError:
        raise UserError(f"{repo} is no folder here, and to look on the Hub {MISSING}") from None
    try:
        return Path(snapshot_download(repo, allow_patterns=[CONFIG, MODEL], library_name="memcorr"))
    except (OSError, ValueError) as problem:
        reason = str(problem).strip().splitlines()[0]
        raise UserError(f"{repo} holds no policy, neither here nor on the Hub ({reason})") from None


def card(folder: Path, repo: str) -> str:
    """The Hub's front page: what it is, how it was made, how to load it. A model card in the folder is its body."""
    own = folder / "policy.md"
    if own.exists():
        return HEADER + "\n" + own.read_text(encoding="utf-8") + _loading(repo)
    checkpoint, content = read_checkpoint(folder, torch.device("cpu")), read_config(folder, dict[str, Any])
    parameters = sum(p.numel() for p in checkpoint.network.parameters())
    recipe = [f"| `{name}` | {value} |" for name, value in content["experiment"].items()]
    made = [f"| {name} | {value} |" for name, value in content.get("made_with", {}).items()]
    lines = [
        f"# {checkpoint.design.name}, seed {checkpoint.seed}",
        "",
        "A policy of `memcorr`, an independent implementation of MemCorr-DP: a diffusion policy that follows a "
        f"selected reference demonstration. {parameters:,} parameters, EMA after {checkpoint.update:,} updates.",
        "",
        "| recipe | |",
        "|---|---|",
        *recipe,
        *(["", "| made with | |", "|---|---|", *made] if made else []),
    ]
    return HEADER + "\n" + "\n".join(lines) + "\n" + _loading(repo)


def _loading(repo: str) -> str:
    return LOADING.format(repo=repo, config=CONFIG, model=MODEL)


def stage(folder: Path, out: Path, repo: str) -> list[Path]:
    """What is sent, as files in `out`: only a policy that loads."""
    read_checkpoint(folder, torch.device("cpu"))
    for name in (CONFIG, MODEL):
        shutil.copyfile(folder / name, out / name)
    (out / CARD).write_text(card(folder, repo), encoding="utf-8")
    return [out / name for name in (CARD, CONFIG, MODEL)]


def publish(folder: Path, repo: str | None, private: bool = False, dry_run: bool = False) -> str:
    """Sends a policy, or says what would be sent; what to tell the user. Needs a token that may write
    (`hf auth login`, or HF_TOKEN)."""
    if repo is None and not dry_run:
        raise UserError("--repo is missing: give ORG/NAME on the Hub, or --dry-run")
    if repo is not None and re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", repo) is None:
        raise UserError(f"--repo {repo}: give ORG/NAME")
    with tempfile.TemporaryDirectory() as temporary:
        files = stage(folder, Path(temporary), repo or "ORG/NAME")
        listed = "\n".join(f"{path.stat().st_size:>12,} bytes  {path.name}" for path in files)
        if dry_run:
            return f"{files[0].read_text(encoding='utf-8')}\n{listed}\nnothing was sent; without --dry-run it would be"
        try:
            from huggingface_hub import HfApi
        except ModuleNotFoundError:
            raise UserError(MISSING) from None
        api = HfApi(library_name="memcorr")
        try:
            assert repo is not None
            api.create_repo(repo, private=private, exist_ok=True)
            commit = api.upload_folder(repo_id=repo, folder_path=temporary, commit_message="memcorr publish")
        except (OSError, ValueError) as problem:
            raise UserError(f"{repo} could not be written ({str(problem).strip().splitlines()[0]})") from None
        return f"{listed}\nsent to {commit}"
