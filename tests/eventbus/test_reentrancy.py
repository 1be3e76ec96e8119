"""G12: publishing from anywhere never deadlocks, what cannot end raises, and the bus's own words do not loop."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
import pytest

from eventbus import Event, EventBus, Log, PublishRecursionError, SubscriberErrorEvent, TrainEnd, WouldBlockError
from tests.eventbus.samples import Beat, Tick, assert_balanced
from tests.eventbus.waiting import until_in_task

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


class Echo(Event):
    """What is published in answer to a `Beat`."""

    n: int = 0
    by: str = ""


def answer(bus: EventBus, by: str) -> Callable[[Beat], None]:
    def publish(event: Beat) -> None:
        bus.publish(Echo(n=event.n, by=by))

    return publish


# ------------------------------------------------------------------------------------------------ from anywhere


def test_G12_publishing_from_every_kind_of_subscriber():
    """A hook, an async and a thread subscriber, a sink and a condition each publish in answer to each event."""
    bus, heard = EventBus(), []

    class Sink:
        hooks: Sequence[str] = ("on_beat",)
        options: dict[str, Any] = {}

        async def open(self) -> None: ...
        async def aclose(self) -> None: ...
        async def write(self, events: Sequence[Any]) -> None:
            for event in events:
                bus.publish(Echo(n=event.n, by="sink"))

    def asks(event: Beat) -> bool:
        bus.publish(Echo(n=event.n, by="when"))
        bus.stats()
        return False

    @bus.on("on_beat")
    async def in_a_task(event: Beat) -> None:
        bus.publish(Echo(n=event.n, by="task"))

    bus.subscribe(answer(bus, "hook"), "on_beat")
    bus.subscribe(answer(bus, "thread"), "on_beat", run_in="thread")
    bus.subscribe(lambda event: None, "on_beat", run_in="thread", when=asks)
    bus.attach(Sink())

    @bus.on("on_echo", maxsize=10_000)
    async def note(event: Echo) -> None:
        heard.append((event.by, event.n))

    with bus:
        for n in range(100):
            bus.publish(Beat(n=n))
        assert bus.flush()
    for by in "hook", "task", "thread", "sink", "when":
        assert [n for who, n in heard if who == by] == list(range(100))


@pytest.mark.anyio
async def test_G12_publishing_from_the_body_of_a_stream():
    """What a reader publishes reaches its own stream too."""
    bus, seen = EventBus(), []
    async with bus.stream("on_beat") as events:
        bus.publish(Beat(n=0))
        async for event in events:
            seen.append(event.n)
            if event.n == 20:
                break
            bus.publish(Beat(n=event.n + 1))
    assert seen == list(range(21))
    assert bus.close().ok


@pytest.fixture
def eager_gc() -> Iterator[None]:
    """Collects garbage at nearly every allocation, so that finalisers strike in the middle of everything."""
    before = gc.get_threshold()
    gc.set_threshold(3)
    yield
    gc.set_threshold(*before)


def test_G12_publishing_from_finalisers_in_the_middle_of_a_publish(eager_gc):
    """`__del__` may publish, subscribe, close a subscription and read the stats, wherever the collector strikes."""
    bus, seen, made = EventBus(), [], []

    class Owner:
        def __init__(self, n: int) -> None:
            self.me = self
            self.n = n
            self.subscription = bus.subscribe(lambda event: None, "on_log")

        def __del__(self) -> None:
            made.append(self.n)
            bus.publish(Beat(n=self.n))
            self.subscription.close()
            if self.n % 10 == 0:
                bus.stats()

    @bus.on("on_beat", maxsize=10_000)
    async def note(event: Beat) -> None:
        seen.append(event.n)

    with bus:
        for n in range(300):
            Owner(n)
            bus.publish(Beat(n=1000 + n))
        gc.collect()
        assert bus.flush()
    assert sorted(seen) == sorted([*made, *range(1000, 1300)])
    assert len(made) == 300
    assert_balanced(bus)


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="this platform has no interval timers")
def test_G12_publishing_from_a_signal_handler_in_the_middle_of_a_publish():
    """Signals strike at any line of the bus: none of their events is lost, and nothing deadlocks."""
    bus, seen, own, struck = EventBus(), [], [], []

    def strike(number: int, frame: object) -> None:
        n = -len(struck) - 1
        struck.append(n)
        bus.publish(Beat(n=n))
        if n % 7 == 0:
            assert_balanced(bus)
        if n % 11 == 0:
            bus.subscribe(lambda event: None, "on_log").close()
        if len(struck) < 300:
            signal.setitimer(signal.ITIMER_REAL, 0.0003)

    @bus.on("on_beat", maxsize=1_000_000)
    async def note(event: Beat) -> None:
        seen.append(event.n)

    former = signal.signal(signal.SIGALRM, strike)
    try:
        with bus:
            signal.setitimer(signal.ITIMER_REAL, 0.0003)
            while len(struck) < 300:
                own.append(len(own))
                bus.publish(Beat(n=own[-1]))
            assert bus.flush()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)
    assert [n for n in seen if n >= 0] == own
    assert [n for n in seen if n < 0] == struck
    assert_balanced(bus)


def test_G12_publishing_to_a_full_queue_from_its_own_handler_never_blocks():
    """With `overflow="block"` the loop that would make room is not made to wait for it."""
    bus, seen = EventBus(), []

    @bus.on("on_tick", overflow="block", maxsize=3, block_timeout=30.0)
    async def doubles(event: Tick) -> None:
        seen.append(event.n)
        if event.n == 0:
            for n in range(1, 20):
                bus.publish(Tick(n=n))

    with bus:
        bus.publish(Tick(n=0))
        assert bus.flush(5.0)
    assert seen[0] == 0
    stats = assert_balanced(bus).popitem()[1]
    assert stats.dropped == stats.dropped_by["block_timeout"] > 0


def test_G12_two_buses_may_publish_into_each_other():
    """A chain of events that goes back and forth ends when it ends."""
    one, other, seen = EventBus(), EventBus(), []

    def forward(mine: EventBus, to: EventBus) -> None:
        @mine.on("on_beat")
        async def passes_on(event: Beat) -> None:
            seen.append(event.n)
            if event.n < 50:
                to.publish(Beat(n=event.n + 1))

    forward(one, other)
    forward(other, one)
    done = threading.Event()
    one.subscribe(lambda event: done.set() if event.n == 50 else None, "on_beat")
    one.publish(Beat(n=0))
    assert done.wait(10)
    one.close()
    other.close()
    assert seen == list(range(51))


# ------------------------------------------------------------------------------------------------------ logging


class Publishing(logging.Handler):
    """A logging handler that publishes every record."""

    def __init__(self, bus: EventBus) -> None:
        super().__init__()
        self.bus = bus
        self.records: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record.getMessage())
        self.bus.publish(Log(step=0, values={"line": record.getMessage()}))


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    found = logging.getLogger()
    level, handlers = found.level, found.handlers[:]
    found.setLevel(logging.INFO)
    yield found
    found.setLevel(level)
    found.handlers[:] = handlers


def test_G12_records_of_the_bus_that_are_published_on_it_do_not_loop(logger):
    """A subscriber that fails on each record, and whose failure makes a record, is told of once."""
    bus = EventBus()
    handler = Publishing(bus)
    logger.addHandler(handler)

    @bus.on("on_log", name="fails")
    async def fails(event: Log) -> None:
        raise LookupError("no such project")

    @bus.on("on_log", name="fails inline")
    def fails_inline(event: Log) -> None:
        raise LookupError("no such project")

    with bus:
        logger.info("hello")
        assert bus.flush()
        assert bus.flush()
    about = [line for line in handler.records if "fails" in line]
    assert len(about) == 2
    assert len(handler.records) <= 4


def test_G12_a_slow_hook_on_records_of_the_bus_is_named_once(logger):
    """The warning about a slow inline hook makes a record that the same hook is slow on."""
    bus = EventBus()
    handler = Publishing(bus)
    logger.addHandler(handler)
    bus.subscribe(lambda event: time.sleep(0.06), "on_log", name="slow")
    logger.info("hello")
    assert [line for line in handler.records if "held the publishing thread" in line] == [handler.records[-1]]
    assert len(handler.records) == 2
    bus.close()


def test_G12_threads_that_log_into_the_bus_beside_a_bus_that_logs(logger):
    """A thread that holds the lock of a logging handler while it publishes does not stop the loop that wants it."""
    bus, seen = EventBus(), []
    handler = Publishing(bus)
    logger.addHandler(handler)

    @bus.on("on_log", maxsize=100_000)
    async def note(event: Log) -> None:
        if event.values["line"].startswith("line"):
            seen.append(event.values["line"])
        logging.getLogger("mine").debug("handled")

    @bus.on("on_log", maxsize=100_000)
    async def fails(event: Log) -> None:
        raise LookupError("no such project")

    def talk(me: int) -> None:
        for n in range(300):
            logger.info("line %d %d", me, n)

    threads = [threading.Thread(target=talk, args=(me,)) for me in range(4)]
    with bus:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert bus.flush()
    assert sorted(seen) == sorted(f"line {me} {n}" for me in range(4) for n in range(300))


# ------------------------------------------------------------------------------------------ what cannot end


def test_G12_hooks_that_publish_each_other_without_end_are_named():
    """Runaway recursion raises out of the publish that began it, with the chain of names and what to do."""
    bus = EventBus()

    @bus.on("on_beat", name="to_echo")
    def to_echo(event: Beat) -> None:
        bus.publish(Echo(n=event.n))

    @bus.on("on_echo", name="to_beat")
    def to_beat(event: Echo) -> None:
        bus.publish(Beat(n=event.n))

    with pytest.raises(PublishRecursionError, match=r"to_echo → to_beat → to_echo → to_beat.*must not publish"):
        bus.publish(Beat(n=1))
    assert_balanced(bus)


def test_G12_recursion_that_branches_ends_as_soon():
    """Where each of several hooks publishes the event again, none is tried after the first has gone too deep."""
    bus, calls = EventBus(), []

    def again(event: Beat) -> None:
        calls.append(event.n)
        bus.publish(event)

    for number in range(3):
        bus.subscribe(lambda event: again(event), "on_beat", name=f"again {number}")
    with pytest.raises(PublishRecursionError):
        bus.publish(Beat(n=1))
    assert len(calls) < 100
    with pytest.raises(PublishRecursionError):  # nothing of it is left behind
        bus.publish(Beat(n=1))
    assert len(calls) < 200


def test_G12_a_chain_of_hooks_that_ends_is_no_recursion():
    """Ten events that lead to each other are delivered, the innermost first."""
    bus, order = EventBus(), []

    @bus.on("on_beat")
    def next_one(event: Beat) -> None:
        if event.n < 10:
            bus.publish(Beat(n=event.n + 1))
        order.append(event.n)

    bus.publish(Beat(n=0))
    assert order == list(range(10, -1, -1))


@pytest.mark.anyio
async def test_G12_a_subscriber_that_answers_itself_for_ever_does_not_keep_the_bus():
    """Each event leads to another one: the others are served meanwhile, and `aclose` ends it in time."""
    bus, seen = EventBus(), []

    @bus.on("on_beat")
    async def again(event: Beat) -> None:
        bus.publish(Beat(n=event.n + 1))

    @bus.on("on_log")
    async def note(event: Log) -> None:
        seen.append(event.step)

    async with bus:
        bus.publish(Beat(n=0))
        for step in range(20):
            bus.publish(Log(step=step))
        await until_in_task(lambda: len(seen) == 20)
        with anyio.fail_after(5.0 + 1.0):
            await bus.aclose(5.0)
    assert_balanced(bus)


def test_G12_what_the_bus_tells_about_a_failure_is_never_told_in_circles():
    """Subscribers that fail on `on_subscriber_error` hear of the failures of others once, and not of their own."""
    bus, told = EventBus(), []

    @bus.on("on_subscriber_error", "on_beat", name="one")
    async def one(event: Event) -> None:
        raise LookupError("one")

    @bus.on("on_subscriber_error", name="other")
    async def other(event: SubscriberErrorEvent) -> None:
        told.append(event.subscriber)
        raise LookupError("other")

    with bus:
        bus.publish(Beat(n=1))
        for _ in range(3):
            assert bus.flush()
    assert told == ["one"]
    assert bus.stats()["one"].failed == 1


# ---------------------------------------------------------------------------------------- waiting for oneself


@pytest.mark.anyio
async def test_G12_a_handler_that_waits_for_its_own_event_is_told_at_once():
    """`flush`, `aflush`, `close` and `aclose` raise inside of async and thread subscribers, sinks and streams."""
    bus, errors = EventBus(), []

    def try_blocking(who: str) -> None:
        for call in bus.flush, bus.close:
            with pytest.raises(WouldBlockError, match="would wait for ever") as error:
                call()
            errors.append((who, str(error.value)))

    async def try_awaiting(who: str) -> None:
        for call in bus.aflush, bus.aclose:
            with pytest.raises(WouldBlockError, match="is handling here") as error:
                await call()
            errors.append((who, str(error.value)))

    class Sink:
        hooks: Sequence[str] = ("on_beat",)
        options: dict[str, Any] = {}

        async def open(self) -> None: ...
        async def aclose(self) -> None: ...
        async def write(self, events: Sequence[Event]) -> None:
            try_blocking("sink")
            await try_awaiting("sink")

    @bus.on("on_beat", name="task")
    async def in_a_task(event: Beat) -> None:
        try_blocking("task")
        await try_awaiting("task")
        await anyio.to_thread.run_sync(try_blocking, "thread of the task")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(try_awaiting, "task of the task")

    @bus.on("on_beat", run_in="thread", name="thread")
    def in_a_thread(event: Beat) -> None:
        try_blocking("thread")
        asyncio.run(try_awaiting("thread"))

    bus.attach(Sink(), name="sink")
    async with bus:
        bus.publish(Beat(n=1))
        assert await bus.aflush()
        async with bus.stream("on_beat") as events:
            assert await bus.aflush()
            bus.publish(Beat(n=2))
            await anext(events)
            await try_awaiting("stream")
        assert await bus.aflush()
    assert {who for who, _ in errors} == {
        "task", "thread", "sink", "stream", "thread of the task", "task of the task",
    }  # fmt: skip
    assert all(stats.failed == 0 for stats in bus.stats().values())


def test_G12_an_inline_hook_may_flush_what_it_has_just_seen():
    """The hook runs on the publishing thread, so its event is delivered to the others meanwhile."""
    bus, seen = EventBus(), []

    @bus.on("on_train_end")
    async def note(event: TrainEnd) -> None:
        seen.append(event.step)

    bus.subscribe(lambda event: seen.append(bus.flush()), "on_train_end")
    bus.publish(TrainEnd(epoch=0, step=7))
    assert seen == [7, True]
    bus.close()


def test_G12_a_handler_may_wait_for_another_bus():
    """Only the bus whose event is being handled would wait for the handler."""
    one, other, seen = EventBus(), EventBus(), []

    @other.on("on_echo")
    async def note(event: Echo) -> None:
        await asyncio.sleep(0.01)
        seen.append(event.n)

    @one.on("on_beat", run_in="thread")
    def passes_on(event: Beat) -> None:
        other.publish(Echo(n=event.n))
        seen.append(other.flush())

    one.publish(Beat(n=3))
    assert one.close().ok
    assert other.close().ok
    assert seen == [3, True]


@pytest.mark.anyio
async def test_G12_a_handler_may_wait_for_another_event():
    """`wait_for` in a handler holds up that subscriber alone, not the event it waits for."""
    bus, seen = EventBus(), []

    @bus.on("on_beat")
    async def waits(event: Beat) -> None:
        waiting = bus.wait_for("on_echo", timeout=5.0)
        seen.append("asked")
        seen.append((await waiting).n)

    async with bus:
        bus.publish(Beat(n=1))
        await until_in_task(lambda: seen)
        bus.publish(Echo(n=2))
        assert await bus.aflush()
    assert seen == ["asked", 2]
