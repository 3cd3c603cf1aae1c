"""`--cluster HOST:PORT`: units as tasks of a Ray cluster, of which this machine is a node, too."""

from __future__ import annotations

import functools
import logging
import os
import re
import signal
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..errors import UserError, needs
from .pool import LOCAL_JOBS, SLURM, Elsewhere, Lost, Report, Unit

SECONDS = 5.0  # to reach an address, and for cancelled tasks to end


@dataclass(frozen=True)
class Raylets(Elsewhere):
    """A Ray cluster that this process has joined."""

    address: str
    threads: int = 1
    gpus: int = 0

    @staticmethod
    def join(address: str) -> Raylets:
        """Checks what it can first: Ray itself waits for minutes and answers in pages."""
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # reports to its makers otherwise
        with needs("cluster"):
            import ray
        how = f"--cluster {address}: give HOST:PORT of a Ray cluster, {SLURM} or {LOCAL_JOBS}"
        if not (parts := re.fullmatch(r"([\w.-]+):(\d{1,5})", address)):
            raise UserError(how)
        try:
            socket.create_connection((parts[1], int(parts[2])), SECONDS).close()
        except (OSError, OverflowError) as problem:
            raise UserError(f"{how}; nothing answers there ({problem})") from None
        heard = signal.getsignal(signal.SIGTERM)
        try:
            if not ray.is_initialized():
                ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
                signal.signal(signal.SIGTERM, heard)  # Ray puts its own there
        except Exception as problem:  # whatever it is, its first line tells
            reason = str(problem).strip().splitlines()[0] if str(problem).strip() else type(problem).__name__
            need = "this machine must be a node (ray start --address), with the same RAY_AUTH_MODE and token"
            raise UserError(f"--cluster {address}: {reason}; {need}") from None
        return Raylets(address)

    @property
    def slots(self) -> int:
        import ray

        has = ray.cluster_resources()
        room = int(has.get("CPU", 0) // self.threads)
        return max(1, min(room, int(has.get("GPU", 0) // self.gpus)) if self.gpus else room)

    def needing(self, threads: int, gpus: int) -> Raylets:
        return replace(self, threads=threads, gpus=gpus)

    def begin(self, unit: Unit) -> Any:
        return remote(self.threads, self.gpus).remote(unit)

    def ended(self, handles: Sequence[Any]) -> Sequence[Any]:
        import ray

        ready, rest = ray.wait(list(handles), num_returns=1)
        return ready + (ray.wait(rest, num_returns=len(rest), timeout=0)[0] if rest else [])

    def answer(self, handle: Any) -> Report:
        import ray
        from ray.exceptions import RayError, RayTaskError

        try:
            return ray.get(handle)
        except RayTaskError as problem:  # not even Unit could catch or send it
            return Report("crashed", str(problem), "")
        except RayError as problem:
            raise Lost(f"Ray: {type(problem).__name__}") from None

    def end(self, handles: Sequence[Any]) -> None:
        import ray

        for handle in handles:
            ray.cancel(handle, force=True)
        if handles:
            ray.wait(list(handles), num_returns=len(handles), timeout=SECONDS)


@functools.cache
def remote(threads: int, gpus: int) -> Any:
    """What Ray runs. Tried again by us, so that losses are counted and reported in one way."""
    import ray

    return ray.remote(num_cpus=threads, num_gpus=gpus, max_retries=0)(call)


def call(unit: Unit) -> Report:
    return unit()
