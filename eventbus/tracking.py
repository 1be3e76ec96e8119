"""`track`: the events of a training loop of one's own, in any framework.

It publishes the loop of `eventbus.events` but for what it cannot see: the inner-step events (`on_after_backward` to
`on_before_zero_grad`), which the loop may publish itself, and the batches of a validation.
"""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any, TypeVar

from eventbus.errors import WouldBlockError
from eventbus.events import Log, ModelSave, ValEnd, ValStart
from eventbus.fitness import Fitness, number, qualified
from eventbus.lifecycle import Plan
from eventbus.progress import Progress
from eventbus.signals import StopSignals, signals_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from types import TracebackType
    from typing import Self

    from eventbus.bus import EventBus
    from eventbus.gathering import Gather
    from eventbus.rates import Optimizer

__all__ = ["Track", "track"]

_Batch = TypeVar("_Batch")
_log = logging.getLogger("trainbus")
#: How long the end of a run that a signal interrupted waits for the subscribers, in seconds.
_DRAIN_S = 5.0


class Track:
    """A run whose loop the user writes; what `track` gives. It belongs to one thread (but for `stop`).

    Leaving the ``with`` block fires what is owed: an end for every start, `on_exception` after an error, one
    `on_train_end`, one `teardown`. A loop left by ``break`` is ended by the next call, at the latest by the block.
    """

    def __init__(self, progress: Progress, signals: Iterable[str | int] = ()) -> None:
        self._progress = progress
        self._signals = StopSignals(signals_of(signals), progress.interrupt, lambda: progress.reason == "interrupted")
        self._in_epochs = False
        self._block = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as block:  # what a raising hook leaves open is ended, although `__exit__` is not called then
            block.enter_context(self._signals)
            block.callback(self._drain)
            block.enter_context(self._progress)
            self._progress.ready()
            self._block = block.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._block.__exit__(kind, error, trace)
        if error is None and self._progress.fitness.source is None and self._progress.fitness.monitor is not None:
            _log.warning("Run %r never had its monitored metric %r.", self.run, self._progress.fitness.monitor)

    def _drain(self) -> None:
        """Have delivered what an interrupted run has told, while a second signal still cannot kill the process."""
        if self._progress.signalled:
            with suppress(WouldBlockError):  # this thread runs the loop of the bus, which delivers once it is left
                self._progress.bus.flush(_DRAIN_S)

    # -------------------------------------------------------------------------------------------------- the loop

    def epochs(self) -> Iterator[int]:
        """Yield the number of each epoch; ends after the last one, at `max_steps`, or when the run is stopped."""
        for epoch in self._progress.iterate_epochs():
            self._in_epochs = True
            try:
                yield epoch
            finally:
                self._in_epochs = False

    def batches(self, loader: Iterable[_Batch], accumulate: int = 1) -> Iterator[_Batch]:
        """Yield each batch of an epoch's training part; every `accumulate` of them count as one step.

        Requests are applied between two batches. Outside of `epochs`, each call is an epoch of its own.
        """
        self._begin_training()
        progress = self._progress
        yield from progress.iterate(loader, accumulate)
        if not progress.is_update_due and not progress.is_partial:
            progress.step += 1  # the loader did not know its length: its last, smaller group is only known now
        progress.end_training()

    def _begin_training(self) -> None:
        if not self._in_epochs:
            self._progress.end_epoch()
            self._progress.begin_epoch()
        elif not self._progress.is_training:
            raise RuntimeError(
                f"The training part of epoch {self.epoch} is over. Join the loaders of an epoch "
                "(itertools.chain) into one run.batches(…)."
            )

    def log(self, **values: Any) -> None:
        """Add numbers to this batch's `on_train_batch_end`; outside of a batch, and for other values, an `on_log`.

        Tensors are detached, and read later when they are on a GPU.
        """
        others: dict[str, Any] = {}
        for name, value in values.items():
            try:
                checked = number(value)
            except TypeError:
                others[name] = value
            else:
                (self._progress.batch_metrics if self._progress.is_in_batch else others)[name] = checked
        if others:
            self._progress.publish(Log, epoch=self.epoch, step=self.step, values=others)

    def validate(self, metrics: Mapping[str, Any]) -> None:
        """Tell the result of a validation (`on_val_start`, `on_val_end`); it becomes part of `on_fit_epoch_end`."""
        progress = self._progress
        progress.end_training()
        place: dict[str, Any] = {"epoch": None, "phase": "standalone"}
        if progress.is_in_epoch:
            place = {"epoch": self.epoch, "phase": "fit"}
        progress.publish(ValStart, step=self.step, **place)
        numbers = {name: number(value) for name, value in metrics.items()}
        progress.publish(ValEnd, step=self.step, metrics=numbers, **place)
        if progress.is_in_epoch:
            progress.metrics |= {name: float(value) for name, value in qualified("val", numbers).items()}
            progress.is_validated = True

    def saved(self, path: str | os.PathLike[str], *, is_best: bool = False) -> None:
        """Tell that a checkpoint is on disk (`on_model_save`): at once, or right after the `on_fit_epoch_end` due."""
        progress = self._progress
        if progress.is_in_epoch and not progress.is_training:
            progress.after_epoch.append(lambda: self._tell_saved(os.fspath(path), is_best))
        else:
            self._tell_saved(os.fspath(path), is_best)

    def _tell_saved(self, path: str, is_best: bool) -> None:
        fitness = self._progress.fitness
        self._progress.publish(
            ModelSave,
            path=path,
            epoch=self.epoch,
            epochs=self._progress.epochs,
            step=self.step,
            is_best=is_best,
            fitness=fitness.current,
            previous_best=fitness.previous_best,
            monitor=fitness.monitor,
            value=fitness.value(self.metrics),
            bytes=os.path.getsize(path) if os.path.isfile(path) else None,
        )

    # -------------------------------------------------------------------------------------------------- stopping

    def stop(self, reason: str = "") -> None:
        """Ask the run to end before its next batch; from any thread."""
        self._progress.stop(reason)

    @property
    def should_stop(self) -> bool:
        """Whether anybody has asked the run to stop."""
        return self._progress.should_stop

    # ------------------------------------------------------------------------------------------- where the run is

    @property
    def run(self) -> str:
        """The name of the run."""
        return self._progress.run

    @property
    def epoch(self) -> int:
        """The current epoch, 0-based."""
        return self._progress.epoch

    @property
    def batch(self) -> int:
        """The current batch of the epoch, 0-based."""
        return self._progress.batch

    @property
    def step(self) -> int:
        """Optimizer updates so far."""
        return self._progress.step

    @property
    def is_update_due(self) -> bool:
        """Whether this batch completes its group of `accumulate`: the moment to update the parameters."""
        return self._progress.is_update_due

    @property
    def metrics(self) -> dict[str, float]:
        """This epoch's metrics so far (``train/loss``); what is added here joins `on_fit_epoch_end`."""
        return self._progress.metrics

    @property
    def best_fitness(self) -> float | None:
        """The best fitness of any epoch; higher is better."""
        return self._progress.best_fitness


def track(
    bus: EventBus,
    *,
    epochs: int | None = None,
    max_steps: int | None = None,
    start_epoch: int = 0,
    step: int = 0,
    optimizer: Optimizer | None = None,
    monitor: str | None = None,
    config: Mapping[str, Any] | None = None,
    signals: Iterable[str | int] = (),
    gather: Gather | None = None,
) -> Track:
    """Wrap a training loop of one's own, so that it publishes the events of a run and obeys `EventBus.control`.

    ::

        with track(bus, epochs=10, optimizer=optimizer, monitor="val/loss") as run:
            for epoch in run.epochs():
                for batch in run.batches(loader):
                    run.log(loss=train_on(batch))
                run.validate({"loss": validation_loss()})

    `epochs` and `max_steps` are limits (None = none); `start_epoch` and `step` are where a resumed run goes on;
    `optimizer` is anything with ``param_groups``, for the learning rates in events and for `Control.set_lr`.
    `signals` (``("SIGTERM",)``) end the run cleanly, as "interrupted", while the block lasts: its iterators end,
    `should_stop` is set, and what was published is delivered. None are handled unless asked.

    `gather` is for several processes that train together, each with a `track` and as many batches: a function that
    gives every one of them the values of all, by rank, such as one around ``torch.distributed.all_gather_object``. With
    it a request made to one is applied in all of them before the same batch, the means of an epoch are over all of
    them, and the run has the name that rank 0 gives it. It is called here, at the start of an epoch, after every batch
    and at the end of an epoch's training part; never after an error.
    """
    run = None if gather is None else gather(bus.run)[0]
    plan = Plan(run=run, epochs=epochs, max_steps=max_steps, start_epoch=start_epoch, step=step, config=config or {})
    progress = Progress(bus, plan, optimizer=optimizer, fitness=Fitness(monitor))
    progress.counts_steps = True
    progress.gather = gather
    return Track(progress, signals)
