"""What a user gets wrong, and mypy --strict finds: each line that says ``# E: code``, and no other. It is not run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from eventbus import EventBus, FitEpochEnd, TrainBatchEnd, ValEnd
from trainer import Callback, FitResult, Trainer


class WrongSteps(Trainer):
    def training_step(self, batch: Any) -> str:  # E: override
        return "loss"

    def validation_step(self, batch: Any, extra: int) -> torch.Tensor:  # E: override
        return torch.zeros(())

    def validation_end(self, outputs: Sequence[Any]) -> float:  # E: override
        return 0.5

    def optimizer_step(self) -> None:  # E: override
        self.optimizer.step()


class WrongCallback(Callback):
    def on_train_batch_end(self, trainer: Trainer, batch: Any) -> None: ...  # E: override

    def on_train_end(self) -> None: ...  # E: override

    on_val_end = 3  # E: assignment


def handlers(bus: EventBus) -> None:
    @bus.on(TrainBatchEnd)  # E: arg-type
    async def of_another(event: ValEnd) -> None: ...

    @bus.on(TrainBatchEnd, every=50)  # E: arg-type
    def with_two_arguments(event: TrainBatchEnd, other: int) -> None: ...

    @bus.on(TrainBatchEnd, FitEpochEnd)  # E: arg-type
    async def of_only_one(event: TrainBatchEnd) -> None: ...

    @bus.on(TrainBatchEnd)
    def misread(event: TrainBatchEnd) -> None:
        print(event.metric)  # E: attr-defined
        event.metrics["loss"] = 0.0  # E: index
        event.step = 3  # E: misc
        event.lr + 1  # E: operator

    bus.on(3)  # E: call-overload
    bus.publish("on_log")  # E: arg-type


def results(result: FitResult) -> None:
    result.step = 3  # E: misc
    result.metrics["val/loss"] = 0.0  # E: index
    result.best_fitness + 1  # E: operator
    print(result.history)  # E: attr-defined


def training(model: nn.Module, optimizer: torch.optim.Optimizer, trainer: Trainer, bus: EventBus) -> None:
    Trainer(model, optimizer, optimizer)  # E: arg-type
    Trainer(model, lambda model, batch: model(batch), optimizer, bus)  # E: call-arg
    Trainer(model, lambda model, batch: model(batch), optimizer, mode="maximum")  # E: arg-type
    Trainer(model, lambda model, batch: model(batch), optimizer, callback=[])  # E: call-arg
    Trainer(model, lambda model, batch: model(batch), optimizer, callbacks=[print])  # E: list-item
    trainer.fit([], epochs="3")  # E: arg-type
    trainer.fit([], [], 3)  # E: call-arg
    trainer.export("weights", "model.pt", quantize="static")  # E: arg-type
    trainer.step = 3  # E: misc
    trainer.add_callback("on_train_end", without_arguments)  # E: arg-type


def without_arguments() -> None: ...
