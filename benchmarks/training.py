"""A real training run with slow sinks, beside the same run without a bus."""

from __future__ import annotations

import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import torch
from torch import nn

from benchmarks.burning import BURN_S, burn
from benchmarks.measure import Row, ratio_row
from eventbus import EventBus, TrainBatchEnd
from sinks import CSVSink, JSONLSink, WebhookSink

_BATCHES = 150
_ROUNDS = 14


class SlowReceiver(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        time.sleep(0.5)
        self.send_response(204)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


def rows() -> Iterator[Row]:
    torch.set_num_threads(1)  # the other core is the sinks', as a GPU's host has cores to spare
    server = ThreadingHTTPServer(("127.0.0.1", 0), SlowReceiver)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with tempfile.TemporaryDirectory() as folder:
        train(None, batches=50)
        with_bus(server.server_port, Path(folder, "warm-up"), batches=50)
        ours, plain = paired(lambda number: with_bus(server.server_port, Path(folder, str(number))))
    server.shutdown()
    yield ratio_row(
        f"{_BATCHES} batches, webhook answering in 500 ms, JSONL and CSV on every batch / no bus, medians of {_ROUNDS}",
        ours, plain, "≤ 1.01 ×", unit="s", most=1.01,
    )  # fmt: skip
    ours, plain = paired(lambda _: with_burner())
    yield ratio_row(
        f"the same with {1e6 * BURN_S:.0f} µs of Python per batch in a process / no bus, medians of {_ROUNDS}",
        ours, plain, "≤ 1.05 ×", unit="s", most=1.05,
    )  # fmt: skip


def paired(run: Callable[[int], float]) -> tuple[float, float]:
    """The medians of a run and of the same without a bus, in turns."""
    pairs = []
    for number in range(_ROUNDS):
        plain = train(None)
        pairs.append((run(number), plain))
    ours, plain = (statistics.median(times) for times in zip(*pairs, strict=True))
    return ours, plain


def with_burner() -> float:
    bus = EventBus()
    bus.subscribe(burn, "on_train_batch_end", run_in="process")
    with bus:
        bus.publish(TrainBatchEnd(epoch=0, batch=0, step=0))
        bus.flush()  # its process has started
        return train(bus)


def with_bus(port: int, folder: Path, batches: int = _BATCHES) -> float:
    bus = EventBus()
    bus.attach(JSONLSink(folder / "events.jsonl"))
    bus.attach(CSVSink(folder / "batches.csv", hooks="on_train_batch_end"))
    bus.attach(WebhookSink(f"http://127.0.0.1:{port}/", hooks=("on_train_batch_end",)))
    with bus:
        time.sleep(0.3)  # a training is longer than the start of its sinks
        seconds = train(bus, batches)
        bus.off("WebhookSink")
    return seconds


def train(bus: EventBus | None, batches: int = _BATCHES) -> float:
    """Train for a while, publishing each batch where there is a bus; returns the seconds of the loop."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 26 * 26, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    images, labels = torch.randn(32, 1, 28, 28), torch.randint(0, 10, (32,))
    started = time.perf_counter()
    for batch in range(batches):
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if bus is not None:
            bus.publish(
                TrainBatchEnd(epoch=0, batch=batch, step=batch + 1, metrics={"loss": loss.detach()}, lr=(0.01,))
            )
    return time.perf_counter() - started
