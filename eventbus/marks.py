"""The marks in the log: where a subscriber begins and ends to hear, and how far a flush waits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from eventbus.completion import Completion
from eventbus.log import Log, Mark

if TYPE_CHECKING:
    from eventbus.cursor import Cursor
    from eventbus.filters import Filter
    from eventbus.subscription import Queued

__all__ = ["Attach", "Detach", "Flush", "Spent", "Widen"]


class Attach(Mark):
    """From here on the subscriber hears events."""

    def __init__(self, log: Log, subscriber: Queued) -> None:
        self._log = log
        self._subscriber = subscriber

    def reached(self, seq: int) -> None:
        if not self._subscriber.is_closed:
            self._log.attach(self._subscriber, seq)


class Widen(Mark):
    """From here on the subscriber hears more hooks."""

    def __init__(self, log: Log, subscriber: Queued, filter: Filter) -> None:
        self._log = log
        self._subscriber = subscriber
        self._filter = filter

    def reached(self, seq: int) -> None:
        self._subscriber.heard = self._filter
        self._log.rechannel()


class Detach(Mark):
    """From here on the subscriber hears nothing, and what waits for it is dropped."""

    def __init__(self, log: Log, subscriber: Queued, reason: str) -> None:
        self._log = log
        self._subscriber = subscriber
        self._reason = reason

    def reached(self, seq: int) -> None:
        self._log.detach(self._subscriber)
        self._subscriber.cursor.drop_all(self._reason)
        self._subscriber.cursor.end()


class Spent(Mark):
    """A subscriber with ``once=True`` has got its event from what it missed."""

    def __init__(self, subscriber: Queued) -> None:
        self._subscriber = subscriber

    def reached(self, seq: int) -> None:
        self._subscriber._bus._spent(self._subscriber)


class Flush(Mark):
    """Complete when every event before it is settled, for every subscriber."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._seq = 0
        self._waiting: set[Cursor] = set()
        self.completion = Completion()

    def reached(self, seq: int) -> None:
        self._seq = seq
        cursors = [subscriber.cursor for subscriber in self._log.served()]
        self._waiting = set(cursors)
        if self not in self._log.flushes:  # an interrupted feeder begins again
            self._log.flushes.append(self)
        self.watch()
        for cursor in cursors:
            cursor.hurry()
        self._look_done()

    def watch(self) -> None:
        """Be told by the cursors that are waited for."""
        for cursor in tuple(self._waiting):
            cursor.on_settled = self._log.settled
            self.look(cursor)

    def look(self, cursor: Cursor) -> None:
        """Called after an event of the cursor was settled."""
        oldest = cursor.oldest()
        if oldest is None or oldest.seq > self._seq:
            self._waiting.discard(cursor)
            self._look_done()

    def _look_done(self) -> None:
        if not self._waiting:
            self._log.flushed(self)
            self.completion.set()  # again, if an interrupted feeder begins again
