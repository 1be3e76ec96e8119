"""The demo: a small CNN learns handwritten digits while slow sinks listen, beside the same training without them.

An application of all three packages, and the one place in `trainer` that knows sinks.
"""

from __future__ import annotations

import time
from pathlib import Path

from eventbus import EventBus, TrainBatchEnd
from sinks import CSVSink, JSONLSink, Retry, WebhookSink
from trainer.demo.digits import TimedTrainer, digits_trainer, load_digits_loaders
from trainer.demo.receiver import SlowReceiver
from trainer.demo.report import Findings, print_findings

__all__ = ["run"]

_ROUNDS = 2
_INLINE_BATCHES = 3
_SECRET = "whsec_" + "dHJhaW5idXMtZGVtby1zZWNyZXQtMzItYnl0ZXMh"


def run(*, epochs: int, folder: Path) -> int:
    """Train with and without subscribers in turn, and say what came of it; 0 when everything holds."""
    started = time.perf_counter()
    name = time.strftime("demo-%Y%m%d-%H%M%S")
    home = folder / name
    with SlowReceiver(delay_s=0.5, secret=_SECRET) as receiver:
        bus = EventBus(run=name)
        losses = subscribe(bus, home, receiver.url)
        print(f"Training {2 * _ROUNDS} times for {epochs} epochs on 1,797 handwritten digits, in turn without and with")
        print(
            "JSONL, CSV, a coroutine per batch, and a webhook whose receiver takes 500 ms and fails every fifth time.\n"
        )
        fit(None, epochs=1, folder=None)  # warm up: the first steps of a process are slower
        pairs = [train_pair(bus, home / f"round{number}", epochs) for number in range(_ROUNDS)]
        inline_s = inline_webhook_step(receiver.url)
        stats = bus.stats()
        table = bus.report()
        report = bus.close(30.0)
        received = receiver.requests
    findings = Findings(
        pairs, inline_s, stats, table, report, received, len(losses), home, time.perf_counter() - started
    )
    return print_findings(findings)


def subscribe(bus: EventBus, home: Path, url: str) -> list[float]:
    """The subscribers of the demo; returns the list that the coroutine fills."""
    losses: list[float] = []

    @bus.on("on_train_batch_end")
    async def collect_loss(event: TrainBatchEnd) -> None:
        losses.append(event.metrics["loss"])

    bus.attach(JSONLSink(home / "events.jsonl"), name="jsonl")
    bus.attach(CSVSink(home / "batches.csv", hooks="on_train_batch_end"), name="csv of batches")
    bus.attach(CSVSink(home / "epochs.csv"), name="csv of epochs")
    bus.attach(WebhookSink(url, secret=_SECRET, retry=Retry(delays_s=(0, 0.2, 0.5, 1.0))), name="webhook")
    return losses


def train_pair(bus: EventBus, home: Path, epochs: int) -> tuple[TimedTrainer, TimedTrainer]:
    """The same training without subscribers and with them."""
    return fit(None, epochs=epochs, folder=None), fit(bus, epochs=epochs, folder=home)


def fit(bus: EventBus | None, *, epochs: int, folder: Path | None) -> TimedTrainer:
    """Train once; without a bus, nobody listens to the trainer's own. The file writing is the same on both sides."""
    train_loader, val_loader = load_digits_loaders()
    trainer = digits_trainer(bus, folder)
    trainer.fit(train_loader, val_loader, epochs=epochs)
    return trainer


def inline_webhook_step(url: str) -> float:
    """Seconds per step when the same request is made by a plain callback."""
    import httpx

    bus = EventBus()
    with httpx.Client(trust_env=False) as client:

        @bus.on("on_train_batch_end")
        def post(event: TrainBatchEnd) -> None:
            client.post(url, json={"step": event.step}, headers={"webhook-id": "inline"})

        train_loader, _ = load_digits_loaders()
        trainer = digits_trainer(bus, None, monitor=None)
        trainer.fit(train_loader, max_steps=_INLINE_BATCHES + 1)
    return sum(trainer.step_seconds) / len(trainer.step_seconds)
