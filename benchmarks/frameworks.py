"""The same training in other people's loops, each as lean as its documentation lets it be."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Loss = Callable[[nn.Module, Any], torch.Tensor]


def in_ignite(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Loss, loader: Any) -> None:
    from ignite.engine import Engine

    def update(engine: Any, batch: Any) -> float:
        model.train()
        optimizer.zero_grad()
        value = loss(model, batch)
        value.backward()
        optimizer.step()
        return value.item()

    Engine(update).run(loader, max_epochs=1)


def in_accelerate(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Loss, loader: Any) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(loss(model, batch))
            optimizer.step()
            optimizer.zero_grad()


def in_lightning(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Loss, loader: Any) -> None:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return loss(self.model, batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer

    lightning.Trainer(accelerator="cpu", max_epochs=1, barebones=True).fit(Module(), loader)


def in_mmengine(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Loss, loader: Any) -> None:
    from mmengine.model import BaseModel
    from mmengine.runner import Runner

    class Model(BaseModel):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, inputs: Any, labels: Any, mode: str = "loss") -> dict[str, torch.Tensor]:
            return {"loss": loss(self.model, (inputs, labels))}

    hooks = ("runtime_info", "timer", "sampler_seed", "logger", "param_scheduler", "checkpoint")
    with tempfile.TemporaryDirectory() as folder:
        runner = Runner(
            Model(), folder, loader,
            train_cfg={"by_epoch": True, "max_epochs": 1}, optim_wrapper={"optimizer": optimizer},
            default_hooks=dict.fromkeys(hooks), log_level="ERROR", experiment_name=str(id(loader)),
        )  # fmt: skip
        runner.train()


def in_keras(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Loss, loader: Any) -> None:
    os.environ["KERAS_BACKEND"] = "torch"
    import keras

    keras.config.disable_interactive_logging()
    inputs = loader.batch[0]
    wrapped = keras.Sequential([keras.layers.TorchModuleWrapper(model, output_shape=(None, 10))])
    kind = keras.optimizers.SGD if isinstance(optimizer, torch.optim.SGD) else keras.optimizers.Adam
    wrapped.compile(
        optimizer=kind(learning_rate=optimizer.param_groups[0]["lr"]),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    wrapped(inputs)
    with keras.device("cpu"):
        wrapped.fit(iter(loader), steps_per_epoch=len(loader) - 1, epochs=1, verbose=0)


#: By the name to show: the package that must be there, and what trains with it.
RUNS: dict[str, tuple[str, Callable[..., None]]] = {
    "PyTorch Ignite": ("ignite", in_ignite),
    "accelerate": ("accelerate", in_accelerate),
    "mmengine": ("mmengine", in_mmengine),
    "Lightning": ("lightning", in_lightning),
    "Keras (torch)": ("keras", in_keras),
}
