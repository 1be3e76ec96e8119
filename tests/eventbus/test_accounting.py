"""G6: at any instant ``matched == delivered + failed + timed_out + dropped + pending``, for every subscriber."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eventbus import Event, EventBus
from tests.eventbus.processes import run_program
from tests.eventbus.samples import Beat, Tick, assert_balanced, is_balanced
from tests.eventbus.waiting import until

OUTCOMES = st.lists(st.sampled_from(["ok", "raise", "time out"]), max_size=12)


@given(OUTCOMES)
@settings(max_examples=20, deadline=None)
def test_G6_each_outcome_is_counted_as_what_it_was(outcomes: list[str]) -> None:
    """Delivered, failed and timed out, for a coroutine that does each in turn."""
    import asyncio

    bus = EventBus()

    async def handler(event: Tick) -> None:
        if outcomes[event.n] == "raise":
            raise ValueError
        if outcomes[event.n] == "time out":
            await asyncio.sleep(60)

    bus.subscribe(handler, Tick, timeout=0.005, name="s")
    for n in range(len(outcomes)):
        bus.publish(Tick(n=n))
    assert bus.flush()
    stats = assert_balanced(bus)["s"]
    assert stats.matched == len(outcomes)
    assert stats.pending == stats.dropped == 0
    assert stats.delivered <= outcomes.count("ok")  # a machine that stalls may let one of these time out too
    assert stats.failed <= outcomes.count("raise")
    assert stats.timed_out >= outcomes.count("time out")
    bus.close()


def test_G6_pending_includes_the_running_delivery_and_stats_take_over_what_was_published_before() -> None:
    bus = EventBus()
    begun, gate = threading.Event(), threading.Event()

    @bus.on(Tick, run_in="thread", name="s")
    def handler(event: Tick) -> None:
        begun.set()
        gate.wait(10)

    bus.publish(Tick())
    assert begun.wait(5)
    for n in range(9):
        bus.publish(Tick(n=n))
        assert bus.stats()["s"].matched == n + 2
    assert bus.stats()["s"].pending == 10
    gate.set()
    assert bus.flush()
    assert bus.stats()["s"].delivered == 10
    bus.close()


@pytest.fixture
def fast_switching() -> Iterator[None]:
    """Let threads change places as often as possible."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("fast_switching")
def test_G6_eight_threads_publish_while_others_read_and_every_look_balances() -> None:
    """Exact at every instant, for every kind of subscriber and policy, and complete at the end."""
    bus = EventBus()
    threads, events = 8, 400
    unbalanced: list[Any] = []
    done = threading.Event()

    async def coroutine(event: Event) -> None: ...

    async def failing(event: Event) -> None:
        raise ValueError

    bus.subscribe(coroutine, Tick, Beat, name="async", maxsize=100_000)
    bus.subscribe(failing, Tick, Beat, name="failing", maxsize=100_000)
    bus.subscribe(lambda event: None, Tick, Beat, name="inline")
    bus.subscribe(lambda event: None, Tick, Beat, name="thread", run_in="thread", maxsize=100_000)
    bus.subscribe(lambda event: None, Tick, Beat, name="small", run_in="thread", maxsize=3)
    bus.subscribe(lambda event: None, Tick, Beat, name="newest", run_in="thread", maxsize=3, overflow="drop_newest")
    bus.subscribe(lambda event: None, Tick, Beat, name="latest", run_in="thread", maxsize=8, overflow="latest")

    def publish(me: int) -> None:
        for n in range(events):
            bus.publish(Tick(n=n, thread=me) if n % 3 else Beat(n=n, thread=me))

    def read() -> None:
        while not done.is_set():
            unbalanced.extend((name, stats) for name, stats in bus.stats().items() if not is_balanced(stats))

    publishers = [threading.Thread(target=publish, args=(me,)) for me in range(threads)]
    readers = [threading.Thread(target=read) for _ in range(2)]
    for thread in publishers + readers:
        thread.start()
    for thread in publishers:
        thread.join()
    assert bus.flush(30)
    done.set()
    for thread in readers:
        thread.join()
    stats = assert_balanced(bus)
    assert unbalanced == []
    for name, counts in stats.items():
        assert counts.matched == threads * events, name
        assert counts.pending == 0, name
    assert stats["async"].delivered == stats["inline"].delivered == stats["thread"].delivered == threads * events
    assert stats["failing"].failed == threads * events
    bus.close()


INTERRUPTED = """
import os, signal, subprocess, sys, threading, time
from eventbus import Event, EventBus

class Tick(Event, shed=True):
    n: int = 0

bus = EventBus()
got, inline_calls = [], [0]
async def collect(event): got.append((event.seq, event.n))
bus.subscribe(collect, Tick, maxsize=10_000_000, max_bytes=1 << 40, name="s")
bus.subscribe(lambda event: None, Tick, name="inline")
sent, returned, hits, armed = 0, [], 0, False

def strike(*_):
    global hits
    hits += 1
    if armed:
        raise KeyboardInterrupt

def burst():
    global sent, armed
    try:
        armed = True
        for _ in range(1000):
            sent += 1
            bus.publish(Tick(n=sent))
            returned.append(sent)
        armed = False
    except KeyboardInterrupt:
        armed = False

signal.signal(signal.SIGINT, strike)
killer = subprocess.Popen([sys.executable, "-c", '''
import os, sys, time
for _ in range(100_000):
    os.kill(int(sys.argv[1]), 2)
    time.sleep(0.001)
''', str(os.getpid())])
while hits < 1000:
    try:
        burst()
    except KeyboardInterrupt:
        armed = False
armed = False
killer.kill()
killer.wait()
assert bus.flush(60), "an interrupted publish stalls the flush"
stats = bus.stats()
for name in ("s", "inline"):
    s = stats[name]
    assert s.matched == s.delivered + s.failed + s.timed_out + s.dropped + s.pending and s.pending == 0, (name, s)
numbers = [n for _, n in got]
assert [seq for seq, _ in got] == sorted({seq for seq, _ in got}), "in order, nothing twice"
assert numbers == sorted(set(numbers))
assert set(returned) <= set(numbers), "what returned is delivered"
assert stats["s"].delivered == len(got)
assert bus.close(10).ok
print(hits)
"""


def test_G6_ctrl_c_a_thousand_times_in_the_middle_of_publishing() -> None:
    """Each strike leaves the event logged whole or not at all, the counts exact, and nothing stalled."""
    hits = int(run_program(INTERRUPTED))
    assert hits >= 1000


def test_G6_a_hook_interrupted_by_ctrl_c_is_counted_and_the_interrupt_goes_through() -> None:
    bus = EventBus()

    def interrupted(event: Event) -> None:
        raise KeyboardInterrupt

    bus.subscribe(interrupted, Tick, name="hook")
    with pytest.raises(KeyboardInterrupt):
        bus.publish(Tick())
    assert bus.stats()["hook"].failed == 1
    assert_balanced(bus)
    assert "1 publishes were interrupted" in bus.report()


def test_G6_times_are_measured_and_the_lag_of_what_waits_is_told() -> None:
    bus = EventBus(autostart=False)

    async def handler(event: Event) -> None: ...

    bus.subscribe(handler, Tick, name="s")
    bus.publish(Tick())
    until(lambda: bus.stats()["s"].lag_s > 0.01)
    with bus:
        bus.flush()
        stats = bus.stats()["s"]
    assert stats.calls == 1
    assert 0 < stats.total_s == stats.mean_s == stats.max_s == stats.p99_s
    assert stats.lag_s == 0.0
