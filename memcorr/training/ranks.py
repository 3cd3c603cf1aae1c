"""One run, several processes: `torchrun -m memcorr train` (gloo on CPUs, NCCL on CUDA).

Batch u is a pure function of (seed, update), so every process draws the same one and computes its part. The parts'
gradients are summed, each weighted by its share of the rows: the gradient of the whole batch, up to the rounding of
that sum. Process 0 alone reads and writes the folder; the others are told where the run stands.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import UserError
from .batches import Batch


@dataclass(frozen=True)
class Ranks:
    """This process among those of its run."""

    device: torch.device
    rank: int = 0
    size: int = 1

    @property
    def first(self) -> bool:
        return self.rank == 0

    def part(self, batch: Batch) -> tuple[Batch, float]:
        """This process's rows of a batch, and their share. The noises of one row stay together."""
        if self.size == 1:
            return batch, 1.0
        rows = len(batch.t) // batch.chunks_per_row
        first, last = (rows * rank // self.size for rank in (self.rank, self.rank + 1))
        if rows < self.size:
            raise UserError(f"{self.size} processes for batches of {rows} rows: give torchrun fewer")
        return batch[first * batch.chunks_per_row : last * batch.chunks_per_row], (last - first) / rows

    def add_up(self, tensor: Tensor) -> Tensor:
        """The sum over all processes, in place."""
        if self.size > 1:
            with heard():
                dist.all_reduce(tensor)
        return tensor

    def any(self, here: object) -> bool:
        """Whether it is so in any process."""
        return bool(self.add_up(torch.tensor(float(bool(here)), device=self.device)) > 0)

    def tell(self, tensors: Sequence[Tensor]) -> None:
        """What process 0 has in them, all have."""
        if self.size > 1:
            with heard():
                for tensor in tensors:
                    dist.broadcast(tensor, src=0)


@contextmanager
def heard() -> Iterator[None]:
    """When another process has gone, the rest ends in one line, too."""
    try:
        yield
    except RuntimeError as problem:
        why = str(problem).splitlines()[0]
        raise UserError(f"another process of this run has ended ({why}); the same command continues") from None


@contextmanager
def joined(device: torch.device) -> Iterator[Ranks]:
    """All processes that torchrun started; this one alone if it did not."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or "MASTER_ADDR" not in os.environ:
        yield Ranks(device)
        return
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield Ranks(device, dist.get_rank(), dist.get_world_size())
    finally:
        dist.destroy_process_group()
