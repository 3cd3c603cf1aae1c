"""Files appear whole or not at all: write beside the target, then rename."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .errors import UserError

TEMPORARY = ".tmp"


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Yields a temporary path; on success it becomes `path`, on any error it is removed."""
    temporary = path.with_name(path.name + TEMPORARY)
    try:
        yield temporary
        with open(temporary, "rb") as f:
            os.fsync(f.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_json(path: Path, content: Any) -> None:
    with written_whole(path) as temporary:
        temporary.write_text(json.dumps(content, indent=2) + "\n")


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f"{path} does not exist") from None
    except ValueError as problem:
        raise UserError(f"{path} is not valid JSON ({problem})") from None


def output_folder(path: Path) -> Path:
    """Creates `path` if needed and makes sure that files can be written there."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / f".writable{TEMPORARY}"
        probe.touch()
        probe.unlink()
    except OSError as problem:
        raise UserError(f"cannot write to folder {path} ({problem.strerror}); choose another --out") from None
    return path
