"""Averaged weights: kept beside the trained ones, and put in their place whenever the model is evaluated."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.trainer.toys import Recorder, assert_balanced, batches, linear, make_trainer, squared_error
from trainer import Trainer

if TYPE_CHECKING:
    from pathlib import Path

    from eventbus import EventBus


def normed(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.2), nn.Linear(4, 1))


def expected_average(data: list[Any], decay: float) -> nn.Module:
    """What torch's own averaging makes of the same training."""
    model = linear()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay), use_buffers=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in data:
        optimizer.zero_grad()
        squared_error(model, batch).backward()
        optimizer.step()
        average.update_parameters(model)
    return average.module


class Watching(Trainer):
    """Keeps the weights that each kind of step computes with."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.used: dict[str, torch.Tensor] = {}

    def training_step(self, batch: Any) -> Any:
        self.used["training"] = self.model.weight.detach().clone()
        return super().training_step(batch)

    def validation_step(self, batch: Any) -> Any:
        self.used[self.progress.phase] = self.model.weight.detach().clone()
        return super().validation_step(batch)

    def prediction_step(self, batch: Any) -> Any:
        self.used["prediction"] = self.model.weight.detach().clone()
        return super().prediction_step(batch)


def test_the_average_is_that_of_torch(bus: EventBus) -> None:
    """It is readable as callbacks written for Ultralytics read it."""
    data = batches(4)
    trainer = make_trainer(bus, ema=0.7)
    trainer.fit(data, epochs=1)
    expected = expected_average(data, 0.7)
    assert torch.equal(trainer.ema.ema.weight, expected.weight)
    assert torch.equal(trainer.ema.ema.bias, expected.bias)
    assert (trainer.ema.updates, trainer.ema.decay, trainer.args.ema) == (4, 0.7, 0.7)
    assert not torch.equal(trainer.model.weight, expected.weight)


def test_buffers_are_averaged_and_counters_are_taken_over() -> None:
    trainer = make_trainer(None, model=normed(), ema=0.5)
    trainer.fit(batches(3), epochs=1)
    norm, averaged = trainer.model[1], trainer.ema.ema[1]
    assert averaged.num_batches_tracked == norm.num_batches_tracked == 3
    assert not torch.equal(averaged.running_mean, norm.running_mean)
    assert averaged.running_mean.abs().sum() > 0


def test_whatever_evaluates_uses_the_average_and_puts_the_trained_weights_back(bus: EventBus, tmp_path: Path) -> None:
    seen = Recorder(bus, "on_params_update")
    trainer = make_trainer(bus, kind=Watching, ema=0.7)
    trainer.fit(batches(3), batches(2), epochs=1, test_loader=batches(1))
    trained, average = trainer.model.weight.detach().clone(), trainer.ema.ema.weight.detach().clone()
    assert not torch.equal(trained, average)
    trainer.validate(batches(1))
    next(trainer.predict(batches(2)))  # whose reader leaves
    trainer.export("weights", tmp_path / "weights.pt")
    used = {name: weight for name, weight in trainer.used.items() if name != "training"}
    assert set(used) == {"val", "test", "standalone", "prediction"}
    assert all(torch.equal(weight, average) for weight in used.values())
    assert torch.equal(torch.load(tmp_path / "weights.pt", weights_only=True)["weight"], average)
    assert torch.equal(trainer.model.weight, trained)
    assert torch.equal(trainer.ema.ema.weight, average)
    assert [event.reason for event in seen.events] == ["averaged weights in", "averaged weights out"] * 5


def test_training_goes_on_with_the_trained_weights(bus: EventBus) -> None:
    """Averaging and validating change nothing of the training, not even while a prediction is half read."""
    plain = make_trainer(None)
    plain.fit(batches(3), batches(1), epochs=2)
    trainer = make_trainer(bus, ema=0.9)
    outputs = trainer.predict(batches(2))
    next(outputs)
    trainer.fit(batches(3), batches(1), epochs=2)
    assert torch.equal(trainer.model.weight, plain.model.weight)
    assert len(list(outputs)) == 1


def test_a_validation_that_fails_puts_the_trained_weights_back(bus: EventBus) -> None:
    plain = make_trainer(None)
    plain.fit(batches(3), epochs=1)

    def loss(model: Any, batch: Any) -> Any:
        if not model.training:
            raise ZeroDivisionError
        return squared_error(model, batch)

    seen = Recorder(bus)
    trainer = make_trainer(bus, loss=loss, ema=0.9)
    with pytest.raises(ZeroDivisionError):
        trainer.fit(batches(3), batches(1), epochs=1)
    assert torch.equal(trainer.model.weight, plain.model.weight)
    assert seen.count("on_params_update") == 2
    assert_balanced(seen.hooks)


@pytest.mark.parametrize("by", ["control", "save_model"])
def test_a_checkpoint_taken_while_the_average_is_in_has_both_in_their_places(
    bus: EventBus, tmp_path: Path, by: str
) -> None:
    trainer = make_trainer(bus, ema=0.7, save_dir=tmp_path)
    path = tmp_path / ("last.pt" if by == "control" else "own.pt")
    files: list[Any] = []

    def ask(trainer: Any) -> None:
        trainer.bus.control.save() if by == "control" else trainer.save_model(path)

    trainer.add_callback("on_val_batch_end", ask)
    trainer.add_callback("on_val_end", lambda t: files.append(torch.load(path, weights_only=True)))
    trainer.fit(batches(3), batches(2), epochs=1)
    (saved,) = files
    assert torch.equal(saved["model"]["weight"], trainer.model.weight)
    assert torch.equal(saved["ema"]["module.weight"], trainer.ema.ema.weight)


def test_the_best_model_is_the_average_that_was_best(bus: EventBus, tmp_path: Path) -> None:
    trainer = make_trainer(bus, kind=Watching, ema=0.7, save_dir=tmp_path)
    result = trainer.fit(batches(3), batches(2), epochs=3, test_loader=batches(1), final_validation=True)
    best = torch.load(tmp_path / "best.pt", weights_only=True)
    assert torch.equal(trainer.used["test"], best["ema"]["module.weight"])
    assert -result.best_fitness == result.metrics["final/loss"]
    other = make_trainer(None)
    other.load_weights(tmp_path / "best.pt")
    assert torch.equal(other.model.weight, best["ema"]["module.weight"])


def test_weights_that_are_loaded_begin_the_average_anew(bus: EventBus, tmp_path: Path) -> None:
    trainer = make_trainer(bus, kind=Watching, ema=0.7)
    trainer.fit(batches(3), epochs=1)
    trainer.load_weights(linear(5).state_dict())
    trainer.validate(batches(1))
    assert torch.equal(trainer.used["standalone"], linear(5).weight)


@pytest.mark.parametrize("at", range(1, 9))
def test_a_resumed_average_is_exact(bus: EventBus, tmp_path: Path, at: int) -> None:
    """Stopped after any batch, with accumulation, a scheduler, warm-up and validation by the average (bit for bit)."""

    def made(directory: Path) -> Trainer:
        return make_trainer(
            bus, model=normed(), ema=0.8, warmup=4, accumulate=2, seed=3, save_dir=directory,
            scheduler=plan,
        )  # fmt: skip

    def plan(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

    straight, first, second = made(tmp_path / "a"), made(tmp_path / "b"), made(tmp_path / "b")
    first.add_callback("on_train_batch_end", lambda t: setattr(t, "stop", t.progress.global_batch == at - 1))
    straight.fit(batches(3), batches(1), epochs=3)
    first.fit(batches(3), batches(1), epochs=3)
    second.fit(batches(3), batches(1), epochs=3, resume="auto")
    assert straight.metrics == second.metrics
    for one, other in [(straight.model, second.model), (straight.ema.ema, second.ema.ema)]:
        states = one.state_dict(), other.state_dict()
        assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert straight.ema.updates == second.ema.updates == straight.step


def test_an_average_that_a_checkpoint_lacks_begins_with_it(bus: EventBus, tmp_path: Path) -> None:
    make_trainer(bus, save_dir=tmp_path).fit(batches(2), epochs=1)
    trainer = make_trainer(bus, save_dir=tmp_path, ema=0.9)
    trainer.fit(batches(2), epochs=2, resume="auto")
    assert trainer.ema.updates == 2


@pytest.mark.parametrize("decay", [0, 1, 1.5, "0.9", True])
def test_a_decay_that_averages_nothing_is_an_error(decay: Any) -> None:
    with pytest.raises(ValueError, match="ema must be a number between 0 and 1"):
        make_trainer(None, ema=decay)


def test_without_the_option_ema_is_the_users_own(bus: EventBus, tmp_path: Path) -> None:
    trainer = make_trainer(bus, save_dir=tmp_path)
    assert trainer.ema is None
    trainer.ema = object()
    assert trainer.fit(batches(1), batches(1), epochs=1).reason == "completed"


def test_skipped_updates_are_not_averaged(bus: EventBus) -> None:
    trainer = make_trainer(bus, ema=0.5, scaler=torch.amp.GradScaler("cpu"))
    spoil = lambda t: t.model.weight.grad.mul_(float("inf") if t.batch_idx == 1 else 1.0)  # noqa: E731
    trainer.add_callback("on_after_backward", spoil)
    trainer.fit(batches(3), epochs=1)
    assert trainer.ema.updates == trainer.step == 2
