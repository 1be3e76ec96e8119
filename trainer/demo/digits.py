"""The data, the model and the trainer of the demo."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits  # type: ignore[import-untyped]
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from eventbus import EventBus
from trainer.trainer import Trainer

__all__ = ["TimedTrainer", "digits_trainer", "load_digits_loaders"]

Batch = list[torch.Tensor]


def load_digits_loaders(batch_size: int = 32) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """scikit-learn's digits, 1,797 images of 8 × 8 pixels, four fifths of them to train on; always the same split."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16  # (N, 1, 8, 8), 0 to 1
    labels = torch.tensor(digits.target)
    count = 4 * len(labels) // 5
    train, val = random_split(
        TensorDataset(images, labels), [count, len(labels) - count], torch.Generator().manual_seed(0)
    )
    shuffle = torch.Generator().manual_seed(0)
    return DataLoader(train, batch_size, shuffle=True, generator=shuffle), DataLoader(val, 360)


class TimedTrainer(Trainer):
    """Notes when each training step begins, and with it how long the former one took, callbacks included."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.step_seconds: list[float] = []
        self._begun_s: float | None = None

    def training_step(self, batch: Any) -> Any:
        """One step, timed from its start to the start of the next in the same epoch."""
        now = time.perf_counter()
        if self._begun_s is not None and self.batch_idx > 0:
            self.step_seconds.append(now - self._begun_s)
        self._begun_s = now
        return super().training_step(batch)


def digits_trainer(bus: EventBus | None, folder: Path | None, *, monitor: str | None = "val/accuracy") -> TimedTrainer:
    """A small CNN and what it takes to train it; without a folder the checkpoints go to a temporary one."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64 * 4 * 4, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip
    return TimedTrainer(
        model,
        loss,
        torch.optim.Adam(model.parameters(), lr=2e-3),
        bus=bus,
        device="cpu",
        save_dir=folder if folder is not None else tempfile.mkdtemp(),
        monitor=monitor,
        mode="max" if monitor else "auto",
        seed=0,
        flush_timeout=30.0,
    )


def loss(model: nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
    """Cross-entropy, and the share of digits that were recognised."""
    images, labels = batch
    scores = model(images)
    return {
        "loss": nn.functional.cross_entropy(scores, labels),
        "accuracy": (scores.argmax(dim=1) == labels).float().mean(),
    }
