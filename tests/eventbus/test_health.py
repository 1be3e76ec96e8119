"""G4: `bus.health()` and `report()` say who is not well, since when, and why; and who holds up whom."""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from eventbus import Event, EventBus, SinkUnavailable, SubscriberHealth
from eventbus.delivery import AsyncDelivery
from eventbus.sinks import SinkDelivery
from eventbus.threads import ThreadDelivery
from tests.eventbus.clock import Clock
from tests.eventbus.samples import Beat, Tick
from tests.eventbus.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

SECRET = "https://user:T0KEN@host/path?key=T0KEN"
DELIVERIES = {"async": AsyncDelivery, "thread": ThreadDelivery, "sink": SinkDelivery}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch, "eventbus.breaker", "eventbus.pulse", "eventbus.health")


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    opened = threading.Event()
    yield opened
    opened.set()


class Sink:
    """One that can be made to fail."""

    hooks = ("on_tick",)

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.open_error: Exception | None = None
        self.write_error: Exception | None = None

    async def open(self) -> None:
        if self.open_error is not None:
            raise self.open_error

    async def write(self, events: Sequence[Event]) -> None:
        if self.write_error is not None:
            raise self.write_error

    async def aclose(self) -> None: ...


def add(bus: EventBus, kind: str, errors: list[Exception]) -> None:
    """Subscribe "it", which raises the errors while there are any."""

    def handle(event: Tick) -> None:
        if errors:
            raise errors[0]

    async def ahandle(event: Tick) -> None:
        handle(event)

    class Raising(Sink):
        async def write(self, events: Sequence[Event]) -> None:
            if errors:
                raise errors[0]

    if kind == "sink":
        bus.attach(Raising(), name="it")
    else:
        options = {"run_in": "thread"} if kind == "thread" else {}
        bus.subscribe(ahandle if kind == "async" else handle, Tick, name="it", **options)


def health(bus: EventBus, name: str = "it") -> SubscriberHealth:
    return bus.health()[name]


@pytest.mark.parametrize("kind", ["inline", "async", "thread", "sink"])
def test_G4_one_that_fails_is_failing_until_it_delivers(kind: str) -> None:
    """Since the first of the failures in a row, with the last error."""
    errors: list[Exception] = []
    started = time.time()
    with EventBus() as bus:
        add(bus, kind, errors)

        def publish() -> SubscriberHealth:
            bus.publish(Tick())
            assert bus.flush()
            return health(bus)

        found = publish()
        assert (found.state, found.why) == ("ok", "")
        assert started <= found.since <= time.time()
        errors.append(ValueError("first"))
        first = publish()
        assert (first.state, first.why) == ("failing", "ValueError: first")
        errors[0] = KeyError("second")
        second = publish()
        assert (second.state, second.since, second.why) == ("failing", first.since, "KeyError: 'second'")
        errors.clear()
        found = publish()
        assert (found.state, found.why) == ("ok", "")
        assert found.since >= second.since
        errors.append(ValueError("third"))
        assert publish().since >= found.since, "failing anew"


def test_G4_a_sink_that_cannot_open_is_failing_with_the_reason() -> None:
    """C2: training starts all the same, and one can see what is wrong before any event is lost."""
    sink = Sink()
    sink.open_error = OSError("no such folder")
    with EventBus() as bus:
        bus.attach(sink, name="it")
        bus.publish(Tick())
        until(lambda: health(bus).state == "failing")
        assert health(bus).why == "OSError: no such folder"
        sink.open_error = None
        assert bus.close(5.0).ok
    assert health(bus).state == "ok"


def test_G4_a_sink_that_opens_at_last_is_ok_without_an_event() -> None:
    sink = Sink()
    sink.open_error = OSError("not yet")
    with EventBus() as bus:
        bus.attach(sink, name="it")
        until(lambda: health(bus).state == "failing")
        sink.open_error = None
        until(lambda: health(bus).state == "ok")


def test_G4_a_sink_that_is_unavailable_is_failing_with_the_reason_and_keeps_its_events() -> None:
    sink = Sink()
    sink.write_error = SinkUnavailable("server down")
    with EventBus() as bus:
        bus.attach(sink, name="it")
        bus.publish(Tick())
        until(lambda: health(bus).state == "failing")
        assert health(bus).why == "SinkUnavailable: server down"
        assert bus.stats()["it"].pending == 1
        sink.write_error = None
        assert bus.close(5.0).ok


@pytest.mark.parametrize("kind", ["inline", "async", "sink"])
def test_G16_health_and_report_hide_credentials(kind: str) -> None:
    with EventBus() as bus:
        add(bus, kind, [OSError(f"cannot reach {SECRET}")])
        bus.publish(Tick())
        assert bus.flush()
        told = repr(bus.health()) + bus.report() + repr(bus.describe())
    assert "cannot reach" in told
    assert "T0KEN" not in told


def test_G4_who_holds_the_loop_is_stalled_and_so_are_those_behind_it_with_its_name(
    clock: Clock, gate: threading.Event
) -> None:
    """Asked from another thread while nothing on the loop can answer; after twice the timeout and 5 s."""
    held = threading.Event()

    async def culprit(event: Tick) -> None:
        held.set()
        gate.wait(30)

    async def victim(event: Tick) -> None: ...

    def bystander(event: Tick) -> None: ...

    bus = EventBus()
    bus.subscribe(culprit, Tick, name="culprit")
    bus.subscribe(victim, Tick, name="victim")
    bus.subscribe(bystander, Tick, name="bystander", run_in="thread")
    with bus:
        bus.publish(Tick())
        assert held.wait(10)
        until(lambda: bus.stats()["bystander"].delivered)
        clock.move(24.0)
        assert {found.state for found in bus.health().values()} == {"ok"}
        clock.move(2.0)
        found = bus.health()
        assert {name: h.state for name, h in found.items()} == {
            "culprit": "stalled", "victim": "stalled", "bystander": "ok",
        }  # fmt: skip
        assert "it holds the bus loop without awaiting" in found["culprit"].why
        assert "'culprit' holds the bus loop without awaiting" in found["victim"].why
        assert "1 events wait, and none was settled for 26 s" in found["victim"].why
        (line,) = [line for line in bus.report().splitlines() if line.startswith("Subscriber 'victim' is stalled")]
        assert "'culprit' holds the bus loop" in line
        gate.set()
        assert bus.flush()
        assert {found.state for found in bus.health().values()} == {"ok"}


def test_G4_retries_and_a_sinks_pauses_are_no_stall(clock: Clock, gate: threading.Event) -> None:
    """What the limits allow is not called a stall."""
    bus = EventBus(autostart=False)

    async def handler(event: Tick) -> None: ...

    bus.subscribe(handler, Tick, name="tries", retries=2, timeout=1.0)
    bus.attach(Sink(timeout=1.0), name="sink")
    bus.publish(Tick())
    bus.stats()
    clock.move(20.0)
    assert {found.state for found in bus.health().values()} == {"ok"}
    clock.move(2.0)
    assert [health(bus, name).state for name in ("tries", "sink")] == ["stalled", "ok"]
    clock.move(16.0)
    found = health(bus, "sink")
    assert found.state == "stalled"
    assert found.why.endswith("; the bus is not started")
    bus.close()
    assert {found.state for found in bus.health().values()} == {"ok"}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("kind", DELIVERIES)
def test_G4_one_whose_worker_is_dead_is_not_ok(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """K48: whatever killed it, and although nothing waits yet. Health is of the consumer, not of what feeds it."""

    def die(self: Any, *_: Any) -> Any:
        raise RuntimeError("out of order")

    monkeypatch.setattr(DELIVERIES[kind], "_wait" if kind == "thread" else "_serve", die)
    with EventBus() as bus:
        add(bus, kind, [])
        until(lambda: health(bus).state == "stalled")
        assert health(bus).why == "its worker has ended: RuntimeError: out of order"
        assert "'it' is stalled" in bus.report()
        bus.close(0.1)


async def test_G4_one_whose_worker_is_dead_is_not_ok_on_any_host(
    anyio_backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def die(self: Any, mine: int) -> bool:
        raise RuntimeError("out of order")

    monkeypatch.setattr(AsyncDelivery, "_serve", die)
    async with EventBus() as bus:
        add(bus, "async", [])
        import anyio

        with anyio.fail_after(10):
            while health(bus).state != "stalled":
                await anyio.sleep(0.002)
        await bus.aclose(0.1)


def test_G4_a_slow_one_that_gets_on_is_ok_however_old_its_events_are(clock: Clock) -> None:
    """A backlog is no stall."""
    turns = threading.Semaphore(0)

    with EventBus() as bus:
        bus.subscribe(lambda event: turns.acquire(timeout=10), Tick, name="it", run_in="thread", timeout=10.0)
        for _ in range(6):
            bus.publish(Tick())
        for n in range(5):
            clock.move(24.0)
            turns.release()
            until(lambda n=n: bus.stats()["it"].delivered == n + 1)  # type: ignore[misc]
            assert health(bus).state == "ok"
        clock.move(26.0)
        assert health(bus).state == "stalled"
        turns.release()
        assert bus.flush()
        assert health(bus).state == "ok"


def test_G4_an_idle_one_is_ok_for_ever(clock: Clock) -> None:
    with EventBus() as bus:
        add(bus, "async", [])
        bus.publish(Tick())
        assert bus.flush()
        clock.move(1e6)
        assert health(bus).state == "ok"


def test_G4_an_event_from_long_ago_is_no_stall(clock: Clock, gate: threading.Event) -> None:
    """Replayed events bring their own times; that of the subscriber begins when it was last seen idle."""
    with EventBus() as bus:
        bus.subscribe(lambda event: gate.wait(30), Tick, name="it", run_in="thread", timeout=10.0)
        clock.move(1e6)
        assert health(bus).state == "ok"
        bus.publish(Tick(time=1.0))
        assert bus.stats()["it"].pending == 1
        clock.move(24.0)
        assert health(bus).state == "ok"
        clock.move(2.0)
        assert health(bus).state == "stalled"
        gate.set()


def test_G13_health_lists_what_is_open() -> None:
    bus = EventBus()
    subscription = bus.subscribe(lambda event: None, Tick, name="it")
    assert list(bus.health()) == ["it"]
    subscription.close()
    assert bus.health() == {}


def test_G4_health_can_be_asked_by_a_handler_and_while_others_come_and_go() -> None:
    found: list[dict[str, SubscriberHealth]] = []

    with EventBus() as bus:

        async def asks(event: Tick) -> None:
            found.append(bus.health())

        bus.subscribe(asks, Tick)

        def come_and_go() -> None:
            for _ in range(100):
                bus.subscribe(lambda event: None, Tick, run_in="thread").close()

        threads = [threading.Thread(target=come_and_go) for _ in range(2)]
        for thread in threads:
            thread.start()
        for _ in range(100):
            bus.publish(Tick())
            bus.health()
        for thread in threads:
            thread.join()
        assert bus.flush()
    assert len(found) == 100


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_G11_in_a_forked_child_nothing_claims_to_be_ok() -> None:
    with EventBus() as bus:
        add(bus, "async", [])
        bus.publish(Tick())
        assert bus.flush()
        child = os.fork()
        if not child:
            found = health(bus)
            os._exit(0 if found.state == "stalled" and "fork" in found.why else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert health(bus).state == "ok"


def test_describe_and_the_report_show_the_state() -> None:
    bus = EventBus()
    add(bus, "inline", [ValueError("broken")])
    bus.publish(Tick())
    assert [info.state for info in bus.describe()] == ["failing"]
    head, line, *_, remark = bus.report().splitlines()
    assert head.split()[2] == "state"
    assert line.split()[:3] == ["it", "inline", "failing"]
    assert remark.startswith("Subscriber 'it' is failing since ")
    assert remark.endswith(": ValueError: broken.")


def test_A8_the_report_names_the_slowest_inline_hook_and_what_to_do() -> None:
    """A8, A10: training is slow, and the culprit has a name."""
    bus = EventBus()

    def slow(event: Tick) -> None:
        time.sleep(0.06)

    bus.subscribe(slow, Tick, name="slow")
    bus.subscribe(lambda event: None, Tick, name="quick")
    bus.publish(Tick())
    (remark,) = [line for line in bus.report().splitlines() if "slowest" in line]
    assert "'slow': training waited for it" in remark
    assert 'run_in="thread"' in remark


def test_A10_the_report_shows_what_each_subscriber_costs_in_all() -> None:
    bus = EventBus()
    bus.subscribe(lambda event: time.sleep(0.01), Tick, name="many")
    for _ in range(10):
        bus.publish(Tick())
    head, line = bus.report().splitlines()[:2]
    assert "total s" in head
    assert float(line.split()[9]) >= 0.1


def test_G4_the_report_names_a_sink_that_holds_the_loop() -> None:
    class Blocking(Sink):
        async def write(self, events: Sequence[Event]) -> None:
            time.sleep(0.06)

    with EventBus() as bus:
        bus.attach(Blocking(), name="blocking")
        bus.publish(Tick())
        assert bus.flush()
        until(lambda: "held longest" in bus.report())
        (remark,) = [line for line in bus.report().splitlines() if "held longest" in line]
    assert "'blocking'" in remark
    assert "should await what they wait for" in remark


def test_a_quiet_report_has_no_remarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eventbus.health._HOLD_S", 10.0)  # this machine may be busy
    bus = EventBus()
    bus.subscribe(lambda event: None, Beat, name="it")
    bus.publish(Beat())
    assert len(bus.report().splitlines()) == 2
