"""Warm-up: rates that rise to what is planned, with every scheduler, and with rates that are set by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.optim import lr_scheduler

from tests.trainer.toys import Recorder, batches, make_trainer

if TYPE_CHECKING:
    from pathlib import Path

    from eventbus import EventBus
    from trainer import Trainer

SCHEDULERS: dict[str, Callable[[Any], Any] | None] = {
    "none": None,
    "StepLR": lambda opt: lr_scheduler.StepLR(opt, 3, 0.5),
    "Cosine": lambda opt: lr_scheduler.CosineAnnealingLR(opt, 12, eta_min=0.01),
    "LambdaLR": lambda opt: lr_scheduler.LambdaLR(opt, lambda step: 0.9**step),
    "OneCycleLR": lambda opt: lr_scheduler.OneCycleLR(opt, 0.2, total_steps=20),
    "Sequential": lambda opt: lr_scheduler.SequentialLR(
        opt, [lr_scheduler.ConstantLR(opt, 0.5, 3), lr_scheduler.ExponentialLR(opt, 0.9)], [3]
    ),
}


def rates(bus: EventBus, **options: Any) -> list[float]:
    """The rate of each update of a training."""
    with_recorder = Recorder(bus, "optimizer_step")
    make_trainer(bus, **options).fit(batches(4), epochs=3)
    with_recorder.subscription.close()
    return [event.lr[0] for event in with_recorder.events]


@pytest.mark.filterwarnings("ignore:.*epoch parameter.*:UserWarning")  # of torch's own SequentialLR
@pytest.mark.parametrize("every", ["epoch", "step"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_the_rates_rise_to_those_of_the_plan(bus: EventBus, name: str, every: Any) -> None:
    """The nth of the first five updates has n fifths of the planned rate; after them it is the plan, exactly."""
    plan = rates(bus, scheduler=SCHEDULERS[name], scheduler_every=every)
    warm = rates(bus, scheduler=SCHEDULERS[name], scheduler_every=every, warmup=5)
    assert warm[:5] == pytest.approx([rate * (n + 1) / 5 for n, rate in enumerate(plan[:5])])
    assert warm[5:] == pytest.approx(plan[5:], rel=1e-12)


def test_a_schedule_that_follows_a_metric_plans_on(bus: EventBus) -> None:
    plateau = lambda opt: lr_scheduler.ReduceLROnPlateau(opt, factor=0.5, patience=0, threshold=1e9)  # noqa: E731
    plan, warm = rates(bus, scheduler=plateau), rates(bus, scheduler=plateau, warmup=6)
    assert warm == pytest.approx([rate * min(1.0, (n + 1) / 6) for n, rate in enumerate(plan)])


def asking(trainer: Trainer, batch: int, **wanted: Any) -> None:
    """Set a rate through `control`, to be applied after this batch."""

    def ask(trainer: Any) -> None:
        if trainer.progress.global_batch == batch:
            trainer.bus.control.set_lr(wanted.get("value"), scale=wanted.get("scale"))

    trainer.add_callback("on_train_batch_end", ask)


@pytest.mark.parametrize("name", ["none", "StepLR", "LambdaLR"])
@pytest.mark.parametrize(("batch", "wanted"), [(1, {"scale": 0.5}), (8, {"scale": 0.5}), (8, {"value": 0.05})])
def test_a_rate_set_through_control_stays(bus: EventBus, name: str, batch: int, wanted: dict[str, float]) -> None:
    """Halved in the warm-up or after it, what follows is half of what it would have been."""
    usual = rates(bus, scheduler=SCHEDULERS[name], warmup=5)
    if "value" in wanted:
        wanted = {"value": usual[batch + 1] / 2}
    seen = Recorder(bus, "optimizer_step")
    trainer = make_trainer(bus, scheduler=SCHEDULERS[name], warmup=5)
    asking(trainer, batch, **wanted)
    trainer.fit(batches(4), epochs=3)
    changed = [event.lr[0] for event in seen.events]
    assert changed[: batch + 1] == usual[: batch + 1]
    assert changed[batch + 1 :] == pytest.approx([rate / 2 for rate in usual[batch + 1 :]])


def test_a_rate_set_in_the_warm_up_holds_at_once_and_rises_on(bus: EventBus) -> None:
    """It is the rate of that moment: 0.03 at three fifths leads to 0.05."""
    seen = Recorder(bus, "optimizer_step")
    trainer = make_trainer(bus, warmup=5)
    trainer.add_callback(
        "on_train_batch_start",
        lambda t: t.optimizer.param_groups[0].update(lr=0.03) if t.progress.global_batch == 2 else None,
    )
    trainer.fit(batches(4), epochs=2)
    changed = [event.lr[0] for event in seen.events]
    assert changed == pytest.approx([0.02, 0.04, 0.03, 0.04, 0.05, 0.05, 0.05, 0.05])


def test_a_group_that_is_added_in_the_warm_up_joins_it(bus: EventBus) -> None:
    """With the update after its first; its rate is the one planned for it, and the others stay where they are."""
    seen = Recorder(bus, "optimizer_step")
    trainer = make_trainer(bus, warmup=5)

    def add(trainer: Any) -> None:
        if trainer.progress.global_batch == 1:
            trainer.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))], "lr": 0.4})

    trainer.add_callback("on_fit_epoch_end", add)
    trainer.fit(batches(2), epochs=2)
    assert [event.lr for event in seen.events] == [
        pytest.approx(rates) for rates in ((0.02,), (0.04,), (0.06, 0.4), (0.08, 0.32))
    ]


def test_the_rise_is_told_as_one_change(bus: EventBus) -> None:
    """A rise in every batch is no news; a callback's own change after it is told as before."""
    seen = Recorder(bus, "on_lr_change")
    trainer = make_trainer(bus, warmup=3)
    trainer.add_callback(
        "on_train_batch_start",
        lambda t: t.optimizer.param_groups[0].update(lr=0.5) if t.progress.global_batch == 6 else None,
    )
    trainer.fit(batches(4), epochs=2)
    told = [(event.step, event.reason, event.old[0], event.new[0]) for event in seen.events]
    assert told == [(2, "schedule", pytest.approx(0.1 / 3), 0.1), (7, "callback", 0.1, 0.5)]


def test_only_updates_count(bus: EventBus) -> None:
    """Batches of a group, and updates that were skipped, raise nothing."""
    seen = Recorder(bus, "optimizer_step")
    trainer = make_trainer(bus, warmup=4, accumulate=2, on_nan="skip")
    spoil = lambda t: t.model.weight.grad.fill_(float("nan")) if t.batch_idx == 3 else None  # noqa: E731
    trainer.add_callback("on_after_backward", spoil)
    trainer.fit(batches(6), epochs=2)
    assert [event.lr[0] for event in seen.events] == pytest.approx([0.025, 0.05, 0.075, 0.1])


def test_a_rate_in_a_tensor_stays_that_tensor(bus: EventBus) -> None:
    model = torch.nn.Linear(3, 1)
    rate = torch.tensor(0.1)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate, foreach=False, capturable=False)
    trainer = make_trainer(bus, model=model, optimizer=optimizer, warmup=2)
    trainer.fit(batches(3), epochs=1)
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == pytest.approx(0.1)


@pytest.mark.parametrize("at", [1, 2, 3, 4, 5, 7])
@pytest.mark.parametrize("name", ["none", "LambdaLR", "Cosine"])
def test_a_resumed_warm_up_goes_on(bus: EventBus, tmp_path: Path, name: str, at: int) -> None:
    def made(directory: str) -> Trainer:
        return make_trainer(
            bus, scheduler=SCHEDULERS[name], scheduler_every="step", warmup=5, save_dir=tmp_path / directory
        )

    straight, first, second = made("a"), made("b"), made("b")
    first.add_callback("on_train_batch_end", lambda t: setattr(t, "stop", t.progress.global_batch == at - 1))
    seen = Recorder(bus, "optimizer_step")
    straight.fit(batches(4), epochs=3)
    expected = [event.lr for event in seen.events]
    seen.events.clear()
    first.fit(batches(4), epochs=3)
    second.fit(batches(4), epochs=3, resume="auto")
    assert [event.lr for event in seen.events] == expected
    assert torch.equal(straight.model.weight, second.model.weight)


def test_a_checkpoint_without_warm_up_is_not_warmed_up_again(bus: EventBus, tmp_path: Path) -> None:
    make_trainer(bus, save_dir=tmp_path).fit(batches(4), epochs=1)
    seen = Recorder(bus, "optimizer_step")
    make_trainer(bus, save_dir=tmp_path, warmup=4).fit(batches(4), epochs=2, resume="auto")
    assert [event.lr[0] for event in seen.events] == [0.1] * 4


def test_a_second_training_is_warm(bus: EventBus) -> None:
    trainer = make_trainer(bus, warmup=3)
    trainer.fit(batches(4), epochs=1)
    seen = Recorder(bus, "optimizer_step")
    trainer.fit(batches(4), epochs=1)
    assert [event.lr[0] for event in seen.events] == [0.1] * 4


def test_a_number_that_counts_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="warmup must be a whole number"):
        make_trainer(None, warmup=-1)
