"""The house: style, types, one direction of imports, rooms that stay small, short tests, a wheel that works."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

import memcorr
from tests import costs

ROOT = Path(__file__).parents[1]


def run(*command: str) -> None:
    result = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    "command", [["ruff", "check"], ["ruff", "format", "--check"], pytest.param(["mypy"], marks=pytest.mark.long)]
)
def test_clean(command: list[str]) -> None:
    run("-m", *command)


def test_imports_point_one_way_along_the_flow() -> None:
    run("-c", "from importlinter.cli import lint_imports_command as lint; lint(['--no-cache'])")


def test_no_room_is_overcrowded() -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    code = [Path(name) for name in tracked if name.startswith(("memcorr/", "tests/", "examples/"))]
    for folder in {path.parent for path in code}:
        files = [path.name for path in code if path.parent == folder and path.name != "__init__.py"]
        assert len(files) <= 10, (folder, files)


def test_a_report_loads_neither_torch_nor_mujoco(tmp_path: Path) -> None:
    code = (
        "import sys; from memcorr.report.page import write_report; "
        f"write_report([{str(ROOT / 'results/zeros')!r}], {str(tmp_path)!r}); "
        "assert not {'torch', 'mujoco', 'metaworld'} & set(sys.modules)"
    )
    run("-c", code)


def test_the_public_names_are_there_and_light() -> None:
    for name in memcorr.__all__:
        assert getattr(memcorr, name) is not None
    assert set(memcorr.__all__) == set(dir(memcorr))
    run("-c", "import sys, memcorr; assert not {'torch', 'mujoco', 'numpy'} & set(sys.modules)")
    run("-m", "memcorr", "--version")


def test_links_between_pages_lead_somewhere() -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    broken = []
    for page in (ROOT / name for name in tracked if name.endswith(".md")):
        text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
        for link in re.findall(r"\]\(([^)\s]+)\)", text):
            target, _, part = link.partition("#")
            if link.startswith(("http://", "https://", "mailto:")):
                continue
            there = page if not target else page.parent / target
            if not there.exists():
                broken.append(f"{page.relative_to(ROOT)}: {link}")
            elif part and there.suffix == ".md" and part not in anchors(there.read_text()):
                broken.append(f"{page.relative_to(ROOT)}: {link} (no such heading)")
    assert not broken, "\n".join(broken)


def anchors(page: str) -> set[str]:
    """As GitHub names the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page, flags=re.M)
    plain = [re.sub(r"[`*_]|\[|\]\([^)]*\)", "", heading) for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in plain}


@pytest.mark.long
def test_the_wheel_works_in_an_empty_environment_and_from_any_folder(tmp_path: Path) -> None:
    """Built from the tracked files, installed with what it declares and nothing else."""
    source, work = tmp_path / "source", tmp_path / "elsewhere"
    work.mkdir()
    tracked = subprocess.run(
        ["git", "ls-files", "-z", "memcorr", "pyproject.toml", "README.md", "LICENSE"], cwd=ROOT, capture_output=True
    )
    for name in tracked.stdout.decode().split("\0")[:-1]:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, source / name)
    venv.create(tmp_path / "empty", with_pip=True)
    python = str(tmp_path / "empty/bin/python")
    outside = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}

    def there(*command: str) -> str:
        result = subprocess.run(command, cwd=work, env=outside, capture_output=True, text=True)
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout + result.stderr

    there(python, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(work), str(source))
    (wheel,) = work.glob("memcorr-*.whl")
    there(python, "-m", "pip", "install", "--quiet", str(wheel))
    where = there(python, "-c", "import memcorr; print(memcorr.__file__)")
    assert str(tmp_path / "empty") in where
    said = there(str(tmp_path / "empty/bin/memcorr"), "demo")
    assert said.count("done after") == 8 and (work / "demo/demo.html").stat().st_size > 1e6


TESTS = """
import time
import pytest

def burn(seconds):
    begun = time.process_time()
    while time.process_time() - begun < seconds:
        pass

@pytest.fixture(scope="module")
def shared():
    burn(0.5)

@pytest.fixture
def own():
    burn(0.5)

def test_quick(shared): pass
def test_slow(): burn(0.5)
def test_slow_fixture(own): pass
@pytest.mark.long
def test_long(): burn(0.5)
"""


def test_a_slow_test_fails_and_a_quick_one_does_not(tmp_path: Path) -> None:
    """With a fiftieth of the limit: a tenth of a second, on a machine up to five times as slow as an idle one."""
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "conftest.py").write_text("from tests.costs import *\n")
    environment = {**os.environ, "MEMCORR_TEST_PATIENCE": "0.02", "PYTHONPATH": str(costs.ROOT)}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-rA",
        "-p",
        "no:cacheprovider",
        "-c",
        "/dev/null",
        "--rootdir",
        ".",
    ]
    said = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True).stdout
    failed = {line.split("::")[1].split()[0] for line in said.splitlines() if line.startswith("FAILED")}
    assert failed == {"test_slow", "test_slow_fixture"}, said
    assert "more than" in said and "pytest.mark.long" in said


@pytest.mark.parametrize(
    ("processor", "clock", "now", "before", "slow"),
    [
        (4.9, 14.0, (1.0, 1.0), (1.0, 1.0), False),
        (5.1, 5.1, (1.0, 1.0), (1.0, 1.0), True),
        (0.1, 16.0, (1.0, 1.0), (1.0, 1.0), True),  # asleep
        (11.0, 30.0, (2.4, 6.0), (1.0, 1.0), False),  # beside other programs
        (11.0, 30.0, (1.0, 1.0), (2.4, 6.0), False),  # which have ended since
        (13.0, 30.0, (2.4, 6.0), (1.0, 1.0), True),  # but slow all the same
    ],
)
def test_the_limit_grows_with_what_other_programs_take(
    processor: float,
    clock: float,
    now: tuple[float, float],
    before: tuple[float, float],
    slow: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(costs, "slowness", lambda: costs.Slowness(*now))
    monkeypatch.setattr(costs, "AT_THE_BEGINNING", [costs.Slowness(*before)])
    monkeypatch.delenv("MEMCORR_TEST_PATIENCE", raising=False)
    meter = costs.Meter()
    meter.processor, meter.clock = processor, clock
    assert bool(costs.too_slow(meter)) == slow


def test_slowness_is_that_of_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work that takes three times the yardstick's seconds of the processor, and five times them by the clock."""
    passed = {"processor": 0.0, "clock": 0.0}

    def work() -> float:
        passed["processor"] += 3 * costs.YARDSTICK
        passed["clock"] += 5 * costs.YARDSTICK
        return 0.0

    monkeypatch.setattr(costs, "work", work)
    monkeypatch.setattr(costs.time, "thread_time", lambda: passed["processor"])
    monkeypatch.setattr(costs.time, "monotonic", lambda: passed["clock"])
    assert costs.slowness() == pytest.approx((3.0, 5.0))
