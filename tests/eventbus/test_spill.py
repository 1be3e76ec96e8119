"""G7, overflow="spill": lossless and in order, with the backlog in the journal instead of memory."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from time import perf_counter
from typing import Any

import anyio
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eventbus import EventBus, Log
from eventbus.codec import pack
from eventbus.entry import Entry
from eventbus.journal import Journal
from eventbus.options import Options
from eventbus.spill import SpillCursor
from tests.eventbus.processes import run_program
from tests.eventbus.samples import Beat, Load, Tick, assert_balanced, is_balanced
from tests.eventbus.waiting import until


class Batches:
    """A sink that is slow, and keeps what it gets."""

    hooks = ("on_tick",)
    options: dict[str, Any] = {}
    max_batch = 16

    def __init__(self) -> None:
        self.seen: list[int] = []

    async def open(self) -> None: ...

    async def write(self, events: Sequence[Any]) -> None:
        self.seen += [event.n for event in events]
        if len(self.seen) % 512 == 0:
            await anyio.sleep(0.001)

    async def aclose(self) -> None: ...


def subscribe(bus: EventBus, kind: str, **options: Any) -> list[int]:
    """A slow subscriber with room for 8; returns what it has seen."""
    options = {"overflow": "spill", "maxsize": 8, "name": "slow", **options}
    if kind == "sink":
        sink = Batches()
        bus.attach(sink, **options)
        return sink.seen
    seen: list[int] = []

    async def task(event: Tick) -> None:
        seen.append(event.n)
        if event.n % 512 == 0:
            await anyio.sleep(0.001)

    def thread(event: Tick) -> None:
        seen.append(event.n)
        if event.n % 512 == 0:
            threading.Event().wait(0.001)

    bus.subscribe(task if kind == "async" else thread, Tick, run_in="thread" if kind == "thread" else None, **options)
    return seen


@pytest.mark.parametrize("kind", ["async", "thread", "sink"])
def test_G7_spill_loses_nothing_keeps_order_and_balances_at_any_instant(tmp_path: Path, kind: str) -> None:
    """However small its queue is; accounts are taken from another thread all the time, and flush is exact."""
    count = 10_000
    over = threading.Event()
    wrong: list[Any] = []

    def audit() -> None:
        while not over.is_set():
            stats = bus.stats().get("slow")
            if stats is not None and not is_balanced(stats):
                wrong.append(stats)

    with EventBus(journal=tmp_path) as bus:
        seen = subscribe(bus, kind)
        auditor = threading.Thread(target=audit)
        auditor.start()
        for n in range(count):
            bus.publish(Tick(n=n))
            if n == count // 2:
                assert bus.flush(30)
                assert seen == list(range(n + 1))
        assert bus.flush(30)
        assert seen == list(range(count))
        over.set()
        auditor.join()
        stats = bus.stats()["slow"]
    assert not wrong
    assert (stats.matched, stats.delivered, stats.pending, stats.dropped) == (count, count, 0, 0)


async def test_G7_a_stream_that_spills_loses_nothing(anyio_backend: Any, tmp_path: Path) -> None:
    bus = EventBus(journal=tmp_path)
    async with bus, bus.stream(Tick, overflow="spill", maxsize=8) as ticks:
        for n in range(1000):
            bus.publish(Tick(n=n))
        got = [(await anext(ticks)).n for _ in range(1000)]
    assert got == list(range(1000))


def test_G7_what_spilled_is_delivered_as_it_was_published(tmp_path: Path) -> None:
    """Read-only, with the same numbers and contents as for a subscriber that kept up."""
    kept: list[Load] = []
    spilled: list[Load] = []
    values: list[Any] = [
        {"a": [1, 2, {"b": (3, float("inf"))}]}, [[], {}], (1, "two", None, True), 2**70, "https://u:p@host/x?token=1",
        {"token": "secret", "n": 1}, 1.5, b"bytes", float("-inf"),
    ]  # fmt: skip
    bus = EventBus(journal=tmp_path, autostart=False, run="r")
    bus.subscribe(kept.append, Load, run_in="thread", name="kept")
    bus.subscribe(spilled.append, Load, run_in="thread", name="spilled", overflow="spill", maxsize=1)
    for n, value in enumerate(values):
        bus.publish(Load(n=n, value=value))
    bus.stats()
    with bus:
        assert bus.flush()
    assert [event.value for event in spilled] == [event.value if event.n != 3 else str(2**70) for event in kept]
    assert [(event.seq, event.time, event.run, event.rank) for event in spilled] == [
        (event.seq, event.time, event.run, event.rank) for event in kept
    ]
    with pytest.raises(TypeError, match="read-only"):
        spilled[1 - 1].value["a"] = 1
    assert all(type(event.value) is not list for event in spilled)


def test_G7_a_backlog_in_the_journal_costs_eight_bytes_an_event(tmp_path: Path) -> None:
    program = """
        import sys
        from eventbus import EventBus, Event

        class Tick(Event, shed=True):
            n: int = 0

        def resident():
            with open("/proc/self/statm") as file:
                return int(file.read().split()[1]) * 4096 - shared()

        def shared():  # the pages of the segments, which are the disk's
            with open("/proc/self/statm") as file:
                return int(file.read().split()[2]) * 4096

        import threading
        release = threading.Event()
        seen = []

        def slow(event):
            release.wait()
            seen.append(event.n)

        with EventBus(journal=sys.argv[1]) as bus:
            bus.subscribe(slow, Tick, overflow="spill", maxsize=8, name="slow", run_in="thread")
            for n in range(10_000):
                bus.publish(Tick(n=n))
            bus.stats()
            before = resident()
            for n in range(10_000, 60_000):
                bus.publish(Tick(n=n))
            assert bus.stats()["slow"].pending == 60_000
            grown = resident() - before
            assert grown < 4_000_000, grown
            assert bus.close(0.1).left == {"slow": 60_000}
            release.set()
        """
    if not Path("/proc/self/statm").exists():
        pytest.skip("needs /proc")
    run_program(program, str(tmp_path))


def test_G10_close_in_too_little_time_counts_what_is_in_the_journal(tmp_path: Path) -> None:
    held, release = threading.Event(), threading.Event()

    def hang(event: Tick) -> None:
        held.set()
        release.wait()

    with EventBus(journal=tmp_path) as bus:
        subscription = bus.subscribe(hang, Tick, overflow="spill", maxsize=4, name="hang", run_in="thread")
        for n in range(100_000):
            bus.publish(Tick(n=n))
        held.wait()
        began = perf_counter()
        report = bus.close(0.2)
        assert perf_counter() - began < 1.2
        release.set()
    assert report.left == {"hang": 100_000}
    stats = subscription.stats
    assert stats.dropped_by == {"closed": 100_000}
    assert (stats.matched, stats.pending) == (100_000, 0)


@pytest.mark.parametrize("kind", ["async", "thread", "sink"])
def test_G13_one_that_is_unsubscribed_while_it_spills_drops_the_rest(tmp_path: Path, kind: str) -> None:
    with EventBus(journal=tmp_path) as bus:
        seen = subscribe(bus, kind)
        (subscription,) = (s for s in bus._registry.all() if s.name == "slow")
        for n in range(3000):
            bus.publish(Tick(n=n))
        until(lambda: len(seen) > 20)
        bus.off("slow")
        assert bus.flush()
        stats = subscription.stats
        assert is_balanced(stats)
        assert stats.matched == 3000
        assert stats.pending == 0
        assert stats.dropped == stats.dropped_by.get("unsubscribed", 0)
        assert seen == list(range(len(seen)))
        assert len(seen) == stats.delivered


def test_G3_a_subscriber_that_comes_later_spills_beside_one_that_keeps_up(tmp_path: Path) -> None:
    fast: list[int] = []
    with EventBus(journal=tmp_path) as bus:
        slow = subscribe(bus, "thread")
        bus.subscribe(lambda event: fast.append(event.n), Tick, run_in="thread", name="fast", overflow="spill")
        for n in range(2000):
            bus.publish(Tick(n=n))
        late = subscribe(bus, "async", name="late")
        for n in range(2000, 4000):
            bus.publish(Tick(n=n))
        assert bus.flush(30)
    assert slow == fast == list(range(4000))
    assert late == list(range(2000, 4000))


def test_G7_a_segment_that_is_removed_while_somebody_spills_into_it_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a user who makes room: the events are gone, and counted as dropped; the rest is delivered in order."""
    monkeypatch.setattr("eventbus.journal._SEGMENT_BYTES", 4096)
    seen: list[int] = []
    release = threading.Event()

    def slow(event: Tick) -> None:
        release.wait()
        seen.append(event.n)

    with EventBus(journal=tmp_path) as bus:
        bus.subscribe(slow, Tick, overflow="spill", maxsize=4, name="slow", run_in="thread")
        for n in range(1000):
            bus.publish(Tick(n=n))
        bus.stats()
        for path in sorted(tmp_path.glob("*.events"))[1:4]:
            path.unlink()
        release.set()
        assert bus.flush()
        stats = bus.stats()["slow"]
        assert is_balanced(stats)
        assert stats.dropped == stats.dropped_by["journal"] > 0
        assert stats.delivered == len(seen) == 1000 - stats.dropped
    assert seen == sorted(set(seen))


def test_G7_an_event_larger_than_all_bounds_is_delivered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eventbus.journal._SEGMENT_BYTES", 4096)
    seen: list[int] = []
    with EventBus(journal=tmp_path) as bus:
        bus.subscribe(
            lambda event: seen.append(len(event.value)), Load, overflow="spill", maxsize=4, max_bytes=2000,
            run_in="thread",
        )  # fmt: skip
        for n in range(50):
            bus.publish(Load(n=n, value="x" * (10_000 if n % 7 == 3 else 10)))
        assert bus.flush()
        assert_balanced(bus)
    assert seen == [10_000 if n % 7 == 3 else 10 for n in range(50)]


def test_G7_a_spilled_event_of_a_class_that_is_gone_is_still_delivered(tmp_path: Path) -> None:
    """A notebook cell run again replaces the class; what was published before it comes as what it is."""
    from eventbus import Event

    class Spike(Event, hook="on_spike_of_test_spill"):
        norm: float = 0.0

    seen: list[Any] = []
    bus = EventBus(journal=tmp_path, autostart=False)
    bus.subscribe(seen.append, "on_spike_of_test_spill", run_in="thread", overflow="spill", maxsize=1)
    for n in range(3):
        bus.publish(Spike(norm=n))
    bus.stats()

    class Spike(Event, hook="on_spike_of_test_spill"):  # type: ignore[no-redef]
        norm: dict[str, int] = {}

    with bus:
        assert bus.flush()
    assert seen[0].norm == 0.0
    assert [event.fields["norm"] for event in seen[1:]] == [1.0, 2.0]


# ------------------------------------------------------------------------------------------------- the cursor itself


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    journal = Journal(tmp_path)
    journal.open()
    yield journal
    journal.close()


def entry_of(journal: Journal, n: int, *, on_disk: bool = True) -> Entry:
    event = Tick(n=n)
    draft: list[Any] = [event, 0.0, None, None, 0, 0]
    if on_disk:
        journal.append(draft, pack(event), _nowhere())
    else:
        journal.number(draft, _nowhere())
    return Entry(event, draft[-1], 100, True, Tick, place=draft[4])


def _nowhere() -> Any:
    from collections import deque

    return deque()


steps = st.lists(
    st.one_of(
        st.tuples(st.just("feed"), st.integers(1, 40)),
        st.tuples(st.just("feed unwritten"), st.integers(1, 3)),
        st.tuples(st.sampled_from(["deliver", "fail", "time_out", "batch", "drop", "drop_all"]), st.integers(1, 10)),
    ),
    max_size=40,
)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps, st.integers(1, 10), st.sampled_from([300, 1000, 10**6]))
def test_G7_a_spill_cursor_is_a_list_without_end(
    journal: Journal, steps: list[tuple[str, int]], maxsize: int, max_bytes: int
) -> None:
    """Against a plain list: what is fed is taken in order, whatever is settled how in between; the counts balance."""
    cursor = SpillCursor(Options(maxsize=maxsize, max_bytes=max_bytes), journal)
    waiting: list[int] = []
    unwritten = sum(times for step, times in steps if step == "feed unwritten")
    counts = dict.fromkeys(["delivered", "failed", "timed_out", "dropped"], 0)
    for step, times in steps:
        if step.startswith("feed"):
            entries = [entry_of(journal, n, on_disk=step == "feed") for n in range(times)]
            before = cursor.dropped
            cursor.feed(entries, 100 * times)
            if step == "feed":
                assert cursor.dropped == before
            refused = cursor.dropped - before
            counts["dropped"] += refused
            waiting += [entry.seq for entry in entries][: times - refused]
            continue
        for _ in range(times):
            if step == "drop_all":
                counts["dropped"] += len(waiting)
                waiting.clear()
                cursor.drop_all("unsubscribed")
                break
            entry = cursor.take()
            assert (entry.seq if entry else None) == (waiting[0] if waiting else None)
            if entry is None:
                break
            assert cursor.oldest() is entry
            waiting.pop(0)
            if step == "deliver":
                counts["delivered"] += cursor.deliver(entry, 0.0)
            elif step == "fail":
                counts["failed"] += cursor.fail(entry)
            elif step == "time_out":
                counts["timed_out"] += cursor.time_out(entry)
            elif step == "drop":
                counts["dropped"] += cursor.drop(entry, "interrupted")
            else:
                batch = [entry]
                while len(batch) < 5 and (more := cursor.take_more()) is not None:
                    assert more.seq == waiting.pop(0)
                    batch.append(more)
                assert cursor.settle_batch(batch, "delivered")
                counts["delivered"] += len(batch)
        oldest = cursor.oldest()
        assert (oldest.seq if oldest else None) == (waiting[0] if waiting else None)
        assert cursor.queued() == cursor.pending == len(waiting)
        assert len(cursor._queue) <= maxsize + unwritten
        assert is_balanced(cursor.read())
        assert {name: getattr(cursor, name) for name in counts} == counts
    if not waiting:
        assert cursor.bytes == 0


@pytest.mark.parametrize("dropping", [False, True])
def test_G7_a_spill_cursor_is_exact_between_its_feeder_and_its_worker(journal: Journal, dropping: bool) -> None:
    """Switching threads as often as they can; with a third one that drops everything now and then."""
    cursor = SpillCursor(Options(maxsize=4), journal)
    entries = [entry_of(journal, n) for n in range(20_000)]
    taken: list[int] = []
    over = threading.Event()

    def work() -> None:
        while not (over.is_set() and not cursor.pending):
            entry = cursor.take()
            if entry is not None and cursor.deliver(entry, 0.0):
                taken.append(entry.seq)

    def drop() -> None:
        random = Random(3)
        while not over.is_set():
            threading.Event().wait(random.random() / 500)
            cursor.drop_all("unsubscribed")

    switching = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work), *([threading.Thread(target=drop)] if dropping else [])]
        for thread in threads:
            thread.start()
        random = Random(1)
        at = 0
        while at < len(entries):
            batch = entries[at : at + random.randrange(1, 20)]
            cursor.feed(batch, sum(entry.size for entry in batch))
            at += len(batch)
            assert is_balanced(cursor.read())
        over.set()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive(), "stalled"
    finally:
        sys.setswitchinterval(switching)
    assert taken == sorted(set(taken))
    assert cursor.matched == 20_000 == cursor.delivered + cursor.dropped
    assert cursor.delivered == len(taken)
    assert dropping or cursor.dropped == 0
    assert cursor.pending == cursor.bytes == cursor.queued() == 0
    assert not cursor.spilling


def test_G7_spill_and_drop_oldest_live_side_by_side(tmp_path: Path) -> None:
    """One that sheds and one that spills, on one bus, both stuck."""
    release = threading.Event()
    with EventBus(journal=tmp_path) as bus:
        for name, options in ("shed", {}), ("spill", {"overflow": "spill"}):
            bus.subscribe(
                lambda _: release.wait(), Tick, Beat, Log, name=name, run_in="thread", maxsize=8, **options
            )  # fmt: skip
        for n in range(500):
            bus.publish(Tick(n=n))
        stats = assert_balanced(bus)
        assert stats["spill"].pending == 500
        assert stats["shed"].dropped_by["overflow"] > 400
        release.set()
        assert bus.flush()
        assert bus.stats()["spill"].delivered == 500
