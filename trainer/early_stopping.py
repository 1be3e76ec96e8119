"""Stop when the run no longer gets better."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from eventbus.fitness import Fitness, Mode
from trainer.callback import Callback

if TYPE_CHECKING:
    from trainer.trainer import Trainer

__all__ = ["EarlyStopping"]


class EarlyStopping(Callback):
    """Ask for a stop after `patience` epochs in a row without a gain of more than `min_delta`.

    It follows the trainer's fitness, or `monitor` (with `mode`) when given; an epoch that lacks the metric does not
    count, nor does one that was cut short; one where it is NaN counts as no gain. A run that was stopped by it stops at
    once when it is resumed; asked for more epochs or steps than before (or after `reset`), it waits anew.
    """

    def __init__(
        self, monitor: str | None = None, *, patience: int = 10, min_delta: float = 0.0, mode: Mode = "auto"
    ) -> None:
        if patience < 1:
            raise ValueError(f"patience must be at least 1 epoch, not {patience}.")
        self.patience = patience
        self.min_delta = min_delta
        self._fitness = Fitness(monitor, mode) if monitor is not None else None
        self.reset()

    def reset(self) -> None:
        """Forget what was seen, so that a run that was stopped can go on."""
        self.waited = 0
        self.best: float | None = None
        self.best_value: float | None = None
        self.reason = ""

    def on_train_start(self, trainer: Trainer) -> None:
        """Stop a resumed run again, if it had been stopped by this."""
        if self.reason and trainer.progress.wants_more:
            self.waited, self.reason = 0, ""
        if self.reason:
            self._stop(trainer)

    def on_fit_epoch_end(self, trainer: Trainer) -> None:
        """Count an epoch."""
        if not trainer.progress.is_whole:
            return
        fitness = self._fitness
        if fitness is None:
            fitness = trainer.progress.fitness
        else:
            fitness.judge(trainer.metrics, validated=trainer.progress.is_validated)
        if fitness.current is None:
            return
        if self._is_gain(fitness.current):
            self.best, self.best_value, self.waited = fitness.current, fitness.value(trainer.metrics), 0
            return
        self.waited += 1
        if self.waited >= self.patience:
            self.reason = self._words(fitness.source)
            self._stop(trainer)

    def _is_gain(self, current: float) -> bool:
        return not math.isnan(current) and (self.best is None or current > self.best + self.min_delta)

    def _words(self, metric: str | None) -> str:
        best = "a number" if self.best_value is None else f"{self.best_value:.6g}"
        return f"{metric} has not improved on {best} for {self.waited} epoch{'s'[: self.waited != 1]}"

    def _stop(self, trainer: Trainer) -> None:
        trainer.bus.control.stop(self.reason, run=trainer.run, requester=type(self).__name__)

    def state_dict(self) -> Mapping[str, Any]:
        """The best so far and for how long there was none better."""
        return {"waited": self.waited, "best": self.best, "best_value": self.best_value, "reason": self.reason}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on counting where an earlier attempt was."""
        self.waited, self.reason = state["waited"], state["reason"]
        self.best, self.best_value = state["best"], state["best_value"]
