"""G4: what one subscriber does wrong affects that subscriber alone."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
import time
from typing import TYPE_CHECKING, Any, NoReturn

import anyio
import pytest

from eventbus import Event, EventBus, SubscriberErrorEvent
from tests.eventbus.processes import run_program
from tests.eventbus.samples import Beat, Tick, assert_balanced
from tests.eventbus.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

EVENTS = 20


class UnspeakableError(Exception):
    """An error that cannot even be printed."""

    def __str__(self) -> str:
        raise RuntimeError("no words")

    __repr__ = __str__


class Fatal(BaseException):
    """No `Exception`, and nothing anybody expects."""


FAULTS = {
    "Exception": lambda: ValueError("broken"),
    "unspeakable": UnspeakableError,
    "StopIteration": StopIteration,
    "StopAsyncIteration": StopAsyncIteration,
    "RecursionError": RecursionError,
    "MemoryError": MemoryError,
    "TimeoutError": TimeoutError,
    "SystemExit": lambda: SystemExit(3),
    "GeneratorExit": GeneratorExit,
    "CancelledError": asyncio.CancelledError,
    "BaseException": Fatal,
    "group": lambda: BaseExceptionGroup("several", [SystemExit(3), ValueError("broken")]),
}
FAULT = pytest.mark.parametrize("fault", FAULTS)
ORDINARY = {"Exception", "unspeakable", "RecursionError", "MemoryError", "TimeoutError"}


def throw(fault: str) -> NoReturn:
    error = FAULTS[fault]()
    raise error


class Failing:
    """A sink whose every write fails."""

    hooks = ("on_tick",)
    options: dict[str, Any] = {}

    def __init__(self, error: Callable[[], BaseException]) -> None:
        self._error = error

    async def open(self) -> None: ...

    async def write(self, events: Sequence[Event]) -> None:
        raise self._error()

    async def aclose(self) -> None: ...


def add_failing(bus: EventBus, kind: str, error: Callable[[], BaseException]) -> None:
    """Subscribe something of that kind that raises on every event, as "bad"."""

    def fail(event: Tick) -> None:
        raise error()

    async def fail_later(event: Tick) -> None:
        if event.n % 2:
            await anyio.sleep(0)
        raise error()

    if kind == "sink":
        bus.attach(Failing(error), name="bad")
    elif kind == "thread":
        bus.subscribe(fail, Tick, run_in="thread", name="bad")
    else:
        bus.subscribe(fail_later, Tick, name="bad")


@FAULT
@pytest.mark.parametrize("kind", ["async", "thread", "sink"])
def test_G4_a_subscriber_that_raises_on_every_event_fails_alone(
    kind: str, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It gets every event and fails on each; the others, the loop and the publisher notice nothing."""
    received: list[int] = []
    told: list[SubscriberErrorEvent] = []

    async def good(event: Tick) -> None:
        received.append(event.n)

    async def listen(event: SubscriberErrorEvent) -> None:
        told.append(event)

    with EventBus() as bus:
        add_failing(bus, kind, FAULTS[fault])
        bus.subscribe(good, Tick)
        bus.subscribe(listen, SubscriberErrorEvent)
        for n in range(EVENTS):
            bus.publish(Tick(n=n))
        assert bus.flush()
        assert bus.flush()  # once more for what the bus itself published meanwhile
        stats = assert_balanced(bus)
    assert received == list(range(EVENTS))
    assert (stats["bad"].matched, stats["bad"].failed) == (EVENTS, EVENTS)
    assert [(event.subscriber, event.failed_hook) for event in told] == [("bad", "on_tick")]
    told = [record for record in caplog.records if "Subscriber 'bad' failed" in record.getMessage()]
    assert [(record.levelno, record.exc_info is not None) for record in told] == [(logging.ERROR, True)]
    caplog.clear()


class Faulty(Failing):
    """A sink of somebody who caught nothing: one of its methods raises."""

    def __init__(self, method: str, error: Callable[[], BaseException]) -> None:
        super().__init__(error)
        self._method = method
        self.written: list[int] = []

    def _reach(self, method: str) -> None:
        if method == self._method:
            raise self._error()

    def bind(self, *, run: str, rank: int) -> None:
        self._reach("bind")

    async def open(self) -> None:
        self._reach("open")

    async def write(self, events: Sequence[Event]) -> None:
        self._reach("write")
        self.written += [event.n for event in events if isinstance(event, Tick)]

    async def aclose(self) -> None:
        self._reach("aclose")


@FAULT
@pytest.mark.parametrize("method", ["bind", "open", "write", "aclose"])
def test_G4_a_sink_that_fails_in_any_of_its_methods_fails_alone(
    method: str, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A missing library, a server that is away, a bug at the end: training and the other sinks begin, go on and end."""
    bus = EventBus()
    bad, good = Faulty(method, FAULTS[fault]), Faulty("none", FAULTS[fault])
    bus.attach(bad, name="bad")
    bus.attach(good, name="good")
    with bus:
        for n in range(EVENTS):
            bus.publish(Tick(n=n))
        until(lambda: good.written == list(range(EVENTS)))
        bus.close(0.2)
    stats = assert_balanced(bus)
    assert stats["good"].delivered == EVENTS
    assert stats["bad"].failed + stats["bad"].dropped == (0 if method == "aclose" else EVENTS)
    assert bad.written == (list(range(EVENTS)) if method == "aclose" else [])
    told = [record for record in caplog.records if "Subscriber 'bad' failed" in record.getMessage()]
    assert [(record.levelno, record.exc_info is not None) for record in told] == [(logging.ERROR, True)]
    caplog.clear()


@pytest.mark.anyio
@FAULT
async def test_G4_a_failing_handler_leaves_the_hosts_loop_running(fault: str) -> None:
    """The same where the bus is a guest on somebody's loop."""
    received: list[int] = []

    async def good(event: Tick) -> None:
        received.append(event.n)

    async with EventBus() as bus:
        add_failing(bus, "async", FAULTS[fault])
        bus.subscribe(good, Tick)
        for n in range(EVENTS):
            bus.publish(Tick(n=n))
        assert await bus.aflush()
        assert assert_balanced(bus)["bad"].failed == EVENTS
    assert received == list(range(EVENTS))


def test_G4_a_handler_that_cancels_its_own_task_fails_alone() -> None:
    """A cancellation that nobody but the handler asked for is its failure, and not the end of the loop."""
    received: list[int] = []

    async def suicidal(event: Tick) -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(0)

    async def good(event: Tick) -> None:
        received.append(event.n)

    with EventBus() as bus:
        subscriber = bus.subscribe(suicidal, Tick)
        bus.subscribe(good, Tick)
        for n in range(3):
            bus.publish(Tick(n=n))
        assert bus.flush()
        assert subscriber.stats.failed == 3
        bus.publish(Tick(n=3))
        assert bus.flush()
    assert received == [0, 1, 2, 3]


@FAULT
def test_G4_a_predicate_that_raises_counts_as_failed(fault: str) -> None:
    """An event whose `when` raises is a failure of that subscriber; the events after it are judged again."""
    received: list[int] = []

    def judge(event: Tick) -> bool:
        if event.n % 2:
            throw(fault)
        return True

    async def handle(event: Tick) -> None:
        received.append(event.n)

    async def good(event: Tick) -> None: ...

    with EventBus() as bus:
        bus.subscribe(handle, Tick, when=judge, name="picky")
        bus.subscribe(good, Tick, name="good")
        for n in range(6):
            bus.publish(Tick(n=n))
        assert bus.flush()
        stats = assert_balanced(bus)
    assert received == [0, 2, 4]
    assert (stats["picky"].failed, stats["picky"].delivered, stats["good"].delivered) == (3, 3, 6)


@pytest.mark.parametrize("fault", sorted(ORDINARY))
def test_G4_an_inline_hook_that_raises_an_exception_fails_alone(fault: str) -> None:
    """`publish` returns, and the other hooks and subscribers get the event."""
    bus = EventBus()
    ran: list[int] = []

    def fail(event: Tick) -> None:
        throw(fault)

    bad = bus.subscribe(fail, Tick, priority=1)
    bus.subscribe(lambda event: ran.append(event.n), Tick)
    for n in range(3):
        bus.publish(Tick(n=n))
    assert ran == [0, 1, 2]
    assert bad.stats.failed == 3
    assert_balanced(bus)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, Fatal])
def test_G4_what_is_meant_for_the_training_thread_goes_through(error: type[BaseException]) -> None:
    """A Ctrl-C or an exit in an inline hook leaves `publish`, is counted, and spoils nothing."""
    received: list[int] = []

    async def queued(event: Tick) -> None:
        received.append(event.n)

    with EventBus() as bus:

        def leave(event: Tick) -> None:
            if event.n == 1:
                raise error

        hook = bus.subscribe(leave, Tick)
        bus.subscribe(queued, Tick)
        bus.publish(Tick(n=0))
        with pytest.raises(error):
            bus.publish(Tick(n=1))
        bus.publish(Tick(n=2))
        assert bus.flush()
        assert (hook.stats.delivered, hook.stats.failed) == (2, 1)
        assert_balanced(bus)
    assert received == [0, 1, 2]


def test_G4_an_inline_error_that_is_asked_for_comes_after_the_other_hooks() -> None:
    """With ``on_error="raise"`` the error leaves the same publish, with the hook's name, once all hooks have run."""
    bus = EventBus()
    ran: list[str] = []

    @bus.on(Tick, on_error="raise", priority=1, name="strict")
    def strict(event: Tick) -> None:
        raise ValueError("wrong")

    bus.subscribe(lambda _: ran.append("after"), Tick)
    with pytest.raises(ValueError, match="wrong") as caught:
        bus.publish(Tick())
    assert ran == ["after"]
    assert "'strict' on on_tick" in "".join(caught.value.__notes__)
    assert caught.traceback[-1].name == "strict"


def test_G4_a_queued_error_that_is_asked_for_comes_once_from_the_next_publish() -> None:
    """With ``on_error="raise"`` it leaves the next publish of that thread, and no other."""
    bus = EventBus()

    @bus.on(Tick, on_error="raise", name="strict")
    async def strict(event: Tick) -> None:
        if event.n == 0:
            raise ValueError("wrong")

    seen: list[int] = []
    bus.subscribe(lambda event: seen.append(event.n), Tick)
    with bus:
        bus.publish(Tick(n=0))
        assert bus.flush()
        elsewhere = threading.Thread(target=bus.publish, args=(Tick(n=1),))
        elsewhere.start()
        elsewhere.join()
        with pytest.raises(ValueError, match="wrong") as caught:
            bus.publish(Tick(n=2))
        bus.publish(Tick(n=3))
    assert any("'strict'" in note and "on_tick" in note for note in caught.value.__notes__)
    assert caught.traceback[-1].name == "strict"
    assert seen == [0, 1, 2, 3]  # the publish that raises has published: its event may be an end that is owed


@pytest.fixture
def rude_log() -> Iterator[None]:
    """A handler of the bus's own log that raises, as a broken integration does."""

    class Rude(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise SystemExit

    logger, handler = logging.getLogger("eventbus"), Rude()
    logger.addHandler(handler)
    yield
    logger.removeHandler(handler)


@pytest.mark.parametrize("kind", ["async", "thread", "sink"])
@pytest.mark.usefixtures("rude_log")
def test_G4_a_log_handler_that_raises_does_not_end_a_subscriber(kind: str) -> None:
    """The bus reports a failure through foreign code; what that does wrong stops nobody."""
    with EventBus() as bus:
        add_failing(bus, kind, FAULTS["Exception"])
        for n in range(EVENTS):
            bus.publish(Tick(n=n))
        assert bus.flush()
        assert bus.stats()["bad"].failed == EVENTS


@pytest.mark.parametrize("kind", ["async", "thread", "sink"])
@pytest.mark.parametrize("error", [ValueError, SystemExit])
def test_G4_a_hook_about_failures_that_raises_does_not_end_a_subscriber(kind: str, error: type[BaseException]) -> None:
    """Neither does an inline hook that hears of the failure and raises in its turn."""
    with EventBus() as bus:
        add_failing(bus, kind, FAULTS["Exception"])

        @bus.on(SubscriberErrorEvent, on_error="raise")
        def complain(event: SubscriberErrorEvent) -> None:
            raise error

        for n in range(EVENTS):
            bus.publish(Tick(n=n))
        assert bus.flush()
        assert bus.stats()["bad"].failed == EVENTS


def test_G4_failing_on_a_failure_does_not_go_round() -> None:
    """A subscriber that fails on every event, those about failures included, is not told of itself."""
    heard: list[str] = []

    with EventBus() as bus:

        @bus.on(name="nervous")
        async def nervous(event: Event) -> None:
            heard.append(event.hook)
            raise ValueError

        add_failing(bus, "thread", FAULTS["Exception"])
        bus.publish(Tick())
        for _ in range(3):
            assert bus.flush()
    assert heard == ["on_tick", "on_subscriber_error"]


def test_G4_a_handler_that_holds_the_loop_is_named() -> None:
    """An `async def` that blocks is measured, named in the report and once in the log; publishing goes on."""
    release, held = threading.Event(), threading.Event()

    async def blocking(event: Tick) -> None:
        held.set()
        release.wait(10)
        time.sleep(0.06)  # work that has no place here

    async def good(event: Beat) -> None: ...

    with EventBus() as bus:
        subscriber = bus.subscribe(blocking, Tick, name="blocking")
        bus.subscribe(good, Beat, name="good")
        bus.publish(Tick())
        assert held.wait(10)
        for n in range(100):
            bus.publish(Beat(n=n))
        assert bus.stats()["good"].matched == 100
        release.set()
        assert bus.flush()
        assert bus.stats()["good"].delivered == 100
        assert subscriber.stats.hold_s >= 0.05
        line, remark = [line for line in bus.report().splitlines() if "blocking" in line]
        assert float(line.split()[-1]) >= 50
        assert "The bus loop was held longest by 'blocking'" in remark
        assert "held loop ms" in bus.report().splitlines()[0]


def test_G4_a_held_loop_is_told_once_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """The log names the subscriber and what to do, and does not repeat itself."""
    with EventBus() as bus:

        @bus.on(Tick, name="blocking")
        async def blocking(event: Tick) -> None:
            time.sleep(0.3)

        for n in range(3):
            bus.publish(Tick(n=n))
            assert bus.flush()
    (message,) = [record.getMessage() for record in caplog.records if "held the bus loop" in record.getMessage()]
    assert "'blocking'" in message
    assert 'run_in="thread"' in message


def test_G4_two_buses_do_not_hold_each_other() -> None:
    """A bus whose loop is blocked has no part in another one."""
    release, held = threading.Event(), threading.Event()

    async def blocking(event: Tick) -> None:
        held.set()
        release.wait(10)

    async def good(event: Tick) -> None: ...

    with EventBus() as blocked, EventBus() as free:
        blocked.subscribe(blocking, Tick)
        free.subscribe(good, Tick, name="good")
        blocked.publish(Tick())
        assert held.wait(10)
        free.publish(Tick())
        assert free.flush()
        release.set()


def test_G4_calls_that_hang_in_threads_take_none_from_the_others() -> None:
    """A handler whose blocking client hangs fills its own share of the loop's threads; the others get theirs."""
    release = threading.Event()
    received: list[int] = []

    async def hang(event: Tick) -> None:
        await asyncio.to_thread(release.wait)

    async def good(event: Beat) -> None:
        await asyncio.to_thread(received.append, event.n)

    before = set(threading.enumerate())
    with EventBus() as bus:
        bus.subscribe(hang, Tick, timeout=0.001, name="hang")
        bus.subscribe(good, Beat)
        for n in range(60):
            bus.publish(Tick(n=n))
        until(lambda: assert_balanced(bus)["hang"].timed_out == 60)
        for n in range(10):
            bus.publish(Beat(n=n))
        assert bus.flush(5)
        assert received == list(range(10))
        assert len([t for t in threading.enumerate() if t not in before]) <= 32 + 10
        release.set()

        def finds_them_free() -> bool:
            bus.publish(Tick())
            return bus.flush() and bus.stats()["hang"].delivered > 0

        until(finds_them_free)


@pytest.mark.anyio
async def test_G4_tasks_do_not_grow_with_events(anyio_backend_name: str) -> None:
    """However many events wait, each subscriber has one task."""
    seen = 0

    async def handle(event: Tick) -> None:
        nonlocal seen
        await anyio.sleep(0)
        seen = max(seen, _count_tasks(anyio_backend_name))

    async with EventBus() as bus:
        for number in range(5):
            bus.subscribe(_copy_of(handle), Tick, name=f"copy {number}")
        before = _count_tasks(anyio_backend_name)
        for n in range(200):
            bus.publish(Tick(n=n))
        assert await bus.aflush()
    assert seen <= before + 5 + 2


def _copy_of(fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
    async def copy(event: Event) -> None:
        await fn(event)

    return copy


def _count_tasks(backend: str) -> int:
    if backend == "asyncio":
        return len(asyncio.all_tasks())
    import trio

    return trio.lowlevel.current_statistics().tasks_living


@pytest.mark.anyio
async def test_G4_no_task_is_collected_while_it_works() -> None:
    """Garbage collection after every event loses nothing and leaves no pending task behind."""
    received: list[int] = []

    async def handle(event: Tick) -> None:
        gc.collect()
        await anyio.sleep(0)
        received.append(event.n)

    async with EventBus() as bus:
        bus.subscribe(handle, Tick)
        for n in range(5):
            bus.publish(Tick(n=n))
        gc.collect()
        assert await bus.aflush()
    gc.collect()
    assert received == list(range(5))


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_G4_a_ctrl_c_that_leaves_a_handler_reaches_the_host_in_the_main_thread(backend: str) -> None:
    """On a host's loop in the main thread a KeyboardInterrupt is taken for a real one."""
    program = """
        import sys, anyio
        from eventbus import Event, EventBus
        class Step(Event): pass

        async def main():
            async with EventBus() as bus:
                @bus.on(Step)
                async def strike(event):
                    raise KeyboardInterrupt
                bus.publish(Step())
                await anyio.sleep(30)
                print("went on")

        try:
            anyio.run(main, backend=sys.argv[1])
        except KeyboardInterrupt:
            print("interrupted")
    """
    assert run_program(program, backend) == "interrupted\n"


def test_G4_a_ctrl_c_raised_on_the_buss_own_loop_is_a_failure() -> None:
    """No signal strikes a thread of the bus: there a KeyboardInterrupt is the handler's own."""
    with EventBus() as bus:
        add_failing(bus, "async", KeyboardInterrupt)
        for n in range(3):
            bus.publish(Tick(n=n))
        assert bus.flush()
        assert bus.stats()["bad"].failed == 3
