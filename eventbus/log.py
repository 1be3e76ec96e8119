"""The log: numbers events, takes them from any thread without waiting, and hands them on to the cursors.

Publishers append to a hand-off buffer; a feeder (the pump on the bus loop, as a rule) moves what is there to the
cursors of the subscribers. Marks in the same buffer attach and detach cursors and end a flush, so all of these are
exact with respect to the events around them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import count, repeat
from operator import iadd
from threading import get_ident
from time import perf_counter, sleep, time
from typing import TYPE_CHECKING, Any, Literal

from eventbus.events import EventsDropped, SubscriberDisabled, SubscriberErrorEvent, UnknownEvent
from eventbus.snapshot import COPIES, TIME, Draft, resolve_draft

if TYPE_CHECKING:
    from eventbus.cursor import Cursor
    from eventbus.entry import Entry
    from eventbus.filters import Filter
    from eventbus.marks import Flush
    from eventbus.subscription import Queued

__all__ = ["ABOUT", "HANDOFF", "Log", "Mark", "hears_rank"]

#: How many events the hand-off buffer takes before publishers help to empty it.
HANDOFF = 20_000
_WINDOW = 512
#: How many events a publisher hands on when it helps, and for how long it lets another one do so, in seconds: about
#: the same time.
_HELPING = 64
_GIVE_WAY_S = 0.0002
_DEVICE_WAIT_S = 10.0
ABOUT = frozenset({SubscriberErrorEvent, SubscriberDisabled, EventsDropped})


class Stretch:
    """Consecutive events on their way to the cursors, with what the filters of all of them ask first."""

    __slots__ = ("entries", "kinds", "other_ranks", "size")

    def __init__(self, entries: list[Entry]) -> None:
        self.entries = entries
        self.kinds = {entry.kind for entry in entries}
        self.other_ranks = {entry.event.rank for entry in entries} != {0}
        self.size = sum([entry.size for entry in entries])


class Mark:
    """Something that happens at one point of the log."""

    def reached(self, seq: int) -> None:
        """Called once by the feeder, after all events before it and before all events after it."""


class Log:
    """The hand-off buffer and the subscribers it feeds."""

    def __init__(self, admit: Callable[[Draft], Entry]) -> None:
        self._admit = admit
        self.buffer: deque[Draft] = deque()
        #: One-element tuples of numbers; a new tuple costs nothing, since `zip` uses its last one again.
        self.numbers = zip(count(1))
        #: What the feeder has taken from the buffer and not handed on yet.
        self._window: list[Draft] = []
        self._feeder = 0
        #: A feeder was interrupted, perhaps while it woke somebody.
        self._doubtful = False
        self._channels: tuple[Channel, ...] = ()
        self.subscribers: tuple[Queued, ...] = ()
        #: Those that hear nothing any more and have events that are not settled.
        self.leaving: tuple[Queued, ...] = ()
        #: Attached, and not yet served by a worker.
        self.newcomers: deque[Queued] = deque()
        #: Set by the pump before it sleeps; who clears it wakes the pump.
        self.asleep = False
        self.wake: Callable[[], None] = _nobody
        #: What went wrong while feeding: who or what, and the error; told by the pump, since a feeder must not log.
        self.errors: deque[tuple[Queued | str, BaseException]] = deque()
        self.flushes: list[Flush] = []
        #: A disk has refused something, and is to be tried again even if nothing is published.
        self.is_restless = False
        #: The last event that was handed on.
        self.handed = 0
        #: Why what is handed on from here is dropped at once: the bus has given up. Empty while it has not.
        self.gave_up = ""

    def append(self, draft: Draft) -> None:
        """Give the entry its number and append it, in one C call.

        Nothing can come between the two: the order of the buffer is the order of the numbers, with several threads
        publishing, and whatever signal or finaliser strikes.
        """
        self.buffer.extend(map(iadd, (draft,), self.numbers))

    def mark(self, mark: Mark) -> None:
        self.append([None, mark])
        if self.wake is _nobody:
            self.feed()
        else:
            self.rouse()

    def unserve(self, wake: Callable[[], None]) -> None:
        """The pump with this `wake` runs no more; another one may already."""
        if self.wake == wake:
            self.asleep = False
            self.wake = _nobody

    def is_unserved(self) -> bool:
        """Whether no pump runs, and nobody feeds right now."""
        return self.wake is _nobody and not self._feeder

    def rouse(self) -> None:
        """Have the pump look now."""
        self.asleep = False
        self.wake()

    def interrupted(self) -> None:
        """Something struck in a publish, perhaps while it woke the pump: wake it, now and with the next publish."""
        self.asleep = True
        self.wake()

    def __len__(self) -> int:
        return len(self.buffer) + len(self._window)

    def feed(self, budget_s: float = float("inf"), most: int | None = None) -> bool:
        """Hand on what is in the buffer; returns whether anything was. One thread at a time feeds, others return.

        Taking the place of the feeder is a test and a store without a call between, which the GIL makes one step;
        unlike a lock it cannot stay taken when a KeyboardInterrupt strikes, and a finaliser that comes back here in
        the middle is turned away instead of deadlocking.
        """
        me = get_ident()
        if self._feeder:
            return False
        self._feeder = me
        try:
            if self._doubtful:
                self._wake_all()
            return self._feed(perf_counter() + budget_s, most)
        except BaseException:
            self._doubtful = True
            raise
        finally:
            self._feeder = 0

    def _wake_all(self) -> None:
        """Make up for a wake-up in which a Ctrl-C struck: nobody else knows that the worker still sleeps."""
        for subscriber in (*self.subscribers, *self.leaving):
            subscriber.cursor.wake()
        self._doubtful = False

    def relieve(self) -> None:
        """Help to empty a full buffer; called by publishers.

        When another thread is at it, let that one have the GIL: several that go on publishing would keep it from
        ever getting done, and the buffer would have no bound.
        """
        if not self._feeder:
            self.feed(most=_HELPING)
        elif self._feeder != get_ident():
            sleep(_GIVE_WAY_S)

    def catch_up(self, timeout: float = 1.0) -> None:
        """Hand on all that was published before, waiting for another feeder; from inside the feeder, do nothing."""
        end = perf_counter() + timeout
        while len(self) and self._feeder != get_ident() and perf_counter() < end:
            if self.feed():
                continue
            if not self._feeder and not self._is_due():
                return
            sleep(0.0005)

    def _is_due(self) -> bool:
        """Whether the next event could be handed on: its numbers have left the GPU, if they were on one."""
        try:
            draft = (self._window or self.buffer)[0]
        except IndexError:  # another thread has just handed it on
            return True
        return draft[0] is None or draft[COPIES] is None or draft[COPIES].arrived()

    def lose_devices(self) -> None:
        """Wait no longer for numbers that are on a GPU."""
        for draft in (*self._window, *self.buffer.copy()):
            if draft[0] is not None and draft[COPIES] is not None:
                draft[COPIES].lost = True

    def _feed(self, until_s: float, most: int | None) -> bool:
        window = self._window
        moved = False
        while self.buffer or window:
            if not window:  # one C call moves them: an interrupted feeder leaves them here for the next one
                count = min(len(self.buffer), most or _WINDOW)
                window.extend(map(deque.popleft, repeat(self.buffer, count)))
            done = self._feed_window(window)
            if not done:
                break
            del window[:done]
            moved = True
            if most is not None or perf_counter() > until_s:
                break
        return moved

    def _feed_window(self, window: list[Draft]) -> int:
        """Hand on a stretch of the log; returns how much of it, less while numbers are still on a GPU."""
        entries: list[Entry] = []
        done = 0
        for draft in window:
            if draft[0] is None:
                self._distribute(entries)
                entries = []
                draft[1].reached(draft[-1])
            elif draft[2] is not None and not _has_arrived(draft):
                break
            else:
                try:
                    entries.append(self._admit(draft))
                except Exception as error:  # noqa: BLE001  # one odd event must not stop those behind it
                    self.errors.append((draft[0].hook, error))
            done += 1
        self._distribute(entries)
        return done

    def _distribute(self, entries: list[Entry]) -> None:
        if entries:
            stretch = Stretch(entries)
            about_us = not stretch.kinds.isdisjoint(ABOUT)
            for channel in self._channels:
                channel.feed(stretch, about_us=about_us)
            self.handed = entries[-1].seq
        if self.gave_up:  # looked at after feeding: what came in before it was set is dropped by who set it
            self._drop_waiting()

    def reopen(self) -> None:
        """The bus starts, perhaps again."""
        self.gave_up = ""
        for subscriber in self.served():
            subscriber.cursor.ended = subscriber in self.leaving
            subscriber.cursor.resume()

    def give_up(self, reason: str) -> None:
        """Drop what waits, and from now on what a feeder that was held up still hands on."""
        self.gave_up = reason
        self._drop_waiting()

    def _drop_waiting(self) -> None:
        for subscriber in self.served():
            subscriber.cursor.drop_all(self.gave_up)

    def settled(self, cursor: Cursor) -> None:
        """Called by a cursor after an event was settled, while a flush goes on."""
        for flush in tuple(self.flushes):
            flush.look(cursor)

    def flushed(self, flush: Flush) -> None:
        """A flush is complete, or given up."""
        if flush in self.flushes:
            self.flushes.remove(flush)
        if not self.flushes:
            for subscriber in self.served():
                subscriber.cursor.on_settled = None
            for later in tuple(self.flushes):  # begun meanwhile, by the feeder
                later.watch()

    def attach(self, subscriber: Queued, seq: int) -> None:
        if subscriber in self.subscribers:  # an interrupted feeder begins again
            return
        subscriber.cursor.begin(seq)
        self.subscribers += (subscriber,)
        self.newcomers.append(subscriber)
        self.rechannel()

    def rechannel(self) -> None:
        """Group the subscribers anew by what they hear."""
        self._channels = _channels(self.subscribers)

    def detach(self, subscriber: Queued) -> None:
        self.subscribers = tuple(s for s in self.subscribers if s is not subscriber)
        self.leaving = tuple(s for s in {*self.leaving, subscriber} if s.cursor.pending)
        if not subscriber.cursor.pending and subscriber in self.newcomers:
            self.newcomers.remove(subscriber)
        self.rechannel()

    def tidy(self) -> None:
        """Now and then, on the bus side: see to what is on disk."""

    def served(self) -> list[Queued]:
        """Every subscriber to which the bus itself delivers, those that are leaving included; streams are read."""
        return [s for s in (*self.subscribers, *self.leaving) if s.kind != "stream"]


class Channel:
    """The subscribers that hear the same: asked once for all of them whether they hear an event."""

    __slots__ = ("_filter", "_heard", "_rank", "_run", "_subscribers")

    def __init__(
        self, filter: Filter, run: str | None, rank: int | Literal["all"] | None, subscribers: tuple[Queued, ...]
    ) -> None:
        self._filter = filter
        self._run = run
        self._rank = rank
        self._subscribers = subscribers
        self._heard: dict[Any, bool] = {}

    def feed(self, stretch: Stretch, *, about_us: bool) -> None:
        batch = self._pick(stretch)
        if not batch:
            return
        size = stretch.size if batch is stretch.entries else sum(entry.size for entry in batch)
        for subscriber in self._subscribers:
            if about_us:
                told = [e for e in batch if e.kind not in ABOUT or e.event.subscriber != subscriber.name]  # type: ignore[attr-defined]
                subscriber.feed(told, sum(entry.size for entry in told))
            else:
                subscriber.feed(batch, size)

    def _pick(self, stretch: Stretch) -> Sequence[Entry]:
        heard = {kind for kind in stretch.kinds if self._hears(kind)}
        if not heard:
            return ()
        entries = stretch.entries
        if len(heard) < len(stretch.kinds):
            entries = [entry for entry in entries if entry.kind in heard]
        if self._run is not None:
            entries = [entry for entry in entries if entry.event.run == self._run]
        if stretch.other_ranks or self._rank not in (None, "all", 0):
            entries = [e for e in entries if hears_rank(self._rank, e.event.rank, e.event.hook)]
        return entries

    def _hears(self, kind: Any) -> bool:
        try:
            return self._heard[kind]
        except KeyError:
            unknown = isinstance(kind, str)
            heard = self._filter.hears(UnknownEvent, kind) if unknown else self._filter.hears(kind, kind.hook)
            self._heard[kind] = heard
            return heard


def hears_rank(wanted: int | Literal["all"] | None, rank: int | None, hook: str) -> bool:
    """Queued subscribers hear rank 0; an exception is heard on the rank where it happens."""
    if wanted is None:
        return not rank or hook == "on_exception"
    return wanted in ("all", rank)


def _channels(subscribers: Iterable[Queued]) -> tuple[Channel, ...]:
    groups: dict[tuple[Filter, str | None, int | Literal["all"] | None], list[Queued]] = {}
    for subscriber in subscribers:
        key = (subscriber.heard, subscriber.options.run, subscriber.options.rank)
        groups.setdefault(key, []).append(subscriber)
    return tuple(Channel(*key, tuple(group)) for key, group in groups.items())


def _has_arrived(draft: Draft) -> bool:
    """Whether the numbers of an event have left the GPU. One that hangs is not waited for any longer."""
    copies = draft[COPIES]
    if not copies.arrived():
        copies.lost = copies.lost or time() - draft[TIME] > _DEVICE_WAIT_S
        if not copies.lost:
            return False
    resolve_draft(draft)
    return True


def _nobody() -> None:
    """Wakes nobody: no pump runs."""
