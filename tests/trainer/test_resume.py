"""A run that is resumed at any step is, on the CPU and bit for bit, the run that was never interrupted."""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, Dataset

from eventbus import EventBus
from tests.trainer.toys import Lengthless, Recorder, assert_balanced, batches, make_trainer, squared_error
from trainer import Callback, EarlyStopping, ModelCheckpoint, Trainer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SAMPLES, SIZE, BATCHES = 14, 3, 5


class Augmented(Dataset[Any]):
    """Draws from every generator there is, as augmentation does."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        x = torch.full((3,), float(index)) / SAMPLES + 0.1 * torch.randn(3) + random.gauss(0, 0.1)
        return x + numpy.random.normal(0, 0.1), x.sum(dim=0, keepdim=True)


@pytest.fixture(autouse=True)
def no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody pulls the plug here, and waiting for a disk costs more than all the rest."""
    monkeypatch.setattr("os.fsync", lambda descriptor: None)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Dropout(0.4), nn.Linear(6, 1))


SCHEDULERS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "epoch": ("epoch", lambda opt: torch.optim.lr_scheduler.StepLR(opt, 1, 0.7)),
    "step": ("step", lambda opt: torch.optim.lr_scheduler.CosineAnnealingLR(opt, 20)),
    "plateau": ("epoch", lambda opt: torch.optim.lr_scheduler.ReduceLROnPlateau(opt, patience=0, factor=0.5)),
}


class Counting(Callback):
    """A callback with a state: what it has seen of the batches."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Any) -> None:
        self.losses.append(trainer.loss)

    def state_dict(self) -> dict[str, Any]:
        return {"losses": list(self.losses)}

    def load_state_dict(self, state: Any) -> None:
        self.losses = list(state["losses"])


@dataclass(kw_only=True)
class Scenario:
    """A training, and how it is run."""

    directory: Path
    accumulate: int = 1
    schedule: str = "epoch"
    validates: bool = True
    clip_norm: float | None = None
    scaler: bool = False
    ema: float | None = None
    warmup: int = 0
    workers: int = 0
    loader: Callable[[Any], Any] = lambda loader: loader
    fit: dict[str, Any] = field(default_factory=lambda: {"epochs": 3})
    told: list[Any] = field(default_factory=list)

    def loaders(self) -> tuple[Any, Any]:
        data = partial(DataLoader, Augmented(), batch_size=SIZE, num_workers=self.workers)
        return self.loader(data(shuffle=True)), data() if self.validates else None

    def run(self, *hooks: tuple[str, Callable[[Any], Any]], resume: str | None = "auto", **fit: Any) -> Trainer:
        """One attempt; the hooks may end it. Whatever drew random numbers before must not matter."""
        random.seed(), numpy.random.seed(), torch.seed()
        every, scheduler = SCHEDULERS[self.schedule]
        model = net()
        with EventBus(run="resumed") as bus:
            told: list[Any] = []
            bus.subscribe(told.append)
            trainer = Trainer(
                model, squared_error, torch.optim.Adam(model.parameters(), lr=0.05),
                bus=bus, scheduler=scheduler, scheduler_every=every, save_dir=self.directory, seed=3,
                accumulate=self.accumulate, clip_norm=self.clip_norm, log_every=2, callbacks=[Counting()],
                scaler=torch.amp.GradScaler("cpu", growth_interval=2) if self.scaler else None,
                ema=self.ema, warmup=self.warmup, on_callback_error="raise",
            )  # fmt: skip
            for hook, fn in hooks:
                trainer.add_callback(hook, fn)
            with suppress(Crash):
                trainer.fit(*self.loaders(), resume=resume, **(self.fit | fit))
            assert_balanced([event.hook for event in told])
            self.told += told
        return trainer


class Crash(Exception):  # noqa: N818
    pass


def crash(trainer: Any) -> None:
    raise Crash


def at(count: int, act: Callable[[Any], Any]) -> Callable[[Any], None]:
    """Do something once, when so many batches of the run were trained on."""
    return lambda trainer: act(trainer) if trainer.progress.global_batch == count else None


def stop(trainer: Any) -> None:
    trainer.stop = True


def stopping(count: int) -> list[Any]:
    """A stop, by whoever: the batch ends, last.pt is written."""
    return [("on_after_backward", at(count, stop))]


def saving(count: int) -> list[Any]:
    """A checkpoint by request, and later the end of the process."""
    return [
        ("on_train_batch_start", at(count, lambda trainer: trainer.bus.control.save())),
        ("on_after_backward", at(count + 2, crash)),
    ]


def saving_by_hand(count: int) -> list[Any]:
    """A checkpoint by a hook within the end of a batch, and the end of the process right then."""
    return [("on_train_batch_end", at(count, lambda trainer: [trainer.save_model(trainer.last), crash(trainer)]))]


def stopping_in_validation(count: int) -> list[Any]:
    return [("on_val_batch_end", lambda trainer: stop(trainer) if trainer.progress.global_batch >= count else None)]


WAYS = [stopping, saving, saving_by_hand, stopping_in_validation]


def everything(trainer: Trainer) -> dict[str, Any]:
    """What has to be the same, in a form that compares bit for bit."""
    checkpoint = torch.load(trainer.last, weights_only=True)
    for name in ("attempt", "epochs", "max_steps"):
        del checkpoint[name]
    return _plain(checkpoint)


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.tolist()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def epochs_told(scenario: Scenario) -> dict[int, Any]:
    """The metrics of each epoch; of one that was told twice, the last counts."""
    ends = [event for event in scenario.told if event.hook == "on_fit_epoch_end"]
    return {event.epoch: (event.metrics, event.lr, event.step) for event in ends if not event.partial}


def batches_told(scenario: Scenario) -> dict[int, Any]:
    ends = [event for event in scenario.told if event.hook == "on_train_batch_end" and event.status == "ok"]
    return {event.global_batch: (event.epoch, event.batch, event.step, event.metrics, event.lr) for event in ends}


def logs_told(scenario: Scenario) -> dict[int, Any]:
    return {event.step: (event.epoch, event.values) for event in scenario.told if event.hook == "on_log"}


def assert_same(whole: Scenario, pieces: Scenario, one: Trainer, other: Trainer) -> None:
    assert everything(other) == everything(one)
    assert batches_told(pieces) == batches_told(whole)
    assert epochs_told(pieces) == epochs_told(whole)
    assert logs_told(pieces) == logs_told(whole)
    assert other.progress.reason == one.progress.reason == "completed"


ANYWHERE = given(
    cuts=st.lists(st.tuples(st.integers(0, 3 * BATCHES - 1), st.sampled_from(WAYS)), min_size=1, max_size=4),
    accumulate=st.integers(1, 3),
    schedule=st.sampled_from(sorted(SCHEDULERS)),
    loader=st.sampled_from([lambda loader: loader, Lengthless]),
    validates=st.booleans(),
    clip_norm=st.sampled_from([None, 0.5]),
    scaler=st.booleans(),
    ema=st.sampled_from([None, 0.8]),
    warmup=st.sampled_from([0, 4, 12]),
)


def resume_anywhere(cuts: list[Any], tmp_path_factory: pytest.TempPathFactory, **options: Any) -> None:
    """Train once in one piece, and once in pieces."""
    directory = tmp_path_factory.mktemp("runs")
    whole = Scenario(directory=directory / "whole", **options)
    expected = whole.run(resume=None)
    pieces = Scenario(directory=directory / "pieces", **options)
    for count, way in sorted(cuts, key=lambda cut: cut[0]):
        pieces.run(*way(count))
    assert_same(whole, pieces, expected, pieces.run())


@settings(max_examples=12, suppress_health_check=list(HealthCheck))
@ANYWHERE
def test_resumed_anywhere_it_is_the_run_that_was_never_interrupted(
    cuts: list[Any], tmp_path_factory: pytest.TempPathFactory, **options: Any
) -> None:
    """Several times in a row, at any batch, by every way to leave a checkpoint behind."""
    resume_anywhere(cuts, tmp_path_factory, **options)


@pytest.mark.long
@settings(max_examples=300, suppress_health_check=list(HealthCheck))
@ANYWHERE
def test_resumed_anywhere_it_is_the_run_that_was_never_interrupted_at_length(
    cuts: list[Any], tmp_path_factory: pytest.TempPathFactory, **options: Any
) -> None:
    """The same, for much longer."""
    resume_anywhere(cuts, tmp_path_factory, **options)


@pytest.mark.parametrize("count", [1, BATCHES - 1, BATCHES + 2])
def test_with_workers_that_augment(count: int, tmp_path: Path) -> None:
    """Each epoch's workers are seeded as they were, and draw again what they drew."""
    whole = Scenario(directory=tmp_path / "whole", workers=2, fit={"epochs": 2})
    expected = whole.run(resume=None)
    pieces = Scenario(directory=tmp_path / "pieces", workers=2, fit={"epochs": 2})
    pieces.run(*stopping(count))
    assert_same(whole, pieces, expected, pieces.run())


class Plain(Dataset[Any]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        x = torch.full((3,), float(index)) / SAMPLES
        return x, x.sum(dim=0, keepdim=True)


@pytest.mark.parametrize("count", [1, BATCHES - 1, BATCHES + 2])
def test_with_workers_that_outlive_an_epoch(count: int, tmp_path: Path) -> None:
    """Their later epochs draw no seed for them, and neither do those of the resumed run: the order is the same."""

    def loader(_: Any) -> Any:
        return DataLoader(Plain(), batch_size=SIZE, num_workers=1, shuffle=True, persistent_workers=True)

    options: dict[str, Any] = {"loader": loader, "fit": {"epochs": 3}, "validates": False}
    whole = Scenario(directory=tmp_path / "whole", **options)
    expected = whole.run(resume=None)
    pieces = Scenario(directory=tmp_path / "pieces", **options)
    pieces.run(*stopping(count))
    assert_same(whole, pieces, expected, pieces.run())


@pytest.mark.parametrize("count", [2, BATCHES - 1, BATCHES + 2])
def test_a_generator_of_the_loader_goes_on_too(count: int, tmp_path: Path) -> None:
    """It is no global one: its state of the epoch's start, and of now, are in the checkpoint."""

    def loader(_: Any) -> Any:
        return DataLoader(
            Augmented(), batch_size=SIZE, shuffle=True, generator=torch.Generator().manual_seed(11)
        )  # fmt: skip

    whole = Scenario(directory=tmp_path / "whole", loader=loader)
    expected = whole.run(resume=None)
    pieces = Scenario(directory=tmp_path / "pieces", loader=loader)
    pieces.run(*stopping(count))
    assert_same(whole, pieces, expected, pieces.run())


class Stateful:
    """A loader that keeps its own place, as a streaming one does: each batch is made once, in an order of its own."""

    def __init__(self, made: list[tuple[int, int]]) -> None:
        self.epoch = self.position = 0
        self.made = made

    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Any:
        while self.position < BATCHES:
            self.made.append((self.epoch, self.position))
            self.position += 1
            x = torch.full((SIZE, 3), self.epoch + self.position / 10)
            yield x, x.sum(dim=1, keepdim=True)
        self.epoch, self.position = self.epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.position = state["epoch"], state["position"]


@pytest.mark.parametrize("count", [0, 2, BATCHES - 1, BATCHES + 2])
@pytest.mark.parametrize("way", [stopping, stopping_in_validation])
def test_a_loader_that_keeps_its_place_is_not_read_twice(count: int, way: Any, tmp_path: Path) -> None:
    made: list[tuple[int, int]] = []
    whole = Scenario(directory=tmp_path / "whole", loader=lambda _: Stateful([]))
    expected = whole.run(resume=None)
    pieces = Scenario(directory=tmp_path / "pieces", loader=lambda _: Stateful(made))
    pieces.run(*way(count))
    assert_same(whole, pieces, expected, pieces.run())
    assert made == [(epoch, position) for epoch in range(3) for position in range(BATCHES)]


@pytest.mark.parametrize("steps", [1, 3, BATCHES, BATCHES + 1, 2 * BATCHES])
@pytest.mark.parametrize("schedule", sorted(SCHEDULERS))
def test_asked_for_more_steps_it_goes_on_where_max_steps_had_ended_it(
    steps: int, schedule: str, tmp_path: Path
) -> None:
    """That the end was validated, judged and kept changes nothing in what follows."""
    whole = Scenario(directory=tmp_path / "whole", schedule=schedule, fit={"max_steps": 12})
    expected = whole.run(resume=None)
    pieces = Scenario(directory=tmp_path / "pieces", schedule=schedule, fit={"max_steps": 12})
    first = pieces.run(max_steps=steps)
    assert (first.progress.reason, first.step) == ("completed", steps)
    assert first.fitness is not None
    other = pieces.run()
    assert torch.equal(other.model[0].weight, expected.model[0].weight)
    assert batches_told(pieces) == batches_told(whole)
    assert logs_told(pieces) == logs_told(whole)


@pytest.mark.parametrize("count", range(8))
def test_stopped_amid_a_validation_by_steps_it_is_done_again(count: int, tmp_path: Path) -> None:
    """A validation that is due between two batches counts whole or not at all."""
    options: dict[str, Any] = {"fit": {"max_steps": 8, "validate_every": 3, "save_every": 2}, "schedule": "step"}
    whole = Scenario(directory=tmp_path / "whole", **options)
    expected = whole.run(resume=None)
    pieces = Scenario(directory=tmp_path / "pieces", **options)
    pieces.run(*stopping_in_validation(count))
    assert_same(whole, pieces, expected, pieces.run())
    whole_validations = [event.step for event in pieces.told if event.hook == "on_val_end" and event.metrics]
    assert whole_validations == [event.step for event in whole.told if event.hook == "on_val_end"] == [3, 6, 8]


def test_samplers_are_told_the_epoch_in_a_resumed_run_too(bus: EventBus, tmp_path: Path) -> None:
    """The sampler itself, that of a batch sampler, and the batch sampler; each once."""

    class Told(torch.utils.data.Sampler[int]):
        def __init__(self) -> None:
            self.epochs: list[int] = []

        def __len__(self) -> int:
            return SAMPLES

        def __iter__(self) -> Any:
            return iter(range(SAMPLES))

        def set_epoch(self, epoch: int) -> None:
            self.epochs.append(epoch)

    one, other = Told(), Told()
    loader = DataLoader(Plain(), batch_size=SIZE, sampler=one)
    make_trainer(bus, save_dir=tmp_path).fit(loader, epochs=2)
    batch_sampler = torch.utils.data.BatchSampler(other, SIZE, drop_last=False)
    trainer = make_trainer(bus, save_dir=tmp_path)
    trainer.add_callback("on_after_backward", at(2 * BATCHES + 1, stop))
    trainer.fit(DataLoader(Plain(), batch_sampler=batch_sampler), epochs=4, resume="auto")
    make_trainer(bus, save_dir=tmp_path).fit(DataLoader(Plain(), batch_sampler=batch_sampler), epochs=4, resume="auto")
    assert (one.epochs, other.epochs) == ([0, 1], [2, 2, 3])


def test_data_that_ends_before_the_place_is_refused(bus: EventBus, tmp_path: Path) -> None:
    first = make_trainer(bus, save_dir=tmp_path)
    first.add_callback("on_after_backward", at(3, stop))
    first.fit(batches(6), epochs=2)
    with pytest.raises(ValueError, match=r"after batch 4 of epoch 0, but the train_loader now gives only 3"):
        make_trainer(bus, save_dir=tmp_path).fit(batches(3), epochs=2, resume="auto")


def test_with_other_groups_an_open_one_is_left_out(
    bus: EventBus, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Gradients that were divided by another number of batches would weigh wrong."""
    first = make_trainer(bus, save_dir=tmp_path, accumulate=4)
    first.add_callback("on_after_backward", at(1, stop))
    first.fit(batches(8), epochs=1)
    result = make_trainer(bus, save_dir=tmp_path, accumulate=2).fit(batches(8), epochs=1, resume="auto")
    assert (result.reason, result.step) == ("completed", 3)
    assert "within a group of 4 batches, but with accumulate=2" in caplog.text


def test_a_stop_while_it_reads_up_to_its_place_ends_it_there(bus: EventBus, tmp_path: Path) -> None:
    """Nothing was trained, nothing is lost: the checkpoint says the same place again."""
    first = make_trainer(bus, save_dir=tmp_path, accumulate=3)
    first.add_callback("on_after_backward", at(7, stop))
    first.fit(batches(10), epochs=2)
    before = torch.load(tmp_path / "last.pt", weights_only=True)

    class Asking(Lengthless):
        def __iter__(self) -> Any:
            for batch in self.data:
                second.stop = True
                yield batch

    second = make_trainer(bus, save_dir=tmp_path, accumulate=3)
    result = second.fit(Asking(batches(10)), epochs=2, resume="auto")
    assert (result.reason, result.step) == ("stopped", before["step"])
    second.save_model(tmp_path / "again.pt")
    again = torch.load(tmp_path / "again.pt", weights_only=True)
    for checkpoint in (before, again):
        del checkpoint["attempt"], checkpoint["optimizer"]
    assert _plain(again) == _plain(before)


# ----------------------------------------------------------------------------------------------- nothing left to do


def test_a_run_that_is_done_says_so(bus: EventBus, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """I4: it stops at once; asked for more epochs or steps, it goes on."""
    make_trainer(bus, save_dir=tmp_path).fit(batches(3), epochs=2)
    result = make_trainer(bus, save_dir=tmp_path).fit(batches(3), epochs=2, resume="auto")
    assert (result.reason, result.epoch, result.step) == ("completed", None, 6)
    assert result.stop_reason == "nothing was left to train: 2 of 2 epochs are done"
    assert "was resumed and trained nothing: nothing was left to train: 2 of 2 epochs" in caplog.text
    result = make_trainer(bus, save_dir=tmp_path).fit(batches(3), max_steps=6, resume="auto")
    assert (result.reason, result.stop_reason) == ("completed", "nothing was left to train: 6 of 6 steps are done")
    result = make_trainer(bus, save_dir=tmp_path).fit(batches(3), epochs=3, resume="auto")
    assert (result.reason, result.stop_reason, result.step) == ("completed", "", 9)


def test_I4_early_stopping_keeps_its_verdict_unless_more_is_asked_for(
    bus: EventBus, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Stopped early, it stops at once; with more epochs than before it waits anew, and still knows the best."""

    def attempt(**fit: Any) -> tuple[Any, EarlyStopping]:
        stopper = EarlyStopping(patience=2)
        trainer = make_trainer(bus, save_dir=tmp_path, callbacks=[stopper], loss=unchanging)
        return trainer.fit(batches(1), resume="auto", **fit), stopper

    result, _ = attempt(epochs=9)
    assert (result.reason, result.epoch) == ("stopped", 2)
    result, _ = attempt(epochs=9)
    assert (result.reason, result.epoch) == ("stopped", None)
    assert result.stop_reason == "train/loss has not improved on 0.25 for 2 epochs"
    assert "trained nothing: train/loss has not improved on 0.25 for 2 epochs" in caplog.text
    result, stopper = attempt(epochs=20)
    assert (result.reason, result.epoch, stopper.best_value) == ("stopped", 4, 0.25)


def unchanging(model: Any, batch: Any) -> torch.Tensor:
    return squared_error(model, batch) * 0 + 0.25


def test_an_epoch_that_is_cut_short_is_not_judged(bus: EventBus, tmp_path: Path) -> None:
    """I5: neither patience nor the best of a metric of its own is spent on half an epoch; it is judged when whole."""

    def attempt(*hooks: Any) -> tuple[EarlyStopping, ModelCheckpoint]:
        stopper, keeper = EarlyStopping("train/loss", patience=3), ModelCheckpoint(monitor="train/loss")
        trainer = make_trainer(bus, save_dir=tmp_path, callbacks=[stopper, keeper], loss=unchanging)
        for hook, fn in hooks:
            trainer.add_callback(hook, fn)
        trainer.fit(batches(4), epochs=3, resume="auto")
        return stopper, keeper

    stopper, keeper = attempt(*stopping(1))
    assert (stopper.best, keeper.state_dict()["best"]) == (None, None)
    stopper, keeper = attempt()
    assert (stopper.waited, stopper.best_value, keeper.state_dict()["best"]) == (2, 0.25, -0.25)


# ------------------------------------------------------------------------------------------------- what is in a file


def test_a_checkpoint_of_the_first_format_begins_its_epoch_anew(bus: EventBus, tmp_path: Path) -> None:
    make_trainer(bus, save_dir=tmp_path).fit(batches(3), epochs=1)
    checkpoint = torch.load(tmp_path / "last.pt", weights_only=True)
    place = checkpoint.pop("places")[0]
    for name in ("epochs", "max_steps"):
        del checkpoint[name]
    version, internal, gauss = place["rng"]["python"]
    checkpoint |= {"format": 1, "rng": place["rng"] | {"python": (version, tuple(internal.tolist()), gauss)}}
    torch.save(checkpoint, tmp_path / "old.pt")
    result = make_trainer(bus).fit(batches(3), epochs=2, resume=tmp_path / "old.pt")
    assert (result.reason, result.step) == ("completed", 6)


def test_a_file_that_cannot_be_read_is_refused(bus: EventBus, tmp_path: Path) -> None:
    (tmp_path / "last.pt").write_bytes(b"no checkpoint")
    with pytest.raises(ValueError, match=r"last\.pt cannot be read as a checkpoint"):
        make_trainer(bus, save_dir=tmp_path).fit(batches(1), epochs=1, resume="auto")
    torch.save({"format": 99}, tmp_path / "last.pt")
    with pytest.raises(ValueError, match=r"last\.pt has format 99; this version reads those up to 2"):
        make_trainer(bus, save_dir=tmp_path).fit(batches(1), epochs=1, resume="auto")


def test_numpy_numbers_among_the_metrics_do_not_spoil_the_file(bus: EventBus, tmp_path: Path) -> None:
    trainer = make_trainer(bus, save_dir=tmp_path, monitor="val/score", mode="max")
    trainer.add_callback("on_val_end", lambda t: t.metrics.update({"val/score": numpy.float64(0.5)}))
    trainer.add_callback("on_train_batch_end", lambda t: t.metrics.update({"train/mine": numpy.float32(0.25)}))
    trainer.add_callback("on_after_backward", at(2, stop))
    seen = Recorder(bus, "on_checkpoint_failed")
    trainer.fit(batches(2), batches(1), epochs=3)
    assert seen.count("on_checkpoint_failed") == 0
    checkpoint = torch.load(tmp_path / "last.pt", weights_only=True)
    assert (checkpoint["step"], checkpoint["fitness"]["best"]) == (3, 0.5)
    assert checkpoint["places"][0]["metrics"] == {"train/mine": 0.25}


def test_a_state_that_could_not_be_read_again_is_not_written(bus: EventBus, tmp_path: Path) -> None:
    """Better to hear of it at the first epoch than when the run is to be resumed; the file of before is kept."""

    class Odd(Callback):
        is_odd = False

        def state_dict(self) -> dict[str, Any]:
            return {"path": tmp_path if self.is_odd else "plain"}

    odd = Odd()
    trainer = make_trainer(bus, save_dir=tmp_path, callbacks=[odd])
    trainer.fit(batches(1), epochs=1)
    odd.is_odd = True
    seen = Recorder(bus, "on_checkpoint_failed")
    trainer.fit(batches(1), epochs=1)
    assert seen.events[0].error.startswith("TypeError: the state of callback")
    assert "Odd could not be read again: keep it to tensors, numbers, str, list and dict" in seen.events[0].error
    assert torch.load(tmp_path / "last.pt", weights_only=True)["step"] == 1
