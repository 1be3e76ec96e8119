"""Checkpoints that somebody asks for, besides those of the loop."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from eventbus.rates import Refused
from trainer import loop, state
from trainer.checkpoint import Saved, save_file

if TYPE_CHECKING:
    from pathlib import Path

    from trainer.trainer import Trainer

__all__ = ["save_now", "save_to"]


def save_to(trainer: Trainer, path: Path) -> Saved:
    """Write one checkpoint to a path of one's own."""
    saved = save_file(path, partial(state.collect, trainer), trainer.progress.fitness)
    loop.tell_saved(trainer, saved)
    return saved


def save_now(trainer: Trainer) -> str:
    """Write ``last.pt`` and return its path; raises `Refused` with the reason when that could not be done."""
    if not trainer.checkpoints:
        raise Refused("this run writes no checkpoints (save_dir=None)")
    failed = [saved.error for saved in loop.save(trainer, is_due=True) if saved.error]
    failed = trainer.ranks.gather(failed)[0]  # rank 0 writes, and the others give its answer
    if failed:
        raise Refused(failed[0])
    return str(trainer.last)
