"""One subscriber's place in the log: the events it has matched and not settled, bounded in number and bytes.

The log feeds it (one feeder at a time), one worker takes from it; neither waits for the other. As in `Counters`,
every change of state is a block without a call, or with one C call as its last step: nothing comes in between.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from eventbus.stats import Counters, Outcome

if TYPE_CHECKING:
    from eventbus.breaker import Breaker
    from eventbus.entry import Entry
    from eventbus.options import Options

__all__ = ["BlockCursor", "Cursor", "LatestCursor", "NewestCursor"]

#: How many events that may not be shed a full cursor takes beyond its `maxsize`.
RESERVE = 4096


class Cursor(Counters):
    """The default policy, ``overflow="drop_oldest"``, without conditions: what most subscribers have."""

    __slots__ = (
        "_kept", "_queue", "bytes", "ended", "max_bytes", "maxsize", "on_settled", "options", "running", "seq",
        "token", "waiting", "wake", "wake_bytes",
    )  # fmt: skip

    #: With ``on_error="disable"``: whether the subscriber is switched off.
    breaker: Breaker | None = None

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.options = options
        self.maxsize = options.maxsize
        self.max_bytes = options.max_bytes
        #: Stands for it in entries: the garbage collector, which does not look into those, would miss a cycle.
        self.token = object()
        #: The number of the last event it has seen.
        self.seq = 0
        self.bytes = 0
        self._queue: deque[Entry] = deque()
        #: Events that may not be shed, moved out of the way of those that may; all older than `_queue`.
        self._kept: deque[Entry] = deque()
        #: Set by the worker before it waits, cleared by who wakes it.
        self.waiting = False
        self.wake: Callable[[], None] = _nobody
        #: How many bytes have to wait before the feeder wakes the worker, which may gather a batch.
        self.wake_bytes = 0
        #: Called after an event is settled, while a flush or a blocked publisher waits for that.
        self.on_settled: Callable[[Cursor], None] | None = None
        #: The event that was taken last and is not settled.
        self.running: Entry | None = None
        #: No event will come any more.
        self.ended = False

    def begin(self, seq: int) -> None:
        """The subscriber hears what comes after this point of the log."""

    def resume(self) -> None:
        """The bus starts, perhaps again."""

    def forget(self) -> None:
        """The subscription was closed, for good."""

    def feed(self, batch: Sequence[Entry], size: int) -> None:
        """Take over events in the order of their numbers; `size` is their sum in bytes."""
        if batch[0].seq <= self.seq:  # an interrupted feeder begins again
            batch = [entry for entry in batch if entry.seq > self.seq]
            size = sum(entry.size for entry in batch)
        if batch:
            count = len(batch)
            last = batch[-1].seq
            self.matched += count
            self.pending += count
            self.bytes += size
            self.seq = last
            self._queue.extend(batch)
        if self.pending > self.maxsize or self.bytes > self.max_bytes:
            self.bound()
        if self.waiting and self.bytes >= self.wake_bytes:
            self.waiting = False
            self.wake()

    def take(self) -> Entry | None:
        """The next event, or None; it is `running` and pending until it is settled."""
        queue = self._kept or self._queue
        if not queue:
            return None
        entry = self.running = queue[0]
        queue.popleft()
        return entry

    def take_more(self) -> Entry | None:
        """The next event for a batch; the first of the batch stays the running one."""
        queue = self._kept or self._queue
        if not queue:
            return None
        entry = queue[0]
        queue.popleft()
        return entry

    def refuse(self, entry: Entry, reason: str) -> None:
        """Drop an event as it comes."""
        if entry.seq > self.seq:
            self.matched += 1
            self.dropped += 1
            self.dropped_by[reason] += 1
            self.seq = entry.seq

    def queued(self) -> int:
        return len(self._kept) + len(self._queue)

    def left(self) -> int:
        """How many events a close that is over leaves undelivered, as far as it is known."""
        return self.pending

    def is_full(self, coming: int = 0) -> bool:
        """Whether the bounds leave no room for another event, with so many on their way."""
        return self.queued() + coming >= self.maxsize or self.bytes >= self.max_bytes

    def oldest(self) -> Entry | None:
        """The oldest event that is not settled."""
        queue = self._kept or self._queue
        first = queue[0] if queue else None  # looked at first: the worker may be about to take it
        return self.running or first

    def bound(self) -> None:
        """Drop what exceeds the bounds: the oldest that may be shed; beyond the reserve, the oldest of all."""
        while len(self._queue) + len(self._kept) > self.maxsize or self.bytes > self.max_bytes:
            try:
                entry = self._queue[0]
            except IndexError:
                break
            if entry.shed:
                self.dropped += 1
                self.dropped_by["overflow"] += 1
                self.pending -= 1
                self.bytes -= entry.size
                self._queue.popleft()
            else:
                self._move_aside()
        while len(self._kept) > self.maxsize + RESERVE or (self._kept and self.bytes > self.max_bytes):
            self.drop_first("reserve")

    def _move_aside(self) -> None:
        try:
            self._kept.extend(map(deque.popleft, (self._queue,)))  # out of one and into the other in one C call
        except IndexError:  # the worker took it
            pass

    def drop_first(self, reason: str) -> bool:
        """Drop the oldest event that was not taken yet; False when there is none."""
        queue = self._kept or self._queue
        if not queue:
            return False
        entry = queue[0]
        self.dropped += 1
        self.dropped_by[reason] += 1
        self.pending -= 1
        self.bytes -= entry.size
        queue.popleft()
        return True

    def shed_all(self, reason: str) -> None:
        """Drop what waits, as long as nobody can be served."""
        self.drop_all(reason)

    def drop_all(self, reason: str) -> None:
        while self.drop_first(reason):
            pass
        self.settled()

    # Each of these settles the running event, unless somebody else (the clock, `close`) has settled it meanwhile.

    def deliver(self, entry: Entry, seconds: float) -> bool:
        """Settle it as delivered by a call that took so long."""
        if self.running is not entry:
            return False
        self.running = None
        self.delivered += 1
        self.pending -= 1
        self.bytes -= entry.size
        self.calls += 1
        self.total_s += seconds
        if seconds > self.max_s:
            self.max_s = seconds
        if self.on_settled is not None:
            self.on_settled(self)
        self.recent.append(seconds)
        return True

    def fail(self, entry: Entry) -> bool:
        if self.running is not entry:
            return False
        self.running = None
        self.failed += 1
        self.pending -= 1
        self.bytes -= entry.size
        if self.on_settled is not None:
            self.on_settled(self)
        return True

    def time_out(self, entry: Entry) -> bool:
        if self.running is not entry:
            return False
        self.running = None
        self.timed_out += 1
        self.pending -= 1
        self.bytes -= entry.size
        if self.on_settled is not None:
            self.on_settled(self)
        return True

    def drop(self, entry: Entry, reason: str) -> bool:
        """Drop an event that was taken."""
        if self.running is not entry:
            return False
        self.running = None
        self.dropped += 1
        self.dropped_by[reason] += 1
        self.pending -= 1
        self.bytes -= entry.size
        self.settled()
        return True

    def settle_batch(self, batch: Sequence[Entry], outcome: Outcome, then: Entry | None = None) -> bool:
        """Settle what `take` and `take_more` gave; of more that they gave, `then` is the running one now."""
        count, size = len(batch), sum(entry.size for entry in batch)
        if self.running is not batch[0]:
            return False
        self.running = then
        if outcome == "delivered":
            self.delivered += count
        elif outcome == "failed":
            self.failed += count
        else:
            self.timed_out += count
        self.pending -= count
        self.bytes -= size
        self.settled()
        return True

    def drop_batch(self, batch: Sequence[Entry], reason: str, then: Entry | None = None) -> None:
        count, size = len(batch), sum(entry.size for entry in batch)
        if self.running is batch[0]:
            self.running = then
            self.dropped += count
            self.dropped_by[reason] += count
            self.pending -= count
            self.bytes -= size
            self.settled()

    def give_back(self, batch: Sequence[Entry]) -> None:
        """Put what was taken, and not begun, back to where the next worker takes it first."""
        newest_first = batch[::-1]
        self.running = None
        self._kept.extendleft(newest_first)

    def settled(self) -> None:
        if self.on_settled is not None:
            self.on_settled(self)

    def hurry(self) -> None:
        """Wake a worker that gathers a batch: somebody waits for it."""
        if self.waiting:
            self.waiting = False
            self.wake()

    def misjudge(self, entry: Entry) -> bool:
        """Count an event as failed whose `when` raised; False when it does not matter, since the subscriber is off."""
        self.matched += 1
        self.failed += 1
        self.seq = entry.seq
        return True

    def misread(self) -> None:
        """Count an event from the journal as failed whose `when` raised."""
        self.matched += 1
        self.failed += 1

    def end(self) -> None:
        """No event will come any more; the worker ends when what is left is settled."""
        self.ended = True
        self.hurry()


class LatestCursor(Cursor):
    """``overflow="latest"``: of each hook only the newest waiting event is delivered, the others are coalesced."""

    __slots__ = ("_newest", "_taken")

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._newest: dict[str, int] = {}
        self._taken = 0

    def feed(self, batch: Sequence[Entry], size: int) -> None:
        for entry in batch:
            self._newest[entry.event.hook] = entry.seq
        super().feed(batch, size)
        if len(self._queue) > 2 * len(self._newest):
            self._coalesce()

    def take(self) -> Entry | None:
        while True:
            queue = self._kept or self._queue
            if not queue:
                return None
            self._taken += 1
            entry = self.running = queue[0]
            queue.popleft()
            if self._newest[entry.event.hook] <= entry.seq:
                return entry
            self.drop(entry, "coalesced")

    def take_more(self) -> Entry | None:
        while True:
            queue = self._kept or self._queue
            if not queue:
                return None
            self._taken += 1
            entry = queue[0]
            queue.popleft()
            if self._newest[entry.event.hook] <= entry.seq:
                return entry
            self.dropped += 1
            self.dropped_by["coalesced"] += 1
            self.pending -= 1
            self.bytes -= entry.size

    def drop_first(self, reason: str) -> bool:
        self._taken += 1  # before it looks at the queue, which a feeder may be about to replace
        return super().drop_first(reason)

    def bound(self) -> None:
        self._coalesce()
        super().bound()

    def _coalesce(self) -> None:
        """Replace the queue by its newest events; if the worker took one meanwhile, begin again."""
        while True:
            taken = self._taken
            waiting = [*self._kept.copy(), *self._queue.copy()]
            left = deque(e for e in waiting if self._newest[e.event.hook] <= e.seq)
            gone = len(waiting) - len(left)
            size = sum(e.size for e in waiting) - sum(e.size for e in left)
            none: deque[Entry] = deque()
            if self._taken == taken:
                self._queue = left
                self._kept = none
                self.dropped += gone
                self.dropped_by["coalesced"] += gone
                self.pending -= gone
                self.bytes -= size
                break
        self.settled()


class NewestCursor(Cursor):
    """``overflow="drop_newest"``: what is waiting stays, and a new event beyond the bound is dropped."""

    __slots__ = ()

    def feed(self, batch: Sequence[Entry], size: int) -> None:
        for entry in batch:
            allowed = self.maxsize if entry.shed else self.maxsize + RESERVE
            if self.queued() < allowed and self.bytes + entry.size <= self.max_bytes:
                super().feed((entry,), entry.size)
            else:
                self.refuse(entry, "newest" if entry.shed else "reserve")

    def bound(self) -> None:
        """Nothing to do: the bound was kept when the event came."""


class BlockCursor(Cursor):
    """``overflow="block"``: the publisher waited for room; an event for which it gave up is dropped."""

    __slots__ = ()

    def feed(self, batch: Sequence[Entry], size: int) -> None:
        for entry in batch:
            if self.token in entry.refused_by:
                self.refuse(entry, "block_timeout")
            else:
                super().feed((entry,), entry.size)

    def bound(self) -> None:
        """Nothing to do: it holds at most one event more than its bound for each thread that publishes."""


def _nobody() -> None:
    """Wakes nobody: no worker has started."""
