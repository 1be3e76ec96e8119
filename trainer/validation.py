"""Evaluating a model on a loader: the validation of an epoch, and those before, after and outside of a training."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from eventbus import events
from eventbus.batches import size_of
from eventbus.fitness import Means, qualified
from trainer.delivery import owed
from trainer.devices import evaluating, move
from trainer.lockstep import read_to_the_end, same_buffers
from trainer.outcome import read_validation, samples
from trainer.weights import averaged_weights

if TYPE_CHECKING:
    from trainer.trainer import Trainer

__all__ = ["evaluate", "validate"]


def validate(trainer: Trainer, loader: Iterable[Any], *, phase: str) -> dict[str, float]:
    """Evaluate the model, with its averaged weights where it has some; see `evaluate`."""
    with averaged_weights(trainer):
        return evaluate(trainer, loader, phase=phase)


def evaluate(trainer: Trainer, loader: Iterable[Any], *, phase: str) -> dict[str, float]:
    """Evaluate without gradients; the means over the loader by bare name, or nothing when a stop cut it short.

    They join the metrics of the epoch, where `on_val_end` finds them and may add others, unless `run.apart()`.
    """
    run = trainer.progress
    place = {"epoch": None if phase in ("sanity", "standalone") else run.epoch, "phase": phase}
    metrics: dict[str, float] = {}
    doing = "val" if phase == "fit" else phase

    def end() -> None:
        run.metrics |= qualified(phase if phase in ("final", "test") else "val", metrics)
        run.publish(events.ValEnd, step=run.step, metrics=metrics, **place)

    with owed(end), trainer.doing(doing):
        run.publish(events.ValStart, step=run.step, **place)
        with evaluating(trainer.model), same_buffers(trainer.model):
            metrics |= validate_batches(trainer, loader, place)
    return metrics


def validate_batches(trainer: Trainer, loader: Iterable[Any], place: dict[str, Any]) -> dict[str, float]:
    """Every batch of a validation."""
    run, means, outputs = trainer.progress, Means(), list[Any]()
    was_stopped, weight = run.is_stopped, 0
    for batch, data in enumerate(read_to_the_end(run, loader, obeys=place["phase"] != "standalone")):
        result = validate_batch(trainer, data, means, batch=batch, **place)
        weight += size_of(data) or 1
        if trainer.keeps_outputs:
            outputs.append(result)
    if run.is_stopped and not was_stopped:
        return {}
    if not run.ranks.any(weight > 0):
        raise ValueError(f"The loader to validate on (phase {place['phase']!r}) gave no batch.")
    numbers = trainer.validation_numbers(outputs) if weight else {}
    return run.averaged(means, numbers, weight=weight)


def validate_batch(trainer: Trainer, data: Any, means: Means, **place: Any) -> Any:
    """One batch of a validation; returns what the step returned."""
    run = trainer.progress
    metrics: dict[str, Any] = {}
    with (
        trainer.showing(batch=data, results=None),
        owed(lambda: run.publish(events.ValBatchEnd, metrics=metrics, **place)),
    ):
        run.publish(events.ValBatchStart, **place)
        trainer.batch = move(data, trainer.device)
        with trainer.casting():
            trainer.results = result = trainer.validation_step(trainer.batch)
        metrics, outputs = read_validation(result)
        means.add(metrics, size_of(data) or 1)
        if run.bus.hears(events.ValImageEnd):
            for sample in samples(outputs, size_of(data) or 0):
                run.publish(events.ValImageEnd, metrics=sample, **place)
    return result
