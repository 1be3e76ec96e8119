"""Prediction, batch by batch, as its reader asks for it."""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING, Any

from eventbus import events
from eventbus.batches import size_of
from trainer.delivery import owed
from trainer.devices import evaluating, move
from trainer.weights import averaged_weights

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from trainer.trainer import Trainer

__all__ = ["predict"]


def predict(trainer: Trainer, loader: Iterable[Any]) -> Iterator[Any]:
    """Yield the outputs of each batch, as they are read; ends properly when the reader stops early."""
    run, started, done, results = trainer.progress, monotonic(), 0, None

    def end() -> None:
        with trainer.showing(results=results):
            run.publish(events.PredictEnd, batch=done, seconds=monotonic() - started)

    with owed(end):
        run.publish(events.PredictStart)
        for batch, data in enumerate(loader):
            results = predict_batch(trainer, data, {"batch": batch, "batch_size": size_of(data)})
            done += 1
            yield results


def predict_batch(trainer: Trainer, data: Any, place: dict[str, Any]) -> Any:
    """One batch of a prediction; what comes of it is `trainer.results` as the hooks leave it."""
    run, started = trainer.progress, monotonic()
    with trainer.showing(batch=data, results=None):
        with owed(lambda: run.publish(events.PredictBatchEnd, seconds=monotonic() - started, **place)):
            run.publish(events.PredictBatchStart, **place)
            trainer.batch = move(data, trainer.device)
            # not while the reader has control: no_grad, and other weights, would leak into its code
            with averaged_weights(trainer), evaluating(trainer.model), trainer.casting():
                trainer.results = trainer.prediction_step(trainer.batch)
            run.publish(events.PredictPostprocessEnd, seconds=monotonic() - started, **place)
        return trainer.results
