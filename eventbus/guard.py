"""What stands between the events and a subscriber with ``on_error="disable"``: its cursor, or its hook, with a breaker.

No other subscriber pays for it: cursors and hooks without a breaker do not ask for one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from eventbus.breaker import Breaker
from eventbus.cursor import BlockCursor, Cursor, LatestCursor, NewestCursor
from eventbus.subscription import InlineHook

if TYPE_CHECKING:
    from eventbus.entry import Entry
    from eventbus.events import Event
    from eventbus.filters import Filter
    from eventbus.options import Kind, Options
    from eventbus.publish import Publisher
    from eventbus.stats import Outcome

__all__ = ["Guard", "GuardedHook", "guarded"]


class Guard(Cursor):
    """A cursor that hands its worker nothing while its subscriber is disabled, except what that is tried with.

    All kinds of workers settle what they took, so none of them has to know. Failures are counted before they are
    settled: who flushes finds the subscriber disabled.
    """

    breaker: Breaker

    def __init__(self, options: Options, *about: Any) -> None:
        super().__init__(options, *about)  # what the policy beside it asks for
        self.breaker = Breaker(options)

    def sit_out(self, entry: Entry) -> None:
        """What becomes of an event while the subscriber is disabled: it is dropped, as it comes or as it is taken."""
        if entry is self.running:
            self.drop(entry, "disabled")
        else:
            self.refuse(entry, "disabled")

    def feed(self, batch: Sequence[Entry], size: int) -> None:
        if not self.breaker.is_open:
            super().feed(batch, size)
            return
        for entry in batch:
            if self.breaker.admits(entry.event):
                super().feed((entry,), entry.size)
            else:
                self.sit_out(entry)

    def take(self) -> Entry | None:
        while (entry := super().take()) is not None and not self.breaker.admits(entry.event):
            self.sit_out(entry)
        return entry

    def take_more(self) -> Entry | None:
        """Nothing more while it is disabled: a trial costs no more than one event."""
        return None if self.breaker.is_open else super().take_more()

    def deliver(self, entry: Entry, seconds: float) -> bool:
        delivered = super().deliver(entry, seconds)
        if delivered:
            self.breaker.succeeded()
        return delivered

    def fail(self, entry: Entry) -> bool:
        if self.running is entry:
            self.breaker.failed()
        return super().fail(entry)

    def time_out(self, entry: Entry) -> bool:
        if self.running is entry:
            self.breaker.failed()
        return super().time_out(entry)

    def settle_batch(self, batch: Sequence[Entry], outcome: Outcome, then: Entry | None = None) -> bool:
        if outcome != "delivered" and self.running is batch[0]:
            self.breaker.failed()
        settled = super().settle_batch(batch, outcome, then)
        if settled and outcome == "delivered":
            self.breaker.succeeded()
        return settled

    def misjudge(self, entry: Entry) -> bool:
        if not self.breaker.admits(entry.event):
            self.sit_out(entry)
            return False
        self.breaker.failed()
        return super().misjudge(entry)

    def misread(self) -> None:
        self.breaker.failed()
        super().misread()


class _GuardedLatest(Guard, LatestCursor):
    """``overflow="latest"`` with a breaker."""


class _GuardedNewest(Guard, NewestCursor):
    """``overflow="drop_newest"`` with a breaker."""


class _GuardedBlock(Guard, BlockCursor):
    """``overflow="block"`` with a breaker."""


_GUARDED: Mapping[type[Cursor], type[Guard]] = {
    Cursor: Guard,
    LatestCursor: _GuardedLatest,
    NewestCursor: _GuardedNewest,
    BlockCursor: _GuardedBlock,
}


def guarded(kind: type[Cursor]) -> type[Guard]:
    """The kind of cursor with a breaker in the place of the one without."""
    if kind in _GUARDED:
        return _GUARDED[kind]
    from eventbus.keeping import KEEPING  # here: it needs what belongs to the journal

    return KEEPING[kind]


class GuardedHook(InlineHook):
    """An inline hook that is skipped while it is disabled."""

    def __init__(self, bus: Publisher, fn: Any, name: str, kind: Kind, filter: Filter, options: Options) -> None:
        super().__init__(bus, fn, name, kind, filter, options)
        self.breaker: Breaker = Breaker(options)
        self.breaker.announce = self._tell_breaker

    def run(self, event: Event) -> Exception | None:
        breaker, counters = self.breaker, self._counters
        if breaker.is_open and not breaker.claims(event):
            self._skip(event)
            return None
        delivered = counters.delivered
        try:
            error = super().run(event)
        except BaseException:
            breaker.failed()
            raise
        if error is not None:
            breaker.failed()
        elif counters.delivered != delivered:
            breaker.succeeded()
        else:
            breaker.on_trial = False  # it was not for this hook: the next one is the trial
        return error

    def _skip(self, event: Event) -> None:
        try:
            if self.conditions is not None and not self.conditions.admit(event):
                return
        except Exception:  # noqa: BLE001  # a failure it was disabled for, perhaps
            pass
        self._drop("disabled")
        self._tell_breaker()  # a Ctrl-C opened it, and was not to be held up
