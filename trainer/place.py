"""Where a run is: which batch of which epoch, and the random numbers there. Checkpoints keep it.

A run that goes on inside of an epoch reads that epoch again from its start, with the random numbers of that start, so
that the sampler, the workers and the augmentation draw what they drew; the batches that were trained on are thrown
away, and the random numbers go on where they were. A loader with a ``state_dict`` of its own (`torchdata` has one) is
put back by that instead, and reads nothing twice; what is drawn in its workers is then drawn anew.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch

from eventbus.fitness import Means, Sums
from trainer.randomness import rng_state

if TYPE_CHECKING:
    from trainer.fitting import Fitting

__all__ = ["Next", "Place", "go_to", "place_of", "plain"]

#: What the loop does next: begin an epoch; read a batch; after a batch the schedule, then what is due by steps;
#: or validate, with the training part of the epoch behind it.
Next = Literal["epoch", "batch", "schedule", "checks", "validation"]

_log = logging.getLogger("trainbus")


@dataclass(frozen=True, kw_only=True)
class Place:
    """One process's place in its run, in plain types and tensors."""

    next: Next
    #: Of every generator: now, and when the reading of the epoch began.
    rng: Mapping[str, Any]
    epoch_rng: Mapping[str, Any] | None = None
    #: How many batches of the epoch were trained on, and whether the last of them led to an update.
    seen: int = 0
    has_updated: bool = False
    #: Whether batches of it are left, although a validation is next: after `max_steps`.
    is_partial: bool = False
    #: The batches since the last update, of how many, and the gradients of each parameter that they left.
    pending: int = 0
    accumulate: int = 1
    gradients: Sequence[torch.Tensor | None] = ()
    #: Of the epoch so far, and since the last `on_log`, which was at `logged_step`.
    metrics: Mapping[str, float] = field(default_factory=dict)
    sums: Sums = field(default_factory=dict)
    logged_sums: Sums = field(default_factory=dict)
    logged_step: int = 0
    #: The state of a loader that keeps its own place.
    loader: Any = None


def place_of(run: Fitting) -> Place:
    """Where a run is now; reading its sums waits for the GPU."""
    if run.next == "epoch":
        inside: dict[str, Any] = {}
    else:
        inside = {
            "epoch_rng": run.epoch_rng,
            "seen": run.seen,
            "has_updated": run.has_updated,
            "is_partial": run.is_partial,
            "pending": run.pending,
            "gradients": [_to_host(parameter.grad) for parameter in _parameters(run)] if run.pending else (),
            "metrics": plain(run.metrics),
            "sums": run.means.sums(),
        }
    return Place(
        next=run.next,
        rng=rng_state(run.generators),
        accumulate=run.accumulate,
        logged_sums=run.window.sums(),
        logged_step=run.logged_step,
        loader=run.loader_state(),
        **inside,
    )


def go_to(run: Fitting, place: Place) -> None:
    """Put an epoch that has just begun where it was; its loader is read as `Reading` says."""
    run.next, run.epoch_rng = place.next, place.epoch_rng
    if place.next == "validation" and place.is_partial:
        run.next, run.is_partial = ("validation", True) if run.reached_max_steps else ("batch", False)
    run.seen, run.has_updated = place.seen, place.has_updated
    run.batch = max(place.seen - 1, 0)
    run.metrics, run.means = dict(place.metrics), Means(place.sums)
    if place.pending and place.accumulate != run.accumulate:
        _log.warning(
            "Run %r goes on within a group of %d batches, but with accumulate=%d: what they added to the gradients "
            "is left out.", run.run, place.accumulate, run.accumulate,
        )  # fmt: skip
        return
    if place.pending:
        run.pending = place.pending
        for parameter, gradient in zip(_parameters(run), place.gradients, strict=True):
            parameter.grad = None if gradient is None else gradient.to(parameter.device)


def plain(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Metrics with Python numbers in place of numpy's, which a checkpoint could not be read with."""
    return {name: value.item() if hasattr(value, "item") else value for name, value in metrics.items()}


def _parameters(run: Fitting) -> list[torch.Tensor]:
    return [parameter for group in run.optimizer.param_groups for parameter in group["params"]] if run.optimizer else []


def _to_host(gradient: torch.Tensor | None) -> torch.Tensor | None:
    """A copy that outlives the gradient, and takes no memory of the GPU."""
    return None if gradient is None else gradient.detach().to("cpu", copy=True)
