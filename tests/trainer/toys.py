"""A model so small that a training takes milliseconds, and a record of what was published."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from eventbus import Event, EventBus
from trainer import Trainer

torch.set_num_threads(1)


def batches(count: int, size: int = 4, seed: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count):
        x = torch.randn(size, 3, generator=generator)
        made.append((x, x.sum(dim=1, keepdim=True)))
    return made


class Endless:
    """A loader without a length or an end."""

    def __iter__(self) -> Any:
        while True:
            yield from batches(3)


class Lengthless:
    """A loader that ends but does not know when."""

    def __init__(self, data: list[Any]) -> None:
        self.data = data

    def __iter__(self) -> Any:
        return iter(self.data)


def squared_error(model: nn.Module, batch: Any) -> torch.Tensor:
    x, y = batch
    return ((model(x) - y) ** 2).mean()


def linear(seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(3, 1)


def make_trainer(bus: EventBus | None, **options: Any) -> Trainer:
    options.setdefault("save_dir", None)
    model = options.pop("model", None) or linear()
    loss = options.pop("loss", squared_error)
    optimizer = options.pop("optimizer", None) or torch.optim.SGD(model.parameters(), lr=0.1)
    return options.pop("kind", Trainer)(model, loss, optimizer, bus=bus, **options)


class Recorder:
    """Every event of a bus, in order; it does not ask for on_val_image_end unless told to."""

    def __init__(self, bus: EventBus, *hooks: str) -> None:
        self.events: list[Event] = []
        self.subscription = bus.subscribe(self._record, *hooks)

    def _record(self, event: Event) -> None:
        self.events.append(event)

    @property
    def hooks(self) -> list[str]:
        return [event.hook for event in self.events]

    def of(self, hook: str) -> list[Any]:
        return [event for event in self.events if event.hook == hook]

    def one(self, hook: str) -> Any:
        (event,) = self.of(hook)
        return event

    def count(self, hook: str) -> int:
        return len(self.of(hook))


#: What a batch that leads to an update publishes.
INNER = [
    "on_train_batch_start",
    "on_after_backward",
    "on_before_optimizer_step",
    "optimizer_step",
    "on_before_zero_grad",
    "on_train_batch_end",
]
#: How a run begins and ends.
BEGIN = ["on_pretrain_routine_start", "on_pretrain_routine_end", "on_train_start"]
END = ["on_train_end", "teardown"]


def assert_balanced(hooks: list[str]) -> None:
    """Every start has its end, properly nested, and the run has exactly one terminal event."""
    open_: list[str] = []
    pairs = {"on_train_batch_start": "on_train_batch_end", "on_train_epoch_start": "on_train_epoch_end"}
    pairs |= {"on_val_start": "on_val_end", "on_val_batch_start": "on_val_batch_end"}
    for hook in hooks:
        if hook in pairs:
            open_.append(pairs[hook])
        elif hook in pairs.values():
            assert open_, hook
            assert open_.pop() == hook
    assert not open_
    assert hooks.count("on_fit_epoch_end") == hooks.count("on_train_epoch_start")
    assert hooks.count("on_train_end") == hooks.count("teardown") == 1
    assert hooks[-2:] == END
