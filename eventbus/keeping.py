"""Cursors of subscribers that lose nothing and may be disabled: what waits stays in the journal meanwhile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from eventbus.durable import DurableCursor
from eventbus.events import TERMINAL
from eventbus.guard import Guard
from eventbus.spill import SpillCursor

if TYPE_CHECKING:
    from eventbus.cursor import Cursor
    from eventbus.entry import Entry

__all__ = ["KEEPING"]


class Keeping(Guard):
    """Takes over every event; hands out none while the subscriber is disabled, until the oldest is the trial.

    The end of a run cannot overtake what waits, so when it comes the oldest is tried at once; the same when the bus
    closes. Nobody waits for what is kept, `flush` least of all.
    """

    def is_held(self) -> bool:
        return self.breaker.is_open and not self.breaker.tries()

    def feed(self, batch: Sequence[Entry], size: int) -> None:
        if self.breaker.is_open and any(isinstance(entry.event, TERMINAL) for entry in batch):
            self.breaker.hasten()
        super(Guard, self).feed(batch, size)

    def take(self) -> Entry | None:
        return None if self.is_held() else super(Guard, self).take()

    def queued(self) -> int:
        return 0 if self.is_held() else super().queued()

    def oldest(self) -> Entry | None:
        return self.running if self.is_held() else super().oldest()

    def end(self) -> None:
        self.breaker.hasten()
        super().end()


class _KeepingSpill(Keeping, SpillCursor):
    """``overflow="spill"`` with a breaker."""


class _KeepingDurable(Keeping, DurableCursor):
    """``durable=True`` with a breaker."""


#: The cursor with a breaker in the place of the one without.
KEEPING: Mapping[type[Cursor], type[Guard]] = {SpillCursor: _KeepingSpill, DurableCursor: _KeepingDurable}
