"""Faults that were once found by attacking the bus, each with the right value."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import anyio
import pytest

from eventbus import (
    Event,
    EventBus,
    Log,
    SubscriberErrorEvent,
    Subscription,
    SubscriptionError,
    journal,
    read_journal,
    spill,
)  # fmt: skip
from eventbus.delivery import Delivery
from eventbus.log import Log as BusLog
from eventbus.runner import Runner
from tests.eventbus.samples import Beat, Load, Tick, assert_balanced, is_balanced
from tests.eventbus.waiting import until


def test_G4_closing_a_subscription_in_its_retry_pause_leaves_the_loop_free() -> None:
    bus = EventBus()
    failed = threading.Event()
    got: list[int] = []

    async def bad(event: Event) -> None:
        failed.set()
        raise ValueError

    async def other(event: Tick) -> None:
        got.append(event.n)

    subscription = bus.subscribe(bad, Tick, retries=8)
    bus.subscribe(other, Tick)
    bus.publish(Tick(n=1))
    assert failed.wait(5)
    subscription.close()
    bus.publish(Tick(n=2))
    assert bus.flush(5)
    assert got == [1, 2]
    assert bus.close(5).ok


def test_G5_a_retry_that_will_not_stop_is_abandoned_and_not_delivered_again() -> None:
    bus = EventBus()
    calls: list[int] = []
    release = threading.Event()

    async def stubborn(event: Tick) -> None:
        calls.append(event.n)
        if event.n == 1 and len(calls) == 1:
            raise ValueError
        while event.n == 1 and not release.is_set():
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                pass

    bus.subscribe(stubborn, Tick, retries=1, timeout=0.05, name="s")
    for n in (1, 2, 3):
        bus.publish(Tick(n=n))
    assert bus.flush(10)
    stats = assert_balanced(bus)["s"]
    release.set()
    bus.close()
    assert calls == [1, 1, 2, 3]
    assert (stats.timed_out, stats.delivered) == (1, 2)


@pytest.mark.parametrize("started", [True, False])
def test_G10_the_event_of_a_once_subscriber_counts_for_flush_and_close(started: bool) -> None:
    """It hears nothing more, and still has an event to be delivered."""
    bus = EventBus(autostart=started)
    gate, begun = threading.Event(), threading.Event()

    def once(event: Event) -> None:
        begun.set()
        gate.wait(5)

    subscription = bus.subscribe(once, Tick, once=True, run_in="thread", name="once")
    bus.publish(Tick())
    assert not bus.flush(0.05)
    if started:
        assert begun.wait(5)
    report = bus.close(0.1)
    gate.set()
    assert not report.ok
    assert report.left == {"once": 1}
    assert subscription.stats.dropped_by == {"closed": 1}


def test_G14_a_loop_that_wakes_after_a_close_gave_it_up_leaves_the_next_start_alone() -> None:
    bus = EventBus()
    begun, gate, ended = threading.Event(), threading.Event(), threading.Event()
    got: list[int] = []

    async def holding(event: Tick) -> None:
        if event.n == 0:
            begun.set()
            gate.wait(10)
            ended.set()
        got.append(event.n)

    bus.subscribe(holding, Tick)
    bus.publish(Tick(n=0))
    assert begun.wait(5)
    assert not bus.close(0.1).ok
    with bus:
        bus.publish(Tick(n=1))
        gate.set()
        assert ended.wait(5)
        until(lambda: 1 in got)
        bus.publish(Tick(n=2))
        assert bus.flush(5)
    assert [n for n in got if n] == [1, 2]
    assert "after close" not in bus.report()


def test_G10_a_publish_that_races_close_does_not_start_the_bus_again() -> None:
    for _ in range(30):
        bus = EventBus()

        async def handler(event: Event) -> None: ...

        bus.subscribe(handler, Tick)
        stop = threading.Event()

        def publish(bus: EventBus = bus, stop: threading.Event = stop) -> None:
            while not stop.is_set():
                bus.publish(Tick())

        thread = threading.Thread(target=publish)
        thread.start()
        bus.close(5)
        assert "closed" in repr(bus)
        stop.set()
        thread.join()
        assert "closed" in repr(bus)


def test_G10_a_start_that_a_close_overtakes_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A publish is about to start the bus, and another thread closes it at that very moment."""
    bus = EventBus()

    async def handler(event: Event) -> None: ...

    def overtaken(service: EventBus, *, explicit: bool) -> Runner:
        closer = threading.Thread(target=bus.close)
        closer.start()
        closer.join()
        return Runner(service, explicit=explicit)

    monkeypatch.setattr("eventbus.service.Runner", overtaken)
    bus.subscribe(handler, Tick, name="h")
    bus.publish(Tick())
    assert "closed" in repr(bus)
    assert bus.stats()["h"].pending == 0
    assert "1 events were published after close." in bus.report()


def test_G4_a_handler_that_cancels_its_own_task_loses_nothing() -> None:
    """Also when it returns before the cancellation strikes."""
    bus = EventBus()
    got: list[int] = []

    async def odd(event: Tick) -> None:
        task = asyncio.current_task()
        assert task is not None
        got.append(event.n)
        if event.n == 1:
            task.cancel()
        if event.n == 2:
            asyncio.get_running_loop().call_later(0.02, task.cancel)

    bus.subscribe(odd, Tick, name="odd")
    for n in (1, 2):
        bus.publish(Tick(n=n))
        assert bus.flush(5)
    time.sleep(0.05)  # the later cancellation strikes while the worker waits
    bus.publish(Tick(n=3))
    assert bus.flush(5)
    assert got == [1, 2, 3]
    assert bus.close(5).ok


def test_G14_publishing_threads_and_an_explicit_start_start_one_loop() -> None:
    for _ in range(20):
        bus = EventBus()
        got: list[Event] = []

        async def handler(event: Event, got: list[Event] = got) -> None:
            got.append(event)

        bus.subscribe(handler, Tick)
        barrier = threading.Barrier(3)

        def publish(bus: EventBus = bus, barrier: threading.Barrier = barrier) -> None:
            barrier.wait()
            bus.publish(Tick())

        threads = [threading.Thread(target=publish) for _ in range(2)]
        for thread in threads:
            thread.start()
        barrier.wait()
        with bus:
            for thread in threads:
                thread.join()
        assert len(got) == 2


@pytest.mark.anyio
async def test_G10_closing_a_bus_that_never_started_ends_its_streams() -> None:
    bus = EventBus(autostart=False)
    async with bus.stream("on_tick") as events:
        await bus.aclose()
        with anyio.fail_after(5):
            assert [event async for event in events] == []


class Sinkish:
    """A sink with a fault of its own."""

    hooks = ("on_tick",)
    options: dict[str, Any] = {}

    async def open(self) -> None: ...
    async def write(self, events: Any) -> None: ...
    async def aclose(self) -> None: ...


@pytest.mark.parametrize(
    ("attribute", "value"), [("max_batch", None), ("max_batch", 0), ("flush_interval", "1"), ("flush_interval", -1)]
)
def test_G15_a_sink_with_a_wrong_attribute_is_refused_when_it_is_attached(attribute: str, value: object) -> None:
    sink = Sinkish()
    setattr(sink, attribute, value)
    with pytest.raises(SubscriptionError, match=attribute):
        EventBus().attach(sink)


def test_G4_a_sink_whose_bind_raises_affects_itself_alone(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)

    class Unbound(Sinkish):
        def bind(self, **_: object) -> None:
            raise RuntimeError("no")

    bus = EventBus()
    got: list[Event] = []

    async def other(event: Event) -> None:
        got.append(event)

    bus.attach(Unbound())
    bus.subscribe(other, Tick)
    with bus:
        bus.publish(Tick())
        until(lambda: got)
        bus.off("Unbound")


def test_G15_a_sink_class_and_other_options_for_a_sink_are_refused() -> None:
    bus = EventBus()
    with pytest.raises(SubscriptionError, match=r"is a class.*Sinkish\(…\)"):
        bus.attach(Sinkish)
    sink = Sinkish()
    first = bus.attach(sink)
    assert bus.attach(sink) is first
    with pytest.raises(SubscriptionError, match="other options"):
        bus.attach(sink, maxsize=3)
    with pytest.raises(SubscriptionError, match="run_in"):
        bus.attach(Sinkish(), run_in="thread", name="other")


def test_a_first_event_of_another_rank_does_not_keep_the_bus_from_starting() -> None:
    bus = EventBus()
    got: list[int | None] = []

    async def handler(event: Event) -> None:
        got.append(event.rank)

    bus.subscribe(handler, Log)
    bus.publish(Log(step=1, rank=1))
    bus.publish(Log(step=2))
    assert bus.flush(5)
    bus.close()
    assert got == [0]


def test_an_inline_hook_is_not_told_of_its_own_failure() -> None:
    bus = EventBus()
    told: list[str] = []

    def failing(event: Event) -> None:
        if isinstance(event, SubscriberErrorEvent):
            told.append(event.subscriber)
        raise ValueError

    bus.subscribe(failing, name="failing")
    bus.publish(Tick())
    assert told == []


def test_G13_an_inline_once_ends_with_its_event_and_can_be_registered_again() -> None:
    bus = EventBus()
    got: list[int] = []

    def hook(event: Tick) -> None:
        got.append(event.n)

    bus.subscribe(hook, Tick, once=True)
    for n in range(3):
        bus.publish(Tick(n=n))
    assert got == [0]
    assert not bus.hears(Tick)
    assert bus.stats() == {}
    bus.subscribe(hook, Tick, once=True)
    bus.publish(Tick(n=7))
    assert got == [0, 7]


def test_G7_overflow_block_keeps_the_bound_in_bytes() -> None:
    bus = EventBus()
    gate = threading.Event()
    bus.subscribe(
        lambda event: gate.wait(10), Load, run_in="thread", overflow="block", max_bytes=10_000, block_timeout=0.01,
        name="s",
    )  # fmt: skip
    for n in range(20):
        bus.publish(Load(n=n, value="x" * 5000))
    stats = assert_balanced(bus)["s"]
    assert stats.pending <= 3
    assert stats.dropped_by == {"block_timeout": 20 - stats.pending}
    gate.set()
    bus.close()


def test_a_hanging_sink_has_at_most_one_call_running() -> None:
    bus = EventBus()
    running, most = [0], [0]
    release = threading.Event()

    class Hanging(Sinkish):
        async def write(self, events: Any) -> None:
            running[0] += 1
            most[0] = max(most[0], running[0])
            while not release.is_set():
                await asyncio.sleep(0.005)
            running[0] -= 1

    bus.attach(Hanging(), timeout=0.03, name="s")
    for n in range(6):
        bus.publish(Tick(n=n))
    until(lambda: bus.stats()["s"].timed_out >= 4)
    release.set()
    bus.close()
    assert most == [1]


def test_G7_a_batching_sink_with_overflow_latest_gets_no_superseded_event() -> None:
    got: list[int] = []

    class Batching(Sinkish):
        max_batch = 10

        async def write(self, events: Any) -> None:
            got.extend(event.n for event in events)

    bus = EventBus(autostart=False)
    bus.attach(Batching(), overflow="latest", name="s")
    for n in range(6):
        bus.publish(Tick(n=n))
    with bus:
        bus.flush()
        assert_balanced(bus)
    assert got == [5]


@pytest.mark.anyio
async def test_G14_who_publishes_while_a_host_starts_the_bus_starts_no_loop_beside_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There would be two workers for each subscriber, one of which nobody ends."""
    served_by: set[int] = set()

    async def handle(event: Tick) -> None:
        served_by.add(threading.get_ident())

    bus = EventBus()
    bus.subscribe(handle, Tick)
    start_here = Runner.start_here

    def publish_first(runner: Runner, host: Any) -> None:
        publisher = threading.Thread(target=bus.publish, args=(Tick(),))
        publisher.start()
        publisher.join()
        start_here(runner, host)

    monkeypatch.setattr(Runner, "start_here", publish_first)
    async with bus:
        assert "trainbus-loop" not in {thread.name for thread in threading.enumerate()}
        assert await bus.aflush()
    assert served_by == {threading.get_ident()}


@pytest.mark.anyio
async def test_G14_a_bus_whose_start_on_a_host_was_struck_is_as_if_it_had_not_been_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    got: list[int] = []

    async def handle(event: Tick) -> None:
        got.append(event.n)

    def strike(runner: Runner, host: Any) -> None:
        raise KeyboardInterrupt

    bus = EventBus()
    bus.subscribe(handle, Tick)
    with monkeypatch.context() as patch:
        patch.setattr(Runner, "start_here", strike)
        with pytest.raises(KeyboardInterrupt):
            await bus.__aenter__()
    bus.publish(Tick(n=1))
    assert await bus.aflush()
    assert (await bus.aclose()).ok
    assert got == [1]


def test_G10_a_closed_bus_is_held_by_nobody_after_a_publisher_gave_up_waiting() -> None:
    """The garbage collector does not look into entries, so those that a sink keeps must not hold what holds them."""
    release = threading.Event()

    class Keeping(Sinkish):
        async def write(self, events: Any) -> None:
            self.kept = events

    def hold(event: Tick) -> None:
        release.wait(10)

    bus = EventBus()
    bus.attach(Keeping(), name="sink")
    bus.subscribe(hold, Tick, name="held", run_in="thread", overflow="block", maxsize=1, block_timeout=0.01)
    for n in range(5):
        bus.publish(Tick(n=n))
    assert bus.stats()["held"].dropped
    release.set()
    assert bus.close().ok
    gone = weakref.ref(bus)
    del bus

    def collected() -> bool:
        gc.collect()
        return gone() is None

    until(collected)


def test_G6_a_closed_durable_subscription_is_not_read_again_at_the_next_start(tmp_path: Path) -> None:
    async def handle(event: Tick) -> None: ...

    bus = EventBus(journal=tmp_path, autostart=False)
    subscription = bus.subscribe(handle, Tick, durable=True, name="left")
    for n in range(10):
        bus.publish(Tick(n=n))
    subscription.close()
    with bus:
        assert bus.flush()
    stats = subscription.stats
    assert (stats.matched, stats.dropped_by, stats.pending) == (10, {"unsubscribed": 10}, 0)


def test_G17_who_publishes_while_a_bus_starts_again_is_not_raised_at_and_gets_past_no_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is delivered is in the journal, and only one thread opens it."""
    got: list[int] = []
    raised: list[BaseException] = []

    async def handle(event: Tick) -> None:
        got.append(event.n)

    def publish() -> None:
        try:
            bus.publish(Tick(n=1))
        except BaseException as error:
            raised.append(error)

    def publish_first(directory: Path) -> int:
        monkeypatch.undo()
        publisher = threading.Thread(target=publish)
        publisher.start()
        publisher.join()
        return lock(directory)

    bus = EventBus(journal=tmp_path)
    bus.subscribe(handle, Tick)
    bus.publish(Tick(n=0))
    assert bus.close().ok
    lock = journal._lock
    monkeypatch.setattr(journal, "_lock", publish_first)
    with bus:
        bus.publish(Tick(n=2))
    assert not raised
    assert got == [event.n for event in read_journal(tmp_path)]


@pytest.mark.parametrize("durable", [False, True])
def test_G10_a_close_that_gives_up_while_events_are_read_from_the_journal_counts_each_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durable: bool
) -> None:
    """The worker finds that they were dropped; what is durable comes at the next start."""
    reading, release = threading.Event(), threading.Event()
    got: list[int] = []

    async def handle(event: Tick) -> None:
        got.append(event.n)

    def read_slowly(record: Any) -> Event:
        if threading.current_thread().name == "trainbus-loop":
            reading.set()
            assert release.wait(10)
        return event_of(record)

    def make_bus() -> tuple[EventBus, Subscription]:
        bus = EventBus(journal=tmp_path, autostart=False)
        return bus, bus.subscribe(handle, Tick, name="s", overflow="spill", durable=durable, maxsize=1)

    bus, subscription = make_bus()
    if durable:
        for n in range(90):
            bus.publish(Tick(n=n))
        bus.close()
        bus, subscription = make_bus()
    else:
        for n in range(90):
            bus.publish(Tick(n=n))
    event_of = spill.event_of
    monkeypatch.setattr("eventbus.durable.event_of" if durable else "eventbus.spill.event_of", read_slowly)
    bus.__enter__()
    assert reading.wait(10)
    bus.close(0.1)
    release.set()
    until(lambda: "trainbus-loop" not in {thread.name for thread in threading.enumerate()})
    with bus:
        assert bus.flush()
    stats = subscription.stats
    assert is_balanced(stats)
    assert (stats.pending, stats.delivered) == (0, len(got))
    assert got == (list(range(90)) if durable else [0])


def test_G10_a_close_says_that_a_durable_subscriber_has_not_read_what_it_missed(tmp_path: Path) -> None:
    held, release = threading.Event(), threading.Event()
    got: list[int] = []

    async def hold(event: Beat) -> None:
        held.set()
        release.wait(10)

    async def handle(event: Tick) -> None:
        got.append(event.n)

    bus = EventBus(journal=tmp_path, autostart=False)
    bus.subscribe(handle, Tick, durable=True, name="durable")
    bus.publish(Tick(n=1))
    bus.close()
    bus = EventBus(journal=tmp_path)
    bus.subscribe(hold, Beat, name="hold")
    bus.publish(Beat())
    assert held.wait(10)
    bus.subscribe(handle, Tick, durable=True, name="durable")
    report = bus.close(0.1)
    release.set()
    assert not report.ok
    assert report.left["durable"] == 1
    with bus:
        assert bus.flush()
    assert got == [1]


def test_mistakes_in_the_constructor_are_told_at_once() -> None:
    with pytest.raises(TypeError, match=r"redact=\['token'\]"):
        EventBus(redact="token")
    with pytest.raises(TypeError, match="rank"):
        EventBus(rank="0")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="run id"):
        EventBus(run=5)  # type: ignore[arg-type]


def test_G15_a_misspelt_hook_of_a_stream_raises_at_the_call() -> None:
    with pytest.raises(ValueError, match="on_train_batch_end"):
        EventBus().stream("on_train_batch_ends")


def test_closed_subscriptions_of_a_bus_that_never_starts_are_not_kept() -> None:
    bus = EventBus(autostart=False)
    for _ in range(100):

        async def handler(event: Beat) -> None: ...

        bus.subscribe(handler, Beat).close()
    assert not bus._log.newcomers
    assert not bus._log.subscribers


@pytest.mark.parametrize("part", ["feed", "check"])
def test_a_fault_of_the_bus_itself_is_told_and_ends_nobodys_deliveries(
    part: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pump and the clock go on after an exception that nobody has thought of."""
    whole = Delivery.check if part == "check" else BusLog.feed
    faults = iter([ValueError("unthought of")])

    def faulty(*args: Any, **given: Any) -> Any:
        for fault in faults:
            raise fault
        return whole(*args, **given)

    seen: list[Event] = []
    ended = threading.Event()

    async def hang(event: Event) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    async def take(event: Event) -> None:
        seen.append(event)

    with EventBus() as bus:
        bus.subscribe(take)
        bus.subscribe(hang, "on_log", timeout=0.1)
        monkeypatch.setattr(Delivery if part == "check" else BusLog, part, faulty)
        bus.publish(Log(step=0))
        assert ended.wait(10)
        assert bus.flush()
        assert len(seen) >= 1
    assert [r for r in caplog.records if "A fault of the event bus itself" in r.message]
