"""Callbacks written for Ultralytics, ``callback(trainer)``, used as they are.

Run it: ``python examples/ultralytics_callback.py``.
"""

import torch
from torch import nn

from trainer import Trainer


def log_epoch(trainer) -> None:
    """Reads what Ultralytics callbacks read."""
    print(f"epoch {trainer.epoch + 1}/{trainer.epochs}: fitness {trainer.fitness:.4f}")


def stop_when_good(trainer) -> None:
    """Ends the training as Ultralytics callbacks do."""
    if trainer.metrics["val/loss"] < 0.05:
        trainer.stop = True


def main() -> None:
    """Learn a sum."""
    torch.manual_seed(0)
    inputs = torch.randn(256, 8)  # (N, features)
    data = [(x, x.sum(dim=1, keepdim=True)) for x in inputs.split(32)]
    model = nn.Linear(8, 1)
    trainer = Trainer(
        model,
        lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1]),
        torch.optim.Adam(model.parameters(), lr=0.1),
        save_dir=None,
    )
    trainer.add_callback("on_fit_epoch_end", log_epoch)
    trainer.add_callback("on_fit_epoch_end", stop_when_good)
    result = trainer.fit(data, data, epochs=50)
    print(f"{result.reason} after {result.step} steps")


if __name__ == "__main__":
    main()
