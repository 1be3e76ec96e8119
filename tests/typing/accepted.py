"""What a user writes, and mypy --strict lets pass. It is checked and not run; `test_typing` does that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, assert_type

import torch
from torch import nn

from eventbus import Event, EventBus, FitEpochEnd, TrainBatchEnd, ValEnd, track
from trainer import Callback, EarlyStopping, FitResult, ModelCheckpoint, Trainer

Batch = tuple[torch.Tensor, torch.Tensor]


class GradSpike(Event):
    norm: float


def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    images, labels = batch
    return nn.functional.cross_entropy(model(images), labels)


def loss_and_accuracy(model: nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
    images, labels = batch
    scores: torch.Tensor = model(images)
    return {
        "loss": nn.functional.cross_entropy(scores, labels),
        "accuracy": (scores.argmax(1) == labels).float().mean(),
    }


class Classifier(Trainer):
    """Every part of a step, each with a narrower type than what it replaces."""

    def training_step(self, batch: Batch) -> torch.Tensor | None:
        images, labels = batch
        if len(labels) < 2:
            return None
        self.log(images=len(images))
        return nn.functional.cross_entropy(self.model(images), labels)

    def validation_step(self, batch: Batch) -> dict[str, torch.Tensor]:
        images, labels = batch
        scores = self.model(images)
        return {"loss": nn.functional.cross_entropy(scores, labels), "scores": scores, "labels": labels}

    def validation_end(self, outputs: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, float]:
        right = sum(int((output["scores"].argmax(1) == output["labels"]).sum()) for output in outputs)
        return {"accuracy": right / max(1, sum(len(output["labels"]) for output in outputs))}

    def prediction_step(self, batch: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.model(batch)
        return scores.argmax(1)

    def optimizer_step(self) -> bool:
        if self.step == 0:
            self.optimizer.param_groups[0]["lr"] = 0.1
        return super().optimizer_step()

    def backward(self, loss: torch.Tensor) -> None:
        super().backward(2 * loss)


class Notes(Callback):
    """Methods that take the trainer, methods that await an event, and a state."""

    priority = 10

    def __init__(self) -> None:
        self.seen = 0

    def on_train_batch_end(self, trainer: Trainer) -> None:
        assert_type(trainer.step, int)
        assert_type(trainer.best_fitness, float | None)
        assert_type(trainer.last, Path | None)
        trainer.stop = trainer.step > 100

    def on_val_end(self, trainer: Any) -> None:
        trainer.metrics["val/f1"] = 0.5

    async def on_fit_epoch_end(self, event: FitEpochEnd) -> None:
        assert_type(event.metrics, Mapping[str, float])
        self.seen += event.epoch

    async def on_grad_spike(self, event: GradSpike) -> None: ...

    def state_dict(self) -> dict[str, int]:
        return {"seen": self.seen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.seen = state["seen"]


def handlers(bus: EventBus) -> None:
    @bus.on(TrainBatchEnd)
    def inline(event: TrainBatchEnd) -> None:
        assert_type(event.lr, tuple[float, ...])

    @bus.on(TrainBatchEnd, every=50, timeout=5.0)
    async def awaited(event: TrainBatchEnd) -> None: ...

    @bus.on(TrainBatchEnd)
    async def of_a_base(event: Event) -> None: ...

    @bus.on(TrainBatchEnd, ValEnd)
    async def of_two(event: TrainBatchEnd | ValEnd) -> None:
        assert_type(event.metrics, Mapping[str, float])

    @bus.on(GradSpike)
    def of_ones_own(event: GradSpike) -> None:
        assert_type(event.norm, float)

    @bus.on("on_val_*", "on_fit_epoch_end", priority=10)
    def by_name(event: Event) -> None: ...

    @bus.on(FitEpochEnd, "on_log")
    def mixed(event: Event) -> None: ...

    @bus.on()
    async def everything(event: Event) -> None: ...

    inline(TrainBatchEnd(epoch=0, batch=0, step=1))  # what is decorated can still be called


async def streamed(bus: EventBus) -> None:
    async with bus.stream(TrainBatchEnd) as events:
        async for event in events:
            assert_type(event, TrainBatchEnd)
    assert_type(await bus.wait_for(ValEnd), Any)


def train(model: nn.Module, batches: list[Batch], bus: EventBus) -> FitResult:
    trainer = Classifier(
        model, loss, lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        bus=bus, callbacks=[Notes(), EarlyStopping(patience=3), ModelCheckpoint(monitor="val/accuracy", mode="max")],
        signals=("SIGTERM",), on_callback_error="raise",
    )  # fmt: skip
    trainer.add_callback("on_train_end", lambda trainer: print(trainer.reason))
    trainer.add_callback(ValEnd, Notes().on_val_end)
    result = trainer.fit(batches, batches, epochs=3, resume="auto")
    assert_type(result, FitResult)
    assert_type(result.reason, str)
    assert_type(result.epoch, int | None)
    assert_type(result.step, int)
    assert_type(result.metrics, Mapping[str, float])
    assert_type(result.best_fitness, float | None)
    assert_type(result.best, Path | None)
    assert_type(trainer.validate(batches), dict[str, float])
    assert_type(trainer.export("torchscript", "model.ts", example=batches[0][0], quantize="dynamic"), Path)
    for outputs in trainer.predict(images for images, _ in batches):
        assert_type(outputs, Any)
    Trainer(model, loss_and_accuracy, torch.optim.AdamW(model.parameters()), clip_norm=1.0, mode="max", monitor="acc")
    return result


def a_loop_of_ones_own(bus: EventBus, batches: list[Batch], optimizer: torch.optim.Optimizer) -> None:
    with track(bus, epochs=10, optimizer=optimizer, monitor="val/loss") as run:
        for epoch in run.epochs():
            assert_type(epoch, int)
            for batch in run.batches(batches):
                assert_type(batch, Batch)
                run.log(loss=0.5)
            run.validate({"loss": 0.4})
