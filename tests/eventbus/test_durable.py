"""G17, durable=True: a subscriber goes on where it was, at least once, and hears exactly what it missed."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from eventbus import Event, EventBus, SinkUnavailable, SubscriberErrorEvent, read_journal
from tests.eventbus.samples import Beat, Load, Tick, assert_balanced
from tests.eventbus.waiting import until, until_in_task


def numbers(events: Sequence[Event]) -> list[int]:
    return [event.n for event in events]  # type: ignore[attr-defined]


def missed(directory: Path, count: int, **options: Any) -> None:
    """A life in which a durable subscriber is known and nothing is delivered."""
    bus = EventBus(journal=directory, autostart=False, run="r")
    bus.subscribe(print, Tick, Beat, run_in="thread", durable=True, name="tracker", **options)
    for n in range(count):
        bus.publish(Tick(n=n))
    bus.close()


def deliver(directory: Path, *hooks: Any, **options: Any) -> list[Any]:
    """What it gets in the next life."""
    seen: list[Any] = []
    with EventBus(journal=directory, run="r") as bus:
        bus.subscribe(
            seen.append, *(hooks or (Tick, Beat)), run_in="thread", durable=True, name="tracker", **options
        )  # fmt: skip
        assert bus.flush()
        stats = assert_balanced(bus)
        if "tracker" in stats:
            assert stats["tracker"].delivered == len(seen)
    return seen


@pytest.mark.parametrize(
    ("options", "heard"),
    [
        ({}, list(range(20))),
        ({"when": lambda tick: tick.n % 3 == 0}, [0, 3, 6, 9, 12, 15, 18]),
        ({"every": 5}, [4, 9, 14, 19]),
        ({"run": "r"}, list(range(20))),
        ({"run": "another"}, []),
        ({"rank": "all"}, list(range(20))),
        ({"rank": 1}, []),
        ({"once": True}, [0]),
        ({"maxsize": 1}, list(range(20))),
        ({"max_bytes": 500}, list(range(20))),
    ],
)
def test_G17_what_was_missed_passes_the_same_conditions(
    tmp_path: Path, options: dict[str, Any], heard: list[int]
) -> None:
    missed(tmp_path, 20)
    assert numbers(deliver(tmp_path, **options)) == heard
    assert deliver(tmp_path, **options) == []


def test_G17_every_counts_from_the_place_where_a_closed_subscriber_goes_on(tmp_path: Path) -> None:
    """What a close left is counted again at the next start, and not on top of the first time."""
    release, seen = threading.Event(), []
    bus = EventBus(journal=tmp_path)

    @bus.on(Tick, run_in="thread", durable=True, name="tracker", every=3)
    def track(tick: Tick) -> None:
        seen.append(tick.n)
        release.wait(30)

    for n in range(10):
        bus.publish(Tick(n=n))
    until(lambda: seen == [2])
    assert bus.close(0.0).left == {"tracker": 3}
    release.set()
    with bus:
        assert bus.flush()
        for n in (10, 11):
            bus.publish(Tick(n=n))
    assert seen == [2, 2, 5, 8, 11]


def test_G17_a_flush_right_after_a_start_waits_for_what_was_missed(tmp_path: Path) -> None:
    bus, seen = EventBus(journal=tmp_path, autostart=False), []
    bus.subscribe(lambda tick: seen.append(tick.n), Tick, run_in="thread", durable=True, name="tracker")
    for n in range(200):
        bus.publish(Tick(n=n))
    assert not bus.close().ok
    with bus:
        assert bus.flush()
        assert seen == list(range(200))


def test_G17_a_predicate_that_raises_for_a_missed_event_fails_that_event(tmp_path: Path) -> None:
    missed(tmp_path, 5)
    seen: list[Any] = []
    with EventBus(journal=tmp_path) as bus:
        bus.subscribe(
            seen.append, Tick, run_in="thread", durable=True, name="tracker", when=lambda tick: 1 / (tick.n - 2)
        )
        assert bus.flush()
        stats = assert_balanced(bus)["tracker"]
    assert numbers(seen) == [0, 1, 3, 4]
    assert (stats.matched, stats.failed) == (5, 1)


def test_K85_a_new_durable_subscriber_hears_nothing_earlier(tmp_path: Path) -> None:
    seen: list[Any] = []
    with EventBus(journal=tmp_path) as bus:
        for n in range(5):
            bus.publish(Tick(n=n))
        bus.subscribe(seen.append, Tick, run_in="thread", durable=True, name="new")
        bus.publish(Tick(n=5))
        assert bus.flush()
    assert numbers(seen) == [5]


def test_G17_one_that_returns_late_hears_what_was_published_before_it_was_registered(tmp_path: Path) -> None:
    missed(tmp_path, 3)
    seen: list[Any] = []
    with EventBus(journal=tmp_path) as bus:
        for n in range(3, 6):
            bus.publish(Tick(n=n))
        bus.subscribe(seen.append, Tick, run_in="thread", durable=True, name="tracker")
        for n in range(6, 9):
            bus.publish(Tick(n=n))
        assert bus.flush()
    assert numbers(seen) == list(range(9))


def test_G17_it_goes_on_when_the_same_bus_starts_again(tmp_path: Path) -> None:
    """After a close that left events, and after one that did not."""
    seen: list[Any] = []
    held, free = threading.Event(), threading.Event()

    def handle(event: Tick) -> None:
        held.set()
        free.wait()
        seen.append(event)

    bus = EventBus(journal=tmp_path)
    bus.subscribe(handle, Tick, run_in="thread", durable=True, name="tracker", maxsize=4)
    with bus:
        for n in range(50):
            bus.publish(Tick(n=n))
        held.wait()
        assert bus.close(0.1).left == {"tracker": 50}
        free.set()
    until(lambda: len(seen) == 1)  # the one that was running; it counts as left
    for begin in (50, 60):
        with bus:
            for n in range(begin, begin + 10):
                bus.publish(Tick(n=n))
            assert bus.flush()
            assert_balanced(bus)
    assert numbers(seen[1:]) == list(range(70))


async def test_G14_it_moves_from_a_loop_of_its_own_to_the_hosts(anyio_backend: Any, tmp_path: Path) -> None:
    missed(tmp_path, 500)
    seen: list[Any] = []

    async def handle(event: Tick) -> None:
        seen.append(event)

    bus = EventBus(journal=tmp_path)
    bus.subscribe(handle, Tick, durable=True, name="tracker", maxsize=4)
    for n in range(500, 1000):
        bus.publish(Tick(n=n))
    async with bus:
        for n in range(1000, 1500):
            bus.publish(Tick(n=n))
        assert await bus.aflush()
        await until_in_task(lambda: len(seen) >= 1500)
    assert numbers(seen) == list(range(1500))


def test_G17_a_long_journal_without_anything_for_it_does_not_hold_the_loop(tmp_path: Path) -> None:
    """While one subscriber looks through what it missed, the others on its loop are served."""
    bus = EventBus(journal=tmp_path, autostart=False)
    bus.subscribe(print, Beat, run_in="thread", durable=True, name="tracker")
    for n in range(20_000):
        bus.publish(Tick(n=n))
    bus.close()
    order: list[str] = []

    async def tracker(event: Beat) -> None:
        order.append("tracker")

    async def other(event: Load) -> None:
        order.append("other")

    with EventBus(journal=tmp_path) as bus:
        bus.subscribe(tracker, Beat, durable=True, name="tracker")
        bus.subscribe(other, Load)
        bus.publish(Load())
        bus.publish(Beat())
        assert bus.flush(30)
    assert order == ["other", "tracker"]


class Receiver:
    """A sink whose receiver comes and goes."""

    hooks = ("on_tick",)
    options: dict[str, Any] = {}
    max_batch = 4

    def __init__(self, fails: int = 0, error: type[Exception] = SinkUnavailable) -> None:
        self.seen: list[Any] = []
        self.fails = fails
        self.error = error

    async def open(self) -> None: ...

    async def write(self, events: Sequence[Any]) -> None:
        if self.fails:
            self.fails -= 1
            raise self.error
        self.seen += events

    async def aclose(self) -> None: ...


def test_G17_a_sink_that_is_unavailable_until_the_end_gets_it_in_the_next_life(tmp_path: Path) -> None:
    down, up = Receiver(fails=1 << 30), Receiver()
    with EventBus(journal=tmp_path) as bus:
        bus.attach(down, durable=True, name="receiver")
        for n in range(30):
            bus.publish(Tick(n=n))
        assert bus.close(0.5).left == {"receiver": 30}
    with EventBus(journal=tmp_path) as bus:
        bus.attach(up, durable=True, name="receiver")
        bus.publish(Tick(n=30))
        assert bus.flush()
    assert not down.seen
    assert numbers(up.seen) == list(range(31))


def test_G17_what_failed_or_timed_out_is_settled_and_not_delivered_again(tmp_path: Path) -> None:
    """Only what nobody came to is missed: a failure is counted, and told, in the life in which it happens."""
    tries: list[int] = []

    async def handle(event: Tick) -> None:
        tries.append(event.n)
        if event.n == 1:
            raise ValueError
        if event.n == 2:
            import anyio

            await anyio.sleep(30)

    with EventBus(journal=tmp_path) as bus:
        bus.subscribe(handle, Tick, durable=True, name="tracker", timeout=0.05, retries=1)
        for n in range(4):
            bus.publish(Tick(n=n))
        assert bus.flush()
        stats = assert_balanced(bus)["tracker"]
    assert (stats.delivered, stats.failed, stats.timed_out) == (2, 1, 1)
    assert tries == [0, 1, 1, 2, 2, 3]
    assert deliver(tmp_path, Tick) == []


def test_G17_on_error_raise_is_owed_for_a_missed_event_too(tmp_path: Path) -> None:
    missed(tmp_path, 1)

    async def handle(event: Tick) -> None:
        raise ValueError("from the past")

    bus = EventBus(journal=tmp_path)
    bus.subscribe(handle, Tick, durable=True, name="tracker", on_error="raise")
    bus.__enter__()
    bus.flush()
    with pytest.raises(ValueError, match="from the past"):
        bus.close()


def test_G17_it_is_not_told_about_itself_in_the_next_life(tmp_path: Path) -> None:
    """Nor is anything lost that it missed of the others."""
    missed(tmp_path, 0)
    bus = EventBus(journal=tmp_path, autostart=False)
    for name in ("tracker", "other"):
        bus.publish(SubscriberErrorEvent(subscriber=name))
    bus.close()
    assert [event.subscriber for event in deliver(tmp_path, SubscriberErrorEvent)] == ["other"]


def test_G17_off_forgets_where_it_was(tmp_path: Path) -> None:
    missed(tmp_path, 5)
    with EventBus(journal=tmp_path) as bus:
        bus.subscribe(print, Beat, run_in="thread", durable=True, name="tracker")
        bus.off("tracker")
        assert bus.flush()
    with EventBus(journal=tmp_path) as bus:
        for n in range(5, 8):
            bus.publish(Tick(n=n))
    assert deliver(tmp_path) == []


def test_G7_segments_stay_until_the_slowest_is_past_them_and_go_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eventbus.journal._SEGMENT_BYTES", 4096)

    def files() -> int:
        return len(list(tmp_path.glob("*.events")))

    fast: list[Any] = []
    slow: list[Any] = []
    free = threading.Event()

    def dawdle(event: Tick) -> None:
        free.wait()
        slow.append(event)

    with EventBus(journal=tmp_path) as bus:
        bus.subscribe(fast.append, Tick, run_in="thread", durable=True, name="fast")
        bus.subscribe(dawdle, Tick, run_in="thread", durable=True, name="slow", maxsize=4)
        for n in range(2000):
            bus.publish(Tick(n=n))
        until(lambda: len(fast) == 2000)
        bus.stats()
        assert files() > 20
        free.set()
        assert bus.flush()
    assert files() == 1
    assert numbers(slow) == numbers(fast) == list(range(2000))
    assert len(list(read_journal(tmp_path))) < 100


def test_G7_segments_go_although_a_durable_subscriber_hears_nothing_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eventbus.journal._SEGMENT_BYTES", 4096)
    seen: list[Any] = []
    with EventBus(journal=tmp_path) as bus:
        bus.subscribe(seen.append, Beat, run_in="thread", durable=True, name="rare")
        bus.subscribe(lambda _: None, Tick, run_in="thread")
        for n in range(1000):
            bus.publish(Tick(n=n))
        assert bus.flush()
    assert len(list(tmp_path.glob("*.events"))) == 1
    assert not seen


def test_G7_segments_stay_for_one_that_never_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eventbus.journal._SEGMENT_BYTES", 4096)
    missed(tmp_path, 1000)
    seen: list[Any] = []
    with EventBus(journal=tmp_path) as bus:
        bus.subscribe(seen.append, Tick, run_in="thread", durable=True, name="another")
        for n in range(1000, 2000):
            bus.publish(Tick(n=n))
        assert bus.flush()
    assert numbers(deliver(tmp_path)) == list(range(2000))


def test_G7_a_journal_without_durable_subscribers_keeps_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eventbus.journal._SEGMENT_BYTES", 4096)
    with EventBus(journal=tmp_path) as bus:
        bus.subscribe(lambda _: None, Tick, run_in="thread", overflow="spill")
        for n in range(1000):
            bus.publish(Tick(n=n))
        assert bus.flush()
    assert numbers(list(read_journal(tmp_path))) == list(range(1000))


def test_G7_a_segment_stays_while_a_plain_spill_waits_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eventbus.journal._SEGMENT_BYTES", 4096)
    free = threading.Event()
    slow: list[Any] = []

    def dawdle(event: Tick) -> None:
        free.wait()
        slow.append(event)

    with EventBus(journal=tmp_path) as bus:
        bus.subscribe(lambda _: None, Tick, run_in="thread", durable=True, name="fast")
        bus.subscribe(dawdle, Tick, run_in="thread", overflow="spill", name="slow", maxsize=4)
        for n in range(1000):
            bus.publish(Tick(n=n))
        until(lambda: bus.stats()["fast"].delivered == 1000)
        for _ in range(3):  # it is tidied up meanwhile
            bus._failures.tell_losses()
        free.set()
        assert bus.flush()
        assert bus.stats()["slow"].dropped == 0
    assert numbers(slow) == list(range(1000))


def test_G17_a_bookmark_that_cannot_be_made_is_told_and_made_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The bus goes on, the other subscribers too; when the disk lets it, it hears all since it was registered."""
    (tmp_path / "subscribers").write_text("in the way")
    seen: list[Any] = []
    others: list[Any] = []
    with EventBus(journal=tmp_path) as bus, caplog.at_level(logging.ERROR):
        bus.publish(Tick(n=-1))
        bus.subscribe(seen.append, Tick, run_in="thread", durable=True, name="tracker")
        bus.subscribe(others.append, Tick, run_in="thread")
        for n in range(5):
            bus.publish(Tick(n=n))
        until(lambda: len(others) == 5)
        until(lambda: "cannot keep the place of subscriber 'tracker'" in caplog.text)
        assert not seen
        (tmp_path / "subscribers").unlink()
        until(lambda: len(seen) == 5)
        assert bus.flush()
        assert_balanced(bus)
    assert numbers(seen) == list(range(5))


def test_G17_an_event_whose_class_has_changed_reaches_it_as_what_it_is(tmp_path: Path) -> None:
    class Spike(Event, hook="on_spike_of_test_durable"):
        norm: float = 0.0

    missed(tmp_path, 0)
    bus = EventBus(journal=tmp_path, autostart=False)
    bus.publish(Spike(norm=2.0))
    bus.publish(Tick(n=7))
    bus.close()

    class Spike(Event, hook="on_spike_of_test_durable"):  # type: ignore[no-redef]
        norm: dict[str, int] = {}

    spike, tick = deliver(tmp_path, "on_spike_of_test_durable", "on_tick")
    assert spike.fields["norm"] == 2.0
    assert tick.n == 7
