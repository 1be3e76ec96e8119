"""Learning-rate schedulers: when they step, and how a rate that was set by hand stays in their plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

__all__ = ["plateau_metric", "rescale", "schedule_of"]


def schedule_of(scheduler: Any, optimizer: Any, every: str) -> tuple[Any, str | None]:
    """The scheduler, made from the optimizer if it is a function of one, and when it steps.

    That is "validation" when it follows a metric, else every "epoch" or "step"; None without one.
    """
    if isinstance(scheduler, type) or (callable(scheduler) and not hasattr(scheduler, "step")):
        scheduler = scheduler(optimizer)
    if scheduler is None:
        return None, None
    return scheduler, "validation" if isinstance(scheduler, ReduceLROnPlateau) else every


def plateau_metric(names: Sequence[str], metrics: Mapping[str, float]) -> float | None:
    """The monitored value itself, else ``val/loss``, else ``train/loss``; None when every batch was skipped."""
    return next((metrics[name] for name in (*names, "val/loss", "train/loss") if name in metrics), None)


def rescale(scheduler: Any, old: Sequence[float], new: Sequence[float]) -> None:
    """Scale what the scheduler computes rates from, so that its next step goes on from the new ones."""
    base = getattr(scheduler, "base_lrs", None)
    if base is not None:
        scheduler.base_lrs = [
            rate * after / before if before else after for rate, before, after in zip(base, old, new, strict=True)
        ]
    for inner in getattr(scheduler, "_schedulers", ()):  # SequentialLR, ChainedScheduler
        rescale(inner, old, new)
