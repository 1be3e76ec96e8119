"""The batches of a run: counters, metrics, learning rates, and their events."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from eventbus.events import Event, Log, LRChange, TrainBatchEnd, TrainBatchStart
from eventbus.fitness import Means, qualified
from eventbus.lifecycle import Lifecycle, Plan
from eventbus.rates import rates_of

if TYPE_CHECKING:
    from eventbus.bus import EventBus
    from eventbus.rates import Optimizer

__all__ = ["Batches", "length_of", "positive", "setter", "size_of"]


class Batches(Lifecycle):
    """A run with its batches; an end is only published for what is open."""

    def __init__(
        self, bus: EventBus, plan: Plan, *, optimizer: Optimizer | None = None, log_every: int | None = 50
    ) -> None:
        super().__init__(bus, plan)
        self.optimizer = optimizer
        self.log_every = log_every
        self.batch = 0
        self.global_batch = -1
        #: How many a full epoch has; None when the loader does not know.
        self.batches: int | None = None
        #: How many make one optimizer update.
        self.accumulate = 1
        #: How many of this epoch have begun.
        self.seen = 0
        self.batch_metrics: dict[str, Any] = {}
        self.batch_size: int | None = None
        #: "skipped" when no update comes of this batch: its metrics are told, and are in no mean.
        self.status = "ok"
        self.means = Means()
        #: Whether a batch that completes its group counts as an update, for loops that do not tell theirs.
        self.counts_steps = False
        #: Whether a learning rate that changes during a batch is told, as "callback".
        self.watches_rates = False
        #: The same since the last `on_log`, and the step that had.
        self.window = Means()
        self.logged_step = self.step
        self._rates: tuple[float, ...] = ()
        #: What has begun and not ended: "epoch", "training", "batch".
        self._open: set[str] = set()

    def ready(self, **found: Any) -> None:
        """Say that set-up is done and that the epochs begin, as `Lifecycle.ready` does."""
        self._rates = rates_of(self.optimizer)
        super().ready(**found)

    @property
    def is_update_due(self) -> bool:
        """Whether this batch completes its group: every `accumulate` batches, and at the end of the loader."""
        return not self.is_group_open or self.seen == self.batches

    @property
    def is_group_open(self) -> bool:
        """Whether the batches since the last full group are fewer than `accumulate`."""
        return self.seen % self.accumulate != 0

    @property
    def is_in_batch(self) -> bool:
        """Whether a batch has begun and not ended."""
        return "batch" in self._open

    @property
    def is_training(self) -> bool:
        """Whether the training part of an epoch has begun and not ended."""
        return "training" in self._open

    @property
    def is_in_epoch(self) -> bool:
        """Whether an epoch has begun and its `on_fit_epoch_end` is still due."""
        return "epoch" in self._open

    def start_batch(self, batch: Any) -> None:
        """Begin a batch that was read from the loader."""
        self.batch = self.seen
        self.seen += 1
        self.global_batch += 1
        self.batch_metrics = {}
        self.batch_size = size_of(batch)
        self.status = "ok"
        self._open.add("batch")
        self.tell(TrainBatchStart)

    @property
    def position(self) -> dict[str, int]:
        """The fields that all events of a batch share."""
        return {"epoch": self.epoch, "batch": self.batch, "global_batch": self.global_batch, "step": self.step}

    def tell(self, kind: type[Event], **fields: Any) -> None:
        """Publish an event of this batch."""
        if not self.bus._ignores(kind):
            self.publish(kind, **fields, **self.position)

    def end_batch(self) -> None:
        """End the batch that is open, if one is, with the metrics it was given."""
        if not self.is_in_batch:
            return
        self.step += self.counts_steps and self.is_update_due
        if self.status != "skipped":
            weight = float(self.batch_size or 1)
            self.means.add(self.batch_metrics, weight)
            self.window.add(self.batch_metrics, weight)
        self._close("batch")
        self._tell_batch(self.batch_metrics, self.status)
        self.tell_averages()
        if self.watches_rates:
            self.tell_rates("callback")

    def _tell_batch(self, metrics: dict[str, Any], status: str) -> None:
        size, rates = self.batch_size, rates_of(self.optimizer)
        self.tell(TrainBatchEnd, metrics=metrics, lr=rates, batch_size=size, status=status)

    def tell_averages(self) -> None:
        """Publish the means since the last `on_log`, when `log_every` steps were made since."""
        if self.log_every is None or self.step < self.logged_step + self.log_every:
            return
        values = qualified("train", self.window.running())
        values |= {f"lr/pg{group}": rate for group, rate in enumerate(rates_of(self.optimizer))}
        self.window = Means()
        self.logged_step = self.step
        self.publish(Log, epoch=self.epoch, step=self.step, values=values)

    def tell_rates(self, reason: str) -> None:
        """Publish `on_lr_change` if a learning rate is not what it was last."""
        old, self._rates = self._rates, rates_of(self.optimizer)
        if old and self._rates != old:
            self.publish(LRChange, step=self.step, old=old, new=self._rates, reason=reason)

    def abandon_batch(self) -> None:
        """End the batch that is open as one of which nothing came."""
        if self._close("batch"):
            self._tell_batch({}, "skipped")

    def _close(self, part: str) -> bool:
        was_open = part in self._open
        self._open.discard(part)
        return was_open


def size_of(batch: Any, depth: int = 4) -> int | None:
    """How many samples a batch holds: the first dimension of the first tensor or array in it; None without one."""
    shape = getattr(batch, "shape", None)
    if shape is not None:
        return int(shape[0]) if len(shape) else None
    if depth == 0 or isinstance(batch, str | bytes):
        return None
    if isinstance(batch, list | tuple):  # first, as what most loaders give
        parts: Iterable[Any] = batch
    elif isinstance(batch, Mapping):
        parts = batch.values()
    else:
        parts = getattr(batch, "__dict__", {}).values()
    for part in parts:
        size = size_of(part, depth - 1)
        if size is not None:
            return size
    return None


def positive(name: str, value: Any) -> int:
    """A whole number of at least 1; raises `ValueError` otherwise."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, not {value!r}")
    return value


def setter(owner: object, name: str, check: Callable[[str, Any], Any] = positive) -> Callable[[Any], None]:
    """A function that sets an attribute to a value that `check` lets pass, for `Control.set`."""
    return partial(_set, owner, name, check)  # no closure, so that a run can be pickled


def _set(owner: object, name: str, check: Callable[[str, Any], Any], value: Any) -> None:
    setattr(owner, name, check(name, value))


def length_of(loader: Any) -> int | None:
    """How many batches a loader has; None when it does not know."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None
