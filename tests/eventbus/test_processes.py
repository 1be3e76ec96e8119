"""G11: in a forked process the bus is inert; by pickle and deepcopy it travels as a stopped bus."""

from __future__ import annotations

import asyncio
import copy
import functools
import importlib.util
import logging
import os
import pickle
import threading
from typing import TYPE_CHECKING, Any

import pytest

from eventbus import Event, EventBus, FitEpochEnd, Log, NotPicklableError, TrainBatchEnd, TrainEnd
from sinks.jsonl import JSONLSink, read_jsonl
from tests.eventbus.scripts import run

if TYPE_CHECKING:
    from collections.abc import Sequence

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform does not fork")

#: That a process with threads forks is what these tests are about, and Python warns of it since 3.12.
FORKS = ("-W", "error", "-W", "ignore::DeprecationWarning")


# ------------------------------------------------------------------------------------------------------ forked


def test_G11_a_fork_while_another_thread_publishes_flat_out():
    """The child's publish, flush, close and garbage collection return; every event is delivered once, by the parent."""
    done = run(
        """
        import gc
        bus, counted = EventBus(), []

        @bus.on("on_log", maxsize=1_000_000)
        async def notify(event):
            if event.seq % 100 == 0:
                say(os.getpid(), event.seq)
            counted.append(event.seq)

        def flood():
            while not stop.is_set():
                bus.publish(Log(step=0))

        stop = threading.Event()
        threads = [threading.Thread(target=flood) for _ in range(2)]
        for thread in threads:
            thread.start()
        for number in range(10):
            child = os.fork()
            if not child:
                for step in range(100):
                    bus.publish(Log(step=step))
                    bus.publish(TrainEnd(epoch=0, step=0))
                ok = bus.flush(5.0), bus.close(5.0).ok, bus.stats()["notify"].matched >= 0, len(bus.describe())
                del notify, bus, threads
                gc.collect()
                os._exit(0 if ok == (True, True, True, 1) else 1)
            assert os.waitpid(child, 0)[1] == 0
        stop.set()
        for thread in threads:
            thread.join()
        assert bus.close().ok
        assert counted == sorted(set(counted))
        say("parent", os.getpid())
        """,
        options=FORKS,
    )
    assert done.code == 0
    assert all("is too slow" in line for line in done.err.splitlines()), done.err  # a busy machine drops some
    parent = done.out[-1].split()[1]
    assert {line.split()[0] for line in done.out[:-1]} == {parent}


def test_G11_a_child_that_exits_delivers_nothing_of_what_the_parent_has_pending():
    """A forked child runs its parent's exit hooks; that of the bus stays idle in it, and ends at once."""
    done = run(
        """
        bus = EventBus()

        @bus.on("on_log")
        async def slow(event):
            await asyncio.sleep(0.05)
            say("task", event.step)

        @bus.on("on_log", run_in="thread")
        def in_a_thread(event):
            time.sleep(0.05)
            say("thread", event.step)

        for step in range(5):
            bus.publish(Log(step=step))
        started = time.monotonic()
        child = os.fork()
        if not child:
            sys.exit(7)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        say("child", code, time.monotonic() - started < 1.0)
        """,
        options=FORKS,
    )
    assert (done.code, done.err) == (0, "")
    assert sorted(done.out) == sorted(["child 7 True", *(f"{k} {n}" for k in ("task", "thread") for n in range(5))])


def test_G11_a_child_forked_on_the_bus_loop_itself_delivers_nothing():
    """Where the loop comes along into the child, as on a host loop, its copy of the bus still stays idle."""
    done = run(
        """
        async def main():
            bus = EventBus()

            @bus.on("on_log")
            async def note(event):
                await asyncio.sleep(0.01)
                say(os.getpid() == parent, event.step)

            async with bus:
                for step in range(3):
                    bus.publish(Log(step=step))
                child = os.fork()
                if not child:
                    bus.publish(Log(step=99))
                    for _ in range(20):
                        await asyncio.sleep(0)
                    await bus.aflush()
                    await bus.aclose()
                    os._exit(0)
                assert os.waitpid(child, 0)[1] == 0

        parent = os.getpid()
        asyncio.run(main())
        """,
        options=FORKS,
    )
    assert (done.code, done.err) == (0, "")
    assert done.out == ["True 0", "True 1", "True 2"]


def test_G11_a_child_forked_by_a_handler_delivers_nothing():
    """A subscriber may fork: the copy of it that runs on in the child is the last thing the bus does there."""
    done = run(
        """
        bus = EventBus()

        @bus.on("on_log", run_in="thread")
        def forks(event):
            child = os.fork()
            say("parent" if child else "child", event.step)
            if child:
                assert os.waitpid(child, 0)[1] == 0

        for step in range(3):
            bus.publish(Log(step=step))
        assert bus.close().ok
        """,
        options=FORKS,
    )
    assert (done.code, done.err) == (0, "")
    assert sorted(done.out) == sorted(f"{who} {n}" for who in ("parent", "child") for n in range(3))


def test_G11_a_forked_process_may_have_a_bus_of_its_own():
    """What is made in the child works there, at its exit too."""
    done = run(
        """
        def subscribe(bus, who):
            @bus.on("on_log")
            async def notify(event):
                await asyncio.sleep(0.01)
                say(who, event.step)

        bus = EventBus()
        subscribe(bus, "parent")
        bus.publish(Log(step=0))
        child = os.fork()
        if not child:
            bus.publish(Log(step=98))
            own = EventBus()
            subscribe(own, "child")
            own.publish(Log(step=1))
            sys.exit(0)
        assert os.waitpid(child, 0)[1] == 0
        bus.publish(Log(step=2))
        """,
        options=FORKS,
    )
    assert (done.code, done.err) == (0, "")
    assert sorted(done.out) == ["child 1", "parent 0", "parent 2"]


def test_G11_using_the_inert_copy_in_earnest_says_what_it_is():
    """Starting, subscribing and pulling in a forked process cannot work there, and raise instead of waiting."""
    done = run(
        """
        import traceback
        bus = EventBus()

        @bus.on("on_log")
        async def notify(event): ...

        async def pull():
            async with bus.stream("on_log"):
                ...

        child = os.fork()
        if not child:
            for use in (
                lambda: bus.__enter__(),
                lambda: bus.subscribe(print),
                lambda: bus.wait_for("on_log"),
                lambda: asyncio.run(pull()),
            ):
                try:
                    use()
                except EventBusError as error:
                    say(error)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        """,
        options=FORKS,
    )
    assert (done.code, done.err) == (0, "")
    assert len(done.out) == 4
    assert set(done.out) == {
        "This bus was made before a fork and is inert in this process. Make an EventBus in the process that uses it."
    }


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
@pytest.mark.parametrize("started", ["started", "not started"])
def test_G11_worker_processes_end_whatever_their_start_method(method, started, tmp_path):
    """Workers that publish, collect garbage and exit do so, and the parent hears its own events and no others."""
    done = run(
        """
        import gc, multiprocessing
        bus = EventBus()

        @bus.on("on_log")
        async def notify(event):
            say(multiprocessing.current_process().name, event.step)

        def work(number):
            if multiprocessing.get_start_method() == "fork":  # elsewhere the module is imported: a bus of its own
                bus.publish(Log(step=100 + number))
                assert bus.flush()
            gc.collect()
            sys.exit(number)

        if __name__ == "__main__":
            multiprocessing.set_start_method(sys.argv[1])
            if sys.argv[2] == "started":
                bus.publish(Log(step=0))
            workers = [multiprocessing.Process(target=work, args=(n,)) for n in range(2)]
            for worker in workers:
                worker.start()
            bus.publish(Log(step=1))
            for worker in workers:
                worker.join(20)
            say([worker.exitcode for worker in workers])
        """,
        method,
        started,
        options=FORKS,
        path=tmp_path / "script.py",
    )
    assert (done.code, done.err) == (0, "")
    steps = [0, 1] if started == "started" else [1]
    assert sorted(done.out) == sorted([f"MainProcess {step}" for step in steps] + ["[0, 1]"])


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
def test_G11_the_workers_of_a_data_loader_finish_their_epochs():
    """Real loaders fork beside a busy bus with every kind of subscriber; their workers publish and collect garbage."""
    done = run(
        """
        import gc, torch
        from sinks.jsonl import JSONLSink
        bus = EventBus()

        @bus.on("on_train_batch_end")
        async def notify(event):
            say("task", os.getpid() == parent, event.step)

        @bus.on("on_train_batch_end", run_in="thread")
        def in_a_thread(event):
            say("thread", os.getpid() == parent, event.step)

        class Numbers(torch.utils.data.Dataset):
            def __len__(self):
                return 8

            def __getitem__(self, index):
                bus.publish(Log(step=index))
                gc.collect()
                return float(index)

        parent = os.getpid()
        bus.publish(TrainBatchEnd(epoch=0, batch=0, step=0))
        for epoch in range(3):
            total = 0.0
            for batch in torch.utils.data.DataLoader(Numbers(), batch_size=2, num_workers=2, timeout=20):
                total += batch.sum().item()
            assert total == 28.0
            bus.publish(TrainBatchEnd(epoch=epoch, batch=0, step=epoch + 1))
        """,
        options=FORKS,
        timeout=60.0,
    )
    assert (done.code, done.err) == (0, "")
    assert sorted(done.out) == sorted(f"{kind} True {step}" for kind in ("task", "thread") for step in range(4))


# ----------------------------------------------------------------------------------------------------- pickled


async def notify(event: Event) -> None: ...


def inline(event: Event) -> None: ...


def upload(event: Event) -> None: ...


def is_late(event: Any) -> bool:
    return event.step > 1


heard: list[tuple[str, int]] = []


async def note(event: Any) -> None:
    heard.append((event.hook, event.step))


def note_inline(event: Any) -> None:
    heard.append(("inline", event.step))


class Callbacks:
    """An object with hook methods, that knows the bus it is attached to."""

    def __init__(self, bus: EventBus) -> None:
        self.bus = bus
        self.seen: list[int] = []

    def on_log(self, event: Log) -> None:
        self.seen.append(event.step)

    async def on_train_end(self, event: TrainEnd) -> None:
        self.seen.append(event.step)


class Locked:
    """A sink that does not pickle."""

    hooks: Sequence[str] = ()
    options: dict[str, Any] = {}

    def __init__(self) -> None:
        self.lock = threading.Lock()

    async def open(self) -> None: ...
    async def write(self, events: Sequence[Event]) -> None: ...
    async def aclose(self) -> None: ...


def travelled(bus: EventBus) -> EventBus:
    return pickle.loads(pickle.dumps(bus))


@pytest.mark.parametrize("travel", [travelled, copy.deepcopy, copy.copy])
def test_G11_registrations_travel_with_their_options(travel, tmp_path):
    """What arrives lists the same subscribers: names, kinds, hooks, patterns, priorities, options."""
    bus = EventBus(run="r", rank=3)
    bus.subscribe(notify, TrainBatchEnd, "on_log", every=50, timeout=5.0, rank="all")
    bus.subscribe(inline, "on_val_*", "!on_val_end", priority=10, name="first")
    bus.subscribe(upload, "on_model_save", run_in="thread", maxsize=7, overflow="drop_newest", when=is_late)
    bus.subscribe(functools.partial(inline), "on_log")
    bus.attach(JSONLSink(tmp_path / "{run}.jsonl"), name="file")
    bus.attach(Callbacks(bus))
    twin = travel(bus)
    assert twin is not bus
    assert twin.describe() == bus.describe()
    assert (twin.run, twin.rank) == ("r", 3)


@pytest.mark.parametrize("travel", [travelled, copy.deepcopy, copy.copy])
def test_G11_what_arrives_is_stopped_until_it_is_started(travel, caplog):
    """Publishing on it is a counted no-op and starts no thread; `with` makes it a bus like any other."""
    bus = EventBus()
    bus.subscribe(note, "on_log")
    bus.subscribe(note_inline, "on_log")
    with bus:
        twin = travel(bus)
    heard.clear()
    threads = set(threading.enumerate())
    with caplog.at_level(logging.DEBUG, logger="eventbus"):
        twin.publish(Log(step=1))
        twin.publish(Log(step=2))
    assert set(threading.enumerate()) <= threads
    assert (heard, len(caplog.records)) == ([], 1)
    assert "2 events were published after close." in twin.report()
    with twin:
        twin.publish(Log(step=3))
        assert twin.flush()
    assert sorted(heard) == [("inline", 3), ("on_log", 3)]
    twin.publish(Log(step=4))
    assert len(heard) == 2


@pytest.mark.parametrize("travel", [travelled, copy.deepcopy])
def test_G11_a_subscriber_may_hold_the_bus_that_it_is_subscribed_to(travel):
    """A trainer that holds its bus and has its methods on it arrives as a whole, and apart from the original."""
    bus = EventBus()
    callbacks = Callbacks(bus)
    bus.attach(callbacks)
    twin = travel(bus)
    with twin:
        twin.publish(Log(step=1))
        twin.publish(TrainEnd(epoch=0, step=2))
        assert twin.flush()
    other = travel(callbacks)
    assert callbacks.seen == []
    assert other.bus is not bus
    with other.bus:
        other.bus.publish(Log(step=5))
    assert other.seen == [5]


def test_G11_a_running_bus_travels_and_runs_on(tmp_path):
    """Loop, threads, open files and streams stay behind; the original does not notice."""
    bus = EventBus(run="r")
    path = tmp_path / "events.jsonl"
    bus.attach(JSONLSink(path))

    async def main() -> None:
        async with bus, bus.stream("on_log") as events:
            bus.publish(Log(step=1))
            assert (await anext(events)).step == 1
            for twin in travelled(bus), copy.deepcopy(bus):
                assert [info.name for info in twin.describe()] == ["JSONLSink"]
                async with twin:
                    twin.publish(Log(step=2))
            bus.publish(Log(step=3))
            await anext(events)

    asyncio.run(main())
    assert sorted(event.step for event in read_jsonl(path)) == [1, 2, 2, 3]


def test_G11_a_bus_travels_to_a_spawned_process(tmp_path):
    """Given to a worker as an argument it is stopped there, and delivers once the worker starts it."""
    done = run(
        """
        import multiprocessing

        async def notify(event):
            say(multiprocessing.current_process().name, event.run, event.step)

        def work(bus):
            bus.publish(Log(step=98))
            with bus:
                bus.publish(Log(step=1))

        if __name__ == "__main__":
            bus = EventBus(run="r")
            bus.subscribe(notify, "on_log")
            bus.publish(Log(step=0))
            worker = multiprocessing.get_context("spawn").Process(target=work, args=(bus,), name="Worker")
            worker.start()
            worker.join(20)
            say(worker.exitcode)
        """,
        path=tmp_path / "script.py",
    )
    assert done.code == 0
    assert sorted(done.out) == ["0", "MainProcess r 0", "Worker r 1"]
    assert done.err == "on_log was published after the bus was closed, and is dropped.\n"


@pytest.mark.parametrize(
    ("register", "match"),
    [
        (lambda bus: bus.subscribe(lambda event: None, "on_log", name="l"), "subscriber 'l' is a lambda"),
        (
            lambda bus: bus.subscribe(inline, "on_log", when=lambda event: True, name="w"),
            "subscriber 'w' has a when= that is a lambda",
        ),
        (lambda bus: bus.attach(Locked(), name="locked"), "subscriber 'locked' does not pickle .*lock"),
    ],
)
def test_G11_a_subscriber_that_cannot_travel_is_named(register, match):
    """Pickling fails at once, and says which subscriber is the reason and what to do."""
    bus = EventBus()
    bus.subscribe(notify, "on_log")
    register(bus)
    with pytest.raises(NotPicklableError, match=match + r".*remove it with bus\.off"):
        pickle.dumps(bus)
    bus.off(bus.describe()[-1].name)
    assert len(travelled(bus).describe()) == 1


def test_G11_a_local_function_is_named_too():
    """So is one that is defined in a function; a copy in the same process shares it instead."""

    def local(event: Event) -> None: ...

    bus = EventBus()
    bus.subscribe(local, "on_log")
    with pytest.raises(TypeError, match="is defined inside of a function"):
        pickle.dumps(bus)
    twin = copy.deepcopy(bus)
    twin.off(local)
    assert len(bus.describe()) == 1


def test_G11_a_sink_that_cannot_be_copied_is_named():
    """`deepcopy` copies sinks, since two buses cannot drive one; where that fails it says for which."""
    bus = EventBus()
    bus.attach(Locked(), name="locked")
    with pytest.raises(NotPicklableError, match="'locked'"):
        copy.deepcopy(bus)


def test_G11_a_rank_that_was_found_is_found_anew(monkeypatch):
    """A worker of a distributed run gets its own rank, unless the bus was given one."""
    blob = pickle.dumps(EventBus())
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert pickle.loads(blob).rank == 2


def test_G11_settings_travel():
    """Redaction goes on hiding what it hid."""
    bus = EventBus(redact=("pin",), exit_timeout=3.0)
    twin, seen = travelled(bus), []
    twin.subscribe(lambda event: seen.append(event.values), "on_log")
    with twin:
        twin.publish(Log(step=0, values={"pin": "1234", "token": "visible"}))
    assert seen == [{"pin": "[redacted]", "token": "visible"}]


def test_G11_every_protocol_of_pickle_works():
    """Old protocols too."""
    bus = EventBus()
    bus.subscribe(notify, FitEpochEnd, every=2)
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps(bus, protocol)).describe() == bus.describe()
