"""What a trainer does with the requests that only it can fulfil."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
import torch

from eventbus import EventBus
from tests.trainer.toys import Recorder, batches, make_trainer

if TYPE_CHECKING:
    from pathlib import Path

    from trainer import Trainer


def asking(trainer: Trainer, ask: Any, *, at: int = 0) -> None:
    """Ask once, from an inline hook in batch `at`."""
    trainer.add_callback("on_after_backward", lambda t: ask(t.bus.control) if t.progress.global_batch == at else None)


def test_save_writes_a_checkpoint_between_two_batches(bus: EventBus, tmp_path: Path) -> None:
    seen = Recorder(bus)
    trainer = make_trainer(bus, save_dir=tmp_path)
    asking(trainer, lambda control: control.save("now"), at=1)
    trainer.fit(batches(4), epochs=1)
    hooks = seen.hooks
    control = hooks.index("on_control")
    assert hooks[control - 2 : control] == ["on_train_batch_end", "on_model_save"]
    assert (seen.one("on_control").accepted, seen.one("on_control").detail) == (True, str(tmp_path / "last.pt"))
    assert seen.of("on_model_save")[0].step == 2
    assert not seen.of("on_model_save")[0].is_best


@pytest.mark.parametrize("directory", [None, "file/runs"])
def test_save_that_cannot_be_done_is_answered_with_why(bus: EventBus, tmp_path: Path, directory: str | None) -> None:
    (tmp_path / "file").touch()
    seen = Recorder(bus)
    trainer = make_trainer(bus, save_dir=None if directory is None else tmp_path / directory)
    asking(trainer, lambda control: control.save())
    assert trainer.fit(batches(2), epochs=1).reason == "completed"
    answer = seen.one("on_control")
    assert not answer.accepted
    assert answer.detail.startswith("this run writes no checkpoints" if directory is None else "NotADirectoryError")


def test_a_rate_that_was_set_stays_in_the_plan_of_the_schedule(bus: EventBus) -> None:
    """Halved by hand in the first epoch, halved rates follow; the change is told once, as "control"."""
    seen = Recorder(bus)
    trainer = make_trainer(bus, scheduler=lambda opt: torch.optim.lr_scheduler.CosineAnnealingLR(opt, 4))
    plain = make_trainer(None, scheduler=lambda opt: torch.optim.lr_scheduler.CosineAnnealingLR(opt, 4))
    asking(trainer, lambda control: control.set_lr(scale=0.5))
    trainer.fit(batches(2), epochs=3)
    rates: list[float] = []
    plain.add_callback("on_fit_epoch_end", lambda t: rates.append(t.lr["lr/pg0"]))
    plain.fit(batches(2), epochs=3)
    assert [event.lr[0] for event in seen.of("on_fit_epoch_end")] == pytest.approx([rate / 2 for rate in rates])
    assert [event.reason for event in seen.of("on_lr_change")] == ["control", "schedule", "schedule", "schedule"]


@pytest.mark.parametrize(
    ("name", "value", "accepted"),
    [
        ("clip_norm", 0.5, True), ("clip_norm", None, True), ("clip_norm", -1, False),
        ("log_every", 1, True), ("epochs", 1, True), ("epochs", "many", False), ("save_every", 2, True),
        ("validate_every", 0, False), ("lr", 0.1, False),
    ],
)  # fmt: skip
def test_settings_that_can_be_changed(bus: EventBus, name: str, value: Any, accepted: bool) -> None:
    seen = Recorder(bus, "on_control")
    trainer = make_trainer(bus)
    asking(trainer, lambda control: control.set(name, value))
    trainer.fit(batches(1), epochs=2)
    assert seen.one("on_control").accepted is accepted
    if name == "lr":
        assert seen.one("on_control").detail == (
            "there is no setting 'lr'; it has: clip_norm, epochs, log_every, max_steps, save_every, validate_every"
        )


def test_a_request_is_awaited_by_the_subscriber_that_asked(bus: EventBus) -> None:
    """An async subscriber awaits the answer on the loop of the bus, while the training goes on."""
    answered: list[Any] = []

    @bus.on("on_train_start")
    async def ask(event: Any) -> None:
        answered.append(await bus.control.set("log_every", 7))

    trainer = make_trainer(bus)
    trainer.add_callback("on_train_batch_end", lambda t: setattr(t, "stop", bool(answered)))
    trainer.fit(batches(2000), epochs=50)
    bus.flush()
    assert (answered[0].accepted, answered[0].detail) == (True, "log_every = 7")


@pytest.mark.asyncio
async def test_training_in_a_worker_thread_of_a_service() -> None:
    """The bus runs on the service's loop, the training in a thread; the service stops it and awaits the answer."""
    async with EventBus(run="service") as bus:
        started = bus.wait_for("on_train_batch_end", timeout=10)
        training = asyncio.create_task(asyncio.to_thread(lambda: make_trainer(bus).fit(batches(100), epochs=1000)))
        await started
        answer = await bus.control.stop("the service ends")
        result = await training
    assert answer.accepted
    assert (result.reason, result.stop_reason) == ("stopped", "the service ends")


@pytest.mark.asyncio
async def test_training_on_the_loop_of_the_service_itself_does_not_hang() -> None:
    """It holds the loop, so its end cannot wait for subscribers there; they get the events once the loop runs."""
    heard: list[str] = []
    async with EventBus(run="service") as bus:

        @bus.on("on_train_end")
        async def note(event: Any) -> None:
            heard.append(event.reason)

        make_trainer(bus).fit(batches(2), epochs=1)
        assert heard == []
        await bus.aflush()
        assert heard == ["completed"]
