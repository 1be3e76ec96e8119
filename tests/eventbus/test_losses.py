"""G7: nothing is dropped without being announced: once per interval, with a count and the reasons, up to the end."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from eventbus import Event, EventBus, EventsDropped, TrainEnd
from tests.eventbus.clock import Clock
from tests.eventbus.samples import Beat, Tick, assert_balanced
from tests.eventbus.scripts import run
from tests.eventbus.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch, "eventbus.notices")


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    opened = threading.Event()
    yield opened
    opened.set()


@pytest.fixture(autouse=True)
def everything_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "eventbus")


def said(caplog: pytest.LogCaptureFixture, name: str = "it") -> list[tuple[int, str]]:
    """What the log says of the drops of a subscriber: how loudly, and from the number on."""
    start = f"Subscriber {name!r} "
    records = [r for r in caplog.records if r.getMessage().startswith(start) and "were dropped (" in r.getMessage()]
    return [(record.levelno, record.getMessage().removeprefix(start)) for record in records]


def told_of(bus: EventBus) -> list[EventsDropped]:
    told: list[EventsDropped] = []

    async def listen(event: EventsDropped) -> None:
        told.append(event)

    bus.subscribe(listen, EventsDropped, name="listener")
    return told


def blocked(bus: EventBus, gate: threading.Event, **options: Any) -> Any:
    """Subscribe "it", which takes one event and no other."""
    taken = threading.Event()

    def handle(event: Event) -> None:
        taken.set()
        gate.wait(30)

    subscriber = bus.subscribe(handle, Tick, Beat, name="it", run_in="thread", **options)
    bus.publish(Tick())
    assert taken.wait(10)
    return subscriber


def test_G7_each_interval_tells_what_came_since_the_last_by_reason(
    clock: Clock, gate: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    """The counts of the announcements add up to what was dropped."""
    with EventBus() as bus:
        told = told_of(bus)
        subscriber = blocked(bus, gate, maxsize=1)
        for _ in range(4):
            bus.publish(Tick())
        until(lambda: len(told) == 1)
        for _ in range(5):
            bus.publish(Tick())
        assert subscriber.stats.dropped == 8
        clock.move(61.0)
        until(lambda: (bus.publish(TrainEnd()), len(told) == 2)[1])
        assert sum(event.count for event in told) == 8
        assert all(event.reason == f"{event.count} overflow" for event in told)
        gate.set()
    assert len(said(caplog)) == 2
    assert said(caplog)[-1] == (logging.WARNING, f"is too slow: {told[1].count} of its events were dropped "
                                                 f"({told[1].count} overflow), 8 so far.")  # fmt: skip


def test_G10_close_tells_the_others_what_the_interval_has_not(
    gate: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    """What was dropped before it goes to the others too; what `close` itself drops, to the log."""
    with EventBus() as bus:
        told = told_of(bus)
        blocked(bus, gate, maxsize=2)
        for _ in range(3):
            bus.publish(Tick())
        until(lambda: told)
        for _ in range(4):
            bus.publish(Tick())
        assert bus.stats()["it"].dropped == 5
        report = bus.close(0.3)
        assert report.left == {"it": 3}
        assert sum(event.count for event in told) == 5
    assert assert_balanced(bus)["it"].dropped_by == {"overflow": 5, "closed": 3}
    level, last = said(caplog)[-1]
    assert level == logging.WARNING
    assert last == "ends: 3 of its events were dropped (3 closed), 8 so far."


def test_G10_a_bus_that_never_started_tells_what_its_close_drops(caplog: pytest.LogCaptureFixture) -> None:
    bus = EventBus(autostart=False)

    async def handler(event: Tick) -> None: ...

    bus.subscribe(handler, Tick, name="it", maxsize=3)
    for _ in range(5):
        bus.publish(Tick())
    bus.close()
    assert said(caplog) == [
        (logging.WARNING, "is too slow: 5 of its events were dropped (2 overflow, 3 closed), 5 so far.")
    ]


@pytest.mark.parametrize("served", [True, False])
def test_G7_a_subscription_that_is_closed_tells_what_it_dropped_before(
    served: bool, gate: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    """Although no later interval will; what it gives up by closing is for the log alone, and no warning."""
    bus = EventBus(autostart=served)
    told = told_of(bus)
    if served:
        subscriber = blocked(bus, gate, maxsize=2)
        bus.publish(Tick())
    else:
        subscriber = bus.subscribe(lambda event: None, Tick, name="it", run_in="thread", maxsize=2)
    for _ in range(4):
        bus.publish(Tick())
    counts = subscriber.stats
    subscriber.close()
    gate.set()
    if served:
        assert bus.flush()
        until(lambda: sum(event.count for event in told) >= counts.dropped)
        assert bus.close().ok
    stats = subscriber.read()
    assert stats.dropped_by == {"overflow": counts.dropped, "unsubscribed": stats.dropped - counts.dropped}
    told_in_the_log = [int(message.split(": ")[1].split()[0]) for _, message in said(caplog)]
    assert sum(told_in_the_log) == stats.dropped
    assert said(caplog)[0][0] == logging.WARNING


def test_G7_unsubscribing_is_no_warning_and_no_event(caplog: pytest.LogCaptureFixture) -> None:
    bus = EventBus(autostart=False)
    told = told_of(bus)

    async def handler(event: Tick) -> None: ...

    subscriber = bus.subscribe(handler, Tick, name="it")
    bus.publish(Tick())
    subscriber.close()
    assert said(caplog) == [(logging.INFO, "ends: 1 of its events were dropped (1 unsubscribed), 1 so far.")]
    with bus:
        assert bus.flush()
    assert not told


def test_G7_the_reserve_is_told_at_once_although_other_drops_were_just_told(
    monkeypatch: pytest.MonkeyPatch, gate: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    """Lost checkpoints and epoch ends do not wait for the next interval."""
    monkeypatch.setattr("eventbus.cursor.RESERVE", 2)
    with EventBus() as bus:
        blocked(bus, gate, maxsize=1)
        for _ in range(3):
            bus.publish(Tick())
        until(lambda: said(caplog))
        for _ in range(8):
            bus.publish(Beat())
        until(lambda: (bus.publish(TrainEnd()), len(said(caplog)) > 1)[1])
        assert said(caplog)[-1][0] == logging.ERROR
        assert "reserve" in said(caplog)[-1][1]
        gate.set()


async def test_G7_losses_are_told_on_every_host(anyio_backend: Any, caplog: pytest.LogCaptureFixture) -> None:
    async with EventBus() as bus:

        async def stuck(event: Tick) -> None:
            await anyio.sleep(30)

        bus.subscribe(stuck, Tick, name="it", maxsize=1)
        for _ in range(5):
            bus.publish(Tick())
        await bus.aclose(0.2)
    total = sum(int(message.split(": ")[1].split()[0]) for _, message in said(caplog))
    assert total == assert_balanced(bus)["it"].dropped == 5


def test_G10_what_a_lost_loop_drops_is_told(caplog: pytest.LogCaptureFixture) -> None:
    import asyncio

    bus = EventBus()

    async def main() -> None:
        async def stuck(event: Tick) -> None:
            await asyncio.sleep(30)

        await bus.__aenter__()
        bus.subscribe(stuck, Tick, name="it")
        for _ in range(3):
            bus.publish(Tick())
        while not bus.stats()["it"].pending:
            await asyncio.sleep(0.002)
        await asyncio.sleep(0.01)

    asyncio.run(main())
    assert assert_balanced(bus)["it"].dropped == 3
    assert sum(int(message.split(": ")[1].split()[0]) for _, message in said(caplog)) == 3


def test_G10_what_is_dropped_at_exit_is_told() -> None:
    ended = run("""
        bus = EventBus(exit_timeout=0.2)

        @bus.on(TrainEnd, name="it", run_in="thread")
        def stuck(event):
            time.sleep(60)

        for _ in range(4):
            bus.publish(TrainEnd())
        bus.stats()
    """)
    assert ended.code == 0, ended.err
    assert "(4 closed), 4 so far." in ended.err


def test_G12_a_subscription_closed_from_a_predicate_is_told_later_and_not_by_the_feeder(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Log handlers are foreign code: they are never called while events are handed on."""
    bus = EventBus(autostart=False)
    feeding: list[bool] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            feeding.append(bool(bus._log._feeder))

    async def handler(event: Tick) -> None: ...

    victim = bus.subscribe(handler, Tick, name="it", maxsize=1)
    for _ in range(3):
        bus.publish(Tick())
    assert bus.stats()["it"].dropped == 2
    log = logging.getLogger("eventbus")
    log.addHandler(handled := Handler())
    try:

        async def other(event: Tick) -> None: ...

        def when(event: Tick) -> bool:
            victim.close()
            return True

        bus.subscribe(other, Tick, when=when)
        bus.publish(Tick())
        bus.stats()
        bus.close()
    finally:
        log.removeHandler(handled)
    assert feeding
    assert not any(feeding)
    assert len(said(caplog)) == 1


def test_G13_subscriptions_closed_by_many_threads_are_told_once_each(caplog: pytest.LogCaptureFixture) -> None:
    """On a bus that nobody serves, who closes also tells."""
    bus = EventBus(autostart=False)
    subscribers = [bus.subscribe(lambda event: None, Tick, name=f"s{n}", run_in="thread") for n in range(200)]
    bus.publish(Tick())

    def close_some(start: int) -> None:
        for subscriber in subscribers[start::4]:
            subscriber.close()

    threads = [threading.Thread(target=close_some, args=(start,)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    bus.close()
    assert len([r for r in caplog.records if "(1 unsubscribed)" in r.getMessage()]) == 200
    assert not [r for r in caplog.records if r.levelno > logging.INFO]
