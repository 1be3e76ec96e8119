"""G10: closing delivers what is pending, ends in time whatever the subscribers do, and says what was left."""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
import threading
import traceback
import weakref
from time import perf_counter, sleep
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from eventbus import CloseReport, Event, EventBus, FitEpochEnd, Log, TrainBatchEnd, TrainEnd, WouldBlockError
from tests.eventbus.waiting import until, until_in_task

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

#: What `close(timeout)` may take beyond its timeout, in seconds.
MARGIN_S = 1.0


def batch_end(step: int = 0) -> TrainBatchEnd:
    return TrainBatchEnd(epoch=0, batch=step, step=step)


def frame_of(thread: threading.Thread) -> Any:
    return sys._current_frames()[thread.ident or 0]


class Recorder:
    """A sink that notes every call; `write` waits for `gate`, if there is one."""

    hooks: Sequence[str] = ()

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.calls: list[str] = []
        self.steps: list[int] = []

    async def open(self) -> None:
        self.calls.append("open")

    async def write(self, events: Sequence[Event]) -> None:
        await asyncio.sleep(0)
        self.calls.append("write")
        self.steps += [event.step for event in events if isinstance(event, TrainBatchEnd)]

    async def aclose(self) -> None:
        await asyncio.sleep(0.01)  # as a real one, which flushes and hangs up
        self.calls.append("aclose")


@pytest.fixture
def release() -> Iterator[threading.Event]:
    """Lets the handlers go that a test has stuck, at its end."""
    event = threading.Event()
    yield event
    event.set()


Handler = "Callable[[Event], Any]"


def never_returns(release: threading.Event) -> Handler:
    async def stuck(event: Event) -> None:
        await asyncio.get_running_loop().create_future()

    return stuck


def swallows_cancellation(release: threading.Event) -> Handler:
    async def stuck(event: Event) -> None:
        while not release.is_set():
            try:
                await asyncio.sleep(0.05)
            except asyncio.CancelledError:
                pass

    return stuck


def blocks_the_loop(release: threading.Event) -> Handler:
    async def stuck(event: Event) -> None:
        release.wait(20)

    return stuck


def hangs_in_a_thread(release: threading.Event) -> Handler:
    def stuck(event: Event) -> None:
        release.wait(20)

    return stuck


STUCK = [never_returns, swallows_cancellation, blocks_the_loop, hangs_in_a_thread]


def subscribe_stuck(bus: EventBus, make: Callable[[threading.Event], Any], release: threading.Event) -> None:
    run_in = {"run_in": "thread"} if make is hangs_in_a_thread else {}
    bus.subscribe(make(release), "on_train_batch_end", name="stuck", **run_in)


# ------------------------------------------------------------------------------------------------ delivering


def test_G10_close_delivers_what_is_pending_to_every_kind_of_subscriber():
    """`close` returns after the last event has reached async, thread and sink subscribers."""
    bus, seen_async, seen_thread, sink = EventBus(), [], [], Recorder()

    @bus.on("on_train_batch_end")
    async def in_a_task(event: TrainBatchEnd) -> None:
        await asyncio.sleep(0)
        seen_async.append(event.step)

    @bus.on("on_train_batch_end", run_in="thread")
    def in_a_thread(event: TrainBatchEnd) -> None:
        seen_thread.append(event.step)

    bus.attach(sink)
    for step in range(100):
        bus.publish(batch_end(step))

    assert bus.close() == CloseReport(ok=True, left={})
    assert seen_async == seen_thread == sink.steps == list(range(100))


def test_G10_close_right_after_the_first_publish_waits_for_the_loop_that_is_only_starting():
    """Closing a bus whose own loop has not begun yet loses nothing."""
    for _ in range(50):
        bus, seen = EventBus(), []

        @bus.on("on_train_batch_end")
        async def note(event: TrainBatchEnd, seen: list[int] = seen) -> None:
            seen.append(event.step)

        bus.publish(batch_end(7))
        assert bus.close().ok
        assert seen == [7]


def test_G10_what_a_handler_publishes_while_the_bus_drains_is_delivered_too():
    """An event that leads to another one does so in spite of a close that waits for the first."""
    bus, seen = EventBus(), []

    @bus.on("on_train_batch_end")
    async def derive(event: TrainBatchEnd) -> None:
        await asyncio.sleep(0.02)
        bus.publish(Log(step=event.step))

    @bus.on("on_log")
    async def note(event: Log) -> None:
        seen.append(event.step)

    for step in range(5):
        bus.publish(batch_end(step))
    assert bus.close().ok
    assert seen[:4] == [0, 1, 2, 3]


def test_G10_flush_returns_true_once_everything_published_before_is_settled():
    """After `flush` the subscriber has seen the event, however slow it is."""
    bus, seen = EventBus(), []

    @bus.on("on_train_batch_end")
    async def slow(event: TrainBatchEnd) -> None:
        await asyncio.sleep(0.01)
        seen.append(event.step)

    with bus:
        for step in range(5):
            bus.publish(batch_end(step))
        assert bus.flush()
        assert seen == [0, 1, 2, 3, 4]


def test_G10_flush_gives_up_at_its_timeout():
    """`flush(0.2)` beside a handler that takes 10 s returns False in less than 0.3 s."""
    bus = EventBus()

    @bus.on("on_train_batch_end")
    async def slow(event: TrainBatchEnd) -> None:
        await asyncio.sleep(10)

    with bus:
        bus.publish(batch_end())
        started = perf_counter()
        assert bus.flush(0.2) is False
        assert perf_counter() - started < 0.3
        bus.close(0.0)


# --------------------------------------------------------------------------------------------- ending in time


@pytest.mark.parametrize("make", STUCK)
def test_G10_close_returns_in_time_and_counts_what_a_stuck_subscriber_left(make, release):
    """Whatever a subscriber does, `close(timeout)` is back within a second more, and `left` names what it dropped."""
    bus, seen = EventBus(), []
    subscribe_stuck(bus, make, release)

    if make is not blocks_the_loop:

        @bus.on("on_train_batch_end")
        async def healthy(event: TrainBatchEnd) -> None:
            seen.append(event.step)

    for step in range(7):
        bus.publish(batch_end(step))
    started = perf_counter()
    report = bus.close(0.5)
    assert perf_counter() - started < 0.5 + MARGIN_S
    assert report == CloseReport(ok=False, left={"stuck": 7})
    if make is not blocks_the_loop:
        assert seen == list(range(7))


@pytest.mark.parametrize("make", STUCK)
def test_G10_the_counts_of_a_stuck_subscriber_balance_after_close(make, release):
    """What a close gives up is counted as dropped, with the reason."""
    bus = EventBus()
    subscribe_stuck(bus, make, release)
    for step in range(4):
        bus.publish(batch_end(step))
    bus.close(0.2)
    stats = bus.stats()["stuck"]
    assert (stats.matched, stats.dropped, stats.pending) == (4, 4, 0)
    assert dict(stats.dropped_by) == {"closed": 4}


def test_G10_what_was_not_even_taken_over_while_a_handler_holds_the_loop_is_left_too(release):
    """Events still in the hand-off buffer count as left for each subscriber that would have heard them."""
    bus, holding = EventBus(), threading.Event()

    @bus.on("on_log")
    async def holds(event: Log) -> None:
        holding.set()
        release.wait(20)

    @bus.on("on_train_batch_end")
    async def starved(event: TrainBatchEnd) -> None: ...

    bus.publish(Log(step=0))
    assert holding.wait(5)
    for step in range(30):
        bus.publish(batch_end(step))
    report = bus.close(0.2)
    assert list(report.left.values()) == [1, 30]


def test_G10_a_handler_is_told_that_the_time_is_over():
    """At the deadline a cooperative handler is cancelled, so that its clean-up runs."""
    bus, cleaned = EventBus(), threading.Event()

    @bus.on("on_train_batch_end")
    async def stuck(event: TrainBatchEnd) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            cleaned.set()

    bus.publish(batch_end())
    bus.close(0.1)
    assert cleaned.wait(5)


def test_G10_the_with_block_ends_in_time_too(release):
    """Leaving `with bus:` closes with the default limit, and an earlier `close` with a shorter one counts."""
    bus = EventBus()
    subscribe_stuck(bus, swallows_cancellation, release)
    started = perf_counter()
    with bus:
        bus.publish(batch_end())
        assert not bus.close(0.1).ok
    assert perf_counter() - started < 0.1 + MARGIN_S


def test_G10_a_sink_that_never_returns_ends_with_the_timeout(release):
    """A sink stuck in `open`, `write` or `aclose` holds `close` no longer than any other subscriber."""

    class Stuck(Recorder):
        def __init__(self, where: str) -> None:
            super().__init__()
            self.where = where

        async def open(self) -> None:
            await self._maybe("open")

        async def write(self, events: Sequence[Event]) -> None:
            await self._maybe("write")

        async def aclose(self) -> None:
            await self._maybe("aclose")

        async def _maybe(self, where: str) -> None:
            while where == self.where and not release.is_set():
                try:
                    await asyncio.sleep(0.05)
                except asyncio.CancelledError:
                    pass

    for where, left in ("open", 3), ("write", 3), ("aclose", 0):
        bus = EventBus()
        bus.attach(Stuck(where), name=where)
        for step in range(3):
            bus.publish(batch_end(step))
        started = perf_counter()
        report = bus.close(0.2)
        assert perf_counter() - started < 0.2 + MARGIN_S
        assert report.left.get(where, 0) == left


@pytest.mark.anyio
async def test_G10_aclose_on_a_host_loop_returns_in_time():
    """On asyncio and on trio, `aclose(timeout)` beside a handler that never ends is back within a second more."""
    bus = EventBus()

    @bus.on("on_train_batch_end", name="stuck")
    async def stuck(event: TrainBatchEnd) -> None:
        await anyio.sleep_forever()

    async with bus:
        for step in range(3):
            bus.publish(batch_end(step))
        started = perf_counter()
        report = await bus.aclose(0.2)
        assert perf_counter() - started < 0.2 + MARGIN_S
        assert report == CloseReport(ok=False, left={"stuck": 3})


@pytest.mark.anyio
@pytest.mark.parametrize("call", ["aflush", "aclose"])
async def test_G10_who_waits_for_the_end_may_be_cancelled(call: str):
    """The wait ends at once, and the bus ends as it was told to, with exact counts."""
    bus = EventBus()

    @bus.on("on_train_batch_end", name="stuck")
    async def stuck(event: TrainBatchEnd) -> None:
        await anyio.sleep_forever()

    async with bus:
        for step in range(3):
            bus.publish(batch_end(step))
        started = perf_counter()
        with anyio.move_on_after(0.05) as scope:
            await getattr(bus, call)(30.0)
        assert scope.cancelled_caught
        assert perf_counter() - started < 5.0
        assert await bus.aclose(0.1) == CloseReport(ok=False, left={"stuck": 3})
    assert dict(bus.stats()["stuck"].dropped_by) == {"closed": 3}


@pytest.mark.anyio
async def test_G10_an_end_in_the_very_moment_of_the_close_is_one_or_the_other():
    """Handlers that return just when the time for closing is over: closing ends, and each event counts once."""
    for factor in (0.9, 0.97, 1.0, 1.0, 1.03, 1.1):
        bus, ended = EventBus(), []

        async def close_call(event: TrainBatchEnd, ended: list[int] = ended, factor: float = factor) -> None:
            await anyio.sleep(0.05 * factor)
            ended.append(event.step)

        async with bus:
            subscriber = bus.subscribe(close_call, TrainBatchEnd)
            bus.publish(batch_end(1))
            bus.publish(batch_end(2))
            with anyio.fail_after(5.0):
                report = await bus.aclose(0.05)
        stats = subscriber.stats
        assert (stats.matched, stats.pending, stats.delivered + stats.dropped) == (2, 0, 2)
        assert stats.dropped == sum(report.left.values())
        assert stats.delivered <= len(ended) <= 2


@pytest.mark.anyio
async def test_G10_a_handler_on_a_host_loop_is_told_that_the_time_is_over():
    """It is cancelled there too, and ends before the host does."""
    bus, ended = EventBus(), anyio.Event()

    @bus.on("on_train_batch_end")
    async def stuck(event: TrainBatchEnd) -> None:
        try:
            await anyio.sleep(60)
        finally:
            ended.set()

    async with bus:
        bus.publish(batch_end())
        await bus.aclose(0.1)
        with anyio.fail_after(5.0):
            await ended.wait()


@pytest.mark.anyio
async def test_G10_a_thread_may_close_a_bus_whose_host_loop_is_held(release):
    """`close` from a thread does not need the host's loop, whichever it is."""
    bus, reports, holding = EventBus(), [], threading.Event()

    @bus.on("on_train_batch_end", name="stuck")
    async def stuck(event: TrainBatchEnd) -> None:
        holding.set()
        release.wait(20)

    def close_from_outside() -> None:
        assert holding.wait(10)
        started = perf_counter()
        reports.append((bus.close(0.2), perf_counter() - started))
        release.set()

    closing = threading.Thread(target=close_from_outside)
    async with bus:
        for step in range(3):
            bus.publish(batch_end(step))
        closing.start()
        await until_in_task(lambda: reports)
    closing.join()
    [(report, took_s)] = reports
    assert report == CloseReport(ok=False, left={"stuck": 3})
    assert took_s < 0.2 + MARGIN_S


# ------------------------------------------------------------------------------------------------------ sinks


def test_G10_a_sink_is_closed_once_after_its_last_event():
    """A sink sees `open`, all its events, and then `aclose`, once, also when the bus is closed twice."""
    bus, sink = EventBus(), Recorder()
    bus.attach(sink)
    with bus:
        for step in range(20):
            bus.publish(batch_end(step))
        bus.close()
    assert sink.steps == list(range(20))
    assert sink.calls[0] == "open"
    assert sink.calls[-1] == "aclose"
    assert sink.calls.count("open") == sink.calls.count("aclose") == 1


@pytest.mark.parametrize("make", [never_returns, swallows_cancellation, hangs_in_a_thread])
@pytest.mark.parametrize("timeout", [0.0, 0.4])
def test_G10_a_sink_is_closed_although_another_subscriber_hangs(make, timeout, release):
    """One that never ends costs the time for closing, but not the others their clean end."""
    bus, sink = EventBus(), Recorder()
    subscribe_stuck(bus, make, release)
    bus.attach(sink)
    with bus:
        bus.publish(batch_end(1))
        until(lambda: sink.steps)
        bus.close(timeout)
    assert sink.calls == ["open", "write", "aclose"]


def test_G10_a_sink_that_needs_a_while_to_close_gets_it_although_another_subscriber_hangs(release):
    """A part of the time for closing is kept for those that are done with their events."""

    class Thorough(Recorder):
        async def aclose(self) -> None:
            await asyncio.sleep(0.5)
            await super().aclose()

    bus, sink = EventBus(), Thorough()
    subscribe_stuck(bus, swallows_cancellation, release)
    bus.attach(sink)
    with bus:
        bus.publish(batch_end(1))
        bus.close(2.0)
    assert sink.calls == ["open", "write", "aclose"]


def test_G10_what_a_sink_had_in_hand_when_the_time_is_over_is_counted(release):
    """A batch that is being written counts as left, every event of it, and the counts balance."""

    class Slow(Recorder):
        max_batch = 50

        async def write(self, events: Sequence[Event]) -> None:
            while not release.is_set():
                await asyncio.sleep(0.01)

    bus = EventBus()
    bus.attach(Slow(), name="slow")
    for step in range(80):
        bus.publish(batch_end(step))
    assert bus.close(0.1) == CloseReport(ok=False, left={"slow": 80})
    stats = bus.stats()["slow"]
    assert (stats.matched, stats.dropped, stats.pending) == (80, 80, 0)


def test_G10_an_idle_sink_lets_the_loop_run_while_a_flush_waits_for_another_subscriber():
    """Being hurried by a flush is nothing to a sink that has nothing to write."""
    bus, idle = EventBus(), Recorder()
    idle.hooks = ("on_log",)
    bus.attach(idle)

    @bus.on("on_train_batch_end")
    async def slow(event: TrainBatchEnd) -> None:
        for _ in range(20):
            await asyncio.sleep(0.005)

    with bus:
        bus.publish(batch_end())
        assert bus.flush(2.0)
    assert bus.stats()["Recorder"].hold_s < 0.1


def test_G10_a_sink_without_events_is_closed_as_well():
    """What was opened is closed, also when nothing was published."""
    bus, sink = EventBus(), Recorder()
    bus.attach(sink)
    with bus:
        until(lambda: sink.calls)
    assert sink.calls == ["open", "aclose"]


def test_G10_events_that_still_gather_are_written_at_once_by_close():
    """A sink that waits for a fuller batch is hurried: closing does not wait for its `flush_interval`."""

    class Gathering(Recorder):
        max_batch = 1000
        flush_interval = 30.0

    bus, sink = EventBus(), Gathering()
    bus.attach(sink)
    for step in range(10):
        bus.publish(batch_end(step))
    started = perf_counter()
    assert bus.close(10.0).ok
    assert perf_counter() - started < 5.0
    assert sink.steps == list(range(10))


# ---------------------------------------------------------------------------------------- idempotent, concurrent


def test_G10_close_again_gives_the_same_report(release):
    """The second close returns at once what the first one found."""
    bus = EventBus()
    subscribe_stuck(bus, never_returns, release)
    bus.publish(batch_end())
    first = bus.close(0.1)
    started = perf_counter()
    assert bus.close(5.0) == first == CloseReport(ok=False, left={"stuck": 1})
    assert perf_counter() - started < 0.5


def test_G10_closing_a_bus_that_never_started_reports_what_waited():
    """Without a start nothing can be delivered, and `close` says so."""
    assert EventBus().close() == CloseReport(ok=True, left={})

    bus = EventBus(autostart=False)

    @bus.on("on_train_batch_end", name="waits")
    async def waits(event: TrainBatchEnd) -> None: ...

    bus.publish(batch_end())
    bus.publish(batch_end())
    assert bus.close() == CloseReport(ok=False, left={"waits": 2})


def test_G10_eight_threads_may_close_at_once():
    """Every one of them comes back with the one report."""
    bus, seen, reports = EventBus(), [], []

    @bus.on("on_train_batch_end")
    async def note(event: TrainBatchEnd) -> None:
        await asyncio.sleep(0.005)
        seen.append(event.step)

    for step in range(20):
        bus.publish(batch_end(step))
    threads = [threading.Thread(target=lambda: reports.append(bus.close())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert reports == [CloseReport(ok=True, left={})] * 8
    assert seen == list(range(20))


@pytest.mark.parametrize("how", ["publishing", "in-a-loop-of-its-own"])
def test_G10_what_is_handed_on_after_the_close_gave_up_is_dropped_and_counted(release, how):
    """A predicate that blocks holds up the hand-on; what waits behind it is settled once it goes on."""
    bus, seen, held = EventBus(autostart=how != "publishing"), [], threading.Event()

    @bus.on("on_train_batch_end", run_in="thread")
    def note(event: TrainBatchEnd) -> None:
        seen.append(event.step)

    def block(event: TrainBatchEnd) -> bool:
        held.set()
        return release.wait(30)

    @bus.on("on_train_batch_end", run_in="thread", when=block)
    def other(event: TrainBatchEnd) -> None:
        pass

    for step in range(5):
        bus.publish(batch_end(step))
    feeding = threading.Thread(target=bus.stats)
    if how == "publishing":
        feeding.start()
    assert held.wait(10)
    for step in range(5, 10):
        bus.publish(batch_end(step))
    report = bus.close(0.05)
    assert not report.ok
    release.set()
    if how == "publishing":
        feeding.join(10)
    until(lambda: all(s.matched == 10 for s in bus.stats().values()))
    until(lambda: not any(s.pending for s in bus.stats().values()))
    assert bus.flush(10)
    for stats in bus.stats().values():
        assert stats.matched == stats.delivered + stats.dropped
        assert stats.dropped == stats.dropped_by["closed"]
    with bus:  # and forgotten at the next start
        bus.publish(batch_end(10))
    assert seen[-1] == 10


@pytest.mark.parametrize("journal", [True, False])
def test_G10_a_publisher_that_waits_for_room_is_let_go_by_the_close(release, tmp_path, journal):
    """Its event comes too late: for those with room as well, and for the journal."""
    bus, seen = EventBus(journal=tmp_path if journal else None), []

    @bus.on("on_train_batch_end", run_in="thread", overflow="block", maxsize=1, block_timeout=60.0)
    def stuck(event: TrainBatchEnd) -> None:
        release.wait(30)

    @bus.on("on_train_batch_end", run_in="thread", **({"overflow": "spill"} if journal else {}))
    def note(event: TrainBatchEnd) -> None:
        seen.append(event.step)

    bus.publish(batch_end(0))
    until(lambda: seen == [0])
    bus.publish(batch_end(1))
    publisher = threading.Thread(target=bus.publish, args=(batch_end(2),))
    publisher.start()
    until(lambda: "_wait_for_room" in {frame.name for frame in traceback.extract_stack(frame_of(publisher))})
    bus.close(0.1)
    publisher.join(10)
    assert not publisher.is_alive()
    release.set()
    assert seen == [0, 1]
    for stats in bus.stats().values():
        assert stats.matched == 2
        assert set(stats.dropped_by) <= {"closed"}


@pytest.mark.parametrize(("threads", "pause_s"), [(4, 0.0), (100, 0.01)])  # a hundred spinning ones keep any thread
def test_G10_close_beside_threads_that_do_not_stop_publishing(threads, pause_s):
    """Threads that publish flat out, or very many of them, hold up neither `close` nor themselves."""
    bus, seen, done = EventBus(), [], threading.Event()

    @bus.on("on_train_batch_end", maxsize=100_000)
    async def note(event: TrainBatchEnd) -> None:
        seen.append(event.seq)

    def flood() -> None:
        while not done.is_set():
            bus.publish(batch_end())
            if pause_s:
                sleep(pause_s)

    publishers = [threading.Thread(target=flood) for _ in range(threads)]
    for thread in publishers:
        thread.start()
    try:
        until(lambda: len(seen) > 100)
        started = perf_counter()
        bus.close(2.0)
        took_s = perf_counter() - started
    finally:
        done.set()
    for thread in publishers:
        thread.join(5)
        assert not thread.is_alive()
    assert took_s < 2.0 + MARGIN_S
    assert seen == sorted(seen)
    stats = bus.stats().popitem()[1]
    assert stats.matched == stats.delivered + stats.dropped


def test_G10_a_finaliser_may_close_the_bus():
    """An object that closes the bus it holds when it is collected does not deadlock."""
    bus, seen = EventBus(), []

    @bus.on("on_train_batch_end")
    async def note(event: TrainBatchEnd) -> None:
        seen.append(event.step)

    class Owner:
        def __init__(self) -> None:
            self.me = self  # a cycle: only the garbage collector frees it

        def __del__(self) -> None:
            bus.close(2.0)

    bus.publish(batch_end(3))
    Owner()
    gc.collect()
    assert seen == [3]


def test_G10_an_inline_hook_may_close_the_bus():
    """On the publishing thread nothing stands in the way of a close."""
    bus, seen = EventBus(), []

    @bus.on("on_train_end")
    async def note(event: TrainEnd) -> None:
        seen.append(event.reason)

    bus.subscribe(lambda event: bus.close(5.0), "on_train_end")
    bus.publish(TrainEnd(epoch=0, step=0, reason="completed"))
    assert seen == ["completed"]


@pytest.mark.anyio
async def test_G10_any_loop_may_close_a_bus_that_runs_elsewhere():
    """`aclose` and `aflush` work from a loop that is not the bus's own."""
    bus, seen = EventBus(), []

    @bus.on("on_train_batch_end")
    async def note(event: TrainBatchEnd) -> None:
        await asyncio.sleep(0.01)
        seen.append(event.step)

    bus.publish(batch_end(1))
    assert await bus.aflush()
    assert seen == [1]
    bus.publish(batch_end(2))
    assert (await bus.aclose()).ok
    assert seen == [1, 2]


def test_G10_closing_from_a_handler_raises_at_once_and_says_what_to_do():
    """A handler that closes its own bus would wait for itself."""
    bus, errors = EventBus(), []

    @bus.on("on_train_batch_end")
    async def closes(event: TrainBatchEnd) -> None:
        with pytest.raises(WouldBlockError, match="aclose") as error:
            bus.close()
        errors.append(str(error.value))
        with pytest.raises(WouldBlockError, match="is handling here") as error:
            await bus.aclose()
        errors.append(str(error.value))

    with bus:
        bus.publish(batch_end())
        assert bus.flush()
    assert len(errors) == 2


# ---------------------------------------------------------------------------------------------- after the end


def test_G10_publish_after_close_is_counted_and_logged_once(caplog):
    """Late events are dropped without an exception, with one log record, and counted."""
    bus, seen = EventBus(), []

    @bus.on("on_train_batch_end")
    async def note(event: TrainBatchEnd) -> None:
        seen.append(event.step)

    bus.publish(batch_end())
    bus.close()
    with caplog.at_level(logging.DEBUG, logger="eventbus"):
        for step in range(50):
            bus.publish(batch_end(step))
            bus.publish(TrainEnd(epoch=0, step=step))
    assert seen == [0]
    assert [record.getMessage() for record in caplog.records] == [
        "on_train_batch_end was published after the bus was closed, and is dropped."
    ]
    assert "100 events were published after close." in bus.report()


def test_G10_a_closed_bus_can_be_started_again():
    """Start, close, start again: the same subscribers hear what is published in between the starts and ends."""
    bus, seen, sink = EventBus(), [], Recorder()
    bus.attach(sink)

    @bus.on("on_train_batch_end")
    async def note(event: TrainBatchEnd) -> None:
        seen.append(event.step)

    for step in range(3):
        with bus:
            bus.publish(batch_end(step))
    bus.publish(batch_end(99))
    assert seen == sink.steps == [0, 1, 2]
    assert sink.calls == ["open", "write", "aclose"] * 3


def test_G10_a_bus_can_be_started_again_while_the_old_handler_still_hangs(release):
    """What a former start left behind does not touch the next one."""
    bus, seen, hangs = EventBus(), [], True

    @bus.on("on_train_batch_end", name="stuck")
    async def stuck(event: TrainBatchEnd) -> None:
        while hangs and not release.is_set():
            try:
                await asyncio.sleep(0.02)
            except asyncio.CancelledError:
                pass
        seen.append(event.step)

    bus.publish(batch_end(1))
    assert not bus.close(0.1).ok
    with bus:
        hangs = False
        bus.publish(batch_end(2))
        assert bus.flush(5.0)
        until(lambda: 2 in seen)
    assert bus.stats()["stuck"].delivered == 1


def test_G10_a_closed_bus_is_held_by_nobody():
    """Neither its threads nor the exit hook keep it, its subscribers or its sinks in memory."""
    bus, sink = EventBus(), Recorder()
    bus.attach(sink)

    @bus.on("on_train_batch_end", run_in="thread")
    def in_a_thread(event: TrainBatchEnd) -> None: ...

    with bus:
        bus.publish(batch_end())
    gone = [weakref.ref(thing) for thing in (bus, sink, in_a_thread)]
    del bus, sink, in_a_thread

    def collected() -> bool:
        gc.collect()
        return all(reference() is None for reference in gone)

    until(collected)


# -------------------------------------------------------------------------------------------- on_error="raise"


def fails(event: Event) -> None:
    raise LookupError("no such project")


async def fails_later(event: Event) -> None:
    raise LookupError("no such project")


def raising_bus() -> EventBus:
    bus = EventBus()
    bus.subscribe(fails_later, "on_train_batch_end", name="critical", on_error="raise")
    return bus


def wait_for_failure(bus: EventBus) -> None:
    assert bus.flush()
    assert bus.stats()["critical"].failed


def test_G10_a_failure_that_is_to_be_raised_comes_out_of_the_next_publish_of_the_same_thread():
    """Once, with the original traceback and a note naming hook and subscriber; other threads never see it."""
    bus = raising_bus()
    bus.publish(batch_end(4))
    wait_for_failure(bus)

    other = threading.Thread(target=bus.publish, args=(batch_end(5),))  # pytest reports what a thread raises
    other.start()
    other.join()

    with pytest.raises(LookupError, match="no such project") as error:
        bus.publish(Log(step=0))
    assert error.traceback[-1].name == "fails_later"
    assert any("'critical' on on_train_batch_end" in note for note in error.value.__notes__)
    bus.publish(Log(step=0))
    assert bus.flush()
    assert bus.stats()["critical"].failed == 2
    with pytest.raises(LookupError):  # the other thread's, which publishes no more
        bus.close()


def test_G10_a_failure_that_no_publish_raised_comes_out_of_close():
    """The last event's failure is not lost, and the bus is closed all the same."""
    bus = raising_bus()
    bus.publish(batch_end())
    with pytest.raises(LookupError, match="no such project"):
        bus.close()
    assert bus.close().ok


def test_G10_leaving_the_with_block_raises_it_or_adds_it_to_the_exception_in_flight():
    """An exception on its way out is never replaced; the subscriber's failure becomes a note on it."""
    with pytest.raises(LookupError), raising_bus() as bus:
        bus.publish(batch_end())

    with pytest.raises(ZeroDivisionError) as error, raising_bus() as bus:
        divide_after(bus.publish)
    assert any("no such project" in note for note in error.value.__notes__)


def divide_after(publish: Callable[[Event], None]) -> float:
    publish(batch_end())
    return 1 / 0


@pytest.mark.anyio
async def test_G10_leaving_the_async_block_raises_it_or_adds_it_too():
    """The same on a host loop."""
    with pytest.raises(LookupError):
        async with raising_bus() as bus:
            bus.publish(batch_end())

    with pytest.raises(ZeroDivisionError) as error:
        async with raising_bus() as bus:
            divide_after(bus.publish)
    assert any("no such project" in note for note in error.value.__notes__)


@pytest.mark.parametrize("last", [TrainEnd(epoch=0, step=0), FitEpochEnd(epoch=0)])
def test_G10_a_terminal_event_raises_nothing(last):
    """What must reach every subscriber does so before anything is raised."""
    bus, seen = raising_bus(), []
    bus.subscribe(lambda event: seen.append(event.hook), type(last))
    bus.publish(batch_end())
    wait_for_failure(bus)
    if isinstance(last, TrainEnd):
        bus.publish(last)
        assert seen == ["on_train_end"]
        with pytest.raises(LookupError):
            bus.close()
    else:
        with pytest.raises(LookupError):
            bus.publish(last)
        assert bus.close().ok


def test_G10_a_handler_that_publishes_is_not_told_of_the_failure_of_another_one():
    """On a host loop the handlers publish from the same thread; the failure still goes to who published the event."""

    async def main() -> None:
        async with raising_bus() as bus:

            @bus.on("on_log")
            async def derives(event: Log) -> None:
                bus.publish(FitEpochEnd(epoch=0))

            bus.publish(Log(step=0))
            bus.publish(batch_end())
            assert await bus.aflush()
            with pytest.raises(LookupError):
                bus.publish(Log(step=1))
            assert bus.stats()[derives.__qualname__.replace("<locals>.", "")].delivered == 1

    asyncio.run(main())


def test_G10_a_finaliser_that_publishes_raises_nothing():
    """The failure waits for a publish that can be told."""
    bus = raising_bus()
    bus.publish(batch_end())
    wait_for_failure(bus)

    class Owner:
        def __del__(self) -> None:
            bus.publish(Log(step=0))

    Owner()
    sleep(0)
    with pytest.raises(LookupError):
        bus.publish(Log(step=1))
    assert bus.close().ok
