"""A real training run with slow sinks, beside the same run without a bus."""

from __future__ import annotations

import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import torch
from torch import nn

from benchmarks.burning import BURN_S, burn
from benchmarks.measure import Row, ratio_row
from eventbus import EventBus, TrainBatchEnd
from sinks import CSVSink, JSONLSink, WebhookSink

_BATCHES = 50
_PAIRS = 80


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
    with tempfile.TemporaryDirectory() as folder, with_sinks(server.server_port, Path(folder)) as bus:
        ours, plain = paired(bus)
        bus.off("WebhookSink")
    server.shutdown()
    yield ratio_row(
        f"{_BATCHES} batches, webhook in 500 ms, JSONL and CSV on every batch / no bus, median of {_PAIRS} pairs",
        ours, plain, "≤ 1.01 ×", unit="s", most=1.01,
    )  # fmt: skip
    with with_burner() as bus:
        ours, plain = paired(bus)
    yield ratio_row(
        f"the same with {1e6 * BURN_S:.0f} µs of Python per batch in a process / no bus, median of {_PAIRS} pairs",
        ours, plain, "≤ 1.05 ×", unit="s", most=1.05,
    )  # fmt: skip


def paired(bus: EventBus) -> tuple[float, float]:
    """Batches that are published and batches that are not, in turn, since these machines drift by half in seconds.

    What is pending is delivered in between, as far as that takes little time (to a slow webhook it takes for ever).
    """
    pairs = []
    for _ in range(_PAIRS):
        ours = train(bus)
        bus.flush(0.1)
        pairs.append((ours, train(None)))
    plain = statistics.median(other for _, other in pairs)
    return plain * statistics.median(one / other for one, other in pairs), plain


@contextmanager
def with_burner() -> Iterator[EventBus]:
    bus = EventBus()
    bus.subscribe(burn, "on_train_batch_end", run_in="process")
    with bus:
        bus.publish(TrainBatchEnd(epoch=0, batch=0, step=0))
        bus.flush()  # its process has started
        train(bus)
        yield bus


@contextmanager
def with_sinks(port: int, folder: Path) -> Iterator[EventBus]:
    bus = EventBus()
    bus.attach(JSONLSink(folder / "events.jsonl"))
    bus.attach(CSVSink(folder / "batches.csv", hooks="on_train_batch_end"))
    bus.attach(WebhookSink(f"http://127.0.0.1:{port}/", hooks=("on_train_batch_end",)))
    with bus:
        train(bus)
        yield bus


def train(bus: EventBus | None) -> float:
    """Train for a while, publishing each batch where there is a bus; returns the seconds of the loop."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 26 * 26, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    images, labels = torch.randn(32, 1, 28, 28), torch.randint(0, 10, (32,))
    started = time.perf_counter()
    for batch in range(_BATCHES):
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if bus is not None:
            bus.publish(
                TrainBatchEnd(epoch=0, batch=batch, step=batch + 1, metrics={"loss": loss.detach()}, lr=(0.01,))
            )
    return time.perf_counter() - started
