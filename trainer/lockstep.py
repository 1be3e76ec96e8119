"""Loaders of several processes, read in step, so that none of them waits for a batch that another does not have.

Gradients are averaged over all processes in every batch. So an epoch ends for all when the first of them has no batch
left, and what the others have left is not trained on: it is said once in a training, with the numbers. A validation
averages nothing until its end: every process goes to the end of its loader, and comes to the safe points of the others.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import distributed, nn

from eventbus.batches import length_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from trainer.fitting import Fitting

__all__ = ["common_length", "read_in_step", "read_to_the_end", "same_buffers"]

_NO_BATCH = object()
_ADVICE = "A DistributedSampler gives all of them as many."
_log = logging.getLogger("trainbus")


def common_length(run: Fitting, loader: Any) -> int | None:
    """How many batches of an epoch every process has; None when one of them does not know."""
    lengths = run.ranks.gather(length_of(loader))
    known = [length for length in lengths if length is not None]
    if len(set(known)) > 1:
        _say_once(run, "The train_loaders have %s batches, by rank: an epoch ends for all with the shortest.", lengths)
    return min(known) if len(known) == len(lengths) else None


def read_in_step(run: Fitting, batches: Iterator[Any]) -> Iterator[Any]:
    """Yield a process's batches for as long as all processes have one; raises `ValueError` for a false length."""
    while run.batches is None or run.seen < run.batches:
        batch = next(batches, _NO_BATCH)
        if run.batches is None:
            if run.ranks.any(batch is _NO_BATCH):
                _tell_end(run, has_batch=batch is not _NO_BATCH)
                return
        elif batch is _NO_BATCH:
            raise ValueError(
                f"The train_loader of rank {run.ranks.rank} gave {run.seen} batches, and has at least {run.batches} by "
                "its length. Make its __len__ tell the truth, or leave it out."
            )
        yield batch


def _tell_end(run: Fitting, *, has_batch: bool) -> None:
    have = run.ranks.gather(has_batch)
    if any(have):
        ranks = ", ".join(str(rank) for rank, has in enumerate(have) if not has)
        _say_once(run, "Rank %s has no batch after the first %d of an epoch, which so ends for all.", ranks, run.seen)


def _say_once(run: Fitting, message: str, *values: object) -> None:
    if run.ranks.rank == 0 and not run.is_unevenness_told:
        _log.warning(f"{message} {_ADVICE}", *values)
    run.is_unevenness_told = True


def read_to_the_end(run: Fitting, loader: Iterable[Any], *, obeys: bool) -> Iterator[Any]:
    """Yield each batch to evaluate, until every process is through; with `obeys`, a stop in between ends it for all."""
    batches, was_stopped = run.read(loader), run.is_stopped
    while True:
        batch = next(batches, _NO_BATCH)
        if not (run.ranks.any(batch is not _NO_BATCH) if obeys else batch is not _NO_BATCH):
            return
        if batch is not _NO_BATCH:
            yield batch
        if obeys:
            run.safe_point()
            if run.is_stopped and not was_stopped:
                return


@contextmanager
def same_buffers(model: nn.Module) -> Iterator[None]:
    """While evaluating, spare `DistributedDataParallel` sending the buffers of rank 0 before each batch.

    Processes with different numbers of batches would wait for each other. They are sent once here instead.
    """
    parallel = getattr(model, "_orig_mod", model)
    if not isinstance(parallel, nn.parallel.DistributedDataParallel) or not parallel.broadcast_buffers:
        yield
        return
    for buffer in parallel.buffers():
        distributed.broadcast(buffer, distributed.get_global_rank(parallel.process_group, 0), parallel.process_group)
    parallel.broadcast_buffers = False
    try:
        yield
    finally:
        parallel.broadcast_buffers = True
