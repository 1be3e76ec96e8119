"""Callbacks: those written for Ultralytics, those of ours, their order, and what a mistake in one says."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch

from eventbus import EVENTS, Event, EventBus, EventBusError, SubscriptionError, TrainBatchEnd, UnknownHookError
from tests.trainer.toys import Lengthless, Recorder, batches, linear, make_trainer, squared_error
from trainer import Callback, Trainer

if TYPE_CHECKING:
    from pathlib import Path

SUBSCRIBER_HOOKS = {"on_subscriber_error", "on_subscriber_disabled", "on_events_dropped"}


def test_a_callback_has_one_method_per_hook() -> None:
    ours = {hook for hook, kind in EVENTS.items() if kind.__module__ == "eventbus.events"}
    assert {name for name in vars(Callback) if name in ours} == ours


def test_callbacks_written_for_ultralytics_run_unchanged(bus: EventBus, tmp_path: Path) -> None:
    """A logger and a stopper as people write them: one argument, attributes of the trainer, trainer.stop = True."""
    rows: list[dict[str, Any]] = []

    def on_pretrain_routine_start(trainer: Any) -> None:
        rows.append({"project": trainer.args.name, "epochs": trainer.args.epochs, "dir": str(trainer.save_dir)})

    def on_train_epoch_end(trainer: Any) -> None:
        rows.append({**trainer.label_loss_items(trainer.tloss, prefix="train"), **trainer.lr, "step": trainer.epoch})

    def on_fit_epoch_end(trainer: Any) -> None:
        rows.append({**trainer.metrics, "best": trainer.best_fitness, "fitness": trainer.fitness})
        if trainer.epoch + 1 >= 2:
            trainer.stop = True

    def on_model_save(trainer: Any) -> None:
        assert trainer.last.exists()
        assert trainer.best.parent == trainer.wdir

    def on_train_end(trainer: Any) -> None:
        rows.append({"reason": trainer.reason, "best": trainer.best.name, "epoch": trainer.epoch})

    trainer = make_trainer(bus, save_dir=tmp_path / "{run}")
    for callback in (on_pretrain_routine_start, on_train_epoch_end, on_fit_epoch_end, on_model_save, on_train_end):
        trainer.add_callback(callback.__name__, callback)
    trainer.fit(batches(2), batches(1), epochs=5)
    assert rows[0] == {"project": "test", "epochs": 5, "dir": str(tmp_path / "test")}
    assert set(rows[1]) == {"train/loss", "lr/pg0", "step"}
    assert rows[2]["fitness"] == rows[2]["best"] == -rows[2]["val/loss"]
    assert rows[-1] == {"reason": "stopped", "best": "best.pt", "epoch": 1}
    assert len(rows) == 6


def test_the_live_trainer_has_the_attributes_that_callbacks_read(bus: EventBus, tmp_path: Path) -> None:
    found: dict[str, Any] = {}
    names = (
        "epoch", "epochs", "batch_idx", "step", "loss", "losses", "tloss", "metrics", "fitness", "best_fitness",
        "model", "ema", "optimizer", "scheduler", "device", "save_dir", "last", "best", "stop", "stop_training",
        "rank", "world_size", "args", "callbacks", "valid_loader", "logger", "reason",
    )  # fmt: skip
    trainer = make_trainer(bus, save_dir=tmp_path)
    trainer.add_callback("on_train_batch_end", lambda t: found.update({name: getattr(t, name) for name in names}))
    val = batches(1)
    trainer.fit(batches(2), val, epochs=1)
    assert (found["epoch"], found["epochs"], found["batch_idx"], found["step"]) == (0, 1, 1, 2)
    assert found["loss"] == found["losses"]["loss"]
    assert found["valid_loader"] is val
    assert found["callbacks"]["on_train_batch_end"][0].__name__ == "<lambda>"
    assert (found["rank"], found["world_size"], found["stop"], found["reason"]) == (0, 1, False, "")


def test_callbacks_written_for_ultralytics_validators_run_unchanged(bus: EventBus) -> None:
    """They read `validator.metrics`, `validator.batch` and `validator.results`, in a training and outside of one."""
    seen: list[Any] = []

    def on_val_batch_end(validator: Any) -> None:
        images, _ = validator.batch
        seen.append((len(images), float(validator.results)))

    def on_val_end(validator: Any) -> None:
        seen.append(validator.metrics["val/loss"])
        validator.metrics["val/f1"] = 0.5

    trainer = make_trainer(bus)
    trainer.add_callback("on_val_batch_end", on_val_batch_end)
    trainer.add_callback("on_val_end", on_val_end)
    trainer.add_callback("on_fit_epoch_end", lambda t: seen.append(sorted(t.metrics)))
    val = batches(1, size=2)
    loss = trainer.fit(batches(1), val, epochs=1).metrics["val/loss"]
    assert seen == [(2, pytest.approx(loss)), loss, ["train/loss", "val/f1", "val/loss"]]
    seen.clear()
    assert trainer.validate(val) == {"loss": loss}
    assert seen == [(2, pytest.approx(loss)), loss]
    assert (trainer.batch, trainer.results) == (None, None)


def test_what_a_hook_adds_to_a_validation_between_batches_may_be_monitored(bus: EventBus, tmp_path: Path) -> None:
    """It decides about best.pt, and stays out of the metrics of the epoch, which are of its end."""
    seen = Recorder(bus, "on_fit_epoch_end", "on_model_save")
    trainer = make_trainer(bus, save_dir=tmp_path, monitor="val/f1")
    trainer.add_callback("on_val_end", lambda t: t.metrics.update({"val/f1": 1.0 / (1 + t.step)}))
    trainer.fit(batches(4), batches(1), max_steps=3, validate_every=1)
    best = [event for event in seen.of("on_model_save") if event.is_best]
    assert [(event.step, event.fitness) for event in best] == [(1, 0.5)]
    assert seen.one("on_fit_epoch_end").metrics["val/f1"] == 0.25


def test_saving_from_a_callback(bus: EventBus, tmp_path: Path) -> None:
    seen = Recorder(bus, "on_model_save", "on_checkpoint_failed")
    trainer = make_trainer(bus)
    trainer.add_callback("on_train_epoch_end", lambda t: t.save_model(tmp_path / f"{t.epoch}.pt"))
    trainer.fit(batches(1), epochs=2)
    assert [event.path for event in seen.events] == [str(tmp_path / "0.pt"), str(tmp_path / "1.pt")]
    (tmp_path / "file").touch()
    assert trainer.save_model(tmp_path / "file" / "x.pt") is False


def test_def_gets_the_trainer_and_async_def_the_event(bus: EventBus) -> None:
    got: list[Any] = []
    arrived = threading.Event()

    class Both(Callback):
        def on_train_batch_end(self, trainer: Trainer) -> None:
            got.append((type(trainer), trainer.step, threading.get_ident()))

        async def on_train_epoch_end(self, event: Event) -> None:
            got.append((event.hook, event.metrics["train/loss"], threading.get_ident()))
            arrived.set()

    trainer = make_trainer(bus, callbacks=[Both()])
    trainer.fit(batches(1), epochs=1)
    assert arrived.wait(10)
    assert got[0] == (Trainer, 1, threading.get_ident())
    assert got[1][0] == "on_train_epoch_end"
    assert got[1][2] != threading.get_ident()


def test_callbacks_functions_and_bus_hooks_share_one_order(bus: EventBus) -> None:
    """Higher priority first, then the one registered first, however it was registered."""
    order: list[str] = []

    class Early(Callback):
        priority = 10

        def on_train_end(self, trainer: Any) -> None:
            order.append("callback 10")

    bus.subscribe(lambda event: order.append("bus 0, first"), "on_train_end")
    trainer = make_trainer(bus, callbacks=[Early()])
    trainer.add_callback("on_train_end", lambda t: order.append("function 0"))
    trainer.add_callback("on_train_end", lambda t: order.append("function 20"), priority=20)
    bus.subscribe(lambda event: order.append("bus 0, last"), "on_train_end")
    trainer.fit(batches(1), epochs=1)
    assert order == ["function 20", "callback 10", "bus 0, first", "function 0", "bus 0, last"]


def test_the_same_function_is_called_once(bus: EventBus) -> None:
    calls: list[int] = []

    def count(trainer: Any) -> None:
        calls.append(1)

    trainer = make_trainer(bus)
    assert trainer.add_callback("on_train_end", count) is trainer.add_callback("on_train_end", count)
    trainer.fit(batches(1), epochs=1)
    assert calls == [1]


def test_disabling_by_name(bus: EventBus) -> None:
    """A function by its name, a callback by its class; an unknown name says which there are."""
    calls: list[str] = []

    class Noisy(Callback):
        def on_train_epoch_end(self, trainer: Any) -> None:
            calls.append("class")

    def noisy(trainer: Any) -> None:
        calls.append("function")

    trainer = make_trainer(bus, callbacks=[Noisy()])
    trainer.add_callback("on_train_epoch_end", noisy)
    trainer.add_callback("on_train_epoch_start", lambda t: (t.disable_callback("noisy"), t.disable_callback("Noisy")))
    trainer.fit(batches(1), epochs=1)
    assert calls == []
    with pytest.raises(ValueError, match=r"no callback 'nosy'; there are: .*noisy"):
        trainer.disable_callback("nosy")


def test_a_callback_added_during_the_run_is_called_from_the_next_event_on(bus: EventBus) -> None:
    calls: list[int] = []
    trainer = make_trainer(bus)

    def add(t: Trainer) -> None:
        t.add_callback("on_train_batch_end", note)

    def note(t: Trainer) -> None:
        calls.append(t.batch_idx)

    trainer.add_callback("on_after_backward", lambda t: add(t) if t.batch_idx == 1 else None)
    trainer.fit(batches(3), epochs=1)
    assert calls == [1, 2]


def test_two_trainers_on_one_bus_keep_their_callbacks_apart(bus: EventBus) -> None:
    """A callback of a trainer that has ended does not hear another one, even with the same run."""
    calls: list[str] = []
    first, second = make_trainer(bus), make_trainer(bus)
    third = make_trainer(bus, run="other")
    for name, trainer in (("first", first), ("second", second), ("third", third)):
        trainer.add_callback("on_train_end", lambda t, name=name: calls.append(name))
        trainer.fit(batches(1), epochs=1)
    assert calls == ["first", "second", "third"]


def test_mistakes_are_found_where_they_are_made(bus: EventBus) -> None:
    class Typo(Callback):
        def on_train_epoch_ends(self, trainer: Any) -> None: ...

    with pytest.raises(UnknownHookError, match=r"on_train_epoch_end'"):
        make_trainer(bus, callbacks=[Typo()])
    trainer = make_trainer(bus)
    with pytest.raises(UnknownHookError, match="on_train_batch_end"):
        trainer.add_callback("on_train_batch_ends", print)
    with pytest.raises(SubscriptionError, match=r"cannot be called with one argument.*fn\(trainer\)"):
        trainer.add_callback("on_train_batch_end", lambda trainer, batch: None)


def test_a_hook_contributes_a_metric_before_others_see_it(bus: EventBus) -> None:
    """What a hook adds to trainer.metrics is part of on_fit_epoch_end, and may be what is monitored."""
    seen = Recorder(bus, "on_fit_epoch_end")
    trainer = make_trainer(bus, monitor="val/f1")
    trainer.add_callback("on_val_end", lambda t: t.metrics.update({"val/f1": 0.25}))
    trainer.fit(batches(1), batches(1), epochs=1)
    event = seen.one("on_fit_epoch_end")
    assert (event.metrics["val/f1"], event.fitness, event.monitor) == (0.25, 0.25, "val/f1")


def test_a_trainer_makes_a_bus_of_its_own_and_opens_it_again(tmp_path: Path) -> None:
    """Without bus=, fit closes the bus it made; a later fit or validate is heard all the same."""
    model = linear()
    trainer = Trainer(model, squared_error, lambda p: torch.optim.SGD(p, 0.1), save_dir=None, run="own")
    heard: list[str] = []
    trainer.add_callback("on_val_end", lambda t: heard.append("inline"))

    async def later(event: Event) -> None:
        heard.append("async")

    trainer.add_callback("on_val_end", later)
    trainer.fit(batches(1), batches(1), epochs=1)
    assert sorted(heard) == ["async", "inline"]
    assert "closed" in repr(trainer.bus)
    trainer.validate(batches(1))
    assert sorted(heard) == ["async", "async", "inline", "inline"]
    trainer.fit(batches(1), batches(1), epochs=1)
    assert len(heard) == 6
    assert trainer.bus.run == trainer.run == "own"


def test_a_users_own_event_works_everywhere(bus: EventBus) -> None:
    class GradSpikeSeen(Event):
        norm: float

    heard: list[Any] = []

    class Watch(Callback):
        def on_grad_spike_seen(self, trainer: Trainer) -> None:
            heard.append(trainer.step)

    trainer = make_trainer(bus, callbacks=[Watch()])
    trainer.add_callback("optimizer_step", lambda t: t.bus.publish(GradSpikeSeen(norm=1.0)))
    trainer.add_callback(TrainBatchEnd, lambda t: heard.append("batch"))
    trainer.fit(batches(1), epochs=1)
    assert heard == [1, "batch"]


def test_every_hook_that_a_trainer_can_fire_is_fired_by_some_path(bus: EventBus, tmp_path: Path) -> None:
    """No hook of the vocabulary is only declared."""
    seen = Recorder(bus)
    trainer = make_trainer(
        bus, save_dir=tmp_path, log_every=1, scheduler=lambda opt: torch.optim.lr_scheduler.StepLR(opt, 1, 0.5)
    )
    trainer.fit(batches(1), batches(1), epochs=1)
    trainer.fit(batches(1), epochs=2, resume="auto")
    trainer.load_weights(trainer.last)
    list(trainer.predict(batches(1)))
    trainer.export("weights", tmp_path / "weights.pt")
    trainer.add_callback("on_train_start", lambda t: setattr(t, "stop", True))
    trainer.fit(batches(1), epochs=1)
    (tmp_path / "file").touch()
    trainer.save_model(tmp_path / "file" / "x.pt")
    with pytest.raises(ValueError, match="gave no batch"):
        trainer.validate([])
    trainer.disable_callback("<lambda>")
    with pytest.raises(ValueError, match="gave no batch"):
        trainer.fit([], epochs=1)
    ours = {hook for hook, kind in EVENTS.items() if kind.__module__ == "eventbus.events"}
    assert ours - set(seen.hooks) - SUBSCRIBER_HOOKS == set()


def test_a_training_on_a_closed_bus_is_refused(bus: EventBus) -> None:
    """It would go on without its callbacks, the one that ends it among them; once started again, it runs."""
    calls: list[int] = []
    trainer = make_trainer(bus)
    trainer.add_callback("on_train_batch_end", lambda t: calls.append(t.step))
    bus.close()
    with pytest.raises(EventBusError, match="This bus is closed"):
        trainer.fit(batches(2), epochs=1)
    with bus:
        assert trainer.fit(batches(2), epochs=1).reason == "completed"
    assert calls == [1, 2]


def test_fit_inside_of_fit_is_refused(bus: EventBus) -> None:
    errors: list[str] = []

    def nested(trainer: Any) -> None:
        try:
            trainer.fit(batches(1), epochs=1)
        except RuntimeError as error:
            errors.append(str(error))

    trainer = make_trainer(bus)
    trainer.add_callback("on_train_start", nested)
    trainer.fit(batches(1), epochs=1)
    assert errors == ["This trainer is training already; in a callback, train with another one."]


def test_validating_and_predicting_inside_of_a_training(bus: EventBus) -> None:
    """A callback may do both; the run's counters and its phase are left alone."""
    trainer = make_trainer(bus)
    results: list[Any] = []
    trainer.add_callback("on_train_epoch_end", lambda t: results.append(t.validate(batches(2))))
    trainer.add_callback("on_train_epoch_end", lambda t: results.append(len(list(t.predict(batches(2))))))
    seen = Recorder(bus)
    assert trainer.fit(batches(2), epochs=1).reason == "completed"
    assert (set(results[0]), results[1]) == ({"loss"}, 2)
    assert (seen.one("on_val_end").phase, seen.one("on_val_end").epoch) == ("standalone", None)
    assert set(seen.one("on_fit_epoch_end").metrics) == {"train/loss"}


def test_a_trainer_keeps_no_loader_after_the_training(bus: EventBus) -> None:
    """A loader with workers, collected as part of a cycle, would hold the collector for seconds."""
    loader = Lengthless(batches(2))
    reference = weakref.ref(loader)
    trainer = make_trainer(bus)
    during: list[Any] = []
    trainer.add_callback("on_train_start", lambda t: during.append((t.train_loader is reference(), t.valid_loader)))
    trainer.fit(loader, epochs=1)
    assert during == [(True, None)]
    assert (trainer.train_loader, trainer.valid_loader, trainer.test_loader) == (None, None, None)
    del loader
    assert reference() is None
