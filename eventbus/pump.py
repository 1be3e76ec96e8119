"""The pump: on the bus loop, moves events from the log to the cursors, starts workers and watches their clocks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Coroutine
from threading import get_ident
from time import perf_counter
from typing import TYPE_CHECKING, Any

from eventbus.delivery import AsyncDelivery, Delivery
from eventbus.sinks import SinkDelivery
from eventbus.threads import ThreadDelivery

if TYPE_CHECKING:
    from eventbus.loop import Host
    from eventbus.options import Kind
    from eventbus.service import Service
    from eventbus.subscription import Queued

__all__ = ["Pump"]

#: While events come from other threads the pump looks every few milliseconds instead of being woken for each: waking
#: a loop makes the publishing thread give up the GIL, which costs it 10 µs as a rule and milliseconds at worst.
LOOK_S = 0.004
#: After so long without an event the pump sleeps until it is woken.
LINGER_S = 0.1
_BUDGET_S = 0.002
_NOTICE_S = 0.25
#: How long after a fault the pump goes on.
_RESTART_S = 0.05
#: How often it wakes by itself to try what a disk refused.
_RETRY_S = 1.0
_KINDS: dict[Kind, type[Delivery]] = {"async": AsyncDelivery, "thread": ThreadDelivery, "sink": SinkDelivery}


class Pump:
    """Serves one bus on one host, from start to stop."""

    def __init__(self, bus: Service, host: Host, *, lingers: bool) -> None:
        self._bus = bus
        self._log = bus._log
        self.host = host
        self._waker = host.waker()
        self._clock = host.waker()
        self._lingers = lingers
        self._foreign = lingers
        self._notice_at = 0.0
        self.deliveries: dict[Queued, Delivery] = {}
        #: Coroutines that another thread wants to have run here.
        self.jobs: deque[Callable[[], Coroutine[Any, Any, None]]] = deque()
        self.stopped = False

    def start(self) -> None:
        self._log.wake = self.wake
        self.host.spawn(lambda: self._last(self._pump), name="trainbus pump", on_hold=_ignore)
        self.host.spawn(lambda: self._last(self._watch), name="trainbus clock", on_hold=_ignore)

    def wake(self) -> None:
        """Have it look now; from any thread."""
        if get_ident() != self.host.ident:
            self._foreign = True
        if self.host.is_closed():
            self._bus._lost_loop()
        self._waker.wake()

    def stop(self) -> None:
        self.stopped = True
        self._log.unserve(self.wake)
        self._waker.wake()
        self._clock.wake()

    async def _last(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Do it until the end. A fault of ours in it is told, and ends nobody's deliveries."""
        while not self.stopped:
            try:
                await work()
            except BaseException as error:
                if self.host.is_ours(error):
                    self._bus._lost_loop()
                if not isinstance(error, Exception):
                    raise
                self._bus._failures.tell_fault(error)
                await self.host.sleep(_RESTART_S)

    async def _pump(self) -> None:
        idle_since = perf_counter()
        while not self.stopped:
            moved = self._log.feed(_BUDGET_S)
            self._serve()
            now = perf_counter()
            if now >= self._notice_at:
                self._notice_at = now + _NOTICE_S
                self._bus._failures.tell_losses()
                for subscriber in self._log.subscribers:
                    subscriber.pulse.look(subscriber.cursor)
            if moved or len(self._log):
                idle_since = now
            if moved:
                await self.host.checkpoint()
            elif len(self._log) or (self._foreign and now - idle_since < LINGER_S):
                await self._waker.wait(LOOK_S)  # also while numbers of the next event are on their way from a GPU
            else:
                await self._sleep()
                idle_since = perf_counter()

    async def _sleep(self) -> None:
        """Sleep until woken. Look once more after saying so: who publishes before that does not wake us."""
        self._foreign = self._lingers
        self._bus._failures.tell_losses()
        self._log.asleep = True
        if len(self._log) or self.jobs or self.stopped:
            self._log.asleep = False
        else:
            await self._waker.wait(_RETRY_S if self._log.is_restless else None)

    def _serve(self) -> None:
        """Start a worker for each new subscriber, and the jobs that other threads asked for."""
        while self._log.newcomers:
            subscriber = self._log.newcomers.popleft()
            kind = _delivery_of(subscriber.kind)
            if kind is not None and subscriber not in self.deliveries:
                if self._bus._refuses:  # it came while the bus closes
                    subscriber.cursor.end()
                self.deliveries[subscriber] = delivery = kind(subscriber, self._bus, self.host)
                delivery.start()
                self._clock.wake()
        while self.jobs:
            self.host.spawn(self.jobs.popleft(), name="trainbus job", on_hold=_ignore)

    async def _watch(self) -> None:
        """Look at the clock of each delivery when its time may be over, and not before."""
        while not self.stopped:
            now = perf_counter()
            look_at = now + 3600.0
            for delivery in tuple(self.deliveries.values()):
                look_at = min(look_at, delivery.check(now), now + delivery.timeout_s)
            await self._clock.wait(max(look_at - now, 0.001))


def _delivery_of(kind: Kind) -> type[Delivery] | None:
    if kind == "process":
        from eventbus.process import ProcessDelivery  # imported by who registered it: few programs need it

        return ProcessDelivery
    return _KINDS.get(kind)


def _ignore(held_s: float) -> None:
    """The pump's own steps are short."""
