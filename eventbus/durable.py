"""``durable=True``: a cursor that keeps on disk how far it has come, and goes on there at the next start.

That may be in another process, after whatever ended this one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from time import perf_counter
from typing import TYPE_CHECKING

from eventbus.cursor import Cursor
from eventbus.entry import Entry
from eventbus.errors import JournalError
from eventbus.event import Event
from eventbus.recording import event_of, records
from eventbus.spill import CHUNK, SpillCursor, entry_of

if TYPE_CHECKING:
    from eventbus.bookmark import Bookmark
    from eventbus.journal import Journal
    from eventbus.options import Options
    from eventbus.segment import Record
    from eventbus.stats import Outcome

__all__ = ["DurableCursor"]

#: For how long one looks for events that are heard before others have their turn.
_LOOK_S = 0.001


class DurableCursor(SpillCursor):
    """``durable=True``: lossless, and goes on where it was, at least once, with the same numbers.

    What it missed is read from the journal before anything new: while `_missed` is there, new events only leave their
    place. It is `matched` when it is read.
    """

    __slots__ = ("_admits", "_before", "_bookmark", "_is_forgotten", "_looked", "_missed", "_rewind", "waits")

    def __init__(
        self, options: Options, journal: Journal, admits: Callable[[Event], bool], rewind: Callable[[int], None]
    ) -> None:
        super().__init__(options, journal)
        #: Whether the subscriber hears an event and its conditions let it pass; counts what its `when` raises.
        self._admits = admits
        #: Told from where on events are judged again: `every` counts them from there.
        self._rewind = rewind
        self._bookmark: Bookmark | None = None
        self._missed: Iterator[Record] | None = None
        #: What was missed ends before this event, and was looked through up to that one.
        self._before = self._looked = 0
        #: The bus has to start before it can go on, or the disk refuses: what comes until then only leaves its place.
        self.waits = False
        #: The subscription was closed: there is no next start.
        self._is_forgotten = False

    def begin(self, seq: int) -> None:
        """The subscriber is attached at this point of the log: new ones hear what comes, others what they missed."""
        self._before = seq
        if self._journal.is_open:
            self._go_on()
        else:  # a bus that has travelled here, and may never start
            self.waits = self.spilling = True

    def resume(self) -> None:
        """The bus starts, perhaps again."""
        if self.waits:
            self._before = max(self._before, self._journal.opened_at)
            if self._bookmark is not None:
                self._rewind(max(self._bookmark.seq, self._looked))
            self._go_on()
        elif self._missed is not None:  # moved here: the worker elsewhere may still be at it
            self._look_from(self._looked)

    def _go_on(self) -> None:
        """Go on where the bookmark is; without one, with what comes. When the disk refuses, `rest` tries again."""
        assert self.options.name is not None  # noqa: S101  # checked with the options
        self.waits = self.spilling = True
        try:
            if self._bookmark is None:
                self._bookmark = self._journal.bookmark(self.options.name, self._before - 1)
        except OSError as error:
            self._journal.complain(f"cannot keep the place of subscriber {self.options.name!r} ({error.strerror})")
            return
        if self._is_forgotten:  # meanwhile
            self.forget()
        self._look_from(max(self._bookmark.seq, self._looked))
        self.waits = False
        self.hurry()

    def _look_from(self, seq: int) -> None:
        self._looked = seq
        self._missed = records(self._journal.directory, after=seq, before=self._before)

    def take(self) -> Entry | None:
        return None if self.waits else super().take()

    def take_more(self) -> Entry | None:
        return None if self.waits else super().take_more()

    def _refill(self) -> None:
        missed = self._missed
        if missed is None:
            super()._refill()
        else:
            self._read_missed(missed)

    def _read_missed(self, missed: Iterator[Record]) -> None:
        until = perf_counter() + _LOOK_S
        try:
            for record in missed:
                if not self._take_over(record, missed) or self._has_enough() or perf_counter() > until:
                    return
        except BaseException as error:  # begin again after what was taken over
            if self._missed is missed:
                self._look_from(self._looked)
            if isinstance(error, OSError | JournalError):  # once the disk lets us
                self._journal.complain(f"cannot be read ({error})")
                self._missed, self.waits = None, True
                return
            raise
        if self._missed is missed:
            self._missed = None
        self._end_spilling()
        self.settled()  # a flush may have waited for nothing

    def _has_enough(self) -> bool:
        return len(self._queue) >= min(CHUNK, self.maxsize) or self.bytes >= self.max_bytes

    def _take_over(self, record: Record, missed: Iterator[Record]) -> bool:
        """Take an event that was missed, if it is heard; False when there is no going on."""
        event = event_of(record)
        heard = self._admits(event)
        entry = entry_of(event, 0)
        arrived, size, seq = iter((entry,)), entry.size, record.seq
        if self._missed is not missed:
            return False
        self._looked = seq
        if heard:
            self.matched += 1
            self.pending += 1
            self.bytes += size
            self._queue += arrived
        return True

    def _end_spilling(self) -> None:
        if self._missed is None and not self.waits:
            super()._end_spilling()

    def queued(self) -> int:
        return 0 if self.waits else super().queued() + (self._missed is not None)

    def left(self) -> int:
        """One more, however much it is, when it has not even read what it missed."""
        return max(self.pending, self._missed is not None)

    def oldest(self) -> Entry | None:
        looked = self._looked  # first, as in `SpillCursor.oldest`
        if self._missed is None and not (self.waits and self._journal.is_open and not self.ended):
            return super().oldest()
        return Cursor.oldest(self) or entry_of(Event(seq=looked + 1), 0)

    def read_up_to(self) -> int:
        if self.waits or self._missed is not None:
            return self._bookmark.seq if self._bookmark is not None else self._before - 1
        return super().read_up_to()

    def retry(self) -> None:
        """Try the disk again if it refused."""
        if self.waits and not self.ended and self._journal.is_open:
            self._go_on()

    def rest(self, seq: int) -> None:
        """All up to this event was handed on: when nothing waits, it is settled."""
        if self._missed is None and not self.pending and not self.waits:
            self._advance(seq)

    def forget(self) -> None:
        self._is_forgotten = True
        if self._bookmark is not None or self._journal.is_open:  # else it is of the bus that this one is a copy of
            assert self.options.name is not None  # noqa: S101
            self._journal.forget(self.options.name)

    def _advance(self, seq: int) -> None:
        if self._bookmark is not None and seq > self._bookmark.seq:
            self._bookmark.advance(seq)

    def deliver(self, entry: Entry, seconds: float) -> bool:
        return super().deliver(entry, seconds) and self._settle(entry)

    def fail(self, entry: Entry) -> bool:
        return super().fail(entry) and self._settle(entry)

    def time_out(self, entry: Entry) -> bool:
        return super().time_out(entry) and self._settle(entry)

    def settle_batch(self, batch: Sequence[Entry], outcome: Outcome, then: Entry | None = None) -> bool:
        return super().settle_batch(batch, outcome, then) and self._settle(batch[-1])

    def _settle(self, entry: Entry) -> bool:
        self._advance(entry.seq)
        return True

    def drop(self, entry: Entry, reason: str) -> bool:
        self._give_up()
        return super().drop(entry, reason)

    def drop_batch(self, batch: Sequence[Entry], reason: str, then: Entry | None = None) -> None:
        self._give_up()
        super().drop_batch(batch, reason, then)

    def drop_all(self, reason: str) -> None:
        """Forget what waits: the journal has it, and the next start delivers it."""
        self._give_up()
        super().drop_all(reason)

    def _give_up(self) -> None:
        self._missed = None
        if not self._is_forgotten:
            self._before = max(self._before, self.seq + 1)
            self._looked = 0
            self.waits = self.spilling = True
