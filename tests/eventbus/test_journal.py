"""G17: what was published before a kill is on disk, and durable subscribers go on from where they were."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from eventbus import Event, EventBus, JournalError, Log, SubscriptionError, read_journal


def steps(directory: Path) -> list[int]:
    return [event.step for event in read_journal(directory) if isinstance(event, Log)]


def test_G17_every_event_is_in_the_journal_when_publish_returns(tmp_path: Path) -> None:
    """Also those that nobody hears, as subscribers would see them."""
    bus = EventBus(journal=tmp_path / "j", run="r1", rank=3)
    values = {"loss": 0.5, "nested": {"token": "abc"}}
    bus.publish(Log(step=1, values=values))
    (event,) = read_journal(tmp_path / "j")
    assert event == Log(
        step=1, values={"loss": 0.5, "nested": {"token": "[redacted]"}}, seq=1, time=event.time, run="r1", rank=3
    )
    assert event.time > 0
    bus.close()
    assert steps(tmp_path / "j") == [1]


def test_G17_a_durable_subscriber_goes_on_where_it_was(tmp_path: Path) -> None:
    first = EventBus(journal=tmp_path, autostart=False)
    first.subscribe(print, "on_log", durable=True, name="tracker", run_in="thread")
    for step in range(5):
        first.publish(Log(step=step))
    assert first.close().left == {"tracker": 5}

    seen: list[Event] = []
    with EventBus(journal=tmp_path) as second:
        second.publish(Log(step=5))

        @second.on("on_log", durable=True, name="tracker")
        async def tracker(event: Log) -> None:
            seen.append(event)

        second.publish(Log(step=6))
        assert second.flush()
        assert second.stats()["tracker"].matched == 7
    assert [event.step for event in seen] == list(range(7))  # type: ignore[attr-defined]
    assert [event.seq for event in seen] == sorted({event.seq for event in seen})

    with EventBus(journal=tmp_path) as third:
        third.subscribe(seen.append, "on_log", durable=True, name="tracker", run_in="thread")
        assert third.flush()
    assert len(seen) == 7


def test_G7_spill_loses_nothing_and_keeps_order(tmp_path: Path) -> None:
    seen: list[int] = []
    with EventBus(journal=tmp_path) as bus:

        @bus.on("on_log", overflow="spill", maxsize=8)
        async def slow(event: Log) -> None:
            seen.append(event.step)
            if event.step % 50 == 0:
                await asyncio.sleep(0.001)

        for step in range(2000):
            bus.publish(Log(step=step))
        assert bus.flush()
        stats = bus.stats()[next(iter(bus.stats()))]
    assert seen == list(range(2000))
    assert stats.matched == stats.delivered == 2000


@pytest.mark.parametrize("option", [{"overflow": "spill"}, {"durable": True, "name": "d"}])
def test_G15_what_needs_a_journal_is_refused_without_one(option: dict[str, object]) -> None:
    async def handler(event: Event) -> None: ...

    with pytest.raises(SubscriptionError, match=r"the bus has no journal. Give it one: EventBus\(journal="):
        EventBus().subscribe(handler, **option)


def test_G15_two_buses_cannot_write_to_one_journal(tmp_path: Path) -> None:
    bus = EventBus(journal=tmp_path)
    with pytest.raises(JournalError, match="is in use by process"):
        EventBus(journal=tmp_path)
    bus.close()
    EventBus(journal=tmp_path).close()
