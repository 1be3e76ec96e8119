"""The sinks on a real bus: its own loop, a host's asyncio or trio loop, failures, forks and exits without a close."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
import pytest

from eventbus import EventBus
from eventbus.events import (
    Event,
    FitEpochEnd,
    SubscriberErrorEvent,
    TrainBatchEnd,
    TrainBatchStart,
    TrainEnd,
    TrainStart,
)
from sinks import CSVSink, JSONLSink, Retry, WebhookSink, read_jsonl
from tests.sinks.receiver import Receiver, hang, status
from tests.sinks.rows import rows_of

if TYPE_CHECKING:
    from pathlib import Path

anyio_mark = pytest.mark.anyio


class GradSpike(Event):
    norm: float


def run_of(bus: EventBus, epochs: int, batches: int = 10) -> None:
    """Publish what a short training publishes."""
    bus.publish(TrainStart(epochs=epochs))
    for epoch in range(epochs):
        for batch in range(batches):
            step = epoch * batches + batch
            bus.publish(TrainBatchStart(epoch=epoch, batch=batch, step=step))
            bus.publish(TrainBatchEnd(epoch=epoch, batch=batch, step=step, metrics={"loss": 1.0}, lr=(0.1,)))
        bus.publish(GradSpike(norm=9.0))
        bus.publish(FitEpochEnd(epoch=epoch, metrics={"val/loss": 1.0 / (epoch + 1)}))
    bus.publish(TrainEnd(reason="completed"))


def three(folder: Path, receiver: Receiver) -> list[Any]:
    return [
        JSONLSink(folder / "{run}" / "events.rank{rank}.jsonl"),
        CSVSink(folder / "{run}" / "metrics.csv"),
        WebhookSink(receiver.url("/hook"), retry=Retry(delays_s=(0, 0))),
    ]


def check_all(folder: Path, receiver: Receiver, run: str) -> None:
    read = read_jsonl(folder / run / "events.rank0.jsonl")
    events = list(read)
    assert [event.seq for event in events] == sorted({event.seq for event in events})
    hooks = [event.hook for event in events]
    counted = [hooks.count(hook) for hook in ("on_train_batch_end", "on_grad_spike", "on_fit_epoch_end")]
    assert counted == [30, 3, 3]
    assert "on_train_batch_start" not in hooks
    assert {event.run for event in events} == {run}
    assert read.bad_lines == 0
    assert [(row["epoch"], row["run"]) for row in rows_of(folder / run / "metrics.csv")] == [(n, run) for n in "012"]
    assert [body["type"] for body in receiver.bodies] == ["on_train_start", *["on_fit_epoch_end"] * 3, "on_train_end"]


def test_a_plain_script_fills_them_all(tmp_path: Path, receiver: Receiver) -> None:
    """On the bus's own loop, in order, each after its last event."""
    with EventBus(run="r1", rank=0) as bus:
        for sink in three(tmp_path, receiver):
            bus.attach(sink)
        run_of(bus, 3)
        assert bus.flush(10)
        check_all(tmp_path, receiver, "r1")
        assert all(stats.pending == stats.failed == stats.dropped == 0 for stats in bus.stats().values())
    check_all(tmp_path, receiver, "r1")


@anyio_mark
async def test_a_host_loop_fills_them_all(tmp_path: Path, receiver: Receiver, anyio_backend: str) -> None:
    """On the loop of somebody's service, asyncio or trio, and on it again after a close."""
    bus = EventBus(run="r1", rank=0)
    for sink in three(tmp_path, receiver):
        bus.attach(sink)
    async with bus:
        run_of(bus, 2)
        assert await bus.aflush(10)
    async with bus:
        bus.publish(TrainBatchEnd(epoch=0, batch=0, step=0))
        assert await bus.aflush(10)
    events = [event.hook for event in read_jsonl(tmp_path / "r1" / "events.rank0.jsonl")]
    assert events.count("on_train_batch_end") == 21
    assert [row["epoch"] for row in rows_of(tmp_path / "r1" / "metrics.csv")] == ["0", "1"]
    assert len(receiver.bodies) == 4


def test_a_burst_between_two_flushes_is_whole(tmp_path: Path) -> None:
    """Fifty thousand events that may be shed: none is."""
    path = tmp_path / "e.jsonl"
    with EventBus() as bus:
        bus.attach(JSONLSink(path))
        for step in range(50_000):
            bus.publish(TrainBatchEnd(epoch=0, batch=step, step=step, metrics={"loss": 0.5}))
        assert bus.flush(30)
        (stats,) = bus.stats().values()
        assert (stats.delivered, stats.dropped) == (50_000, 0)
    assert [event.step for event in read_jsonl(path)] == list(range(50_000))


def test_a_path_that_cannot_be_opened_is_reported_retried_and_loses_nothing(tmp_path: Path) -> None:
    """The others hear of it; training goes on; the events come when the cause is gone."""
    folder = tmp_path / "runs"
    folder.write_text("in the way")
    heard: list[SubscriberErrorEvent] = []
    with EventBus() as bus:
        bus.on(SubscriberErrorEvent)(heard.append)
        bus.attach(JSONLSink(folder / "e.jsonl"), name="jsonl")
        for step in range(50):
            bus.publish(TrainBatchEnd(epoch=0, batch=step, step=step))
        wait_until(lambda: heard)
        assert heard[0].subscriber == "jsonl"
        assert "cannot open" in heard[0].reason
        assert str(folder) in heard[0].reason
        assert bus.stats()["jsonl"].pending == 50
        folder.unlink()
        assert bus.flush(20)
        assert bus.stats()["jsonl"].delivered >= 50
    steps = [event.step for event in read_jsonl(folder / "e.jsonl") if isinstance(event, TrainBatchEnd)]
    assert steps == list(range(50))


@anyio_mark
async def test_hanging_calls_on_the_threads_of_the_host_keep_no_file_waiting(
    tmp_path: Path, anyio_backend: str
) -> None:
    """The threads of a host's loop are few and everybody's; files are written in threads of their own."""
    release = threading.Event()
    bus = EventBus(run="r", rank=0)
    bus.attach(JSONLSink(tmp_path / "e.jsonl", flush_interval=0.01))
    bus.attach(CSVSink(tmp_path / "m.csv"))
    waiting = [0]

    async def hang() -> None:
        waiting[0] += 1
        await anyio.to_thread.run_sync(release.wait)

    async with bus, anyio.create_task_group() as calls:
        if anyio_backend == "asyncio":
            default = ThreadPoolExecutor(2)
            asyncio.get_running_loop().set_default_executor(default)
            for _ in range(4):
                default.submit(release.wait)
        for _ in range(100):
            calls.start_soon(hang)
        while waiting[0] < 100:
            await anyio.sleep(0.001)
        run_of(bus, 2)
        in_time = await bus.aflush(5)
        release.set()
    assert in_time
    assert len(list(read_jsonl(tmp_path / "e.jsonl"))) == 26
    assert [row["epoch"] for row in rows_of(tmp_path / "m.csv")] == ["0", "1"]


def test_dead_sinks_leave_training_the_other_sinks_and_the_exit_alone(tmp_path: Path, receiver: Receiver) -> None:
    """A full disk, and a server that takes everything and answers nothing (S15, S16)."""
    receiver.otherwise = hang
    bus = EventBus(run="r1").__enter__()
    bus.attach(JSONLSink("/dev/full"), name="full")
    bus.attach(WebhookSink(receiver.url()), name="hanging")
    bus.attach(CSVSink(tmp_path / "m.csv"), name="csv")
    started = time.monotonic()
    run_of(bus, 100)
    assert time.monotonic() - started < 2
    wait_until(lambda: bus.stats()["csv"].delivered >= 100)
    started = time.monotonic()
    report = bus.close(timeout=0.5)
    assert time.monotonic() - started < 1.5
    assert not report.ok
    assert report.left["hanging"] > 0
    assert [row["epoch"] for row in rows_of(tmp_path / "m.csv")] == [str(n) for n in range(100)]


def test_what_a_webhook_gives_up_counts_as_failed_and_410_ends_it(receiver: Receiver) -> None:
    sink = WebhookSink(receiver.url("/T0KEN"), retry=Retry(delays_s=(0,)))
    with EventBus() as bus:
        bus.attach(sink, name="hook")
        receiver.script.extend([status(404), status(200), status(410)])
        bus.publish(TrainStart())
        bus.publish(TrainEnd())
        assert bus.flush(10)
        stats = bus.stats()["hook"]
        assert (stats.failed, stats.delivered) == (1, 1)
        assert [letter.event.hook for letter in sink.dead_letters] == ["on_train_start"]
        assert "T0KEN" not in bus.report() + repr(bus.describe())
        bus.publish(TrainEnd())
        wait_until(lambda: "hook" not in bus.stats())
    assert len(receiver.requests) == 3


def test_a_forked_worker_publishes_into_nothing(tmp_path: Path, receiver: Receiver) -> None:
    """F7: with files and an HTTP connection open; the parent goes on."""
    script = (
        "import gc, os, sys\n"
        "from eventbus import EventBus, FitEpochEnd\n"
        "from sinks import CSVSink, JSONLSink, WebhookSink\n"
        "with EventBus(run='r') as bus:\n"
        "    bus.attach(JSONLSink(sys.argv[1] + '/e.jsonl'))\n"
        "    bus.attach(CSVSink(sys.argv[1] + '/m.csv'))\n"
        "    bus.attach(WebhookSink(sys.argv[2]))\n"
        "    bus.publish(FitEpochEnd(epoch=0)); assert bus.flush(10)\n"
        "    children = []\n"
        "    for _ in range(3):\n"
        "        child = os.fork()\n"
        "        if child == 0:\n"
        "            bus.publish(FitEpochEnd(epoch=99)); bus.close(); gc.collect(); os._exit(0)\n"
        "        children.append(child)\n"
        "    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]\n"
        "    bus.publish(FitEpochEnd(epoch=1))\n"
    )
    run_script(script, str(tmp_path), receiver.url())
    assert [event.epoch for event in read_jsonl(tmp_path / "e.jsonl")] == [0, 1]
    assert [row["epoch"] for row in rows_of(tmp_path / "m.csv")] == ["0", "1"]
    assert [body["data"]["epoch"] for body in receiver.bodies] == [0, 1]


@pytest.mark.parametrize("away", ["from the start", "from the middle on"])
def test_a_server_that_is_away_leaves_the_exit_code_alone(tmp_path: Path, away: str) -> None:
    """Nobody listens, or nobody any more: the script ends as it always did, and its files are whole."""
    script = (
        "import sys\n"
        "from eventbus import EventBus, FitEpochEnd\n"
        "from sinks import JSONLSink, Retry, WebhookSink\n"
        "from tests.sinks.receiver import Receiver\n"
        "receiver = Receiver().start()\n"
        "if sys.argv[2] == 'from the start': receiver.stop()\n"
        "bus = EventBus(run='r', exit_timeout=5.0)\n"
        "bus.attach(JSONLSink(sys.argv[1] + '/e.jsonl'))\n"
        "hook = WebhookSink(receiver.url(), retry=Retry(delays_s=(0, 0.05)))\n"
        "subscriber = bus.attach(hook)\n"
        "for epoch in range(6):\n"
        "    if epoch == 3 and sys.argv[2] != 'from the start': assert bus.flush(10); receiver.stop()\n"
        "    bus.publish(FitEpochEnd(epoch=epoch))\n"
        "assert bus.flush(10)\n"
        "stats = subscriber.stats\n"
        "assert (stats.delivered, stats.failed) == ((0, 6) if sys.argv[2] == 'from the start' else (3, 3)), stats\n"
        "assert [letter.event.epoch for letter in hook.dead_letters] == list(range(stats.delivered, 6))\n"
    )
    run_script(script, str(tmp_path), away, is_silent=False)
    epochs = [event.epoch for event in read_jsonl(tmp_path / "e.jsonl") if isinstance(event, FitEpochEnd)]
    assert epochs == list(range(6))


@pytest.mark.parametrize("closing", ["bus.close()", ""])
def test_the_files_of_a_run_are_only_touched_in_threads_of_their_sinks(tmp_path: Path, closing: str) -> None:
    """Not one call to open, rename or make a directory comes from the training thread or the loop, the end included."""
    script = (
        "import atexit, os, sys, threading\n"
        "touched = set()\n"
        "def watch(call, args):\n"
        "    if call in ('open', 'os.mkdir', 'os.rename', 'os.truncate') and str(args[0]).startswith(sys.argv[1]):\n"
        "        touched.add(threading.current_thread().name)\n"
        "sys.addaudithook(watch)\n"
        "@atexit.register\n"  # runs after the bus's own, which is registered later
        "def look(): assert touched == {'trainbus-io'}, touched\n"
        "from eventbus import EventBus, FitEpochEnd, TrainBatchEnd\n"
        "from sinks import CSVSink, JSONLSink\n"
        "bus = EventBus(run='r')\n"
        "bus.attach(JSONLSink(sys.argv[1] + '/{run}/e.jsonl', rotate_bytes=20_000))\n"
        "bus.attach(CSVSink(sys.argv[1] + '/{run}/m.csv'))\n"
        "for epoch in range(5):\n"
        "    for step in range(200): bus.publish(TrainBatchEnd(epoch=epoch, batch=step, step=step))\n"
        "    bus.publish(FitEpochEnd(epoch=epoch, metrics={f'val/{epoch}': 1.0}))\n"  # a new column each time
        "    bus.flush(10)\n"
    )
    run_script(script + closing, str(tmp_path))
    assert len(list((tmp_path / "r").glob("e.jsonl*"))) > 2
    assert len(list(read_jsonl(tmp_path / "r" / "e.jsonl"))) == 1005
    assert [row["epoch"] for row in rows_of(tmp_path / "r" / "m.csv")] == [str(n) for n in range(5)]


def test_a_thousand_events_are_a_few_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes between two flushes is one write, whatever the training publishes one by one."""
    sizes: list[int] = []
    write = JSONLSink.write

    async def counted(self: JSONLSink, events: Any) -> None:
        sizes.append(len(events))
        await write(self, events)

    monkeypatch.setattr(JSONLSink, "write", counted)
    with EventBus() as bus:
        bus.attach(JSONLSink(tmp_path / "e.jsonl", flush_interval=30.0))
        for step in range(1000):
            bus.publish(TrainBatchEnd(epoch=0, batch=step, step=step))
    assert sum(sizes) == 1000
    assert len(sizes) <= 3


def test_a_killed_process_leaves_an_unbroken_beginning(tmp_path: Path) -> None:
    """SIGKILL in the middle of a training: every line but perhaps the last is whole, and none before it is missing."""
    path = tmp_path / "e.jsonl"
    script = (
        "import sys\n"
        "from eventbus import EventBus, TrainBatchEnd\n"
        "from sinks import JSONLSink\n"
        "bus = EventBus(run='r')\n"
        "bus.attach(JSONLSink(sys.argv[1], flush_interval=0.01))\n"
        "step = 0\n"
        "while True:\n"
        "    bus.publish(TrainBatchEnd(epoch=0, batch=step, step=step, metrics={'loss': 0.5})); step += 1\n"
        "    if step % 100 == 0: bus.flush()\n"
    )
    for turn in range(3):
        child = subprocess.Popen([sys.executable, "-c", script, str(path)])
        wait_until(lambda: path.exists() and path.stat().st_size > 200_000)
        time.sleep(0.013 * turn)
        child.kill()
        child.wait()
        *whole, _ = path.read_bytes().split(b"\n")
        steps = [json.loads(line)["step"] for line in whole if b'"on_train_batch_end"' in line]
        assert steps == list(range(len(steps)))
        assert len(steps) > 500
        path.unlink()


@pytest.mark.parametrize("ending", ["", "sys.exit(3)", "raise LookupError('a bug of the user')"])
def test_a_script_that_never_closes_still_delivers(tmp_path: Path, receiver: Receiver, ending: str) -> None:
    """At a normal exit, at sys.exit and after an unhandled exception (G10)."""
    script = (
        "import sys\n"
        "from eventbus import EventBus, FitEpochEnd\n"
        "from sinks import CSVSink, JSONLSink, WebhookSink\n"
        "bus = EventBus(run='r')\n"
        "bus.attach(JSONLSink(sys.argv[1] + '/e.jsonl'))\n"
        "bus.attach(CSVSink(sys.argv[1] + '/m.csv'))\n"
        "bus.attach(WebhookSink(sys.argv[2]))\n"
        "for epoch in range(20):\n"
        "    bus.publish(FitEpochEnd(epoch=epoch))\n"
    )
    run_script(script + ending, str(tmp_path), receiver.url(), rc={"": 0, "sys.exit(3)": 3}.get(ending, 1))
    assert [event.epoch for event in read_jsonl(tmp_path / "e.jsonl")] == list(range(20))
    assert [row["epoch"] for row in rows_of(tmp_path / "m.csv")] == [str(n) for n in range(20)]
    assert [body["data"]["epoch"] for body in receiver.bodies] == list(range(20))


def test_a_resumed_run_continues_its_files(tmp_path: Path) -> None:
    """Killed at epoch 3, resumed from epoch 2: every epoch once in the table, all of it in the log."""
    for attempt, epochs in ((0, range(4)), (1, range(2, 6))):
        with EventBus(run="r") as bus:
            bus.attach(JSONLSink(tmp_path / "e.jsonl"))
            bus.attach(CSVSink(tmp_path / "m.csv"))
            for epoch in epochs:
                bus.publish(FitEpochEnd(epoch=epoch, attempt=attempt))
    rows = rows_of(tmp_path / "m.csv")
    assert [(row["epoch"], row["attempt"]) for row in rows] == [*(("0", "0"), ("1", "0")), *((n, "1") for n in "2345")]
    assert [event.epoch for event in read_jsonl(tmp_path / "e.jsonl")] == [0, 1, 2, 3, 2, 3, 4, 5]


def wait_until(condition: Any, timeout: float = 10.0) -> None:
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, "the awaited state was never reached"
        time.sleep(0.005)


def run_script(script: str, *arguments: str, rc: int = 0, is_silent: bool = True) -> None:
    result = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", script, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )
    assert result.returncode == rc, result.stderr
    assert "Fatal" not in result.stderr
    assert rc == 1 or not is_silent or not result.stderr, result.stderr
