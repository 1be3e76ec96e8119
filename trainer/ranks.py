"""The processes of a distributed run, and what they tell each other.

Everything here is called by all of them, between two batches or at the end of an epoch, and never after an error:
a process that failed would leave the others waiting. It goes over CPU tensors, so that no GPU is waited for.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import distributed

__all__ = ["Ranks"]

_T = TypeVar("_T")


class Ranks:
    """This process among those of `torch.distributed`, or alone when that is not initialised."""

    def __init__(self) -> None:
        self.rank = 0
        self.world_size = 1
        self._group: Any = None
        if distributed.is_available() and distributed.is_initialized():
            self.rank = distributed.get_rank()
            self.world_size = distributed.get_world_size()
            if distributed.get_backend() != "gloo":
                self._group = distributed.new_group(backend="gloo")

    @property
    def is_alone(self) -> bool:
        """Whether there is no other process to agree with."""
        return self.world_size == 1

    def any(self, flag: bool) -> bool:
        """Whether the flag is set in at least one process."""
        if self.is_alone:
            return flag
        flags = torch.tensor([flag], dtype=torch.int32)
        distributed.all_reduce(flags, op=distributed.ReduceOp.MAX, group=self._group)
        return bool(flags.item())

    def gather(self, value: _T) -> list[_T]:
        """The values of all processes, by rank; each must pickle."""
        if self.is_alone:
            return [value]
        values: list[Any] = [None] * self.world_size
        distributed.all_gather_object(values, value, group=self._group)
        return values
