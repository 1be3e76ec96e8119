"""The whole sequence of a training, written out, so that a change of it shows."""

from __future__ import annotations

import re
from itertools import groupby
from typing import TYPE_CHECKING

import pytest
import torch

from eventbus import EVENTS
from tests.trainer.toys import BEGIN, END, INNER, Recorder, assert_balanced, batches, make_trainer
from tests.trainer.ways import WAYS, claims, run
from trainer import loop

if TYPE_CHECKING:
    from pathlib import Path

    from eventbus import EventBus

GOLDEN = [
    "on_pretrain_routine_start",
    "on_pretrain_routine_end",
    "on_train_start",
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_after_backward",
    "on_before_optimizer_step",
    "optimizer_step",
    "on_before_zero_grad",
    "on_train_batch_end",
    "on_train_batch_start",
    "on_after_backward",
    "on_before_optimizer_step",
    "optimizer_step",
    "on_before_zero_grad",
    "on_train_batch_end",
    "on_log",
    "on_train_batch_start",
    "on_after_backward",
    "on_before_optimizer_step",
    "optimizer_step",
    "on_before_zero_grad",
    "on_train_batch_end",
    "on_lr_change",
    "on_train_epoch_end",
    "on_val_start",
    "on_val_batch_start",
    "on_val_image_end",
    "on_val_image_end",
    "on_val_batch_end",
    "on_val_batch_start",
    "on_val_image_end",
    "on_val_image_end",
    "on_val_batch_end",
    "on_val_end",
    "on_fit_epoch_end",
    "on_model_save",
    "on_model_save",
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_after_backward",
    "on_before_optimizer_step",
    "optimizer_step",
    "on_before_zero_grad",
    "on_train_batch_end",
    "on_log",
    "on_train_batch_start",
    "on_after_backward",
    "on_before_optimizer_step",
    "optimizer_step",
    "on_before_zero_grad",
    "on_train_batch_end",
    "on_train_batch_start",
    "on_after_backward",
    "on_before_optimizer_step",
    "optimizer_step",
    "on_before_zero_grad",
    "on_train_batch_end",
    "on_log",
    "on_lr_change",
    "on_train_epoch_end",
    "on_val_start",
    "on_val_batch_start",
    "on_val_image_end",
    "on_val_image_end",
    "on_val_batch_end",
    "on_val_batch_start",
    "on_val_image_end",
    "on_val_image_end",
    "on_val_batch_end",
    "on_val_end",
    "on_fit_epoch_end",
    "on_model_save",
    "on_model_save",
    "on_train_end",
    "teardown",
]


def test_two_epochs_of_three_batches_with_validation(bus: EventBus, tmp_path: Path) -> None:
    """The golden trace, with a schedule, averages every two steps, and checkpoints."""
    seen = Recorder(bus)
    trainer = make_trainer(
        bus, save_dir=tmp_path, log_every=2, scheduler=lambda opt: torch.optim.lr_scheduler.StepLR(opt, 1, 0.5)
    )
    trainer.fit(batches(3), batches(2, size=2), epochs=2)
    assert seen.hooks == GOLDEN
    assert_balanced(seen.hooks)


VAL = ["on_val_start", "on_val_batch_start", "on_val_batch_end", "on_val_end"]
#: The first epoch of every training in `tests.trainer.ways`.
FIRST = [
    *BEGIN, "on_train_epoch_start", *INNER, *INNER, "on_train_epoch_end", *VAL, "on_fit_epoch_end",
    "on_model_save", "on_model_save", "on_train_epoch_start", *INNER,
]  # fmt: skip
#: The test, with the best weights.
TEST = ["on_params_update", *VAL, "on_params_update"]
#: A batch of which nothing came.
LOST = ["on_train_batch_start", "on_train_batch_end"]
#: An epoch that was cut short.
CUT = ["on_train_epoch_end", "on_fit_epoch_end"]
STOPPED = [*INNER, "on_control", *CUT, "on_model_save", *TEST, *END]
FAILED = [*LOST, *CUT, "on_exception", *END]
#: What follows the first batch of the second epoch, when the run ends with the second one.
GOLDEN_ENDS = {
    "all epochs": [
        *INNER, "on_train_epoch_end", *VAL, "on_fit_epoch_end", "on_model_save", "on_model_save", *TEST, *END,
    ],
    "max_steps": ["on_train_epoch_end", *VAL, "on_fit_epoch_end", "on_model_save", "on_model_save", *TEST, *END],
    "trainer.stop": STOPPED,
    "control.stop": STOPPED,
    "EarlyStopping": [
        *INNER, "on_train_epoch_end", *VAL, "on_fit_epoch_end", "on_model_save", "on_model_save", "on_control",
        *TEST, *END,
    ],
    "one of signals=": [*INNER, "on_control", *CUT, "on_model_save", *END],
    'on_nan="stop"': [*LOST, "on_control", *CUT, *TEST, *END],
    'on_nan="raise"': FAILED,
    "memory does not suffice": FAILED,
    "exception in the model": FAILED,
    "exception in the loss": FAILED,
    "exception in the loader": [*CUT, "on_exception", *END],
    "exception in validation": [
        *INNER, "on_train_epoch_end", *VAL, "on_fit_epoch_end", "on_exception", *END,
    ],
    "a hook that raises": FAILED,
    "Ctrl-C": FAILED,
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_end(way: str, tmp_path: Path) -> None:
    """The golden trace of each, and what the table in `trainer.loop` says of it, read from there."""
    seen = run(way, tmp_path)
    assert seen.hooks == FIRST + GOLDEN_ENDS[way]
    assert_balanced(seen.hooks)
    assert claims(seen) == table()[way]
    assert torch.load(tmp_path / "last.pt", weights_only=True)["epoch"] >= 1


def table() -> dict[str, list[str]]:
    """The rows of the table in the docstring of the loop."""
    lines = [line for line in (loop.__doc__ or "").splitlines() if line.count(" | ") == 6]
    rows = [[cell.strip() for cell in line.split(" | ")] for line in lines]
    assert rows[0] == ["way to end", "last batch", "epoch", "validated", "last.pt", "best tested", "then"]
    return {row[0]: row[1:] for row in rows[1:]}


def test_the_table_of_ways_to_end_is_complete() -> None:
    assert list(table()) == list(WAYS) == list(GOLDEN_ENDS)


def test_H12_the_loop_shows_every_hook(bus: EventBus, tmp_path: Path) -> None:
    """Each hook there is has its place in the docstring; those of an epoch are in the order in which they come."""
    text = loop.__doc__ or ""
    ours = [hook for hook, kind in EVENTS.items() if kind.__module__ == "eventbus.events"]  # other tests define some
    assert [hook for hook in ours if not re.search(rf"\b{hook}\b", text)] == []
    shown = re.findall(r"^ +(?:on_\w+|optimizer_step|teardown)\b", text, re.MULTILINE)
    epoch = [hook.strip() for hook in shown]
    epoch = epoch[epoch.index("on_train_epoch_start") : epoch.index("on_exception")]
    seen = Recorder(bus)
    trainer = make_trainer(
        bus, save_dir=tmp_path, log_every=1, ema=0.5, scheduler=lambda opt: torch.optim.lr_scheduler.StepLR(opt, 1, 0.5)
    )
    trainer.fit(batches(1), batches(1, size=1), epochs=1)
    came = [hook for hook, _ in groupby(seen.hooks) if hook in epoch]  # two files, one line
    left = iter(epoch)
    assert all(hook in left for hook in came), came


def test_counters_of_every_batch(bus: EventBus) -> None:
    """`epoch` and `batch` are 0-based, `global_batch` goes on, `step` counts the update from optimizer_step on."""
    seen = Recorder(bus)
    make_trainer(bus).fit(batches(3), epochs=2)
    counted = [(e.epoch, e.batch, e.global_batch, e.step) for e in seen.of("on_train_batch_start")]
    assert counted == [(0, 0, 0, 0), (0, 1, 1, 1), (0, 2, 2, 2), (1, 0, 3, 3), (1, 1, 4, 4), (1, 2, 5, 5)]
    assert [e.step for e in seen.of("on_before_optimizer_step")] == [0, 1, 2, 3, 4, 5]
    assert [e.step for e in seen.of("optimizer_step")] == [1, 2, 3, 4, 5, 6]
    assert [e.step for e in seen.of("on_train_batch_end")] == [1, 2, 3, 4, 5, 6]


def test_the_events_around_the_loop_say_what_was_planned(bus: EventBus) -> None:
    """Set-up, start and end tell the plan, the size of the model, and the result."""
    seen = Recorder(bus)
    result = make_trainer(bus, seed=7).fit(batches(3), batches(1), epochs=2)
    config = seen.one("on_pretrain_routine_start").config
    assert (config["seed"], config["epochs"], config["optimizer"], config["model"]) == (7, 2, "SGD", "Linear")
    ready = seen.one("on_pretrain_routine_end")
    assert (ready.batches, ready.parameters, ready.device, ready.world_size) == (3, 4, "cpu", 1)
    assert (seen.one("on_train_start").epochs, seen.one("on_train_start").start_epoch) == (2, 0)
    end = seen.one("on_train_end")
    assert (end.epoch, end.step, end.reason) == (1, 6, "completed")
    assert end.metrics == result.metrics
    assert set(result.metrics) == {"train/loss", "val/loss"}
    assert {(e.run, e.rank, e.attempt) for e in seen.events} == {("test", 0, 0)}


def test_gradients_and_parameters_are_where_the_events_say(bus: EventBus) -> None:
    """Gradients exist from on_after_backward to on_before_zero_grad; parameters change at optimizer_step."""
    trainer = make_trainer(bus)
    found: list[tuple[str, bool, bool]] = []
    start = trainer.model.weight.detach().clone()

    def look(event: object) -> None:
        weight = trainer.model.weight
        found.append((event.hook, weight.grad is not None, not torch.equal(weight, start)))

    bus.subscribe(look, "on_train_batch_*", "on_after_backward", "on_before_*", "optimizer_step")
    trainer.fit(batches(1), epochs=1)
    assert found == [
        ("on_train_batch_start", False, False),
        ("on_after_backward", True, False),
        ("on_before_optimizer_step", True, False),
        ("optimizer_step", True, True),
        ("on_before_zero_grad", True, True),
        ("on_train_batch_end", False, True),
    ]


def test_sample_events_are_only_made_when_somebody_listens(bus: EventBus) -> None:
    """on_val_image_end costs nothing unless it is heard."""
    trainer = make_trainer(bus)
    published: list[str] = []
    original = trainer.bus.publish
    trainer.bus.publish = lambda event: (published.append(event.hook), original(event))[1]
    trainer.fit(batches(1), batches(1), epochs=1)
    assert "on_val_batch_end" in published
    assert "on_val_image_end" not in published


def test_sample_events_carry_the_numbers_of_their_sample(bus: EventBus) -> None:
    """A validation step's output with one number per sample is told sample by sample."""

    def loss(model: object, batch: object) -> object:
        x, y = batch
        errors = (model(x) - y).abs().reshape(-1)
        return {"loss": errors.mean(), **({} if model.training else {"error": errors.detach()})}

    seen = Recorder(bus, "on_val_*")
    trainer = make_trainer(bus, loss=loss)
    trainer.validate(batches(1, size=3))
    samples = [event.metrics["error"] for event in seen.of("on_val_image_end")]
    assert len(samples) == 3
    assert sum(samples) / 3 == pytest.approx(seen.one("on_val_end").metrics["loss"])
    assert set(seen.one("on_val_batch_end").metrics) == {"loss"}
