"""A subscriber that burns Python in a process of its own; a module without torch, since its child imports it."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from eventbus import TrainBatchEnd

__all__ = ["BURN_S", "burn"]

#: How much work one event is, in seconds.
BURN_S = 200e-6


def burn(event: TrainBatchEnd) -> None:
    until = perf_counter() + BURN_S
    while perf_counter() < until:
        sum(range(20))
