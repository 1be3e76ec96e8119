"""A training in a process of its own, which is killed at some moment and started again until it is done."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch._dynamo  # which takes a second, and the first step of an optimizer would import it in every process
from torch import nn
from torch.utils.data import DataLoader, Dataset

from eventbus import EventBus
from trainer import Trainer

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

STEPS = 36


class Noisy(Dataset[Any]):
    """Augmented with torch's random numbers and Python's."""

    def __len__(self) -> int:
        return 44

    def __getitem__(self, index: int) -> Any:
        x = torch.full((64,), index / 44) + 0.1 * torch.randn(64) + random.gauss(0, 0.1)
        return x, x.sum(dim=0, keepdim=True)


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    x, y = batch
    return nn.functional.mse_loss(model(x), y)


def live(directory: str, batches: Connection | None = None) -> None:
    """Train to the end, or until killed: tells each batch to the pipe, each file on disk to ``announced``."""
    torch.set_num_threads(1)
    os.fsync = lambda descriptor: None  # a killed process loses nothing that the kernel has
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 400), nn.ReLU(), nn.Dropout(0.2), nn.Linear(400, 1))
    announced = os.open(os.path.join(directory, "announced"), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    with EventBus(run="lives") as bus:

        @bus.on("on_model_save")
        def note(event: Any) -> None:
            os.write(announced, f"{event.step} {os.path.basename(event.path)}\n".encode())

        trainer = Trainer(
            model, loss, torch.optim.Adam(model.parameters(), lr=0.003), bus=bus, save_dir=directory, seed=2,
            scheduler=lambda opt: torch.optim.lr_scheduler.CosineAnnealingLR(opt, STEPS), scheduler_every="step",
            accumulate=2,
        )  # fmt: skip
        if batches is not None:
            trainer.add_callback("on_train_batch_end", lambda _: batches.send_bytes(b"."))
        loader = DataLoader(Noisy(), batch_size=4, shuffle=True)
        trainer.fit(
            loader, DataLoader(Noisy(), batch_size=22), max_steps=STEPS, save_every=2, validate_every=6, resume="auto"
        )
    torch.save(model.state_dict(), Path(directory) / "weights.pt")
