"""G5: every delivery ends, whatever its handler does."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from eventbus import Event, EventBus, SubscriberErrorEvent
from tests.eventbus.samples import Tick, assert_balanced
from tests.eventbus.waiting import until, until_in_task

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

SHORT_S = 0.03


@pytest.mark.anyio
async def test_G5_a_handler_that_takes_too_long_is_cancelled() -> None:
    """It is told by a cancellation, counted as timed out, and the next event is delivered."""
    ended: list[str] = []

    async def slow(event: Tick) -> None:
        try:
            if event.n == 1:
                await anyio.sleep(30)
        except BaseException:
            ended.append("cancelled")
            raise
        ended.append(f"delivered {event.n}")

    async with EventBus() as bus:
        subscriber = bus.subscribe(slow, Tick, timeout=SHORT_S)
        for n in range(3):
            bus.publish(Tick(n=n))
        assert await bus.aflush()
        assert (subscriber.stats.timed_out, subscriber.stats.delivered) == (1, 2)
        assert_balanced(bus)
    assert ended == ["delivered 0", "cancelled", "delivered 2"]


def test_G5_a_time_out_is_told_with_the_limit(caplog: pytest.LogCaptureFixture) -> None:
    """The log and `on_subscriber_error` name the subscriber and the timeout it exceeded."""
    told: list[SubscriberErrorEvent] = []

    async def slow(event: Tick) -> None:
        await anyio.sleep(30)

    async def listen(event: SubscriberErrorEvent) -> None:
        told.append(event)

    with EventBus() as bus:
        bus.subscribe(slow, Tick, timeout=SHORT_S, name="slow")
        bus.subscribe(listen, SubscriberErrorEvent)
        bus.publish(Tick())
        assert bus.flush()
        assert bus.flush()
    assert [(event.subscriber, event.reason) for event in told] == [
        ("slow", "TimeoutError: took longer than its timeout of 0.03 s")
    ]
    assert "'slow' failed on on_tick: TimeoutError" in caplog.text


async def _returns() -> None:
    """A handler that takes its cancellation for a signal to finish."""


async def _raises() -> None:
    raise ValueError("spoiled")


async def _exits() -> None:
    raise SystemExit(1)


async def _raises_several() -> None:
    raise BaseExceptionGroup("several", [SystemExit(1), ValueError("spoiled")])


async def _works_on() -> None:
    with anyio.CancelScope(shield=True):
        await anyio.sleep(0.02)


ENDINGS = pytest.mark.parametrize("ending", [_returns, _raises, _exits, _raises_several, _works_on])


@pytest.mark.anyio
@ENDINGS
async def test_G5_a_handler_that_ends_otherwise_than_asked_counts_as_timed_out(
    ending: Callable[[], Awaitable[None]],
) -> None:
    """What a cancelled handler does on its way out harms neither its next event, nor the others, nor the loop."""
    received: list[int] = []

    async def slow(event: Tick) -> None:
        if event.n == 1:
            try:
                await anyio.sleep(30)
            except BaseException:
                await ending()

    async def good(event: Tick) -> None:
        received.append(event.n)

    async with EventBus() as bus:
        subscriber = bus.subscribe(slow, Tick, timeout=SHORT_S)
        bus.subscribe(good, Tick)
        for n in range(4):
            bus.publish(Tick(n=n))
        assert await bus.aflush()
        assert (subscriber.stats.timed_out, subscriber.stats.delivered) == (1, 3)
        assert_balanced(bus)
        bus.publish(Tick(n=4))
        assert await bus.aflush()
        assert subscriber.stats.delivered == 4
    assert received == [0, 1, 2, 3, 4]


@ENDINGS
def test_G5_the_same_on_the_buss_own_loop(ending: Callable[[], Awaitable[None]]) -> None:
    """The bus's own loop survives it too."""

    async def slow(event: Tick) -> None:
        try:
            await anyio.sleep(30 if event.n == 1 else 0)
        except BaseException:
            await ending()

    with EventBus() as bus:
        subscriber = bus.subscribe(slow, Tick, timeout=SHORT_S)
        for n in range(4):
            bus.publish(Tick(n=n))
        assert bus.flush()
        assert (subscriber.stats.timed_out, subscriber.stats.delivered) == (1, 3)


@pytest.mark.anyio
async def test_G5_tasks_of_a_cancelled_handler_may_fail() -> None:
    """A handler whose task group ends in an error when it is cancelled has still only timed out."""

    async def fail_when_cancelled() -> None:
        try:
            await anyio.sleep(30)
        finally:
            raise ValueError("spoiled")

    async def slow(event: Tick) -> None:
        if event.n == 1:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(fail_when_cancelled)
                await anyio.sleep(30)

    async with EventBus() as bus:
        subscriber = bus.subscribe(slow, Tick, timeout=SHORT_S)
        for n in range(4):
            bus.publish(Tick(n=n))
        assert await bus.aflush()
        assert (subscriber.stats.timed_out, subscriber.stats.delivered) == (1, 3)


async def _wait_stubbornly(event: anyio.Event) -> None:
    """Wait in spite of every cancellation."""
    while not event.is_set():
        try:
            with anyio.CancelScope(shield=True):  # which keeps trio's away, but not those of an asyncio task
                await event.wait()
        except asyncio.CancelledError:
            pass


@pytest.mark.anyio
async def test_G5_a_handler_that_will_not_stop_is_abandoned() -> None:
    """One that swallows every cancellation is given up; its subscriber goes on, and its late end changes nothing."""
    release, over = anyio.Event(), anyio.Event()
    received: list[int] = []

    async def stubborn(event: Tick) -> None:
        received.append(event.n)
        if event.n == 0:
            await _wait_stubbornly(release)
            over.set()

    async with EventBus() as bus:
        subscriber = bus.subscribe(stubborn, Tick, timeout=SHORT_S)
        for n in range(4):
            bus.publish(Tick(n=n))
        assert await bus.aflush()
        before = subscriber.stats
        assert (before.timed_out, before.delivered) == (1, 3)
        assert received == [0, 1, 2, 3]
        release.set()
        await until_in_task(over.is_set)
        bus.publish(Tick(n=4))
        assert await bus.aflush()
        assert (subscriber.stats.timed_out, subscriber.stats.delivered) == (1, 4)
        assert_balanced(bus)


@pytest.mark.anyio
async def test_G5_every_event_may_be_abandoned() -> None:
    """A subscriber all of whose calls hang still gets each of its events once."""
    release = anyio.Event()
    begun: list[int] = []
    ended: list[int] = []

    async def stubborn(event: Tick) -> None:
        begun.append(event.n)
        await _wait_stubbornly(release)
        ended.append(event.n)

    async with EventBus() as bus:
        subscriber = bus.subscribe(stubborn, Tick, timeout=SHORT_S / 3)
        for n in range(5):
            bus.publish(Tick(n=n))
        assert await bus.aflush()
        assert (subscriber.stats.timed_out, subscriber.stats.pending) == (5, 0)
        release.set()
        await until_in_task(lambda: len(ended) == 5)
    assert begun == [0, 1, 2, 3, 4]


@pytest.mark.anyio
async def test_G5_an_end_in_the_very_moment_of_the_time_out_stalls_nothing() -> None:
    """Calls that last about as long as they may end one way or the other, each exactly once."""
    pauses = [SHORT_S * factor for factor in (0.9, 0.97, 1.0, 1.0, 1.03, 1.1) for _ in range(3)]

    async def close_call(event: Tick) -> None:
        await anyio.sleep(pauses[event.n])

    async with EventBus() as bus:
        subscriber = bus.subscribe(close_call, Tick, timeout=SHORT_S)
        for n in range(len(pauses)):
            bus.publish(Tick(n=n))
        assert await bus.aflush()
        assert subscriber.stats.timed_out + subscriber.stats.delivered == len(pauses)
        assert_balanced(bus)


@pytest.mark.anyio
async def test_G5_the_time_is_that_of_one_attempt() -> None:
    """A retry after a time-out has the whole time again; when there are none left, the event has timed out."""
    calls: list[int] = []

    async def slow(event: Tick) -> None:
        calls.append(event.n)
        if event.n == 0 or len(calls) < 4:
            await anyio.sleep(30)

    async with EventBus() as bus:
        subscriber = bus.subscribe(slow, Tick, timeout=SHORT_S, retries=1)
        for n in range(2):
            bus.publish(Tick(n=n))
        assert await bus.aflush()
        stats = subscriber.stats
        assert calls == [0, 0, 1, 1]
        assert (stats.timed_out, stats.delivered, stats.retried) == (1, 1, 2)


def test_G5_every_kind_has_a_limit() -> None:
    """Without `timeout=` each kind of queued subscriber has a finite one."""
    bus = EventBus(autostart=False)

    async def on_loop(event: Tick) -> None: ...

    def in_thread(event: Tick) -> None: ...

    assert bus.subscribe(on_loop, Tick).timeout_s == 10.0
    assert bus.subscribe(in_thread, Tick, run_in="thread").timeout_s == 300.0
    assert 0 < bus.attach(Endless()).timeout_s < 3600


def test_G5_threads_that_hang_are_capped_and_come_back() -> None:
    """A hundred calls that hang keep a bounded number of threads; what comes then is refused until one is free."""
    release = threading.Event()
    calls: list[int] = []

    def hang(event: Tick) -> None:
        calls.append(event.n)
        release.wait()

    before = set(threading.enumerate())
    with EventBus() as bus:
        subscriber = bus.subscribe(hang, Tick, run_in="thread", timeout=0.001, name="hang")
        for n in range(100):
            bus.publish(Tick(n=n))
        assert bus.flush(30)
        stats = assert_balanced(bus)["hang"]
        assert stats.timed_out == len(calls) <= 32
        assert stats.dropped_by == {"no_thread": 100 - len(calls)}
        hanging = [t for t in threading.enumerate() if t not in before and t.name == "trainbus hang"]
        assert len(hanging) == len(calls)
        bus.publish(Tick(n=100))
        assert bus.flush()
        assert subscriber.stats.dropped_by == {"no_thread": 101 - len(calls)}
        release.set()
        until(lambda: not any(thread.is_alive() for thread in hanging))
        bus.publish(Tick(n=101))
        assert bus.flush()
        assert subscriber.stats.delivered == 1
    assert calls[-1] == 101


def test_G5_a_bus_whose_threads_all_hang_closes_when_the_rest_is_done() -> None:
    """A subscriber that has no thread any more has nothing to end for which closing would wait."""
    release = threading.Event()

    def hang(event: Tick) -> None:
        release.wait()

    bus = EventBus()
    bus.subscribe(hang, Tick, run_in="thread", timeout=0.001)
    bus.__enter__()
    for n in range(50):
        bus.publish(Tick(n=n))
    assert bus.flush(30)
    closed = threading.Thread(target=bus.close, args=(300.0,))
    closed.start()
    closed.join(30)
    assert not closed.is_alive()
    release.set()


def test_G5_a_thread_that_hangs_is_not_asked_again() -> None:
    """A call that timed out is not repeated while it still runs, whatever the retries."""
    release = threading.Event()
    calls: list[int] = []

    def hang(event: Tick) -> None:
        calls.append(event.n)
        if event.n == 0:
            release.wait()

    with EventBus() as bus:
        subscriber = bus.subscribe(hang, Tick, run_in="thread", timeout=SHORT_S, retries=3)
        for n in range(3):
            bus.publish(Tick(n=n))
        assert bus.flush()
        assert calls == [0, 1, 2]
        assert (subscriber.stats.timed_out, subscriber.stats.delivered, subscriber.stats.retried) == (1, 2, 0)
        release.set()


def test_G5_a_thread_that_ends_late_but_before_it_is_given_up_has_timed_out() -> None:
    """Between the timeout and the giving up there is a moment of grace, and no success."""
    with EventBus() as bus:
        subscriber = bus.subscribe(lambda _: time.sleep(0.1), Tick, run_in="thread", timeout=0.05)
        bus.publish(Tick())
        bus.publish(Tick())
        assert bus.flush()
        assert (subscriber.stats.timed_out, subscriber.stats.delivered) == (2, 0)


class Endless:
    """A sink whose first write never ends by itself."""

    hooks = ("on_tick",)
    options: dict[str, Any] = {}

    def __init__(self) -> None:
        self.release = threading.Event()
        self.written: list[int] = []
        self.cancelled = False

    async def open(self) -> None: ...

    async def write(self, events: Sequence[Event]) -> None:
        try:
            while not self.release.is_set() and not self.written:
                await anyio.sleep(0.005)
        except BaseException:
            self.cancelled = True
            raise
        self.written.extend(event.n for event in events if isinstance(event, Tick))

    async def aclose(self) -> None: ...


def test_G5_a_sink_is_not_cancelled_and_its_late_success_is_noted() -> None:
    """A write that is too late counts as timed out, goes on, and is not repeated; the next one waits for it."""
    sink = Endless()
    with EventBus() as bus:
        subscriber = bus.attach(sink, timeout=0.2, name="sink")
        bus.publish(Tick(n=0))
        bus.publish(Tick(n=1))
        until(lambda: bus.stats()["sink"].timed_out == 1)
        sink.release.set()
        assert bus.flush()
        stats = assert_balanced(bus)["sink"]
        assert (stats.timed_out, stats.late_ok, stats.delivered) == (1, 1, 1)
    assert sink.written == [0, 1]
    assert not sink.cancelled
    assert subscriber.name == "sink"
