"""`--cluster slurm` and `--cluster local-jobs`: units as submitit's jobs, queued by Slurm or run by this machine.

Partition, account and time limit are sbatch's own variables: SBATCH_PARTITION, SBATCH_ACCOUNT, SBATCH_TIMELIMIT.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import UserError, needs
from .pool import SLURM, Elsewhere, Lost, Report, Unit

FOLDER = Path("runs/jobs")  # submitit's own files, on the shared file system while the jobs last
HOURS, SECONDS = 24, 30.0  # a job may last; it may take to end when cancelled
LOOK_EVERY = {SLURM: 2.0}  # seconds; a local job's end is seen at once


@dataclass(frozen=True)
class Jobs(Elsewhere):
    kind: str
    workers: int  # jobs at a time on this machine
    threads: int = 1
    gpus: int = 0

    @staticmethod
    def of(kind: str, workers: int) -> Jobs:
        with needs("slurm"):
            import submitit as submitit
        if kind == SLURM and shutil.which("sbatch") is None:
            raise UserError("--cluster slurm: there is no sbatch here; give this command on a machine of the cluster")
        return Jobs(kind, workers)

    @property
    def slots(self) -> int:
        return 64 if self.kind == SLURM else self.workers

    @property
    def most(self) -> int:
        return 1000 if self.kind == SLURM else self.workers

    def needing(self, threads: int, gpus: int) -> Jobs:
        return replace(self, workers=max(1, self.workers // threads), threads=threads, gpus=gpus)

    @property
    def folder(self) -> Path:
        return FOLDER / f"{platform.node()}-{os.getpid()}"

    def begin(self, unit: Unit) -> Any:
        import submitit

        executor: Any
        if self.kind == SLURM:
            executor = submitit.SlurmExecutor(folder=self.folder)
            wanted: dict[str, Any] = {"cpus_per_task": self.threads, "time": HOURS * 60, "job_name": "memcorr"}
            wanted |= {"gpus_per_node": self.gpus} if self.gpus else {}
        else:
            executor = submitit.LocalExecutor(folder=self.folder)
            wanted = {"timeout_min": HOURS * 60}
        executor.update_parameters(**wanted)
        return executor.submit(unit)

    def ended(self, handles: Sequence[Any]) -> Sequence[Any]:
        while not (ended := [job for job in handles if job.done()]):
            time.sleep(LOOK_EVERY.get(self.kind, 0.1))
        return ended

    def answer(self, handle: Any) -> Report:
        from submitit.core.utils import UncompletedJobError

        try:
            answer = handle.result()
        except UncompletedJobError:  # its files are left to be read
            raise Lost(f"job {handle.job_id}; see {self.folder}") from None
        for file in self.folder.glob(f"{handle.job_id}_*"):
            file.unlink(missing_ok=True)
        return answer

    def end(self, handles: Sequence[Any]) -> None:
        for job in handles:
            with contextlib.suppress(Exception):  # it may have ended by itself
                job.cancel(check=False)
        until = time.monotonic() + SECONDS
        while time.monotonic() < until and not all(job.done() for job in handles):
            time.sleep(0.1)
        for folder in (self.folder, FOLDER):
            with contextlib.suppress(OSError):  # not empty
                folder.rmdir()
