"""What a trainer and the subscribers of its bus owe each other at the end of a training, and in its checkpoints."""

from __future__ import annotations

import logging
import threading
from time import monotonic
from typing import TYPE_CHECKING, Any

import anyio
import pytest
import torch

from eventbus import EventBus, FitEpochEnd, ModelSave, TrainBatchEnd
from tests.trainer.toys import batches, make_trainer
from tests.trainer.toys import squared_error as loss
from trainer import Callback, EarlyStopping

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from eventbus import Event


class Tracker:
    """A sink of somebody else: what it got when `fit` returned is what its server knows."""

    hooks: Sequence[str] = ()
    options: dict[str, Any] = {"maxsize": 10_000}
    max_batch = 50

    def __init__(self) -> None:
        self.hooks_seen: list[str] = []
        self.last: Any = None

    async def open(self) -> None: ...

    async def write(self, events: Sequence[Event]) -> None:
        await anyio.sleep(0.005)
        self.hooks_seen += [event.hook for event in events]
        self.last = events[-1]

    async def aclose(self) -> None: ...


@pytest.mark.parametrize("kind", ["async", "thread", "sink"])
def test_nothing_is_pending_when_fit_returns(bus: EventBus, kind: str) -> None:
    """Each subscriber, however slow, has the last event of the run."""
    seen: list[str] = []

    async def slowly(event: Event) -> None:
        await anyio.sleep(0.003)
        seen.append(event.hook)

    if kind == "async":
        bus.subscribe(slowly, "on_train_*", "teardown", name="slow")
    elif kind == "thread":
        bus.subscribe(lambda event: seen.append(event.hook), run_in="thread", name="slow")
    else:
        tracker = Tracker()
        seen = tracker.hooks_seen
        bus.attach(tracker, name="slow")
    make_trainer(bus).fit(batches(4), epochs=2)
    assert seen[-1] == "teardown"
    assert seen.count("on_train_batch_end") == 8
    assert bus.stats()["slow"].pending == 0


@pytest.mark.parametrize("kind", ["async", "thread"])
def test_an_upload_that_never_returns_leaves_the_training_its_result(
    bus: EventBus, kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """`fit` waits for it no longer than `flush_timeout`, says so, and returns as if nothing had been."""
    release = threading.Event()

    async def hang(event: ModelSave) -> None:
        await anyio.sleep_forever()

    if kind == "async":
        bus.subscribe(hang, ModelSave, name="upload", timeout=60.0)
    else:
        bus.subscribe(lambda event: release.wait(), ModelSave, name="upload", run_in="thread")
    started = monotonic()
    with caplog.at_level(logging.WARNING, logger="trainbus"):
        result = make_trainer(bus, save_dir=tmp_path, flush_timeout=0.2).fit(batches(2), batches(1), epochs=3)
    assert monotonic() - started < 5.0
    assert (result.reason, result.step) == ("completed", 6)
    assert result.last is not None
    assert "Not every event was delivered within 0.2 s." in caplog.text
    report = bus.close(0.2)
    assert report.left["upload"] == bus.stats()["upload"].dropped > 0
    release.set()


def test_an_upload_that_takes_too_long_is_cancelled_at_its_timeout_and_counted(bus: EventBus, tmp_path: Path) -> None:
    """Each one, and the training ends normally with all of them settled."""

    async def hang(event: ModelSave) -> None:
        await anyio.sleep_forever()

    bus.subscribe(hang, ModelSave, name="upload", timeout=0.02)
    assert make_trainer(bus, save_dir=tmp_path).fit(batches(2), batches(1), epochs=2).reason == "completed"
    stats = bus.stats()["upload"]
    assert (stats.timed_out, stats.pending) == (stats.matched, 0)
    assert stats.matched > 0


@pytest.mark.parametrize(
    ("error", "reason"), [(ValueError, "failed"), (KeyboardInterrupt, "interrupted"), (SystemExit, "interrupted")]
)
def test_every_sink_knows_how_the_run_ended_before_the_error_leaves_fit(
    bus: EventBus, error: type[BaseException], reason: str
) -> None:
    """A tracker never shows a dead run as running: it has the exception and the one terminal event."""
    trackers = [Tracker(), Tracker()]
    for number, tracker in enumerate(trackers):
        bus.attach(tracker, name=f"tracker {number}")

    def failing(model: Any, batch: Any) -> Any:
        if trainer.step == 3:
            raise error("here")
        return loss(model, batch)

    trainer = make_trainer(bus, loss=failing)
    with pytest.raises(error, match="here"):
        trainer.fit(batches(4), epochs=2)
    for tracker in trackers:
        assert tracker.hooks_seen[-3:] == ["on_exception", "on_train_end", "teardown"]
        assert tracker.hooks_seen.count("on_train_end") == tracker.hooks_seen.count("on_exception") == 1
        assert tracker.last.reason == reason


class Unpicklable(Callback):
    """A callback with a client, as they are."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.thread = threading.current_thread()
        self.on_message = lambda message: message

    async def on_log(self, event: Any) -> None: ...


def test_a_checkpoint_holds_the_state_of_callbacks_and_never_the_callbacks(bus: EventBus, tmp_path: Path) -> None:
    """Lambdas, locks, threads and clients among them neither fail the saving nor travel in the file."""

    def make() -> Any:
        trainer = make_trainer(bus, save_dir=tmp_path, callbacks=[Unpicklable(), EarlyStopping(patience=5)])
        trainer.add_callback("on_train_batch_end", lambda trainer: None)
        bus.subscribe(lambda event: None, FitEpochEnd)
        bus.subscribe(lambda event: None, TrainBatchEnd, run_in="thread")
        return trainer

    failed: list[Any] = []
    bus.subscribe(failed.append, "on_checkpoint_failed")
    make().fit(batches(2), batches(1), epochs=1)
    result = make().fit(batches(2), batches(1), epochs=3, resume="auto")
    assert (failed, result.epoch) == ([], 2)
    saved = torch.load(tmp_path / "last.pt", weights_only=True)  # which reads no callable and no class
    assert saved["callbacks"]["EarlyStopping"]
