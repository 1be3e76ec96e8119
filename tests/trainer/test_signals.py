"""What a training does under SIGTERM, from the signal to the end of its process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from textwrap import dedent
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.eventbus.scripts import PREAMBLE, ROOT
from tests.sinks.receiver import Receiver, slow
from tests.trainer.toys import Recorder, assert_balanced, batches, make_trainer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from eventbus import EventBus


@pytest.fixture
def seen(bus: EventBus) -> Recorder:
    return Recorder(bus)


@pytest.fixture(autouse=True)
def former() -> Iterator[list[int]]:
    """A handler that was there before: what it heard."""
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    yield heard
    signal.signal(signal.SIGTERM, before)


def terminate(_: Any = None) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize(
    ("hook", "steps"),
    [
        ("on_pretrain_routine_start", 0),
        ("on_train_start", 0),
        ("on_train_epoch_start", 0),
        ("on_after_backward", 1),
        ("optimizer_step", 1),
        ("on_train_epoch_end", 2),
        ("on_val_start", 2),
        ("on_val_batch_end", 2),
        ("on_fit_epoch_end", 2),
        ("on_model_save", 2),
    ],
)
def test_sigterm_at_any_moment_finishes_the_step_and_ends_once(
    hook: str, steps: int, bus: EventBus, seen: Recorder, former: list[int], tmp_path: Path
) -> None:
    """Before the first step, within one, during validation and checkpoints: balanced, interrupted, and resumable."""
    trainer = make_trainer(bus, save_dir=tmp_path, signals=("SIGTERM",))
    trainer.add_callback(hook, lambda t: terminate() if not former else None)
    result = trainer.fit(batches(2), batches(2), epochs=3, test_loader=batches(1))
    assert (result.reason, result.stop_reason, result.step) == ("interrupted", "signal SIGTERM", steps)
    assert_balanced(seen.hooks)
    assert seen.one("on_train_end").reason == seen.one("teardown").reason == "interrupted"
    assert seen.one("on_control").accepted
    assert former == [signal.SIGTERM]
    assert not any(event.phase == "test" for event in seen.of("on_val_start"))
    if steps:
        again = make_trainer(None, save_dir=tmp_path).fit(batches(2), batches(2), epochs=3, resume="auto")
        assert (again.reason, again.step) == ("completed", 6)


def test_sigterm_in_the_middle_of_a_checkpoint_leaves_it_whole(
    bus: EventBus, seen: Recorder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The file is written to its end, although workers die of the same signal meanwhile."""

    def save(state: Any, file: Any) -> None:
        terminate()
        os.kill(os.getpid(), signal.SIGCHLD)
        real_save(state, file)

    def worker_died(number: int, frame: Any) -> None:
        raise RuntimeError("DataLoader worker is killed by signal: Terminated.")

    real_save = torch.save
    monkeypatch.setattr(torch, "save", save)
    before = signal.signal(signal.SIGCHLD, worker_died)
    try:
        result = make_trainer(bus, save_dir=tmp_path, signals=("SIGTERM",)).fit(batches(2), epochs=3)
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert (result.reason, result.step) == ("interrupted", 2)
    assert not seen.count("on_checkpoint_failed")
    assert torch.load(tmp_path / "last.pt", weights_only=True)["step"] == 2


def test_a_validation_whose_loader_the_signal_killed_is_cut_short(bus: EventBus, seen: Recorder) -> None:
    """It counts as none, as when a stop cuts it short."""

    class Killed:
        def __iter__(self) -> Iterator[Any]:
            yield from batches(1)
            terminate()
            raise RuntimeError("DataLoader worker is killed by signal: Terminated.")

    result = make_trainer(bus, signals=("SIGTERM",)).fit(batches(2), Killed(), epochs=3)
    assert (result.reason, result.step) == ("interrupted", 2)
    assert seen.one("on_val_end").metrics == {}
    assert seen.one("on_fit_epoch_end").partial is True
    assert not seen.count("on_exception")


def test_an_error_after_the_signal_is_raised_and_told(bus: EventBus, seen: Recorder) -> None:
    """The run was being interrupted: that is its reason, and the error is in `on_exception`."""

    def failing(model: Any, batch: Any) -> torch.Tensor:
        terminate()
        raise LookupError("gone")

    with pytest.raises(LookupError, match="gone"):
        make_trainer(bus, loss=failing, signals=("SIGTERM",)).fit(batches(2), epochs=3)
    assert seen.one("on_exception").message == "gone"
    assert seen.one("on_train_end").reason == "interrupted"


def test_a_stale_signal_does_not_excuse_a_later_loader(bus: EventBus) -> None:
    """Of a training that is over, nothing is left for the next one, or for a validation alone."""

    def broken() -> Iterator[Any]:
        yield from batches(1)
        raise LookupError("broken")

    trainer = make_trainer(bus, signals=("SIGTERM",))
    callback = trainer.add_callback("on_train_batch_end", terminate)
    assert trainer.fit(batches(2), epochs=1).reason == "interrupted"
    del callback
    with pytest.raises(LookupError, match="broken"):
        trainer.validate(broken())


def test_signals_are_checked_where_they_are_given(bus: EventBus) -> None:
    with pytest.raises(ValueError, match="Did you mean 'SIGTERM'"):
        make_trainer(bus, signals=("SIGTEMR",))


# ------------------------------------------------------------------------------------------------ whole processes


_TRAINING = """
import torch
from sinks import JSONLSink, WebhookSink
from trainer import Trainer

class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        x = torch.randn(3)
        return x, x.sum(dim=0, keepdim=True)

bus = EventBus(run="r", exit_timeout=2.0)
bus.attach(JSONLSink(sys.argv[1] + "/events.jsonl"))
bus.attach(WebhookSink(sys.argv[2]))

@bus.on("on_train_batch_end", once=True, every=3)
def ready(event):
    say("ready")

model = torch.nn.Linear(3, 1)
trainer = Trainer(
    model,
    lambda model, batch: torch.nn.functional.mse_loss(model(batch[0]), batch[1]),
    torch.optim.SGD(model.parameters(), lr=0.1),
    bus=bus,
    save_dir=sys.argv[1],
    signals=("SIGTERM",),
)
loader = torch.utils.data.DataLoader(Numbers(), batch_size=4, num_workers=2, persistent_workers=True)
result = trainer.fit(loader, epochs=1)
say(result.reason, result.last is not None)
sys.exit(143 if result.reason == "interrupted" else 0)
"""


def test_sigterm_with_loader_workers_and_a_slow_webhook_ends_in_time(tmp_path: Path) -> None:
    """One terminal event, in the file and at the webhook, a checkpoint, the exit code of the script, and no noise.

    A scheduler sends the signal to every process of a job, so that the workers of the loader die of it first.
    """
    receiver = Receiver().start()
    receiver.otherwise = slow(0.3)
    script = PREAMBLE + dedent(_TRAINING)
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", script, str(tmp_path), receiver.url("/hook")],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        os.killpg(process.pid, signal.SIGTERM)
        out, err = process.communicate(timeout=20)
    receiver.stop()
    assert (process.returncode, out) == (143, "interrupted True\n")
    assert "Traceback" not in err
    assert "Exception ignored" not in err
    told = [body["type"] for body in receiver.bodies]
    assert (told.count("on_train_end"), told[-1], "on_exception" in told) == (1, "on_train_end", False)
    lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [line["reason"] for line in lines if line["hook"] in ("on_train_end", "teardown")] == ["interrupted"] * 2
