"""Two processes of one run that are stopped and resumed: each goes on in its own place."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from eventbus import EventBus
from tests.trainer.pair import Pair
from tests.trainer.toys import Recorder, make_trainer

if TYPE_CHECKING:
    from pathlib import Path


def net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 6), torch.nn.Dropout(0.4), torch.nn.Linear(6, 1))


def attempt(rank: int, directory: str, stop_at: int | None) -> tuple[list[Any], list[Any], Any]:
    """The weights after it, the batches it told, and the metrics of its last epoch."""
    x = torch.randn(48, 3, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, x.sum(dim=1, keepdim=True))
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))
    with EventBus(run="ranks") as bus:
        seen = Recorder(bus, "on_train_batch_end")
        model = torch.nn.parallel.DistributedDataParallel(net())
        trainer = make_trainer(bus, model=model, save_dir=directory, accumulate=4)
        # other random numbers in each process, as when each has augmentation of its own
        trainer.add_callback("on_train_start", lambda t: t.step or torch.manual_seed(rank))
        if stop_at is not None:
            trainer.add_callback(
                "on_after_backward", lambda t: setattr(t, "stop", rank == 1 and t.progress.global_batch == stop_at)
            )
        torch.manual_seed(random.randrange(1000))
        result = trainer.fit(loader, epochs=3, resume="auto")
        told = [(event.global_batch, event.epoch, event.batch, event.metrics["loss"]) for event in seen.events]
        return [parameter.tolist() for parameter in model.parameters()], told, dict(result.metrics)


def whole(rank: int, directory: str) -> Any:
    return attempt(rank, directory, None)


def pieces(rank: int, directory: str) -> Any:
    """Stopped within an epoch and a group, and at the end of an epoch."""
    first, second, third = (attempt(rank, directory, stop_at) for stop_at in (8, 11, None))
    return third[0], first[1] + second[1] + third[1], third[2]


def test_each_process_goes_on_with_its_own_random_numbers_and_means(pair: Pair, tmp_path: Path) -> None:
    """Dropout differs between the processes and goes on in each; samplers are told the epoch; means are of both."""
    expected = pair.run(whole, tmp_path, str(tmp_path / "whole"))
    got = pair.run(pieces, tmp_path, str(tmp_path / "pieces"))
    assert got == expected
    assert got[0][0] == got[1][0]
    assert got[0][1] != got[1][1]
