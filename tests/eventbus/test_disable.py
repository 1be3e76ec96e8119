"""G4: `on_error="disable"` switches off a subscriber that fails again and again, and tries it again later."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from eventbus import (
    Event,
    EventBus,
    ExceptionRaised,
    SinkGone,
    SubscriberDisabled,
    SubscriptionError,
    Teardown,
    TrainEnd,
)
from eventbus.cursor import Cursor
from eventbus.subscription import InlineHook, Queued
from tests.eventbus.clock import Clock
from tests.eventbus.samples import Beat, Tick, assert_balanced, is_balanced
from tests.eventbus.scripts import run
from tests.eventbus.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from eventbus import SubscriberStats, Subscription

KINDS = ["inline", "async", "thread", "sink"]
QUEUED = KINDS[1:]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch, "eventbus.breaker")


class Subject:
    """A subscriber of any kind, called "bad", that fails while it is `broken`."""

    max_batch = 100

    def __init__(self, bus: EventBus, kind: str, *hooks: type[Event], **options: Any) -> None:
        self.options: dict[str, Any] = {}
        self.broken = True
        self.calls: list[Event] = []
        self.got: list[Event] = []
        options = {"on_error": "disable", "disable_after": 3, "name": "bad"} | options
        self.bus = bus
        self.hooks = [hook.hook for hook in hooks]
        self.subscription: Subscription = self._subscribe(kind, options)

    def _subscribe(self, kind: str, options: dict[str, Any]) -> Any:
        if kind == "sink":
            return self.bus.attach(self, **options)
        handle, more = {
            "inline": (self.handle, {}), "thread": (self.handle, {"run_in": "thread"}), "async": (self.ahandle, {}),
        }[kind]  # fmt: skip
        return self.bus.subscribe(handle, *self.hooks, **options, **more)

    def handle(self, event: Event) -> None:
        self.calls.append(event)
        if self.broken:
            raise ValueError("broken")
        self.got.append(event)

    async def ahandle(self, event: Event) -> None:
        self.handle(event)

    async def open(self) -> None: ...

    async def write(self, events: Sequence[Event]) -> None:
        self.calls += events
        if self.broken:
            raise ValueError("broken")
        self.got += events

    async def aclose(self) -> None: ...

    def publish(self, *events: Event) -> SubscriberStats:
        """One after the other, each settled before the next."""
        for event in events:
            self.bus.publish(event)
            assert self.bus.flush()
        return self.stats

    @property
    def stats(self) -> SubscriberStats:
        return assert_balanced(self.bus)["bad"]

    @property
    def state(self) -> str:
        return self.bus.health()["bad"].state


def ticks(count: int, start: int = 0) -> list[Tick]:
    return [Tick(n=start + n) for n in range(count)]


def numbers(events: Sequence[Event]) -> list[int]:
    return [event.n for event in events if isinstance(event, Tick | Beat)]


def told_of(bus: EventBus) -> list[SubscriberDisabled]:
    """What the others are told."""
    told: list[SubscriberDisabled] = []

    async def listen(event: SubscriberDisabled) -> None:
        told.append(event)

    bus.subscribe(listen, SubscriberDisabled, name="listener")
    return told


def messages(caplog: pytest.LogCaptureFixture, part: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if part in record.getMessage()]


@pytest.mark.parametrize("kind", KINDS)
def test_G4_after_failures_in_a_row_a_subscriber_is_disabled_and_the_others_are_told(
    kind: str, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """What it hears from then on is matched and dropped with the reason "disabled"; said once, with the last error."""
    with EventBus() as bus:
        told = told_of(bus)
        subject = Subject(bus, kind)
        stats = subject.publish(*ticks(10))
        assert subject.state == "disabled"
        assert numbers(subject.calls) == [0, 1, 2]
        assert stats.failed == 3
        assert stats.dropped == stats.dropped_by["disabled"] == stats.matched - 3 >= 7
        until(lambda: told)
        assert [(event.subscriber, event.count) for event in told] == [("bad", 3)]
        assert told[0].reason == "3 failures in a row, the last: ValueError: broken"
        assert not any(isinstance(event, SubscriberDisabled) for event in subject.calls), "never told of itself"
    (message,) = messages(caplog, "is disabled after")
    assert "'bad' is disabled after 3 failures in a row, the last: ValueError: broken" in message
    assert [r.levelno for r in caplog.records if "is disabled after" in r.getMessage()] == [logging.ERROR]


@pytest.mark.parametrize("kind", KINDS)
def test_G4_a_delivered_event_resets_the_count(kind: str, clock: Clock) -> None:
    with EventBus() as bus:
        subject = Subject(bus, kind)
        for _ in range(3):
            subject.broken = True
            subject.publish(*ticks(2))
            subject.broken = False
            subject.publish(*ticks(1))
        assert subject.state == "ok"
        assert subject.stats.dropped == 0


@pytest.mark.parametrize("kind", KINDS)
def test_G4_after_retry_after_the_next_event_is_the_trial_and_success_switches_it_on(
    kind: str, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    with EventBus() as bus:
        subject = Subject(bus, kind, retry_after=30.0)
        subject.publish(*ticks(3))
        subject.broken = False
        clock.move(29.0)
        assert subject.publish(*ticks(2, 3)).delivered == 0
        clock.move(1.0)
        assert subject.state == "disabled", "until it has shown that it works"
        subject.publish(*ticks(3, 5))
        assert numbers(subject.got) == [5, 6, 7]
        assert subject.state == "ok"
        until(lambda: messages(caplog, "'bad' works again"))
        subject.broken = True
        subject.publish(*ticks(2, 8))
        assert subject.state == "failing", "it counts from 0 again"
    assert len(messages(caplog, "'bad' works again")) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_G4_a_trial_that_fails_disables_it_again_and_is_not_announced_again(kind: str, clock: Clock) -> None:
    with EventBus() as bus:
        told = told_of(bus)
        subject = Subject(bus, kind, retry_after=30.0)
        subject.publish(*ticks(3))
        clock.move(30.0)
        subject.publish(*ticks(3, 3))
        clock.move(29.0)
        subject.publish(*ticks(2, 6))
        assert numbers(subject.calls) == [0, 1, 2, 3]
        clock.move(1.0)
        subject.publish(*ticks(2, 8))
        assert numbers(subject.calls) == [0, 1, 2, 3, 8]
        assert subject.stats.failed == 5
        until(lambda: told)
    assert len(told) == 1


@pytest.mark.parametrize("kind", ["async", "thread"])
def test_G4_timeouts_count_as_failures(kind: str, clock: Clock) -> None:
    release = threading.Event()

    async def sleep(event: Tick) -> None:
        await anyio.sleep(30)

    def block(event: Tick) -> None:
        release.wait(30)

    with EventBus() as bus:
        options = {"run_in": "thread"} if kind == "thread" else {}
        handler: Callable[[Tick], Any] = block if kind == "thread" else sleep
        bus.subscribe(handler, Tick, name="bad", timeout=0.02, on_error="disable", disable_after=2, **options)
        for tick in ticks(4):
            bus.publish(tick)
            assert bus.flush()
        stats = assert_balanced(bus)["bad"]
        assert (stats.timed_out, stats.dropped_by) == (2, {"disabled": 2})
        assert "timeout of 0.02 s" in bus.health()["bad"].why
        release.set()


@pytest.mark.parametrize("overflow", ["drop_oldest", "drop_newest", "latest", "block"])
@pytest.mark.parametrize("kind", QUEUED)
def test_G4_what_waits_is_dropped_except_the_end_of_the_run(kind: str, overflow: str, clock: Clock) -> None:
    """A disabled tracker is still tried with on_exception, on_train_end and teardown (D11)."""
    bus = EventBus(autostart=False)
    subject = Subject(bus, kind, disable_after=1, overflow=overflow, max_bytes=1 << 30)
    subject.max_batch = 1
    for event in [Beat(n=0), Beat(n=1), Tick(n=2), ExceptionRaised(), Beat(n=3), TrainEnd(), Beat(n=4), Teardown()]:
        bus.publish(event)
    with bus:
        assert bus.flush()
        stats = subject.stats
        called = [type(event) for event in subject.calls]
        if overflow == "latest":
            assert called == [Tick, ExceptionRaised, TrainEnd, Teardown]
            assert stats.dropped_by == {"coalesced": 3, "disabled": 1}
        else:
            assert called == [Beat, ExceptionRaised, TrainEnd, Teardown]
            assert stats.dropped_by == {"disabled": 4}
        assert stats.failed == 4


@pytest.mark.parametrize("last", [ExceptionRaised, TrainEnd, Teardown])
@pytest.mark.parametrize("kind", KINDS)
def test_G4_a_disabled_subscriber_still_gets_the_end_of_the_run(kind: str, last: type[Event], clock: Clock) -> None:
    """D11: a tracker that was down for a while must not show the run as running for ever. It then works again."""
    with EventBus() as bus:
        subject = Subject(bus, kind)
        subject.publish(*ticks(4))
        subject.publish(last())
        assert [type(event) for event in subject.calls] == [Tick, Tick, Tick, last]
        assert subject.publish(*ticks(1)).dropped_by["disabled"] >= 2, "it failed, and stays off"
        subject.broken = False
        subject.publish(last(), *ticks(1, 7))
        assert [type(event) for event in subject.got] == [last, Tick]
        assert subject.state == "ok"


async def test_G4_disabling_works_on_every_host(anyio_backend: Any, clock: Clock) -> None:
    async with EventBus() as bus:
        subjects = [Subject(bus, kind, Tick, name=kind) for kind in KINDS]
        for tick in ticks(5):
            bus.publish(tick)
            assert await bus.aflush()
        assert {health.state for health in bus.health().values()} == {"disabled"}
        for subject in subjects:
            assert numbers(subject.calls) == [0, 1, 2]
            subject.broken = False
        clock.move(30.0)
        for tick in ticks(2, 5):
            bus.publish(tick)
            assert await bus.aflush()
        assert {health.state for health in bus.health().values()} == {"ok"}
        assert all(numbers(subject.got) == [5, 6] for subject in subjects)
        assert_balanced(bus)


def test_G4_the_trial_of_a_batching_sink_costs_one_event(clock: Clock) -> None:
    bus = EventBus(autostart=False)
    subject = Subject(bus, "sink", disable_after=2)
    for tick in ticks(4):
        bus.publish(tick)
    with bus:
        assert bus.flush()
        assert numbers(subject.calls) == [0, 1, 2, 3]
        assert subject.state == "failing", "one write is one failure, however many events it has"
        subject.publish(Tick(n=4))
        assert subject.state == "disabled"
        clock.move(30.0)
        gate = threading.Event()
        bus.subscribe(lambda event: gate.wait(10), Beat, run_in="thread", name="other")
        for tick in ticks(5, 5):
            bus.publish(tick)
        assert bus.flush()
        assert numbers(subject.calls) == [0, 1, 2, 3, 4, 5]
        assert subject.stats.dropped_by == {"disabled": subject.stats.dropped}
        gate.set()


def test_G4_events_that_come_while_the_trial_runs_are_delivered_after_it(clock: Clock) -> None:
    """Half-open keeps what comes, since it may be about to work."""
    trial, goes_on = threading.Event(), threading.Event()

    with EventBus() as bus:
        subject = Subject(bus, "thread", disable_after=1)
        subject.publish(*ticks(1))
        clock.move(30.0)
        real, subject.broken = subject.got.append, False

        class Slow(list[Event]):
            def append(self, event: Event) -> None:
                trial.set()
                assert goes_on.wait(10)
                real(event)

        subject.got, got = Slow(), subject.got
        bus.publish(Tick(n=1))
        assert trial.wait(10)
        for tick in ticks(3, 2):
            bus.publish(tick)
        assert subject.stats.pending >= 4
        goes_on.set()
        assert bus.flush()
        assert numbers(got) == [1, 2, 3, 4]


def test_G4_of_several_publishing_threads_one_tries_a_disabled_hook(clock: Clock) -> None:
    trial, goes_on = threading.Event(), threading.Event()
    calls: list[int] = []

    def hook(event: Tick) -> None:
        calls.append(event.n)
        if event.n:
            trial.set()
            assert goes_on.wait(10)
        raise ValueError

    bus = EventBus()
    bus.subscribe(hook, Tick, name="bad", on_error="disable", disable_after=1)
    bus.publish(Tick())
    clock.move(30.0)
    other = threading.Thread(target=bus.publish, args=(Tick(n=1),))
    other.start()
    assert trial.wait(10)
    bus.publish(Tick(n=2))
    stats = assert_balanced(bus)["bad"]
    assert (stats.pending, stats.dropped_by) == (1, {"disabled": 1})
    goes_on.set()
    other.join()
    assert calls == [0, 1]
    assert assert_balanced(bus)["bad"].failed == 2


def test_G4_a_hook_is_tried_with_the_first_event_that_is_for_it(clock: Clock) -> None:
    """Events that its conditions turn down are neither counted nor the trial."""
    bus = EventBus()
    subject = Subject(bus, "inline", disable_after=1, when=lambda event: getattr(event, "n", 0) % 2 == 0)
    for tick in ticks(6):
        bus.publish(tick)
    assert (subject.stats.failed, subject.stats.dropped_by) == (1, {"disabled": 2})
    clock.move(30.0)
    subject.broken = False
    for tick in ticks(3, 7):
        bus.publish(tick)
    assert numbers(subject.got) == [8]


def test_G4_an_interrupted_trial_of_a_hook_is_over(clock: Clock) -> None:
    """A Ctrl-C in it goes through, counts as a failure, and leaves the next trial to come."""
    error: BaseException = ValueError()

    def hook(event: Tick) -> None:
        raise error

    bus = EventBus()
    bus.subscribe(hook, Tick, name="bad", on_error="disable", disable_after=1)
    bus.publish(Tick())
    clock.move(30.0)
    error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        bus.publish(Tick())
    bus.publish(Tick())
    clock.move(30.0)
    error = ValueError()
    bus.publish(Tick())
    stats = assert_balanced(bus)["bad"]
    assert (stats.failed, stats.dropped_by) == (3, {"disabled": 1})


@pytest.mark.parametrize("kind", KINDS)
def test_G4_a_when_that_raises_disables_too(kind: str, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    """Asked on, so that `every` and the like keep their step, it only costs drops from then on."""

    def when(event: Event) -> bool:
        raise ValueError("no idea")

    with EventBus() as bus:
        told = told_of(bus)
        subject = Subject(bus, kind, when=when)
        stats = subject.publish(*ticks(6))
        assert not subject.calls
        assert stats.failed == 3
        assert stats.dropped_by["disabled"] >= 3
        until(lambda: told)
        assert bus.health()["bad"].why == "3 failures in a row, the last: ValueError: no idea"


def test_G4_a_sink_whose_receiver_is_gone_is_closed_and_not_disabled(clock: Clock) -> None:
    """`SinkGone` keeps its meaning."""

    class Gone(Subject):
        async def write(self, events: Sequence[Event]) -> None:
            raise SinkGone("410")

    with EventBus() as bus:
        told = told_of(bus)
        subject = Gone(bus, "sink")
        bus.publish(Tick())
        until(lambda: subject.subscription.is_closed)
        until(lambda: told)
        assert "bad" not in bus.health()


def test_G4_subscribers_that_fail_at_being_told_do_not_go_round(clock: Clock) -> None:
    """Who is disabled for failing at on_subscriber_disabled is in the log; an event about it would go on for ever."""
    with EventBus() as bus:
        for n in range(5):
            Subject(bus, "async", SubscriberDisabled if n else Tick, name=f"s{n}", disable_after=1)
        told = told_of(bus)
        bus.publish(Tick())
        until(lambda: sum(health.state == "disabled" for health in bus.health().values()) == 5)
        assert bus.flush()
        assert [event.subscriber for event in told] == ["s0"]


@pytest.mark.parametrize("kind", KINDS)
def test_G6_the_counts_balance_at_every_instant_while_it_comes_and_goes(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four threads publish to one that fails half of the time and is tried again at once."""
    turns = iter(range(1_000_000))

    class Fickle(Subject):
        def handle(self, event: Event) -> None:
            if next(turns) % 7 < 4:
                raise ValueError

        async def write(self, events: Sequence[Event]) -> None:
            self.handle(events[0])

    logging.getLogger("eventbus").setLevel(logging.CRITICAL)
    try:
        with EventBus() as bus:
            subject = Fickle(bus, kind, disable_after=2, retry_after=1e-4)
            threads = [threading.Thread(target=lambda: [bus.publish(tick) for tick in ticks(1500)]) for _ in range(4)]
            for thread in threads:
                thread.start()
            while any(thread.is_alive() for thread in threads):
                assert is_balanced(subject.subscription.read())
            assert bus.flush()
            stats = subject.stats
            assert stats.matched >= 6000
            assert stats.pending == 0
            assert stats.dropped_by["disabled"] > 0
            assert stats.delivered > 0
    finally:
        logging.getLogger("eventbus").setLevel(logging.NOTSET)


def test_G4_who_does_not_ask_for_it_pays_nothing() -> None:
    """Only a subscriber that may be disabled has a cursor or a hook that asks a breaker."""
    bus = EventBus(autostart=False)

    async def handler(event: Event) -> None: ...

    def hook(event: Event) -> None: ...

    queued, inline = bus.subscribe(handler), bus.subscribe(hook)
    assert isinstance(queued, Queued)
    assert type(queued.cursor) is Cursor
    assert type(inline) is InlineHook


@pytest.mark.parametrize("option", ["disable_after", "retry_after"])
@pytest.mark.parametrize("on_error", [None, "isolate", "raise"])
def test_G15_its_options_without_it_are_an_error(option: str, on_error: str | None) -> None:
    given: dict[str, Any] = {option: 3} | ({} if on_error is None else {"on_error": on_error})
    with pytest.raises(SubscriptionError, match=rf"{option}= means nothing to it.*on_error=\"disable\""):
        EventBus().subscribe(lambda event: None, Tick, **given)


@pytest.mark.parametrize(
    ("option", "value"),
    [("disable_after", 0), ("disable_after", 2.5), ("disable_after", True), ("retry_after", 0), ("retry_after", -1),
     ("retry_after", float("inf")), ("retry_after", float("nan")), ("retry_after", "30")],
)  # fmt: skip
def test_G15_its_options_out_of_range_are_an_error(option: str, value: object) -> None:
    with pytest.raises(SubscriptionError, match=rf"got {option}=.*{option} is "):
        EventBus().subscribe(lambda event: None, Tick, on_error="disable", **{option: value})


def test_G4_what_a_disabled_hook_missed_is_told_at_the_end_of_the_process() -> None:
    """Also on a bus without a loop, which nothing else keeps track of."""
    ended = run("""
        bus = EventBus()

        def hook(event):
            raise ValueError("broken")

        bus.subscribe(hook, Teardown, TrainStart, name="hook", on_error="disable", disable_after=1)
        for _ in range(9):
            bus.publish(TrainStart())
    """)
    assert ended.code == 0, ended.err
    assert "'hook' is disabled: 1 of its events were dropped (1 disabled), 1 so far." in ended.err
    assert "'hook' is disabled: 7 of its events were dropped (7 disabled), 8 so far." in ended.err


@pytest.mark.parametrize("options", [{"overflow": "spill", "maxsize": 3}, {"durable": True, "maxsize": 3}])
@pytest.mark.parametrize("kind", QUEUED)
def test_G7_a_disabled_subscriber_that_loses_nothing_keeps_what_it_misses(
    kind: str, options: dict[str, Any], clock: Clock, tmp_path: Path
) -> None:
    """With a journal its backlog stays there, in order; nobody waits for it until the trial succeeds."""
    with EventBus(journal=tmp_path) as bus:
        subject = Subject(bus, kind, Tick, Beat, disable_after=1, **options)
        for tick in ticks(10):
            bus.publish(tick)
        assert bus.flush()
        assert subject.state == "disabled"
        called = len(subject.calls)
        assert subject.stats.pending == 10 - called
        clock.move(30.0)
        subject.publish(Beat(n=10))
        assert len(subject.calls) == called + 1
        subject.broken = False
        clock.move(30.0)
        subject.publish(Beat(n=11))
        assert numbers(subject.got) == list(range(called + 1, 12))
        assert subject.stats.dropped == 0
        assert subject.state == "ok"


@pytest.mark.parametrize("kind", QUEUED)
def test_G7_what_a_disabled_subscriber_keeps_is_tried_at_the_end_of_the_run_and_of_the_bus(
    kind: str, clock: Clock, tmp_path: Path
) -> None:
    """The end of the run cannot overtake what waits: the oldest is the trial. Its failure does not hold up a close."""
    with EventBus(journal=tmp_path) as bus:
        subject = Subject(bus, kind, disable_after=1, overflow="spill")
        subject.max_batch = 1
        subject.publish(*ticks(3))
        subject.publish(TrainEnd())
        assert numbers(subject.calls) == [0, 1]
        report = bus.close(5.0)
        assert numbers(subject.calls) == [0, 1, 2]
        assert report.left["bad"] >= 1
        assert_balanced(bus)
