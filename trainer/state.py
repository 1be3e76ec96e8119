"""What is in a checkpoint, and how a run goes on from one."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trainer.devices import unwrapped
from trainer.randomness import rng_state, set_rng_state

if TYPE_CHECKING:
    from trainer.callback import Callback
    from trainer.trainer import Trainer

__all__ = ["collect", "find_checkpoint", "read_checkpoint", "restore"]

_FORMAT = 1
_log = logging.getLogger("trainbus")


def collect(trainer: Trainer) -> dict[str, Any]:
    """Everything a resumed run needs, as it is now; plain types and tensors, so that reading it runs no code."""
    run = trainer.progress
    return {
        "format": _FORMAT,
        "model": unwrapped(trainer.model).state_dict(),
        "optimizer": trainer.optimizer.state_dict(),
        "scheduler": None if trainer.scheduler is None else trainer.scheduler.state_dict(),
        "scaler": None if trainer.scaler is None else trainer.scaler.state_dict(),
        "epoch": run.resume_epoch,
        "step": run.step,
        "global_batch": run.global_batch,
        "fitness": run.fitness.state_dict(),
        "best_fitness": run.best_fitness,
        "metrics": dict(run.metrics),
        "callbacks": {key: dict(callback.state_dict()) for key, callback in _by_key(trainer)},
        "rng": rng_state(),
        "run": run.run,
        "attempt": run.attempt,
    }


def find_checkpoint(
    resume: str | os.PathLike[str] | None, last: Path | None
) -> tuple[Path | None, dict[str, Any] | None]:
    """The checkpoint to resume from and what is in it; "auto" is `last`, when that is there."""
    path = last if resume == "auto" else None if resume is None else Path(resume)
    if path is None or (resume == "auto" and not path.exists()):
        return None, None
    return path, read_checkpoint(path)


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint into host memory; raises `ValueError` for a file that is none of ours."""
    checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(checkpoint, dict) or checkpoint.get("format") != _FORMAT:
        raise ValueError(f"{path} is no checkpoint to resume from. Trainer.load_weights reads mere weights.")
    return checkpoint


def restore(trainer: Trainer, checkpoint: Mapping[str, Any]) -> None:
    """Put a run where the checkpoint was taken; random numbers last, since loading may draw some."""
    run = trainer.progress
    unwrapped(trainer.model).load_state_dict(checkpoint["model"])
    trainer.optimizer.load_state_dict(checkpoint["optimizer"])
    for name in ("scheduler", "scaler"):
        part = getattr(trainer, name)
        if part is not None and checkpoint[name] is not None:
            part.load_state_dict(checkpoint[name])
    run.start_epoch = run.epoch = checkpoint["epoch"]
    run.step = checkpoint["step"]
    run.global_batch = checkpoint["global_batch"]
    run.fitness.load_state_dict(checkpoint["fitness"])
    run.best_fitness = run.fitness.best
    run.metrics = dict(checkpoint["metrics"])
    _restore_callbacks(trainer, checkpoint["callbacks"])
    set_rng_state(checkpoint["rng"])


def _restore_callbacks(trainer: Trainer, states: Mapping[str, Mapping[str, Any]]) -> None:
    known = dict(_by_key(trainer))
    for key, state in states.items():
        if key in known:
            known[key].load_state_dict(state)
        elif state:
            _log.warning("The checkpoint has the state of a callback %r that this run does not have.", key)


def _by_key(trainer: Trainer) -> Iterator[tuple[str, Callback]]:
    """Each callback under its class's name, the second one of a class as ``Name#2``."""
    counts: dict[str, int] = {}
    for callback in trainer.callback_objects:
        name = type(callback).__qualname__
        counts[name] = counts.get(name, 0) + 1
        yield (name if counts[name] == 1 else f"{name}#{counts[name]}"), callback
