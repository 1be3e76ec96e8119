"""G6: the counts of every subscriber balance at any instant."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from random import Random
from typing import TYPE_CHECKING, Any

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eventbus import Event, EventBus, Subscription
from tests.eventbus.processes import run_program
from tests.eventbus.samples import Beat, Load, Tick, assert_balanced, is_balanced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


class Flaky:
    """A sink some of whose batches fail."""

    hooks = ("on_tick", "on_beat")
    options: dict[str, Any] = {}
    max_batch = 8

    def __init__(self) -> None:
        self._calls = 0

    async def open(self) -> None: ...

    async def write(self, events: Sequence[Event]) -> None:
        self._calls += 1
        if self._calls % 3 == 0:
            raise OSError

    async def aclose(self) -> None: ...


def add_one_of_each(bus: EventBus) -> list[Any]:
    """Subscribers of every kind, policy and outcome, each named after what it does."""

    async def deliver(event: Tick) -> None: ...

    async def fail(event: Tick) -> None:
        if event.n % 3 == 0:
            raise ValueError

    async def overrun(event: Tick) -> None:
        await anyio.sleep(30 if event.n == 7 else 0)

    def work(event: Tick) -> None: ...

    def work_badly(event: Tick) -> None:
        if event.n % 5 == 0:
            raise ValueError

    def slow(overflow: str) -> Subscription:
        return bus.subscribe(lambda _: None, Tick, Beat, name=overflow, run_in="thread", overflow=overflow, maxsize=3)

    return [
        bus.subscribe(deliver, Tick, Beat, name="deliver"),
        bus.subscribe(fail, Tick, Beat, name="fail"),
        bus.subscribe(overrun, Tick, Beat, name="time out", timeout=0.05),
        bus.subscribe(work, Tick, Beat, name="thread", run_in="thread"),
        bus.subscribe(work_badly, Tick, Beat, name="inline"),
        bus.attach(Flaky(), name="sink"),
        *map(slow, ("drop_oldest", "drop_newest", "latest")),
    ]


@pytest.fixture
def eager_switching() -> Iterator[None]:
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("eager_switching")
def test_G6_the_counts_balance_at_any_instant_under_eight_publishing_threads() -> None:
    """Whenever and from wherever they are read, and at the end to the last event."""
    events, unbalanced, over = 2000, [], threading.Event()

    def publish(thread: int) -> None:
        for n in range(events):
            bus.publish((Tick if n % 10 else Beat)(n=n, thread=thread))

    def read() -> None:
        while not over.is_set():
            unbalanced.extend((name, counts) for name, counts in bus.stats().items() if not is_balanced(counts))

    def read_as_it_is() -> None:
        while not over.is_set():
            counts = [(subscription.name, subscription.read()) for subscription in subscriptions]
            unbalanced.extend(each for each in counts if not is_balanced(each[1]))

    with EventBus() as bus:
        subscriptions = add_one_of_each(bus)
        publishers = [threading.Thread(target=publish, args=(thread,)) for thread in range(8)]
        readers = [threading.Thread(target=read), threading.Thread(target=read_as_it_is)]
        for thread in (*readers, *publishers):
            thread.start()
        for thread in publishers:
            thread.join()
        over.set()
        for thread in readers:
            thread.join()
        assert bus.flush(30)
        stats = assert_balanced(bus)
    assert unbalanced == []
    for name, counts in stats.items():
        assert (counts.matched, counts.pending) == (8 * events, 0), name
    assert (stats["thread"].delivered + stats["thread"].dropped) == 8 * events


@pytest.mark.parametrize("started", [False, True])
def test_G6_stats_take_over_all_that_was_published_before(started: bool) -> None:
    """Whoever published sees their event counted, whether the bus runs or not."""
    release = threading.Event()

    async def hold(event: Tick) -> None:
        release.wait()

    bus = EventBus(autostart=started)
    subscriber = bus.subscribe(hold, Tick)
    for n in range(1, 100):
        bus.publish(Tick(n=n))
        assert subscriber.stats.matched == subscriber.stats.pending == n
    release.set()
    report = bus.close()
    assert report.ok == started
    assert sum(report.left.values()) == (0 if started else 99)
    assert_balanced(bus)
    assert subscriber.stats.pending == 0


@pytest.mark.anyio
async def test_G6_pending_includes_the_event_that_is_being_handled() -> None:
    """It is pending until it is settled."""
    begun, release = anyio.Event(), anyio.Event()

    async def handle(event: Tick) -> None:
        begun.set()
        await release.wait()

    async with EventBus() as bus:
        subscriber = bus.subscribe(handle, Tick)
        for n in range(3):
            bus.publish(Tick(n=n))
        await begun.wait()
        assert (subscriber.stats.pending, subscriber.stats.calls) == (3, 0)
        assert subscriber.stats.lag_s > 0
        release.set()
        assert await bus.aflush()
        assert (subscriber.stats.pending, subscriber.stats.calls, subscriber.stats.lag_s) == (0, 3, 0)


def test_G6_several_threads_may_flush_at_once() -> None:
    """Each returns when all that was published before it is settled; none is forgotten."""
    outcomes: list[bool] = []

    def publish_and_flush(seed: int) -> None:
        random = Random(seed)
        for n in range(150):
            bus.publish(Tick(n=n))
            if random.random() < 0.5:
                outcomes.append(bus.flush())

    async def on_loop(event: Tick) -> None: ...

    with EventBus() as bus:
        bus.subscribe(on_loop, Tick)
        for number in range(3):
            bus.subscribe(lambda _: None, Tick, name=f"thread {number}", run_in="thread")
        threads = [threading.Thread(target=publish_and_flush, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert all(outcomes)


@pytest.mark.usefixtures("eager_switching")
@pytest.mark.parametrize(("overflow", "turns"), [("drop_oldest", 1), ("drop_newest", 1), ("latest", 4)])
def test_G6_a_close_that_gives_up_counts_each_event_once(overflow: str, turns: int) -> None:
    """While the loop is held, who closes drops what waits, and others publish and read the counts at the same time."""
    for _ in range(turns):
        release, held, over = threading.Event(), threading.Event(), threading.Event()
        bus = EventBus()

        async def hold(event: Event, held: threading.Event = held, release: threading.Event = release) -> None:
            held.set()
            release.wait(10)

        def publish(bus: EventBus = bus, over: threading.Event = over) -> None:
            n = 0
            while not over.is_set():
                bus.publish((Tick, Beat, Load)[n % 3](n=n))
                n += 1

        def read(bus: EventBus = bus, over: threading.Event = over) -> None:
            while not over.is_set():
                bus.stats()

        subscriber = bus.subscribe(hold, overflow=overflow)
        threads = [threading.Thread(target=target) for target in (publish, publish, read)]
        for thread in threads:
            thread.start()
        assert held.wait(10)
        report = bus.close(0.001)
        over.set()
        for thread in threads:
            thread.join()
        release.set()
        assert not report.ok
        with bus:  # delivers what was published while the bus closed
            assert bus.flush()
            stats = subscriber.stats
        assert is_balanced(stats)
        assert stats.pending == 0


def _expected(events: Sequence[tuple[str, int]], *, every: int, parity: int | None, once: bool) -> list[int]:
    """Which places of `events` (hook and value) the conditions let through."""
    seen: Counter[str] = Counter()
    admitted = []
    for place, (hook, value) in enumerate(events):
        if parity is not None and value % 2 != parity:
            continue
        seen[hook] += 1
        if seen[hook] % every == 0:
            admitted.append(place)
    return admitted[:1] if once else admitted


@given(
    events=st.lists(st.tuples(st.sampled_from(("tick", "beat")), st.integers(0, 9)), max_size=40),
    every=st.integers(1, 4),
    parity=st.none() | st.integers(0, 1),
    once=st.booleans(),
    kind=st.sampled_from(("inline", "async", "thread")),
)
@settings(max_examples=60, deadline=None)
def test_G6_only_what_every_when_and_once_admit_is_matched(
    events: list[tuple[str, int]], every: int, parity: int | None, once: bool, kind: str
) -> None:
    """`every` counts per hook, after `when`; `once` ends with the first; the rest is no drop, but no match."""
    places: list[int] = []

    def take(event: Any) -> None:
        places.append(event.thread)

    async def take_later(event: Any) -> None:
        places.append(event.thread)

    when: Callable[[Any], bool] | None = None if parity is None else lambda event: event.n % 2 == parity
    options: dict[str, Any] = {"run_in": "thread"} if kind == "thread" else {}
    expected = _expected(events, every=every, parity=parity, once=once)
    with EventBus() as bus:
        handler = take_later if kind == "async" else take
        subscriber = bus.subscribe(handler, Tick, Beat, every=every, when=when, once=once, **options)
        for place, (hook, value) in enumerate(events):
            bus.publish((Tick if hook == "tick" else Beat)(n=value, thread=place))
        assert bus.flush()
        stats = subscriber.stats
    assert places == expected
    assert (stats.matched, stats.delivered, stats.dropped) == (len(expected), len(expected), 0)


def test_G6_every_counts_once_for_each_event_with_eight_threads() -> None:
    """An inline hook with `every` is called for exactly every nth event, whoever publishes."""
    bus = EventBus()
    calls: list[int] = []
    bus.subscribe(lambda event: calls.append(event.n), Tick, every=7)
    threads = [threading.Thread(target=_publish_ticks, args=(bus, 700)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 8 * 700 // 7


def _publish_ticks(bus: EventBus, count: int) -> None:
    for n in range(count):
        bus.publish(Tick(n=n))


def test_G6_every_s_admits_one_event_per_interval() -> None:
    """The time is that of the events, per hook."""
    bus = EventBus()
    taken: list[int] = []
    bus.subscribe(lambda event: taken.append(event.n), Tick, Beat, every_s=10.0)
    for second in range(25):
        bus.publish(Tick(n=second, time=1000.0 + second))
    bus.publish(Beat(n=100, time=1001.0))
    assert taken == [0, 10, 20, 100]


def test_G6_a_ctrl_c_in_a_predicate_neither_loses_nor_repeats_an_event() -> None:
    """A read of the counts that is interrupted takes the events over at the next read, each judged once."""
    struck: list[int] = []

    def judge(event: Tick) -> bool:
        if event.n in (5, 11) and event.n not in struck:
            struck.append(event.n)
            raise KeyboardInterrupt
        return True

    async def handle(event: Tick) -> None: ...

    bus = EventBus(autostart=False)
    bus.subscribe(handle, Tick, name="all")
    bus.subscribe(handle_copy := _another(), Tick, name="third", every=3, when=judge)
    bus.subscribe(_another(), Tick, name="once", once=True, when=lambda event: event.n == 4)
    for n in range(20):
        bus.publish(Tick(n=n))
    once = next(info for info in bus.describe() if info.name == "once")
    for _ in struck or (5, 11):
        with pytest.raises(KeyboardInterrupt):
            bus.stats()
    stats = assert_balanced(bus)
    assert (stats["all"].matched, stats["third"].matched) == (20, 6)
    assert once.name not in stats  # it has had its event
    assert handle_copy is not handle


def _another() -> Callable[[Event], Any]:
    async def handle(event: Event) -> None: ...

    return handle


def test_G6_the_report_shows_the_counts() -> None:
    """A table with a line for each subscriber, for people."""
    bus = EventBus(autostart=False)
    bus.subscribe(_another(), Tick, name="late", maxsize=3)
    for n in range(5):
        bus.publish(Tick(n=n))
    head, line = bus.report().splitlines()
    assert head.split()[:7] == ["subscriber", "kind", "state", "matched", "delivered", "failed", "timed"]
    assert line.split()[:8] == ["late", "async", "ok", "5", "0", "0", "0", "2"]
    assert "2 overflow" in line


def test_G6_an_event_that_cannot_be_stamped_stops_nobody() -> None:
    """What fails on the bus side before any subscriber is asked is logged, and the events behind it are delivered."""

    class Hostile(dict[str, Any]):
        def items(self) -> Any:
            raise RuntimeError

    received: list[int] = []

    async def handle(event: Load) -> None:
        received.append(event.n)

    with EventBus() as bus:
        bus.subscribe(handle, Load)
        for n in range(4):
            bus.publish(Load(n=n, value=Hostile() if n == 1 else n))
        assert bus.flush()
        assert_balanced(bus)
    assert [n for n in received if n != 1] == [0, 2, 3]


CTRL_C = """
    import os, signal, sys, threading, time, warnings
    from random import Random
    from eventbus import Event, EventBus

    warnings.simplefilter("ignore", ResourceWarning)  # an import that is struck leaves its file open
    kind, hits_wanted = sys.argv[1], int(sys.argv[2])

    class Step(Event):
        n: int = 0

    armed = False
    hits = 0

    def strike(number, frame):
        global armed, hits
        if armed and frame.f_code.co_name != "_remove":  # a weakref's callback, in which Python loses it
            armed = False
            hits += 1
            raise KeyboardInterrupt

    def storm(pid):
        random = Random(7)
        while os.getppid() == pid:
            os.kill(pid, signal.SIGINT)
            time.sleep(random.random() / 2000)
        os._exit(0)

    me = os.getpid()
    signal.signal(signal.SIGINT, strike)
    storming = os.fork()  # another process, which needs no turn of this one's interpreter
    if not storming:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        storm(me)

    def publish(bus, n):
        global armed
        try:
            armed = True
            bus.publish(Step(n=n))
            armed = False
            return True
        except KeyboardInterrupt:
            return False

    received, held, release = [], threading.Event(), threading.Event()

    async def on_loop(event):
        received.append(event.n)

    async def hold(event):
        held.set()
        release.wait()

    def in_place(event):
        received.append(event.n)

    bus = EventBus()
    if kind == "inline":
        bus.subscribe(in_place, Step, name="one")
    elif kind in ("thread", "held, thread"):
        bus.subscribe(in_place, Step, name="one", run_in="thread", maxsize=10**7, max_bytes=2**40)
    else:
        bus.subscribe(on_loop, Step, name="one", maxsize=10**7, max_bytes=2**40)
    if kind.startswith("held"):  # the publishing thread itself hands the events on
        class Held(Event): pass
        bus.subscribe(hold, Held, name="hold")
        bus.publish(Held())
        held.wait()
        for n in range(21_000):
            bus.publish(Step(n=-1))
    returned, n = [], 0
    while hits < hits_wanted:
        if publish(bus, n):
            returned.append(n)
        n += 1
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.kill(storming, signal.SIGKILL)
    release.set()
    assert bus.flush(30), "stalled"
    stats = bus.stats()["one"]
    received = [n for n in received if n >= 0]
    assert stats.matched == stats.delivered + stats.failed + stats.dropped, stats
    assert stats.pending == 0, stats
    assert received == sorted(set(received)), "order"
    assert set(returned) <= set(received), f"{len(set(returned) - set(received))} lost"
    assert len(received) - len(returned) <= hits, "from nowhere"
    assert "interrupted by Ctrl-C" in bus.report()
    assert bus.close().ok
"""


@pytest.mark.parametrize("kind", ["async", "thread", "inline", "held", "held, thread"])
def test_G6_the_counts_are_exact_across_a_thousand_ctrl_c(kind: str) -> None:
    """Struck anywhere inside publish: what was published is delivered in order, the counts balance, nothing stalls."""
    run_program(CTRL_C, kind, "1000")


def test_G6_a_ctrl_c_at_the_first_publish_does_not_end_the_bus() -> None:
    """Struck while the bus starts its loop: the next publish starts it."""
    program = """
        import os, signal, threading, time, warnings
        from random import Random
        from eventbus import Event, EventBus

        warnings.simplefilter("ignore", ResourceWarning)  # an import that is struck leaves its file open
        class Step(Event):
            n: int = 0

        armed, over, hits = False, False, 0

        def strike(number, frame):
            global armed, hits
            if armed and frame.f_code.co_name != "_remove":
                armed = False
                hits += 1
                raise KeyboardInterrupt

        signal.signal(signal.SIGINT, strike)

        def storm():
            random = Random(7)
            while not over:
                if armed:
                    time.sleep(random.random() / 1000)
                    os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=storm, daemon=True).start()
        for turn in range(60):
            received = []
            async def handle(event):
                received.append(event.n)
            bus = EventBus()
            bus.subscribe(handle, Step)
            try:
                armed = True
                bus.publish(Step(n=0))
                armed = False
            except KeyboardInterrupt:
                pass
            armed = False
            bus.publish(Step(n=1))
            assert bus.flush(30), "stalled"
            assert received[-1] == 1, received
            assert bus.close().ok
        over = True
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        assert hits
    """
    run_program(program)
