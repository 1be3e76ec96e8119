"""A cursor in a child process: hands on what the parent sends, and reports what becomes of each event."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from eventbus.cursor import Cursor
from eventbus.options import Options
from eventbus.wire import Begun, LateOk, Retried, Settled, Told, Trouble

if TYPE_CHECKING:
    from eventbus.entry import Entry
    from eventbus.link import Link
    from eventbus.stats import Outcome

__all__ = ["ReportingCursor", "Reports"]

_NO_BOUND = 1 << 62


class ReportingCursor(Cursor):
    """Bounded by the parent, which never sends more than a part of the subscriber's queue."""

    __slots__ = ("_announces", "_link", "_retried", "_seconds", "error", "is_leaving")

    def __init__(self, link: Link, *, announces: bool) -> None:
        self._link = link
        #: Whether taking an event is beginning it, as for functions.
        self._announces = announces
        self._retried = 0
        self._seconds = 0.0
        #: What the event that is being settled failed with.
        self.error: BaseException | None = None
        #: What is not begun is left to the next child.
        self.is_leaving = False
        super().__init__(Options(maxsize=_NO_BOUND, max_bytes=_NO_BOUND))

    def take(self) -> Entry | None:
        entry = None if self.is_leaving else super().take()
        if entry is not None and self._announces:
            self._link.put(Begun(1))
        self._link.send()  # with what was settled just before: one call of the system for both
        return entry

    def take_more(self) -> Entry | None:
        return None if self.is_leaving else super().take_more()

    def queued(self) -> int:
        return 0 if self.is_leaving else super().queued()

    def hurry_up(self) -> None:
        """Gather no longer, until nothing is pending."""
        if self.pending:
            self.on_settled = _look
            self.hurry()

    def took(self, seconds: float) -> None:
        self._seconds = seconds

    def deliver(self, entry: Entry, seconds: float) -> bool:
        return self._report(super().deliver(entry, seconds), "delivered", seconds=seconds)

    def fail(self, entry: Entry) -> bool:
        return self._report(super().fail(entry), "failed")

    def time_out(self, entry: Entry) -> bool:
        return self._report(super().time_out(entry), "timed_out")

    def drop(self, entry: Entry, reason: str) -> bool:
        return self._report(super().drop(entry, reason), "dropped", reason=reason)

    def settle_batch(self, batch: Sequence[Entry], outcome: Outcome, then: Entry | None = None) -> bool:
        settled = super().settle_batch(batch, outcome, then)
        self._report(settled, outcome, count=len(batch), seconds=self._seconds)
        self._link.send()
        if not self.pending:
            self.on_settled = None
        return settled

    def _report(
        self,
        settled: bool,
        outcome: Outcome | Literal["dropped"],
        *,
        count: int = 1,
        seconds: float = 0.0,
        reason: str = "",
    ) -> bool:
        error, self.error = self.error, None
        if settled:
            trouble = None if error is None else Trouble.of(error)
            self._link.put(Settled(count, outcome, seconds, reason, trouble))
        return settled

    @property  # a delivery counts in an attribute
    def retried(self) -> int:
        return self._retried

    @retried.setter
    def retried(self, count: int) -> None:
        if count > self._retried:
            self._link.put(Retried())
            self._link.send()
        self._retried = count

    @property
    def late_ok(self) -> int:
        return 0

    @late_ok.setter
    def late_ok(self, count: int) -> None:
        if count:
            self._link.put(LateOk(count))
            self._link.send()


class Reports:
    """What a delivery in a child has to say about failures: the parent says it to everybody else."""

    def __init__(self, cursor: ReportingCursor, link: Link) -> None:
        self._cursor = cursor
        self._link = link

    def owe(self, subscriber: object, entry: Entry, error: BaseException) -> None:
        self._cursor.error = error

    def told(self, subscriber: object, entry: Entry | None, error: BaseException) -> None:
        if entry is None:  # else it was reported with the event
            self._link.put(Told(Trouble.of(error)))
            self._link.send()

    def gone(self, subscriber: object, entry: Entry, error: BaseException) -> None:
        """The parent knows it from the error of the event."""

    def loop_held(self, subscriber: object, seconds: float) -> None:
        """It is the child's own loop."""


def _look(cursor: Cursor) -> None:
    """Nobody here waits for it."""
