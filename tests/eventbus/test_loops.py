"""G14: the bus needs no loop to be made, runs on any, and moves from one to another without losing anything."""

from __future__ import annotations

import asyncio
import gc
import threading
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest
import trio

from eventbus import AlreadyStartedError, Event, EventBus, EventBusError, Log, TrainBatchEnd, TrainEnd, WouldBlockError
from tests.eventbus.samples import Beat, assert_balanced
from tests.eventbus.waiting import until, until_in_task

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

Runs = "Callable[[Callable[[], Coroutine[Any, Any, Any]]], Any]"


def on_asyncio(main: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    return asyncio.run(main())


def on_uvloop(main: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    return pytest.importorskip("uvloop").run(main())


def on_trio(main: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    return trio.run(main)


LOOPS = [on_asyncio, on_uvloop, on_trio]
every_loop = pytest.mark.parametrize("run", LOOPS)


class Recorder:
    """A sink that notes its calls, the numbers of its events, and overlapping calls."""

    hooks: Sequence[str] = ("on_beat",)
    options: dict[str, Any] = {}

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.seen: list[int] = []
        self._busy = False

    async def _call(self, name: str) -> None:
        assert not self._busy, "two calls of one sink overlap"
        self._busy = True
        self.calls.append(name)
        await anyio.sleep(0)
        self._busy = False

    async def open(self) -> None:
        await self._call("open")

    async def write(self, events: Sequence[Event]) -> None:
        await self._call("write")
        self.seen += [event.n for event in events if isinstance(event, Beat)]

    async def aclose(self) -> None:
        await self._call("aclose")


class Everything:
    """A bus with a subscriber of each kind, and what they have heard."""

    def __init__(self, **options: Any) -> None:
        self.bus = EventBus(**options)
        self.sink = Recorder()
        self.task: list[int] = []
        self.thread: list[int] = []
        self.idents: set[int] = set()
        self.bus.subscribe(self.in_a_task, "on_beat", maxsize=100_000)
        self.bus.subscribe(self.in_a_thread, "on_beat", run_in="thread", maxsize=100_000)
        self.bus.attach(self.sink, maxsize=100_000)

    async def in_a_task(self, event: Beat) -> None:
        await anyio.lowlevel.checkpoint()
        self.idents.add(threading.get_ident())
        self.task.append(event.n)

    def in_a_thread(self, event: Beat) -> None:
        self.thread.append(event.n)

    def publish(self, *numbers: int) -> None:
        for n in numbers:
            self.bus.publish(Beat(n=n))

    def assert_heard(self, numbers: Sequence[int]) -> None:
        assert self.task == self.thread == self.sink.seen == list(numbers)
        for stats in assert_balanced(self.bus).values():
            assert (stats.delivered, stats.dropped, stats.pending) == (len(numbers), 0, 0)


# ----------------------------------------------------------------------------------------------------- where


def test_G14_making_a_bus_and_subscribing_need_no_loop_and_start_no_thread():
    """All of it may stand at the top of a module."""
    threads = set(threading.enumerate())
    heard = Everything()
    assert len(heard.bus.describe()) == 3
    assert set(threading.enumerate()) <= threads
    assert heard.bus.close().ok


def test_G14_a_plain_script_is_served_by_a_thread_of_the_bus():
    """`with bus:` needs no asyncio in the program: handlers run elsewhere, the script goes on."""
    heard = Everything()
    with heard.bus:
        heard.publish(*range(50))
    heard.assert_heard(range(50))
    assert threading.get_ident() not in heard.idents


@pytest.mark.anyio
async def test_G14_a_host_loop_serves_the_bus_itself():
    """`async with bus:` runs the handlers on the loop that runs here, asyncio, uvloop or trio."""
    heard = Everything()
    async with heard.bus:
        heard.publish(*range(50))
        assert await heard.bus.aflush()
        heard.assert_heard(range(50))
        assert heard.idents == {threading.get_ident()}
    assert heard.sink.calls[-1] == "aclose"


@pytest.mark.anyio
async def test_G14_threads_publish_to_a_host_loop():
    """A training thread beside a service: each event wakes the host's loop when that sleeps."""
    heard = Everything()

    def train() -> None:
        heard.publish(*range(100))

    async with heard.bus:
        await anyio.to_thread.run_sync(train)
        await until_in_task(lambda: len(heard.task) == len(heard.thread) == len(heard.sink.seen) == 100)
        await anyio.sleep(0.15)  # the pump has gone to sleep
        await anyio.to_thread.run_sync(heard.publish, 100)
        await until_in_task(lambda: len(heard.task) == len(heard.thread) == len(heard.sink.seen) == 101)
    heard.assert_heard(range(101))


@pytest.mark.anyio
async def test_G14_a_notebook_cell_may_use_the_bus_although_a_loop_runs():
    """Where a loop runs already, plain calls work too, since the bus has a loop of its own."""
    heard = Everything()
    heard.publish(1, 2)
    assert heard.bus.flush()
    heard.publish(3)
    assert await heard.bus.aflush()
    assert heard.bus.close().ok
    heard.assert_heard([1, 2, 3])


@pytest.mark.anyio
async def test_G14_blocking_calls_on_the_serving_loop_raise_and_name_the_other_ones():
    """`flush` and `close` would block the very loop they wait for."""
    bus = EventBus()
    bus.subscribe(Everything().in_a_task, "on_beat")
    async with bus:
        with pytest.raises(WouldBlockError, match=r"bus\.flush.*await bus\.aflush\(\)"):
            bus.flush()
        with pytest.raises(WouldBlockError, match=r"bus\.close.*await bus\.aclose\(\)"):
            bus.close()
        assert await bus.aflush()


# ------------------------------------------------------------------------------------------------ again, elsewhere


def test_G14_start_stop_and_start_again_in_every_kind_of_loop():
    """One bus lives through an own loop, asyncio, uvloop and trio, one after the other, twice."""
    heard = Everything()
    numbers = iter(range(1000))

    async def main() -> None:
        async with heard.bus:
            heard.publish(next(numbers), next(numbers))
            await heard.bus.aflush()
            heard.publish(next(numbers))

    for _ in range(2):
        with heard.bus:
            heard.publish(next(numbers))
        for run in LOOPS:
            run(main)
    heard.assert_heard(range(20))
    assert heard.sink.calls.count("open") == heard.sink.calls.count("aclose") == 8


@every_loop
def test_G14_an_automatic_start_is_taken_over_by_a_host_loop_without_a_loss(run):
    """What came before the takeover, during it and after it is heard once, in order, and then on the host's loop."""
    heard = Everything()
    heard.publish(*range(300))

    async def main() -> None:
        async with heard.bus:
            assert len(heard.task) > 0
            heard.idents.clear()
            heard.publish(*range(300, 600))
            await heard.bus.aflush()
            assert heard.idents == {threading.get_ident()}

    run(main)
    heard.assert_heard(range(600))
    assert heard.sink.calls[0] == "open"
    assert [call for call in heard.sink.calls if call != "write"] == ["open", "aclose"] * 2


@every_loop
def test_G14_a_takeover_beside_a_thread_that_publishes_flat_out_loses_nothing(run):
    """The training thread does not notice that the bus moves."""
    heard = Everything()
    done, published = threading.Event(), []

    def train() -> None:
        n = 0
        while not done.is_set() and n < 50_000:
            heard.publish(n)
            n += 1
            if n % 50 == 0:
                done.wait(0.0005)
        published.append(n)

    training = threading.Thread(target=train)
    training.start()
    until(lambda: len(heard.task) > 50)

    async def main() -> None:
        async with heard.bus:
            count = len(heard.task)
            await until_in_task(lambda: len(heard.task) > count + 200)
            done.set()
            await anyio.to_thread.run_sync(training.join)

    run(main)
    heard.assert_heard(range(published[0]))


@every_loop
def test_G14_deliveries_of_one_subscriber_never_overlap_in_a_takeover(run):
    """What runs when the bus moves ends first, in its old loop or thread, and the next one comes after it."""
    bus, seen, done = EventBus(), {"task": [], "thread": []}, threading.Event()
    running = dict.fromkeys(seen, False)

    def begin(who: str, n: int) -> None:
        assert not running[who], "two deliveries overlap"
        running[who] = True
        assert n == len(seen[who]), "a delivery was begun again, or lost"

    @bus.on("on_beat", maxsize=10_000)
    async def in_a_task(event: Beat) -> None:
        begin("task", event.n)
        await anyio.sleep(0.02)
        running["task"] = False
        seen["task"].append(event.n)

    @bus.on("on_beat", maxsize=10_000, run_in="thread")
    def in_a_thread(event: Beat) -> None:
        begin("thread", event.n)
        sleep(0.02)
        running["thread"] = False
        seen["thread"].append(event.n)

    def train() -> None:
        n = 0
        while not done.wait(0.01):
            bus.publish(Beat(n=n))
            n += 1

    training = threading.Thread(target=train)
    training.start()
    until(lambda: len(seen["task"]) > 3)

    async def main() -> None:
        async with bus:
            done.set()
            await anyio.to_thread.run_sync(training.join)

    run(main)
    assert seen["task"] == seen["thread"] == list(range(len(seen["task"])))
    assert all(stats.delivered == stats.matched for stats in assert_balanced(bus).values())


@every_loop
def test_G14_an_event_that_is_tried_again_survives_a_takeover(run):
    """A handler that failed just before the move gets its retry, and the events behind it wait for that."""
    bus, attempts, failing = EventBus(), [], threading.Event()

    @bus.on("on_beat", retries=3)
    async def flaky(event: Beat) -> None:
        attempts.append(event.n)
        if event.n == 1 and attempts.count(1) == 1:
            failing.set()
            raise ConnectionError("try again")

    bus.publish(Beat(n=1))
    bus.publish(Beat(n=2))
    assert failing.wait(5)

    async def main() -> None:
        async with bus:
            bus.publish(Beat(n=3))

    started = monotonic()
    run(main)
    assert attempts == [1, 1, 2, 3]
    assert monotonic() - started < 5.0
    assert_balanced(bus)


def test_G14_a_takeover_by_the_with_block_keeps_the_loop():
    """`with bus:` after an automatic start makes that the explicit one."""
    heard = Everything()
    heard.publish(1)
    with heard.bus:
        heard.publish(2)
        assert len(heard.idents) <= 1
    heard.assert_heard([1, 2])
    assert len(heard.idents) == 1


@pytest.mark.anyio
async def test_G14_a_second_explicit_start_raises_and_says_where_the_bus_runs():
    """Whoever starts it twice learns where the first start was."""
    bus = EventBus()
    with bus:
        with pytest.raises(AlreadyStartedError, match="already runs in a thread of its own"):
            bus.__enter__()
        with pytest.raises(AlreadyStartedError, match="already runs in a thread of its own"):
            await bus.__aenter__()
    async with bus:
        with pytest.raises(AlreadyStartedError, match=r"already runs in the running (asyncio|trio) loop"):
            bus.__enter__()
        with pytest.raises(AlreadyStartedError, match=r"already runs in the running (asyncio|trio) loop"):
            await bus.__aenter__()
    with bus:
        pass


def test_G14_where_no_loop_runs_an_async_start_says_so():
    """Driving the coroutine by hand, outside of any loop, names the way that works."""
    starting = EventBus().__aenter__()
    with pytest.raises(EventBusError, match=r"No asyncio or trio loop runs in this thread\. Use `with bus:`"):
        starting.send(None)


def test_G14_two_buses_in_two_runs_of_asyncio():
    """Nothing of the first loop is left in the second one."""
    for _ in range(2):
        heard = Everything()

        async def main(heard: Everything = heard) -> None:
            async with heard.bus:
                heard.publish(*range(10))

        asyncio.run(main())
        heard.assert_heard(range(10))


@pytest.mark.anyio
async def test_G14_two_buses_on_one_loop_do_not_wait_for_each_other():
    """A handler of each that waits for the handler of the other one sees it come."""
    one, other = EventBus(), EventBus()
    events = {one: anyio.Event(), other: anyio.Event()}

    def meet(mine: EventBus, its: EventBus) -> Callable[[Beat], Coroutine[Any, Any, None]]:
        async def meets(event: Beat) -> None:
            events[mine].set()
            await events[its].wait()

        return meets

    one.subscribe(meet(one, other), "on_beat", timeout=5.0)
    other.subscribe(meet(other, one), "on_beat", timeout=5.0)
    async with one, other:
        one.publish(Beat(n=1))
        other.publish(Beat(n=1))
        assert await one.aflush()
        assert await other.aflush()
    for bus in one, other:
        assert [stats.delivered for stats in bus.stats().values()] == [1]


def test_G14_starting_and_stopping_over_and_over_leaves_no_thread():
    """Thirty cycles later there are as many threads as before."""
    heard = Everything()
    before = set(threading.enumerate())
    for n in range(30):
        with heard.bus:
            heard.publish(n)
    heard.assert_heard(range(30))
    until(lambda: set(threading.enumerate()) <= before)


# ------------------------------------------------------------------------------------------------ ends of hosts


@every_loop
def test_G14_a_host_loop_that_ends_without_closing_the_bus_takes_nothing_down(run):
    """What was pending counts as lost with its loop, `publish` goes on returning, and the bus can be started again."""
    bus, seen = EventBus(), []

    @bus.on("on_beat", name="slow")
    async def slow(event: Beat) -> None:
        await anyio.sleep(0 if event.n > 90 else 60)
        seen.append(event.n)

    async def main() -> None:
        await bus.__aenter__()
        for n in range(3):
            bus.publish(Beat(n=n))
        await anyio.sleep(0.02)

    run(main)
    bus.publish(Beat(n=3))
    assert dict(bus.stats()["slow"].dropped_by) == {"loop_closed": 3}
    assert not bus.close().ok
    with bus:
        bus.publish(Beat(n=99))
        assert bus.flush()
    assert seen == [99]
    assert_balanced(bus)


def test_G14_a_loop_that_is_dropped_with_everything_in_it():
    """A loop closed under the bus, its tasks never cancelled: publishing returns and flushing does not hang."""
    bus = EventBus()

    @bus.on("on_beat", name="slow")
    async def slow(event: Beat) -> None:
        await asyncio.sleep(60)

    loop = asyncio.new_event_loop()
    loop.run_until_complete(bus.__aenter__())
    bus.publish(Beat(n=1))
    loop.run_until_complete(asyncio.sleep(0.3))  # until the pump sleeps
    for task in asyncio.all_tasks(loop):
        task._log_destroy_pending = False  # type: ignore[attr-defined]  # what asyncio would say of it, rightly
    loop.close()
    del task
    bus.publish(Beat(n=2))
    started = monotonic()
    bus.flush(2.0)
    assert monotonic() - started < 1.0
    gc.collect()
    stats = bus.stats()["slow"]
    assert (stats.delivered, stats.pending) == (0, 0)
    assert stats.dropped_by["loop_closed"] >= 1
    bus.close(0.1)
    assert_balanced(bus)


@pytest.mark.anyio
async def test_G14_a_cancelled_host_task_still_drains():
    """When the block that runs the bus is cancelled, what was published before is delivered all the same."""
    heard = Everything()

    async def serve() -> None:
        async with heard.bus:
            heard.publish(*range(20))
            scope.cancel()
            await anyio.sleep_forever()

    with anyio.CancelScope() as scope:
        await serve()
    heard.assert_heard(range(20))
    assert heard.sink.calls[-1] == "aclose"


def test_G14_a_cancelled_asyncio_task_still_drains():
    """The same with asyncio's own cancellation, which strikes once."""
    heard = Everything()

    async def serve() -> None:
        async with heard.bus:
            heard.publish(*range(20))
            await asyncio.sleep(60)

    async def main() -> None:
        serving = asyncio.create_task(serve())
        await asyncio.sleep(0.01)
        serving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await serving

    asyncio.run(main())
    heard.assert_heard(range(20))


# ---------------------------------------------------------------------------------------------------- services


def test_G14_fastapi_starts_the_bus_in_its_lifespan():
    """Endpoints, sync or async, publish to it, and one may wait for the next event of a training elsewhere."""
    fastapi = pytest.importorskip("fastapi")
    httpx = pytest.importorskip("httpx")
    from contextlib import asynccontextmanager

    heard = Everything()

    @asynccontextmanager
    async def lifespan(app: Any) -> Any:
        async with heard.bus:
            yield

    app = fastapi.FastAPI(lifespan=lifespan)

    @app.post("/threaded/{n}")
    def threaded(n: int) -> None:
        heard.publish(n)

    @app.post("/direct/{n}")
    async def direct(n: int) -> None:
        heard.publish(n)

    @app.get("/next")
    async def following() -> dict[str, int]:
        event = await heard.bus.wait_for("on_beat", timeout=10.0)
        return {"n": event.n}

    async def main() -> None:
        transport = httpx.ASGITransport(app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://service") as client,
        ):
            for n in range(5):
                assert (await client.post(f"/threaded/{2 * n}")).status_code == 200
                assert (await client.post(f"/direct/{2 * n + 1}")).status_code == 200
            answer = asyncio.create_task(client.get("/next"))
            await until_in_task(lambda: any(info.kind == "stream" for info in heard.bus.describe()))
            await asyncio.to_thread(heard.publish, 10)
            assert (await answer).json() == {"n": 10}
            assert await heard.bus.aflush()
            assert heard.idents == {threading.get_ident()}

    asyncio.run(main())
    heard.assert_heard(range(11))


# ----------------------------------------------------------------------------------------------------- pulling


@pytest.mark.anyio
async def test_G14_a_stream_gives_events_on_the_loop_of_who_reads_it():
    """The bus runs in a thread of its own, the reader here; order and number are exact."""
    bus, seen = EventBus(), []
    async with bus.stream("on_beat", maxsize=1000) as events:
        for n in range(200):
            bus.publish(Beat(n=n))
        async for event in events:
            seen.append(event.n)
            if event.n == 199:
                break
    assert seen == list(range(200))
    assert bus.describe() == []
    assert (await bus.aclose()).ok


@pytest.mark.anyio
async def test_G14_a_stream_on_a_host_loop_that_serves_the_bus_too():
    """Reader and bus on one loop do not starve each other."""
    bus, seen = EventBus(), []

    async with bus, anyio.create_task_group() as tasks:

        async def read() -> None:
            async with bus.stream(Beat) as events:
                reading.set()
                async for event in events:
                    seen.append(event.n)
                    if len(seen) == 50:
                        return

        reading = anyio.Event()
        tasks.start_soon(read)
        await reading.wait()
        for n in range(50):
            bus.publish(Beat(n=n))
    assert seen == list(range(50))


@pytest.mark.anyio
async def test_G14_a_stream_ends_when_the_bus_closes():
    """The loop over it ends by itself after the last event, whoever closes the bus."""
    bus, seen = EventBus(), []

    def close_elsewhere() -> None:
        until(lambda: seen == [1, 2])
        bus.close()

    closing = threading.Thread(target=close_elsewhere)
    async with bus.stream("on_beat") as events:
        bus.publish(Beat(n=1))
        bus.publish(Beat(n=2))
        closing.start()
        async for event in events:
            seen.append(event.n)  # noqa: PERF401  # another thread looks at it meanwhile
    closing.join()
    assert seen == [1, 2]


@pytest.mark.anyio
async def test_G14_a_cancelled_reader_leaves_nothing_behind():
    """Its subscription is closed, and what it had in hand is counted."""
    bus = EventBus()
    with anyio.move_on_after(0.05):
        async with bus.stream("on_beat") as events:
            bus.publish(Beat(n=1))
            await anext(events)
            await anext(events)
    assert bus.describe() == []
    assert bus.close().ok


@pytest.mark.anyio
async def test_G14_a_stream_that_reads_too_slowly_loses_the_oldest():
    """It is bounded like any subscriber, and its stats say what was lost."""
    bus = EventBus()
    async with bus.stream("on_train_batch_end", maxsize=10) as events:
        for step in range(100):
            bus.publish(TrainBatchEnd(epoch=0, batch=step, step=step))
        await until_in_task(lambda: events.stats.dropped == 90)
        assert [(await anext(events)).step for _ in range(10)] == list(range(90, 100))
    assert bus.close().ok


@pytest.mark.anyio
async def test_G14_reading_a_stream_that_is_not_open_says_how():
    """Without `async with` there is nothing to read."""
    with pytest.raises(RuntimeError, match="async with"):
        await anext(EventBus().stream("on_log"))


@pytest.mark.anyio
async def test_G14_wait_for_hears_from_the_call_on():
    """An event published between the call and the `await` is not missed; earlier ones are not seen."""
    bus = EventBus()
    bus.publish(Beat(n=0))
    waiting = bus.wait_for("on_beat", timeout=10.0)
    bus.publish(Beat(n=1))
    bus.publish(Beat(n=2))
    assert (await waiting).n == 1
    assert bus.describe() == []
    assert bus.close().ok


@pytest.mark.anyio
async def test_G14_wait_for_looks_for_the_event_that_is_meant():
    """`when` and `run` choose among the events of the hook."""
    bus = EventBus()
    waiting = bus.wait_for("on_beat", run="b", when=lambda event: event.n > 1, timeout=10.0)
    for run in "ab":
        for n in range(3):
            bus.publish(Beat(n=n, run=run))
    event = await waiting
    assert (event.run, event.n) == ("b", 2)
    assert bus.close().ok


@pytest.mark.anyio
async def test_G14_wait_for_ends_with_its_timeout_or_with_the_bus():
    """It raises `TimeoutError` after its time, and says so when the bus closes first; nothing stays subscribed."""
    bus = EventBus()
    with pytest.raises(TimeoutError, match=r"No on_log within 0\.05 s"):
        await bus.wait_for("on_log", timeout=0.05)
    waiting = bus.wait_for(TrainEnd)
    with bus:
        pass
    with pytest.raises(RuntimeError, match="closed before the event came"):
        await waiting
    bus.wait_for("on_log").close()
    assert bus.describe() == []


def test_G14_readers_on_two_other_loops_both_hear_the_bus():
    """One bus on asyncio feeds a trio loop and another asyncio loop in threads of their own."""
    bus, seen, reading = EventBus(), {on_trio: [], on_asyncio: []}, threading.Barrier(3)

    def read(run: Callable[[Any], Any]) -> None:
        async def main() -> None:
            async with bus.stream("on_beat") as events:
                await anyio.to_thread.run_sync(reading.wait)
                async for event in events:
                    seen[run].append(event.n)

        run(main)

    threads = [threading.Thread(target=read, args=(run,)) for run in seen]

    async def main() -> None:
        async with bus:
            for thread in threads:
                thread.start()
            await asyncio.to_thread(reading.wait)
            for n in range(100):
                bus.publish(Beat(n=n))
            await until_in_task(lambda: all(len(numbers) == 100 for numbers in seen.values()))

    asyncio.run(main())
    for thread in threads:
        thread.join(5)
    assert list(seen.values()) == [list(range(100))] * 2


@pytest.mark.anyio
async def test_G14_what_a_stream_is_handling_can_be_asked_for():
    """In the body of a stream, control requests mean the run of the event in hand."""
    bus = EventBus()
    async with bus.stream("on_log") as events:
        bus.publish(Log(step=1, run="mine"))
        await anext(events)
        assert bus.control.stop("enough").run == "mine"
    assert bus.close().ok
