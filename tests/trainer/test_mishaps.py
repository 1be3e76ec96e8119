"""Losses and gradients that are not finite, and memory that does not suffice: starts and ends stay balanced."""

from __future__ import annotations

import gc
import json
import math
import multiprocessing
import os
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import distributed

from eventbus import EventBus
from tests.trainer.toys import BEGIN, END, INNER, Lengthless, Recorder, assert_balanced, batches, linear, make_trainer
from tests.trainer.toys import squared_error as loss

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from trainer import Trainer

#: What a batch publishes of which nothing comes.
SKIPPED = ["on_train_batch_start", "on_train_batch_end"]
#: What it publishes when its gradients are not finite.
NO_UPDATE = [hook for hook in INNER if hook != "optimizer_step"]


def spoiling(value: float, *at: int) -> Callable[[Any, Any], torch.Tensor]:
    """A loss that is `value` in these batches."""
    calls = iter(range(100))

    def spoiled(model: Any, batch: Any) -> torch.Tensor:
        return loss(model, batch) * (value if model.training and next(calls) in at else 1.0)

    return spoiled


def break_gradients(trainer: Trainer, *at: int) -> None:
    """Gradients that are not finite, of a loss that is."""

    def spoil(trainer: Any) -> None:
        if trainer.progress.global_batch in at:
            trainer.model.weight.grad[0, 0] = math.inf

    trainer.add_callback("on_after_backward", spoil)


def running_out(times: int, at: int = 1, words: str = "") -> Callable[[Any, Any], torch.Tensor]:
    """A loss whose backward pass runs out of memory so many times, after it has added to one of two gradients."""
    left = iter(range(times))
    calls = iter(range(100))

    def exhausted(gradient: torch.Tensor) -> None:
        if next(left, None) is not None:
            raise RuntimeError(words) if words else torch.cuda.OutOfMemoryError("CUDA out of memory.")

    def failing(model: Any, batch: Any) -> torch.Tensor:
        value = loss(model, batch)
        if next(calls) >= at:
            value.register_hook(exhausted)
        return value

    return failing


# ----------------------------------------------------------------------------------------------- not finite


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_is_skipped(bus: EventBus, value: float) -> None:
    """No backward pass, no update; the number is told, and is in no mean (H16)."""
    seen = Recorder(bus)
    trainer = make_trainer(bus, loss=spoiling(value, 1), on_nan="skip", log_every=1)
    result = trainer.fit(batches(3), epochs=1)
    assert seen.hooks == [
        *BEGIN, "on_train_epoch_start", *INNER, "on_log", *SKIPPED, *INNER, "on_log", "on_train_epoch_end",
        "on_fit_epoch_end", *END,
    ]  # fmt: skip
    told = seen.of("on_train_batch_end")
    assert [(event.status, event.step) for event in told] == [("ok", 1), ("skipped", 1), ("ok", 2)]
    assert not math.isfinite(told[1].metrics["loss"])
    good = [told[0].metrics["loss"], told[2].metrics["loss"]]
    assert result.metrics == {"train/loss": pytest.approx(sum(good) / 2)}
    assert [event.values["train/loss"] for event in seen.of("on_log")] == pytest.approx(good)


def test_gradients_that_are_not_finite_update_nothing(bus: EventBus) -> None:
    """The hooks around the update fire, as when a scaler skips it, so that one can look at the gradients."""
    seen = Recorder(bus)
    trainer = make_trainer(bus, on_nan="skip", clip_norm=1.0)
    break_gradients(trainer, 1)
    assert trainer.fit(batches(3), epochs=1).step == 2
    assert seen.hooks[3:-2] == [
        "on_train_epoch_start", *INNER, *NO_UPDATE, *INNER, "on_train_epoch_end", "on_fit_epoch_end",
    ]  # fmt: skip
    assert [event.status for event in seen.of("on_train_batch_end")] == ["ok", "skipped", "ok"]
    assert all(torch.isfinite(parameter).all() for parameter in trainer.model.parameters())


def test_gradients_are_checked_whether_or_not_anybody_hears_their_norm() -> None:
    trainer = make_trainer(None, on_nan="skip")
    break_gradients(trainer, 1)
    assert trainer.fit(batches(2), epochs=1).step == 1


def test_a_skipped_batch_of_a_group_leaves_the_mean_of_the_others(bus: EventBus) -> None:
    """With accumulation the update is that of the batches that were good."""
    trainer = make_trainer(bus, loss=spoiling(math.nan, 1, 2), accumulate=3, on_nan="skip")
    plain = make_trainer(None, accumulate=1)
    data = batches(3)
    assert trainer.fit(data, epochs=1).step == 1
    plain.fit(data[:1], epochs=1)
    assert torch.allclose(trainer.model.weight, plain.model.weight)


def test_an_epoch_of_skipped_batches_has_no_mean(bus: EventBus) -> None:
    """Nothing is made up for it: no metric, no fitness, and a scheduler that follows one does not step."""
    seen = Recorder(bus)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
    trainer = make_trainer(bus, loss=spoiling(math.nan, 0, 1), on_nan="skip", scheduler=plateau)
    result = trainer.fit(batches(2), epochs=1)
    assert (result.metrics, result.best_fitness, result.step, result.reason) == ({}, None, 0, "completed")
    assert_balanced(seen.hooks)


def test_stop_for_a_loss_that_is_not_finite(bus: EventBus, tmp_path: Path) -> None:
    """The batch is skipped, the run stops, and the checkpoint of before is kept."""
    seen = Recorder(bus)
    trainer = make_trainer(bus, save_dir=tmp_path, loss=spoiling(math.nan, 3), on_nan="stop")
    result = trainer.fit(batches(2), batches(1), epochs=3)
    val = ["on_val_start", "on_val_batch_start", "on_val_batch_end", "on_val_end"]
    assert [hook for hook in seen.hooks if hook != "on_val_image_end"] == [
        *BEGIN,
        "on_train_epoch_start", *INNER, *INNER, "on_train_epoch_end", *val, "on_fit_epoch_end", *["on_model_save"] * 2,
        "on_train_epoch_start", *INNER, *SKIPPED, "on_control", "on_train_epoch_end", "on_fit_epoch_end",
        *END,
    ]  # fmt: skip
    assert (result.reason, result.step, result.epoch) == ("stopped", 3, 1)
    assert result.stop_reason == "the loss is nan, in epoch 1, batch 1, step 3"
    assert (seen.one("on_control").requester, seen.one("on_control").accepted) == ("on_nan", True)
    assert seen.of("on_fit_epoch_end")[1].partial is True
    assert torch.load(tmp_path / "last.pt", weights_only=True)["epoch"] == 1


def test_raise_for_gradients_that_are_not_finite(bus: EventBus) -> None:
    seen = Recorder(bus)
    trainer = make_trainer(bus, on_nan="raise")
    break_gradients(trainer, 1)
    with pytest.raises(FloatingPointError, match="The gradient norm is inf, in epoch 0, batch 1, step 1"):
        trainer.fit(batches(3), epochs=1)
    assert seen.hooks == [
        *BEGIN, "on_train_epoch_start", *INNER, "on_train_batch_start", "on_after_backward", "on_train_batch_end",
        "on_train_epoch_end", "on_fit_epoch_end", "on_exception", *END,
    ]  # fmt: skip
    assert seen.one("on_train_end").reason == "failed"
    assert [event.status for event in seen.of("on_train_batch_end")] == ["ok", "skipped"]


@pytest.mark.parametrize("on_nan", ["skip", "stop", "raise"])
def test_the_last_group_of_a_loader_without_length_is_checked_too(bus: EventBus, on_nan: Any) -> None:
    seen = Recorder(bus)
    trainer = make_trainer(bus, accumulate=2, on_nan=on_nan)
    break_gradients(trainer, 2)
    if on_nan == "raise":
        with pytest.raises(FloatingPointError):
            trainer.fit(Lengthless(batches(3)), epochs=2)
    else:
        assert trainer.fit(Lengthless(batches(3)), epochs=2).reason == ("stopped" if on_nan == "stop" else "completed")
    assert trainer.step == {"skip": 3, "stop": 1, "raise": 1}[on_nan]
    assert_balanced(seen.hooks)


def test_a_flood_of_them_is_warned_of_once_per_epoch(bus: EventBus, caplog: pytest.LogCaptureFixture) -> None:
    trainer = make_trainer(bus, loss=spoiling(math.nan, *range(1, 9)), on_nan="skip")
    trainer.fit(batches(4), epochs=2)
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warned == [
        "The loss is nan, in epoch 0, batch 1, step 1: the batch is skipped.",
        "The loss is nan, in epoch 1, batch 0, step 1: the batch is skipped.",
    ]


def test_nothing_is_checked_unless_asked_for(bus: EventBus) -> None:
    """The check waits for the GPU."""
    seen = Recorder(bus)
    trainer = make_trainer(bus, loss=spoiling(math.nan, 0))
    assert trainer.fit(batches(1), epochs=1).step == 1
    assert seen.one("on_train_batch_end").status == "ok"
    assert trainer.model.weight.isnan().all()


def test_a_scaler_deals_with_gradients_itself(bus: EventBus) -> None:
    """Too large a scale is no failure of the run: the scaler skips the update and takes a smaller one."""
    seen = Recorder(bus)
    trainer = make_trainer(bus, on_nan="raise", scaler=torch.amp.GradScaler("cpu"))
    break_gradients(trainer, 1)
    assert trainer.fit(batches(3), epochs=1).step == seen.count("optimizer_step") == 2


@pytest.mark.parametrize(("option", "known"), [("on_nan", "'stop' or 'raise'"), ("on_oom", "'skip' or 'retry'")])
def test_an_unknown_policy_is_an_error_that_names_those_there_are(option: str, known: str) -> None:
    with pytest.raises(ValueError, match=f"{option}='never' is not known; it is .*{known}"):
        make_trainer(None, **{option: "never"})


# ---------------------------------------------------------------------------------------------- out of memory


@pytest.mark.parametrize("words", ["", "MPS backend out of memory (…)", "DefaultCPUAllocator: can't allocate memory"])
def test_a_batch_without_enough_memory_is_skipped(bus: EventBus, words: str) -> None:
    seen = Recorder(bus)
    trainer = make_trainer(bus, loss=running_out(1, words=words), on_oom="skip")
    result = trainer.fit(batches(3), epochs=1)
    assert seen.hooks[3:-2] == [
        "on_train_epoch_start", *INNER, *SKIPPED, *INNER, "on_train_epoch_end", "on_fit_epoch_end",
    ]  # fmt: skip
    told = seen.of("on_train_batch_end")
    assert [(event.status, event.step) for event in told] == [("ok", 1), ("skipped", 1), ("ok", 2)]
    assert told[1].metrics == {}
    assert (result.reason, result.step) == ("completed", 2)


def test_a_batch_is_tried_once_more(bus: EventBus) -> None:
    """The second pass counts as the first would have, on the same weights."""
    seen = Recorder(bus)
    trainer, plain = make_trainer(bus, loss=running_out(1), on_oom="retry"), make_trainer(None)
    result, expected = trainer.fit(batches(3), epochs=1), plain.fit(batches(3), epochs=1)
    assert seen.hooks[3:-2] == [
        "on_train_epoch_start", *INNER, *INNER, *INNER, "on_train_epoch_end", "on_fit_epoch_end",
    ]  # fmt: skip
    assert [event.status for event in seen.of("on_train_batch_end")] == ["ok", "retried", "ok"]
    assert torch.equal(trainer.model.weight, plain.model.weight)
    assert (result.metrics, result.step) == (expected.metrics, expected.step)


@pytest.mark.parametrize(("on_oom", "times"), [("raise", 1), ("retry", 2)])
def test_memory_that_does_not_suffice_ends_the_run(bus: EventBus, on_oom: Any, times: int) -> None:
    seen = Recorder(bus)
    trainer = make_trainer(bus, loss=running_out(times), on_oom=on_oom)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        trainer.fit(batches(3), epochs=1)
    assert_balanced(seen.hooks)
    assert seen.one("on_exception").type == "OutOfMemoryError"
    assert [event.status for event in seen.of("on_train_batch_end")] == ["ok", "skipped"]


def test_the_gradients_of_the_group_are_dropped(bus: EventBus) -> None:
    """Nobody knows which of them the failed pass had added to: the update is that of the batches after it."""
    data = batches(4)
    trainer = make_trainer(bus, loss=running_out(1, at=2), accumulate=4, on_oom="skip")
    assert trainer.fit(data, epochs=1).step == 1
    plain = make_trainer(None)
    plain.fit(data[3:], epochs=1)
    assert torch.allclose(trainer.model.weight, plain.model.weight)


def test_memory_is_free_before_the_second_attempt(bus: EventBus) -> None:
    """The traceback of the first one, whose frames hold the activations, is gone by then."""
    held: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    def failing(model: Any, batch: Any) -> torch.Tensor:
        alive.append(sum(reference() is not None for reference in held))
        activations = torch.ones(1000)
        held.append(weakref.ref(activations))
        if len(held) == 1:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory.")
        return loss(model, batch)

    gc.disable()
    try:
        make_trainer(bus, loss=failing, on_oom="retry").fit(batches(1), epochs=1)
    finally:
        gc.enable()
    assert alive == [0, 0]


def test_another_failure_is_not_mistaken_for_it(bus: EventBus) -> None:
    def failing(model: Any, batch: Any) -> torch.Tensor:
        raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError, match="shapes"):
        make_trainer(bus, loss=failing, on_oom="skip").fit(batches(1), epochs=1)


# -------------------------------------------------------------------------------------------- several processes


def work(rank: int, directory: str) -> None:
    """Only rank 1 has losses that are not finite: one is skipped, the next stops both."""
    torch.set_num_threads(1)
    early = make_trainer(None, on_oom="retry", run="early")
    store = distributed.FileStore(os.path.join(directory, "store"), 2)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    found: dict[str, Any] = {}
    with pytest.raises(ValueError, match="on_oom='skip' works in one process only"):
        make_trainer(None, on_oom="skip")
    with pytest.raises(ValueError, match="on_oom='retry' works in one process only"):
        early.fit(batches(1), epochs=1)
    for on_nan in ("skip", "stop", "raise"):
        bus = EventBus(run=on_nan)
        seen = Recorder(bus)
        model = torch.nn.parallel.DistributedDataParallel(linear())
        spoiled = spoiling(math.nan, *([1] if rank == 1 else []))
        trainer = make_trainer(bus, model=model, loss=spoiled, on_nan=on_nan)
        error = ""
        try:
            trainer.fit(batches(3, seed=rank), epochs=1)
        except FloatingPointError as raised:
            error = str(raised)
        assert_balanced(seen.hooks)
        found[on_nan] = {
            "hooks": seen.hooks,
            "status": [event.status for event in seen.of("on_train_batch_end")],
            "weight": model.module.weight.tolist(),
            "error": error,
            "stop": trainer.progress.stop_reason,
        }
        bus.close()
    with open(os.path.join(directory, f"{rank}.json"), "w") as file:
        json.dump(found, file)
    distributed.destroy_process_group()


def test_all_processes_decide_the_same(tmp_path: Path) -> None:
    """A loss that is not finite in one process alone is skipped, stops or fails in all of them, at the same batch."""
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=work, args=(rank, str(tmp_path))) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0, 0]
    zero, one = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert zero["skip"]["status"] == one["skip"]["status"] == ["ok", "skipped", "ok"]
    assert zero["stop"]["status"] == one["stop"]["status"] == ["ok", "skipped"]
    for on_nan in ("skip", "stop", "raise"):
        assert zero[on_nan]["hooks"] == one[on_nan]["hooks"]
        assert zero[on_nan]["weight"] == one[on_nan]["weight"]
    assert zero["stop"]["hooks"].count("on_control") == 1
    assert zero["stop"]["stop"] == one["stop"]["stop"]
    assert "The loss is not finite in another process" in zero["raise"]["error"]
    assert "The loss is nan" in one["raise"]["error"]
