"""The house: style, types, one direction of imports, rooms that stay small."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import memcorr

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
