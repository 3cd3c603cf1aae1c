"""Draws docs/pictures/method.png: the method in one picture, from a recorded reference and a real rollout.

python scripts/draw_method.py                     # records the reference first (half a minute)
python scripts/draw_method.py --data demo/demos   # or takes the one that `make demo` left
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import NamedTuple

import matplotlib
import numpy as np
import tyro

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
INK, YELLOW = "#202020", "#ffe119"
FIELDS = [GREEN] * 3 + [ORANGE] * 3 + [PURPLE] * 3 + [BLUE] * 3 + ["#c9c9c9", "#e6e6e6"] + ["white"] * 4
HEADING = "A frozen matcher finds 16 points\nof the reference in the live image;\ndepth lifts both to 3D. Per point:"
VECTORS = {
    GREEN: "live point to\nlive gripper",
    ORANGE: "reference point to\nreference gripper",
    PURPLE: "future motion: the same\n5, 10, 15 frames later",
    BLUE: "displacement from\nreference to live point",
}
WIDTH, HEIGHT = 9.0, 5.6  # inches; coordinates below are inches from the lower left corner
SEED, SCENE, REPLANS = 7, 0, 4  # a fresh scene of the combined shift, four plans into its rollout
Point = Array | tuple[float, float]
VIEW = (24.5, 106.5, 98.5, 18.5)  # left, right, bottom, top of what is shown of the 128 x 128 pixels


class Moment(NamedTuple):
    """One decision of a rollout: what was shown, what was seen and what was planned."""

    reference: memcorr.Demonstration
    live: memcorr.Frame
    plan: memcorr.Plan


def rollout(data: Path) -> Moment:
    """The shipped policy closes the door of a scene outside its training, up to the plan that is drawn."""
    reference = memcorr.Store.open(data).demonstration(pair=0, task="close")
    follower, world = memcorr.load_policy().follow(reference), memcorr.World()
    world.reset(evaluation_scenes("combined", seed=SEED)[SCENE])
    for replan in range(REPLANS):
        for action in follower.plan(world.observe(), replan * SPEC.executed).actions[: SPEC.executed]:
            world.step(action)
    live = world.observe()
    return Moment(reference, live, follower.plan(live, REPLANS * SPEC.executed))


def panel(frame: memcorr.Frame, x: float, y: float, width: float, view: tuple[float, ...] = VIEW) -> Axes:
    left, right, bottom, top = view
    height = width * (bottom - top) / (right - left)
    axes = plt.axes((x / WIDTH, y / HEIGHT, width / WIDTH, height / HEIGHT))
    axes.imshow(frame.rgb, interpolation="bicubic")
    axes.set(xlim=(left, right), ylim=(bottom, top), xticks=[], yticks=[])
    return axes


def arrow(axes: Axes, start: Point, end: Point, colour: str = INK, width: float = 1.6) -> None:
    style = {"arrowstyle": "-|>", "color": colour, "lw": width, "shrinkA": 0, "shrinkB": 0, "mutation_scale": 12}
    axes.annotate("", (end[0], end[1]), (start[0], start[1]), arrowprops=style, zorder=5)


def dots(axes: Axes, uv: Array, colour: str, size: float = 16, edge: str = INK) -> None:
    u, v = np.atleast_2d(uv).T
    axes.scatter(u, v, size, colour, edgecolors=edge, lw=1.2, zorder=6)


def note(axes: Axes, uv: Point, text: str, right: float, up: float) -> None:
    """White words, `right` and `up` of a pixel in points."""
    words = axes.annotate(
        text, (uv[0], uv[1]), (right, up), textcoords="offset points", ha="center", va="center", fontsize=8.5
    )
    words.set(color="white", path_effects=[withStroke(linewidth=2, foreground=INK)])


def draw_frames(moment: Moment, y: float, width: float) -> None:
    """Reference and live frame, the matched points, and the vectors of one of them."""
    j, matches, live = moment.plan.phase, moment.plan.matches, moment.live
    assert j is not None and matches is not None
    shown, some = moment.reference.frame(j), matches.valid
    left, right = panel(shown, 0.1, y, width), panel(live, 0.45 + width, y, width)
    p_ref, p_live = shown.camera.project(matches.p_ref[some])[0], live.camera.project(matches.p_live[some])[0]
    elsewhere = live.camera.project(matches.p_ref[some])[0]  # where the live camera would see the reference's points
    g_ref, g_live = (frame.camera.project(frame.gripper)[0] for frame in (shown, live))
    future = shown.camera.project(moment.reference.gripper[j + np.array(SPEC.future_offsets[1:])])[0]
    one = int(np.argmin(p_ref[:, 0]))  # at the tip of the handle
    for i, (r, q) in enumerate(zip(p_ref, p_live, strict=True)):
        colour, thick = (INK, 1.6) if i == one else ("0.72", 0.8)
        line = ConnectionPatch(r, q, "data", "data", axesA=left, axesB=right, zorder=4, color=colour, lw=thick)
        left.figure.add_artist(line)
    dots(left, p_ref, "white")
    dots(right, p_live, "white")
    for g in future:
        arrow(left, p_ref[one], g, PURPLE)
    arrow(left, p_ref[one], g_ref, ORANGE, 2.4)
    arrow(right, p_live[one], g_live, GREEN, 2.4)
    arrow(right, elsewhere[one], p_live[one], BLUE, 2.4)
    dots(right, elsewhere[one], "none", 34, BLUE)
    dots(left, future, PURPLE, 22)
    for axes, g, colour in ((left, g_ref, ORANGE), (right, g_live, GREEN)):
        dots(axes, g, colour, 40)
        note(axes, g, "gripper", -36, 0)
    note(left, p_ref[one], "one of 16\nmatched points", 0, -24)
    left.set_title(f"Reference: frame {j} of a demonstration", fontsize=9.5, pad=4)
    right.set_title("Live: door elsewhere, camera turned by 15°", fontsize=9.5, pad=4)


def draw_legend(page: Axes, x: float, y: float) -> None:
    page.text(x, y, HEADING, va="top", fontsize=8.5)
    for i, (colour, text) in enumerate(VECTORS.items()):
        height = y - 0.85 - 0.44 * i
        arrow(page, (x, height), (x + 0.32, height), colour, 2.4)
        page.text(x + 0.4, height, text, va="center", fontsize=8.5)


def draw_tokens(page: Axes, x: float, y: float, w: float = 0.165, h: float = 0.15) -> None:
    """The four tokens of one point: coloured fields in the paper's order."""
    for row, offset in enumerate(SPEC.future_offsets):
        for k, colour in enumerate(FIELDS):
            page.add_patch(Rectangle((x + k * w, y - 0.2 * row), w, h, fc=colour, ec=INK, lw=0.5))
        page.text(x - 0.06, y - 0.2 * row + h / 2, f"+{offset}", ha="right", va="center", fontsize=8.5)
    page.text(x + 9 * w, y + 0.5, f"{SPEC.tokens} relation tokens × {SPEC.token_fields}", ha="center", weight="bold")
    page.text(x + 9 * w, y + 0.26, "four per point, one for each future offset", ha="center", fontsize=8.5)
    for field, text in ((6.0, "the four vectors, x y z"), (13, "confidence,\noffset"), (16.5, "zeros")):
        page.text(x + field * w, y - 0.66, text, ha="center", va="top", fontsize=8.5, linespacing=1.1)


def draw_flow(page: Axes, x: float, y: float, width: float, height: float) -> None:
    """The network, and the arrows from the frames through it and back."""
    shape = "round,pad=0,rounding_size=0.1"
    page.add_patch(FancyBboxPatch((x, y), width, height, boxstyle=shape, fc="#eef3fb", ec=INK))
    given = f"{SPEC.ddim_steps} DDIM steps from noise;\nalso given: robot state"
    page.text(x + width / 2, y + 0.7 * height, "action diffusion\nTransformer", ha="center", va="center", weight="bold")
    page.text(x + width / 2, y + 0.28 * height, given, ha="center", va="center", fontsize=8.5)
    middle = y + height / 2
    for start, end in (((1.65, 2.27), (1.65, 1.87)), ((4.9, 2.27), (3.1, 1.8)), ((7.1, 1.92), (6.7, 2.5))):
        arrow(page, start, end)
    arrow(page, (x - 0.5, middle), (x - 0.04, middle))
    arrow(page, (x + width + 0.04, middle), (6.86, middle))
    page.text(7.1, 2.2, "then look again", va="center", fontsize=9, weight="bold")


def draw_plan(page: Axes, moment: Moment, x: float, y: float, width: float) -> None:
    u, v = moment.live.camera.project(moment.live.gripper)[0]
    axes = panel(moment.live, x, y, width, (u - 30, u + 30, v + 33, v - 17))
    path = moment.live.camera.project(planned_path(moment.live.gripper, moment.plan.actions))[0]
    axes.plot(*path.T, color=YELLOW, lw=1.5)
    axes.plot(*path[: SPEC.executed + 1].T, color=YELLOW, lw=4, solid_capstyle="round")
    words = f"{SPEC.chunk} actions, {SPEC.executed} executed (thick)"
    page.text(x + width / 2, y - 0.08, words, ha="center", va="top", fontsize=9, weight="bold")


def main(data: Path | None = None) -> None:
    """Draw the method.

    Args:
        data: Demonstrations; pair 0 is the reference. Recorded first if not given.
    """
    with tempfile.TemporaryDirectory() as folder:
        if data is None:
            collect(folder, pairs=1, workers=1)
        moment = rollout(data or Path(folder))
        page = plt.figure(figsize=(WIDTH, HEIGHT), facecolor="white").add_axes((0, 0, 1, 1))
        page.set(xlim=(0, WIDTH), ylim=(0, HEIGHT))
        page.axis("off")
        draw_frames(moment, 2.3, 3.1)
    draw_legend(page, 6.82, 5.34)
    draw_tokens(page, 0.45, 1.12)
    draw_flow(page, 4.0, 0.4, 1.95, 1.2)
    draw_plan(page, moment, 6.9, 0.42, 1.75)
    out = Path(__file__).parents[1] / "docs/pictures/method.png"
    plt.savefig(out, dpi=135, pil_kwargs={"optimize": True})
    print(f"wrote {out}, {out.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    tyro.cli(main)
