"""Failures that users of other trainers reported, by the ids of the list of cases, where no other file has them."""

from __future__ import annotations

import csv
import json
import math
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eventbus import EventBus
from sinks import CSVSink, JSONLSink, read_jsonl
from tests.trainer.toys import Recorder, batches, linear, make_trainer, squared_error
from trainer import Callback, EarlyStopping, ProgressBar, Trainer

if TYPE_CHECKING:
    from pathlib import Path


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["on_train_start", "on_train_end"])), max_size=8))
def test_H2_every_callback_of_a_hook_is_kept(added: list[tuple[int, str]]) -> None:
    """Whatever is added to a hook, in any sequence: each function is called once, in the order it was first added."""
    calls: list[tuple[int, str]] = []
    functions = {
        hook: [lambda t, key=(number, hook): calls.append(key) for number in range(4)]
        for hook in ("on_train_start", "on_train_end")
    }
    with EventBus() as bus:
        trainer = make_trainer(bus)
        for number, hook in added:
            trainer.add_callback(hook, functions[hook][number])
        trainer.fit(batches(1), epochs=1)
    wanted = list(dict.fromkeys(added))
    assert calls == [one for hook in ("on_train_start", "on_train_end") for one in wanted if one[1] == hook]


def test_H4_what_is_attached_can_be_seen_and_replaced(bus: EventBus) -> None:
    """The bus describes a callback by name, hook and priority; it is taken out by that name, and another put in."""
    calls: list[str] = []

    class Logger(Callback):
        priority = 7

        def on_train_end(self, trainer: Trainer) -> None:
            calls.append("stock")

    trainer = make_trainer(bus, callbacks=[Logger()])
    (told,) = [one for one in bus.describe() if "Logger" in one.name]
    assert (told.hooks, told.priority, told.kind) == (("on_train_end",), 7, "inline")
    trainer.disable_callback("Logger")
    assert trainer.callbacks["on_train_end"] == ()
    trainer.add_callback("on_train_end", lambda t: calls.append("mine"), priority=7)
    trainer.fit(batches(1), epochs=1)
    assert calls == ["mine"]


def test_H5_a_callback_object_given_twice_is_called_once(bus: EventBus) -> None:
    """Two objects of one class are two, each with a state of its own in a checkpoint."""
    calls: list[str] = []

    class Named(Callback):
        def __init__(self, name: str) -> None:
            self.name = name

        def on_train_end(self, trainer: Trainer) -> None:
            calls.append(self.name)

    first = Named("first")
    make_trainer(bus, callbacks=[first, Named("second"), first]).fit(batches(1), epochs=1)
    assert calls == ["first", "second"]


def test_H9_there_is_a_place_between_the_callbacks_that_come_with_the_trainer(bus: EventBus) -> None:
    """The bar shows what was added before it, at any priority above its own."""
    order: list[str] = []

    class Stopper(EarlyStopping):
        def on_fit_epoch_end(self, trainer: Trainer) -> None:
            order.append("stopping")
            super().on_fit_epoch_end(trainer)

    class Bar(ProgressBar):
        def on_fit_epoch_end(self, trainer: Trainer) -> None:
            order.append("bar")

    trainer = make_trainer(bus, callbacks=[Bar(), Stopper()])
    trainer.add_callback("on_fit_epoch_end", lambda t: order.append("between"), priority=-50)
    trainer.fit(batches(1), epochs=1)
    assert order == ["stopping", "between", "bar"]


@pytest.mark.parametrize("on_error", ["isolate", "raise"])
def test_H15_nobody_swallows_the_exception_and_it_is_told_once(bus: EventBus, on_error: Any) -> None:
    """Neither a hook that handles it nor one that fails over it."""
    seen = Recorder(bus, "on_exception", "on_train_end")
    handled: list[str] = []

    def fails(model: Any, batch: Any) -> torch.Tensor:
        raise LookupError("the first")

    def fails_too(trainer: Any) -> None:
        raise RuntimeError("the second")

    trainer = make_trainer(bus, loss=fails, on_callback_error=on_error)
    trainer.add_callback("on_exception", lambda t: handled.append(t.reason) or True)
    trainer.add_callback("on_exception", fails_too)
    with pytest.raises(LookupError, match="the first"):
        trainer.fit(batches(2), epochs=2)
    assert handled == ["failed"]
    assert [event.hook for event in seen.events] == ["on_exception", "on_train_end"]
    assert seen.one("on_exception").message == "the first"


def test_H19_a_callback_added_after_a_training_is_called_in_the_next_one(bus: EventBus) -> None:
    """A trainer may train again, so adding it then is no mistake."""
    calls: list[int] = []
    trainer = make_trainer(bus)
    trainer.fit(batches(1), epochs=1)
    trainer.add_callback("on_train_end", lambda t: calls.append(t.step))
    assert calls == []
    trainer.fit(batches(2), epochs=1)
    assert calls == [2]


def test_H20_J2_every_batch_says_where_it_is_in_batches_and_in_updates(bus: EventBus) -> None:
    """With four batches to an update: the loss, the rates and both counters are fields of the event."""
    seen = Recorder(bus, "on_train_batch_end", "optimizer_step", "on_log", "on_fit_epoch_end")
    make_trainer(bus, accumulate=4, log_every=2).fit(batches(10), epochs=2)
    ends = seen.of("on_train_batch_end")
    assert [event.global_batch for event in ends] == list(range(20))
    assert [event.batch for event in ends] == [*range(10)] * 2
    assert [event.epoch for event in ends] == [0] * 10 + [1] * 10
    # three updates to an epoch: after four batches, after eight, and at its end
    assert [event.step for event in ends] == [0, 0, 0, 1, 1, 1, 1, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4, 5, 5, 6]
    assert [event.global_batch for event in seen.of("optimizer_step")] == [3, 7, 9, 13, 17, 19]
    assert [event.step for event in seen.of("on_log")] == [2, 4, 6]
    assert [event.step for event in seen.of("on_fit_epoch_end")] == [3, 6]
    assert all(event.metrics["loss"] >= 0 and event.lr == (0.1,) and event.batch_size == 4 for event in ends)


def test_J5_a_resumed_run_adds_to_its_files(tmp_path: Path) -> None:
    """Nothing that was written before is lost or written again, and there is one header."""

    def train(epochs: int) -> None:
        with EventBus(run="resumed") as bus:
            bus.attach(JSONLSink(tmp_path / "events.jsonl"))
            bus.attach(CSVSink(tmp_path / "epochs.csv"))
            make_trainer(bus, save_dir=tmp_path).fit(batches(2), batches(1), epochs=epochs, resume="auto")

    train(2)
    former = (tmp_path / "events.jsonl").read_bytes()
    train(4)
    assert (tmp_path / "events.jsonl").read_bytes().startswith(former)
    ends = [event for event in read_jsonl(tmp_path / "events.jsonl") if event.hook == "on_fit_epoch_end"]
    assert [(event.epoch, event.step, event.attempt) for event in ends] == [(0, 2, 0), (1, 4, 0), (2, 6, 1), (3, 8, 1)]
    with (tmp_path / "epochs.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["epoch"] for row in rows] == ["0", "1", "2", "3"]
    assert all(row["val/loss"] for row in rows)


def test_J7_J8_an_epoch_of_nan_says_nan_in_strict_json(tmp_path: Path) -> None:
    """It does not show the last good number; a metric that an epoch lacks is missing there."""

    def sometimes_nan(model: Any, batch: Any) -> torch.Tensor:
        return squared_error(model, batch) * (math.nan if trainer.epoch == 1 and model.training else 1.0)

    with EventBus() as bus:
        bus.attach(JSONLSink(tmp_path / "events.jsonl"))
        trainer = make_trainer(bus, loss=sometimes_nan, optimizer=torch.optim.SGD(linear().parameters(), lr=0.0))
        seen = Recorder(bus, "on_fit_epoch_end")
        result = trainer.fit(batches(2), batches(1), epochs=3, validate_every=3)
    losses = [event.metrics["train/loss"] for event in seen.events]
    assert [math.isnan(loss) for loss in losses] == [False, True, False]
    assert ["val/loss" in event.metrics for event in seen.events] == [False, False, True]
    assert not math.isnan(result.best_fitness or math.nan)

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    lines = (tmp_path / "events.jsonl").read_text(encoding="utf-8").splitlines()
    told = [json.loads(line, parse_constant=refuse) for line in lines]
    assert [one["metrics"]["train/loss"] for one in told if one["hook"] == "on_fit_epoch_end"][1] == "NaN"


def test_J11_J13_the_streams_and_the_loop_of_the_process_are_left_alone(bus: EventBus) -> None:
    """No stream is redirected while a bar is drawn, and no library changes how event loops nest."""
    streams = (sys.stdout, sys.stderr)
    found: list[bool] = []
    trainer = make_trainer(bus, callbacks=[ProgressBar()])
    trainer.add_callback("on_train_batch_end", lambda t: found.append((sys.stdout, sys.stderr) == streams))
    trainer.fit(batches(2), epochs=1)
    assert found == [True, True]
    assert "nest_asyncio" not in sys.modules
