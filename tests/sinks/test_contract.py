"""What every sink promises, tested once for all of them, on asyncio and on trio."""

from __future__ import annotations

import asyncio
import copy
import gc
import os
import pickle
import warnings
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from eventbus import EventBus
from eventbus.errors import EventBusError, SinkUnavailable
from eventbus.events import FitEpochEnd
from eventbus.sink import Sink
from sinks import CSVSink, JSONLSink, Retry, WebhookError, WebhookSink, read_jsonl
from tests.sinks.receiver import Receiver, slow, status
from tests.sinks.rows import rows_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.anyio


def epoch(number: int, **fields: Any) -> FitEpochEnd:
    values = {"run": "r1", "rank": 0, "seq": number + 1, "time": 1.8e9 + number, "metrics": {"val/loss": 0.5}}
    return FitEpochEnd(epoch=number, **{**values, **fields})


class FileCase:
    """A file sink: it is broken while a file stands where its folder should be."""

    failure: type[Exception] = SinkUnavailable

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "runs"

    def break_(self) -> None:
        self.folder.write_text("in the way")

    def heal(self) -> None:
        self.folder.unlink()


class JSONLCase(FileCase):
    def sink(self) -> Sink:
        return JSONLSink(self.folder / "events.jsonl")

    def epochs(self) -> list[int]:
        return [event.epoch for event in read_jsonl(self.folder / "events.jsonl")]


class CSVCase(FileCase):
    def sink(self) -> Sink:
        return CSVSink(self.folder / "metrics.csv")

    def epochs(self) -> list[int]:
        return [int(row["epoch"]) for row in rows_of(self.folder / "metrics.csv")]


class WebhookCase:
    """A webhook: it is broken while its server answers 500."""

    failure: type[Exception] = WebhookError

    def __init__(self, receiver: Receiver) -> None:
        self.receiver = receiver

    def sink(self) -> Sink:
        return WebhookSink(self.receiver.url("/hook"), retry=Retry(delays_s=(0, 0)))

    def epochs(self) -> list[int]:
        return [body["data"]["epoch"] for body in self.receiver.bodies]

    def break_(self) -> None:
        self.receiver.otherwise = status(500)

    def heal(self) -> None:
        self.receiver.otherwise = status(200)
        self.receiver.requests.clear()


Case = JSONLCase | CSVCase | WebhookCase


@pytest.fixture(params=["jsonl", "csv", "webhook"])
def case(request: pytest.FixtureRequest, tmp_path: Path) -> Case:
    if request.param == "webhook":
        return WebhookCase(request.getfixturevalue("receiver"))
    return JSONLCase(tmp_path) if request.param == "jsonl" else CSVCase(tmp_path)


async def test_it_satisfies_the_protocol_and_states_its_defaults(case: Case) -> None:
    """A sink has hooks, default options and the limits of its batches before it is opened."""
    sink: Any = case.sink()
    assert isinstance(sink, Sink)
    assert sink.hooks
    assert all(isinstance(hook, str) for hook in sink.hooks)
    assert sink.options["timeout"] > 0
    assert sink.max_batch >= 1
    assert sink.flush_interval >= 0


async def test_events_arrive_in_order_and_once_whatever_the_batches(case: Case) -> None:
    """What was written is delivered when `write` returns, in the order in which it was given."""
    sink = case.sink()
    await sink.open()
    done = 0
    for size in (1, 0, 3, 1, 10, 5):
        await sink.write([epoch(done + number) for number in range(size)])
        done += size
        assert case.epochs() == list(range(done))
    await sink.aclose()
    assert case.epochs() == list(range(done))


async def test_it_may_be_closed_at_any_time_and_twice(case: Case) -> None:
    """Closing what is not open does nothing."""
    sink = case.sink()
    await sink.aclose()
    await sink.open()
    await sink.aclose()
    await sink.aclose()


async def test_it_goes_on_where_it_was_when_it_is_opened_again(case: Case) -> None:
    """After `aclose`, `open` starts over and loses nothing."""
    sink = case.sink()
    for number in range(3):
        await sink.open()
        await sink.write([epoch(number)])
        await sink.aclose()
    assert case.epochs() == [0, 1, 2]


async def test_it_reports_what_it_cannot_do_and_recovers_by_itself(case: Case) -> None:
    """A write that fails has written nothing; the same sink delivers once the cause is gone."""
    case.break_()
    sink = case.sink()
    if case.failure is SinkUnavailable:
        with pytest.raises(SinkUnavailable, match=r"Sink cannot open .*runs/.*: (Not a directory|File exists)"):
            await sink.open()
    for _ in range(2):
        with pytest.raises(case.failure):
            await sink.write([epoch(0), epoch(1)])
    case.heal()
    await sink.write([epoch(0), epoch(1)])
    assert case.epochs() == [0, 1]
    await sink.aclose()


async def test_every_failure_is_an_error_of_the_bus(case: Case) -> None:
    """One except clause catches whatever a sink raises on its own account."""
    case.break_()
    sink = case.sink()
    with pytest.raises(EventBusError):
        await sink.write([epoch(0)])
    await sink.aclose()


def pickled(sink: Any) -> Any:
    return pickle.loads(pickle.dumps(sink))


@pytest.mark.parametrize("travel", [pickled, copy.deepcopy])
async def test_G11_a_copy_works_beside_the_original(case: Case, travel: Any) -> None:
    """Neither files nor clients travel, whenever it is taken; it opens its own, and the original is not disturbed."""
    sink = case.sink()
    idle = travel(sink)
    await sink.open()
    await sink.write([epoch(0)])
    running = travel(sink)
    await sink.write([epoch(1)])
    await sink.aclose()
    closed = travel(sink)
    for number, other in enumerate((idle, running, closed, travel(running)), start=2):
        assert repr(other) == repr(sink)
        await other.open()
        await other.write([epoch(number)])
        await other.aclose()
    assert case.epochs() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("travel", [pickled, copy.deepcopy])
@pytest.mark.parametrize("state", ["not started", "running", "closed"])
async def test_G11_a_bus_with_a_sink_travels_in_any_state(case: Case, travel: Any, state: str) -> None:
    """What arrives is stopped and writes nothing, until it is started; then it delivers to a sink of its own."""
    bus = EventBus(run="r1")
    bus.attach(case.sink())
    if state != "not started":
        await bus.__aenter__()
        bus.publish(epoch(0))
        await bus.aflush()
    if state == "closed":
        await bus.aclose()
    twin = travel(bus)
    twin.publish(epoch(98))
    async with twin:
        twin.publish(epoch(1))
    await bus.aclose()
    assert case.epochs() == ([1] if state == "not started" else [0, 1])


async def test_a_forked_child_that_holds_it_harms_nothing(case: Case) -> None:
    """A DataLoader worker drops its copy and ends; the parent's file or connection goes on."""
    sink: Sink | None = case.sink()
    await sink.open()
    await sink.write([epoch(0)])
    child = fork()
    if child == 0:
        sink = None
        gc.collect()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    await sink.write([epoch(1)])
    await sink.aclose()
    assert case.epochs() == [0, 1]


def fork() -> int:
    with warnings.catch_warnings():  # "multi-threaded, use of fork may lead to deadlocks": what is tested here
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


async def test_a_cancelled_write_leaves_no_half_and_no_open_file(case: Case) -> None:
    """A cancellation is obeyed after the IO, so that nothing is written behind the caller's back."""
    sink = case.sink()
    await sink.open()
    await sink.write([epoch(0)])
    before = len(os.listdir("/proc/self/fd"))
    for number in range(1, 20):
        with anyio.CancelScope() as scope:
            scope.cancel()
            await sink.write([epoch(number)])
    done = len(case.epochs())
    await sink.write([epoch(100)])
    with anyio.fail_after(5):
        while len(os.listdir("/proc/self/fd")) > before:
            await anyio.sleep(0.005)  # the receiver is in this process, and closes when it sees that we did
    assert len(case.epochs()) == done + 1
    assert sorted(set(case.epochs())) == case.epochs()
    await sink.aclose()


@pytest.fixture(params=["jsonl", "csv", "webhook"])
def plain_case(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Case]:
    server = Receiver().start()
    yield {"jsonl": JSONLCase(tmp_path), "csv": CSVCase(tmp_path)}.get(request.param) or WebhookCase(server)
    server.stop()


class TestLoops:
    """Without the anyio plugin: what happens around a loop."""

    pytestmark: list[Any] = []

    @pytest.mark.parametrize("anyio_backend", ["asyncio"])
    def test_one_sink_serves_two_loops_one_after_the_other(self, plain_case: Case, anyio_backend: str) -> None:
        """A second `asyncio.run` works, also when the first one died without closing."""
        sink = plain_case.sink()

        async def session(number: int) -> None:
            await sink.open()
            await sink.write([epoch(number)])

        async def closed(number: int) -> None:
            await session(number)
            await sink.aclose()

        asyncio.run(closed(0))
        asyncio.run(closed(1))
        assert plain_case.epochs() == [0, 1]

    @pytest.mark.parametrize("anyio_backend", ["asyncio"])
    def test_a_task_cancelled_natively_finishes_its_io(self, plain_case: Case, anyio_backend: str) -> None:
        """asyncio's own cancel, from outside, at every stage: no torn line, no lost file, later writes succeed."""
        if isinstance(plain_case, WebhookCase):
            plain_case.receiver.otherwise = slow(0.002)
        sink = plain_case.sink()

        async def main() -> None:
            await sink.open()
            for number in range(60):
                task = asyncio.ensure_future(sink.write([epoch(number)]))
                await asyncio.sleep(number % 6 * 0.0005)
                task.cancel()
                await asyncio.wait([task])
            before = len(plain_case.epochs())
            for number in range(100, 110):
                await sink.write([epoch(number)])
            assert plain_case.epochs()[-10:] == list(range(100, 110))
            assert len(plain_case.epochs()) >= before + 10
            await sink.aclose()

        asyncio.run(main())
