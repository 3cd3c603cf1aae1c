"""Draws docs/pictures/architecture.png: the rooms from a camera frame to an action, and from a recording to an update.

python scripts/draw_architecture.py
"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch

OUT = Path(__file__).parents[1] / "docs" / "pictures" / "architecture.png"
WIDTH, HEIGHT, STEP = 1.62, 0.92, 2.5
LIVE, TRAINED, SHARED = "#dbe9f6", "#e6f2de", "#fbe8cd"

# Room, what it does; and what it hands on.
FRAME_TO_ACTION = (
    ("frames.py", "camera and robot,\nchecked", "Frame"),
    ("correspondence/\nlift.py", "sixteen point pairs\nin the world", "Matches"),
    ("following/\nstep.py", "rigid motion, phase,\nprogress", "Relation"),
    ("policy/\nrelations.py", "64 tokens\nof 18 fields", "Relations"),
    ("policy/networks/\nsampler.py", "twenty denoising\nsteps", "chunk"),
    ("policy/\npolicy.py", "the robot's units,\nwithin its limit", ""),
)
RECORDING_TO_UPDATE = (
    ("demos/\nstore.py", "a demonstration,\nchecked", "recording"),
    ("training/\ndataset.py", "windows, each with\nits reference", "rows"),
    ("training/\nmixture.py", "true, measured and\nresampled matches", "Matches"),
    ("policy/\nrelations.py", "64 tokens\nof 18 fields", "Relations"),
    ("training/\nbatches.py", "standard and\npaired batches", "Batch"),
    ("training/\nloop.py", "updates, EMA,\ncheckpoints", ""),
)


def room(axes: Axes, x: float, y: float, name: str, text: str, colour: str) -> None:
    box = FancyBboxPatch(
        (x, y), WIDTH, HEIGHT, boxstyle="round,pad=0.02,rounding_size=0.08", facecolor=colour, edgecolor="#555555"
    )
    axes.add_patch(box)
    axes.text(x + WIDTH / 2, y + HEIGHT * 0.68, name, ha="center", va="center", fontsize=9.5, family="monospace")
    axes.text(x + WIDTH / 2, y + HEIGHT * 0.24, text, ha="center", va="center", fontsize=9, color="#333333")


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], text: str = "", bend: float = 0.0) -> None:
    style = {"arrowstyle": "-|>", "color": "#555555", "connectionstyle": f"arc3,rad={bend}", "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", end, start, arrowprops=style)
    if text:
        middle = (start[0] + end[0]) / 2, (start[1] + end[1]) / 2
        axes.text(middle[0], middle[1] + 0.07, text, ha="center", va="bottom", fontsize=8.5, style="italic")


def way(axes: Axes, y: float, title: str, rooms: tuple[tuple[str, str, str], ...], colour: str) -> None:
    axes.text(0, y + HEIGHT + 0.22, title, fontsize=12, weight="bold", va="bottom")
    for n, (name, text, handed_on) in enumerate(rooms):
        room(axes, n * STEP, y, name, text, SHARED if name == "policy/\nrelations.py" else colour)
        if handed_on:
            across = y + HEIGHT / 2
            arrow(axes, (n * STEP + WIDTH + 0.04, across), ((n + 1) * STEP - 0.04, across), handed_on)


def draw() -> None:
    figure, axes = plt.subplots(figsize=(14, 5.2))
    live, trained, servo = 2.55, 0.0, 4.25
    way(axes, live, "From a frame to an action", FRAME_TO_ACTION, LIVE)
    way(axes, trained, "From a recording to an update", RECORDING_TO_UPDATE, TRAINED)
    plan = 6 * STEP - 0.35
    room(axes, 3.5 * STEP, servo, "policy/servo.py", "geometry, nothing\nlearned", "#eeeeee")
    arrow(axes, (2 * STEP + WIDTH / 2, live + HEIGHT + 0.04), (3.5 * STEP - 0.04, servo + HEIGHT / 2), bend=-0.25)
    axes.text(2.35 * STEP, servo + 0.45, "Relation", fontsize=8.5, style="italic")
    arrow(axes, (5 * STEP + WIDTH + 0.04, live + HEIGHT / 2), (plan, live + HEIGHT / 2))
    arrow(axes, (3.5 * STEP + WIDTH + 0.04, servo + HEIGHT / 2), (plan + 0.3, live + HEIGHT / 2 + 0.32), bend=-0.22)
    axes.text(plan + 0.06, live + HEIGHT / 2, "Plan:\n16 actions", fontsize=9.5, va="center", style="italic")
    x = 3 * STEP + WIDTH / 2
    axes.annotate(
        "", (x, live - 0.05), (x, trained + HEIGHT + 0.05), arrowprops={"arrowstyle": "<->", "color": "#c77f1a"}
    )
    axes.text(
        x + 0.1,
        (live + trained + HEIGHT) / 2 + 0.12,
        "one function builds the tokens\nof both",
        fontsize=9,
        color="#9a5d0c",
        va="center",
    )
    axes.set_xlim(-0.2, 6 * STEP + 0.75)
    axes.set_ylim(-0.2, servo + HEIGHT + 0.2)
    axes.set_aspect("equal")
    axes.axis("off")
    figure.tight_layout(pad=0.3)
    OUT.parent.mkdir(exist_ok=True)
    figure.savefig(OUT, dpi=110)
    print(f"wrote {OUT}")


if __name__ == "__main__":
    draw()
