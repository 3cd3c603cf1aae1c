"""Adds `observation.environment_state`, which of the two tasks a row is of, to a dataset of `memcorr export lerobot`.

    python -m lerobot_policy_memcorr.task_code DATASET OUT

The environment has the same feature, so that a policy that takes no text can be conditioned on the task. Depth and
mask, which a colour policy cannot use, are left out, and so are the camera and whatever only the simulator knows.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from lerobot.datasets.dataset_tools import modify_features
from lerobot.datasets.lerobot_dataset import LeRobotDataset
from lerobot.utils.constants import OBS_ENV_STATE

from memcorr.spec import WORLD_TASKS

KEPT = ("observation.images.rgb", "observation.state", "action")


def code(source: Path, out: Path) -> None:
    data = LeRobotDataset("local/memcorr", root=source)
    told = list(data.meta.tasks.index)  # in the order of task_index
    tasks = next((list(known) for known in WORLD_TASKS.values() if set(known) == set(told)), told)  # the environment's
    numbers = np.concatenate(  # from the tables: a column of the dataset itself would decode every image
        [pq.read_table(path, columns=["task_index"])["task_index"] for path in sorted(source.glob("data/*/*.parquet"))]
    )
    codes = np.eye(len(tasks), dtype=np.float32)[[tasks.index(told[n]) for n in numbers]]
    feature = {"dtype": "float32", "shape": (len(tasks),), "names": tasks}
    others = [k for k in data.meta.features if k.startswith(("observation.", "extra.")) and k not in KEPT]
    modify_features(data, {OBS_ENV_STATE: (codes, feature)}, others, output_dir=out, repo_id="local/memcorr")


if __name__ == "__main__":
    code(Path(sys.argv[1]), Path(sys.argv[2]))
    print(f"wrote {sys.argv[2]}")
