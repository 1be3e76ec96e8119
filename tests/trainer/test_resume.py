"""A run that is resumed at any step is, on the CPU and bit for bit, the run that was never interrupted."""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, Dataset

from eventbus import EventBus
from tests.trainer.toys import Lengthless, assert_balanced, squared_error
from trainer import Callback, Trainer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SAMPLES, SIZE, BATCHES = 14, 3, 5


class Augmented(Dataset[Any]):
    """Draws from every generator there is, as augmentation does."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        x = torch.full((3,), float(index)) / SAMPLES + 0.1 * torch.randn(3) + random.gauss(0, 0.1)
        return x + numpy.random.normal(0, 0.1), x.sum(dim=0, keepdim=True)


@pytest.fixture(autouse=True)
def no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody pulls the plug here, and waiting for a disk costs more than all the rest."""
    monkeypatch.setattr("os.fsync", lambda descriptor: None)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Dropout(0.4), nn.Linear(6, 1))


SCHEDULERS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "epoch": ("epoch", lambda opt: torch.optim.lr_scheduler.StepLR(opt, 1, 0.7)),
    "step": ("step", lambda opt: torch.optim.lr_scheduler.CosineAnnealingLR(opt, 20)),
    "plateau": ("epoch", lambda opt: torch.optim.lr_scheduler.ReduceLROnPlateau(opt, patience=0, factor=0.5)),
}


class Counting(Callback):
    """A callback with a state: what it has seen of the batches."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Any) -> None:
        self.losses.append(trainer.loss)

    def state_dict(self) -> dict[str, Any]:
        return {"losses": list(self.losses)}

    def load_state_dict(self, state: Any) -> None:
        self.losses = list(state["losses"])


@dataclass(kw_only=True)
class Scenario:
    """A training, and how it is run."""

    directory: Path
    accumulate: int = 1
    schedule: str = "epoch"
    validates: bool = True
    clip_norm: float | None = None
    scaler: bool = False
    workers: int = 0
    loader: Callable[[Any], Any] = lambda loader: loader
    fit: dict[str, Any] = field(default_factory=lambda: {"epochs": 3})
    told: list[Any] = field(default_factory=list)

    def loaders(self) -> tuple[Any, Any]:
        data = partial(DataLoader, Augmented(), batch_size=SIZE, num_workers=self.workers)
        return self.loader(data(shuffle=True)), data() if self.validates else None

    def run(self, *hooks: tuple[str, Callable[[Any], Any]], resume: str | None = "auto", **fit: Any) -> Trainer:
        """One attempt; the hooks may end it. Whatever drew random numbers before must not matter."""
        random.seed(), numpy.random.seed(), torch.seed()
        every, scheduler = SCHEDULERS[self.schedule]
        model = net()
        with EventBus(run="resumed") as bus:
            told: list[Any] = []
            bus.subscribe(told.append)
            trainer = Trainer(
                model, squared_error, torch.optim.Adam(model.parameters(), lr=0.05),
                bus=bus, scheduler=scheduler, scheduler_every=every, save_dir=self.directory, seed=3,
                accumulate=self.accumulate, clip_norm=self.clip_norm, log_every=2, callbacks=[Counting()],
                scaler=torch.amp.GradScaler("cpu", growth_interval=2) if self.scaler else None,
                on_callback_error="raise",
            )  # fmt: skip
            for hook, fn in hooks:
                trainer.add_callback(hook, fn)
            with suppress(Crash):
                trainer.fit(*self.loaders(), resume=resume, **(self.fit | fit))
            assert_balanced([event.hook for event in told])
            self.told += told
        return trainer


class Crash(Exception):  # noqa: N818
    pass


def crash(trainer: Any) -> None:
    raise Crash


def at(count: int, act: Callable[[Any], Any]) -> Callable[[Any], None]:
    """Do something once, when so many batches of the run were trained on."""
    return lambda trainer: act(trainer) if trainer.progress.global_batch == count else None


def stop(trainer: Any) -> None:
    trainer.stop = True


def stopping(count: int) -> list[Any]:
    """A stop, by whoever: the batch ends, last.pt is written."""
    return [("on_after_backward", at(count, stop))]


def saving(count: int) -> list[Any]:
    """A checkpoint by request, and later the end of the process."""
    return [
        ("on_train_batch_start", at(count, lambda trainer: trainer.bus.control.save())),
        ("on_after_backward", at(count + 2, crash)),
    ]


def saving_by_hand(count: int) -> list[Any]:
    """A checkpoint by a hook within the end of a batch, and the end of the process right then."""
    return [("on_train_batch_end", at(count, lambda trainer: [trainer.save_model(trainer.last), crash(trainer)]))]


def stopping_in_validation(count: int) -> list[Any]:
    return [("on_val_batch_end", lambda trainer: stop(trainer) if trainer.progress.global_batch >= count else None)]


WAYS = [stopping, saving, saving_by_hand, stopping_in_validation]


def everything(trainer: Trainer) -> dict[str, Any]:
    """What has to be the same, in a form that compares bit for bit."""
    checkpoint = torch.load(trainer.last, weights_only=True)
    for name in ("attempt", "epochs", "max_steps"):
        del checkpoint[name]
    return _plain(checkpoint)


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.tolist()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def epochs_told(scenario: Scenario) -> dict[int, Any]:
    """The metrics of each epoch; of one that was told twice, the last counts."""
    ends = [event for event in scenario.told if event.hook == "on_fit_epoch_end"]
    return {event.epoch: (event.metrics, event.lr, event.step) for event in ends if not event.partial}


def batches_told(scenario: Scenario) -> dict[int, Any]:
    ends = [event for event in scenario.told if event.hook == "on_train_batch_end" and event.status == "ok"]
    return {event.global_batch: (event.epoch, event.batch, event.step, event.metrics, event.lr) for event in ends}


def logs_told(scenario: Scenario) -> dict[int, Any]:
    return {event.step: (event.epoch, event.values) for event in scenario.told if event.hook == "on_log"}


def assert_same(whole: Scenario, pieces: Scenario, one: Trainer, other: Trainer) -> None:
    assert everything(other) == everything(one)
    assert batches_told(pieces) == batches_told(whole)
    assert epochs_told(pieces) == epochs_told(whole)
    assert logs_told(pieces) == logs_told(whole)
    assert other.progress.reason == one.progress.reason == "completed"


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    cuts=st.lists(st.tuples(st.integers(0, 3 * BATCHES - 1), st.sampled_from(WAYS)), min_size=1, max_size=4),
    accumulate=st.integers(1, 3),
    schedule=st.sampled_from(sorted(SCHEDULERS)),
    loader=st.sampled_from([lambda loader: loader, Lengthless]),
    validates=st.booleans(),
    clip_norm=st.sampled_from([None, 0.5]),
    scaler=st.booleans(),
)
def test_resumed_anywhere_it_is_the_run_that_was_never_interrupted(
    cuts: list[Any], tmp_path_factory: pytest.TempPathFactory, **options: Any
) -> None:
    """Several times in a row, at any batch, by every way to leave a checkpoint behind."""
    directory = tmp_path_factory.mktemp("runs")
    whole = Scenario(directory=directory / "whole", **options)
    expected = whole.run(resume=None)
    pieces = Scenario(directory=directory / "pieces", **options)
    for count, way in sorted(cuts, key=lambda cut: cut[0]):
        pieces.run(*way(count))
    assert_same(whole, pieces, expected, pieces.run())
