"""`memcorr lab` on the command line: what is wrong is one line and exit code 2, before anything is written."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from memcorr.cli import main
from memcorr.demos.store import Store


def told(line: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setattr(sys, "argv", ["memcorr", "lab", *line])
    with pytest.raises(SystemExit) as stop:
        main()
    words = capsys.readouterr().err
    assert stop.value.code == 2 and words.count("\n") == 1 and words.startswith("memcorr: "), words
    return words


def test_a_taken_port_is_not_exchanged_for_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("viser", reason="memcorr[lab] is not installed")
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"port {port} (it is in use)" in told(["--port", str(port)], monkeypatch, capsys)
    assert not list(tmp_path.iterdir())


def test_without_its_extra_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.startswith("memcorr.lab.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "viser", None)
    assert told(["--port", "0"], monkeypatch, capsys) == "memcorr: viser is missing: pip install 'memcorr[lab]'\n"


def test_references_of_another_world_are_refused(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("viser", reason="memcorr[lab] is not installed")
    monkeypatch.chdir(tmp_path)
    words = told(["--data", str(store.root), "--world", "window", "--port", "0"], monkeypatch, capsys)
    assert "are of the world door" in words and not list(tmp_path.iterdir())


def test_an_empty_world_is_not_the_usual_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("viser", reason="memcorr[lab] is not installed")
    monkeypatch.chdir(tmp_path)
    assert "world ''" in told(["--world", "", "--port", "0"], monkeypatch, capsys) and not list(tmp_path.iterdir())
