"""Batches that go wrong: numbers that are not finite, and memory that does not suffice."""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import torch

from eventbus.request import Request

if TYPE_CHECKING:
    from trainer.fitting import Fitting
    from trainer.ranks import Ranks
    from trainer.trainer import Trainer

__all__ = ["OnNan", "OnOom", "check_ranks", "is_usable", "with_memory"]

OnNan = Literal["ignore", "skip", "stop", "raise"]
OnOom = Literal["raise", "skip", "retry"]

_log = logging.getLogger("trainbus")


def check_ranks(on_oom: OnOom, ranks: Ranks) -> None:
    """Raise `ValueError` for what several processes cannot agree on."""
    if on_oom != "raise" and not ranks.is_alone:
        raise ValueError(
            f"on_oom={on_oom!r} works in one process only: here the other processes would wait forever, in their "
            "backward pass, for the one that ran out of memory. Leave it at 'raise'."
        )


def is_usable(trainer: Trainer, value: torch.Tensor | None, what: str) -> bool:
    """Whether to go on with this loss or gradient norm, as `on_nan` says; every process decides the same.

    Unless `on_nan` is "ignore" this is a device synchronisation, and in a distributed run a collective.
    """
    if trainer.on_nan == "ignore":
        return True
    number = 0.0 if value is None else value.item()  # waits for the GPU
    is_finite = math.isfinite(number)
    if not trainer.ranks.any(not is_finite):
        return True
    _decide(trainer, f"The {what} is {'not finite in another process' if is_finite else number}")
    return False


def _decide(trainer: Trainer, problem: str) -> None:
    """End the run, by an exception or at its next safe point, or only say that the batch is skipped."""
    run = trainer.progress
    where = f"epoch {run.epoch}, batch {run.batch}, step {run.step}"
    if trainer.on_nan == "raise":
        raise FloatingPointError(f"{problem}, in {where}. on_nan= says what to do then.")
    run.status = "skipped"
    _say(run, f"{problem}, in {where}: the batch is skipped.")
    if trainer.on_nan == "stop":
        run.has_diverged = True
        if run.inbox is not None and trainer.ranks.rank == 0:  # one request is enough for all processes
            reason = f"{problem[0].lower()}{problem[1:]}, in {where}"
            run.inbox.post(Request(action="stop", run=run.run, reason=reason, requester="on_nan"))


def with_memory(trainer: Trainer, attempt: Callable[[], bool]) -> bool:
    """What a forward and backward pass returns; one that runs out of memory is dealt with as `on_oom` says.

    Its group of batches begins anew: nobody knows which gradients the pass had already added to.
    """
    if trainer.on_oom == "raise":
        return attempt()
    run = trainer.progress
    try:
        return attempt()
    except Exception as error:
        if not _is_out_of_memory(error):
            raise
        then = "tried once more" if trainer.on_oom == "retry" else "skipped"
        where = f"epoch {run.epoch}, batch {run.batch}, step {run.step}"
        # as text, since a log record that held the error would hold the tensors of its frames
        _say(run, f"Out of memory in {where}: the batch is {then}. {error}")
    _free(trainer)  # after the except block, when nothing holds the traceback and the tensors of its frames any more
    if trainer.on_oom == "skip":
        return False
    run.status = "retried"
    return attempt()


def _say(run: Fitting, problem: str) -> None:
    """Warn once per epoch, in which every batch may be such a one; their status says the rest."""
    _log.log(logging.DEBUG if run.warned_epoch == run.epoch else logging.WARNING, "%s", problem)
    run.warned_epoch = run.epoch


def _free(trainer: Trainer) -> None:
    """Drop the gradients of the group, and give back what is kept for reuse."""
    run = trainer.progress
    run.batch_metrics = {}
    run.pending = 0
    trainer.optimizer.zero_grad()
    gc.collect()
    release = getattr(torch.get_device_module(trainer.device), "empty_cache", None)
    if release is not None:
        release()


def _is_out_of_memory(error: Exception) -> bool:
    """Whether memory did not suffice: CUDA has a class for it, other devices and the host have words."""
    words = ("out of memory", "can't allocate memory")
    is_told = isinstance(error, RuntimeError) and any(word in str(error) for word in words)
    return is_told or isinstance(error, torch.cuda.OutOfMemoryError | MemoryError)
