"""Two processes of one run: they agree on every decision, share their numbers, and end together."""

from __future__ import annotations

import logging
import random
import threading
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import pytest
import torch
from torch import distributed

from eventbus import EventBus, track
from tests.trainer.pair import Pair
from tests.trainer.toys import Lengthless, Recorder, batches, linear, make_trainer
from trainer import EarlyStopping, RankFailedError, Trainer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path


def parallel(bus: EventBus | None, **options: Any) -> Trainer:
    """A trainer of a model whose gradients are averaged over both processes."""
    model = torch.nn.parallel.DistributedDataParallel(options.pop("model", None) or linear())
    return make_trainer(bus, model=model, **options)


class Logged(logging.Handler):
    """What the library warns of, while it lasts."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())

    def __enter__(self) -> Self:
        logging.getLogger("trainbus").addHandler(self)
        return self

    def __exit__(self, *error: object) -> None:
        logging.getLogger("trainbus").removeHandler(self)


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


def test_E1_a_stop_asked_anywhere_ends_both_at_the_same_step(pair: Pair, tmp_path: Path) -> None:
    """E1, E9, I1, I2, H7: 50 of 50, asked by hooks, subscribers and threads, on either rank, at random moments."""
    zero, one = pair.run(stopped_50_times, tmp_path)
    assert len(zero) == 50
    assert zero == one
    assert {(actor, asking) for actor, asking, *_ in zero} == {(actor, rank) for actor in ACTORS for rank in (0, 1)}
    for _, _, reason, *steps in zero:
        assert reason == "stopped"
        assert len(set(steps)) == 1


# ----------------------------------------------------------------------------------------------- uneven loaders


def unevenly(rank: int, kind: str, counts: list[int]) -> dict[str, Any]:
    """Train on loaders of different lengths, in groups of two batches."""
    with EventBus(run="r") as bus, Logged() as logged:
        seen = Recorder(bus, "on_train_*", "on_fit_epoch_end")
        trainer = parallel(bus, accumulate=2)
        loader: Any = batches(counts[rank], seed=rank)
        if kind == "lengthless" or (kind == "mixed" and rank == 0):
            loader = Lengthless(loader)
        result = trainer.fit(loader, epochs=2)
    weights = trainer.model.module.weight.detach()
    return {
        "batches": [event.batch for event in seen.of("on_train_batch_end")],
        "partial": [event.partial for event in seen.of("on_fit_epoch_end")],
        "end": (result.reason, result.step, weights.tolist()),
        "said": logged.messages,
    }


@pytest.mark.parametrize("kind", ["with lengths", "mixed", "lengthless"])
def test_an_epoch_ends_for_all_with_the_shortest_loader(kind: str, pair: Pair, tmp_path: Path) -> None:
    """E1: nobody waits for a batch that another does not have; it is said once, with the numbers."""
    zero, one = pair.run(unevenly, tmp_path, kind, [6, 5])
    assert zero["batches"] == one["batches"] == [0, 1, 2, 3, 4] * 2
    assert zero["partial"] == one["partial"] == [False, False]
    assert zero["end"] == one["end"]
    assert zero["end"][:2] == ("completed", 6)
    assert one["said"] == []
    assert zero["said"] == [
        "The train_loaders have [6, 5] batches, by rank: an epoch ends for all with the shortest. "
        "A DistributedSampler gives all of them as many."
        if kind == "with lengths"
        else "Rank 1 has no batch after the first 5 of an epoch, which so ends for all. "
        "A DistributedSampler gives all of them as many."
    ]


def with_false_length(rank: int) -> str:
    class Lying(list[Any]):
        def __len__(self) -> int:
            return 5

    with EventBus(run="r") as bus:
        try:
            parallel(bus).fit(Lying(batches(5 - rank)), epochs=1)
        except (ValueError, RankFailedError) as error:
            return str(error)
    return ""


def test_a_loader_that_is_shorter_than_its_length_is_an_error_for_all(pair: Pair, tmp_path: Path) -> None:
    zero, one = pair.run(with_false_length, tmp_path)
    assert one.startswith("The train_loader of rank 1 gave 4 batches, and has at least 5 by its length.")
    assert one in zero


class Judging(Trainer):
    """Counts what `validation_end` is given."""

    def validation_end(self, outputs: Sequence[Any]) -> Mapping[str, Any]:
        return {"batches": len(outputs), "worst": max(float(output) for output in outputs)}


class Normed(torch.nn.Module):
    """A model with buffers, which `DistributedDataParallel` sends before each batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.linear = torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.norm(x))  # type: ignore[no-any-return]


def validates_unevenly(rank: int, counts: list[int]) -> dict[str, Any]:
    with EventBus(run="r") as bus:
        seen = Recorder(bus, "on_val_*")
        trainer = parallel(bus, model=Normed(), kind=Judging)
        result = trainer.fit(batches(3, seed=rank), batches(counts[rank], size=2 + rank, seed=7 + rank), epochs=1)
        alone = trainer.validate(batches(counts[rank], size=2 + rank, seed=7 + rank))
        assert trainer.model.broadcast_buffers
    sizes = [(event.metrics["loss"], 2 + rank) for event in seen.of("on_val_batch_end")][: counts[rank]]
    buffers = [buffer.tolist() for buffer in trainer.model.module.buffers()]
    return {"metrics": dict(result.metrics), "alone": alone, "sizes": sizes, "buffers": buffers}


@pytest.mark.parametrize("counts", [[1, 4], [4, 1], [0, 2]])
def test_every_process_validates_all_of_its_batches(counts: list[int], pair: Pair, tmp_path: Path) -> None:
    """Their numbers are told once, over all samples, the same on both; the model is that of rank 0 on both."""
    zero, one = pair.run(validates_unevenly, tmp_path, counts)
    assert zero["metrics"] == one["metrics"]
    assert zero["alone"] == one["alone"] == {name[4:]: v for name, v in zero["metrics"].items() if name[:4] == "val/"}
    sizes = zero["sizes"] + one["sizes"]
    total = sum(size for _, size in sizes)
    assert zero["metrics"]["val/loss"] == pytest.approx(sum(loss * size for loss, size in sizes) / total)
    shares = [counts[0] * 2, counts[1] * 3]
    expected = sum(count * share for count, share in zip(counts, shares, strict=True)) / sum(shares)
    assert zero["metrics"]["val/batches"] == pytest.approx(expected)
    assert zero["buffers"] == one["buffers"]


def with_nothing_to_validate(rank: int) -> str:
    with pytest.raises(ValueError, match="gave no batch") as raised:
        parallel(None).fit(batches(1), [], epochs=1)
    return str(raised.value)


def test_a_validation_without_any_batch_is_an_error(pair: Pair, tmp_path: Path) -> None:
    zero, one = pair.run(with_nothing_to_validate, tmp_path)
    assert zero == one == "The loader to validate on (phase 'fit') gave no batch."


# ------------------------------------------------------------------------------------------------- checkpoints


def stopped_at_the_end_of_an_epoch(rank: int, directory: str) -> Any:
    """Only rank 1 knows, when checkpoints are decided on; a test follows the last one."""
    with EventBus(run="r") as bus:
        trainer = parallel(bus, save_dir=directory)
        trainer.add_callback("on_fit_epoch_end", lambda t: setattr(t, "stop", rank == 1))
        result = trainer.fit(batches(2), batches(1), epochs=9, save_every=3, test_loader=batches(1))
    return result.reason, result.step, sorted(result.metrics)


def test_a_stop_that_one_rank_knows_of_first_ends_with_a_checkpoint(pair: Pair, tmp_path: Path) -> None:
    """Writing one takes both of them, so both decide alike."""
    zero, one = pair.run(stopped_at_the_end_of_an_epoch, tmp_path, str(tmp_path))
    assert zero == one == ("stopped", 2, ["test/loss", "train/loss", "val/loss"])
    assert torch.load(tmp_path / "last.pt", weights_only=True)["step"] == 2


def resumed_from_what_is_there(rank: int, directories: list[str]) -> str:
    try:
        result = parallel(None, run="r", save_dir=directories[rank]).fit(batches(2), epochs=2, resume="auto")
    except (RankFailedError, ValueError) as error:
        return str(error)
    return f"{result.reason} at {result.step}"


def test_ranks_go_on_from_the_same_checkpoint_or_not_at_all(pair: Pair, tmp_path: Path) -> None:
    """Where each has a disk of its own, one finds nothing; a file that one of them cannot read ends both."""
    seen_by_all, own = str(tmp_path / "shared"), str(tmp_path / "own")
    assert pair.run(resumed_from_what_is_there, tmp_path, [seen_by_all] * 2) == ("completed at 4", "completed at 4")
    zero, one = pair.run(resumed_from_what_is_there, tmp_path, [seen_by_all, own])
    assert zero == one
    assert zero.startswith(
        "The processes differ in the checkpoint to go on from (rank 0: step 4 of 'r', rank 1: none)."
    )
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "last.pt").write_text("no checkpoint")
    zero, one = pair.run(resumed_from_what_is_there, tmp_path, [seen_by_all, own])
    assert one.endswith("/own/last.pt cannot be read as a checkpoint: " + one.partition("checkpoint: ")[2])
    assert zero.startswith(f"Rank 1 failed: ValueError: {own}/last.pt cannot be read")


# ------------------------------------------------------------------------------------------- a loop of one's own


def gathered(value: Any) -> list[Any]:
    values: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(values, value)
    return values


def tracked(rank: int) -> dict[str, Any]:
    """`track` around a loop that trains in several processes by itself; a thread of rank 1 stops it."""
    with EventBus(run=f"r{rank}", rank=rank) as bus:
        seen = Recorder(bus, "on_control", "on_train_*", "on_fit_epoch_end")
        model = torch.nn.parallel.DistributedDataParallel(linear())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        threads: list[threading.Thread] = []

        def ask() -> None:
            bus.control.set_lr(0.05).result(20)
            bus.control.stop("enough")

        def start(event: Any) -> None:
            threads.append(threading.Thread(target=ask))
            threads[0].start()

        bus.subscribe(start, "on_train_epoch_start", when=partial(is_epoch, 1 if rank == 1 else None), once=True)
        with track(bus, optimizer=optimizer, gather=gathered) as run:
            for _ in run.epochs():
                for x, y in run.batches(batches(4, seed=rank)):
                    loss = ((model(x) - y) ** 2).mean()
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    run.log(loss=loss)
        for thread in threads:
            thread.join()
    return {
        "run": {event.run for event in seen.events},
        "told": [(e.action, e.accepted, e.step) for e in seen.of("on_control")],
        "end": (seen.one("on_train_end").step, seen.one("on_train_end").reason),
        "losses": [event.metrics["train/loss"] for event in seen.of("on_fit_epoch_end")],
        "own": [event.metrics["loss"] for event in seen.of("on_train_batch_end")][:4],
    }


def is_epoch(number: int | None, event: Any) -> bool:
    return bool(event.epoch == number)


def test_track_with_gather_decides_for_all_processes(pair: Pair, tmp_path: Path) -> None:
    """E1: for loops that `Trainer` does not serve (sharded models); one name, one order of requests, means over all."""
    zero, one = pair.run(tracked, tmp_path)
    assert zero["run"] == one["run"] == {"r0"}
    assert zero["told"] == one["told"]
    assert [action for action, *_ in zero["told"]] == ["set_lr", "stop"]
    assert zero["end"] == one["end"]
    assert zero["end"][1] == "stopped"
    assert zero["losses"] == one["losses"]
    assert zero["losses"][0] == pytest.approx(sum(zero["own"] + one["own"]) / 8)


def with_every_option(rank: int, directory: str) -> dict[str, Any]:
    """What decides, computes or reads by itself, all at once, on loaders of different lengths."""
    with EventBus(run="r") as bus:
        seen = Recorder(bus, "on_fit_epoch_end", "on_lr_change")
        trainer = parallel(
            bus, model=Normed(), save_dir=directory, ema=0.9, precision="bf16", warmup=3, accumulate=2, clip_norm=1.0,
            on_nan="skip", monitor="val/loss", callbacks=[EarlyStopping(patience=1)],
            scheduler=lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),
        )  # fmt: skip
        data = batches(6 - rank, seed=rank)
        if rank == 1:
            data[2] = (data[2][0] * float("nan"), data[2][1])
        result = trainer.fit(
            data, batches(1 + 2 * rank, seed=9), epochs=3, sanity_batches=1, test_loader=batches(2 - rank, seed=8)
        )
    average = trainer.average.module
    return {
        "metrics": [dict(event.metrics) for event in seen.of("on_fit_epoch_end")],
        "rates": [tuple(event.new) for event in seen.of("on_lr_change")],
        "end": (result.reason, result.step, dict(result.metrics)),
        "weights": [parameter.tolist() for parameter in trainer.model.module.parameters()],
        "averages": [parameter.tolist() for parameter in average.parameters()],
    }


def test_every_option_keeps_the_processes_in_step(pair: Pair, tmp_path: Path) -> None:
    """Whatever one of them skips, averages, warms up, monitors or tests, the other does the same."""
    zero, one = pair.run(with_every_option, tmp_path, str(tmp_path))
    for name in zero:
        assert zero[name] == one[name], name
    assert len(zero["metrics"]) >= 1
    assert "test/loss" in zero["end"][2]
