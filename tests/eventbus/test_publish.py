"""G2: publish waits for nobody."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from eventbus import Event, EventBus
from tests.eventbus.samples import Beat, Tick
from tests.eventbus.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    opened = threading.Event()
    yield opened
    opened.set()


def published_while(bus: EventBus, count: int = 3000) -> None:
    """Publish from this thread, in a helper thread that must end although nobody else gets on."""
    done = threading.Event()

    def publish() -> None:
        for n in range(count):
            bus.publish(Tick(n=n))
        done.set()

    threading.Thread(target=publish, daemon=True).start()
    assert done.wait(20), "publish waited"


def blocking_coroutine(gate: threading.Event) -> Callable[[Event], Any]:
    async def handler(event: Event) -> None:
        gate.wait()

    return handler


def blocking_function(gate: threading.Event) -> Callable[[Event], Any]:
    def handler(event: Event) -> None:
        gate.wait()

    return handler


def test_G2_publish_does_not_wait_for_a_loop_that_a_handler_holds(gate: threading.Event) -> None:
    """Also beyond what the hand-off buffer holds."""
    bus = EventBus()
    bus.subscribe(blocking_coroutine(gate))
    published_while(bus, 45_000)
    assert bus.stats()["blocking_coroutine.handler"].matched == 45_000
    gate.set()
    assert bus.close().ok


def test_G2_publish_does_not_wait_for_a_thread_or_a_full_queue(gate: threading.Event) -> None:
    bus = EventBus()
    bus.subscribe(blocking_function(gate), run_in="thread", maxsize=2, name="thread")
    bus.subscribe(blocking_function(gate), run_in="thread", maxsize=2, overflow="drop_newest", name="newest")
    published_while(bus)
    gate.set()
    bus.close()


def test_G2_publish_does_not_wait_for_a_lock_that_a_handler_holds() -> None:
    """The training thread may hold a lock that a handler wants, and publish meanwhile."""
    bus = EventBus()
    lock = threading.Lock()
    wanted = threading.Event()

    @bus.on(Tick, run_in="thread")
    def handler(event: Event) -> None:
        wanted.set()
        with lock:
            pass

    with lock:
        bus.publish(Tick())
        assert wanted.wait(5)
        published_while(bus)
    assert bus.close().ok


def test_G2_publish_does_not_wait_while_somebody_reads_stats_or_registers(gate: threading.Event) -> None:
    bus = EventBus()
    stop = threading.Event()

    async def handler(event: Event) -> None: ...

    def disturb() -> None:
        while not stop.is_set():
            bus.stats()
            bus.report()
            bus.subscribe(handler, name="again").close()

    threads = [threading.Thread(target=disturb) for _ in range(3)]
    for thread in threads:
        thread.start()
    published_while(bus)
    stop.set()
    for thread in threads:
        thread.join()
    bus.close()


def test_G2_overflow_block_waits_within_its_own_limit_and_counts_what_it_gave_up(gate: threading.Event) -> None:
    """The one subscriber for which publishing waits, because its user said so."""
    bus = EventBus()
    bus.subscribe(
        blocking_function(gate), run_in="thread", maxsize=1, overflow="block", block_timeout=0.05, name="slow"
    )
    started = time.monotonic()
    for n in range(4):
        bus.publish(Tick(n=n))
    assert time.monotonic() - started >= 0.1, "two publishes had to wait"
    stats = bus.stats()["slow"]
    assert stats.dropped_by == {"block_timeout": 2}
    assert stats.pending == 2
    gate.set()
    bus.close()


def test_G2_overflow_block_loses_nothing_when_the_subscriber_gets_on() -> None:
    bus = EventBus()
    got: list[int] = []

    @bus.on(Tick, maxsize=3, overflow="block", block_timeout=10.0)
    async def handler(event: Tick) -> None:
        got.append(event.n)

    for n in range(200):
        bus.publish(Tick(n=n))
    bus.close()
    assert got == list(range(200))


def test_G2_an_inline_hook_that_takes_long_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    """Over 50 ms on the publishing thread: the log says who and what to do."""
    caplog.set_level(logging.WARNING)
    bus = EventBus()

    @bus.on(Beat)
    def slow_hook(event: Event) -> None:
        until = time.monotonic() + 0.06
        while time.monotonic() < until:
            pass

    for _ in range(3):
        bus.publish(Beat())
    (record,) = [r for r in caplog.records if "slow_hook" in r.getMessage()]
    assert "held the publishing thread" in record.getMessage()
    assert 'run_in="thread"' in record.getMessage()


def test_G2_events_wait_for_a_start_that_comes_later() -> None:
    """Without autostart nothing starts by itself, and what is published before the start is delivered in order."""
    bus = EventBus(autostart=False)
    got: list[int] = []

    @bus.on(Tick)
    async def handler(event: Tick) -> None:
        got.append(event.n)

    for n in range(100):
        bus.publish(Tick(n=n))
    assert bus.stats()["test_G2_events_wait_for_a_start_that_comes_later.handler"].pending == 100
    with bus:
        until(lambda: len(got) == 100)
    assert got == list(range(100))
