"""What is in a checkpoint, and how a run goes on from one."""

from __future__ import annotations

import logging
import os
import pickle
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from eventbus.fitness import Means
from trainer.devices import unwrapped
from trainer.place import Place, plain
from trainer.reading import go_back
from trainer.weights import own_weights

if TYPE_CHECKING:
    from trainer.callback import Callback
    from trainer.trainer import Trainer

__all__ = ["collect", "find_checkpoint", "place_in", "read_checkpoint", "restore"]

#: 1 had no places: in it, an epoch that was cut short begins anew.
_FORMAT = 2
#: What a trainer may have beside its model and optimizer, each with a ``state_dict`` (None where it has none): the
#: name in the file, and that of the attribute.
_PARTS = {"scheduler": "scheduler", "scaler": "scaler", "ema": "average", "warmup": "warming"}
_log = logging.getLogger("trainbus")


def collect(trainer: Trainer, places: Sequence[Place] | None = None) -> dict[str, Any]:
    """Everything a resumed run needs, as it is now; plain types and tensors, so that reading it runs no code.

    `places` are those of all processes of the run, by rank; None = this one's.
    """
    with own_weights(trainer):
        return _collected(trainer, places)


def _collected(trainer: Trainer, places: Sequence[Place] | None) -> dict[str, Any]:
    run = trainer.progress
    return {
        "format": _FORMAT,
        "model": unwrapped(trainer.model).state_dict(),
        "optimizer": trainer.optimizer.state_dict(),
        **{name: _state_of(getattr(trainer, attribute)) for name, attribute in _PARTS.items()},
        "epoch": run.resume_epoch,
        "step": run.step,
        "global_batch": run.global_batch,
        "fitness": run.fitness.state_dict(),
        "best_fitness": run.best_fitness,
        "metrics": plain(run.metrics),
        "callbacks": {key: dict(callback.state_dict()) for key, callback in _by_key(trainer)},
        "places": [vars(place) for place in places or [run.take_place()]],
        "run": run.run,
        "attempt": run.attempt,
        "epochs": run.epochs,
        "max_steps": run.max_steps,
    }


def _state_of(part: Any) -> Any:
    return None if part is None else part.state_dict()


def find_checkpoint(
    resume: str | os.PathLike[str] | None, last: Path | None
) -> tuple[Path | None, dict[str, Any] | None]:
    """The checkpoint to resume from and what is in it; "auto" is `last`, when that is there."""
    path = last if resume == "auto" else None if resume is None else Path(resume)
    if path is None or (resume == "auto" and not path.exists()):
        return None, None
    return path, read_checkpoint(path)


def place_in(checkpoint: Mapping[str, Any] | None) -> str:
    """Which point of which run a checkpoint is of, in words."""
    return "none" if checkpoint is None else f"step {checkpoint['step']} of {checkpoint['run']!r}"


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint into host memory; raises `ValueError` for a file that is none of ours."""
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise ValueError(f"{path} cannot be read as a checkpoint: {error}") from error
    if not isinstance(checkpoint, dict) or "format" not in checkpoint:
        raise ValueError(f"{path} is no checkpoint to resume from. Trainer.load_weights reads mere weights.")
    if checkpoint["format"] == 1:
        checkpoint |= {"places": [{"next": "epoch", "rng": checkpoint["rng"], "logged_step": checkpoint["step"]}]}
    elif checkpoint["format"] != _FORMAT:
        raise ValueError(f"{path} has format {checkpoint['format']}; this version reads those up to {_FORMAT}.")
    return checkpoint


def restore(trainer: Trainer, checkpoint: Mapping[str, Any]) -> None:
    """Put a run where the checkpoint was taken; its first epoch goes on from the place of this process."""
    run = trainer.progress
    unwrapped(trainer.model).load_state_dict(checkpoint["model"])
    trainer.optimizer.load_state_dict(checkpoint["optimizer"])
    # its updates were made by an earlier process: else a schedule whose step comes first here would be warned of
    trainer.optimizer._opt_called = checkpoint["step"] > 0  # type: ignore[attr-defined]  # read by torch's schedulers
    for name, attribute in _PARTS.items():
        part = getattr(trainer, attribute)
        if part is not None and checkpoint.get(name) is not None:
            part.load_state_dict(checkpoint[name])
    if trainer.scaler is not None:
        trainer.scaler.scale(torch.zeros((), device=trainer.device))  # else an open group could not be unscaled
    run.start_epoch = run.epoch = checkpoint["epoch"]
    run.step = checkpoint["step"]
    run.global_batch = checkpoint["global_batch"]
    run.fitness.load_state_dict(checkpoint["fitness"])
    run.best_fitness = run.fitness.best
    run.metrics = dict(checkpoint["metrics"])
    run.wants_more = any(_is_more(getattr(run, name), checkpoint.get(name)) for name in ("epochs", "max_steps"))
    _restore_callbacks(trainer, checkpoint["callbacks"])
    _restore_place(trainer, checkpoint["places"])


def _is_more(limit: int | None, former: int | None) -> bool:
    return former is not None and (limit is None or limit > former)


def _restore_place(trainer: Trainer, places: Sequence[Mapping[str, Any]]) -> None:
    """Take the place of this process; in a run of another size no process has one, so that the epoch begins anew."""
    run, ranks = trainer.progress, trainer.ranks
    if len(places) != ranks.world_size:
        _log.warning(
            "The checkpoint is of %d process(es), this run has %d: epoch %d begins anew, with other random numbers.",
            len(places), ranks.world_size, run.start_epoch,
        )  # fmt: skip
        return
    place = run.place = Place(**places[ranks.rank])
    run.window, run.logged_step = Means(place.logged_sums), place.logged_step
    run.read_state = place.loader
    go_back(trainer.train_loader, place, run.start_epoch)


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
