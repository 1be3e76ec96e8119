"""Reading the train loader: every epoch in an order of its own, and in a resumed one only what is left of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader

from eventbus.batches import length_of
from trainer.randomness import rng_state, set_rng_state

if TYPE_CHECKING:
    from trainer.fitting import Fitting
    from trainer.place import Place

__all__ = ["Reading", "go_back", "keeps_its_place"]


class Reading:
    """What is left of one epoch of a loader; as long as the loader."""

    def __init__(self, loader: Iterable[Any], run: Fitting) -> None:
        self._loader = loader
        self._run = run
        self._batches: Iterator[Any] | None = None

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]  # its TypeError says that it has none

    def __iter__(self) -> Iterator[Any]:
        run, loader = self._run, self._loader
        _set_epoch(loader, run.epoch)
        if run.seen:
            self._batches = self._rest(run.seen)
        else:
            run.epoch_rng = rng_state(run.generators)
            self._batches = iter(loader)
        run.is_reading = True
        for batch in self._batches:  # noqa: UP028  # `yield from` would close them with this one, before `finish`
            yield batch
        self._batches = None

    def finish(self) -> None:
        """Have a loader that keeps its own place come to the end of its epoch, after a stop with the last batch."""
        if self._batches is not None and keeps_its_place(self._loader):
            next(self._batches, None)

    def _rest(self, seen: int) -> Iterator[Any]:
        """The batches after the first `seen`, which are read again unless the loader keeps its own place."""
        run, loader = self._run, self._loader
        if seen == length_of(loader) and not keeps_its_place(loader):
            return iter(())  # nothing is left, so nothing need be read
        now = rng_state(run.generators)
        try:
            if keeps_its_place(loader):
                return iter(loader)
            set_rng_state(run.epoch_rng or {}, run.generators)
            return self._skip(iter(loader), seen)
        finally:
            set_rng_state(now, run.generators)

    def _skip(self, batches: Iterator[Any], count: int) -> Iterator[Any]:
        run = self._run
        for done in range(count):
            if run.is_alone and run.should_stop:  # else the others would wait for this process at their next batch
                run.safe_point()
                return iter(())
            if next(batches, self) is self:
                raise ValueError(
                    f"The run is to go on after batch {count} of epoch {run.epoch}, but the train_loader now gives "
                    f"only {done}. Give it the same data and batch size, or start anew with resume=None."
                )
        return batches


def keeps_its_place(loader: Any) -> bool:
    """Whether a loader can be put where it was, without reading what comes before."""
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


def go_back(loader: Any, place: Place, epoch: int) -> None:
    """Make a loader what it was at the place of a checkpoint; what random numbers that takes is of no account.

    A `DataLoader` draws a seed for its workers when they start. With `persistent_workers` that is in the first epoch,
    so they are started here for any later one; and one that keeps its place comes to its next epoch by ending the
    former one again.
    """
    is_between = place.next in ("epoch", "validation") and not place.is_partial
    if keeps_its_place(loader):
        if place.loader is None:
            return
        loader.load_state_dict(place.loader)
        must_start = is_between
    else:
        must_start = epoch > 0 and getattr(loader, "persistent_workers", False)
    if must_start and isinstance(loader, DataLoader):
        iter(loader)


def _set_epoch(loader: Any, epoch: int) -> None:
    """Tell samplers that shuffle by the number of the epoch, as that for several processes does."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    samplers = (getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
    for sampler in {id(sampler): sampler for sampler in samplers}.values():
        set_epoch = getattr(sampler, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)
