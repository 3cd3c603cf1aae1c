"""Draws memcorr/report/pictures/scenes.png: what stands in the report's figure of positions and viewpoints.

python scripts/draw_scenes.py

Eleven views of 128 pixels side by side: four training scenes, four of the combined shift, and one scene of the
camera test from -15, 0 and +15 degrees.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from PIL import Image

import memcorr
from memcorr.worlds.scenes import demonstration_scenes, evaluation_scenes

TARGET = Path(memcorr.__file__).parent / "report/pictures/scenes.png"


def main() -> None:
    world, views = memcorr.World(), []
    fixed = evaluation_scenes("camera")[0]
    turned = [replace(fixed, camera_azimuth_deg=degrees) for degrees in (-15.0, 0.0, 15.0)]
    for scene in (*demonstration_scenes()[:4], *evaluation_scenes("combined")[:4], *turned):
        world.reset(scene)
        views.append(world.observe().rgb)
    Image.fromarray(np.concatenate(views, axis=1)).save(TARGET, optimize=True)
    print(f"wrote {TARGET}")


if __name__ == "__main__":
    main()
