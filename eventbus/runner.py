"""Start and end of the bus side: which loop it runs on, moving to another one, draining, and closing in time."""

from __future__ import annotations

import math
from threading import get_ident
from time import perf_counter
from typing import TYPE_CHECKING

import msgspec

from eventbus.completion import Completion
from eventbus.errors import AlreadyStartedError
from eventbus.loop import Host, current_host
from eventbus.marks import Flush
from eventbus.own_loop import OwnLoop
from eventbus.pump import Pump

if TYPE_CHECKING:
    from collections.abc import Mapping

    from eventbus.asyncio_host import AsyncioHost
    from eventbus.delivery import Delivery
    from eventbus.service import Service
    from eventbus.subscription import Queued

__all__ = ["CloseReport", "Runner"]

#: Of the time for closing, the part for what is pending everywhere; the rest is for what is slow, and for the others
#: to end meanwhile.
_DRAINING = 0.75
#: How long sinks may take to close when the time for closing is over, in seconds.
_SINKS_S = 0.3
#: When a thread that waits for the end closes without the loop, since a handler holds it; in seconds after that time.
_MARGIN_S = 0.4


class CloseReport(msgspec.Struct, frozen=True):
    """What `close` could not deliver: `left` counts, for each subscriber by name, the events it dropped."""

    ok: bool
    left: Mapping[str, int]


class Runner:
    """One start of a bus: its loop, its pump, and how it ends."""

    def __init__(self, bus: Service, *, explicit: bool, is_hosted: bool = False) -> None:
        self._bus = bus
        self._log = bus._log
        #: For a loop of the host's, so that no publish may start one of the bus's own.
        self.is_hosted = is_hosted
        #: Asked for by `with bus:` or `async with bus:`, not started by a publish.
        self.explicit = explicit
        #: False while it starts, and when a Ctrl-C struck in that.
        self.is_started = False
        self.host: Host | None = None
        self.pump: Pump | None = None
        self.own: OwnLoop | None = None
        self.closed = Completion()
        self.report = CloseReport(True, {})
        self._end_s = 0.0
        self._patience_s: float | None = None
        self._stop = Completion()
        self._closing = False
        self._close_begun = False
        self._given_up = False
        self._all_ended: Completion | None = None

    # ------------------------------------------------------------------------------------------------- starting

    def start_own(self) -> None:
        """Start a loop in a thread of the bus's own; returns at once, the loop takes over what is in the log."""
        if self.own is None:
            threads = sum(subscription.kind in ("thread", "process") for subscription in self._bus._registry.all())
            own = OwnLoop(self._main, spare_threads=threads)
            if self.own is None:  # of several starters one comes first, as in the bus
                self.own = own
        self.own.start()
        self.is_started = True

    def start_here(self, host: Host) -> None:
        """Run on the loop that runs here."""
        self._begin(host, lingers=False)
        self.is_started = True

    def never_started(self) -> None:
        """Take back a start on a host's loop in which something struck."""
        if self.pump is not None:
            self.pump.stop()

    async def _main(self, host: AsyncioHost) -> None:
        self._begin(host, lingers=True)
        waker = host.waker()
        while not await self._stop.wait_in_task(waker, 3600.0):
            pass

    def _begin(self, host: Host, *, lingers: bool) -> None:
        self.host = host
        self.pump = pump = Pump(self._bus, host, lingers=lingers)
        self._log.reopen()
        for subscriber in self._log.served():
            if subscriber not in self._log.newcomers:
                self._log.newcomers.append(subscriber)
        pump.start()
        if self._closing:  # asked for while the loop was starting
            pump.jobs.append(self._close)

    @property
    def where(self) -> str:
        return self.host.name if self.host is not None else "in a thread of its own"

    def take_over(self) -> None:
        """Make the automatic start an explicit one."""
        if self.explicit:
            raise AlreadyStartedError(self.where)
        self.explicit = True

    @property
    def is_closing(self) -> bool:
        """Somebody waits for the end."""
        return self._closing

    def is_loop_thread(self) -> bool:
        return self.host is not None and self.host.ident == get_ident()

    # --------------------------------------------------------------------------------------------------- ending

    def request_close(self, timeout: float, patience_s: float | None = None) -> None:
        """Begin to close; `closed` is set when it is done. Idempotent; a later, shorter time counts."""
        end_s = perf_counter() + timeout
        self._end_s = min(self._end_s, end_s) if self._closing else end_s
        self._patience_s = patience_s
        if self._closing:
            return
        self._closing = True
        if self.pump is not None:
            self.pump.jobs.append(self._close)
            self._log.rouse()

    def wait_closed(self, timeout: float) -> CloseReport:
        """Wait in a thread; when the loop is held by a handler, close without it."""
        if self.own is not None and timeout > 0:
            self.own.run_here()
        if not self.closed.wait(timeout + _MARGIN_S):
            self._give_up("closed")
            self._finish()
        if self.own is not None:
            self.own.join(0.2)
        return self.report

    async def _close(self) -> None:
        """On the loop: deliver what is pending, end every worker after its last event, and stop."""
        if self._close_begun or self.closed.is_set():
            return
        self._close_begun = True
        self._bus._failures.tell_last_losses()  # while the others can still hear of them
        flush = Flush(self._log)
        self._log.mark(flush)
        await self._wait_for(flush.completion, most_s=_DRAINING * (self._end_s - perf_counter()))
        self._log.flushed(flush)
        await self._take_over_the_rest()
        for subscriber in self._log.subscribers:
            subscriber.cursor.end()
        await self._workers_ended()
        self._give_up("closed")
        await self._sinks_closed()
        self._finish()

    async def _take_over_the_rest(self) -> None:
        """Take no more events, and hand on those that came before, once their numbers have left the GPU."""
        assert self.host is not None  # noqa: S101
        if self._bus._runner is not self:  # the bus was started anew meanwhile
            return
        self._bus._refuse_events()
        while len(self._log) and perf_counter() < self._end_s:
            if not self._log.feed():
                await self.host.sleep(0.002)

    async def _wait_for(self, completion: Completion, most_s: float = math.inf) -> None:
        """Wait until it is complete, the time is over, or (at exit) nothing gets on any more."""
        assert self.host is not None  # noqa: S101
        waker = self.host.waker()
        settled, since_s = self._settled(), perf_counter()
        until_s = since_s + most_s
        while not completion.is_set() and (left_s := min(self._end_s, until_s) - perf_counter()) > 0:
            await completion.wait_in_task(waker, min(left_s, 0.1))
            if (now_settled := self._settled()) != settled:
                settled, since_s = now_settled, perf_counter()
            if self._patience_s is not None and perf_counter() - since_s > self._patience_s:
                self._end_s = perf_counter()

    async def _workers_ended(self) -> None:
        self._all_ended = Completion()
        self._look_ended()
        await self._wait_for(self._all_ended)

    async def _sinks_closed(self) -> None:
        """Give sinks the moment they need to close, although the time is over."""
        assert self.host is not None  # noqa: S101
        until_s = perf_counter() + _SINKS_S
        while not all(delivery.at_rest for delivery in self._deliveries()) and perf_counter() < until_s:
            await self.host.sleep(0.002)

    def ended(self, subscriber: Queued) -> None:
        """A worker has ended."""
        if self._all_ended is not None:
            self._look_ended()
        elif self.pump is not None:
            self.pump.deliveries.pop(subscriber, None)

    def _look_ended(self) -> None:
        if self._all_ended is not None and all(delivery.ended for delivery in self._deliveries()):
            self._all_ended.set()

    def lose_loop(self) -> None:
        """The host ended its loop without closing the bus."""
        if not self.closed.is_set():
            self._give_up("loop_closed")
            self._finish()

    def halt(self) -> None:
        """Deliver nothing more, without a word to anybody: this is the copy in a forked process."""
        if self.pump is not None:
            self.pump.stopped = True
        for delivery in self._deliveries():
            delivery.halt()

    def _deliveries(self) -> tuple[Delivery, ...]:
        return tuple(self.pump.deliveries.values()) if self.pump is not None else ()

    def _settled(self) -> int:
        cursors = [subscriber.cursor for subscriber in self._log.served()]
        return sum(c.delivered + c.failed + c.timed_out + c.dropped for c in cursors)

    def _give_up(self, reason: str) -> None:
        """Once, and by one thread: the time is over, or the loop is gone; count what is left, and drop it."""
        if self._given_up:
            self.closed.wait(_SINKS_S)
            return
        self._given_up = True
        others = self._bus._runner is not self  # the bus was started anew meanwhile
        if not others:
            self._bus._refuse_events()
            self._log.lose_devices()
            self._log.catch_up(0.1)
        left = {s.name: n for s in self._log.served() if (n := s.cursor.left())}
        left |= {delivery.name: delivery.left for delivery in self._deliveries() if delivery.left}
        for delivery in self._deliveries():
            if not delivery.ended:
                delivery.cut(reason)
        if not others:
            self._log.give_up(reason)
            if self._bus._runner is not self:  # or just now: what comes is for the one that runs
                self._log.gave_up = ""
        # What a held-up feeder has not even handed on is for nobody knows whom.
        self.report = CloseReport(not left and (others or not len(self._log)), left)

    def _finish(self) -> None:
        if self.closed.is_set():
            return
        if self.pump is not None:
            self.pump.stop()
            self.pump.deliveries.clear()
        self._bus._runner_ended(self)
        self._bus._failures.tell_last_losses()
        self._stop.set()
        self.closed.set()

    # --------------------------------------------------------------------------------------------------- moving

    async def leave(self, timeout: float) -> None:
        """Let the running deliveries end and stop, leaving the cursors to the next runner. Awaited on another loop."""
        here = current_host()
        flush = Flush(self._log)
        self._log.mark(flush)
        await flush.completion.wait_in_task(here.waker(), timeout)
        self._log.flushed(flush)
        until = perf_counter() + timeout
        for delivery in self._deliveries():
            delivery.stop()
        while not all(delivery.at_rest for delivery in self._deliveries()) and perf_counter() < until:
            await here.sleep(0.002)
        if self.pump is not None:
            self.pump.stop()
        self._stop.set()
        while self.own is not None and not self.own.join(0.0) and perf_counter() < until:
            await here.sleep(0.002)
