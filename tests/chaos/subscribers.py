"""The subscribers of a chaotic run: each a handler that behaves as it was told, and a book of what it saw."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from itertools import count
from threading import TIMEOUT_MAX, get_ident
from time import perf_counter
from typing import TYPE_CHECKING, Any

import anyio

from eventbus import ChildError, Event, SinkGone, SinkUnavailable
from tests.chaos.children import ChildHandler
from tests.chaos.scenario import HANGING

if TYPE_CHECKING:
    from eventbus import Subscription
    from tests.chaos.runner import Run
    from tests.chaos.scenario import Sub

__all__ = ["RAISED", "Book", "Deliberate", "Odd", "handler_of"]

_SLOW_S = 0.002
_BLOCK_S = 0.04
_BURN_S = 0.004


class Deliberate(Exception):  # noqa: N818  # it is no error, but a part
    """Raised by a handler that was told to fail."""


class Odd(BaseException):
    """The same, and no `Exception`."""


#: What a subscriber with ``on_error="raise"`` may have raised in a publish or a close.
RAISED = (Deliberate, Odd, SystemExit, TimeoutError, asyncio.CancelledError, ChildError)


class Book:
    """What one subscriber was told, and what it may have heard; each note is one append, from any thread."""

    def __init__(self, spec: Sub, who: int) -> None:
        self.spec = spec
        self.who = who
        self.subscription: Subscription | None = None
        #: By hook: when the call that subscribed to it began and returned.
        self.opened: dict[str, tuple[float, float]] = {}
        #: When each call that closed it began and returned.
        self.closed: list[tuple[float, float]] = []
        #: Every attempt: the number of the event, who published it, as which, and its hook.
        self.calls: list[tuple[int, int, int, str]] = []
        #: The numbers of events whose call returned, and of those whose call raised.
        self.returned: list[int] = []
        self.raised: list[int] = []
        #: The numbers of events for which `when` raised.
        self.misjudged: list[int] = []
        #: When its sink said that it wants no more.
        self.gone: list[float] = []
        self.overlaps = 0
        #: Its handler serves two subscriptions, so that nothing about it can be said.
        self.is_muddled = False
        #: What is wrong already.
        self.faults: list[str] = []
        #: Of a sink: what was called, in order.
        self.io: list[str] = []
        self.echoes = count()
        self._left = spec.budget
        self._seen = 0
        self._running = 0

    def begin(self, *events: Event) -> None:
        for event in events:
            self.calls.append((event.seq, getattr(event, "who", -1), getattr(event, "n", -1), event.hook))
        self.overlaps += self._running > 0
        self._running += 1

    def end(self, error: BaseException | None, *events: Event) -> None:
        self._running -= 1
        (self.returned if error is None else self.raised).extend(event.seq for event in events)

    def misbehaves(self) -> bool:
        """Whether it is time to do what it was told."""
        self._seen += 1
        if self._left and self._seen % self.spec.period == 0:
            self._left -= 1
            return True
        return False

    def when(self) -> Callable[[Event], bool] | None:
        """The `when=` of this subscriber."""
        if self.spec.when == "even":
            return lambda event: getattr(event, "n", 0) % 2 == 0
        return self._judge if self.spec.when == "raises" else None

    def _judge(self, event: Event) -> bool:
        if getattr(event, "n", 1) % 5 == 0:
            self.misjudged.append(event.seq)
            raise Deliberate("cannot judge it")
        return True


def handler_of(book: Book, run: Run) -> Any:
    """The callable or the sink to subscribe."""
    if book.spec.kind == "sink":
        return ChaosSink(book, run)
    if book.spec.kind == "process":
        spec = book.spec
        return ChildHandler(run.notes_of(spec), spec.behaviour, spec.budget, spec.period, spec.hang_s)
    return _async_handler(book, run) if book.spec.kind == "async" else _plain_handler(book, run)


def _async_handler(book: Book, run: Run) -> Any:
    async def handle(event: Event) -> None:
        book.begin(event)
        error: BaseException | None = None
        try:
            if book.misbehaves():
                await _misbehave_async(book, run, event)
        except BaseException as raised:
            error = raised
            raise
        finally:
            book.end(error, event)
            error = None

    return handle


def _plain_handler(book: Book, run: Run) -> Any:
    def handle(event: Event) -> None:
        book.begin(event)
        error: BaseException | None = None
        try:
            if book.misbehaves():
                _misbehave(book, run, event)
        except BaseException as raised:
            error = raised
            raise
        finally:
            book.end(error, event)
            error = None

    return handle


async def _misbehave_async(book: Book, run: Run, event: Event) -> None:
    behaviour = book.spec.behaviour
    if behaviour == "slow":
        await anyio.sleep(_SLOW_S)
    elif behaviour == "hangs":
        await _hang(book, run)
    elif behaviour == "stubborn":
        await _ignore_cancellation(book, run)
    elif behaviour == "cancels_itself":
        task = asyncio.current_task() if run.scenario.host != "trio" else None
        if task is not None:
            task.cancel()
        if event.seq % 2:  # else it returns before it can be struck
            await anyio.sleep(0)
    elif behaviour == "cancels":
        raise asyncio.CancelledError
    elif behaviour == "blocks":
        run.hold(_BLOCK_S, time.sleep)
    else:
        _misbehave(book, run, event)


def _misbehave(book: Book, run: Run, event: Event) -> None:
    behaviour = book.spec.behaviour
    if behaviour == "slow":
        time.sleep(_SLOW_S)
    elif behaviour == "hangs":
        run.release.wait(min(book.spec.hang_s, TIMEOUT_MAX))
    elif behaviour == "burns":
        run.hold(_BURN_S, _burn)
    elif behaviour == "raises":
        raise Deliberate(f"event {event.seq}")
    elif behaviour == "exits":
        raise SystemExit(3)
    elif behaviour == "odd":
        raise Odd
    elif behaviour == "publishes" and event.hook != "chaos_echo":
        run.publish(book.who, next(book.echoes), "chaos_echo")
    elif behaviour == "leaves":
        run.close_book(book)
    elif behaviour == "invites":
        run.invite()


async def _hang(book: Book, run: Run) -> None:
    until = perf_counter() + book.spec.hang_s
    while not run.release.is_set() and perf_counter() < until:
        await anyio.sleep(0.002)


async def _ignore_cancellation(book: Book, run: Run) -> None:
    """Go on whatever is asked."""
    if run.scenario.host == "trio":
        with anyio.CancelScope(shield=True):
            await _hang(book, run)
        return
    until = perf_counter() + book.spec.hang_s
    while not run.release.is_set() and perf_counter() < until:
        try:
            await asyncio.sleep(0.002)
        except asyncio.CancelledError:
            pass


def _burn(seconds: float) -> None:
    until = perf_counter() + seconds
    while perf_counter() < until:
        sum(range(100))


class ChaosSink:
    """A sink that behaves as it was told."""

    def __init__(self, book: Book, run: Run) -> None:
        self.hooks = book.spec.hooks
        self.options: dict[str, Any] = {}
        self.max_batch = book.spec.max_batch
        self.flush_interval = book.spec.flush_interval
        self._book = book
        self._run = run
        #: The call that runs.
        self._busy = ""
        self._thread = 0

    async def open(self) -> None:
        self._enter("open")
        try:
            if self._book.spec.behaviour in ("slow_open", "fails_open", "hangs_open") and self._book.misbehaves():
                await self._misopen()
        finally:
            self._busy = ""
        self._book.io.append("opened")

    async def _misopen(self) -> None:
        if self._book.spec.behaviour == "fails_open":
            raise SinkUnavailable("not yet") if self._book.spec.retries else Deliberate("no such thing")
        if self._book.spec.behaviour == "hangs_open":
            await _hang(self._book, self._run)
        await anyio.sleep(0.02)

    async def write(self, events: Sequence[Event], /) -> None:
        self._enter("write")
        events = tuple(events)
        self._book.begin(*events)
        error: BaseException | None = None
        try:
            if self._book.misbehaves():
                await self._miswrite(events)
        except BaseException as raised:
            error = raised
            raise
        finally:
            self._busy = ""
            self._book.end(error, *events)
            error = None

    async def _miswrite(self, events: Sequence[Event]) -> None:
        behaviour = self._book.spec.behaviour
        if behaviour == "slow":
            await anyio.sleep(_SLOW_S)
        elif behaviour == "hangs":
            await _hang(self._book, self._run)
        elif behaviour == "unavailable":
            raise SinkUnavailable("not now")
        elif behaviour == "gone":
            self._book.gone.append(perf_counter())
            raise SinkGone("no more")
        else:
            _misbehave(self._book, self._run, events[-1])

    async def aclose(self) -> None:
        self._enter("aclose")
        self._busy = ""

    def _enter(self, call: str) -> None:
        """One call at a time, all of one start on one loop's thread."""
        if self._busy and self._book.spec.behaviour not in HANGING:
            self._book.faults.append(f"{call} of the sink began while another call ran")
        if self._busy == call == "write":
            self._book.io.append("overlap")
        me = get_ident()
        if call != "open" and self._thread != me:
            self._book.faults.append(f"{call} of the sink ran on another thread than its open")
        self._thread = me
        self._busy = call
        self._book.io.append(call)
