"""Parquet tables of strangers, read in a process of their own: pyarrow does not return from some that are damaged.

    with Tables(remedy="copy the dataset again") as tables:
        rows = tables.rows(path, ["observation.state"], episode=3)

One process for a whole dataset. It has a time for every answer, which grows with the file; after that it is ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from ..errors import UserError, needs
from ..workers import Answering, NoAnswer

with needs("lerobot"):
    import pyarrow as pa
    import pyarrow.parquet as pq

Answer = TypeVar("Answer")
SECONDS = 20.0  # for one answer; a sound table of a few megabytes takes a hundredth of one,
BYTES_PER_SECOND = 4e6  # a large one on a slow disk this much longer


class Tables:
    """Reads tables elsewhere. What reading one raises is raised here; where it does not end, a UserError says so."""

    def __init__(self, remedy: str) -> None:
        self.remedy = remedy
        self._process: Answering | None = None

    def __enter__(self) -> Tables:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        if self._process is not None:
            self._process.close()
        self._process = None

    def task_names(self, path: Path) -> dict[int, str]:
        """The description of each task."""
        return self._asked(_task_names, path)

    def episodes(self, path: Path) -> list[dict[str, Any]]:
        """What a file of `meta/episodes` says of each, but for statistics."""
        return self._asked(_episodes, path)

    def rows(self, path: Path, columns: Sequence[str], episode: int) -> pa.Table:
        """Columns of one episode, in the order of its frames."""
        return self._asked(_rows, path, list(columns), episode)

    def length(self, path: Path) -> int:
        return self._asked(_length, path)

    def _asked(self, question: Callable[..., Answer], path: Path, *arguments: Any) -> Answer:
        if self._process is None:
            self._process = Answering()
        allowed = SECONDS + (path.stat().st_size / BYTES_PER_SECOND if path.exists() else 0)
        try:
            return self._process.ask(question, path, *arguments, seconds=allowed)
        except NoAnswer as problem:
            self._process = None
            raise UserError(f"{path} is damaged (it cannot be read: {problem}); {self.remedy}") from None


def _task_names(path: Path) -> dict[int, str]:
    table = pq.read_table(path)
    text = "task" if "task" in table.column_names else "__index_level_0__"
    return dict(zip(table["task_index"].to_pylist(), table[text].to_pylist(), strict=True))


def _episodes(path: Path) -> list[dict[str, Any]]:
    file = pq.ParquetFile(path)
    names = [name for name in file.schema_arrow.names if not name.startswith("stats/")]
    return file.read(columns=names).to_pylist()


def _rows(path: Path, columns: list[str], episode: int) -> pa.Table:
    table = pq.read_table(path, columns=columns, filters=[("episode_index", "=", episode)]).sort_by("frame_index")
    table.validate(full=True)  # what is sent is not looked at again
    return table


def _length(path: Path) -> int:
    return pq.read_metadata(path).num_rows
