"""The events that were sent to a child and are not settled yet, and the counts they are settled in."""

from __future__ import annotations

import threading
from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from eventbus.cursor import Cursor
    from eventbus.entry import Entry
    from eventbus.stats import Outcome

__all__ = ["Flight"]


class Flight:
    """What a cursor has given to a child, in order; the oldest is the cursor's running event.

    The lock keeps the thread that serves the child apart from the one that closes the bus without it. It is held for
    a few lines at a time and never while anything waits.
    """

    def __init__(self, cursor: Cursor, *, most: int, most_bytes: int) -> None:
        self._cursor = cursor
        self._most = most
        self._most_bytes = most_bytes
        self._entries: deque[Entry] = deque()
        self._bytes = 0
        self._lock = threading.RLock()
        self._is_cut = False
        #: How many of them are being handled, from the oldest.
        self.begun = 0
        #: How often the oldest was tried and failed.
        self.tries = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def oldest(self) -> Entry | None:
        return self._entries[0] if self._entries else None

    @property
    def newest_seq(self) -> int:
        return self._entries[-1].seq if self._entries else 0

    def entries(self) -> list[Entry]:
        return list(self._entries)

    def has_room(self) -> bool:
        """Whether another event may go: always one, then within the bounds."""
        return not self._entries or (len(self._entries) < self._most and self._bytes < self._most_bytes)

    def take(self) -> Entry | None:
        """Take the next event from the cursor, if there is room and one waits."""
        with self._lock:
            if self._is_cut or not self.has_room():
                return None
            entry = self._cursor.take_more() if self._entries else self._cursor.take()
            if entry is not None:
                self._entries.append(entry)
                self._bytes += entry.size
            return entry

    def settle(self, count: int, outcome: Outcome | Literal["dropped"], reason: str = "") -> bool:
        """Settle so many, from the oldest; False when somebody has done so, who closed the bus."""
        with self._lock:
            if self._is_cut or not 0 < count <= len(self._entries):
                return False
            batch = list(islice(self._entries, count))
            then = self._entries[count] if len(self._entries) > count else None
            for entry in batch:
                self._entries.popleft()
                self._bytes -= entry.size
            self.begun = max(self.begun - count, 0)
            self.tries = 0
            if outcome == "dropped":
                self._cursor.drop_batch(batch, reason, then)
            else:
                self._cursor.settle_batch(batch, outcome, then)
            return True

    def give_back(self) -> None:
        """Leave what was not settled to whoever serves the cursor next."""
        with self._lock:
            if self._entries and not self._is_cut:
                self._cursor.give_back(self.entries())
            self._is_cut = True

    def cut(self, reason: str) -> None:
        """Drop all of it, and whatever else waits; nothing is taken or settled any more. From any thread."""
        with self._lock:
            if self._entries and not self._is_cut:
                self._cursor.drop_batch(self.entries(), reason)
            self._is_cut = True
            self._cursor.drop_all(reason)
