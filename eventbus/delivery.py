"""Delivery: takes events from one subscriber's cursor, one at a time, and sees each of them settled.

Here are the things all kinds of subscribers share: the clock that ends an attempt, abandoning what will not stop,
and what an error does. `AsyncDelivery` awaits handlers on the loop; `ThreadDelivery`, `ProcessDelivery` and
`SinkDelivery` are in files of their own.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import TYPE_CHECKING, Any, ClassVar

from eventbus import handling
from eventbus.notices import reason

if TYPE_CHECKING:
    from eventbus.entry import Entry
    from eventbus.events import Event
    from eventbus.loop import Host, Scope
    from eventbus.service import Service
    from eventbus.subscription import Queued

__all__ = ["AsyncDelivery", "Delivery"]

#: How long a cancelled handler may take to end before it is abandoned, in seconds.
GRACE_S = 0.1
#: How long a worker delivers before it lets the rest of the loop run, in seconds.
SLICE_S = 0.001
#: From when on holding the loop is told, in seconds; waiting for the GIL on a busy machine looks the same.
HOLD_S = 0.25
_BACKOFF_S = 0.1
_BACKOFF_MOST_S = 5.0


class Delivery(ABC):
    """One subscriber's worker and its clock.

    A worker has a generation: when a handler will not stop, the clock abandons it by raising the generation and
    starting the next worker, and the old one ends without a word when its handler returns.
    """

    kind: ClassVar[str]

    def __init__(self, subscriber: Queued, bus: Service, host: Host) -> None:
        self.subscriber = subscriber
        self.cursor = subscriber.cursor
        self.name = subscriber.name
        self.bus = bus
        self.host = host
        self.timeout_s = subscriber.timeout_s
        #: When the running attempt is over, by `perf_counter`; infinite while nothing runs.
        self.deadline_s = math.inf
        #: The running attempt was asked to stop.
        self.overdue = False
        self.generation = 0
        #: The worker has ended, and with it the subscription.
        self.ended = False
        #: What ended the worker, although it should go on.
        self.death: str | None = None
        self.stopping = False
        #: How many events it left to the next start by itself.
        self.left = 0

    @property
    def event(self) -> Event | None:
        """The event being handled."""
        entry = self.cursor.running
        return entry.event if entry is not None else None

    @property
    def at_rest(self) -> bool:
        """Whether nothing of it runs any more that another loop would have to wait for."""
        return self.cursor.running is None

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Note what ends the worker that runs inside, so that nobody takes it for alive."""
        self.death = None
        try:
            yield
        except BaseException as error:
            self.death = reason(error)
            raise

    @abstractmethod
    def start(self) -> None:
        """Start a worker of this generation."""

    def check(self, now_s: float) -> float:
        """Look at the clock: end an attempt that is over; returns when to look again."""
        if now_s < self.deadline_s:
            return self.deadline_s
        if not self.overdue:
            self.overdue = True
            self.deadline_s = now_s + GRACE_S
            self.interrupt()
        else:
            self.abandon()
        return self.deadline_s

    def interrupt(self) -> None:  # noqa: B027  # a thread and a sink cannot be asked
        """Ask the running attempt to stop."""

    def abandon(self) -> None:
        """Give up a handler that will not stop, and go on with the next event."""
        entry = self.cursor.running
        self.generation += 1
        self.deadline_s = math.inf
        self.overdue = False
        if entry is not None:
            self._timed_out(entry, " and did not stop")
        if not self.stopping:
            self.start()

    def stop(self) -> None:
        """End the worker after the running delivery; the cursor keeps what is left."""
        self.stopping = True
        self.cursor.wake()

    def cut(self, reason: str) -> None:
        """Give up what runs and drop what waits: the time for closing is over."""
        self.stopping = True
        self.generation += 1
        self.deadline_s = math.inf
        entry = self.cursor.running
        if entry is not None:
            self.cursor.drop(entry, reason)
        self.host.call(self.interrupt)
        self.cursor.drop_all(reason)
        self.ended = True
        self.cursor.wake()

    def halt(self) -> None:
        """Deliver nothing more, without a word to anybody: this is the copy in a forked process."""
        self.stopping = True
        self.generation += 1

    def _timeout_error(self, how: str = "") -> TimeoutError:
        return TimeoutError(f"took longer than its timeout of {self.timeout_s:g} s{how}")

    def _timed_out(self, entry: Entry, how: str = "") -> None:
        error = self._timeout_error(how)
        self.bus._failures.owe(self.subscriber, entry, error)
        if self.cursor.time_out(entry):
            self.bus._failures.told(self.subscriber, entry, error)

    def _failed(self, entry: Entry, error: BaseException) -> None:
        self.bus._failures.owe(self.subscriber, entry, error)
        if self.cursor.fail(entry):
            self.bus._failures.told(self.subscriber, entry, error)

    def held(self, seconds: float) -> None:
        """Note how long the worker held its loop without awaiting."""
        if seconds > self.cursor.hold_s:
            self.cursor.hold_s = seconds
        if seconds > HOLD_S:
            self.bus._failures.loop_held(self.subscriber, seconds)

    def finished(self) -> None:
        """The last event is settled and none will come."""
        self.ended = True
        self.bus._ended(self.subscriber)


def backoff_s(attempt: int) -> float:
    """The longest pause before retry number `attempt`, from 1: doubling from 0.1 s up to 5 s."""
    return min(_BACKOFF_S * 2.0 ** (attempt - 1), _BACKOFF_MOST_S)


class AsyncDelivery(Delivery):
    """Awaits an ``async def`` on the loop: one long-lived task, the handler awaited directly in it."""

    kind = "async"
    _scope: Scope | None = None
    #: The event to try again, and for the last event that was tried again: its number and how often.
    _again: Entry | None = None
    _attempts: tuple[int, int] = (0, 0)

    def __init__(self, subscriber: Queued, bus: Service, host: Host) -> None:
        super().__init__(subscriber, bus, host)
        self._fn: Callable[[Any], Awaitable[object]] = subscriber.fn
        self._waker = host.waker()
        self.cursor.wake = self._waker.wake

    def start(self) -> None:
        self.host.spawn(self._run, name=f"trainbus {self.name}", on_hold=self.held)

    def interrupt(self) -> None:
        if self._scope is not None:
            self._scope.cancel()

    async def _run(self) -> None:
        mine = self.generation
        handling.handler.set(self)
        with self.watched():
            while self.generation == mine and not self.ended:
                with self.host.scope() as scope:
                    self._scope = scope
                    try:
                        if await self._serve(mine):
                            break
                    except BaseException as error:
                        if not self.host.forgives(error, scope):  # else a handler cancelled its own task, and returned
                            raise
            if self.generation == mine and not self.stopping:
                self.finished()

    async def _serve(self, mine: int) -> bool:
        """Deliver until there is nothing more (True), or until this scope was cancelled (False)."""
        cursor, fn, timeout_s = self.cursor, self._fn, self.timeout_s
        now = perf_counter()
        pause_at = now + SLICE_S
        while not self.stopping:
            entry = cursor.take() if self._again is None else self._take_again()
            if entry is None:
                if not await self._wait():
                    return True
                now = perf_counter()
                pause_at = now + SLICE_S
                continue
            if self.subscriber.is_closed:
                cursor.drop(entry, "unsubscribed")
                continue
            self.deadline_s = now + timeout_s
            try:
                await fn(entry.event)
            except BaseException as error:  # noqa: BLE001  # isolation is the job
                if not await self._mishap(entry, error, mine):
                    return False
                now = perf_counter()
                continue
            if self.overdue or self.generation != mine:
                return await self._mishap(entry, None, mine)
            started, now = now, perf_counter()
            cursor.deliver(entry, now - started)
            if now > pause_at:
                self.deadline_s = math.inf
                await self.host.checkpoint()
                now = perf_counter()
                pause_at = now + SLICE_S
        return True

    def _take_again(self) -> Entry | None:
        """The event to try again, unless it was settled meanwhile."""
        again, self._again = self._again, None
        return again if self.cursor.running is again else self.cursor.take()

    async def _wait(self) -> bool:
        """Wait for an event; False when none will come."""
        cursor = self.cursor
        self.deadline_s = math.inf
        cursor.waiting = True
        if not (cursor.queued() or cursor.ended or self.stopping):  # looked again, now that a feeder would wake us
            await self._waker.wait()
        else:  # it may be looking through a long journal
            await self.host.checkpoint()
        cursor.waiting = False
        return bool(cursor.queued()) or not (cursor.ended or self.stopping)

    async def _mishap(self, entry: Entry, error: BaseException | None, mine: int) -> bool:
        """Settle an attempt that raised or was overdue; False when its scope is over, and with it this turn."""
        if self.generation != mine:
            return False
        overdue, self.overdue, self.deadline_s = self.overdue, False, math.inf
        if error is not None and self.host.is_ours(error, overdue=overdue):  # the loop ends, and cancels its tasks
            self.cursor.drop(entry, "loop_closed")
            self.bus._lost_loop()
            raise error
        if (overdue or isinstance(error, Exception)) and self._may_retry(entry):
            self._again = entry
        elif overdue:
            self._timed_out(entry)
        else:
            assert error is not None  # noqa: S101
            self._failed(entry, error)
            if isinstance(error, KeyboardInterrupt) and self.bus._is_hosted_in_main():
                self.host.interrupt(error)
        if overdue or not isinstance(error, Exception):  # a handler may also have cancelled its own task
            return False
        if self._again is entry:
            await self.host.sleep(backoff_s(self._attempts[1]))
        return True

    def _may_retry(self, entry: Entry) -> bool:
        attempt = self._attempts[1] + 1 if self._attempts[0] == entry.seq else 1
        self._attempts = (entry.seq, attempt)
        self._again = None
        if attempt > self.subscriber.options.retries or self.stopping or self.subscriber.is_closed:
            return False
        self.cursor.retried += 1
        return True
