"""Draws docs/method.png: the method in one picture, from a recorded reference and a real rollout.

python docs/method.py                     # records the reference first (half a minute)
python docs/method.py --data demo/demos   # or takes the one that `make demo` left
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from io import BytesIO
from itertools import pairwise
from pathlib import Path

import matplotlib
import numpy as np
import tyro
from numpy.typing import NDArray
from PIL import Image

import memcorr
from memcorr.demos.collect import collect
from memcorr.show.video import planned_path
from memcorr.spec import SPEC, Array
from memcorr.worlds.scenes import evaluation_scenes

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import ConnectionPatch, FancyBboxPatch, Rectangle
from matplotlib.patheffects import withStroke

GREEN, ORANGE, PURPLE, BLUE = "#2ca02c", "#f08c00", "#9b30d0", "#1f6fe0"  # as in the paper's overview
INK, GREY, YELLOW = "#202020", "#8a8a8a", "#ffe119"
WIDTH, HEIGHT = 9.0, 5.75  # inches; coordinates below are inches from the lower left corner
VIEW = (24.5, 106.5, 98.5, 18.5)  # left, right, bottom, top of what is shown of the 128 x 128 pixels
SCENE_SEED, SCENE, REPLANS = 7, 0, 2  # fresh scenes of the combined shift; two plans into the rollout


@dataclass(frozen=True)
class Moment:
    """One decision of a rollout: what was shown, what was seen and what was planned."""

    reference: memcorr.Demonstration
    live: memcorr.Frame
    plan: memcorr.Plan


def rollout(data: Path) -> Moment:
    """The shipped policy closes the door of a scene outside its training, up to the plan that is drawn."""
    reference = memcorr.Store.open(data).demonstration(pair=0, task="close")
    follower, world = memcorr.load_policy().follow(reference), memcorr.World()
    world.reset(evaluation_scenes("combined", seed=SCENE_SEED)[SCENE])
    for replan in range(REPLANS):
        for action in follower.plan(world.observe(), replan * SPEC.executed).actions[: SPEC.executed]:
            world.step(action)
    live = world.observe()
    return Moment(reference, live, follower.plan(live, REPLANS * SPEC.executed))


def panel(figure: plt.Figure, frame: memcorr.Frame, x: float, y: float, side: float) -> Axes:
    """An image at inches (x, y), `side` wide."""
    left, right, bottom, top = VIEW
    height = side * (bottom - top) / (right - left)
    axes = figure.add_axes((x / WIDTH, y / HEIGHT, side / WIDTH, height / HEIGHT))
    axes.imshow(frame.rgb, interpolation="bicubic")
    axes.set(xlim=(left, right), ylim=(bottom, top), xticks=[], yticks=[])
    return axes


def arrow(axes: Axes, start: NDArray, end: NDArray, colour: str, width: float = 2.4) -> None:
    style = {"arrowstyle": "-|>", "color": colour, "lw": width, "shrinkA": 0, "shrinkB": 0, "mutation_scale": 12}
    axes.annotate("", tuple(end), tuple(start), arrowprops=style, zorder=5)


def dots(axes: Axes, uv: Array, colour: str, size: float = 16, hollow: bool = False) -> None:
    axes.scatter(*uv.T, size, "none" if hollow else colour, edgecolors=colour if hollow else INK, lw=1.2, zorder=6)


def note(axes: Axes, point: NDArray, text: str, inches: tuple[float, float]) -> None:
    place = {"xytext": (72 * inches[0], 72 * inches[1]), "textcoords": "offset points", "ha": "center", "va": "center"}
    axes.annotate(text, tuple(point), fontsize=8.5, color="white", path_effects=[withStroke(linewidth=2, foreground=INK)], **place)


def draw_frames(figure: plt.Figure, moment: Moment, y: float, side: float) -> None:
    """Reference and live frame, the matched points, and the four vectors of one of them."""
    j, matches = moment.plan.phase, moment.plan.matches
    assert j is not None and matches is not None
    shown, live, valid = moment.reference.frame(j), moment.live, matches.valid
    left, right = panel(figure, shown, 0.1, y, side), panel(figure, live, 0.45 + side, y, side)
    p_ref, p_live = shown.camera.project(matches.p_ref[valid])[0], live.camera.project(matches.p_live[valid])[0]
    elsewhere = live.camera.project(matches.p_ref[valid])[0]  # the reference's points, where they would be seen here
    g_ref, g_live = (frame.camera.project(frame.gripper)[0] for frame in (shown, live))
    future = shown.camera.project(moment.reference.gripper[j + np.array(SPEC.future_offsets)])[0]
    one = int(np.argmin(p_ref[:, 0]))  # the tip of the handle
    for i, (r, q) in enumerate(zip(p_ref, p_live, strict=True)):
        look = {"color": INK, "lw": 1.6} if i == one else {"color": "0.72", "lw": 0.8}
        figure.add_artist(ConnectionPatch(r, q, "data", "data", axesA=left, axesB=right, zorder=4, **look))
    for axes, uv in ((left, p_ref), (right, p_live)):
        dots(axes, uv, "white")
    for point in future[1:]:
        arrow(left, p_ref[one], point, PURPLE, 1.6)
    left.plot(*future.T, color=PURPLE, lw=2.4, zorder=5)
    dots(left, future[1:], PURPLE, 22)
    arrow(left, p_ref[one], g_ref, ORANGE)
    arrow(right, p_live[one], g_live, GREEN)
    dots(right, elsewhere[one : one + 1], BLUE, 34, hollow=True)
    arrow(right, elsewhere[one], p_live[one], BLUE)
    dots(left, g_ref[None], ORANGE, 40)
    dots(right, g_live[None], GREEN, 40)
    note(left, g_ref, "gripper", (-0.5, 0))
    note(right, g_live, "gripper", (-0.5, 0))
    note(left, p_ref[one], "one of 16\nmatched points", (0, -0.32))
    left.set_title(f"Reference: frame {j} of the demonstration", fontsize=9.5, pad=4)
    right.set_title("Live: door elsewhere, camera turned by 15°", fontsize=9.5, pad=4)


def draw_legend(page: Axes, x: float, y: float) -> None:
    entries = (
        (GREEN, "live point to\nlive gripper"),
        (ORANGE, "reference point to\nreference gripper"),
        (PURPLE, "future motion: the same\n5, 10, 15 frames later"),
        (BLUE, "displacement from\nreference to live point"),
    )
    page.text(
        x,
        y,
        "16 points are matched and\nlifted to 3D. Each has four\nrelation vectors, in metres:",
        va="top",
        fontsize=9,
    )
    for i, (colour, text) in enumerate(entries):
        height = y - 0.9 - 0.5 * i
        arrow(page, np.array([x, height]), np.array([x + 0.32, height]), colour)
        page.text(x + 0.4, height, text, va="center", fontsize=8.5)


def draw_tokens(page: Axes, x: float, y: float) -> None:
    """The four tokens of one point: coloured fields in the paper's order."""
    fields = [GREEN] * 3 + [ORANGE] * 3 + [PURPLE] * 3 + [BLUE] * 3 + ["#c9c9c9", "#e6e6e6"] + ["white"] * 4
    w, h = 0.165, 0.15
    for row, offset in enumerate(SPEC.future_offsets):
        base = y - row * (h + 0.05)
        for k, colour in enumerate(fields):
            page.add_patch(Rectangle((x + k * w, base), w, h, fc=colour, ec=INK, lw=0.5))
        page.text(x - 0.06, base + h / 2, f"+{offset}", ha="right", va="center", fontsize=8)
    page.text(x + 9 * w, y + 0.52, "64 relation tokens × 18", ha="center", fontsize=10.5, weight="bold")
    page.text(x + 9 * w, y + 0.28, "the four of one point, one per future offset", ha="center", fontsize=8.5)
    below = y - 3 * (h + 0.05) - 0.06
    for k, text in ((6, "four vectors × 3"), (13, "confidence,\noffset"), (16.4, "zeros")):
        page.text(x + k * w, below, text, ha="center", va="top", fontsize=8, linespacing=1.1)


def draw_network(page: Axes, x: float, y: float, width: float, height: float) -> None:
    page.add_patch(
        FancyBboxPatch((x, y), width, height, boxstyle="round,pad=0,rounding_size=0.1", fc="#eef3fb", ec=INK)
    )
    middle = x + width / 2
    page.text(middle, y + 0.72 * height, "action diffusion\nTransformer", ha="center", va="center", weight="bold")
    page.text(
        middle,
        y + 0.3 * height,
        "20 DDIM steps from noise;\nalso given: robot state",
        ha="center",
        va="center",
        fontsize=8.5,
    )


def draw_plan(figure: plt.Figure, moment: Moment, x: float, y: float, side: float) -> None:
    axes = panel(figure, moment.live, x, y, side)
    path = moment.live.camera.project(planned_path(moment.live.gripper, moment.plan.actions))[0]
    for i, (a, b) in enumerate(pairwise(path)):
        axes.plot(*np.stack([a, b]).T, color=YELLOW, lw=3.2 if i < SPEC.executed else 1.3, solid_capstyle="round")


def main(data: Path | None = None, out: Path = Path(__file__).with_name("method.png")) -> None:
    """Draw the method.

    Args:
        data: Demonstrations; pair 0 is the reference. Recorded first if not given.
        out: The picture.
    """
    with tempfile.TemporaryDirectory() as folder:
        if data is None:
            collect(folder, pairs=1, workers=1)
        moment = rollout(data or Path(folder))
        figure = plt.figure(figsize=(WIDTH, HEIGHT), facecolor="white")
        page = figure.add_axes((0, 0, 1, 1))
        page.set(xlim=(0, WIDTH), ylim=(0, HEIGHT))
        page.axis("off")
        draw_frames(figure, moment, 2.3, 3.1)
        draw_legend(page, 6.85, 5.3)
        draw_tokens(page, 0.5, 1.12)
        draw_network(page, 4.05, 0.45, 1.95, 1.2)
        draw_plan(figure, moment, 6.95, 0.3, 1.6)
        for start, end in (((1.65, 2.27), (1.65, 1.85)), ((5.2, 2.27), (3.3, 1.85)), ((3.6, 0.95), (4.0, 0.95)), ((6.05, 0.95), (6.9, 0.95))):
            arrow(page, np.array(start), np.array(end), INK, 1.6)
    content = BytesIO()
    figure.savefig(content, format="png", dpi=200)
    Image.open(content).convert("RGB").save(out, optimize=True)
    print(f"wrote {out}, {out.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    tyro.cli(main)
