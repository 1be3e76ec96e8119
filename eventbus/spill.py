"""``overflow="spill"``: a cursor that loses nothing, since what has no room in memory is read from the journal later.

It keeps the places of its events in the journal, 8 bytes each, and reads the events when the worker comes to them.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from eventbus.cursor import RESERVE, Cursor
from eventbus.device import Copies, Slots
from eventbus.entry import Entry
from eventbus.event import Event, UnknownEvent
from eventbus.frozen import freeze, weigh
from eventbus.recording import event_of

if TYPE_CHECKING:
    from eventbus.journal import Journal
    from eventbus.options import Options
    from eventbus.segment import Segment

__all__ = ["CHUNK", "SpillCursor", "entry_of"]

#: How many events are read from the journal at a time.
CHUNK = 64
#: From how many places on that are done with, their memory is given back.
_COMPACT = 8192
_ALL = 1 << 62
#: What is read from a journal has no numbers on a GPU.
_NO_GPU = Copies(Slots())
#: Stands for an event that was removed or damaged, until its subscriber comes to it.
_UNREADABLE = Entry(Event(), 0, 0, False, Event)


class SpillCursor(Cursor):
    """``overflow="spill"``: events beyond the bounds stay in the journal until the worker comes to them.

    The feeder adds to `_places` and alone begins to spill; the worker reads from there and ends it, in a block without
    a call that finds no place left, so no later event can come before one that is still to be read. Who closes may
    drop all of them meanwhile.
    """

    __slots__ = ("_journal", "_places", "_read", "_read_seq", "_segment", "_written", "spilling")

    def __init__(self, options: Options, journal: Journal) -> None:
        super().__init__(options)
        self._journal = journal
        #: Whether what comes has to wait behind something in the journal.
        self.spilling = False
        self._places = array("Q")
        #: How many of the places the worker has read, and how many there are.
        self._read = self._written = 0
        #: The last event before the one at the first place that was not read.
        self._read_seq = 0
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
        most = self.maxsize if entry.place else self.maxsize + RESERVE
        if not self.spilling and self.pending < most and self.bytes + entry.size <= self.max_bytes:
            super().feed((entry,), entry.size)
        elif entry.place:
            self._spill(array("Q", (entry.place,)), entry.seq)
        else:
            self.refuse(entry, "journal" if self._journal.is_open else "closed")  # no room on disk, none in memory

    def _spill(self, places: array[int], last: int) -> None:
        count = len(places)
        if not self.spilling:
            self._read_seq = self.seq
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
        """Called by the worker: read the next events into memory, as many as there may be."""
        source, read = self._places, self._read
        entries: list[Entry] = []
        size = lost = 0
        seq = self._read_seq
        for place in source[read : read + min(CHUNK, self.maxsize)]:
            entry = self._fetch(place)
            if entry is None:
                lost += 1
                continue
            if entries and size + entry.size > self.max_bytes:
                break
            entries.append(entry)
            size += entry.size
            seq = entry.seq
        count = len(entries) + lost
        arrived = iter(entries)
        # Without a call, as everything that changes what others see.
        if self._places is source and self._read == read:  # else they were dropped meanwhile
            self._queue += arrived
            self.bytes += size
            self._read += count
            self._read_seq = seq
            self.pending -= lost
            self.dropped += lost
            self.dropped_by["journal"] += lost
        self._end_spilling()
        if lost:
            self.settled()

    def _end_spilling(self) -> None:
        """Called by the worker: spill no more when all was read, and give back the memory of what was."""
        nothing = array("Q")
        if self._read == self._written:
            self.spilling = False
            self._places = nothing
            self._read = self._written = 0
            self._segment = None
        elif self._read > max(_COMPACT, self._written >> 1):  # seldom enough that each place is moved once at most
            source, read, written = self._places, self._read, self._written
            rest = source[read:]
            left = written - read
            if self._places is source and self._read == read and self._written == written:
                self._places = rest
                self._read = 0
                self._written = left

    def _fetch(self, place: int) -> Entry | None:
        """The event at a place; None when somebody removed or damaged the file."""
        try:
            record, self._segment = self._journal.read(place, self._segment)
            return entry_of(event_of(record), place)
        except Exception:  # noqa: BLE001  # whatever is in a damaged file
            return None

    def queued(self) -> int:
        return len(self._queue) + self._written - self._read

    def oldest(self) -> Entry | None:
        # From the end on, since the worker moves events from the journal to the queue and takes them from there.
        place = self._place()
        oldest = super().oldest()
        return oldest if oldest is not None or not place else self._fetch(place) or _UNREADABLE

    def _place(self) -> int:
        """The place of the oldest event that waits in the journal; 0 = none does."""
        try:
            return self._places[self._read]
        except IndexError:
            return 0

    def read_up_to(self) -> int:
        """Up to which event it needs nothing from the journal any more."""
        return self._read_seq if self.spilling else _ALL

    def shed_all(self, reason: str) -> None:
        """Nothing is shed: it waits, in the journal where there is no room."""

    def drop_all(self, reason: str) -> None:
        while self.drop_first(reason):
            pass
        self._drop_places(reason)
        self.settled()

    def _drop_places(self, reason: str) -> None:
        nothing = array("Q")
        left = self._written - self._read
        self.dropped += left
        self.dropped_by[reason] += left
        self.pending -= left
        self._places = nothing
        self._read = self._written = 0
        self._end_spilling()


def entry_of(event: Event, place: int) -> Entry:
    """The entry of an event that was read from the journal: read-only, as it was in memory."""
    values = {name: getattr(event, name) for name in event.__struct_fields__}
    containers = {name: freeze(value, _NO_GPU) for name, value in values.items() if type(value) in (dict, list)}
    if containers:
        event = replace(event, **containers)
    size = 400 + sum(map(weigh, (values | containers).values()))
    kind = event.hook if isinstance(event, UnknownEvent) else type(event)
    return Entry(event, event.seq, size, event.shed, kind, place=place)
