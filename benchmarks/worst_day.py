"""A training step on the worst day: every subscriber is dead, stuck, or burns CPU in a process."""

from __future__ import annotations

import logging
import os
import signal
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import anyio
import torch
from torch import nn

from benchmarks.measure import Row, ratio_row
from eventbus import Event, EventBus, TrainBatchEnd
from sinks import CSVSink, JSONLSink, WebhookSink

_STEPS = 40
_ROUNDS = 15


def rows() -> Iterator[Row]:
    """Forty steps that publish to the dead, then forty beside nothing; the ratio of each pair."""
    torch.set_num_threads(1)
    logging.disable(logging.ERROR)
    step = training_step()
    steps(step, None)
    with closing(black_hole()) as hole:
        pairs = [(on_the_worst_day(step, hole.getsockname()[1]), steps(step, None)) for _ in range(_ROUNDS)]
    logging.disable(logging.NOTSET)
    plain = statistics.median(other for _, other in pairs)
    ratio = statistics.median(one / other for one, other in pairs)
    yield ratio_row(
        f"a training step, every subscriber dead, stuck or burning / no bus, median of {_ROUNDS} pairs",
        ratio * plain, plain, "≤ 1.02 ×", unit="s", most=1.02,
    )  # fmt: skip


def on_the_worst_day(step: training_step, port: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        bus = EventBus(journal=Path(folder, "journal"))
        attach_the_dead(bus, Path(folder), port)
        with bus:
            steps(step, bus)
            time.sleep(1.5)  # the processes have started
            seconds = steps(step, bus)
            bus.close(timeout=0.2)
    return seconds


def attach_the_dead(bus: EventBus, folder: Path, port: int) -> None:
    """One of each kind of trouble, on every batch."""
    for handler in (raises, hangs, holds_the_loop):
        bus.subscribe(handler, TrainBatchEnd)
    bus.subscribe(stuck, TrainBatchEnd, run_in="thread")
    bus.subscribe(burns, TrainBatchEnd, run_in="process")
    bus.subscribe(stops, TrainBatchEnd, run_in="process")
    bus.subscribe(dies, TrainBatchEnd, run_in="process")
    bus.attach(WebhookSink("http://127.0.0.1:9/refused", hooks="on_train_batch_end"), name="refused")
    bus.attach(WebhookSink(f"http://127.0.0.1:{port}/never", hooks="on_train_batch_end"), name="never answers")
    (folder / "file").touch()
    bus.attach(JSONLSink(folder / "file" / "events.jsonl"))
    bus.attach(CSVSink(folder / "file" / "rows.csv", hooks="on_train_batch_end"))


async def raises(event: Event) -> None:
    raise RuntimeError("every time")


async def hangs(event: Event) -> None:
    await anyio.sleep_forever()


async def holds_the_loop(event: Event) -> None:
    time.sleep(0.02)


def stuck(event: Event) -> None:
    threading.Event().wait()


def burns(event: Event) -> None:
    """200 µs of Python."""
    end_s = time.perf_counter() + 200e-6
    while time.perf_counter() < end_s:
        pass


def stops(event: Event) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def dies(event: Event) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def black_hole() -> socket.socket:
    """Takes connections and never answers."""
    return socket.create_server(("127.0.0.1", 0), backlog=128)


class training_step:  # noqa: N801  # called like a function
    """One step of a small network on the CPU, some 10 ms."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 26 * 26, 10))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.images, self.labels = torch.randn(64, 1, 28, 28), torch.randint(0, 10, (64,))

    def __call__(self) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self.model(self.images), self.labels)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def steps(step: training_step, bus: EventBus | None) -> float:
    """Seconds of one step, the mean of some."""
    started = time.perf_counter()
    for batch in range(_STEPS):
        loss = step()
        if bus is not None:
            bus.publish(TrainBatchEnd(epoch=0, batch=batch, step=batch + 1, metrics={"loss": loss}, lr=(0.01,)))
    return (time.perf_counter() - started) / _STEPS
