"""Adds `observation.environment_state`, which of the two tasks a row is of, to a dataset of `memcorr export lerobot`.

    python -m lerobot_policy_memcorr.task_code DATASET OUT

The environment has the same feature, so that a policy that takes no text can be conditioned on the task. Depth and
mask, which a colour policy cannot use, are left out, and so are the camera and whatever only the simulator knows.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from lerobot.datasets.dataset_tools import add_features, remove_feature
from lerobot.datasets.lerobot_dataset import LeRobotDataset
from lerobot.utils.constants import OBS_ENV_STATE

KEPT = ("observation.images.rgb", "observation.state", "action")


def code(source: Path, out: Path) -> None:
    data = LeRobotDataset("local/memcorr", root=source)
    tasks = list(data.meta.tasks.index)
    numbers = np.asarray(data.hf_dataset["task_index"]).ravel().astype(int)
    codes = np.eye(len(tasks), dtype=np.float32)[numbers]
    feature = {"dtype": "float32", "shape": (len(tasks),), "names": tasks}
    bare = out.with_name(out.name + "-without-code")
    others = [k for k in data.meta.features if k.startswith(("observation.", "extra.")) and k not in KEPT]
    smaller = remove_feature(data, others, output_dir=bare, repo_id="local/memcorr")
    add_features(smaller, {OBS_ENV_STATE: (codes, feature)}, output_dir=out, repo_id="local/memcorr")


if __name__ == "__main__":
    code(Path(sys.argv[1]), Path(sys.argv[2]))
    print(f"wrote {sys.argv[2]}")
