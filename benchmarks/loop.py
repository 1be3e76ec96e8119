"""What a training loop costs beside the same loop written by hand: ours, and those of frameworks that are installed.

``pip install -c constraints.txt -e '.[bench-frameworks]'`` installs them.
"""

from __future__ import annotations

import logging
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from benchmarks import frameworks
from benchmarks.measure import Row, ratio_row, show
from trainer import Trainer

_STEPS = 10
_PAIRS = 100
Batch = tuple[torch.Tensor, torch.Tensor]


class Task(NamedTuple):
    """A model to train, and how fast that must be: what is the same for every loop."""

    what: str
    make: Callable[[], tuple[nn.Module, torch.optim.Optimizer]]
    batch: Batch
    most: float


def rows() -> Iterator[Row]:
    """Each loop takes its batches from a loader that makes as many steps by hand in between, on a model of its own.

    So a pair is some milliseconds apart, whatever the framework does before and after its loop, and the machine is as
    fast for the one as for the other.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    digits, vectors = torch.randn(32, 1, 8, 8), torch.randn(32, 784)
    labels = torch.randint(0, 10, (32,))
    tasks = (
        Task("the demo's CNN", small_cnn, (digits, labels), most=1.05),
        Task("two layers", two_layers, (vectors, labels), most=1.05),
    )
    with quiet():
        for task in tasks:
            yield from compare(task)


def compare(task: Task) -> Iterator[Row]:
    """A row for ours and one for each of the others."""
    ours, plain = measure(task, with_ours)
    yield ratio_row(
        f"a step of {task.what} in Trainer.fit, no callbacks / by hand, median of {_PAIRS} pairs",
        ours, plain, f"≤ {task.most} ×", unit="s", most=task.most,
    )  # fmt: skip
    for name, (package, run) in frameworks.RUNS.items():
        if find_spec(package) is None:
            yield Row(f"the same in {name}", "not installed", "–", "–", "–", None)
            continue
        theirs, plain = measure(task, run)
        yield Row(f"the same in {name}", show(theirs, "s"), show(plain, "s"), f"{theirs / plain:.2f} ×", "–", None)


def measure(task: Task, run: Callable[..., None]) -> tuple[float, float]:
    """Seconds of a step in a loop and of one by hand, the former as the median of ratios to the latter."""
    (model, optimizer), (by_hand, its_optimizer) = task.make(), task.make()
    loader = Interleaved(task.batch, lambda: steps_by_hand(by_hand, its_optimizer, task.batch))
    loader.between()  # the first steps of a process are slower
    run(model, optimizer, loss, loader)
    plain = statistics.median(plain for _, plain in loader.pairs)
    return plain * statistics.median(one / other for one, other in loader.pairs), plain


class Interleaved:
    """A loader of one batch, again and again, that does something else after every few, and takes the time of both."""

    def __init__(self, batch: Batch, between: Callable[[], None]) -> None:
        self.batch = batch
        self.between = between
        #: Seconds of a step of whoever reads, and of one in between.
        self.pairs: list[tuple[float, float]] = []
        self.dataset: list[Batch] = []  # some look for it

    def __len__(self) -> int:
        return _PAIRS * _STEPS

    def __iter__(self) -> Iterator[Batch]:
        for _ in range(_PAIRS):
            started = time.perf_counter()
            self.between()
            turned = time.perf_counter()
            for _ in range(_STEPS):
                yield self.batch
            ended = time.perf_counter()  # the last of these steps is over when the next batch is asked for
            self.pairs.append(((ended - turned) / _STEPS, (turned - started) / _STEPS))


def steps_by_hand(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
    """As people write it."""
    for _ in range(_STEPS):
        value = loss(model, batch)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()


def with_ours(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Any, loader: Interleaved) -> None:
    """The trainer as it comes, but without checkpoints."""
    Trainer(model, loss, optimizer, save_dir=None, device="cpu").fit(loader, epochs=1)


def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    images, labels = batch
    return cross_entropy(model(images), labels)


def small_cnn() -> tuple[nn.Module, torch.optim.Optimizer]:
    """That of `trainer.demo.digits`, which needs scikit-learn."""
    model = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64 * 4 * 4, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip
    return model, torch.optim.Adam(model.parameters(), lr=2e-3)


def two_layers() -> tuple[nn.Module, torch.optim.Optimizer]:
    """So light that what a loop does between two batches shows."""
    model = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 10))
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


class quiet:  # noqa: N801  # used like a function
    """Without what frameworks log, print and warn of."""

    def __enter__(self) -> None:
        logging.disable(logging.ERROR)
        self._warnings = warnings.catch_warnings()
        self._warnings.__enter__()
        warnings.simplefilter("ignore")

    def __exit__(self, *error: object) -> None:
        self._warnings.__exit__()
        logging.disable(logging.NOTSET)
