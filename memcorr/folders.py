"""Folders that results are written to: files appear whole or not at all (`written_whole`), and a folder belongs to one
process at a time (`claimed`).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import platform
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import UserError

if TYPE_CHECKING:
    pass


TEMPORARY, LOCK = ".memcorr-tmp", ".memcorr-lock"


class InUse(UserError):
    """Another process has claimed the folder."""


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Yields a new, empty file beside `path`; on success it becomes `path`, on any error it is removed.

    The name says whose it is, so that `claimed` can clear what a killed process left and nothing else.
    It never existed before: a link of that name cannot lead elsewhere. The user's umask applies, even if
    a library puts a file of its own in its place.
    """
    temporary = path.with_name(f".{path.name}.{platform.node()}-{os.getpid()}{TEMPORARY}")
    temporary.unlink(missing_ok=True)  # of an earlier process with our number
    try:
        os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
        mode = temporary.stat().st_mode
        yield temporary
        temporary.chmod(mode)
        with open(temporary, "rb") as f:
            os.fsync(f.fileno())
        os.replace(temporary, path)
    except BaseException as problem:
        temporary.unlink(missing_ok=True)
        if isinstance(problem, OSError) and problem.filename is None:  # a refused write says not where
            why = f"could not be written ({problem.strerror or problem}); is the disk full?"
            raise OSError(problem.errno or errno.EIO, why, str(path)) from problem
        raise


def write_text(path: Path, text: str) -> None:
    with written_whole(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


_CLAIMED: set[tuple[int, int, Path]] = set()  # process, thread, folder: a forked child has claimed nothing


@contextmanager
def claimed(folder: Path, *inside: str) -> Iterator[Path]:
    """`folder`, made if need be, with its folders `inside`, for this process alone; what killed processes left
    half-written is removed. A caller that has claimed it may call a function that claims it too: a verb keeps its
    folder until its last file is written."""
    owner = os.getpid(), threading.get_ident(), folder.resolve()
    if owner in _CLAIMED:
        yield folder
        return
    lock, places = _lock(folder), (folder, *(folder / name for name in inside))
    _CLAIMED.add(owner)
    try:
        _sweep(places)
        yield folder
    finally:
        try:
            _sweep(places)  # of workers that had to be ended
            (folder / LOCK).unlink(missing_ok=True)  # while it is still ours
        finally:
            _CLAIMED.discard(owner)
            os.close(lock)


def _sweep(places: Sequence[Path]) -> None:
    for place in places:
        for leftover in place.glob(f".*{TEMPORARY}"):
            leftover.unlink(missing_ok=True)


def _lock(folder: Path) -> int:
    """An open file that holds the folder's lock; the system frees it, also after kill -9."""
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = os.open(folder / LOCK, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o666)
        except OSError as problem:
            raise UserError(f"cannot write to folder {folder} ({problem.strerror}); choose another --out") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(lock), os.stat(folder / LOCK)):
                    return lock
            os.close(lock)  # its owner removed the file just now: once more
        except OSError as problem:
            os.close(lock)
            taken = problem.errno in (errno.EAGAIN, errno.EACCES)
            why = "is being written by another memcorr; wait" if taken else f"cannot be locked ({problem.strerror})"
            kind = InUse if taken else UserError
            raise kind(f"{folder} {why}, or choose another --out") from None
