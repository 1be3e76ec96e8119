"""One golden trace per way in which a training can end: the table of `trainer.loop`, row by row."""

from __future__ import annotations

import os
import signal
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch

from eventbus import EventBus
from tests.trainer.toys import BEGIN, END, INNER, Endless, Lengthless, Recorder, assert_balanced, batches, make_trainer
from tests.trainer.toys import squared_error as loss
from trainer import Callback

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

VAL = ["on_val_start", "on_val_batch_start", "on_val_batch_end", "on_val_end"]
#: An end for everything that was open when something failed in the middle of a batch.
OWED = ["on_train_batch_end", "on_train_epoch_end", "on_fit_epoch_end", "on_exception", *END]
#: Everything but the sample events, which would have to be asked for.
HEARD = ("on_pre*", "on_train*", "on_after*", "on_before*", "optimizer_step", "on_fit*", "on_val_start", "on_val_end")
HEARD += ("on_val_batch*", "on_model*", "on_ch*", "on_log", "on_control", "on_lr*", "on_exception", "teardown")


class Broken(Exception):  # noqa: N818
    pass


@pytest.fixture
def seen(bus: EventBus) -> Recorder:
    return Recorder(bus, *HEARD)


def test_all_epochs_done(bus: EventBus, seen: Recorder) -> None:
    result = make_trainer(bus).fit(batches(2), batches(1), epochs=1)
    assert seen.hooks == [
        *BEGIN, "on_train_epoch_start", *INNER, *INNER, "on_train_epoch_end", *VAL, "on_fit_epoch_end", *END,
    ]  # fmt: skip
    assert result.reason == seen.one("on_train_end").reason == seen.one("teardown").reason == "completed"


def test_max_steps_in_the_middle_of_an_epoch(bus: EventBus, seen: Recorder) -> None:
    """The epoch ends at once but is validated; nothing more is read from the loader."""
    read: list[int] = []
    data = (read.append(index) or batch for index, batch in enumerate(batches(5)))
    result = make_trainer(bus).fit(data, batches(1), max_steps=2)
    assert seen.hooks == [
        *BEGIN, "on_train_epoch_start", *INNER, *INNER, "on_train_epoch_end", *VAL, "on_fit_epoch_end", *END,
    ]  # fmt: skip
    assert read == [0, 1]
    assert (result.reason, result.step, seen.one("on_fit_epoch_end").partial) == ("completed", 2, True)
    assert result.best_fitness is not None


def test_max_steps_with_an_endless_loader(bus: EventBus, seen: Recorder) -> None:
    assert make_trainer(bus).fit(Endless(), max_steps=7).step == 7
    assert seen.count("on_train_batch_end") == 7
    assert_balanced(seen.hooks)


@pytest.mark.parametrize("attribute", ["stop", "stop_training"])
def test_stop_set_by_a_hook(bus: EventBus, seen: Recorder, attribute: str, tmp_path: Path) -> None:
    """The batch ends as usual, no other begins, the epoch is not validated, and last.pt is written."""
    trainer = make_trainer(bus, save_dir=tmp_path)

    def ask(trainer: Any) -> None:
        if trainer.batch_idx == 1:
            setattr(trainer, attribute, True)
            assert trainer.stop is trainer.stop_training is True

    trainer.add_callback("on_after_backward", ask)
    result = trainer.fit(batches(5), batches(1), epochs=3)
    assert seen.hooks == [
        *BEGIN, "on_train_epoch_start", *INNER, *INNER, "on_control", "on_train_epoch_end", "on_fit_epoch_end",
        "on_model_save", *END,
    ]  # fmt: skip
    assert (result.reason, result.step, seen.one("on_fit_epoch_end").partial) == ("stopped", 2, True)
    assert result.stop_reason == "a callback set trainer.stop"
    assert result.last is not None


def test_stop_asked_for_by_an_async_subscriber(bus: EventBus, seen: Recorder) -> None:
    """It is applied at the next safe point: with the batches held back, exactly after the batch it was asked in."""
    asked = threading.Event()

    @bus.on("on_train_batch_start")
    async def ask(event: Any) -> None:
        if event.global_batch == 1:
            bus.control.stop("seen enough", requester="watcher")
            asked.set()

    trainer = make_trainer(bus)
    trainer.add_callback("on_train_batch_end", lambda t: asked.wait(10) if t.batch_idx == 1 else None)
    result = trainer.fit(batches(5), epochs=1)
    control = seen.one("on_control")
    assert (control.action, control.requester, control.reason) == ("stop", "watcher", "seen enough")
    assert (control.accepted, control.step, control.run) == (True, 2, "test")
    assert (result.reason, result.stop_reason, result.step) == ("stopped", "seen enough", 2)
    assert seen.count("on_train_batch_start") == 2
    assert_balanced(seen.hooks)


def test_stop_before_the_first_batch(bus: EventBus, seen: Recorder) -> None:
    trainer = make_trainer(bus)
    trainer.add_callback("on_train_epoch_start", lambda t: setattr(t, "stop", True))
    trainer.fit(batches(5), epochs=3)
    assert seen.hooks == [
        *BEGIN, "on_train_epoch_start", "on_control", "on_train_epoch_end", "on_fit_epoch_end", *END,
    ]  # fmt: skip


def test_stop_at_the_end_of_an_epoch_finds_it_complete(bus: EventBus, seen: Recorder, tmp_path: Path) -> None:
    trainer = make_trainer(bus, save_dir=tmp_path)
    trainer.add_callback("on_fit_epoch_end", lambda t: setattr(t, "stop", True))
    trainer.fit(batches(1), batches(1), epochs=3)
    assert seen.hooks == [
        *BEGIN, "on_train_epoch_start", *INNER, "on_train_epoch_end", *VAL, "on_fit_epoch_end",
        "on_model_save", "on_model_save", "on_control", *END,
    ]  # fmt: skip
    assert seen.one("on_fit_epoch_end").partial is False


def test_stop_during_validation_cuts_it_short(bus: EventBus, seen: Recorder) -> None:
    """The epoch has no metrics of half a validation, and is marked as cut short."""
    trainer = make_trainer(bus)
    trainer.add_callback("on_val_batch_end", lambda t: setattr(t, "stop", True))
    result = trainer.fit(batches(1), batches(5), epochs=3)
    assert seen.hooks == [
        *BEGIN, "on_train_epoch_start", *INNER, "on_train_epoch_end",
        "on_val_start", "on_val_batch_start", "on_val_batch_end", "on_control", "on_val_end", "on_fit_epoch_end", *END,
    ]  # fmt: skip
    assert seen.one("on_val_end").metrics == {}
    assert seen.one("on_fit_epoch_end").partial is True
    assert set(result.metrics) == {"train/loss"}


def test_an_exception_in_the_model(bus: EventBus, seen: Recorder) -> None:
    calls: list[int] = []

    def failing(model: Any, batch: Any) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 2:
            raise Broken("in the model")
        return loss(model, batch)

    with pytest.raises(Broken, match="in the model") as caught:
        make_trainer(bus, loss=failing).fit(batches(3), batches(1), epochs=2)
    assert seen.hooks == [*BEGIN, "on_train_epoch_start", *INNER, "on_train_batch_start", *OWED]
    error = seen.one("on_exception")
    assert (error.phase, error.epoch, error.step) == ("train", 0, 1)
    assert (error.type, error.message) == ("Broken", "in the model")
    assert "in failing" in error.traceback
    assert seen.one("on_train_end").reason == seen.one("teardown").reason == "failed"
    assert [e.status for e in seen.of("on_train_batch_end")] == ["ok", "skipped"]
    assert not getattr(caught.value, "__notes__", [])
    assert caught.value.__context__ is None


def test_an_exception_in_the_loader(bus: EventBus, seen: Recorder) -> None:
    def failing() -> Any:
        yield from batches(1)
        raise Broken("in the loader")

    with pytest.raises(Broken, match="in the loader"):
        make_trainer(bus).fit(failing(), epochs=2)
    assert seen.hooks == [*BEGIN, "on_train_epoch_start", *INNER, *OWED[1:]]
    assert seen.one("on_fit_epoch_end").partial is True


def test_an_exception_in_validation(bus: EventBus, seen: Recorder) -> None:
    def failing(model: Any, batch: Any) -> torch.Tensor:
        if not model.training:
            raise Broken("in validation")
        return loss(model, batch)

    trainer = make_trainer(bus, loss=failing)
    with pytest.raises(Broken):
        trainer.fit(batches(1), batches(1), epochs=1)
    assert seen.hooks == [
        *BEGIN, "on_train_epoch_start", *INNER, "on_train_epoch_end", *VAL, "on_fit_epoch_end", "on_exception", *END,
    ]  # fmt: skip
    assert (seen.one("on_exception").phase, seen.one("on_fit_epoch_end").partial) == ("val", True)
    assert trainer.model.training


@pytest.mark.parametrize(
    "hook",
    [
        "on_pretrain_routine_start", "on_pretrain_routine_end", "on_train_start", "on_train_epoch_start",
        "on_train_batch_start", "on_after_backward", "on_before_optimizer_step", "optimizer_step",
        "on_before_zero_grad", "on_train_batch_end", "on_log", "on_lr_change", "on_train_epoch_end", "on_val_start",
        "on_val_batch_start", "on_val_batch_end", "on_val_end", "on_fit_epoch_end", "on_model_save",
    ],
)  # fmt: skip
@pytest.mark.parametrize("error", [Broken, SystemExit, KeyboardInterrupt])
def test_leaving_from_any_hook_is_balanced(hook: str, error: type[BaseException], tmp_path: Path) -> None:
    """A raising hook, sys.exit and Ctrl-C in every hook: each start has its end, and there is one terminal event."""
    bus = EventBus(run="test")
    seen = Recorder(bus)

    def fail(event: Any) -> None:
        raise error("here")

    bus.subscribe(fail, hook, on_error="raise")
    trainer = make_trainer(
        bus, save_dir=tmp_path, log_every=1, scheduler=lambda opt: torch.optim.lr_scheduler.StepLR(opt, 1, 0.5)
    )
    with pytest.raises(error, match="here"):
        trainer.fit(batches(2), batches(1), epochs=2)
    assert hook in seen.hooks or error is not Broken
    assert_balanced(seen.hooks)
    assert seen.count("on_exception") == 1
    assert seen.one("on_train_end").reason == ("failed" if error is Broken else "interrupted")
    bus.close()


def test_a_failing_callback_is_isolated_unless_told_to_raise(bus: EventBus, seen: Recorder) -> None:
    class Failing(Callback):
        def on_train_batch_end(self, trainer: Any) -> None:
            raise Broken

    make_trainer(bus, callbacks=[Failing()]).fit(batches(2), epochs=1)
    assert seen.one("on_train_end").reason == "completed"
    with pytest.raises(Broken):
        make_trainer(bus, callbacks=[Failing()], on_callback_error="raise").fit(batches(2), epochs=1)
    assert seen.events[-1].reason == "failed"


def test_ctrl_c(bus: EventBus, seen: Recorder, tmp_path: Path) -> None:
    """KeyboardInterrupt reaches the caller, after the terminal events; no checkpoint is made of a half-done update."""

    def failing(model: Any, batch: Any) -> torch.Tensor:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_trainer(bus, loss=failing, save_dir=tmp_path).fit(batches(3), epochs=1)
    assert seen.hooks == [*BEGIN, "on_train_epoch_start", "on_train_batch_start", *OWED]
    assert seen.one("on_exception").type == "KeyboardInterrupt"
    assert seen.one("on_train_end").reason == "interrupted"
    assert not list(tmp_path.iterdir())


def test_a_signal_that_was_asked_for_stops_cleanly_and_is_chained(bus: EventBus, seen: Recorder) -> None:
    """SIGUSR1 asks for a stop, the former handler is called too, and is back in place afterwards."""
    heard: list[int] = []

    def former(number: int, frame: Any) -> None:
        heard.append(number)

    before = signal.signal(signal.SIGUSR1, former)
    try:
        trainer = make_trainer(bus, signals=(signal.SIGUSR1,))
        trainer.add_callback("on_train_batch_start", lambda t: os.kill(os.getpid(), signal.SIGUSR1))
        result = trainer.fit(batches(3), epochs=1, test_loader=batches(1))
        assert signal.getsignal(signal.SIGUSR1) is former
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert (result.reason, result.stop_reason, result.step) == ("interrupted", "signal SIGUSR1", 1)
    assert heard == [signal.SIGUSR1]
    assert seen.one("on_control").requester == "signal"
    assert seen.count("on_val_start") == 0


@pytest.fixture
def obeyed_ctrl_c() -> Iterator[None]:
    """Also where the shell that runs the tests has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("obeyed_ctrl_c")
def test_ctrl_c_as_a_signal_interrupts_the_second_time(bus: EventBus, seen: Recorder) -> None:
    trainer = make_trainer(bus, signals=(signal.SIGINT,))
    trainer.add_callback("on_train_batch_start", lambda t: os.kill(os.getpid(), signal.SIGINT))
    assert trainer.fit(batches(3), epochs=1).reason == "interrupted"
    trainer.add_callback("on_train_batch_start", lambda t: os.kill(os.getpid(), signal.SIGINT), priority=-1)
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(batches(3), epochs=1)
    assert seen.events[-1].reason == "interrupted"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_no_signal_handler_is_installed_unless_asked_for(bus: EventBus) -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    trainer = make_trainer(bus)
    trainer.add_callback("on_train_batch_start", lambda t: during.update({n: signal.getsignal(n) for n in before}))
    during: dict[Any, Any] = {}
    trainer.fit(batches(1), epochs=1)
    assert during == before


def test_signals_off_the_main_thread_are_refused(bus: EventBus) -> None:
    errors: list[Exception] = []

    def fit() -> None:
        try:
            make_trainer(bus, signals=(signal.SIGUSR1,)).fit(batches(1), epochs=1)
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=fit)
    thread.start()
    thread.join(10)
    assert "main thread" in str(errors[0])


def test_a_smaller_last_group_of_a_loader_without_length_still_steps(bus: EventBus, seen: Recorder) -> None:
    """That it was the last is known only after its batch: the update comes between the batch and the epoch's end."""
    make_trainer(bus, accumulate=2).fit(Lengthless(batches(3)), epochs=1)
    assert seen.hooks[-11:] == [
        "on_train_batch_end", "on_train_batch_start", "on_after_backward", "on_train_batch_end",
        "on_before_optimizer_step", "optimizer_step", "on_before_zero_grad",
        "on_train_epoch_end", "on_fit_epoch_end", *END,
    ]  # fmt: skip


def test_requests_that_wait_when_the_run_ends_are_refused(bus: EventBus, seen: Recorder) -> None:
    """A request dies with its run, before on_train_end; one after it finds no run."""
    trainer = make_trainer(bus)
    late: list[Any] = []
    trainer.add_callback("on_exception", lambda t: late.append(bus.control.pause(run="test")))
    trainer.add_callback("on_train_end", lambda t: late.append(bus.control.pause(run="test")))

    def failing(model: Any, batch: Any) -> torch.Tensor:
        raise Broken

    trainer.loss_fn = failing
    with pytest.raises(Broken):
        trainer.fit(batches(1), epochs=1)
    details = [request.result(0).detail for request in late]
    assert details == ["the run ended", "run 'test' is not active, and no other is"]
    assert not any(request.result(0).accepted for request in late)
    assert seen.hooks[-1] == "teardown"
