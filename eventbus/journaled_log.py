"""The log of a bus with a journal: what is numbered is numbered by the journal, which writes it in the same instant."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from eventbus.durable import DurableCursor
from eventbus.log import Log
from eventbus.spill import SpillCursor

if TYPE_CHECKING:
    from eventbus.entry import Entry
    from eventbus.journal import Journal
    from eventbus.snapshot import Draft

__all__ = ["JournaledLog"]


class JournaledLog(Log):
    """Takes its events from `Journal.append`; its own `append` is for marks, which are not written."""

    def __init__(self, admit: Callable[[Draft], Entry], journal: Journal) -> None:
        super().__init__(admit)
        self._journal = journal

    def append(self, draft: Draft) -> None:
        draft.append(0)  # room for its number
        self._journal.number(draft, self.buffer)

    def tidy(self) -> None:
        """Move the bookmarks of those for whom nothing waits, and remove what everybody is past."""
        self._journal.retry()
        for cursor in self._durable():
            cursor.retry()
        handed = self._move_bookmarks()
        cursors = [s.cursor for s in (*self.subscribers, *self.leaving) if isinstance(s.cursor, SpillCursor)]
        self._journal.release(min([handed, *(cursor.read_up_to() for cursor in cursors)]))
        self.is_restless = bool(self._journal.lost_from) or any(cursor.waits for cursor in self._durable())
        while self._journal.errors:
            self.errors.append(self._journal.errors.popleft())

    def give_up(self, reason: str) -> None:
        """Move the bookmarks before: of what is dropped nothing is settled."""
        self._move_bookmarks()
        super().give_up(reason)

    def _move_bookmarks(self) -> int:
        handed = self.handed  # read first: what is handed on from now on may wait
        for cursor in self._durable():
            cursor.rest(handed)
        return handed

    def _durable(self) -> list[DurableCursor]:
        cursors = [subscriber.cursor for subscriber in (*self.subscribers, *self.leaving)]
        return [cursor for cursor in cursors if isinstance(cursor, DurableCursor)]
