"""Weights that take the place of the model's own for a while, to be evaluated."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch

from trainer.delivery import owed
from trainer.devices import unwrapped

if TYPE_CHECKING:
    from trainer.trainer import Trainer

__all__ = ["best_weights", "replaced"]

_log = logging.getLogger("trainbus")


@contextmanager
def replaced(trainer: Trainer, load: Callable[[], None], what: str) -> Iterator[None]:
    """While it lasts the model has the weights that `load` gives it; `on_params_update` tells both changes.

    What its buffers become meanwhile is lost with them.
    """
    model = unwrapped(trainer.model)
    live = deepcopy(model.state_dict())

    def put_back() -> None:
        model.load_state_dict(live)
        trainer.params_updated(f"{what} out")

    with owed(put_back):
        load()
        trainer.params_updated(f"{what} in")
        yield


@contextmanager
def best_weights(trainer: Trainer) -> Iterator[None]:
    """While it lasts the model has the weights of ``best.pt``; where there is none that can be read, its own."""
    state = _read_best(trainer) if trainer.rank == 0 else None
    if not trainer.ranks.any(state is not None):  # rank 0 reads, and sends the others what it has read
        yield
        return

    def load() -> None:
        model = unwrapped(trainer.model)
        if state is not None:
            model.load_state_dict(state)
        trainer.ranks.send_from_first(model.state_dict().values())

    with replaced(trainer, load, "best weights"):
        yield


def _read_best(trainer: Trainer) -> Any:
    """The weights of the best epoch of this run, where they are on disk and fit the model."""
    path = trainer.checkpoints[0].best_of(trainer) if trainer.checkpoints else None
    if path is None:
        return None
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)["model"]
        _check_fits(state, unwrapped(trainer.model).state_dict())
    except Exception as error:  # noqa: BLE001  # whatever a damaged file makes of reading it
        _log.error("%s could not be read; the last weights are evaluated in its place. %s", path, error)
        return None
    return state


def _check_fits(state: Any, wanted: Any) -> None:
    wrong = [name for name in state.keys() | wanted.keys() if _shape(state.get(name)) != _shape(wanted.get(name))]
    if wrong:
        raise ValueError(f"It does not fit this model: {', '.join(sorted(wrong))}.")


def _shape(value: Any) -> Any:
    return getattr(value, "shape", type(value))
