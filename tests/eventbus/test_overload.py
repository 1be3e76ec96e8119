"""G7: every subscriber is bounded in events and bytes; what goes first is stated, counted and announced."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eventbus import Event, EventBus, EventsDropped
from eventbus.cursor import RESERVE
from tests.eventbus.processes import run_program
from tests.eventbus.samples import Beat, Load, Tick, assert_balanced, is_balanced
from tests.eventbus.waiting import until


def undelivered(**options: Any) -> tuple[EventBus, list[Event]]:
    """A bus that delivers nothing before it is started, with one subscriber called "s"."""
    bus = EventBus(autostart=False)
    got: list[Event] = []

    async def handler(event: Event) -> None:
        got.append(event)

    bus.subscribe(handler, Tick, Beat, Load, name="s", **options)
    return bus, got


def numbers(bus: EventBus, got: list[Event]) -> list[int]:
    """What is delivered once the bus runs."""
    with bus:
        assert bus.flush()
        assert_balanced(bus)
    return [event.n for event in got]  # type: ignore[attr-defined]


BURST = st.lists(st.tuples(st.booleans(), st.booleans()), max_size=60)


def publish(bus: EventBus, burst: list[tuple[bool, bool]]) -> list[tuple[int, bool]]:
    """Publish a burst of events, some of which may be shed, with a look at the counts in between."""
    published = []
    for n, (may_shed, look) in enumerate(burst):
        bus.publish(Tick(n=n) if may_shed else Beat(n=n))
        published.append((n, may_shed))
        if look:
            assert_balanced(bus)
    return published


@given(BURST, st.integers(1, 8))
def test_G7_drop_oldest_keeps_the_newest_and_sheds_only_what_may_be_shed(
    burst: list[tuple[bool, bool]], maxsize: int
) -> None:
    """Against a model: while too many wait, the oldest of those that may be shed goes."""
    bus, got = undelivered(maxsize=maxsize)
    model: list[tuple[int, bool]] = []
    for event in publish(bus, burst):
        model.append(event)
        while len(model) > maxsize and any(shed for _, shed in model):
            model.remove(next(e for e in model if e[1]))
    dropped = len(burst) - len(model)
    assert bus.stats()["s"].dropped_by == ({"overflow": dropped} if dropped else {})
    assert numbers(bus, got) == [n for n, _ in model]


@given(BURST, st.integers(1, 8))
def test_G7_drop_newest_keeps_what_waits(burst: list[tuple[bool, bool]], maxsize: int) -> None:
    """What may not be shed is taken beyond the bound, within the reserve."""
    bus, got = undelivered(maxsize=maxsize, overflow="drop_newest")
    model: list[int] = []
    for n, may_shed in publish(bus, burst):
        if len(model) < maxsize or not may_shed:
            model.append(n)
    assert bus.stats()["s"].dropped == len(burst) - len(model)
    assert numbers(bus, got) == model


@given(BURST, st.integers(2, 8))
def test_G7_latest_delivers_the_newest_of_each_hook(burst: list[tuple[bool, bool]], maxsize: int) -> None:
    """Coalesced per hook, in the order in which the newest were published."""
    bus, got = undelivered(maxsize=maxsize, overflow="latest")
    published = publish(bus, burst)
    newest = {may_shed: n for n, may_shed in published}
    assert numbers(bus, got) == sorted(newest.values())
    stats = bus.stats()["s"]
    assert stats.dropped_by.get("coalesced", 0) == len(burst) - len(newest)


@given(st.lists(st.booleans(), max_size=12), st.integers(1, 4))
@settings(deadline=None, max_examples=30)
def test_G7_block_gives_up_what_finds_no_room_in_time(burst: list[bool], maxsize: int) -> None:
    """Nobody makes room here, so each event beyond the bound is dropped, whatever it is."""
    bus, got = undelivered(maxsize=maxsize, overflow="block", block_timeout=0.001)
    for n, may_shed in enumerate(burst):
        bus.publish(Tick(n=n) if may_shed else Beat(n=n))
    refused = max(len(burst) - maxsize, 0)
    assert bus.stats()["s"].dropped_by == ({"block_timeout": refused} if refused else {})
    assert numbers(bus, got) == list(range(min(len(burst), maxsize)))


SMALL_RESERVE = 3


class Model:
    """What waits for one subscriber, as the policies are described to people."""

    def __init__(self, overflow: str, maxsize: int) -> None:
        self.overflow, self.maxsize = overflow, maxsize
        self.waiting: list[Any] = []
        self.dropped: Counter[str] = Counter()

    def publish(self, event: Any) -> None:
        if self.overflow == "drop_newest":
            if len(self.waiting) >= self.maxsize + (0 if event.shed else SMALL_RESERVE):
                self.dropped["newest" if event.shed else "reserve"] += 1
                return
        elif self.overflow == "latest":
            self._drop([older for older in self.waiting if older.hook == event.hook], "coalesced")
        self.waiting.append(event)
        if self.overflow != "drop_newest":
            self._bound()

    def _bound(self) -> None:
        excess = max(len(self.waiting) - self.maxsize, 0)
        self._drop([event for event in self.waiting if event.shed][:excess], "overflow")
        self._drop(self.waiting[: max(len(self.waiting) - self.maxsize - SMALL_RESERVE, 0)], "reserve")

    def _drop(self, events: list[Any], reason: str) -> None:
        self.waiting = [event for event in self.waiting if event not in events]
        self.dropped[reason] += len(events)


@given(
    steps=st.lists(st.sampled_from((Tick, Beat, Load, None, None)), max_size=60),
    overflow=st.sampled_from(("drop_oldest", "drop_newest", "latest")),
    maxsize=st.integers(1, 5),
)
@settings(deadline=None)
def test_G7_policies_hold_while_events_are_taken_too(steps: list[Any], overflow: str, maxsize: int) -> None:
    """Any sequence of publishing and reading, one event at a time, against the model of the policy."""

    async def session() -> None:
        bus, model = EventBus(autostart=False), Model(overflow, maxsize)
        async with bus.stream(Tick, Beat, Load, overflow=overflow, maxsize=maxsize) as events:
            taken = 0
            for n, step in enumerate(steps):
                if step is not None:
                    bus.publish(step(n=n))
                    model.publish(step(n=n))
                elif model.waiting:
                    assert (await anext(events)).n == model.waiting.pop(0).n
                    taken += 1
                stats = events.stats
                assert is_balanced(stats)
                assert stats.matched == n + 1 - steps[: n + 1].count(None)
                if overflow != "latest":  # which counts what is superseded when it comes across it
                    assert stats.pending == len(model.waiting) + (taken > stats.delivered)
                    assert stats.dropped_by == +model.dropped

    with mock.patch("eventbus.cursor.RESERVE", SMALL_RESERVE):
        anyio.run(session)


def test_G7_latest_holds_no_more_than_it_will_deliver() -> None:
    """A stuck uploader keeps one checkpoint event waiting, not a thousand."""
    bus, _ = undelivered(overflow="latest")
    for n in range(5000):
        bus.publish(Tick(n=n))
    assert bus.stats()["s"].pending <= 32
    bus.close()


def test_G7_nothing_is_dropped_below_the_bound() -> None:
    bus, got = undelivered(maxsize=100)
    for n in range(100):
        bus.publish(Tick(n=n))
    assert bus.stats()["s"].dropped == 0
    assert numbers(bus, got) == list(range(100))


def test_G7_bytes_are_bounded_too() -> None:
    """One event that holds much counts for much."""
    bus, got = undelivered(max_bytes=1_000_000)
    for n in range(50):
        bus.publish(Load(n=n, value="x" * 100_000))
    stats = bus.stats()["s"]
    assert 5 <= stats.pending <= 10
    assert stats.dropped_by == {"overflow": 50 - stats.pending}
    assert numbers(bus, got) == list(range(50 - stats.pending, 50))


def test_G7_beyond_the_reserve_the_oldest_goes_with_an_error(caplog: pytest.LogCaptureFixture) -> None:
    """Checkpoints and epoch ends have 4,096 places more; then the loss is said aloud."""
    caplog.set_level(logging.ERROR)
    bus, got = undelivered(maxsize=10)
    count = 10 + RESERVE + 7
    for n in range(count):
        bus.publish(Beat(n=n))
    assert bus.stats()["s"].dropped_by == {"reserve": 7}
    assert numbers(bus, got) == list(range(7, count))
    assert any("'s'" in record.getMessage() and "7 reserve" in record.getMessage() for record in caplog.records)


def test_G7_drops_are_announced_to_the_others_and_not_to_the_one_concerned(caplog: pytest.LogCaptureFixture) -> None:
    """Once per interval, with a count."""
    caplog.set_level(logging.WARNING)
    bus, _ = undelivered(maxsize=1)
    told: list[EventsDropped] = []
    told_itself: list[Event] = []

    async def listen(event: EventsDropped) -> None:
        told.append(event)

    async def concerned(event: Event) -> None:
        told_itself.append(event)

    bus.subscribe(listen, "on_events_dropped")
    bus.subscribe(concerned, "on_events_dropped", Tick, maxsize=1, name="concerned")
    for n in range(5):
        bus.publish(Tick(n=n))
    with bus:
        until(lambda: {event.subscriber for event in told} == {"s", "concerned"})
    assert {event.count for event in told} == {4}
    assert "4 overflow" in told[0].reason
    assert not any(getattr(event, "subscriber", "") == "concerned" for event in told_itself)
    assert len([r for r in caplog.records if "too slow" in r.getMessage()]) == 2


def test_G7_drops_are_announced_again_after_the_interval_with_those_since(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first loss at once, and what follows once per interval, together."""
    caplog.set_level(logging.WARNING)
    clock = [0.0]
    monkeypatch.setattr("eventbus.notices.monotonic", lambda: clock[0])
    bus = EventBus(autostart=False)
    told: list[int] = []
    bus.subscribe(lambda event: told.append(event.count), EventsDropped)

    async def handler(event: Event) -> None: ...

    bus.subscribe(handler, Tick, maxsize=1, name="s")
    for now, count in ((0.0, 4), (30.0, 10), (59.0, 10), (61.0, 5), (62.0, 7)):
        clock[0] = now
        for n in range(count):
            bus.publish(Tick(n=n))
        bus.stats()
        bus._failures.tell_losses()  # as the pump does, some times a second
    assert told == [3, 25]
    records = [record.getMessage() for record in caplog.records if "too slow" in record.getMessage()]
    assert "3 of its events were dropped (3 overflow), 3 so far" in records[0]
    assert "25 of its events were dropped (25 overflow), 28 so far" in records[1]
    assert len(records) == 2
    bus.close()


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    opened = threading.Event()
    yield opened
    opened.set()


def stuck(gate: threading.Event, *, holds_the_loop: bool) -> Callable[[Event], Any]:
    async def holding(event: Event) -> None:
        gate.wait()

    def blocking(event: Event) -> None:
        gate.wait()

    return holding if holds_the_loop else blocking


@pytest.mark.parametrize("holds_the_loop", [True, False])
def test_G7_one_blocked_subscriber_changes_nothing_for_the_bounds_of_another(
    gate: threading.Event, holds_the_loop: bool
) -> None:
    """Also when it holds the loop that feeds both."""
    bus = EventBus()
    options: dict[str, Any] = {} if holds_the_loop else {"run_in": "thread"}
    bus.subscribe(stuck(gate, holds_the_loop=holds_the_loop), Tick, name="stuck", **options)

    async def other(event: Event) -> None: ...

    bus.subscribe(other, Tick, name="other")
    for n in range(45_000):
        bus.publish(Tick(n=n))
    stats = assert_balanced(bus)
    assert stats["stuck"].pending <= 1024 + 1
    assert stats["other"].matched == 45_000
    gate.set()
    bus.close()


DEAD_SINK = """
import resource, sys, threading
import anyio
from eventbus import Event, EventBus

class Tick(Event, shed=True):
    n: int = 0

class Dead:
    hooks = ()
    options = {}
    async def open(self): ...
    async def write(self, events): await anyio.sleep(3600)
    async def aclose(self): ...

async def holding(event): gate.wait()
async def quick(event): ...
def blocking(event): gate.wait()

def publish(events):
    for n in range(events):
        bus.publish(Tick(n=n))

def grown(events, threads):
    publish(30_000)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    publishers = [threading.Thread(target=publish, args=(events // threads,)) for _ in range(threads)]
    for publisher in publishers:
        publisher.start()
    for publisher in publishers:
        publisher.join()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024

gate = threading.Event()
bus = EventBus(exit_timeout=0.1)
kind = sys.argv[1]
if kind == "sink":
    subscriber = bus.attach(Dead())
elif kind == "thread":
    subscriber = bus.subscribe(blocking, run_in="thread")
else:
    subscriber = bus.subscribe(holding if kind == "held loop" else quick)
grown_mib = grown(int(sys.argv[2]), int(sys.argv[3]))
counts = subscriber.stats
assert counts.matched == counts.delivered + counts.dropped + counts.pending == int(sys.argv[2]) + 30_000, counts
assert grown_mib < 24, grown_mib
gate.set()
bus.close(0.2)
"""


@pytest.mark.parametrize(
    ("kind", "events", "threads"),
    [("sink", 1_000_000, 1), ("thread", 200_000, 1), ("held loop", 400_000, 1), ("held loop", 200_000, 8),
     ("flooded", 300_000, 8)],
)  # fmt: skip
def test_G7_memory_does_not_grow_with_events(kind: str, events: int, threads: int) -> None:
    """A million into a sink that never answers, 400,000 beside a held loop, a flood from eight threads."""
    run_program(DEAD_SINK, kind, str(events), str(threads))
