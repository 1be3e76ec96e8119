"""How long a training lasts, and what it does every so many epochs or steps: exactly as often as `fit` says."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from eventbus import EventBus
from tests.trainer.toys import Recorder, batches, make_trainer

if TYPE_CHECKING:
    from pathlib import Path

BATCHES = 5


@pytest.fixture(autouse=True)
def no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody pulls the plug here."""
    monkeypatch.setattr("os.fsync", lambda descriptor: None)


def planned(
    *, epochs: int | None, max_steps: int | None, every: int | None, accumulate: int
) -> tuple[int, list[int], int]:
    """The steps of the run, those after which something is due, and the epochs begun: what `fit`'s docstring says."""
    per_epoch = -(-BATCHES // accumulate)
    steps = min(limit for limit in (max_steps, epochs and epochs * per_epoch) if limit is not None)
    begun = -(-steps // per_epoch)
    if epochs is None and every is not None:  # in steps
        due = set(range(every, steps, every))
    else:
        due = {epoch * per_epoch for epoch in range(1, begun + 1) if epoch % (every or 1) == 0}
    return steps, sorted({step for step in due if step < steps} | {steps}), begun


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    epochs=st.none() | st.integers(1, 3),
    max_steps=st.none() | st.integers(1, 12),
    validate_every=st.none() | st.integers(1, 4),
    save_every=st.none() | st.integers(1, 4),
    log_every=st.integers(1, 4),
    accumulate=st.integers(1, 3),
    cuts=st.lists(st.integers(0, 3 * BATCHES), max_size=2, unique=True),
)
def test_I1_I2_everything_happens_as_often_as_it_was_asked_for(
    epochs: int | None,
    max_steps: int | None,
    validate_every: int | None,
    save_every: int | None,
    log_every: int,
    accumulate: int,
    cuts: list[int],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """By epochs, by steps and both; when it is stopped in between and resumed, only a checkpoint is added."""
    assume(epochs is not None or max_steps is not None)
    plan: dict[str, Any] = {"epochs": epochs, "max_steps": max_steps}
    every = {"validate_every": validate_every, "save_every": save_every}
    directory = tmp_path_factory.mktemp("run")
    stopped: set[int] = set()
    with EventBus(run="test") as bus:
        seen = Recorder(bus)
        for cut in [*sorted(cuts), None]:
            trainer = make_trainer(bus, save_dir=directory, log_every=log_every, accumulate=accumulate)
            trainer.add_callback(
                "on_train_batch_end",
                lambda t, cut=cut: setattr(t, "stop", True) if t.progress.global_batch == cut else None,
            )
            result = trainer.fit(batches(BATCHES), batches(1), **plan, **every, resume="auto")
            if result.reason == "stopped":
                stopped.add(result.step)
    steps, validations, begun = planned(**plan, every=validate_every, accumulate=accumulate)
    assert (result.reason, result.step) == ("completed", steps)
    assert seen.count("optimizer_step") == steps
    assert [event.step for event in seen.of("on_val_end") if event.metrics] == validations  # none: cut short
    assert [event.step for event in seen.of("on_log")] == list(range(log_every, steps + 1, log_every))
    saved = [event.step for event in seen.of("on_model_save") if os.path.basename(event.path) == "last.pt"]
    due = planned(**plan, every=save_every, accumulate=accumulate)[1]
    assert sorted(set(saved)) == sorted({*due, *stopped})
    ended = [event.epoch for event in seen.of("on_fit_epoch_end") if not event.partial or event.step == steps]
    assert sorted(set(ended)) == list(range(begun))
    if not stopped:
        assert saved == due
        assert ended == list(range(begun))
    trained = [(event.epoch, event.batch) for event in seen.of("on_train_batch_start")]
    assert trained == sorted(set(trained))


@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_after_backward", "optimizer_step", "on_train_batch_end"])
def test_I2_no_batch_follows_a_stop(bus: EventBus, hook: str) -> None:
    """Whatever hook of the batch asks: that batch is the last, and is whole."""
    seen = Recorder(bus)
    trainer = make_trainer(bus)
    trainer.add_callback(hook, lambda t: setattr(t, "stop", t.batch_idx == 2))
    assert trainer.fit(batches(5), epochs=2).step == 3
    assert [seen.count(name) for name in ("on_train_batch_start", "optimizer_step", "on_train_batch_end")] == [3, 3, 3]


@pytest.mark.parametrize("asked", ["stop", "fewer epochs"])
def test_who_ends_the_run_after_its_epoch_gets_a_checkpoint_too(bus: EventBus, tmp_path: Path, asked: str) -> None:
    """It was clear that none was due, then the run was to end all the same: at the next safe point, with one."""
    trainer = make_trainer(bus, save_dir=tmp_path)
    seen = Recorder(bus, "on_model_save")

    def ask(t: Any) -> None:
        if t.epoch == 1:  # best.pt of this epoch, when it was clear already that last.pt is not due
            bus.control.stop("enough") if asked == "stop" else bus.control.set("epochs", 2)

    trainer.add_callback("on_model_save", ask)
    assert trainer.fit(batches(2), epochs=9, save_every=5).epoch == 1
    assert [event.step for event in seen.events if event.path.endswith("last.pt")] == [4]
