"""G11: a trainer travels by pickle and deepcopy, with its bus stopped, whatever it was doing."""

from __future__ import annotations

import copy
import pickle
from typing import TYPE_CHECKING, Any

import pytest

from eventbus import EventBus, FitEpochEnd
from sinks import CSVSink, JSONLSink, WebhookSink, read_jsonl
from tests.trainer.toys import batches, make_trainer
from trainer import Callback, EarlyStopping

if TYPE_CHECKING:
    from pathlib import Path


class Counting(Callback):
    def __init__(self) -> None:
        self.epochs = 0

    def on_fit_epoch_end(self, trainer: Any) -> None:
        self.epochs += 1


def pickled(trainer: Any) -> Any:
    return pickle.loads(pickle.dumps(trainer))


@pytest.mark.parametrize("travel", [pickled, copy.deepcopy])
@pytest.mark.parametrize("state", ["before", "training", "after"])
def test_G11_a_trainer_travels_before_during_and_after_a_training(travel: Any, state: str, tmp_path: Path) -> None:
    """The copy has the model, the callbacks' state and the sinks; it trains by itself and disturbs nothing."""
    bus = EventBus(run="r")
    bus.attach(JSONLSink(tmp_path / "events.jsonl", hooks="on_fit_epoch_end"))
    bus.attach(CSVSink(tmp_path / "epochs.csv"))
    bus.attach(WebhookSink("http://127.0.0.1:9/hook", hooks="on_exception"))
    counting = Counting()
    trainer = make_trainer(
        bus, callbacks=[counting, EarlyStopping(patience=5)], signals=("SIGUSR1",), monitor="val/loss"
    )
    taken: list[Any] = []
    if state == "before":
        taken.append(travel(trainer))
    elif state == "training":
        trainer.add_callback("on_train_batch_end", Taking(travel, taken))
    trainer.fit(batches(2), batches(1), epochs=2)
    if state == "after":
        taken.append(travel(trainer))
    assert bus.close().ok
    twin = taken[0]
    assert twin.bus is not trainer.bus
    assert twin.model is not trainer.model
    assert not twin.is_busy
    before = len(list(read_jsonl(tmp_path / "events.jsonl")))
    assert before == 2
    with twin.bus:
        twin.progress.publish(FitEpochEnd, epoch=7)
    assert len(list(read_jsonl(tmp_path / "events.jsonl"))) == 3
    assert counting.epochs == 2


class Taking:
    """A callback that travels itself: takes one copy of the trainer in the middle of a batch."""

    def __init__(self, travel: Any, taken: list[Any]) -> None:
        self.travel = travel
        self.taken = taken

    def __call__(self, trainer: Any) -> None:
        if not self.taken:
            self.taken.append(None)
            self.taken[0] = self.travel(trainer)
