"""Datasets and ROS recordings that are wrong in some way, by the hundred: refused in one line, or every row arrives.

    MEMCORR_FUZZ=5000 python -m pytest -s -n 0 tests/recordings/test_import_fuzz.py     # how many; usually 120

In a process of its own: it neither ends by itself, nor hangs, nor grows. Bytes are damaged, as elsewhere; here values
are, too: in tables, in image cells, in descriptions, in messages.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
COUNT = int(os.environ.get("MEMCORR_FUZZ", "120"))
SECONDS = 60  # for one import: more is a hang
MEGABYTES = 1024

Mutation = Callable[[random.Random, Path], None]
TABLE = "chunk-000/file-000.parquet"
TABLES = ("meta/tasks.parquet", f"meta/episodes/{TABLE}", f"data/{TABLE}", f"data/{TABLE}")


def nonsense(rng: random.Random) -> Any:
    numbers = [0, 1, -1, 7, 2**31, 2**62, -1e300, 0.5, float("nan"), float("inf"), True, None]
    return rng.choice(
        [*numbers, "", "x", "x" * 300, "../..", "{chunk_index:0999999d}", "ドア", [], [1, 2], {}, {"a": 1}]
    )


def in_json(rng: random.Random, root: Path) -> None:
    """Some value of the description, the mapping or the calibration is another."""
    path = rng.choice(sorted(root.rglob("*.json")))
    content = json.loads(path.read_text())
    at = content
    while isinstance(at, dict | list) and at:
        key = rng.choice(list(at) if isinstance(at, dict) else range(len(at)))
        if not isinstance(at[key], dict | list) or not at[key] or rng.random() < 0.3:
            at[key] = nonsense(rng)
            break
        at = at[key]
    path.write_text(json.dumps(content))


def in_table(rng: random.Random, root: Path) -> None:
    """Rows lost, doubled, exchanged; values of a column changed; a column lost or of another type."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = root / rng.choice(TABLES)
    table = pq.read_table(path)
    rows, name = list(range(len(table))), rng.choice(table.column_names)
    match rng.randrange(5):
        case 0:
            del rows[rng.randrange(len(rows))]
            table = table.take(rows)
        case 1:
            table = table.take([*rows, rng.choice(rows)])
        case 2:
            rng.shuffle(rows)
            table = table.take(rows)
        case 3:
            table = table.drop_columns([name])
        case 4:
            values = table[name].to_pylist()
            values[rng.randrange(len(values))] = rng.choice([nonsense(rng), rng.choice(values)])
            try:
                column = pa.array(values, table[name].type)
            except (pa.ArrowException, TypeError, ValueError, OverflowError):
                column = pa.array([str(v) for v in values])
            table = table.set_column(table.column_names.index(name), name, column)
    pq.write_table(table, path)


def in_image(rng: random.Random, root: Path) -> None:
    """One cell holds another picture, another format, a bomb, or none."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    from PIL import Image

    path = root / f"data/{TABLE}"
    table = pq.read_table(path)
    name = rng.choice([n for n in table.column_names if n.startswith("observation.images.")])
    cells, content = table[name].to_pylist(), io.BytesIO()
    size = rng.choice([(16, 16), (16, 16), (1, 1), (17, 16), (9000, 9000), (4096, 4096)])
    mode = rng.choice(["L", "RGB", "RGBA", "P", "1", "I;16", "F"])
    kind = rng.choice(["PNG", "TIFF", "JPEG", "GIF", "EPS", "BMP"])
    if size[0] > 4096:  # small as a file, so that what is measured is the importer's memory and not this program's
        mode, kind = "L", "PNG"
    try:
        Image.new(mode, size).save(content, kind)
        cell: dict[str, Any] | None = {"bytes": content.getvalue(), "path": None}
    except (OSError, KeyError, ValueError):
        broken: list[dict[str, Any] | None] = [{"bytes": b"", "path": None}, {"bytes": None, "path": "../x.png"}, None]
        cell = rng.choice(broken)
    cells[rng.randrange(len(cells))] = cell
    table = table.set_column(table.column_names.index(name), name, pa.array(cells, table[name].type))
    pq.write_table(table, path)


def in_bytes(rng: random.Random, root: Path) -> None:
    from tests.test_files import damaged

    path = rng.choice(sorted(p for p in root.rglob("*") if p.is_file()))
    random.seed(rng.random())
    path.write_bytes(damaged(path.read_bytes(), rng.randrange(6), rng.random(), rng.randint(1, 300)))


def rows_of(root: Path) -> int:
    import pyarrow.parquet as pq

    return sum(pq.read_metadata(path).num_rows for path in root.glob("data/*/*.parquet"))


def write_wrong_bag(rng: random.Random, path: Path) -> int:
    """A recording in which about one message is lost, doubled, or says something else; how many rows it has."""
    from mcap_ros2.writer import Writer

    from tests.torture.kinds import write_bags

    right, chance, images, sent = Writer.write_message, rng.choice([0.0, 0.03, 0.3]), list[float](), list[float]()

    def write(self: Any, topic: str, schema: Any, message: Any, log_time: int, publish_time: int) -> None:
        times = 1
        if rng.random() < chance:
            times = rng.choice([0, 1, 1, 1, 2])
            at, key = message, rng.choice(list(message))
            while isinstance(at[key], dict) and at[key]:
                at, key = at[key], rng.choice(list(at[key]))
            old, value = at[key], nonsense(rng)
            if rng.random() < 0.7:
                numeric = isinstance(value, int | float) and isinstance(old, int | float)
                with contextlib.suppress(ValueError, OverflowError):
                    at[key] = type(old)(value) if numeric else value
        for _ in range(times):
            try:
                right(self, topic, schema, message, log_time=log_time, publish_time=publish_time)
            except Exception:  # nobody can say that
                at[key] = old
                right(self, topic, schema, message, log_time=log_time, publish_time=publish_time)
            stamp = message["header"]["stamp"] if "header" in message else {}
            when = (stamp.get("sec") or 0) + 1e-9 * (stamp.get("nanosec") or 0) or 1e-9 * log_time
            if topic == "/camera/color/image_raw":
                images.append(when)
            if topic == "/command":
                sent.append(1e-9 * log_time)

    Writer.write_message = write  # type: ignore[assignment, method-assign]
    try:
        write_bags(path)
    finally:
        Writer.write_message = right  # type: ignore[method-assign]
    return sum(when <= max(sent, default=0.0) + 1e-6 for when in images)


def one(rng: random.Random, here: Path, good: Path) -> str:
    """What became of one wrong dataset or recording."""
    from memcorr.demos.store import Store
    from memcorr.errors import UserError
    from memcorr.recordings.sidecars import import_recordings

    shutil.rmtree(here, ignore_errors=True)
    here.mkdir()
    if rng.random() < 0.7:
        kind, root = "lerobot", shutil.copytree(good, here / "dataset")
        how = rng.choices([in_json, in_table, in_image, in_bytes], [3, 4, 2, 2])[0]
        for _ in range(rng.choice([1, 1, 2])):
            how(rng, root)
        name = how.__name__
    else:
        kind, root, name = "mcap", here / "bags", "in_messages"
        root.mkdir()
        wanted = write_wrong_bag(rng, root / "pair-000-open.mcap")
        if rng.random() < 0.3:
            in_json(rng, root)
            name = "in_json of ROS"
    try:
        import_recordings(kind, root, here / "store")  # type: ignore[arg-type]
    except UserError as problem:
        assert "\n" not in str(problem) and str(here) in str(problem), problem
        assert not (here / "store/collection.json").exists()
        return f"{kind} {name}: refused"
    arrived = sum(len(d) for d in Store.open(here / "store").present())
    if kind == "lerobot":
        wanted = rows_of(root)
    assert arrived == wanted, f"{kind} {name}: {arrived} rows of {wanted}"
    return f"{kind} {name}: taken"


class Kept:
    """One reader of tables for all datasets: to start it takes longer than to import one."""

    process: Any = None

    def ask(self, *arguments: Any, **seconds: float) -> Any:
        from memcorr.workers import Answering, NoAnswer

        self.process = self.process or Answering()
        try:
            return self.process.ask(*arguments, **seconds)
        except NoAnswer as problem:
            print(f"\nno answer: {problem}", file=sys.stderr)
            self.process = None
            raise

    def close(self) -> None:
        """Not yet."""


def many(seed: int, count: int, here: Path) -> None:
    """Prints what became of all of them, as JSON."""
    from memcorr.recordings import tables
    from tests.torture.kinds import source_of_exports, write_dataset

    kept = Kept()
    tables.Answering = lambda: kept  # type: ignore[assignment, misc, return-value]

    rng, tally = random.Random(seed), Counter[str]()
    write_dataset(source_of_exports(here), here / "dataset/meta/info.json")
    (here / "dataset/meta/memcorr.json").unlink()
    (here / "dataset/mapping.json").write_text(json.dumps({"tasks": {"open": "open"}, "pairs": [[0, 1]]}))

    def hang(*_: Any) -> None:
        raise TimeoutError("a hang")

    signal.signal(signal.SIGALRM, hang)
    for number in range(count):
        state = rng.getstate()
        signal.alarm(SECONDS)
        try:
            tally[one(rng, here / "one", here / "dataset")] += 1
        except BaseException as problem:
            at = traceback.extract_tb(problem.__traceback__)[-1]
            print(
                f"\nnumber {number}: {type(problem).__name__}: {problem} ({at.filename}:{at.lineno})", file=sys.stderr
            )
            tally["broken"] += 1
            rng.setstate(state)
            rng.random()
        signal.alarm(0)
    # What getrusage says is not of this program alone: it begins with the memory of the process that started it.
    status = Path("/proc/self/status").read_text().splitlines()
    peak = next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1024
    print(json.dumps({**dict(sorted(tally.items())), "peak MB": round(peak)}))


@pytest.mark.long
def test_what_is_wrong_is_refused_or_all_of_it_arrives(tmp_path: Path) -> None:
    program = f"from pathlib import Path; from {__name__} import many; many(1, {COUNT}, Path({str(tmp_path)!r}))"
    program = program.replace(f"from {__name__} ", "from tests.recordings.test_import_fuzz ")
    result = subprocess.run([sys.executable, "-W", "ignore", "-c", program], cwd=ROOT, capture_output=True, text=True)
    wrong = [line for line in result.stderr.splitlines() if line.startswith("number ")]
    assert result.returncode == 0, result.stderr[-3000:]
    tally = json.loads(result.stdout.splitlines()[-1])
    print(tally)
    assert "broken" not in tally, wrong
    assert tally["peak MB"] <= MEGABYTES
    assert sum(n for name, n in tally.items() if "refused" in name) > COUNT / 3
    assert sum(n for name, n in tally.items() if "taken" in name) > COUNT / 20
