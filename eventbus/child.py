"""What runs in the child of a process subscriber: the same deliveries as in its parent, on a cursor that reports.

The main thread belongs to the handler, or to the loop of the coroutine or sink; another one reads what the parent
sends. The parent keeps the bounds, the counts and the clock. When it is gone, the child ends what it has got.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING, Any, cast

from eventbus import exits
from eventbus.arrival import arrived
from eventbus.entry import Entry
from eventbus.errors import SinkUnavailable
from eventbus.link import Link
from eventbus.options import Options
from eventbus.reference import load, load_name
from eventbus.reporting import ReportingCursor, Reports
from eventbus.threads import ThreadDelivery
from eventbus.wire import (
    Alive,
    Begun,
    Broken,
    Bye,
    End,
    EventClass,
    Hurry,
    Ready,
    Recovered,
    Sent,
    Start,
    ToChild,
    Trouble,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from eventbus.delivery import Delivery
    from eventbus.events import Event
    from eventbus.loop import Host
    from eventbus.service import Service
    from eventbus.subscription import Queued

__all__ = ["main"]

#: How often the loop of a sink says that it turns, in seconds; for a short timeout twice in that.
_BEAT_S = 0.5


def main(fd: int, parent: int) -> None:
    """Serve the subscriber that the parent names, until it says that this is all."""
    former = sys.modules["__main__"]  # kept: the script of the parent may take its place
    _hold_out()
    _close_all_but(fd)
    link = Link(fd, parent)
    start = link.first()
    assert isinstance(start, Start)  # noqa: S101
    sys.argv = start.argv
    link.listen(child := Child(link, start))
    try:
        exits.begin_importing()
        target = load(start.target, start.main)
        exits.end_importing()
    except BaseException as error:  # noqa: BLE001  # whatever an import does
        link.put(Broken(Trouble.of(error)))
        link.send()
        raise SystemExit(1) from None
    child.serve(target)
    del former


def _hold_out() -> None:
    """Go on when somebody stops the parent, which says when this ends. Not with SIG_IGN, which children inherit."""
    ours = [signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])]
    for number in ours:
        signal.signal(number, _go_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ours)


def _go_on(*_: object) -> None:
    """Nothing to do."""


def _close_all_but(fd: int) -> None:
    """Close what a library of the parent leaves open over exec: a file or device that would be in use until the end."""
    for name in os.listdir("/dev/fd"):
        if int(name) > 2 and int(name) != fd:
            try:
                os.close(int(name))
            except OSError:  # the listing itself
                pass


class Child:
    """Serves one function or sink with what the parent sends."""

    def __init__(self, link: Link, start: Start) -> None:
        self._link = link
        self._start = start
        self._is_sink = start.serve_as == "sink"
        self._cursor = ReportingCursor(link, announces=not self._is_sink)
        self._subscriber = Served(start, self._cursor, link)
        self._bus = Here(start, Reports(self._cursor, link))

    def serve(self, target: Any) -> None:
        """Deliver until the end."""
        self._subscriber.fn = Announced(target, self._link) if self._is_sink else target
        if self._start.serve_as == "def":
            self._say_ready()
            delivery = InMainThread(cast("Queued", self._subscriber), cast("Service", self._bus), cast("Host", None))
            delivery.start()
        else:
            self._serve_on_loop()
        self._link.put(Bye())
        self._link.send()

    def _say_ready(self) -> None:
        self._link.put(Ready())
        self._link.send()

    def _serve_on_loop(self) -> None:
        import asyncio  # here: a def needs none

        from eventbus.own_loop import new_loop

        with asyncio.Runner(loop_factory=new_loop) as runner:
            runner.run(self._deliver())

    async def _deliver(self) -> None:
        from eventbus.asyncio_host import AsyncioHost
        from eventbus.delivery import AsyncDelivery
        from eventbus.sinks import SinkDelivery

        host = AsyncioHost("in the child of a process subscriber")
        kind: type[Delivery] = SinkDelivery if self._is_sink else AsyncDelivery
        delivery = kind(cast("Queued", self._subscriber), cast("Service", self._bus), host)
        self._bus.waker = host.waker()
        self._say_ready()
        delivery.start()
        while not delivery.ended:
            if self._is_sink and (self._cursor.pending or self._cursor.ended):
                self._link.put(Alive())
                self._link.send()
            await self._bus.waker.wait(min(_BEAT_S, self._start.timeout_s / 2))

    # ----------------------------------------------------------------------------- from the thread that reads

    def hear(self, messages: Sequence[ToChild]) -> None:
        """Take over what the parent has sent."""
        entries: list[Entry] = []
        for message in messages:
            match message:
                case Sent(seq, size, data):
                    event = arrived(data)
                    entries.append(Entry(event, seq, size, False, type(event)))
                case EventClass(module, qualname):
                    self._import_class(module, qualname)
                case Hurry():
                    self._feed(entries)
                    self._cursor.hurry_up()
                case End(how):
                    self._feed(entries)
                    self._subscriber.is_closed |= how == "unsubscribed"
                    self._cursor.is_leaving |= how == "moved"
                    self._cursor.end()
        self._feed(entries)

    def _feed(self, entries: list[Entry]) -> None:
        if entries:
            self._cursor.feed(entries.copy(), sum(entry.size for entry in entries))
            entries.clear()

    def _import_class(self, module: str, qualname: str) -> None:
        """Have an event class in the table; where it cannot be imported, its events come as `UnknownEvent`."""
        try:
            load_name(module, qualname, self._start.main)
        except Exception:  # noqa: BLE001  # whatever an import does
            pass

    def orphaned(self) -> None:
        """There is no parent any more: end when what has come is done."""
        self._cursor.end()


class Served:
    """The subscription, as a delivery in the child knows it."""

    def __init__(self, start: Start, cursor: ReportingCursor, link: Link) -> None:
        self._link = link
        self.cursor = cursor
        self.name = start.name
        self.timeout_s = start.timeout_s
        self.is_closed = False
        self.fn: Any = None
        self._options = Options(retries=start.retries, rank=start.wanted_rank)
        #: The first event may have been tried by a former child.
        self._first_options = Options(retries=start.first_retries, rank=start.wanted_rank)

    @property
    def options(self) -> Options:
        is_first = self.cursor.pending == self.cursor.matched
        return self._first_options if is_first else self._options

    @property
    def trouble(self) -> None:
        """The parent knows it; a delivery sets it to say that it is over."""

    @trouble.setter
    def trouble(self, none: None) -> None:
        self._link.put(Recovered())
        self._link.send()


class Here:
    """The bus, as a delivery in the child knows it."""

    def __init__(self, start: Start, failures: Reports) -> None:
        self.run = start.run
        self.rank = start.rank
        self.waker: Any = None
        self._failures = failures

    def _ended(self, subscriber: object) -> None:
        if self.waker is not None:
            self.waker.wake()

    def _is_hosted_in_main(self) -> bool:
        return False

    def _lost_loop(self) -> None:
        """The loop ends with its process."""


class InMainThread(ThreadDelivery):
    """Calls a ``def`` where it is started."""

    def start(self) -> None:
        self.cursor.wake = self._wake
        self._run(self.generation, self._wakes)


class Announced:
    """A sink that says when a write begins."""

    def __init__(self, sink: Any, link: Link) -> None:
        self._sink = sink
        self._link = link

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sink, name)

    async def write(self, events: Sequence[Event]) -> None:
        self._say(len(events))
        try:
            await self._sink.write(events)
        except SinkUnavailable:  # they are kept
            self._say(0)
            raise

    def _say(self, count: int) -> None:
        self._link.put(Begun(count))
        self._link.send()
