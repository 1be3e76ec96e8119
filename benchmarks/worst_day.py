"""A training step on the worst day: every subscriber is dead, stuck, or burns CPU in a process."""

from __future__ import annotations

import logging
import socket
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import torch
from torch import nn

from benchmarks.burning import burn
from benchmarks.dead import dies, hangs, holds_the_loop, raises, stops, stuck
from benchmarks.measure import Row, ratio_row
from eventbus import EventBus, TrainBatchEnd
from sinks import CSVSink, JSONLSink, WebhookSink

_STEPS = 10
_PAIRS = 150


def rows() -> Iterator[Row]:
    """Ten steps that publish, ten that do not, in turn, beside the same dead: these machines drift by half in seconds.

    What the dead cost beside both is the second row.
    """
    torch.set_num_threads(1)
    logging.disable(logging.ERROR)
    step = training_step()
    with tempfile.TemporaryDirectory() as folder, closing(black_hole()) as hole:
        bus = EventBus(journal=Path(folder, "journal"))
        attach_the_dead(bus, Path(folder), hole.getsockname()[1])
        with bus:
            steps(step, bus)
            time.sleep(3.0)  # the processes have started
            pairs = [(steps(step, bus), steps(step, None)) for _ in range(_PAIRS)]
            share = idle_share(5.0)
            bus.close(timeout=0.2)
    logging.disable(logging.NOTSET)
    plain = statistics.median(other for _, other in pairs)
    ratio = statistics.median(one / other for one, other in pairs)
    yield ratio_row(
        f"a training step, every subscriber dead, stuck or burning / the step alone, median of {_PAIRS} pairs",
        ratio * plain, plain, "≤ 1.02 ×", unit="s", most=1.02,
    )  # fmt: skip
    yield Row("the same, CPU of the process while it publishes nothing", f"{share:.1%} of a core", "–", "–", "–", None)


def idle_share(seconds: float) -> float:
    """The share of a core that this process takes while it does nothing itself."""
    began, used = time.perf_counter(), time.process_time()
    time.sleep(seconds)
    return (time.process_time() - used) / (time.perf_counter() - began)


def attach_the_dead(bus: EventBus, folder: Path, port: int) -> None:
    """One of each kind of trouble, on every batch."""
    for handler in (raises, hangs, holds_the_loop):
        bus.subscribe(handler, TrainBatchEnd)
    bus.subscribe(stuck, TrainBatchEnd, run_in="thread")
    bus.subscribe(burn, TrainBatchEnd, run_in="process")
    bus.subscribe(stops, TrainBatchEnd, run_in="process")
    bus.subscribe(dies, TrainBatchEnd, run_in="process")
    bus.attach(WebhookSink("http://127.0.0.1:9/refused", hooks="on_train_batch_end"), name="refused")
    bus.attach(WebhookSink(f"http://127.0.0.1:{port}/never", hooks="on_train_batch_end"), name="never answers")
    (folder / "file").touch()
    bus.attach(JSONLSink(folder / "file" / "events.jsonl"))
    bus.attach(CSVSink(folder / "file" / "rows.csv", hooks="on_train_batch_end"))


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
