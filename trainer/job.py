"""What `Trainer.fit` was asked to do, and how it ended."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from eventbus.batches import positive

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from trainer.fitting import Fitting
    from trainer.trainer import Trainer

__all__ = ["FitResult", "Job", "check_counts", "check_needs_val_loader", "result_of", "say_that_nothing_was_left"]

_log = logging.getLogger("trainbus")


@dataclass(frozen=True, kw_only=True)
class FitResult:
    """How a training ended."""

    #: "completed", "stopped", or "interrupted" by one of `signals`; other ends leave `Trainer.fit` as an exception.
    reason: str
    #: What the stop was asked with, or that a resumed run had nothing left to train; empty otherwise.
    stop_reason: str
    #: The last epoch that began, 0-based; None when there was none.
    epoch: int | None
    #: Optimizer updates.
    step: int
    #: Of the last epoch (``train/loss``, ``val/loss``), and of the best model (``final/loss``, ``test/loss``).
    metrics: Mapping[str, float]
    #: Higher is better.
    best_fitness: float | None
    seconds: float
    run: str
    #: The checkpoints that are on disk.
    last: Path | None
    best: Path | None


@dataclass
class Job:
    """What `Trainer.fit` was asked to do."""

    train_loader: Iterable[Any]
    val_loader: Iterable[Any] | None = None
    test_loader: Iterable[Any] | None = None
    validate_every: int | None = None
    save_every: int | None = None
    #: How many batches of the `val_loader` are tried before the first epoch.
    sanity_batches: int = 0
    #: Whether the best model is evaluated on the `val_loader` at the end.
    validates_best: bool = False
    checkpoint_path: Path | None = None
    checkpoint: Mapping[str, Any] | None = None

    def validates_epoch(self, run: Fitting) -> bool:
        """Whether a validation belongs to this epoch."""
        return self.val_loader is not None and _is_due_after_epoch(self.validate_every, run)

    def saves_epoch(self, run: Fitting) -> bool:
        """Whether a checkpoint follows this epoch: when it is due, and when the run ends with it in good health."""
        if run.has_diverged:
            return False
        # what one process was asked, the others only know after the next safe point
        will_stop = run.should_stop if run.is_alone else run.is_stopped
        return will_stop or _is_due_after_epoch(self.save_every, run)

    def saves_end(self, run: Fitting) -> bool:
        """Whether a checkpoint is still to be written: the run was asked to end after none had been due."""
        return run.is_unsaved and not run.has_diverged

    def validates_step(self, run: Fitting) -> bool:
        """Whether a validation is due between two batches."""
        return self.val_loader is not None and _is_due_after_step(self.validate_every, run)

    def last_loaders(self) -> Iterator[tuple[str, Iterable[Any]]]:
        """What the best model is evaluated on at the end, by phase."""
        if self.validates_best and self.val_loader is not None:
            yield "final", self.val_loader
        if self.test_loader is not None:
            yield "test", self.test_loader

    def saves_step(self, run: Fitting) -> bool:
        """Whether a checkpoint is due between two batches."""
        return _is_due_after_step(self.save_every, run)


def check_counts(*, epochs: int | None, max_steps: int | None, **others: int | None) -> None:
    """Raise `ValueError` for a number that counts nothing, and for a training without an end."""
    for name, value in {"epochs": epochs, "max_steps": max_steps, **others}.items():
        if value is not None:
            positive(name, value)
    if epochs is None and max_steps is None:
        raise ValueError("Say how long to train: epochs= or max_steps=.")


def check_needs_val_loader(val_loader: Any, *, sanity_batches: int, **others: bool) -> None:
    """Raise `ValueError` for what was asked for and is done with a `val_loader`, when there is none."""
    if sanity_batches:
        positive("sanity_batches", sanity_batches)
    asked = [name for name, is_asked in {"sanity_batches": bool(sanity_batches), **others}.items() if is_asked]
    if asked and val_loader is None:
        raise ValueError(f"{asked[0]} needs a val_loader.")


def _is_due_after_epoch(every: int | None, run: Fitting) -> bool:
    if run.is_last_epoch:
        return True
    if run.counts_in_steps:
        return every is None
    return (run.epoch + 1) % (every or 1) == 0


def _is_due_after_step(every: int | None, run: Fitting) -> bool:
    if every is None or not run.counts_in_steps or run.reached_max_steps:
        return False
    return run.has_updated and run.step % every == 0


def say_that_nothing_was_left(run: Fitting) -> None:
    """Tell why a resumed run did not train: its plan is done, or what stopped it before did so again."""
    if run.is_interrupted:
        return
    if not run.is_stopped:
        done = [f"{run.start_epoch} of {run.epochs} epochs"] if run.epochs is not None else []
        done += [f"{run.step} of {run.max_steps} steps"] if run.max_steps is not None else []
        run.stop_reason = f"nothing was left to train: {' and '.join(done)} are done"
    _log.warning(
        "Run %r was resumed and trained nothing: %s. To go on, ask for more epochs= or max_steps=.",
        run.run, run.stop_reason or "it was stopped at once",
    )  # fmt: skip


def result_of(trainer: Trainer) -> FitResult:
    """How the run of a trainer ended."""
    run, last, best = trainer.progress, trainer.last, trainer.best
    return FitResult(
        reason=run.reason,
        stop_reason=run.stop_reason,
        epoch=run.epoch if run.begun_epochs else None,
        step=run.step,
        metrics=dict(run.metrics),
        best_fitness=run.best_fitness,
        seconds=run.seconds,
        run=run.run,
        last=last if last is not None and last.exists() else None,
        best=best if best is not None and best.exists() else None,
    )
