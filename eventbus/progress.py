"""The epochs and batches of a run: their counters, their metrics and their events, every start with its end.

`track` and the trainer share this. What has begun is noted before its event is published and taken out before the
event of its end is, so that a hook that raises in between leaves nothing open and nothing ended twice. A generator
here never ends a batch when it is merely dropped: it cannot know whether its consumer left by ``break`` or by an
exception. Whoever comes next does, and at the latest the end of the ``with`` block.
"""

from __future__ import annotations

import logging
from collections import deque
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar

from eventbus.batches import Batches, length_of, setter
from eventbus.events import FitEpochEnd, TrainEpochEnd, TrainEpochStart
from eventbus.fitness import Fitness, Means, Sums, qualified
from eventbus.gathering import Gather, merged_sums, shared_requests
from eventbus.rates import Refused, rates_of
from eventbus.steering import safe_point

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from eventbus.bus import EventBus
    from eventbus.control import Request
    from eventbus.lifecycle import Plan
    from eventbus.rates import Optimizer

__all__ = ["Progress"]

_Batch = TypeVar("_Batch")
_log = logging.getLogger("trainbus")


class Progress(Batches):
    """A run with its epochs and batches.

    `epoch` and `batch` are 0-based, `batch` restarts with each epoch and `global_batch` does not; `step` counts
    optimizer updates that happened.
    """

    def __init__(
        self,
        bus: EventBus,
        plan: Plan,
        *,
        optimizer: Optimizer | None = None,
        fitness: Fitness | None = None,
        log_every: int | None = 50,
    ) -> None:
        super().__init__(bus, plan, optimizer=optimizer, log_every=log_every)
        self.fitness = fitness if fitness is not None else Fitness()
        #: What `control.set` may change, and how to; a setter raises `ValueError` for a wrong value.
        self.settings: dict[str, Callable[[Any], None]] = {
            name: setter(self, name) for name in ("epochs", "log_every", "max_steps")
        }
        self.is_paused = False
        #: How the processes of the run tell each other something; None when there is but one.
        self.gather: Gather | None = None
        #: Whether the epoch was cut short, and whether its metrics have those of a validation.
        self.is_partial = self.is_validated = False
        #: What is published right after this epoch's `on_fit_epoch_end`.
        self.after_epoch: deque[Callable[[], None]] = deque()
        self._epoch_began = monotonic()

    # ------------------------------------------------------------------------------------------------- iteration

    def iterate_epochs(self) -> Iterator[int]:
        """Yield each epoch's number, with its start before and its end after, until the run is done or stopped."""
        self.safe_point()
        while self._has_epoch_ahead():
            self.begin_epoch()
            yield self.epoch
            self.end_epoch()
            self.safe_point()

    def _has_epoch_ahead(self) -> bool:
        if self.is_stopped or (self.reached_max_steps and not self.has_end_ahead):
            return False
        return self.epochs is None or self._next_epoch() < self.epochs

    def iterate(self, loader: Iterable[_Batch], accumulate: int = 1) -> Iterator[_Batch]:
        """Yield each batch, with its start before and its end after; requests are applied in between.

        Ends early when the run is stopped or has made `max_steps` updates. Does not end the epoch's training part.
        """
        self.accumulate = accumulate
        self.batches = self.length(loader)
        batches = self.read_in_step(loader)
        self.is_partial = True
        self.safe_point()
        while not self._is_over:
            try:
                batch = next(batches)
            except StopIteration:
                self.is_partial = self.is_stopped  # only now when the loader failed while a signal ended the run
                return
            self.start_batch(batch)
            yield batch
            self.end_batch()
            self.is_partial = self.seen != self.batches
            self.safe_point()

    def read(self, loader: Iterable[_Batch]) -> Iterator[_Batch]:
        """Yield what a loader gives; one whose workers died of the signal that ends the run is merely over."""
        batches = iter(loader)
        while True:
            try:
                batch = next(batches)
            except StopIteration:
                return
            except Exception as error:
                if not (self.signalled and self.inbox is not None and self.is_alone):
                    raise
                _log.warning("The loader failed while the run was being interrupted: %s", error)
                self.safe_point()
                return
            yield batch

    @property
    def is_alone(self) -> bool:
        """Whether no other process trains along, and would wait for this one's next batch."""
        return self.gather is None

    @property
    def _is_over(self) -> bool:
        return self.is_stopped or self.reached_max_steps

    def _next_epoch(self) -> int:
        return self.epoch + 1 if self.begun_epochs else self.start_epoch

    def safe_point(self) -> None:
        """Apply what was asked of the run since the last one."""
        if self.inbox is not None:
            safe_point(self, self.inbox)

    # ---------------------------------------------------------------------------------------------------- epochs

    def begin_epoch(self) -> None:
        """Begin the next epoch."""
        self.epoch = self._next_epoch()
        self.begun_epochs += 1
        self.batch = self.seen = 0
        self.metrics = {}
        self.means = Means()
        self.is_partial = self.is_validated = False
        self.take_up()
        self._epoch_began = monotonic()
        self.phase = "train"
        self._open |= {"epoch", "training"}
        self.publish(TrainEpochStart, epoch=self.epoch, epochs=self.epochs, step=self.step)

    def end_training(self) -> None:
        """End the training part of the epoch. Reading its means waits for the GPU, once per epoch."""
        self.end_batch()
        if self.is_training:
            self.metrics |= qualified("train", self.means.means(self.merge))
            self._close("training")
            self._tell_training()

    def _tell_training(self) -> None:
        self.publish(
            TrainEpochEnd,
            epoch=self.epoch,
            epochs=self.epochs,
            step=self.step,
            metrics=self.metrics,
            lr=rates_of(self.optimizer),
            seconds=monotonic() - self._epoch_began,
        )

    def end_epoch(self) -> None:
        """End the epoch, when one is open, and judge its fitness."""
        self.end_training()
        if not self.is_in_epoch:
            return
        self.tell_rates("callback" if self.watches_rates else "schedule")
        self.fitness.judge(self.metrics if self.is_whole else {}, validated=self.is_whole and self.is_validated)
        self.best_fitness = self.fitness.best
        self.whole_epochs += not self.is_partial
        self._close("epoch")
        self._tell_epoch()
        self._after_epoch()

    @property
    def is_whole(self) -> bool:
        """Whether the epoch is to be judged: it was not cut short, or only by `max_steps`."""
        return not self.is_partial or self.reached_max_steps

    def _after_epoch(self) -> None:
        while self.after_epoch:
            self.after_epoch.popleft()()

    leave = end_epoch

    def _tell_epoch(self) -> None:
        self.publish(
            FitEpochEnd,
            epoch=self.epoch,
            epochs=self.epochs,
            step=self.step,
            metrics=self.metrics,
            fitness=self.fitness.current,
            best_fitness=self.fitness.best,
            monitor=self.fitness.monitor,
            lr=rates_of(self.optimizer),
            seconds=monotonic() - self._epoch_began,
            partial=self.is_partial,
        )

    # ------------------------------------------------------------------------------------------- after an error

    def owed(self) -> Sequence[Callable[[], None]]:
        """The ends of what is open; metrics that may still be on a GPU are not read, since that could hang."""
        return (self.abandon_batch, self._abandon_training, self._abandon_epoch, self._after_epoch)

    def _abandon_training(self) -> None:
        if self._close("training"):
            self.is_partial = True
            self._tell_training()

    def _abandon_epoch(self) -> None:
        if self._close("epoch"):
            self.is_partial = True
            self.fitness.current = None
            self._tell_epoch()

    # ------------------------------------------------------------------------------------ what the trainer adds

    def length(self, loader: Any) -> int | None:
        """How many batches of an epoch all processes of the run have; None when one of them does not know."""
        return length_of(loader)

    def read_in_step(self, loader: Iterable[_Batch]) -> Iterator[_Batch]:
        """Yield what a loader gives, for as long as all processes of the run have a batch."""
        return self.read(loader)

    @property
    def has_end_ahead(self) -> bool:
        """Whether an epoch has only its end left, for which no more steps are needed."""
        return False

    def take_up(self) -> None:
        """Put an epoch that is about to begin where it was, if it is one that had begun before."""

    def share(self, requests: list[Request]) -> list[Request]:
        """The requests of all processes of the run."""
        return requests if self.gather is None else shared_requests(requests, self.gather, self._refuse)

    def _refuse(self, request: Request, why: str) -> None:
        if self.inbox is not None:
            self.inbox.answer(request, accepted=False, step=self.step, detail=why)

    def merge(self, sums: Sums) -> Sums:
        """The sums of all processes of the run."""
        return sums if self.gather is None else merged_sums(sums, self.gather)

    def save(self) -> str:
        """Write a checkpoint and return its path; raises `Refused` with the reason when there is none."""
        raise Refused("this loop writes its checkpoints itself")

    def rates_set(self, old: tuple[float, ...], new: tuple[float, ...]) -> None:
        """Told after a request has set the learning rates."""
