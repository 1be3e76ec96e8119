"""The validations besides those of the epochs: tried before the first one, and of the best model after the last."""

from __future__ import annotations

import json
import os
import random
from typing import TYPE_CHECKING, Any

import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from eventbus import EventBus
from sinks import JSONLSink
from tests.trainer.toys import BEGIN, END, INNER, Recorder, assert_balanced, batches, linear, make_trainer
from trainer import Callback, ModelCheckpoint
from trainer.devices import unwrapped

if TYPE_CHECKING:
    from pathlib import Path

    from tests.trainer.pair import Pair

VAL = ["on_val_start", "on_val_batch_start", "on_val_batch_end", "on_val_end"]
QUIET = ("!on_val_image_end",)


class Worsening(Callback):
    """Makes the model worse after the first epoch, and keeps the weights that the evaluations see."""

    def __init__(self) -> None:
        self.first: torch.Tensor | None = None
        self.seen: list[tuple[str, torch.Tensor]] = []

    def on_fit_epoch_end(self, trainer: Any) -> None:
        if self.first is None:
            self.first = unwrapped(trainer.model).weight.detach().clone()

    def on_train_epoch_end(self, trainer: Any) -> None:
        if self.first is not None:
            with torch.no_grad():
                unwrapped(trainer.model).weight += 100.0

    def on_val_batch_end(self, trainer: Any) -> None:
        self.seen.append((trainer.progress.phase, unwrapped(trainer.model).weight.detach().clone()))


@pytest.fixture
def seen(bus: EventBus) -> Recorder:
    return Recorder(bus, "*", *QUIET)


# ------------------------------------------------------------------------------------------------ the best model


def test_H1_the_best_model_is_evaluated_last_and_no_epoch_ends_twice(
    bus: EventBus, seen: Recorder, tmp_path: Path
) -> None:
    """Its weights are put in and taken out, which is told both times; the metrics are in the end and the result."""
    watch = Worsening()
    trainer = make_trainer(bus, save_dir=tmp_path, callbacks=[watch])
    result = trainer.fit(batches(1), batches(1), epochs=2, test_loader=batches(2), final_validation=True)
    assert seen.hooks[-16:] == [
        "on_fit_epoch_end", "on_model_save", "on_params_update", *VAL, *VAL[:3], *VAL[1:], "on_params_update", *END,
    ]  # fmt: skip
    assert seen.count("on_fit_epoch_end") == 2
    assert [event.phase for event in seen.of("on_val_end")] == ["fit", "fit", "final", "test"]
    assert [event.reason for event in seen.of("on_params_update")] == ["best weights in", "best weights out"]
    evaluated = [weight for phase, weight in watch.seen if phase in ("final", "test")]
    assert len(evaluated) == 3
    assert all(torch.equal(weight, watch.first) for weight in evaluated)
    assert not torch.equal(trainer.model.weight, watch.first)
    assert result.metrics["final/loss"] == seen.of("on_val_end")[0].metrics["loss"]
    assert result.metrics == seen.one("on_train_end").metrics
    assert set(result.metrics) == {"train/loss", "val/loss", "final/loss", "test/loss"}
    assert result.metrics["val/loss"] > result.metrics["final/loss"]


def test_without_checkpoints_the_last_weights_are_evaluated(bus: EventBus, seen: Recorder) -> None:
    result = make_trainer(bus).fit(batches(1), batches(1), epochs=1, final_validation=True)
    assert seen.count("on_params_update") == 0
    assert result.metrics["final/loss"] == result.metrics["val/loss"]


@pytest.mark.parametrize("damage", ["torn", "other model"])
def test_a_best_model_that_cannot_be_read_leaves_the_last_one(
    bus: EventBus, seen: Recorder, tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    def spoil(trainer: Any) -> None:
        if damage == "torn":
            trainer.best.write_bytes(b"PK no")
        else:
            torch.save({"model": nn.Linear(7, 1).state_dict()}, trainer.best)

    trainer = make_trainer(bus, save_dir=tmp_path)
    trainer.add_callback("on_model_save", spoil)
    result = trainer.fit(batches(1), epochs=1, test_loader=batches(1))
    assert "best.pt could not be read; the last weights are evaluated" in caplog.text
    assert seen.count("on_params_update") == 0
    assert "test/loss" in result.metrics


def test_a_best_model_of_another_run_is_not_taken(bus: EventBus, seen: Recorder, tmp_path: Path) -> None:
    """What lies at its path from before is not this run's, as long as no epoch of this one was the best."""
    torch.save({"model": linear(9).state_dict()}, tmp_path / "best.pt")
    trainer = make_trainer(bus, save_dir=tmp_path)
    trainer.add_callback("on_train_epoch_start", lambda t: setattr(t, "stop", True))
    trainer.fit(batches(1), epochs=1, test_loader=batches(1))
    assert seen.count("on_params_update") == 0
    assert [event.phase for event in seen.of("on_val_end")] == ["test"]


def test_a_checkpoint_callback_with_a_metric_of_its_own_says_what_is_best(bus: EventBus, tmp_path: Path) -> None:
    watch = Worsening()
    best = ModelCheckpoint(tmp_path, monitor="train/loss", mode="max")
    trainer = make_trainer(bus, callbacks=[watch, best])
    trainer.fit(batches(1), batches(1), epochs=2, test_loader=batches(1))
    saved = torch.load(tmp_path / "best.pt", weights_only=True)
    (evaluated,) = (weight for phase, weight in watch.seen if phase == "test")
    assert torch.equal(evaluated, saved["model"]["weight"])


def test_a_failing_test_puts_the_last_weights_back(bus: EventBus, seen: Recorder, tmp_path: Path) -> None:
    def fail(trainer: Any) -> None:
        if trainer.progress.phase == "test":
            raise ZeroDivisionError

    watch = Worsening()
    trainer = make_trainer(bus, save_dir=tmp_path, callbacks=[watch])
    trainer.add_callback("on_val_batch_end", fail)
    bus.subscribe(lambda event: fail(trainer), "on_val_batch_end", on_error="raise")
    with pytest.raises(ZeroDivisionError):
        trainer.fit(batches(1), batches(1), epochs=2, test_loader=batches(1))
    assert not torch.equal(trainer.model.weight, watch.first)
    assert seen.one("on_exception").phase == "test"
    assert seen.count("on_params_update") == 2
    assert_balanced(seen.hooks)


def test_what_needs_a_val_loader_says_so(bus: EventBus) -> None:
    for option in ({"final_validation": True}, {"sanity_batches": 1}):
        with pytest.raises(ValueError, match=f"{next(iter(option))} needs a val_loader"):
            make_trainer(bus).fit(batches(1), epochs=1, **option)
    with pytest.raises(ValueError, match="sanity_batches must be a whole number"):
        make_trainer(bus).fit(batches(1), batches(1), epochs=1, sanity_batches=-1)


# ------------------------------------------------------------------------------------------------- tried before


def test_H18_a_trial_validation_leaves_nothing(bus: EventBus, seen: Recorder, tmp_path: Path) -> None:
    """Its events have phase "sanity"; no metric, no fitness, no file and no callback knows of it afterwards."""
    plain = make_trainer(None).fit(batches(1), batches(3), epochs=1)
    result = make_trainer(bus).fit(batches(1), batches(3), epochs=1, sanity_batches=2)
    assert seen.hooks == [
        *BEGIN, *VAL[:3], *VAL[1:], "on_train_epoch_start", *INNER, "on_train_epoch_end",
        *VAL[:3], *VAL[1:3], *VAL[1:], "on_fit_epoch_end", *END,
    ]  # fmt: skip
    assert [(e.phase, e.epoch) for e in seen.of("on_val_end")] == [("sanity", None), ("fit", 0)]
    assert (result.metrics, result.best_fitness) == (plain.metrics, plain.best_fitness)


class Noise(torch.utils.data.Dataset[Any]):
    """Draws random numbers for every sample."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        x = 0.1 * (index + torch.randn(3) + random.random() + numpy.random.rand())
        return x.float(), x.sum(dim=0, keepdim=True).float()


@pytest.mark.parametrize("options", [{}, {"generator": None}, {"num_workers": 1, "persistent_workers": True}])
def test_a_trial_validation_changes_no_random_number(bus: EventBus, options: dict[str, Any]) -> None:
    """Shuffling, augmentation and dropout of the training are those of a run without it."""

    def trained(sanity_batches: int) -> Any:
        given = {name: torch.Generator() if name == "generator" else value for name, value in options.items()}
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        train = DataLoader(Noise(), batch_size=2, shuffle=True, generator=given.get("generator"))
        val = DataLoader(Noise(), batch_size=2, shuffle=True, **given)
        trainer = make_trainer(bus, model=model, seed=5, clip_norm=1.0)
        trainer.fit(train, val, epochs=2, sanity_batches=sanity_batches)
        return model[0].weight.detach(), trainer.metrics

    random.seed(1)
    (without, its_metrics), (with_trial, metrics) = trained(0), trained(1)
    assert torch.equal(without, with_trial)
    assert its_metrics == metrics


def test_a_trial_validation_that_fails_ends_the_run_before_it_trains(bus: EventBus, seen: Recorder) -> None:
    """That is what it is for."""

    def loss(model: Any, batch: Any) -> Any:
        return (model(batch[0]) - batch[1]).pow(2).mean() if model.training else model(batch)

    with pytest.raises(TypeError):
        make_trainer(bus, loss=loss).fit(batches(1), batches(1), epochs=1, sanity_batches=1)
    assert seen.hooks == [*BEGIN, *VAL, "on_exception", *END]
    assert seen.one("on_exception").phase == "sanity"


def test_a_stop_in_a_trial_validation_is_obeyed(bus: EventBus, seen: Recorder) -> None:
    trainer = make_trainer(bus)
    trainer.add_callback("on_val_batch_end", lambda t: setattr(t, "stop", True))
    assert trainer.fit(batches(1), batches(5), epochs=1, sanity_batches=3).reason == "stopped"
    assert seen.hooks == [*BEGIN, *VAL[:3], "on_control", VAL[3], *END]


def test_a_run_that_is_complete_tries_nothing(bus: EventBus, seen: Recorder, tmp_path: Path) -> None:
    make_trainer(bus, save_dir=tmp_path).fit(batches(1), batches(1), epochs=1)
    before = seen.count("on_val_start")
    make_trainer(bus, save_dir=tmp_path).fit(batches(1), batches(1), epochs=1, sanity_batches=1, resume="auto")
    assert seen.count("on_val_start") == before


def test_sinks_leave_a_trial_validation_out_unless_asked(bus: EventBus, tmp_path: Path) -> None:
    """An exception in it is told to all."""
    bus.attach(JSONLSink(tmp_path / "default.jsonl", flush_interval=0.0))
    bus.attach(JSONLSink(tmp_path / "all.jsonl", flush_interval=0.0), when=None)
    trainer = make_trainer(bus)
    trainer.fit(batches(1), batches(1), epochs=1, sanity_batches=1)
    bus.subscribe(lambda event: 1 / 0, "on_val_start", on_error="raise")
    with pytest.raises(ZeroDivisionError):
        trainer.fit(batches(1), batches(1), epochs=1, sanity_batches=1)
    assert bus.close().ok
    told = {
        path.stem: [(line["hook"], line.get("phase")) for line in map(json.loads, path.read_text().splitlines())]
        for path in tmp_path.glob("*.jsonl")
    }
    assert ("on_val_end", "sanity") in told["all"]
    assert ("on_val_end", "sanity") not in told["default"]
    assert ("on_val_end", "fit") in told["default"]
    assert ("on_exception", "sanity") in told["default"]


# --------------------------------------------------------------------------------------------- several processes


def work(rank: int, directory: str) -> dict[str, Any]:
    """Only rank 0 has the files; both evaluate the best weights, or where these cannot be read the averaged ones."""
    found: dict[str, Any] = {}
    for damaged in (False, True):
        watch = Worsening()
        model = nn.parallel.DistributedDataParallel(linear())
        average = {"ema": 0.5} if damaged else {}
        directory_here = os.path.join(directory, f"{rank}")
        trainer = make_trainer(None, model=model, save_dir=directory_here, callbacks=[watch], **average)
        if damaged:
            trainer.add_callback("on_model_save", lambda t: t.best.write_bytes(b""))
        result = trainer.fit(
            batches(1, seed=rank), batches(1, seed=rank), epochs=2, test_loader=batches(1), sanity_batches=1
        )
        evaluated = [weight.tolist() for phase, weight in watch.seen if phase == "test"]
        found[f"{damaged}"] = {"seen": evaluated, "first": watch.first.tolist(), "metrics": dict(result.metrics)}
        found[f"{damaged}"]["last"] = (trainer.ema.ema if damaged else model.module).weight.tolist()
    return found


def test_every_process_evaluates_the_best_weights(pair: Pair, tmp_path: Path) -> None:
    zero, one = pair.run(work, tmp_path, str(tmp_path))
    assert zero["False"]["seen"] == one["False"]["seen"] == [zero["False"]["first"]]
    assert zero["True"]["seen"] == one["True"]["seen"] == [zero["True"]["last"]]
    assert zero["False"]["last"] != zero["False"]["first"]
    assert zero["False"]["metrics"] == one["False"]["metrics"]
