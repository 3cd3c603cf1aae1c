"""Pictures of matches and of calibration, for people."""

from __future__ import annotations

from pathlib import Path

import matplotlib
import numpy as np
from numpy.typing import NDArray

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import ConnectionPatch

from ..demos.phase import training_reference
from ..demos.store import Store
from ..folders import written_whole
from ..spec import TASKS
from .cache import RIGHT_MM, Cache, auc

COLOURS = matplotlib.colormaps["RdYlGn"]


def draw_reliability(cache: Cache, path: Path) -> None:
    """How often confidence p is right within 10 mm."""
    valid = cache.matches.valid
    confidence = cache.matches.confidence[valid]
    right = 1e3 * np.linalg.norm(cache.residual, axis=-1)[valid] < RIGHT_MM
    edges = np.linspace(0, 1, 11)
    which = np.clip(np.digitize(confidence, edges) - 1, 0, 9)
    filled = [b for b in range(10) if (which == b).sum() >= 20]
    area = auc(confidence, right)
    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(5, 5.6), sharex=True, height_ratios=(3, 1), layout="constrained"
    )
    top.plot([0, 1], [0, 1], color="0.7", linestyle="--", label="perfectly calibrated")
    top.plot(
        [confidence[which == b].mean() for b in filled],
        [right[which == b].mean() for b in filled],
        "o-",
        color="#1f6fb4",
        label=f"measured (AUC {area:.3f})",
    )
    top.set(ylabel=f"share within {RIGHT_MM:.0f} mm", ylim=(0, 1.02), title=f"{valid.sum():,} matched points")
    top.legend(loc="upper left", frameon=False)
    bottom.hist(confidence, edges, color="0.6")
    bottom.set(xlabel="confidence", ylabel="points", yscale="log", xlim=(0, 1))
    with written_whole(path) as temporary:
        figure.savefig(temporary, format="png", dpi=130)
    plt.close(figure)


def draw_matches(cache: Cache, store: Store, path: Path) -> None:
    """Easy, hard and failed rows: reference left, query right, lines coloured by 3D error."""
    error = 1e3 * np.linalg.norm(cache.residual, axis=-1)
    mean = np.array([e[v].mean() if v.any() else np.inf for e, v in zip(error, cache.matches.valid, strict=True)])
    order = np.argsort(mean)
    n = len(order)
    cases = {
        "easy": [order[int(0.1 * n)], order[int(0.3 * n)]],
        "typical": [order[int(0.5 * n)], order[int(0.7 * n)]],
        "hard": [order[int(0.97 * n)], order[int(0.99 * n)]],
        "failed": [order[-2], order[-1]],
    }
    figure, axes = plt.subplots(2, 8, figsize=(17, 5.2), layout="constrained")
    for c, (name, rows) in enumerate(cases.items()):
        for r, row in enumerate(rows):
            _draw_row(axes[r, 2 * c], axes[r, 2 * c + 1], cache, store, int(row), error[row], name)
    scale = plt.cm.ScalarMappable(plt.Normalize(0, 20), COLOURS.reversed())
    figure.colorbar(scale, ax=axes, label="3D error, mm (line width: confidence; grey: invalid)", shrink=0.8, aspect=30)
    with written_whole(path) as temporary:
        figure.savefig(temporary, format="png", dpi=110)
    plt.close(figure)


def _draw_row(left: plt.Axes, right: plt.Axes, cache: Cache, store: Store, row: int, error: NDArray, name: str) -> None:
    d, j = int(cache.demonstration[row]), int(cache.reference_frame[row])
    query = store.demonstration(d // 2, store.tasks[d % len(TASKS)])
    reference = store.demonstration(training_reference(d // 2, int(cache.demonstration.max()) // 2 + 1), query.task)
    frames = reference.frame(j), query.frame(int(cache.anchor[row]))
    valid = cache.matches.valid[row]
    pixels = [
        frame.camera.project(p)[0]
        for frame, p in zip(frames, (cache.matches.p_ref[row], cache.matches.p_live[row]), strict=True)
    ]
    mean = f"{error[valid].mean():.1f} mm" if valid.any() else "no valid point"
    titles = (f"{name}: {query.task} {d // 2}, frame {j}", f"frame {cache.anchor[row]}, mean {mean}")
    for axis, frame, title in zip((left, right), frames, titles, strict=True):
        rows, columns = np.nonzero(frame.mask)
        axis.imshow(frame.rgb)
        axis.set_xlim(columns.min() - 12, columns.max() + 12)
        axis.set_ylim(rows.max() + 12, rows.min() - 12)
        axis.set_title(title, fontsize=9)
        axis.axis("off")
    for i in range(len(valid)):
        if not valid[i]:
            left.plot(*pixels[0][i], "x", color="0.6", markersize=5)
            continue
        colour = COLOURS(1 - min(error[i] / 20, 1))
        width = 0.4 + 1.6 * cache.matches.confidence[row, i]
        left.plot(*pixels[0][i], "o", color=colour, markersize=3)
        right.plot(*pixels[1][i], "o", color=colour, markersize=3)
        line = ConnectionPatch(
            pixels[0][i], pixels[1][i], "data", "data", axesA=left, axesB=right, color=colour, linewidth=width
        )
        line.set_in_layout(False)
        left.figure.add_artist(line)
