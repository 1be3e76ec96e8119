"""How many deliveries the bus side makes, and how late they are."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator

from benchmarks.measure import EVENT, Row, at, limit_row, ratio_row
from benchmarks.publishing import another, ignore
from eventbus import Event, EventBus

_EVENTS = 50_000


def rows() -> Iterator[Row]:
    pairs = [(draining(), asyncio.run(queues(1, _EVENTS, draining=True))) for _ in range(5)]
    ours, reference = max(a for a, _ in pairs), max(b for _, b in pairs)
    yield ratio_row(
        "deliveries, one subscriber, draining / asyncio.Queue with asyncio.timeout", ours, reference, "≥ 3 ×",
        unit="/s", least=3,
    )  # fmt: skip
    pairs = [(fanning_out(10), asyncio.run(queues(10, _EVENTS // 5, draining=False))) for _ in range(5)]
    ours, reference = max(a for a, _ in pairs), max(b for _, b in pairs)
    yield ratio_row(
        "deliveries, ten subscribers, publishing included / one asyncio.Queue each", ours, reference, "≥ 5 ×",
        unit="/s", least=5,
    )  # fmt: skip
    yield limit_row("delivery latency, idle loop, p99", at(latencies(), 0.99), "≤ 10 ms", unit="s", most=0.010)
    with busy_thread():
        late = at(latencies(), 0.99)
    yield limit_row("delivery latency beside a busy Python thread, p99", late, "≤ 50 ms", unit="s", most=0.050)


def draining() -> float:
    """Deliveries per second of a full queue, from the moment its subscriber is let go."""
    bus = EventBus()
    begun, gate = threading.Event(), threading.Event()

    async def handler(event: Event) -> None:
        if not begun.is_set():
            begun.set()
            while not gate.is_set():
                await asyncio.sleep(0.001)

    bus.subscribe(handler, maxsize=_EVENTS + 1, max_bytes=1 << 40)
    with bus:
        bus.publish(EVENT)
        begun.wait()
        for _ in range(_EVENTS):
            bus.publish(EVENT)
        while bus.stats()["draining.handler"].pending < _EVENTS:
            time.sleep(0.01)
        started = time.perf_counter()
        gate.set()
        bus.flush(60)
        return _EVENTS / (time.perf_counter() - started)


def fanning_out(subscribers: int) -> float:
    """Deliveries per second to several subscribers, publishing included."""
    bus = EventBus()
    events = _EVENTS // 5
    for _ in range(subscribers):
        bus.subscribe(another(ignore), maxsize=events + 1, max_bytes=1 << 40)
    with bus:
        started = time.perf_counter()
        for _ in range(events):
            bus.publish(EVENT)
        bus.flush(60)
        return events * subscribers / (time.perf_counter() - started)


async def queues(subscribers: int, events: int, *, draining: bool) -> float:
    """The same with what one would write by hand: a queue, a task and a timeout for each subscriber."""

    async def consume(queue: asyncio.Queue[Event | None]) -> None:
        while (event := await queue.get()) is not None:
            async with asyncio.timeout(10.0):
                await ignore(event)

    every = [asyncio.Queue[Event | None]() for _ in range(subscribers)]
    started = time.perf_counter()
    for _ in range(events):
        for queue in every:
            queue.put_nowait(EVENT)
    for queue in every:
        queue.put_nowait(None)
    if draining:
        started = time.perf_counter()
    await asyncio.gather(*(asyncio.create_task(consume(queue)) for queue in every))
    return events * subscribers / (time.perf_counter() - started)


def latencies() -> list[float]:
    """Seconds from publish to handler, for single events with pauses between them; sorted."""
    bus, took = EventBus(), []

    async def handler(event: Event) -> None:
        took.append(time.time() - event.time)

    bus.subscribe(handler)
    with bus:
        for number in range(200):
            bus.publish(EVENT)
            time.sleep(0.15 if number % 10 == 0 else 0.007)
        bus.flush()
    return sorted(took)


class busy_thread:  # noqa: N801  # reads as what it is in a with statement
    """A thread of pure Python that never gives up the GIL by itself."""

    def __enter__(self) -> None:
        self._stop = False
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop = True
        self._thread.join()

    def _work(self) -> None:
        while not self._stop:
            sum(range(1000))
