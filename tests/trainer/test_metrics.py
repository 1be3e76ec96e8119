"""What a step may return, how batches become the numbers of an epoch, and which of them is the fitness."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch

from tests.trainer.toys import Lengthless, Recorder, batches, linear, make_trainer, squared_error
from trainer import Trainer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from eventbus import EventBus


def test_epoch_means_are_weighted_by_samples(bus: EventBus) -> None:
    seen = Recorder(bus)
    uneven = [*batches(1, size=3), *batches(1, size=1, seed=1)]
    make_trainer(bus).fit(uneven, uneven, epochs=1)
    ends = seen.of("on_train_batch_end")
    assert [event.batch_size for event in ends] == [3, 1]
    first, second = (event.metrics["loss"] for event in ends)
    assert seen.one("on_train_epoch_end").metrics == {"train/loss": pytest.approx((3 * first + second) / 4)}
    first, second = (event.metrics["loss"] for event in seen.of("on_val_batch_end"))
    assert seen.one("on_val_end").metrics == {"loss": pytest.approx((3 * first + second) / 4)}
    assert seen.one("on_fit_epoch_end").metrics["val/loss"] == seen.one("on_val_end").metrics["loss"]


@pytest.mark.parametrize(
    "batch",
    [
        (torch.zeros(5, 3), torch.zeros(5, 1)),
        {"label": "text", "x": torch.zeros(5, 3)},
        [["a", "b"], {"deep": (torch.zeros(5, 2),)}],
    ],
)
def test_the_size_of_a_batch_is_that_of_its_first_tensor(bus: EventBus, batch: Any) -> None:
    seen = Recorder(bus, "on_train_batch_end")
    trainer = make_trainer(bus, loss=lambda model, _: model(torch.zeros(1, 3)).sum())
    trainer.fit([batch], epochs=1)
    assert seen.one("on_train_batch_end").batch_size == 5


def test_a_mapping_brings_further_metrics(bus: EventBus) -> None:
    """Names are bare in batch events and qualified in epoch events; those with a / stay."""

    def loss(model: Any, batch: Any) -> dict[str, Any]:
        return {"loss": squared_error(model, batch), "accuracy": torch.tensor(0.5), "count": 3, "gan/d": 2.0}

    seen = Recorder(bus)
    make_trainer(bus, loss=loss, log_every=1).fit(batches(1), batches(1), epochs=1)
    assert set(seen.one("on_train_batch_end").metrics) == {"loss", "accuracy", "count", "gan/d"}
    assert set(seen.one("on_train_epoch_end").metrics) == {"train/loss", "train/accuracy", "train/count", "gan/d"}
    log = seen.one("on_log").values
    assert (log["train/accuracy"], log["gan/d"], log["lr/pg0"]) == (0.5, 2.0, 0.1)
    assert {"val/accuracy", "train/accuracy"} <= set(seen.one("on_fit_epoch_end").metrics)


@pytest.mark.parametrize(
    ("result", "error", "message"),
    [
        (lambda loss: loss.repeat(4), ValueError, r"one number; it has shape \(4,\).*\.mean\(\)"),
        (lambda loss: 0.5, TypeError, "must return a scalar tensor.*returned a float"),
        (lambda loss: {"accuracy": 1.0}, TypeError, r"mapping of \['accuracy'\]"),
        (lambda loss: {"loss": loss, "map": torch.zeros(2, 2)}, TypeError, r"metric 'map'.*shape \(2, 2\)"),
        (lambda loss: {"loss": loss, "name": "x"}, TypeError, "metric 'name' cannot be told: A str"),
    ],
)
def test_a_loss_that_cannot_be_used_says_why(bus: EventBus, result: Any, error: type[Exception], message: str) -> None:
    trainer = make_trainer(bus, loss=lambda model, batch: result(squared_error(model, batch)))
    with pytest.raises(error, match=message):
        trainer.fit(batches(1), epochs=1)


def test_a_skipped_batch_has_no_metrics_and_no_update(bus: EventBus) -> None:
    class Choosy(Trainer):
        def training_step(self, batch: Any) -> torch.Tensor | Mapping[str, Any] | None:
            return None if self.batch_idx == 1 else super().training_step(batch)

    seen = Recorder(bus)
    assert make_trainer(bus, kind=Choosy).fit(batches(3), epochs=1).step == 2
    assert [(event.status, event.step) for event in seen.of("on_train_batch_end")] == [
        ("ok", 1), ("skipped", 1), ("ok", 2),
    ]  # fmt: skip
    assert seen.of("on_train_batch_end")[1].metrics == {}


def test_an_update_that_the_scaler_skips_does_not_count(bus: EventBus) -> None:
    def loss(model: Any, batch: Any) -> torch.Tensor:
        return squared_error(model, batch) * (math.inf if trainer.batch_idx == 1 else 1.0)

    seen = Recorder(bus)
    trainer = make_trainer(bus, loss=loss, scaler=torch.amp.GradScaler("cpu"))
    assert trainer.fit(batches(3), epochs=1).step == 2
    assert [event.status for event in seen.of("on_train_batch_end")] == ["ok", "skipped", "ok"]
    assert seen.count("optimizer_step") == 2
    assert seen.count("on_before_zero_grad") == 3


def test_metrics_that_cannot_be_averaged(bus: EventBus) -> None:
    """validation_end sees what every step returned, and its numbers are told and may be the fitness."""

    class WithWorst(Trainer):
        def validation_end(self, outputs: Sequence[Any]) -> Mapping[str, Any]:
            return {"worst": max(output.item() for output in outputs), "fitness": 0.75}

    seen = Recorder(bus)
    make_trainer(bus, kind=WithWorst).fit(batches(1), batches(3), epochs=1)
    worst = max(event.metrics["loss"] for event in seen.of("on_val_batch_end"))
    assert seen.one("on_val_end").metrics["worst"] == pytest.approx(worst)
    assert seen.one("on_fit_epoch_end").fitness == 0.75


@pytest.mark.parametrize(
    ("monitor", "mode", "sign", "metric"),
    [
        (None, "auto", -1, "val/loss"),
        ("val_loss", "auto", -1, "val/loss"),
        ("loss", "auto", -1, "val/loss"),
        ("train/loss", "min", -1, "train/loss"),
        ("val_accuracy", "auto", 1, "val/accuracy"),
        ("accuracy", "min", -1, "val/accuracy"),
    ],
)
def test_what_fitness_is(bus: EventBus, monitor: str, mode: Any, sign: int, metric: str) -> None:
    def loss(model: Any, batch: Any) -> dict[str, Any]:
        return {"loss": squared_error(model, batch), "accuracy": 0.5}

    seen = Recorder(bus, "on_fit_epoch_end")
    make_trainer(bus, loss=loss, monitor=monitor, mode=mode).fit(batches(1), batches(1), epochs=1)
    event = seen.one("on_fit_epoch_end")
    assert event.fitness == sign * event.metrics[metric]


def test_without_validation_the_training_loss_is_the_fitness(bus: EventBus) -> None:
    seen = Recorder(bus, "on_fit_epoch_end")
    result = make_trainer(bus).fit(batches(1), epochs=2)
    assert [event.fitness for event in seen.events] == [-event.metrics["train/loss"] for event in seen.events]
    assert result.best_fitness == max(event.fitness for event in seen.events)


def test_an_epoch_that_was_not_validated_is_not_compared_with_those_that_were(bus: EventBus) -> None:
    seen = Recorder(bus)
    make_trainer(bus, monitor="loss").fit(batches(1), batches(1), epochs=5, validate_every=2)
    assert [event.epoch for event in seen.of("on_val_end")] == [1, 3, 4]
    judged = [(e.epoch, e.fitness is not None, "val/loss" in e.metrics) for e in seen.of("on_fit_epoch_end")]
    assert judged[1:] == [(1, True, True), (2, False, False), (3, True, True), (4, True, True)]


def test_nan_is_never_best(bus: EventBus) -> None:
    values = iter([math.nan, 1.0, math.nan, 0.5])
    trainer = make_trainer(bus, monitor="val/score", mode="max")
    trainer.add_callback("on_val_end", lambda t: t.metrics.update({"val/score": next(values)}))
    seen = Recorder(bus, "on_fit_epoch_end")
    trainer.fit(batches(1), batches(1), epochs=4)
    assert [event.best_fitness for event in seen.events] == [None, 1.0, 1.0, 1.0]
    assert math.isnan(seen.events[2].fitness)


def test_a_monitor_that_no_metric_has_names_the_nearest(bus: EventBus) -> None:
    with pytest.raises(ValueError, match=r"monitor='val_los' is no metric.*mean 'val/loss'.*train/loss, val/loss"):
        make_trainer(bus, monitor="val_los").fit(batches(1), batches(1), epochs=1)
    with pytest.raises(ValueError, match="needs a val_loader"):
        make_trainer(bus, monitor="val/loss").fit(batches(1), epochs=1)
    with pytest.raises(ValueError, match="mode='lowest' is not known"):
        make_trainer(bus, mode="lowest")


def test_a_loader_that_gives_nothing_says_so(bus: EventBus) -> None:
    with pytest.raises(ValueError, match=r"train_loader gave no batch in epoch 0"):
        make_trainer(bus).fit([], epochs=1)
    with pytest.raises(ValueError, match=r"no batch in epoch 1\. If it is a generator, it can be read only once"):
        make_trainer(bus).fit((batch for batch in batches(2)), epochs=2)
    with pytest.raises(ValueError, match=r"validate on \(phase 'fit'\) gave no batch"):
        make_trainer(bus).fit(batches(1), [], epochs=1)


def test_a_training_needs_an_end(bus: EventBus) -> None:
    with pytest.raises(ValueError, match="epochs= or max_steps="):
        make_trainer(bus).fit(batches(1))
    with pytest.raises(ValueError, match="epochs must be a whole number of at least 1, not 0"):
        make_trainer(bus).fit(batches(1), epochs=0)


def test_the_loader_of_a_test_is_evaluated_once(bus: EventBus) -> None:
    seen = Recorder(bus)
    result = make_trainer(bus).fit(batches(1), batches(1), epochs=2, test_loader=batches(2))
    assert [event.phase for event in seen.of("on_val_end")] == ["fit", "fit", "test"]
    assert seen.count("on_fit_epoch_end") == 2
    assert "test/loss" in result.metrics
    assert seen.one("on_train_end").metrics["test/loss"] == result.metrics["test/loss"]


def test_events_hold_detached_numbers(bus: EventBus) -> None:
    """No tensor with a graph leaves the trainer."""
    published: list[Any] = []
    original = bus.publish
    bus.publish = lambda event: (published.append(event), original(event))[1]
    make_trainer(bus, log_every=1).fit(batches(1), batches(1), epochs=1)
    values = [value for event in published for value in getattr(event, "metrics", {}).values()]
    assert values
    assert not any(isinstance(value, torch.Tensor) and value.requires_grad for value in values)


def test_clipping_bounds_the_update_and_tells_the_norm_before(bus: EventBus) -> None:
    seen = Recorder(bus)
    norms: list[float] = []
    trainer = make_trainer(bus, clip_norm=0.5)

    def norm(t: Trainer) -> None:
        norms.append(torch.nn.utils.get_total_norm([p.grad for p in t.model.parameters()]).item())

    trainer.add_callback("on_before_optimizer_step", norm)
    trainer.fit(batches(1), epochs=1)
    assert norms == [pytest.approx(0.5, rel=1e-4)]
    assert seen.one("optimizer_step").grad_norm > 0.5


def test_a_norm_is_only_computed_when_somebody_wants_it(bus: EventBus) -> None:
    Recorder(bus, "on_train_batch_end")
    trainer = make_trainer(bus)
    wanted: list[bool] = []
    original = trainer.finish_gradients

    def spy(batches: int, *, wants_norm: bool) -> Any:
        wanted.append(wants_norm)
        return original(batches, wants_norm=wants_norm)

    trainer.finish_gradients = spy
    trainer.fit(batches(1), epochs=1)
    Recorder(bus, "optimizer_step")
    trainer.fit(batches(1), epochs=1)
    assert wanted == [False, True]


@pytest.mark.parametrize("loader", [list, Lengthless])
def test_accumulating_is_the_same_as_larger_batches(bus: EventBus, loader: Any) -> None:
    """With 4 batches an update, and a last group of 2: the same weights as with the groups as batches."""
    small = batches(6)
    large = [tuple(torch.cat(parts) for parts in zip(*small[:4], strict=True)),
             tuple(torch.cat(parts) for parts in zip(*small[4:], strict=True))]  # fmt: skip
    one, other = make_trainer(bus, model=linear(), accumulate=4), make_trainer(bus, model=linear())
    seen = Recorder(bus)
    result = one.fit(loader(small), epochs=2)
    other.fit(large, epochs=2)
    assert result.step == 4
    torch.testing.assert_close(one.model.weight, other.model.weight)
    ends = [event for event in seen.of("on_train_batch_end") if event.batch_size == 4][:12]
    steps = [event.step for event in ends]
    last = 2 if loader is list else 1
    assert steps == [0, 0, 0, 1, 1, last, 2, 2, 2, 3, 3, last + 2]


def test_a_stop_throws_the_gradients_of_an_open_group_away(bus: EventBus) -> None:
    seen = Recorder(bus)
    trainer = make_trainer(bus, accumulate=4)
    trainer.add_callback("on_train_batch_end", lambda t: setattr(t, "stop", t.batch_idx == 4))
    result = trainer.fit(batches(8), epochs=1)
    assert (result.step, seen.count("optimizer_step"), seen.count("on_train_batch_end")) == (1, 1, 5)
    assert all(p.grad is None for p in trainer.model.parameters())


def test_a_schedule_by_epoch_is_told_once_per_epoch(bus: EventBus) -> None:
    seen = Recorder(bus)
    scheduler = lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1)  # noqa: E731
    make_trainer(bus, scheduler=scheduler).fit(batches(2), epochs=2)
    told = [(event.reason, event.old[0], event.new[0]) for event in seen.of("on_lr_change")]
    assert told == [("schedule", 0.1, pytest.approx(0.01)), ("schedule", pytest.approx(0.01), pytest.approx(0.001))]
    assert [event.lr[0] for event in seen.of("on_train_batch_end")] == pytest.approx([0.1, 0.1, 0.01, 0.01])


def test_a_schedule_by_step_is_told_once_per_epoch_too(bus: EventBus) -> None:
    seen = Recorder(bus)
    trainer = make_trainer(
        bus, scheduler=lambda opt: torch.optim.lr_scheduler.StepLR(opt, 1, 0.1), scheduler_every="step", accumulate=2
    )
    trainer.fit(batches(4), epochs=1)
    assert seen.one("on_lr_change").new == (pytest.approx(0.001),)
    assert [event.lr[0] for event in seen.of("optimizer_step")] == pytest.approx([0.1, 0.01])


def test_a_schedule_that_follows_a_metric_steps_after_validation(bus: EventBus) -> None:
    seen = Recorder(bus)
    scheduler = lambda opt: torch.optim.lr_scheduler.ReduceLROnPlateau(opt, patience=0, factor=0.5)  # noqa: E731
    trainer = make_trainer(bus, scheduler=scheduler, monitor="val/score", mode="max")
    trainer.add_callback("on_val_end", lambda t: t.metrics.update({"val/score": 1.0}))
    trainer.fit(batches(1), batches(1), epochs=2)
    assert seen.one("on_lr_change").new == (0.05,)
    hooks = seen.hooks
    change = hooks.index("on_lr_change")
    assert (hooks[change - 1], hooks[change + 1]) == ("on_val_end", "on_fit_epoch_end")


def test_a_rate_that_a_callback_sets_is_told(bus: EventBus) -> None:
    seen = Recorder(bus)
    trainer = make_trainer(bus)

    def warm_up(t: Trainer) -> None:
        t.optimizer.param_groups[0]["lr"] = 0.02

    trainer.add_callback("on_train_batch_start", warm_up)
    trainer.fit(batches(3), epochs=1)
    event = seen.one("on_lr_change")
    assert (event.reason, event.old, event.new) == ("callback", (0.1,), (0.02,))


def test_validation_restores_the_mode_of_each_module(bus: EventBus) -> None:
    """A layer that was frozen in evaluation mode stays so; no gradients are built while validating."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1))
    seen: list[tuple[bool, bool, bool]] = []
    trainer = make_trainer(bus, model=model)
    trainer.add_callback("on_train_epoch_start", lambda t: model[1].eval())
    trainer.add_callback(
        "on_val_batch_end", lambda t: seen.append((model.training, model[1].training, torch.is_grad_enabled()))
    )
    after: list[tuple[bool, bool]] = []
    trainer.add_callback("on_fit_epoch_end", lambda t: after.append((model.training, model[1].training)))
    trainer.fit(batches(1), batches(1), epochs=1)
    assert (seen, after) == ([(False, False, False)], [(True, False)])


def test_the_seed_makes_two_trainings_equal(bus: EventBus) -> None:
    losses = []
    for _ in range(2):
        model = torch.nn.Sequential(torch.nn.Dropout(0.5), linear())
        losses.append(make_trainer(bus, model=model, seed=3).fit(batches(4), epochs=1).metrics["train/loss"])
    assert losses[0] == losses[1]


def test_nothing_is_read_from_the_device_between_the_batches(bus: EventBus, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: a number is read once per metric and epoch, never for a batch, a norm or an average."""
    monkeypatch.setattr("eventbus.fitness.is_on_host", lambda value: False)
    reads: list[str] = []
    for name in ("item", "__float__", "__bool__", "__int__", "tolist", "cpu"):
        original = getattr(torch.Tensor, name)
        monkeypatch.setattr(
            torch.Tensor, name, lambda self, *args, _f=original, _n=name: (reads.append(_n), _f(self, *args))[1]
        )
    marks: list[tuple[str, int]] = []
    trainer = make_trainer(bus, clip_norm=1.0, log_every=1)
    for hook in ("on_train_epoch_start", "on_train_batch_end", "on_train_epoch_end", "on_val_batch_end", "on_val_end"):
        trainer.add_callback(hook, lambda t, hook=hook: marks.append((hook, len(reads))))
    bus.publish = lambda event, publish=bus.publish: publish(msgspec.structs.replace(event, **_without_tensors(event)))
    trainer.fit(batches(3), batches(2), epochs=1)
    assert marks == [
        ("on_train_epoch_start", 0), *[("on_train_batch_end", 0)] * 3, ("on_train_epoch_end", 1),
        *[("on_val_batch_end", 1)] * 2, ("on_val_end", 2),
    ]  # fmt: skip


def _without_tensors(event: Any) -> dict[str, Any]:
    """What the bus itself reads when somebody listens is not the trainer's doing, and tested with the bus."""
    return {name: {} for name in ("metrics", "values") if hasattr(event, name)}
