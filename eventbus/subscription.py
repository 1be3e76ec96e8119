"""Subscriptions: inline hooks, which run in `publish`, and queued subscribers, which have a cursor in the log."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from threading import current_thread, main_thread
from time import perf_counter, time
from typing import TYPE_CHECKING, Any

from eventbus.conditions import Conditions
from eventbus.log import ABOUT, hears_rank
from eventbus.marks import Spent
from eventbus.policy import cursor_for
from eventbus.pulse import Pulse
from eventbus.stats import Counters

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from eventbus.breaker import Breaker
    from eventbus.entry import Entry
    from eventbus.events import Event
    from eventbus.filters import Filter
    from eventbus.main_script import MainScript
    from eventbus.options import Kind, Options
    from eventbus.publish import Publisher
    from eventbus.pulse import Trouble
    from eventbus.stats import SubscriberStats

__all__ = ["InlineHook", "Queued", "Subscription"]


class Subscription(ABC):
    """One subscriber of a bus; as a context manager it closes at the end of the block."""

    #: With ``on_error="disable"``: whether it is switched off.
    breaker: Breaker | None = None

    def __init__(self, bus: Publisher, fn: Any, name: str, kind: Kind, filter: Filter, options: Options) -> None:
        self._bus = bus
        self.fn = fn
        #: Unique on its bus.
        self.name = name
        #: "inline", "async", "thread", "process", "sink" or "stream".
        self.kind = kind
        self.filter = filter
        self.options = options
        self.conditions = Conditions.of(options)
        self.is_closed = False
        #: When it was registered, Unix time.
        self.since = time()
        #: What went wrong last.
        self.trouble: Trouble | None = None
        #: How many of its drops were announced, by reason and in all.
        self.drops_told: dict[str, int] = {}
        self.drops_told_count = 0

    def close(self) -> None:
        """Hear nothing any more; a running delivery ends, what waits is dropped. Idempotent, from any thread."""
        self._bus._close_subscription(self, "unsubscribed")

    def _tell_breaker(self) -> None:
        self._bus._failures.tell_breaker(self)

    @property
    @abstractmethod
    def counters(self) -> Counters: ...

    @property
    @abstractmethod
    def is_over(self) -> bool:
        """Whether it is closed and all of its events are settled."""

    @property
    def stats(self) -> SubscriberStats:
        """The counts now, all that was published before included."""
        if not self._bus._is_inert():
            self._bus._log.catch_up()
        return self.read()

    @abstractmethod
    def read(self) -> SubscriberStats:
        """The counts as they are."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{self.kind} subscriber {self.name!r} of {', '.join(self.filter.names)}>"


class InlineHook(Subscription):
    """A ``def`` that runs on the publishing thread."""

    def __init__(self, bus: Publisher, fn: Any, name: str, kind: Kind, filter: Filter, options: Options) -> None:
        super().__init__(bus, fn, name, kind, filter, options)
        self._counters = Counters()

    @property
    def counters(self) -> Counters:
        return self._counters

    @property
    def is_over(self) -> bool:
        return self.is_closed

    def read(self) -> SubscriberStats:
        return self._counters.read()

    def run(self, event: Event) -> Exception | None:
        """Call the hook if the event is for it; an `Exception` is counted and returned, anything else goes through."""
        counters = self._counters
        try:
            if self.conditions is not None and not self.conditions.admit(event):
                return None
        except Exception as error:  # noqa: BLE001  # isolation is the job
            counters.matched += 1
            counters.failed += 1
            return error
        if self.is_closed:
            self._drop("unsubscribed")
            return None
        started = perf_counter()
        counters.matched += 1
        counters.pending += 1
        try:
            self.fn(event)
        except Exception as error:  # noqa: BLE001
            counters.failed += 1
            counters.pending -= 1
            counters.took(perf_counter() - started)
            return error
        except BaseException:
            counters.failed += 1
            counters.pending -= 1
            raise
        counters.delivered += 1
        counters.pending -= 1
        counters.took(perf_counter() - started)
        return None

    def _drop(self, reason: str) -> None:
        """Count an event that is for the hook and not given to it, and say so."""
        counters = self._counters
        counters.matched += 1
        counters.dropped += 1
        counters.dropped_by[reason] += 1
        self._bus._failures.tell_drops(self)


class Queued(Subscription):
    """A subscriber on the bus side, with a cursor of its own."""

    def __init__(self, bus: Publisher, fn: Any, name: str, kind: Kind, filter: Filter, options: Options) -> None:
        super().__init__(bus, fn, name, kind, filter, options)
        #: What the log feeds it; `filter` once the log has come to where that was changed.
        self.heard = filter
        self.cursor = cursor_for(options, bus._journal, self._recall, self._rewind)
        self.breaker = self.cursor.breaker
        if self.breaker is not None:
            self.breaker.announce = self._tell_breaker
        self.pulse = Pulse()
        self.timeout_s = options.timeout_s(kind)
        #: The last event that the conditions were asked about; its answer may not have been acted upon.
        self._judged = 0
        #: The script that was started, for a child process; at the end of the interpreter it is known no more.
        self.script: MainScript | None = None

    @property
    def counters(self) -> Counters:
        return self.cursor

    @property
    def is_over(self) -> bool:
        return self.cursor.ended and not self.cursor.pending

    def read(self) -> SubscriberStats:
        oldest = self.cursor.oldest()
        return self.cursor.read(oldest.event.time if oldest is not None else None)

    def feed(self, batch: Sequence[Entry], size: int) -> None:
        """Take over the events it hears, in order; called by the log."""
        conditions = self.conditions
        if conditions is None:
            if batch:
                self.cursor.feed(batch, size)
            return
        for entry in batch:  # one by one: an event that fails at `when` is counted in its place
            if entry.seq >= self._judged and entry.seq > self.cursor.seq:
                self._judged = entry.seq
                if self._admits(conditions, entry):
                    self.cursor.feed((entry,), entry.size)
        if conditions.spent:
            self._bus._spent(self)

    def _recall(self, event: Event) -> bool:
        """Whether it gets an event that is read from the journal; called by its worker, in order."""
        if not self.heard.hears(type(event), event.hook) or self.options.run not in (None, event.run):
            return False
        if not hears_rank(self.options.rank, event.rank, event.hook):
            return False
        if getattr(event, "subscriber", None) == self.name and type(event) in ABOUT:
            return False
        conditions = self.conditions
        try:
            admitted = conditions is None or conditions.admit(event)
            if admitted and conditions is not None and conditions.spent:
                self._bus._log.mark(Spent(self))
            return admitted
        except BaseException as error:  # a foreign predicate
            if isinstance(error, KeyboardInterrupt) and current_thread() is main_thread():
                raise  # a real one: this event is judged again
            self.cursor.misread()
            self._bus._log.errors.append((self, error))
            return False

    def _rewind(self, seq: int) -> None:
        """It hears anew, from the journal, what came after this event."""
        if self.conditions is not None:
            self.conditions.rewind(seq)

    def _admits(self, conditions: Conditions, entry: Entry) -> bool:
        try:
            return conditions.admit(entry.event)
        except BaseException as error:  # a foreign predicate
            if isinstance(error, KeyboardInterrupt) and current_thread() is main_thread():
                raise  # a real one: who feeds next judges this event again
            if self.cursor.misjudge(entry):
                self._bus._log.errors.append((self, error))
            return False


def describe_fn(fn: Callable[..., object]) -> str:
    """The name people know a callable by."""
    inner = fn
    while hasattr(inner, "func") and not hasattr(inner, "__qualname__"):  # functools.partial
        inner = inner.func
    name = getattr(inner, "__qualname__", None) or type(inner).__qualname__
    return name.replace("<locals>.", "")
