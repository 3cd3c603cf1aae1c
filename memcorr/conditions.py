"""What a network is conditioned on: the boundary between data (numpy) and networks (torch).

Loss and sampler condition through the same object. Dropping the condition, for training and for
the unconditional branch of guidance, is one operation on it: no token may be attended to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Condition:
    """A batch of B conditions on one device. Relation policies carry `tokens`, visual ones `image` and `task`."""

    state: Tensor  # (B, 9) s, standardised
    keep: Tensor  # (B, 64) bool: context tokens that may be attended to
    tokens: Tensor | None = None  # (B, 64, 18) relation tokens
    image: Tensor | None = None  # (B, 5, 64, 64) RGB in [-1, 1], standardised depth, binary mask
    task: Tensor | None = None  # (B, 2) one-hot open, close

    def __len__(self) -> int:
        return len(self.state)

    def drop(self, rows: Tensor | None = None) -> Condition:
        """Without the 64 tokens in `rows` (B,) bool, or everywhere. The robot state stays."""
        keep = torch.zeros_like(self.keep) if rows is None else self.keep & ~rows[:, None]
        return replace(self, keep=keep)

    def to(self, device: torch.device | str) -> Condition:
        return self._map(lambda x: x.to(device))

    def __getitem__(self, rows: slice | Tensor) -> Condition:
        return self._map(lambda x: x[rows])

    def _map(self, change: Callable[[Tensor], Tensor]) -> Condition:
        present = {f.name: getattr(self, f.name) for f in fields(self)}
        return Condition(**{name: change(x) for name, x in present.items() if x is not None})


def stack_conditions(conditions: Sequence[Condition]) -> Condition:
    """One batch from several."""
    names = [f.name for f in fields(Condition) if getattr(conditions[0], f.name) is not None]
    return Condition(**{name: torch.cat([getattr(c, name) for c in conditions]) for name in names})
