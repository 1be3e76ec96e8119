"""A line that shows how far the training is: on stderr, and never more often than people can read."""

from __future__ import annotations

import math
import sys
from time import monotonic
from typing import TYPE_CHECKING, Any, TextIO

from trainer.callback import Callback

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trainer.trainer import Trainer

__all__ = ["ProgressBar"]


class ProgressBar(Callback):
    """A bar per epoch on a terminal (with tqdm), else a plain line every `line_every` seconds and at each epoch's end.

    It writes to stderr, on rank 0 only, and reads the loss only when it is about to show it.
    """

    priority = -100  # after callbacks that add metrics

    def __init__(self, *, refresh_every: float = 0.2, line_every: float = 10.0, file: TextIO | None = None) -> None:
        self._refresh_s = refresh_every
        self._line_s = line_every
        self._file = file
        self._bar: Any = None
        self._shown_at = -math.inf

    def on_train_epoch_start(self, trainer: Trainer) -> None:
        """Begin the bar of an epoch."""
        if trainer.rank == 0:
            self._shown_at = monotonic()
            self._bar = _bar(self._out, f"epoch {_counted(trainer)}", trainer.progress.batches)

    def on_train_batch_end(self, trainer: Trainer) -> None:
        """Go on by one batch; refresh when it is time to."""
        if self._bar is not None:
            self._bar.update(1)
        every_s = self._refresh_s if self._bar is not None else self._line_s
        if trainer.rank == 0 and monotonic() - self._shown_at >= every_s:
            self._shown_at = monotonic()
            self._show(trainer)

    def _show(self, trainer: Trainer) -> None:
        loss = {} if trainer.tloss is None else {"loss": f"{float(trainer.tloss):.4g}"}  # waits for the GPU
        if self._bar is not None:
            self._bar.set_postfix(loss)
        else:
            of = "" if trainer.progress.batches is None else f"/{trainer.progress.batches}"
            self._write(f"epoch {_counted(trainer)} batch {trainer.batch_idx + 1}{of} {_words(loss)}")

    def on_train_epoch_end(self, trainer: Trainer) -> None:
        """Take the bar away."""
        self._close()

    def on_fit_epoch_end(self, trainer: Trainer) -> None:
        """One line that stays: the metrics of the epoch."""
        if trainer.rank == 0:
            numbers = {name: f"{value:.4g}" for name, value in trainer.metrics.items()}
            self._write(f"epoch {_counted(trainer)} {_words(numbers)}")

    def on_train_end(self, trainer: Trainer) -> None:
        """Say how it ended."""
        self._close()
        if trainer.rank == 0:
            self._write(f"training {trainer.reason} after {trainer.step} steps")

    @property
    def _out(self) -> TextIO:
        return self._file if self._file is not None else sys.stderr

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _write(self, line: str) -> None:
        self._out.write(line.rstrip() + "\n")
        self._out.flush()


def _bar(file: TextIO, label: str, total: int | None) -> Any:
    """A tqdm bar where there is a terminal to draw it on, and tqdm; else None."""
    if not file.isatty():
        return None
    try:
        from tqdm import tqdm  # type: ignore[import-untyped]  # its stubs are a package of their own
    except ImportError:
        return None
    return tqdm(total=total, desc=label, file=file, leave=False, mininterval=0.1, dynamic_ncols=True)


def _counted(trainer: Trainer) -> str:
    return f"{trainer.epoch + 1}" if trainer.epochs is None else f"{trainer.epoch + 1}/{trainer.epochs}"


def _words(values: Mapping[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in values.items())
