"""Two processes of one run: they agree on every decision and share their numbers."""

from __future__ import annotations

import json
import multiprocessing
import os
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from eventbus import EventBus
from tests.trainer.toys import batches, linear, make_trainer

if TYPE_CHECKING:
    from pathlib import Path


def work(rank: int, directory: str) -> None:
    """Train on different data; only rank 1 asks for a rate, then for a stop."""
    torch.set_num_threads(1)
    store = distributed.FileStore(os.path.join(directory, "store"), 2)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    bus = EventBus(run=f"name-of-{rank}")
    told: list[Any] = []
    bus.subscribe(told.append)
    model = torch.nn.parallel.DistributedDataParallel(linear())
    trainer = make_trainer(bus, model=model, save_dir=os.path.join(directory, "runs"), log_every=1)

    def ask(t: Any) -> None:
        if rank == 1 and t.progress.global_batch == 1:
            bus.control.set_lr(0.05, requester="rank 1")
        if rank == 1 and t.progress.global_batch == 5:
            t.stop = True

    trainer.add_callback("on_after_backward", ask)
    result = trainer.fit(batches(4, seed=rank), batches(2, seed=rank), epochs=3)
    distributed.destroy_process_group()
    found = {
        "run": sorted({event.run for event in told}),
        "rank": sorted({event.rank for event in told}),
        "step": result.step,
        "reason": result.reason,
        "metrics": next(e for e in told if e.hook == "on_fit_epoch_end").metrics,
        "own": [e.metrics["loss"] for e in told if e.hook == "on_train_batch_end"][:4],
        "rates": [e.lr[0] for e in told if e.hook == "on_train_batch_end"],
        "control": [[e.action, e.accepted, e.requester, e.step] for e in told if e.hook == "on_control"],
        "saved": sum(e.hook == "on_model_save" for e in told),
        "keys": sorted(model.module.state_dict()),
    }
    with open(os.path.join(directory, f"{rank}.json"), "w") as file:
        json.dump(found, file)
    bus.close()


def test_two_processes_agree(tmp_path: Path) -> None:
    """One run id; a request to one is applied by both at the same step; epoch metrics are of both; rank 0 saves."""
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=work, args=(rank, str(tmp_path))) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0, 0]
    zero, one = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert zero["run"] == one["run"] == ["name-of-0"]
    assert (zero["rank"], one["rank"]) == ([0], [1])
    assert (zero["step"], zero["reason"]) == (one["step"], one["reason"]) == (6, "stopped")
    assert zero["rates"] == one["rates"] == [0.1, 0.1, 0.05, 0.05, 0.05, 0.05]
    assert zero["control"] == one["control"]
    assert zero["control"][0] == ["set_lr", True, "rank 1", 2]
    assert zero["metrics"] == one["metrics"]
    assert abs(zero["metrics"]["train/loss"] - sum(zero["own"] + one["own"]) / 8) < 1e-6
    assert zero["own"] != one["own"]
    assert zero["saved"] > 0
    assert one["saved"] == 0
    checkpoint = torch.load(tmp_path / "runs" / "last.pt", weights_only=True)
    assert sorted(checkpoint["model"]) == zero["keys"] == ["bias", "weight"]
