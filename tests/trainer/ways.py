"""Every way in which a training can end, each in the second batch of its second epoch."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from eventbus import EventBus
from tests.trainer.toys import Recorder, batches, make_trainer, squared_error
from trainer import EarlyStopping, Trainer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Broken(Exception):  # noqa: N818
    """What is raised here."""


class Model(torch.nn.Linear):
    """Raises what it is told to, in training or in validation."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(3, 1)
        self.raised: BaseException | None = None
        self.in_training = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.raised is not None and self.training is self.in_training:
            raise self.raised
        return super().forward(x)


class Loader:
    """Two batches; may raise instead of the second."""

    def __init__(self) -> None:
        self.raised: BaseException | None = None

    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Iterator[Any]:
        first, second = batches(2)
        yield first
        if self.raised is not None:
            raise self.raised
        yield second


def loss(model: Any, batch: Any) -> torch.Tensor:
    """The loss, spoiled by `model.factor`."""
    factor = getattr(model, "factor", 1.0)
    if isinstance(factor, BaseException):
        raise factor
    return squared_error(model, batch) * factor


def set_to(name: str, value: Any) -> Callable[[Trainer], None]:
    """Give the model an attribute, in the last batch."""
    return lambda trainer: setattr(trainer.model, name, value)


def fail(trainer: Trainer) -> None:
    raise Broken


def break_loader(trainer: Trainer) -> None:
    trainer.train_loader.raised = Broken()


def break_validation(trainer: Trainer) -> None:
    trainer.model.in_training = False
    trainer.model.raised = Broken()


#: What is done in the batch before, or in the last one; and options of the trainer and of `fit`.
WAYS: dict[str, tuple[Callable[[Trainer], object], dict[str, Any], dict[str, Any]]] = {
    "all epochs": (lambda trainer: None, {}, {"epochs": 2}),
    "max_steps": (lambda trainer: None, {}, {"max_steps": 3}),
    "trainer.stop": (lambda trainer: setattr(trainer, "stop", True), {}, {}),
    "control.stop": (lambda trainer: trainer.bus.control.stop("enough"), {}, {}),
    "EarlyStopping": (lambda trainer: None, {"callbacks": [(1, 1e9)]}, {}),
    "one of signals=": (lambda trainer: os.kill(os.getpid(), signal.SIGUSR1), {"signals": ("SIGUSR1",)}, {}),
    'on_nan="stop"': (set_to("factor", math.nan), {"on_nan": "stop"}, {}),
    'on_nan="raise"': (set_to("factor", math.nan), {"on_nan": "raise"}, {}),
    "memory does not suffice": (set_to("raised", torch.cuda.OutOfMemoryError("none left")), {}, {}),
    "exception in the model": (set_to("raised", Broken()), {}, {}),
    "exception in the loss": (set_to("factor", Broken()), {}, {}),
    "exception in the loader": (break_loader, {}, {}),
    "exception in validation": (break_validation, {}, {}),
    "a hook that raises": (fail, {}, {}),
    "Ctrl-C": (set_to("raised", KeyboardInterrupt()), {}, {}),
}


def run(way: str, directory: Path) -> Recorder:
    """Train until this way to end is taken; everything that was published."""
    act, options, fit = WAYS[way]
    options = dict(options)
    options["callbacks"] = [EarlyStopping(patience=p, min_delta=d) for p, d in options.get("callbacks", ())]
    with EventBus(run="test") as bus:
        seen = Recorder(bus, "*", "!on_val_image_end")
        trainer = make_trainer(bus, model=Model(), loss=loss, save_dir=directory, **options)
        hook, at = ("on_train_batch_end", 2) if way == "exception in the loader" else ("on_train_batch_start", 3)

        def look(event: Any) -> None:
            if event.global_batch == at:
                act(trainer)

        bus.subscribe(look, hook, on_error="raise")
        with suppress(Broken, FloatingPointError, torch.cuda.OutOfMemoryError, KeyboardInterrupt):
            trainer.fit(Loader(), batches(1), test_loader=batches(1), **(fit or {"epochs": 3}))
    return seen


def claims(seen: Recorder) -> list[str]:
    """What the table says of a way to end, as it was."""
    last_epoch = seen.of("on_fit_epoch_end")[-1]
    after = seen.events[seen.events.index(last_epoch) :]
    validated = [e for e in seen.of("on_val_end") if e.phase == "fit" and e.epoch == last_epoch.epoch and e.metrics]
    asked = [event.hook for event in seen.events if event.hook in ("on_control", "on_exception")]
    return [
        seen.of("on_train_batch_end")[-1].status,
        "partial" if last_epoch.partial else "whole",
        "yes" if validated else "no",
        "written" if any(e.hook == "on_model_save" and e.path.endswith("last.pt") for e in after) else "kept",
        "yes" if any(e.hook == "on_val_end" and e.phase == "test" for e in after) else "no",
        ", ".join([*asked, seen.one("on_train_end").reason]),
    ]
