"""Weights that take the place of the model's own for a while: averaged ones, or the best ones, to be evaluated."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from trainer.delivery import owed
from trainer.devices import unwrapped

if TYPE_CHECKING:
    from trainer.trainer import Trainer

__all__ = ["WeightAverage", "averaged_weights", "best_weights", "own_weights", "weights_in"]

_log = logging.getLogger("trainbus")


class WeightAverage(AveragedModel):
    """An exponential moving average of a model's weights and buffers, as `torch.optim.swa_utils` computes it.

    The first update takes the weights as they are. Counting and averaging never wait for the GPU.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        super().__init__(unwrapped(model), use_buffers=True)
        self.decay = decay

    @property
    def ema(self) -> nn.Module:
        """The model with the averaged weights; while they are evaluated, it has the trained ones."""
        return self.module

    @property
    def updates(self) -> int:
        """How many updates were averaged."""
        return int(self.n_averaged)  # on the host

    def update_parameters(self, model: nn.Module) -> None:
        """Take in the weights of the model; what is no real number is taken over as it is."""
        pairs = list(zip(_tensors(self.module), _tensors(unwrapped(model)), strict=True))
        averages = [(ours, theirs) for ours, theirs in pairs if self.updates and ours.is_floating_point()]
        with torch.no_grad():
            if averages:
                ours, theirs = map(list, zip(*averages, strict=True))
                get_ema_multi_avg_fn(self.decay)(ours, theirs, self.updates)  # type: ignore[no-untyped-call]
            for one, other in pairs:
                if not self.updates or not one.is_floating_point():
                    one.copy_(other)
        self.n_averaged += 1

    def forget(self) -> None:
        """Begin anew with the next update."""
        self.n_averaged.zero_()


def _tensors(model: nn.Module) -> Iterator[torch.Tensor]:
    return chain(model.parameters(), model.buffers())


def _exchange(model: nn.Module, other: nn.Module) -> None:
    """Give two models each other's weights, without copying any; the parameters stay the same objects."""
    for one, another in list(zip(_tensors(model), _tensors(other), strict=True)):  # all or none
        one.data, another.data = another.data, one.data


@contextmanager
def _standing_in(trainer: Trainer, other: nn.Module, what: str) -> Iterator[None]:
    """While it lasts the model has the weights of the other one; `on_params_update` tells both changes."""
    model = unwrapped(trainer.model)

    def put_back() -> None:
        trainer.stand_in = None
        _exchange(model, other)
        trainer.params_updated(f"{what} out")

    _exchange(model, other)
    trainer.stand_in = other
    with owed(put_back):
        trainer.params_updated(f"{what} in")
        yield


@contextmanager
def averaged_weights(trainer: Trainer) -> Iterator[None]:
    """While it lasts the model has its averaged weights, when the trainer averages them."""
    average = trainer.average
    if average is None or not average.updates or trainer.stand_in is not None:
        yield
        return
    average.module.to(trainer.device)
    with _standing_in(trainer, average.module, "averaged weights"):
        yield


@contextmanager
def own_weights(trainer: Trainer) -> Iterator[None]:
    """While it lasts the model has the weights that are trained, whatever stands in for them: to be saved."""
    model, other = unwrapped(trainer.model), trainer.stand_in
    if other is not None:
        _exchange(model, other)
    try:
        yield
    finally:
        if other is not None:
            _exchange(model, other)


@contextmanager
def best_weights(trainer: Trainer) -> Iterator[None]:
    """While it lasts the model has the weights of ``best.pt``; where that cannot be read, the last ones."""
    best = _read_best(trainer) if trainer.rank == 0 else None
    if not trainer.ranks.any(best is not None):  # rank 0 reads, and sends the others what it has read
        with averaged_weights(trainer):
            yield
        return
    if best is None:
        best = deepcopy(unwrapped(trainer.model))
    trainer.ranks.send_from_first(_tensors(best))
    with _standing_in(trainer, best, "best weights"):
        yield


def _read_best(trainer: Trainer) -> nn.Module | None:
    """The model of the best epoch of this run, where it is on disk."""
    path = trainer.checkpoints[0].best_of(trainer) if trainer.checkpoints else None
    if path is None:
        return None
    try:
        return _read_model(path, unwrapped(trainer.model))
    except Exception as error:  # noqa: BLE001  # whatever a damaged file makes of reading it
        _log.error("%s could not be read; the last weights are evaluated in its place. %s", path, error)
        return None


def _read_model(path: Path, like: nn.Module) -> nn.Module:
    weights = weights_in(torch.load(path, map_location="cpu", weights_only=True))
    model = deepcopy(like)
    model.load_state_dict(weights)
    return model


def weights_in(checkpoint: Mapping[str, Any]) -> Mapping[str, Any]:
    """The weights that were validated: the averaged ones, where the checkpoint has some; or mere weights themselves."""
    if "format" not in checkpoint:
        return checkpoint
    average: Mapping[str, Any] | None = checkpoint.get("ema")
    if average is None or not average["n_averaged"]:
        weights: Mapping[str, Any] = checkpoint["model"]
        return weights
    return {name.removeprefix("module."): value for name, value in average.items() if name != "n_averaged"}
