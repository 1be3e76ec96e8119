"""Cursors that lose nothing: what has no room in memory is read again from the journal.

`SpillCursor` (``overflow="spill"``) keeps the places of its events in the journal, 8 bytes each, and reads the events
when the worker comes to them. `DurableCursor` (``durable=True``) also keeps on disk how far it has come, and goes on
from there at the next start, also of another process.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from time import perf_counter
from typing import TYPE_CHECKING

from eventbus.cursor import RESERVE, Cursor
from eventbus.entry import Entry
from eventbus.event import Event, UnknownEvent
from eventbus.frozen import weigh
from eventbus.recording import event_of, records

if TYPE_CHECKING:
    from eventbus.bookmark import Bookmark
    from eventbus.journal import Journal
    from eventbus.options import Options
    from eventbus.segment import Record, Segment
    from eventbus.stats import Outcome

__all__ = ["DurableCursor", "SpillCursor"]

#: How many events are read from the journal at a time, and for how long one looks for those that are heard.
_CHUNK = 64
_LOOK_S = 0.001
#: From how many places on that are done with, their memory is given back.
_COMPACT = 8192


class SpillCursor(Cursor):
    """``overflow="spill"``: events beyond the bounds stay in the journal until the worker comes to them.

    The feeder adds to `_places` and alone begins to spill; the worker alone reads from there and ends it, in a block
    without a call that finds no place left, so no later event can come before one that is still to be read.
    """

    __slots__ = ("_journal", "_places", "_read", "_segment", "_written", "spilling")

    def __init__(self, options: Options, journal: Journal) -> None:
        super().__init__(options)
        self._journal = journal
        #: Whether what comes has to wait behind something in the journal.
        self.spilling = False
        self._places = array("Q")
        #: How many of the places the worker has read, and how many there are.
        self._read = self._written = 0
        self._segment: Segment | None = None

    def feed(self, batch: Sequence[Entry], size: int) -> None:
        if batch[0].seq <= self.seq:  # an interrupted feeder begins again
            batch = [entry for entry in batch if entry.seq > self.seq]
            size = sum(entry.size for entry in batch)
        if not batch:
            return
        if not self.spilling and self.pending + len(batch) <= self.maxsize and self.bytes + size <= self.max_bytes:
            super().feed(batch, size)
            return
        places = array("Q", [entry.place for entry in batch])
        if self.spilling and all(places):
            self._spill(places, batch[-1].seq)
        else:
            for entry in batch:
                self._feed_one(entry)
        self.hurry()

    def _feed_one(self, entry: Entry) -> None:
        room = self.pending < self.maxsize and self.bytes + entry.size <= self.max_bytes
        if not self.spilling and (room or (not entry.place and self.pending < self.maxsize + RESERVE)):
            super().feed((entry,), entry.size)
        elif entry.place:
            self._spill(array("Q", (entry.place,)), entry.seq)
        else:
            self.refuse(entry, "journal")  # the disk is full, and so is the memory

    def _spill(self, places: array[int], last: int) -> None:
        count = len(places)
        self.spilling = True
        self.matched += count
        self.pending += count
        self.seq = last
        self._written += count
        self._places += places

    def bound(self) -> None:
        """Nothing to do: what has no room is not taken into memory."""

    def take(self) -> Entry | None:
        if self.spilling and not self._queue:
            self._refill()
        return super().take()

    def take_more(self) -> Entry | None:
        if self.spilling and not self._queue:
            self._refill()
        return super().take_more()

    def give_back(self, batch: Sequence[Entry]) -> None:
        newest_first = batch[::-1]
        self.running = None
        self._queue.extendleft(newest_first)

    def _refill(self) -> None:
        """Called by the worker: read the next events into memory."""
        places, read = self._places, self._read
        entries = [self._fetch(place) for place in places[read : read + _CHUNK]]
        found = [entry for entry in entries if entry is not None]
        lost = len(entries) - len(found)
        size = sum(entry.size for entry in found)
        count = len(entries)
        arrived = iter(found)
        # Without a call, as everything that changes what others see; who closes may have dropped them meanwhile.
        if self._places is places and self._read == read:
            self._queue += arrived
            self.bytes += size
            self._read += count
            self.pending -= lost
            self.dropped += lost
            self.dropped_by["journal"] += lost
        self._end_spilling()
        if lost:
            self.settled()

    def _end_spilling(self) -> None:
        nothing = array("Q")
        if self._read == self._written:
            self.spilling = False
            self._places = nothing
            self._read = self._written = 0
        elif self._read > _COMPACT:
            read, written = self._read, self._written
            rest = self._places[read:]
            left = written - read
            if self._written == written:
                self._places = rest
                self._read = 0
                self._written = left

    def _fetch(self, place: int) -> Entry | None:
        """The event at a place; None when somebody removed or damaged the file."""
        try:
            record, self._segment = self._journal.read(place, self._segment)
            return _entry(event_of(record), place)
        except Exception:  # noqa: BLE001  # whatever is in a damaged file
            return None

    def queued(self) -> int:
        return len(self._queue) + self._written - self._read

    def oldest(self) -> Entry | None:
        if self.running is not None:
            return self.running
        try:
            return self._queue[0]
        except IndexError:
            place = self.oldest_place()
            return self._fetch(place) if place else None

    def oldest_place(self) -> int:
        """The place of the oldest event that waits in the journal; 0 = none does."""
        try:
            return self._places[self._read]
        except IndexError:
            return 0

    def shed_all(self, reason: str) -> None:
        """Nothing is shed: it waits, in the journal where there is no room."""

    def drop_first(self, reason: str) -> bool:
        if super().drop_first(reason):
            return True
        if self._read == self._written:
            return False
        self.dropped += 1
        self.dropped_by[reason] += 1
        self.pending -= 1
        self._read += 1
        self._end_spilling()
        return True


class DurableCursor(SpillCursor):
    """``durable=True``: lossless, and goes on where it was, at least once, with the same numbers.

    What it missed is read from the journal before anything new: while `_missed` is there, new events only leave their
    place. It is `matched` when it is read.
    """

    __slots__ = ("_admits", "_before", "_bookmark", "_is_forgotten", "_looked", "_missed", "_waits")

    def __init__(self, options: Options, journal: Journal, admits: Callable[[Event], bool]) -> None:
        super().__init__(options, journal)
        #: Whether the subscriber hears an event and its conditions let it pass; counts what its `when` raises.
        self._admits = admits
        self._bookmark: Bookmark | None = None
        self._missed: Iterator[Record] | None = None
        #: What was missed ends before this event, and was looked through up to that one.
        self._before = self._looked = 0
        #: The bus has to start before it can go on: what comes until then only leaves its place.
        self._waits = False
        #: The subscription was closed: there is no next start.
        self._is_forgotten = False

    def begin(self, seq: int) -> None:
        """The subscriber is attached at this point of the log: new ones hear what comes, others what they missed."""
        self._before = seq
        if self._journal.is_open:
            self._go_on()
        else:  # a bus that has travelled here, and may never start
            self._waits = self.spilling = True

    def resume(self) -> None:
        """The bus starts, perhaps again."""
        if self._waits:
            self._before = max(self._before, self._journal.opened_at if self._bookmark is None else 0)
            self._go_on()

    def _go_on(self) -> None:
        """Go on where the bookmark is; without one, with what comes."""
        if self._bookmark is None:
            assert self.options.name is not None  # noqa: S101  # checked with the options
            self._bookmark = self._journal.bookmark(self.options.name, self._before - 1)
        self._looked = self._bookmark.seq
        self._waits = False
        self.spilling = True
        self._missed = records(self._journal.directory, after=self._looked, before=self._before)

    def _refill(self) -> None:
        if self._missed is None:
            super()._refill()
        else:
            self._read_missed(self._missed)

    def _read_missed(self, missed: Iterator[Record]) -> None:
        until = perf_counter() + _LOOK_S
        try:
            for chunk in iter(lambda: list(islice(missed, _CHUNK)), []):
                self._take_over(chunk, missed)
                if self._queue or perf_counter() > until:
                    return
        except BaseException:  # a Ctrl-C: begin again after what was taken over
            if self._missed is missed:
                self._missed = records(self._journal.directory, after=self._looked, before=self._before)
            raise
        if self._missed is missed:
            self._missed = None
        self._end_spilling()
        self.settled()  # a flush may have waited for nothing

    def _take_over(self, chunk: Iterable[Record], missed: Iterator[Record]) -> None:
        for record in chunk:
            event = event_of(record)
            heard = self._admits(event)
            entry = _entry(event, 0)
            arrived, size, seq = iter((entry,)), entry.size, record.seq
            if self._missed is not missed:  # who closes has left the rest to the next start
                return
            if heard:
                self.matched += 1
                self.pending += 1
                self.bytes += size
                self._looked = seq
                self._queue += arrived
            self._looked = seq

    def _end_spilling(self) -> None:
        if self._missed is None and not self._waits:
            super()._end_spilling()

    def queued(self) -> int:
        return super().queued() + (self._missed is not None)

    def oldest(self) -> Entry | None:
        oldest = super().oldest()
        if self._missed is not None and not (self.running or self._queue):
            return _entry(Event(seq=self._looked + 1), 0)
        return oldest

    def rest(self, seq: int) -> None:
        """All up to this event was handed on: when nothing waits, it is settled."""
        if self._missed is None and not self.pending and not self._waits:
            self._advance(seq)

    def forget(self) -> None:
        self._is_forgotten = True
        if self._bookmark is not None:
            self._bookmark.forget()

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
            self._waits = self.spilling = True


def _entry(event: Event, place: int) -> Entry:
    size = 400 + sum(weigh(getattr(event, name)) for name in event.__struct_fields__)
    kind = event.hook if isinstance(event, UnknownEvent) else type(event)
    return Entry(event, event.seq, size, event.shed, kind, place=place)
