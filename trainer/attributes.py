"""The trainer as a callback sees it: the attributes that callbacks written for Ultralytics read and set."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from eventbus.rates import rates_of

if TYPE_CHECKING:
    import torch

    from eventbus.bus import EventBus
    from trainer.checkpoint import ModelCheckpoint
    from trainer.fitting import Fitting
    from trainer.ranks import Ranks
    from trainer.weights import WeightAverage

__all__ = ["Attributes"]


class Attributes:
    """What a hook may read on the live trainer, between the events it is told of."""

    bus: EventBus
    ranks: Ranks
    progress: Fitting
    optimizer: torch.optim.Optimizer
    checkpoints: list[ModelCheckpoint]
    save_dir: Path | None
    #: The settings of this training, as attributes: ``trainer.args.epochs``.
    args: SimpleNamespace
    #: The batch that is worked on, on the device.
    batch: Any = None
    #: What came of it in a validation or a prediction; what a hook puts here instead is what `Trainer.predict` yields.
    results: Any = None
    #: Where an export goes.
    file: Path | None = None
    #: The averaged weights, with the option `ema`: ``trainer.ema.ema`` is the model that has them. Without the option,
    #: whatever the user keeps here.
    ema: Any = None
    #: The same, with the option; else None.
    average: WeightAverage | None = None
    #: The model whose weights the trained one has for the moment; None while it has its own.
    stand_in: torch.nn.Module | None = None
    #: The loaders of this training; None outside of `fit`.
    train_loader: Any = None
    valid_loader: Any = None
    test_loader: Any = None
    logger = logging.getLogger("trainbus")

    @contextmanager
    def showing(self, **attributes: Any) -> Iterator[None]:
        """Let the hooks see these, and afterwards again what they saw before."""
        former = {name: getattr(self, name) for name in attributes}
        vars(self).update(attributes)
        try:
            yield
        finally:
            vars(self).update(former)

    @property
    def epoch(self) -> int:
        """The current epoch, 0-based."""
        return self.progress.epoch

    @property
    def epochs(self) -> int | None:
        """How many epochs are planned; None when `max_steps` is the plan."""
        return self.progress.epochs

    @property
    def start_epoch(self) -> int:
        """The first epoch of this attempt."""
        return self.progress.start_epoch

    @property
    def batch_idx(self) -> int:
        """The current batch of the epoch, 0-based."""
        return self.progress.batch

    @property
    def step(self) -> int:
        """Optimizer updates so far."""
        return self.progress.step

    @property
    def loss(self) -> Any:
        """The loss of this batch: a float on the CPU, a detached tensor on a GPU; None before the first."""
        return self.progress.batch_metrics.get("loss")

    @property
    def losses(self) -> dict[str, Any]:
        """All metrics of this batch, like `loss`."""
        return self.progress.batch_metrics

    @property
    def tloss(self) -> Any:
        """The mean loss of this epoch so far, like `loss`."""
        return self.progress.means.running().get("loss")

    @property
    def loss_items(self) -> Any:
        """The same as `loss`, under its other name."""
        return self.loss

    def label_loss_items(self, loss_items: Any = None, prefix: str = "train") -> dict[str, float] | list[str]:
        """A loss by its name, as a float (a device synchronisation on a GPU); without one, the names."""
        name = f"{prefix}/loss"
        return [name] if loss_items is None else {name: float(loss_items)}

    @property
    def metrics(self) -> dict[str, float]:
        """This epoch's metrics so far (``train/loss``, ``val/loss``); what a hook adds joins `on_fit_epoch_end`."""
        return self.progress.metrics

    @property
    def fitness(self) -> float | None:
        """How good the epoch is, higher is better; None until it is validated."""
        return self.progress.fitness.current

    @property
    def best_fitness(self) -> float | None:
        """The best fitness of any epoch."""
        return self.progress.best_fitness

    @property
    def lr(self) -> dict[str, float]:
        """The learning rate of each parameter group: ``lr/pg0``."""
        return {f"lr/pg{group}": rate for group, rate in enumerate(rates_of(self.optimizer))}

    @property
    def last(self) -> Path | None:
        """The checkpoint to resume from; None when none are written."""
        return self._path("last.pt")

    @property
    def best(self) -> Path | None:
        """The checkpoint of the best epoch; None when none are written."""
        return self._path("best.pt")

    def _path(self, name: str) -> Path | None:
        directory = self.checkpoints[0].directory_in(self.save_dir) if self.checkpoints else self.save_dir
        return None if directory is None else directory / name

    @property
    def wdir(self) -> Path | None:
        """Where checkpoints are."""
        return None if self.last is None else self.last.parent

    @property
    def stop(self) -> bool:
        """Whether the run was asked to stop; setting it asks. Use ``bus.control.stop(reason)`` to say why."""
        return self.progress.should_stop

    @stop.setter
    def stop(self, value: bool) -> None:
        if value and not self.progress.should_stop:
            self.progress.stop("a callback set trainer.stop")

    @property
    def stop_training(self) -> bool:
        """The same as `stop`."""
        return self.stop

    @stop_training.setter
    def stop_training(self, value: bool) -> None:
        self.stop = value

    @property
    def reason(self) -> str:
        """Why the run ended, as in `on_train_end`; empty while it runs."""
        return self.progress.reason

    @property
    def rank(self) -> int:
        """This process's number in a distributed run."""
        return self.bus.rank if self.ranks.is_alone else self.ranks.rank

    @property
    def world_size(self) -> int:
        """How many processes the run has."""
        return self.ranks.world_size
