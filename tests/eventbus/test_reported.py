"""What users of comparable systems met: trackers that are slow or away, long uploads, odd contexts."""

from __future__ import annotations

import asyncio
import os
import threading
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from eventbus import Event, EventBus, ModelSave, TrainBatchEnd
from tests.eventbus.samples import Tick, assert_balanced
from tests.eventbus.scripts import run
from tests.eventbus.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

STEPS = 1000


@pytest.fixture
def server() -> Iterator[threading.Event]:
    """Set when the server of the tracker begins to answer."""
    answers = threading.Event()
    yield answers
    answers.set()


class Tracker:
    """A tracker: a client with its own limits, whose server does not answer yet."""

    hooks = ("on_train_batch_end",)
    options: dict[str, Any] = {"maxsize": 10_000}
    max_batch = 100

    def __init__(self, server: threading.Event, *, opens: bool = True) -> None:
        self._server = server
        self._opens = opens
        self.asked = threading.Event()
        self.steps: list[int] = []

    async def open(self) -> None:
        if not self._opens:
            await self._request()

    async def write(self, events: Sequence[Event]) -> None:
        await self._request()
        self.steps += [event.step for event in events if isinstance(event, TrainBatchEnd)]

    async def aclose(self) -> None: ...

    async def _request(self) -> None:
        self.asked.set()
        while not self._server.is_set():
            await anyio.sleep(0.002)


def sdk(server: threading.Event, steps: list[int], asked: threading.Event) -> Callable[[TrainBatchEnd], None]:
    """The same as a blocking client of a vendor."""

    def log(event: TrainBatchEnd) -> None:
        asked.set()
        server.wait()
        steps.append(event.step)

    return log


def attach_tracker(bus: EventBus, kind: str, server: threading.Event) -> tuple[list[int], threading.Event]:
    """Subscribe one as "tracker"; returns the steps it has told its server, and an event set when it first asks."""
    if kind == "thread":
        steps, asked = list[int](), threading.Event()
        bus.subscribe(sdk(server, steps, asked), TrainBatchEnd, run_in="thread", name="tracker", maxsize=10_000)
        return steps, asked
    tracker = Tracker(server, opens=kind != "opening sink")
    bus.attach(tracker, name="tracker")
    return tracker.steps, tracker.asked


def train(bus: EventBus) -> None:
    for step in range(STEPS):
        bus.publish(TrainBatchEnd(epoch=0, batch=step, step=step, metrics={"loss": 1.0}))


@pytest.mark.parametrize("kind", ["sink", "opening sink", "thread"])
def test_a_whole_training_passes_before_the_server_of_a_tracker_answers_once(
    kind: str, server: threading.Event
) -> None:
    """Slow at the start or at each call: nothing waits for it, and once it answers it gets every step in order."""
    bus = EventBus()
    steps, asked = attach_tracker(bus, kind, server)
    seen: list[int] = []
    bus.subscribe(lambda event: seen.append(event.step), TrainBatchEnd, run_in="thread", maxsize=10_000)
    with bus:
        train(bus)
        until(lambda: len(seen) == STEPS)
        assert asked.wait(10)
        assert steps == []
        server.set()
        assert bus.flush()
    assert steps == list(range(STEPS))
    assert all(stats.delivered == STEPS for stats in assert_balanced(bus).values())


@pytest.mark.parametrize("kind", ["sink", "opening sink", "thread"])
def test_a_tracker_whose_server_never_answers_costs_its_own_events_and_the_time_for_closing(
    kind: str, server: threading.Event
) -> None:
    """The run ends within its deadline and says what the tracker did not take; the others have everything."""
    bus = EventBus()
    steps, _ = attach_tracker(bus, kind, server)
    seen: list[int] = []
    bus.subscribe(lambda event: seen.append(event.step), TrainBatchEnd, run_in="thread", maxsize=10_000)
    with bus:
        train(bus)
        report = bus.close(0.3)
    assert seen == list(range(STEPS))
    assert steps == []
    stats = assert_balanced(bus)["tracker"]
    assert report.left.get("tracker", 0) + stats.failed == STEPS
    assert stats.delivered == 0


@pytest.mark.parametrize(
    ("options", "uploaded"),
    [({}, [0, 1, 2, 3]), ({"overflow": "latest"}, [0, 3]), ({"maxsize": 2}, [0, 1, 2, 3]),
     ({"overflow": "block", "maxsize": 1, "block_timeout": 0.01}, [0, 1])],
)  # fmt: skip
def test_checkpoints_saved_while_one_uploads_wait_or_are_superseded_as_was_asked(
    options: dict[str, Any], uploaded: list[int], server: threading.Event
) -> None:
    """Training goes on in each case; a checkpoint is no event that may be shed, so a bound alone drops none."""
    begun, done = threading.Event(), list[int]()

    def upload(event: ModelSave) -> None:
        begun.set()
        server.wait()
        done.append(int(event.epoch or 0))

    with EventBus() as bus:
        bus.subscribe(upload, ModelSave, run_in="thread", name="upload", **options)
        bus.publish(ModelSave(path="0.pt", epoch=0))
        assert begun.wait(10)
        for epoch in (1, 2, 3):
            bus.publish(ModelSave(path=f"{epoch}.pt", epoch=epoch))
        server.set()
        assert bus.flush()
        stats = assert_balanced(bus)["upload"]
    assert done == uploaded
    assert stats.dropped == 4 - len(uploaded)


def test_each_kind_of_subscriber_runs_where_it_is_said_to() -> None:
    """A hook on the publishing thread, a coroutine and a sink on the loop, a blocking client in its own thread."""
    idents: dict[str, set[int]] = {}

    def here(kind: str) -> None:
        idents.setdefault(kind, set()).add(threading.get_ident())

    class Sink:
        hooks = ("on_tick",)
        options: dict[str, Any] = {}

        async def open(self) -> None:
            here("sink")

        async def write(self, events: Sequence[Event]) -> None:
            here("sink")

        async def aclose(self) -> None:
            here("sink")

    async def coroutine(event: Tick) -> None:
        here("async")

    with EventBus() as bus:
        bus.subscribe(lambda _: here("inline"), Tick)
        bus.subscribe(coroutine, Tick)
        for number in range(2):
            kind = f"thread {number}"
            bus.subscribe(lambda _, kind=kind: here(kind), Tick, run_in="thread", name=kind)
        bus.attach(Sink())
        for n in range(50):
            bus.publish(Tick(n=n))
        assert bus.flush()
    assert idents.keys() == {"inline", "async", "sink", "thread 0", "thread 1"}
    assert idents["inline"] == {threading.get_ident()}
    assert idents["async"] == idents["sink"]
    own = [idents[kind] for kind in ("inline", "async", "thread 0", "thread 1")]
    assert all(len(each) == 1 for each in own)
    assert len(set.union(*own)) == 4


def test_a_context_variable_of_the_training_is_not_seen_by_queued_subscribers() -> None:
    """A handler runs in a context of its own, not in that of whoever happens to publish; what it sets stays with it."""
    user: ContextVar[str] = ContextVar("user", default="nobody")
    seen: dict[str, set[str]] = {"inline": set(), "async": set(), "other": set(), "thread": set()}

    async def sets(event: Tick) -> None:
        seen["async"].add(user.get())
        user.set("the handler")
        await asyncio.sleep(0)

    async def other(event: Tick) -> None:
        seen["other"].add(user.get())

    with EventBus() as bus:
        bus.subscribe(lambda _: seen["inline"].add(user.get()), Tick)
        bus.subscribe(sets, Tick, once=True)
        bus.subscribe(other, Tick)
        bus.subscribe(lambda _: seen["thread"].add(user.get()), Tick, run_in="thread")
        token = user.set("the training")
        for n in range(5):
            bus.publish(Tick(n=n))
            assert bus.flush()
        user.reset(token)
    assert seen == {"inline": {"the training"}, "async": {"nobody"}, "other": {"nobody"}, "thread": {"nobody"}}


def test_a_process_without_a_free_file_descriptor_is_served_once_it_has_some() -> None:
    """Loaders that leak descriptors keep the loop from being made: the cause is said, and the events are delivered."""
    done = run(
        """
        import resource
        logging = __import__("logging")
        logging.basicConfig()
        bus, seen = EventBus(), []

        @bus.on("on_log")
        async def notify(event):
            seen.append(event.step)

        taken = []
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        try:
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        except OSError:
            pass
        for step in range(3):
            bus.publish(Log(step=step))
        assert not bus.flush(0.5)
        for descriptor in taken:
            os.close(descriptor)
        bus.publish(Log(step=3))
        assert bus.flush(), bus.report()
        say(seen)
    """,
        options=(),
    )  # asyncio itself leaves half a loop behind, and warns of it
    assert (done.code, done.out) == (0, ["[0, 1, 2, 3]"])
    assert "The bus cannot make a loop and tries again in 0.25 s" in done.err
    assert "Too many open files" in done.err


# ------------------------------------------------------------------------------------------------ ends of scripts


@pytest.mark.parametrize("closes", ["atexit.register(bus.close)", "weakref.finalize(bus, say, 'gone')", "del bus"])
def test_the_end_may_be_left_to_an_exit_hook_a_finaliser_or_nobody(closes: str) -> None:
    """An exit hook that closes the bus delivers, also beside a close by hand; nothing depends on who is collected."""
    done = run(f"""
        import gc, weakref
        bus = EventBus()

        @bus.on("on_log")
        async def notify(event):
            await asyncio.to_thread(time.sleep, 0.005)
            say(event.step)

        for step in range(15):
            bus.publish(Log(step=step))
        {closes}
        gc.collect()
    """)
    assert (done.code, done.err) == (0, "")
    assert [line for line in done.out if line != "gone"] == [str(step) for step in range(15)]


def test_what_was_not_delivered_at_the_deadline_is_said_with_its_exact_number() -> None:
    """Delivered and left are what was published: nothing vanishes between the two."""
    done = run("""
        bus = EventBus(exit_timeout=0.6)

        @bus.on("on_log", name="slow")
        async def slow(event):
            say(event.step)
            await asyncio.sleep(0.05 if event.step < 5 else 60)

        for step in range(100):
            bus.publish(Log(step=step))
    """)
    assert done.code == 0
    assert done.out == [str(step) for step in range(6)]
    assert "At exit these events were not delivered: {'slow': 95}" in done.err


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform does not fork")
def test_a_forked_worker_with_a_bus_of_its_own_flushes_before_an_exit_without_hooks() -> None:
    """Workers end by `os._exit`, which runs no exit hook: a flush before it delivers all that they published."""
    done = run(
        """
        import multiprocessing

        def work(number):
            own = EventBus()

            @own.on("on_log")
            async def notify(event):
                await asyncio.sleep(0.002)
                say(number, event.step)

            for step in range(10):
                own.publish(Log(step=step))
            assert own.flush()

        bus = EventBus()
        bus.subscribe(print, "on_log", run_in="thread")
        bus.publish(TrainEnd(epoch=0, step=0))
        workers = [multiprocessing.get_context("fork").Process(target=work, args=(n,)) for n in range(3)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(20)
        assert [worker.exitcode for worker in workers] == [0, 0, 0]
        """,
        options=("-W", "error", "-W", "ignore::DeprecationWarning"),  # that a process with threads forks
    )
    assert (done.code, done.err) == (0, "")
    assert sorted(done.out) == sorted(f"{number} {step}" for number in range(3) for step in range(10))


def test_fifty_starts_and_stops_leave_nothing_behind() -> None:
    """In development mode, with warnings as errors: nothing open or pending is left for the collector to find."""
    done = run(
        """
        import gc
        bus, seen = EventBus(), []

        @bus.on("on_log")
        async def notify(event):
            await asyncio.to_thread(seen.append, event.step)

        for step in range(50):
            with bus:
                bus.publish(Log(step=step))
            gc.collect()
        assert seen == list(range(50))
        """,
        options=("-X", "dev", "-W", "error"),
    )
    assert (done.code, done.err) == (0, "")
