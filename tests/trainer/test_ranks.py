"""Two processes of one run: they agree on every decision, share their numbers, and end together."""

from __future__ import annotations

import random
import threading
from typing import TYPE_CHECKING, Any

import torch

from eventbus import EventBus
from tests.trainer.pair import Pair
from tests.trainer.toys import Recorder, batches, linear, make_trainer

if TYPE_CHECKING:
    from pathlib import Path

    from trainer import Trainer


def parallel(bus: EventBus | None, **options: Any) -> Trainer:
    """A trainer of a model whose gradients are averaged over both processes."""
    model = torch.nn.parallel.DistributedDataParallel(options.pop("model", None) or linear())
    return make_trainer(bus, model=model, **options)


# ------------------------------------------------------------------------------------------ deciding together


def asks_on_rank_1(rank: int, directory: str) -> dict[str, Any]:
    """Train on different data; only rank 1 asks for a rate, then for a stop."""
    with EventBus(run=f"name-of-{rank}") as bus:
        seen = Recorder(bus)
        trainer = parallel(bus, save_dir=directory, log_every=1)

        def ask(t: Any) -> None:
            if rank == 1 and t.progress.global_batch == 1:
                bus.control.set_lr(0.05, requester="rank 1")
            if rank == 1 and t.progress.global_batch == 5:
                t.stop = True

        trainer.add_callback("on_after_backward", ask)
        result = trainer.fit(batches(4, seed=rank), batches(2, seed=rank), epochs=3)
    return {
        "run": {event.run for event in seen.events},
        "rank": {event.rank for event in seen.events},
        "step": result.step,
        "reason": result.reason,
        "metrics": dict(seen.of("on_fit_epoch_end")[0].metrics),
        "own": [event.metrics["loss"] for event in seen.of("on_train_batch_end")][:4],
        "rates": [event.lr[0] for event in seen.of("on_train_batch_end")],
        "control": [(e.action, e.accepted, e.requester, e.step) for e in seen.of("on_control")],
        "saved": seen.count("on_model_save"),
        "keys": sorted(trainer.model.module.state_dict()),
    }


def test_two_processes_agree(pair: Pair, tmp_path: Path) -> None:
    """E1, E9: one run id; a request to one is applied by both at the same step; metrics are of both; rank 0 saves."""
    zero, one = pair.run(asks_on_rank_1, tmp_path, str(tmp_path / "runs"))
    assert zero["run"] == one["run"] == {"name-of-0"}
    assert (zero["rank"], one["rank"]) == ({0}, {1})
    assert (zero["step"], zero["reason"]) == (one["step"], one["reason"]) == (6, "stopped")
    assert zero["rates"] == one["rates"] == [0.1, 0.1, 0.05, 0.05, 0.05, 0.05]
    assert zero["control"] == one["control"]
    assert zero["control"][0] == ("set_lr", True, "rank 1", 2)
    assert zero["metrics"] == one["metrics"]
    assert abs(zero["metrics"]["train/loss"] - sum(zero["own"] + one["own"]) / 8) < 1e-6
    assert zero["own"] != one["own"]
    assert zero["saved"] > 0
    assert one["saved"] == 0
    checkpoint = torch.load(tmp_path / "runs" / "last.pt", weights_only=True)
    assert sorted(checkpoint["model"]) == zero["keys"] == ["bias", "weight"]


#: Who asks for the stop: an inline hook, a queued subscriber, another thread.
ACTORS = ("attribute", "inline", "async", "thread", "control")


def stop_of_any_kind(trainer: Trainer, actor: str, at: int) -> list[threading.Thread]:
    """Have `actor` ask for a stop in batch `at`, or soon after it."""
    bus = trainer.bus
    threads: list[threading.Thread] = []

    def is_due(event: Any) -> bool:
        return bool(event.global_batch == at)

    if actor == "attribute":
        trainer.add_callback("optimizer_step", lambda t: setattr(t, "stop", t.progress.global_batch >= at))
    elif actor == "inline":
        bus.subscribe(lambda event: bus.control.stop("inline"), "on_train_batch_start", when=is_due)
    elif actor == "async":

        async def ask(event: Any) -> None:
            await bus.control.stop("async")

        bus.subscribe(ask, "on_train_batch_end", when=is_due, rank="all")
    elif actor == "thread":
        wait = lambda event: bus.control.stop("thread").result(30)  # noqa: E731
        bus.subscribe(wait, "on_train_batch_end", when=is_due, rank="all", run_in="thread")
    else:

        def start(event: Any) -> None:
            threads.append(threading.Thread(target=lambda: bus.control.stop("control", run=trainer.run)))
            threads[0].start()

        bus.subscribe(start, "on_train_batch_end", when=is_due)
    return threads


def stopped_50_times(rank: int) -> list[Any]:
    """Many short trainings in a row, each stopped by somebody else, on either rank, at a moment nobody knows."""
    told: list[Any] = []
    chance = random.Random(4)
    for number in range(50):
        actor, asking, at = ACTORS[number % len(ACTORS)], chance.randrange(2), chance.randrange(9)
        with EventBus(run=f"r{number}") as bus:
            seen = Recorder(bus, "on_train_batch_*", "on_train_end")
            trainer = parallel(bus)
            threads = stop_of_any_kind(trainer, actor, at) if rank == asking else []
            result = trainer.fit(batches(4, seed=rank), epochs=10_000)
            for thread in threads:
                thread.join()
            started, ended = seen.count("on_train_batch_start"), seen.count("on_train_batch_end")
            told.append((actor, asking, result.reason, result.step, started, ended, seen.one("on_train_end").step))
            assert result.step > at
            if actor in ("attribute", "inline"):  # I1, I2: not one batch more
                assert result.step == at + 1
    return told


def test_a_stop_asked_anywhere_ends_both_at_the_same_step(pair: Pair, tmp_path: Path) -> None:
    """E1, E9, I1, I2, H7: 50 of 50, asked by hooks, subscribers and threads, on either rank, at random moments."""
    zero, one = pair.run(stopped_50_times, tmp_path)
    assert len(zero) == 50
    assert zero == one
    assert {(actor, asking) for actor, asking, *_ in zero} == {(actor, rank) for actor in ACTORS for rank in (0, 1)}
    for _, _, reason, *steps in zero:
        assert reason == "stopped"
        assert len(set(steps)) == 1
