"""Signs of life that `EventBus.health` goes by; none of them costs a delivery anything."""

from __future__ import annotations

from time import monotonic, time
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from eventbus.cursor import Cursor

__all__ = ["Pulse", "Trouble"]

#: What is not worth looking into, in seconds.
_BRIEF_S = 1.0


class Trouble(msgspec.Struct, frozen=True):
    """The last failures of a subscriber: since when, until when (Unix time), and why the last one."""

    since: float
    last: float
    why: str
    #: How many events had been delivered: it is over when there are more.
    delivered: int

    @classmethod
    def after(cls, former: Trouble | None, why: str, delivered: int) -> Trouble:
        now = time()
        goes_on = former is not None and former.delivered == delivered
        return cls(former.since if former is not None and goes_on else now, now, why, delivered)


class Pulse:
    """When a queued subscriber was last seen getting on."""

    __slots__ = ("_seen_s", "_settled")

    def __init__(self) -> None:
        self._seen_s = monotonic()
        self._settled = 0

    def look(self, cursor: Cursor) -> None:
        """Called every now and then while events come."""
        settled = cursor.delivered + cursor.failed + cursor.timed_out + cursor.dropped
        if settled != self._settled or not cursor.pending:
            self._settled = settled
            self._seen_s = monotonic()

    def stuck_s(self, cursor: Cursor) -> float:
        """For how long events have been pending and none was settled, as far as is known."""
        self.look(cursor)
        quiet_s = monotonic() - self._seen_s
        oldest = cursor.oldest() if quiet_s > _BRIEF_S else None
        return min(quiet_s, time() - oldest.event.time) if oldest is not None else 0.0
