"""The lab's page, clicked through in headless Chromium: position, camera, play, push, swap, step, record, Ctrl-C."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import cv2
import numpy as np
import pytest

from memcorr.demos.store import Store
from memcorr.show.video import is_whole

pytest.importorskip("viser", reason="memcorr[lab] is not installed")
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

ROOT = Path(__file__).parents[2]
PATIENCE = 1200  # seconds; a machine without a graphics card, busy with other things, draws slowly
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = ("--no-sandbox", "--use-angle=swiftshader", "--enable-unsafe-swiftshader", "--ignore-gpu-blocklist")
READING, NOTE = '[data-lab="reading"]', '[data-lab="note"]'
SLIDERS = ("speed", "u x", "u y", "joint", "camera")  # in the order of the page

# Resolves when the slider's reading and the live picture are other ones than before; the clock starts with the key.
# Not when any reading is: a slot that looks ahead after the last change would be taken for the answer to this one.
WATCH = """() => {
  const read = () => document.querySelector('[data-lab="reading"]')?.innerText.match(/u = .*°/)?.[0];
  const drawn = () => document.querySelector('img').src;
  const before = [read(), drawn()];
  window.labChange = new Promise(resolve => {
    let pressed = null;
    addEventListener('keydown', () => { pressed = performance.now(); }, {capture: true, once: true});
    const observer = new MutationObserver(() => {
      if (pressed === null || read() === before[0] || drawn() === before[1]) return;
      observer.disconnect();
      resolve(performance.now() - pressed);
    });
    observer.observe(document.body, {subtree: true, childList: true, characterData: true, attributes: true});
  });
}"""
FRAME_MS = """() => new Promise(resolve => {
  let last = performance.now(), longest = 0, count = 0;
  const next = () => {
    const now = performance.now();
    longest = Math.max(longest, now - last); last = now;
    if (++count === 5) resolve(longest); else requestAnimationFrame(next);
  };
  requestAnimationFrame(next);
})"""


@pytest.fixture
def lab(store: Store, tmp_path: Path) -> Iterator[tuple[subprocess.Popen, str, Path]]:
    """`memcorr lab` as a person starts it: process, address, log."""
    log = tmp_path / "log"
    command = [sys.executable, "-m", "memcorr", "lab", "--data", str(store.root), "--out", str(tmp_path), "--port", "0"]
    with log.open("w") as out:
        process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT)
    try:
        while (found := re.search(r"open (http://\S+)", log.read_text())) is None:
            assert process.poll() is None, log.read_text()
            time.sleep(0.2)
        yield process, found[1], log
    finally:
        process.kill()
        process.wait(30)


@pytest.fixture
def page(lab: tuple[subprocess.Popen, str, Path]) -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("no Chromium: apt-get install -y chromium")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS), timeout=1e3 * PATIENCE)
        page = browser.new_page(viewport={"width": 1100, "height": 640})
        page.set_default_timeout(1e3 * PATIENCE)
        page.goto(lab[1])
        yield page
        browser.close()


def until(page: Any, wanted: Callable[[str], Any], where: str = READING) -> str:
    """The text at `where` as soon as it is as wanted."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        text = page.locator(where).inner_text()
        if wanted(text):
            return text
        time.sleep(0.1)
    raise AssertionError(f"still: {text!r}")


def press(page: Any, name: str, which: int = 0) -> None:
    page.get_by_role("button", name=name, exact=True).nth(which).click()


def slide(page: Any, slider: str, times: int) -> list[float]:
    """Milliseconds from each press of an arrow key to readings and picture that show it."""
    page.get_by_role("slider").nth(SLIDERS.index(slider)).focus()
    took = []
    for _ in range(times):
        page.evaluate(WATCH)
        page.keyboard.press("ArrowRight")
        took.append(page.evaluate("window.labChange"))
    return took


def step_of(text: str) -> int:
    found = re.search(r"step (\d+), u", text)
    assert found is not None, text
    return int(found[1])


@pytest.mark.long
def test_a_person_clicks_through_an_episode(
    lab: tuple[subprocess.Popen, str, Path], page: Any, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    process, _, log = lab
    page.wait_for_selector(READING)
    text = until(page, lambda text: "mm" in text)  # it looked before it was asked to move
    assert "following open, pair 0" in text and "step 0, u = 0.50, 0.50, camera 0°" in text
    assert re.search(r"frame 0\s", text) and re.search(r"0\.\d\d, \d+ points", text) and "not yet" in text

    took = slide(page, "u x", 10)
    until(page, lambda text: "u = 0.60, 0.50" in text)
    took += slide(page, "camera", 10)
    until(page, lambda text: "camera 10°" in text)
    frame_ms = page.evaluate(FRAME_MS)
    print(
        f"slider to page: median {median(took):.0f} ms of {[round(ms) for ms in took]}; a frame up to {frame_ms:.0f} ms"
    )
    record_property("slider_to_page_ms", median(took))
    assert median(took) < 2000 + 10 * frame_ms  # 150 ms where nothing else runs

    press(page, "play")
    until(page, lambda text: step_of(text) >= 9)
    press(page, "pause")
    press(page, "+x")  # of the base
    until(page, lambda text: "u = 0.80, 0.50" in text)
    press(page, "set back")
    press(page, "up")
    press(page, "follow close, pair 0")
    text = until(page, lambda text: "following close, pair 0, begun at step" in text and "frame 0" in text)
    before = step_of(text)
    press(page, "step")
    assert before >= 9 and step_of(until(page, lambda text: step_of(text) > before)) == before + 1

    press(page, "record video and .rrd")
    said = until(page, lambda text: text.startswith("wrote "), NOTE)
    film, rrd = tmp_path / "door-001.mp4", tmp_path / "door-001.rrd"
    assert str(film) in said and is_whole(film.read_bytes()) and rrd.read_bytes()[:3] == b"RRF"

    picture = cv2.imdecode(np.frombuffer(page.screenshot(), np.uint8), cv2.IMREAD_COLOR)
    assert picture is not None
    cv2.imwrite(str(tmp_path / "page.png"), picture)
    box = page.locator("canvas[data-engine]").bounding_box()
    scene = picture[:, int(box["x"]) : int(box["x"] + box["width"])].astype(int)
    red = (scene[..., 2] > 90) & (scene[..., 2] > 2 * scene[..., 0]) & (scene[..., 2] > 2 * scene[..., 1])
    assert red.sum() > 500  # two robots stand in the 3D scene

    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0 and log.read_text().rstrip().endswith("stopped"), log.read_text()
