"""Pulling events: `EventBus.stream` and `EventBus.wait_for`, on the caller's loop."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from time import perf_counter
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from eventbus import handling
from eventbus.loop import current_host

if TYPE_CHECKING:
    from types import TracebackType

    from eventbus.entry import Entry
    from eventbus.events import Event
    from eventbus.loop import Waker
    from eventbus.publish import Publisher
    from eventbus.stats import SubscriberStats
    from eventbus.subscription import Queued

__all__ = ["Stream", "Waiting"]

E = TypeVar("E", bound="Event")


class Stream(Generic[E]):
    """Events as an async iterator: ``async with bus.stream("on_log") as events: async for event in events: ...``.

    An event counts as delivered when the next one is asked for, or the block is left normally. Ends when the bus
    closes. Bounded like any subscriber: who reads too slowly loses the oldest events. The body of the block counts as
    handling the event it was given last.
    """

    def __init__(self, subscribe: Callable[[], Queued]) -> None:
        self._subscribe = subscribe
        self._subscriber: Queued | None = None
        self._outer: handling.Handler | None = None
        self._waker: Waker | None = None
        self._handed: Entry | None = None
        self._handed_s = 0.0

    async def __aenter__(self) -> Stream[E]:
        self._waker = current_host().waker()
        self._subscriber = subscriber = self._subscribe()
        subscriber.cursor.wake = self._waker.wake
        self._outer = handling.handler.get()
        handling.handler.set(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._subscriber is not None  # noqa: S101
        handling.handler.set(self._outer)
        if error is None:
            self._settle()
        elif self._handed is not None:
            self._subscriber.cursor.fail(self._handed)
        self._subscriber.close()

    @property
    def name(self) -> str:
        return self._subscriber.name if self._subscriber is not None else "stream"

    @property
    def bus(self) -> Publisher | None:
        return self._subscriber._bus if self._subscriber is not None else None

    @property
    def event(self) -> Event | None:
        """The event in hand."""
        return self._handed.event if self._handed is not None else None

    @property
    def stats(self) -> SubscriberStats:
        assert self._subscriber is not None, "the stream is not open"  # noqa: S101
        return self._subscriber.stats

    def __aiter__(self) -> Stream[E]:
        return self

    async def __anext__(self) -> E:
        if self._subscriber is None or self._waker is None:
            raise RuntimeError("The stream is not open. Use: async with bus.stream(…) as events.")
        self._settle()
        cursor = self._subscriber.cursor
        while True:
            entry = cursor.take()
            if entry is not None:
                self._handed, self._handed_s = entry, perf_counter()
                return entry.event  # type: ignore[return-value]  # the filter saw to it
            if cursor.ended or self._subscriber.is_closed:
                raise StopAsyncIteration
            cursor.waiting = True
            if not cursor.queued() and not cursor.ended:
                await self._waker.wait()
            cursor.waiting = False

    def _settle(self) -> None:
        if self._handed is not None and self._subscriber is not None:
            self._subscriber.cursor.deliver(self._handed, perf_counter() - self._handed_s)
            self._handed = None


class Waiting(Awaitable[Any]):
    """The next event of a hook; it was subscribed to when this was made, and is awaited once."""

    def __init__(self, subscriber: Queued, timeout: float | None) -> None:
        self._subscriber = subscriber
        self._timeout = timeout

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._wait().__await__()

    async def _wait(self) -> Event:
        cursor = self._subscriber.cursor
        waker = current_host().waker()
        cursor.wake = waker.wake
        until = perf_counter() + self._timeout if self._timeout is not None else float("inf")
        try:
            while (entry := cursor.take()) is None:
                left_s = until - perf_counter()
                if left_s <= 0:
                    raise TimeoutError(f"No {' or '.join(self._subscriber.filter.names)} within {self._timeout:g} s.")
                if cursor.ended:
                    raise RuntimeError("The bus closed before the event came.")
                cursor.waiting = True
                if not cursor.queued() and not cursor.ended:
                    await waker.wait(None if self._timeout is None else left_s)
                cursor.waiting = False
            cursor.deliver(entry, 0.0)
            return entry.event
        finally:
            self._subscriber.close()

    def close(self) -> None:
        """Wait no longer; for who never awaits it."""
        self._subscriber.close()
