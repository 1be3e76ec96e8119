"""What `publish` costs the training thread."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from benchmarks.measure import EVENT, Row, at, limit_row, paced, per_call, ratio_row
from eventbus import Event, EventBus


class Nothing:
    def take(self, event: Event) -> None:
        pass


async def ignore(event: Event) -> None:
    pass


def rows() -> Iterator[Row]:
    yield nobody_listens()
    yield from beside_work()
    yield back_to_back()
    yield waking_a_sleeper()


def nobody_listens() -> Row:
    bus, nothing = EventBus(), Nothing()
    reference = per_call(lambda: nothing.take(EVENT), 200_000)
    ours = per_call(lambda: bus.publish(EVENT), 200_000)
    return ratio_row("publish, nobody listens / an empty method", ours, reference, "≤ 5 ×", unit="s", most=5)


def beside_work() -> Iterator[Row]:
    """One event every 2 ms beside Python work, each way alone, in turn."""
    threadsafe: list[float] = []
    single: list[float] = []
    many: list[float] = []
    for _ in range(4):
        with own_loop() as loop:
            threadsafe += paced(lambda: loop.call_soon_threadsafe(Nothing().take, EVENT), every_s=0.002, number=250)
        for subscribers, times in ((1, single), (100, many)):
            with subscribed(subscribers) as bus:
                times += paced(lambda: bus.publish(EVENT), every_s=0.002, number=250)
    threadsafe, single, many = sorted(threadsafe), sorted(single), sorted(many)
    yield ratio_row(
        "publish every 2 ms, one async subscriber / call_soon_threadsafe, median",
        at(single, 0.5), at(threadsafe, 0.5), "≤ 0.2 ×", unit="s", most=0.2,
    )  # fmt: skip
    yield limit_row("the same, p99", at(single, 0.99), "≤ 15 µs", unit="s", most=15e-6)
    yield ratio_row(
        "the same, 100 async subscribers / 1, median", at(many, 0.5), at(single, 0.5), "≤ 1.2 ×", unit="s", most=1.2
    )


def back_to_back() -> Row:
    """Into the log and no further: the consumer would only add its own time to the same two cores."""

    def once() -> float:
        bus = EventBus(autostart=False)
        bus.subscribe(ignore, type(EVENT))
        bus.publish(EVENT)
        seconds = per_call(lambda: bus.publish(EVENT), 15_000, repeat=1)
        bus.close()
        return seconds

    return limit_row(
        "publish back to back, one async subscriber", min(once() for _ in range(7)), "≤ 1 µs", unit="s", most=1e-6
    )


def waking_a_sleeper() -> Row:
    """Steps so long that the consumer sleeps in between."""
    threadsafe: list[float] = []
    ours: list[float] = []
    for _ in range(4):
        with own_loop() as loop:
            threadsafe += paced(lambda: loop.call_soon_threadsafe(Nothing().take, EVENT), every_s=0.12, number=10)
        with subscribed(1) as bus:
            ours += paced(lambda: bus.publish(EVENT), every_s=0.12, number=10)
    threadsafe, ours = sorted(threadsafe), sorted(ours)
    return ratio_row(
        "publish that wakes a sleeping consumer / call_soon_threadsafe, median",
        at(ours, 0.5), at(threadsafe, 0.5), "≤ 3 ×", unit="s", most=3,
    )  # fmt: skip


@contextmanager
def own_loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@contextmanager
def subscribed(count: int) -> Iterator[EventBus]:
    """A running bus with so many async subscribers of one hook."""
    bus = EventBus()
    with ExitStack() as stack:
        for _ in range(count):
            bus.subscribe(another(ignore), type(EVENT))
        stack.enter_context(bus)
        bus.publish(EVENT)
        bus.flush()
        time.sleep(0.2)  # let the consumer fall asleep
        yield bus


def another(handler: Callable[..., object]) -> Callable[..., object]:
    """A function of its own, so that it is a subscriber of its own."""

    async def same(event: Event) -> None:
        pass

    return same
