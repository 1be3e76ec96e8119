"""G1 and G3: the order in which hooks run, and in which queued subscribers receive."""

from __future__ import annotations

import threading
from random import Random
from typing import TYPE_CHECKING, Any

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eventbus import Event, EventBus
from tests.eventbus.processes import run_program
from tests.eventbus.samples import Beat, Tick, assert_balanced
from tests.eventbus.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


@given(priorities=st.lists(st.integers(-2, 2), min_size=1, max_size=12))
@settings(max_examples=50, deadline=None)
def test_G1_hooks_run_by_priority_and_then_in_the_order_of_registration(priorities: list[int]) -> None:
    """A higher priority runs first, equal ones as they were registered, however they name the hook."""
    bus = EventBus()
    ran: list[int] = []
    for number, priority in enumerate(priorities):
        hook = (Tick, "on_tick", "on_ti*", Event, "*")[number % 5]
        bus.subscribe(lambda _, number=number: ran.append(number), hook, priority=priority, name=f"hook {number}")
    bus.publish(Tick())
    assert ran == sorted(range(len(priorities)), key=lambda number: (-priorities[number], number))


def test_G1_hooks_have_one_order_whatever_the_hash_seed() -> None:
    """The order does not depend on how this process hashes names."""
    program = """
        from eventbus import Event, EventBus
        class Step(Event): pass
        bus = EventBus()
        for number in range(20):
            bus.subscribe(lambda _, n=number: print(n, end=" "), Step, priority=number % 3, name=f"hook {number}")
        bus.publish(Step())
    """
    assert run_program(program, PYTHONHASHSEED="1") == run_program(program, PYTHONHASHSEED="2")


def test_G1_hooks_run_on_the_publishing_thread_before_publish_returns() -> None:
    """An inline hook runs in the thread that publishes, and is over when publish is."""
    bus = EventBus()
    threads: list[int] = []
    bus.subscribe(lambda _: threads.append(threading.get_ident()), Tick)
    found: list[tuple[int, list[int]]] = []

    def publish() -> None:
        bus.publish(Tick())
        found.append((threading.get_ident(), threads.copy()))

    publisher = threading.Thread(target=publish)
    publisher.start()
    publisher.join()
    publish()
    (other, first), (here, both) = found
    assert other != here
    assert (first, both) == ([other], [other, here])


def test_G1_hooks_run_after_the_event_was_logged() -> None:
    """What a hook finds in the counts of a queued subscriber includes the event it is called for."""
    bus = EventBus(autostart=False)

    async def later(event: Tick) -> None: ...

    queued = bus.subscribe(later, Tick)
    counts: list[int] = []
    bus.subscribe(lambda _: counts.append(queued.stats.pending), Tick)
    for _ in range(3):
        bus.publish(Tick())
    assert counts == [1, 2, 3]


def test_G1_a_nested_publish_completes_first() -> None:
    """All hooks of an event published by a hook have run when that hook goes on; in the log it comes later."""
    bus = EventBus()
    ran: list[str] = []

    @bus.on(Tick, priority=1)
    def outer(event: Tick) -> None:
        ran.append("outer begins")
        bus.publish(Beat(n=event.n))
        ran.append("outer ends")

    bus.subscribe(lambda _: ran.append("inner"), Beat, name="inner")
    bus.subscribe(lambda _: ran.append("inner too"), Beat, name="inner too")
    bus.subscribe(lambda _: ran.append("after"), Tick, name="after")
    received: list[tuple[str, int]] = []

    @bus.on(Tick, Beat)
    async def queued(event: Tick | Beat) -> None:
        received.append((event.hook, event.seq))

    with bus:
        bus.publish(Tick())
        assert bus.flush()
    assert ran == ["outer begins", "inner", "inner too", "outer ends", "after"]
    assert [hook for hook, _ in received] == ["on_tick", "on_beat"]
    assert received[0][1] < received[1][1]


def _register(bus: EventBus, kind: str, take: Callable[[Any], None], **options: Any) -> None:
    """Subscribe a handler of a kind that gives others the chance to overtake it."""

    async def handle(event: Tick) -> None:
        await anyio.sleep(0.001 if event.n % 7 == 0 else 0)
        take(event)

    if kind == "async":
        bus.subscribe(handle, Tick, Beat, name=kind, **options)
    elif kind == "thread":
        bus.subscribe(take, Tick, Beat, name=kind, run_in="thread", **options)
    else:
        bus.attach(Written(take), name=kind, **options)


class Written:
    """A sink that hands on what it writes."""

    hooks = ("on_tick", "on_beat")
    options: dict[str, Any] = {}
    max_batch = 16

    def __init__(self, take: Callable[[Any], None]) -> None:
        self._take = take

    async def open(self) -> None: ...

    async def write(self, events: Sequence[Event]) -> None:
        await anyio.sleep(0)
        for event in events:
            self._take(event)

    async def aclose(self) -> None: ...


class Received:
    """What one subscriber got, and whether a call ever began before the one before it had ended."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.overlapped = False
        self._busy = False

    def take(self, event: Any) -> None:
        self.overlapped |= self._busy
        self._busy = True
        self.events.append(event)
        self._busy = False

    def assert_in_order(self) -> None:
        numbers = [event.seq for event in self.events]
        assert numbers == sorted(set(numbers))
        assert not self.overlapped
        for thread in {event.thread for event in self.events}:
            own = [event.n for event in self.events if event.thread == thread]
            assert own == sorted(own)


def _publish_from_threads(bus: EventBus, threads: int, events: int, seed: int = 0) -> None:
    def publish(thread: int) -> None:
        random = Random(seed + thread)
        start.wait()
        for n in range(events):
            bus.publish(random.choice((Tick, Beat))(n=n, thread=thread))

    start = threading.Barrier(threads)
    publishers = [threading.Thread(target=publish, args=(thread,)) for thread in range(threads)]
    for publisher in publishers:
        publisher.start()
    for publisher in publishers:
        publisher.join()


@given(
    threads=st.integers(1, 6),
    events=st.integers(1, 60),
    kinds=st.lists(st.sampled_from(("async", "thread", "sink")), min_size=1, unique=True),
    maxsize=st.sampled_from((1, 5, 1024)),
    seed=st.integers(0, 1000),
)
@settings(max_examples=25, deadline=None)
def test_G3_each_subscriber_receives_in_the_order_of_seq(
    threads: int, events: int, kinds: list[str], maxsize: int, seed: int
) -> None:
    """Under several publishing threads every subscriber gets its events in order, one at a time, none twice."""
    received = {kind: Received() for kind in kinds}
    with EventBus() as bus:
        for kind, one in received.items():
            _register(bus, kind, one.take, maxsize=maxsize)
        _publish_from_threads(bus, threads, events, seed)
        assert bus.flush()
        stats = assert_balanced(bus)
    for kind, one in received.items():
        one.assert_in_order()
        assert len(one.events) == stats[kind].delivered
        assert stats[kind].matched == threads * events
        if maxsize == 1024:
            assert len(one.events) == threads * events


@pytest.mark.anyio
async def test_G3_a_slow_event_is_not_overtaken() -> None:
    """While a handler waits for something, its subscriber's next event waits too, and others' do not."""
    release, order = anyio.Event(), []
    others: list[int] = []

    async def slow(event: Tick) -> None:
        order.append(("begins", event.n))
        if event.n == 0:
            await release.wait()
        order.append(("ends", event.n))

    async def quick(event: Tick) -> None:
        others.append(event.n)
        if event.n == 2:
            release.set()

    async with EventBus() as bus:
        bus.subscribe(slow, Tick)
        bus.subscribe(quick, Tick)
        for n in range(3):
            bus.publish(Tick(n=n))
        assert await bus.aflush()
    assert others == [0, 1, 2]
    assert order == [(when, n) for n in range(3) for when in ("begins", "ends")]


@pytest.mark.parametrize("kind", ["async", "thread"])
def test_G3_an_event_that_is_tried_again_is_not_overtaken(kind: str) -> None:
    """A retry comes before the next event."""
    bus = EventBus()
    calls: list[int] = []

    def fail_once(event: Tick) -> None:
        calls.append(event.n)
        if event.n == 1 and calls.count(1) == 1:
            raise ConnectionError

    async def fail_once_later(event: Tick) -> None:
        fail_once(event)

    subscriber = (
        bus.subscribe(fail_once, Tick, run_in="thread", retries=1)
        if kind == "thread"
        else bus.subscribe(fail_once_later, Tick, retries=1)
    )
    with bus:
        for n in range(4):
            bus.publish(Tick(n=n))
        assert bus.flush()
        assert calls == [0, 1, 1, 2, 3]
        assert (subscriber.stats.retried, subscriber.stats.delivered) == (1, 4)


def test_G3_an_abandoned_call_does_not_put_later_ones_out_of_order() -> None:
    """After a call that hung, the subscriber goes on with the next event and not with any other."""
    release = threading.Event()
    begun: list[int] = []

    def hang(event: Tick) -> None:
        begun.append(event.n)
        if event.n == 1:
            release.wait()

    with EventBus() as bus:
        bus.subscribe(hang, Tick, run_in="thread", timeout=0.05)
        for n in range(5):
            bus.publish(Tick(n=n))
        until(lambda: len(begun) == 5)
        release.set()
    assert begun == [0, 1, 2, 3, 4]
