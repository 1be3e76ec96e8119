"""Checkpoints: whole or not there, never in the way, and enough to go on as if nothing had happened."""

from __future__ import annotations

import json
import logging
import math
import os
import random
import shutil
import signal
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.eventbus.scripts import run
from tests.trainer.toys import Recorder, batches, linear, make_trainer, squared_error
from trainer import Callback, EarlyStopping, ModelCheckpoint

if TYPE_CHECKING:
    from pathlib import Path

    from eventbus import EventBus
    from trainer import Trainer


def noisy_net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))


def shuffled() -> torch.utils.data.DataLoader[Any]:
    x = torch.randn(12, 3, generator=torch.Generator().manual_seed(1))
    data = torch.utils.data.TensorDataset(x, x.sum(dim=1, keepdim=True))
    return torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)


def with_everything(bus: EventBus, directory: Path) -> Trainer:
    model = noisy_net()
    return make_trainer(
        bus,
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=0.05),
        scheduler=lambda opt: torch.optim.lr_scheduler.StepLR(opt, 1, 0.7),
        save_dir=directory,
        seed=5,
    )


def weights(trainer: Trainer) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in trainer.model.parameters()]


def test_a_resumed_training_is_the_one_that_was_never_interrupted(bus: EventBus, tmp_path: Path) -> None:
    """Weights, optimizer, schedule, shuffling, dropout and counters: four epochs at once, or two and two."""
    seen = Recorder(bus, "on_train_batch_end", "on_checkpoint_load", "on_train_start", "on_fit_epoch_end")
    straight = with_everything(bus, tmp_path / "a")
    straight.fit(shuffled(), batches(1), epochs=4)
    expected = [(e.epoch, e.batch, e.global_batch, e.step, e.metrics, e.lr) for e in seen.of("on_train_batch_end")]
    seen.events.clear()
    with_everything(bus, tmp_path / "b").fit(shuffled(), batches(1), epochs=2)
    random.random(), torch.rand(3)
    resumed = with_everything(bus, tmp_path / "b")
    result = resumed.fit(shuffled(), batches(1), epochs=4, resume="auto")
    got = [(e.epoch, e.batch, e.global_batch, e.step, e.metrics, e.lr) for e in seen.of("on_train_batch_end")]
    assert got == expected
    for one, other in zip(weights(straight), weights(resumed), strict=True):
        assert torch.equal(one, other)
    load = seen.one("on_checkpoint_load")
    assert (load.path, load.epoch, load.step, load.attempt) == (str(tmp_path / "b" / "last.pt"), 2, 6, 1)
    assert (seen.of("on_train_start")[1].start_epoch, seen.of("on_train_start")[1].step) == (2, 6)
    assert result.best_fitness == straight.best_fitness
    assert [event.attempt for event in seen.of("on_fit_epoch_end")] == [0, 0, 1, 1]


def test_resume_auto_without_a_checkpoint_starts_anew(bus: EventBus, tmp_path: Path) -> None:
    seen = Recorder(bus)
    assert make_trainer(bus, save_dir=tmp_path).fit(batches(1), epochs=1, resume="auto").step == 1
    assert seen.count("on_checkpoint_load") == 0


def test_resuming_a_run_that_is_complete_trains_nothing(bus: EventBus, tmp_path: Path) -> None:
    seen = Recorder(bus)
    make_trainer(bus, save_dir=tmp_path).fit(batches(1), epochs=2)
    seen.events.clear()
    result = make_trainer(bus, save_dir=tmp_path).fit(batches(1), epochs=2, resume=tmp_path / "last.pt")
    assert (result.reason, result.epoch, result.step) == ("completed", None, 2)
    assert seen.hooks == [
        "on_pretrain_routine_start", "on_checkpoint_load", "on_pretrain_routine_end", "on_train_start", "on_train_end",
        "teardown",
    ]  # fmt: skip


def test_an_epoch_that_was_cut_short_goes_on_after_its_last_batch(bus: EventBus, tmp_path: Path) -> None:
    trainer = make_trainer(bus, save_dir=tmp_path)
    trainer.add_callback("on_train_batch_end", lambda t: setattr(t, "stop", t.epoch == 1))
    trainer.fit(batches(3), epochs=3)
    seen = Recorder(bus)
    result = make_trainer(bus, save_dir=tmp_path).fit(batches(3), epochs=3, resume="auto")
    assert [event.epoch for event in seen.of("on_train_epoch_start")] == [1, 2]
    assert [(e.batch, e.global_batch) for e in seen.of("on_train_batch_start")][:3] == [(1, 4), (2, 5), (0, 6)]
    assert (seen.one("on_checkpoint_load").step, result.step) == (4, 9)


def test_a_file_that_is_no_checkpoint_is_refused(bus: EventBus, tmp_path: Path) -> None:
    torch.save(linear().state_dict(), tmp_path / "weights.pt")
    with pytest.raises(ValueError, match=r"weights.pt is no checkpoint to resume from. Trainer.load_weights"):
        make_trainer(bus).fit(batches(1), epochs=1, resume=tmp_path / "weights.pt")
    with pytest.raises(FileNotFoundError):
        make_trainer(bus).fit(batches(1), epochs=1, resume=tmp_path / "nothing.pt")


def test_a_checkpoint_of_another_model_fails_the_run_properly(bus: EventBus, tmp_path: Path) -> None:
    make_trainer(bus, save_dir=tmp_path).fit(batches(1), epochs=1)
    seen = Recorder(bus)
    with pytest.raises(RuntimeError, match="loading state_dict"):
        make_trainer(bus, model=noisy_net()).fit(batches(1), epochs=1, resume=tmp_path / "last.pt")
    assert seen.hooks == ["on_pretrain_routine_start", "on_exception", "on_train_end", "teardown"]
    assert seen.one("on_exception").phase == "setup"


def test_best_is_the_best_epoch_and_last_the_last(bus: EventBus, tmp_path: Path) -> None:
    scores = iter([1.0, 3.0, 2.0])
    trainer = make_trainer(bus, save_dir=tmp_path, monitor="val/score", mode="max")
    trainer.add_callback("on_val_end", lambda t: t.metrics.update({"val/score": next(scores)}))
    seen = Recorder(bus, "on_model_save")
    result = trainer.fit(batches(1), batches(1), epochs=3)
    told = [(e.epoch, os.path.basename(e.path), e.is_best, e.value, e.previous_best) for e in seen.events]
    assert told == [
        (0, "last.pt", False, 1.0, None), (0, "best.pt", True, 1.0, None),
        (1, "last.pt", False, 3.0, 1.0), (1, "best.pt", True, 3.0, 1.0),
        (2, "last.pt", False, 2.0, 3.0),
    ]  # fmt: skip
    assert (result.last, result.best) == (tmp_path / "last.pt", tmp_path / "best.pt")
    assert torch.load(result.best, weights_only=True)["epoch"] == 2
    assert torch.load(result.last, weights_only=True)["epoch"] == 3
    assert sorted(os.listdir(tmp_path)) == ["best.pt", "last.pt"]
    assert [event.bytes for event in seen.events] == [os.path.getsize(event.path) for event in seen.events]


def test_save_every_and_the_end(bus: EventBus, tmp_path: Path) -> None:
    """last.pt every two epochs and at the end; best.pt whenever there is a new best."""
    seen = Recorder(bus, "on_model_save")
    scores = iter([1.0, 0.0, 0.0, 2.0, 0.0])
    trainer = make_trainer(bus, save_dir=tmp_path, monitor="train/score", mode="max")
    trainer.add_callback("on_train_epoch_end", lambda t: t.metrics.update({"train/score": next(scores)}))
    trainer.fit(batches(1), epochs=5, save_every=2)
    assert [(e.epoch, e.path.endswith("best.pt")) for e in seen.events] == [
        (0, True), (1, False), (3, False), (3, True), (4, False),
    ]  # fmt: skip


def test_validating_and_saving_by_steps(bus: EventBus, tmp_path: Path) -> None:
    """With only max_steps, both count updates, and each happens between two batches."""
    seen = Recorder(bus, "on_val_start", "on_model_save", "on_train_batch_*", "on_fit_epoch_end")
    make_trainer(bus, save_dir=tmp_path).fit(batches(20), batches(1), max_steps=6, validate_every=2, save_every=3)
    inner = ["on_train_batch_start", "on_train_batch_end"]
    order = [hook for hook in seen.hooks if hook != "on_model_save"]
    two = [*inner, *inner, "on_val_start"]
    assert order == [*two, *two, *two, "on_fit_epoch_end"]
    assert [e.step for e in seen.of("on_model_save") if e.path.endswith("last.pt")] == [3, 6]
    assert [e.step for e in seen.of("on_val_start")] == [2, 4, 6]


def test_a_checkpoint_by_steps_is_not_taken_for_the_best(bus: EventBus, tmp_path: Path) -> None:
    seen = Recorder(bus, "on_model_save")
    make_trainer(bus, save_dir=tmp_path).fit(batches(2), max_steps=8, save_every=3)
    stepwise = [event for event in seen.events if event.step in (3,)]
    assert [event.is_best for event in stepwise] == [False]


def test_a_directory_that_cannot_be_written_stops_nothing(
    bus: EventBus, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The parent is a file: one on_checkpoint_failed per epoch and file, an ERROR, and the run completes."""
    (tmp_path / "file").touch()
    seen = Recorder(bus)
    with caplog.at_level(logging.ERROR):
        result = make_trainer(bus, save_dir=tmp_path / "file" / "runs").fit(batches(1), epochs=2)
    failed = seen.of("on_checkpoint_failed")
    assert {os.path.basename(event.path) for event in failed} == {"last.pt", "best.pt"}
    assert "NotADirectoryError" in failed[0].error
    assert seen.count("on_model_save") == 0
    assert (result.reason, result.last) == ("completed", None)
    assert "could not be written; the training goes on" in caplog.text


def test_a_write_that_fails_leaves_the_older_file_whole(
    bus: EventBus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that fills up in the middle: no half file, no temporary file, and the next write works again."""
    trainer = make_trainer(bus, save_dir=tmp_path)
    trainer.fit(batches(1), epochs=1)
    before = (tmp_path / "last.pt").read_bytes()
    original = torch.save

    def half(state: Any, file: Any) -> None:
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", half)
    seen = Recorder(bus)
    trainer.fit(batches(1), epochs=1)
    assert "No space left" in seen.of("on_checkpoint_failed")[0].error
    assert (tmp_path / "last.pt").read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == ["best.pt", "last.pt"]
    monkeypatch.setattr(torch, "save", original)
    trainer.fit(batches(1), epochs=1)
    assert (tmp_path / "last.pt").read_bytes() != before


def test_state_is_collected_after_every_hook_of_the_epoch(bus: EventBus, tmp_path: Path) -> None:
    """A hook of the lowest priority still changes what is in this epoch's checkpoint."""

    class Counter(Callback):
        priority = -1000
        count = 0

        def on_fit_epoch_end(self, trainer: Any) -> None:
            self.count += 1

        def state_dict(self) -> dict[str, Any]:
            return {"count": self.count}

        def load_state_dict(self, state: Any) -> None:
            self.count = state["count"]

    make_trainer(bus, save_dir=tmp_path, callbacks=[Counter(), Counter()]).fit(batches(1), epochs=3)
    states = torch.load(tmp_path / "last.pt", weights_only=True)["callbacks"]
    counts = {key.partition("Counter")[2]: state["count"] for key, state in states.items() if state}
    assert counts == {"": 3, "#2": 3}
    resumed = [Counter(), Counter()]
    make_trainer(bus, save_dir=tmp_path, callbacks=resumed).fit(batches(1), epochs=4, resume="auto")
    assert [counter.count for counter in resumed] == [4, 4]


def test_a_checkpoint_of_its_own_metric_and_directory(bus: EventBus, tmp_path: Path) -> None:
    scores = iter([0.1, 0.3, 0.2])
    checkpoint = ModelCheckpoint(tmp_path / "own", monitor="val/f1")
    trainer = make_trainer(bus, callbacks=[checkpoint])
    trainer.add_callback("on_val_end", lambda t: t.metrics.update({"val/f1": next(scores)}))
    seen = Recorder(bus, "on_model_save")
    trainer.fit(batches(1), batches(1), epochs=3)
    assert [(e.epoch, e.value) for e in seen.events if e.is_best] == [(0, 0.1), (1, 0.3)]
    assert trainer.best == tmp_path / "own" / "best.pt"
    with pytest.raises(ValueError, match="needs a directory"):
        make_trainer(bus, callbacks=[ModelCheckpoint()])


def test_early_stopping_waits_for_its_patience(bus: EventBus) -> None:
    scores = iter([1.0, 2.0, 2.05, math.nan, 1.0, 5.0])
    trainer = make_trainer(bus, callbacks=[EarlyStopping("val/f1", patience=3, min_delta=0.1)])
    trainer.add_callback("on_val_end", lambda t: t.metrics.update({"val/f1": next(scores)}), priority=1)
    seen = Recorder(bus, "on_control", "on_fit_epoch_end")
    result = trainer.fit(batches(1), batches(1), epochs=10)
    assert (result.epoch, result.reason) == (4, "stopped")
    assert result.stop_reason == "val/f1 has not improved on 2 for 3 epochs"
    assert seen.one("on_control").requester == "EarlyStopping"


def test_early_stopping_shows_the_value_that_people_know(bus: EventBus) -> None:
    """Fitness is minus the loss; the message says the loss."""
    trainer = make_trainer(bus, callbacks=[EarlyStopping(patience=1)], optimizer=None, loss=constant)
    result = trainer.fit(batches(1), batches(1), epochs=10)
    assert result.stop_reason == "val/loss has not improved on 0.25 for 1 epoch"


def constant(model: Any, batch: Any) -> torch.Tensor:
    return squared_error(model, batch) * 0 + 0.25


def test_patience_survives_a_resume_and_a_stopped_run_stops_again(bus: EventBus, tmp_path: Path) -> None:
    options = {"save_dir": tmp_path, "loss": constant}
    make_trainer(bus, callbacks=[EarlyStopping(patience=3)], **options).fit(batches(1), epochs=2)
    stopper = EarlyStopping(patience=3)
    result = make_trainer(bus, callbacks=[stopper], **options).fit(batches(1), epochs=9, resume="auto")
    assert (result.epoch, stopper.waited) == (3, 3)
    again = make_trainer(bus, callbacks=[EarlyStopping(patience=3)], **options)
    result = again.fit(batches(1), epochs=9, resume="auto")
    assert (result.reason, result.epoch) == ("stopped", None)
    fresh = make_trainer(bus, callbacks=[], **options).fit(batches(1), epochs=5, resume="auto")
    assert (fresh.reason, fresh.epoch) == ("completed", 4)


# ------------------------------------------------------------------------------------------- what goes wrong on disk


FULL_DISK = """
import json, resource
import torch
from trainer import Trainer

def full(is_full):  # to a process that may write no byte past that to a file, every disk is full
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000 if is_full else hard, hard))

bus = EventBus(run="full")
failed = []
bus.subscribe(failed.append, "on_checkpoint_failed")
model = torch.nn.Linear(300, 100)
trainer = Trainer(
    model, lambda m, b: m(b).square().mean(), torch.optim.SGD(model.parameters(), lr=0.1), bus=bus, save_dir=sys.argv[1]
)
trainer.add_callback("on_train_epoch_start", lambda t: full(t.epoch == 1))
trainer.add_callback("on_fit_epoch_end", lambda t: files.append(sorted(os.listdir(sys.argv[1]))) if t.epoch else None)
trainer.add_callback("on_train_epoch_start", lambda t: steps.append(
    torch.load(sys.argv[1] + "/last.pt", weights_only=True)["step"] if t.epoch else 0
), priority=-1)
files, steps = [], []
result = trainer.fit([torch.ones(4, 300)] * 3, epochs=3)
say(json.dumps([result.reason, steps, files, sorted({os.path.basename(event.path) for event in failed})]))
say(failed[0].error)
"""


def test_a_full_disk_costs_the_checkpoint_alone(tmp_path: Path) -> None:
    """The file is only half written: the one of before is whole and the next is written, when there is room again."""
    done = run(FULL_DISK, str(tmp_path))
    assert done.code == 0, done.err
    reason, steps, files, failed = json.loads(done.out[0])
    assert (reason, steps, failed) == ("completed", [0, 3, 3], ["best.pt", "last.pt"])
    assert files == [["best.pt", "last.pt"]] * 2
    assert torch.load(tmp_path / "last.pt", weights_only=True)["step"] == 9
    assert "could not be written; the training goes on" in done.err


@pytest.mark.skipif(not os.path.isdir("/sys/kernel"), reason="needs a directory that takes no files from anybody")
def test_a_read_only_directory_costs_the_checkpoint_alone(bus: EventBus) -> None:
    seen = Recorder(bus)
    result = make_trainer(bus, save_dir="/sys/kernel/trainbus").fit(batches(1), epochs=1)
    assert (result.reason, result.last) == ("completed", None)
    assert {os.path.basename(event.path) for event in seen.of("on_checkpoint_failed")} == {"last.pt", "best.pt"}


def test_a_directory_that_vanishes_is_made_again(bus: EventBus, tmp_path: Path) -> None:
    trainer = make_trainer(bus, save_dir=tmp_path / "runs")
    trainer.add_callback("on_train_batch_end", lambda t: shutil.rmtree(t.save_dir) if t.epoch == 1 else None)
    seen = Recorder(bus, "on_checkpoint_failed", "on_model_save")
    result = trainer.fit(batches(1), epochs=3)
    assert result.last is not None
    assert seen.count("on_checkpoint_failed") == 0
    assert torch.load(result.last, weights_only=True)["step"] == 3


def test_what_a_killed_process_left_half_written_is_removed(bus: EventBus, tmp_path: Path) -> None:
    """Else each of them takes as much room as a model, for ever."""
    for name in (".last.pt.4711.tmp", ".best.pt.4711.tmp", "notes.tmp"):
        (tmp_path / name).write_bytes(b"half")
    make_trainer(bus, save_dir=tmp_path).fit(batches(1), epochs=1)
    assert sorted(os.listdir(tmp_path)) == ["best.pt", "last.pt", "notes.tmp"]


def test_the_best_is_on_disk_before_the_last(bus: EventBus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed in between, the run would go on from a last.pt that says of a best epoch that has no file."""
    replaced: list[str] = []
    original = os.replace
    monkeypatch.setattr(
        "os.replace", lambda source, target: (replaced.append(os.path.basename(target)), original(source, target))
    )
    seen = Recorder(bus, "on_model_save")
    make_trainer(bus, save_dir=tmp_path).fit(batches(1), epochs=1)
    assert replaced == ["best.pt", "last.pt"]
    assert [os.path.basename(event.path) for event in seen.events] == ["last.pt", "best.pt"]


def test_I7_every_end_leaves_the_same_artefacts(bus: EventBus, tmp_path: Path) -> None:
    """After the same batch, whoever ends it: on_train_end, the same last.pt, the best.pt of before, nothing half."""
    ways: dict[str, Any] = {
        "hook": lambda t: setattr(t, "stop", True),
        "control": lambda t: t.bus.control.stop("enough"),
        "signal": lambda t: os.kill(os.getpid(), signal.SIGUSR1),
        "max_steps": lambda t: None,
    }
    left: list[Any] = []
    for way, act in ways.items():
        directory = tmp_path / way
        trainer = make_trainer(bus, save_dir=directory, signals=("SIGUSR1",), monitor="train/score", mode="max", seed=1)
        trainer.add_callback("on_train_epoch_end", lambda t: t.metrics.update({"train/score": -float(t.epoch)}))
        trainer.add_callback("on_after_backward", lambda t, act=act: act(t) if t.progress.global_batch == 7 else None)
        seen = Recorder(bus, "on_train_end")
        result = trainer.fit(batches(6), batches(1), epochs=3, max_steps=8 if way == "max_steps" else None)
        assert (seen.one("on_train_end").step, result.step) == (8, 8)
        seen.subscription.close()
        assert (result.last, result.best) == (directory / "last.pt", directory / "best.pt")
        last = torch.load(result.last, weights_only=True)
        for name in ("attempt", "max_steps", "metrics"):  # with max_steps there are those of a last validation, too
            del last[name]
        left.append((sorted(os.listdir(directory)), torch.load(result.best, weights_only=True)["step"], str(last)))
    assert left[0][:2] == (["best.pt", "last.pt"], 6)
    assert left == left[:1] * len(ways)
