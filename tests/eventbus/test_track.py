"""`track`: the events of a loop of one's own, whichever way it is left."""

# ruff: noqa: PT012  # the block that raises is the loop under test

from __future__ import annotations

import logging
import math
import os
import pickle
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from eventbus import Event, EventBus, EventBusError, track
from eventbus.fitness import Fitness, Means, number, qualified
from eventbus.lifecycle import Plan
from eventbus.progress import Progress
from tests.eventbus.scripts import run as run_script

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

BEGIN = ["on_pretrain_routine_start", "on_pretrain_routine_end", "on_train_start"]
BATCH = ["on_train_batch_start", "on_train_batch_end"]
VAL = ["on_val_start", "on_val_end"]
END = ["on_train_end", "teardown"]
EPOCH_END = ["on_train_epoch_end", "on_fit_epoch_end"]


class Optimizer:
    def __init__(self, *rates: float) -> None:
        self.param_groups: list[dict[str, Any]] = [{"lr": rate} for rate in rates]


class Seen(list[Any]):
    @property
    def hooks(self) -> list[str]:
        return [event.hook for event in self]

    def of(self, hook: str) -> list[Any]:
        return [event for event in self if event.hook == hook]


@pytest.fixture
def bus() -> Iterator[EventBus]:
    bus = EventBus(run="test")
    yield bus
    bus.close()


@pytest.fixture
def seen(bus: EventBus) -> Seen:
    seen = Seen()
    bus.subscribe(seen.append)
    return seen


def test_the_example_of_the_readme(bus: EventBus, seen: Seen, tmp_path: Path) -> None:
    """Two epochs with logs, validation and a checkpoint: the loop of `eventbus.events`, in its order."""
    best = tmp_path / "best.pt"
    best.write_bytes(b"12345")
    with track(bus, epochs=2, optimizer=Optimizer(0.1), monitor="val/loss", config={"lr": 0.1}) as run:
        for epoch in run.epochs():
            for batch in run.batches([1.0, 2.0]):
                run.log(loss=batch)
            run.validate({"loss": 1.0 - epoch})
            run.saved(best, is_best=True)
            if run.should_stop:
                break
    training = ["on_train_epoch_start", *BATCH, *BATCH, "on_train_epoch_end"]
    epoch_hooks = [*training, *VAL, "on_fit_epoch_end", "on_model_save"]
    assert seen.hooks == [*BEGIN, *epoch_hooks, *epoch_hooks, *END]
    assert seen[0].config == {"lr": 0.1}
    assert [(e.step, e.metrics["loss"], e.lr) for e in seen.of("on_train_batch_end")] == [
        (1, 1.0, (0.1,)), (2, 2.0, (0.1,)), (3, 1.0, (0.1,)), (4, 2.0, (0.1,)),
    ]  # fmt: skip
    ends = seen.of("on_fit_epoch_end")
    assert [(e.epoch, e.metrics, e.fitness, e.monitor) for e in ends] == [
        (0, {"train/loss": 1.5, "val/loss": 1.0}, -1.0, "val/loss"),
        (1, {"train/loss": 1.5, "val/loss": 0.0}, 0.0, "val/loss"),
    ]  # fmt: skip
    save = seen.of("on_model_save")[1]
    assert (save.path, save.is_best, save.bytes, save.value, save.previous_best) == (str(best), True, 5, 0.0, -1.0)
    assert (seen[-2].reason, seen[-2].epoch, seen[-2].step, seen[-2].best_fitness) == ("completed", 1, 4, 0.0)


def test_an_exception_in_a_batch_ends_what_is_open_and_goes_on_unchanged(bus: EventBus, seen: Seen) -> None:
    error = ValueError("mine")
    with pytest.raises(ValueError, match="mine") as caught, track(bus, epochs=2) as run:
        for _ in run.epochs():
            for _ in run.batches([1, 2]):
                run.log(loss=1.0)
                raise error
    assert caught.value is error
    assert not hasattr(error, "__notes__")
    assert seen.hooks == [*BEGIN, "on_train_epoch_start", *BATCH, *EPOCH_END, "on_exception", *END]
    assert (seen.of("on_train_batch_end")[0].status, seen.of("on_train_batch_end")[0].metrics) == ("skipped", {})
    assert (seen[-3].type, seen[-3].phase, seen[-2].reason) == ("ValueError", "train", "failed")
    assert seen.of("on_fit_epoch_end")[0].partial


@pytest.mark.parametrize(
    ("error", "reason"),
    [(KeyboardInterrupt, "interrupted"), (SystemExit, "interrupted"), (RuntimeError, "failed")],
)
def test_what_each_exception_is_called(bus: EventBus, seen: Seen, error: type[BaseException], reason: str) -> None:
    with pytest.raises(error), track(bus) as run:
        for _ in run.batches([1]):
            raise error
    assert seen.hooks.count("on_exception") == 1
    assert [event.reason for event in seen[-2:]] == [reason, reason]


def test_break_out_of_the_batches_ends_batch_and_epoch_as_usual(bus: EventBus, seen: Seen) -> None:
    with track(bus, epochs=2) as run:
        for _ in run.epochs():
            for batch in run.batches([1, 2, 3]):
                run.log(loss=batch)
                if batch == 2:
                    break
    epoch_hooks = ["on_train_epoch_start", *BATCH, *BATCH, *EPOCH_END]
    assert seen.hooks == [*BEGIN, *epoch_hooks, *epoch_hooks, *END]
    assert [(e.status, e.metrics["loss"]) for e in seen.of("on_train_batch_end")] == [("ok", 1.0), ("ok", 2.0)] * 2
    assert [event.partial for event in seen.of("on_fit_epoch_end")] == [True, True]


def test_break_out_of_everything_before_the_plan_is_done_is_a_stop(bus: EventBus, seen: Seen) -> None:
    with track(bus, epochs=5) as run:
        for _ in run.epochs():
            for _ in run.batches([1]):
                break
            break
    assert seen.hooks == [*BEGIN, "on_train_epoch_start", *BATCH, *EPOCH_END, *END]
    assert seen[-1].reason == "stopped"


def test_a_generator_that_trains_and_is_closed_is_a_stop(bus: EventBus, seen: Seen) -> None:
    """Its consumer had enough: no error, but every end."""

    def training() -> Any:
        with track(bus, epochs=5) as run:
            for _ in run.epochs():
                yield from run.batches([1, 2])

    consumer = training()
    next(consumer)
    consumer.close()
    assert seen.hooks == [*BEGIN, "on_train_epoch_start", *BATCH, *EPOCH_END, *END]
    assert (seen[-1].reason, seen.hooks.count("on_exception")) == ("stopped", 0)


def test_an_exception_that_the_loop_catches_is_no_failure(bus: EventBus, seen: Seen) -> None:
    with track(bus, epochs=2) as run:
        for epoch in run.epochs():
            try:
                for _ in run.batches([1, 2]):
                    if epoch == 0:
                        raise MemoryError
            except MemoryError:
                continue
    assert seen[-1].reason == "stopped"
    assert seen.hooks.count("on_train_batch_start") == seen.hooks.count("on_train_batch_end") == 3
    assert seen.hooks.count("on_train_epoch_start") == seen.hooks.count("on_fit_epoch_end") == 2


def test_a_raising_hook_at_the_start_still_gives_the_run_its_end(bus: EventBus, seen: Seen) -> None:
    def fail(event: Event) -> None:
        raise ValueError("hook")

    for hook in ("on_pretrain_routine_start", "on_train_start"):
        subscription = bus.subscribe(fail, hook, on_error="raise")
        with pytest.raises(ValueError, match="hook"), track(bus):
            pass
        subscription.close()
        assert seen.hooks[-3:] == ["on_exception", *END]
    assert bus.control.runs == ()


def test_a_hook_that_fails_while_the_run_ends_does_not_hide_the_error(
    bus: EventBus, seen: Seen, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(event: Event) -> None:
        raise ValueError("hook")

    bus.subscribe(fail, "on_train_epoch_end", on_error="raise")
    with pytest.raises(RuntimeError, match="mine"), caplog.at_level(logging.ERROR), track(bus) as run:
        for _ in run.batches([1]):
            raise RuntimeError("mine")
    assert seen.hooks[-3:] == ["on_exception", *END]
    assert "something failed while it was ending" in caplog.text


def test_stop_ends_the_loops_at_the_next_safe_point(bus: EventBus, seen: Seen) -> None:
    done = []
    with track(bus, epochs=5) as run:
        for epoch in run.epochs():
            for batch in run.batches(range(5)):
                done.append((epoch, batch))
                if (epoch, batch) == (1, 2):
                    run.stop("enough")
                    assert run.should_stop
    assert done == [*((0, batch) for batch in range(5)), (1, 0), (1, 1), (1, 2)]
    assert seen.of("on_control")[0].reason == "enough"
    assert (seen[-2].reason, seen[-2].step) == ("stopped", 8)


def test_max_steps_ends_both_loops(bus: EventBus, seen: Seen) -> None:
    with track(bus, max_steps=5) as run:
        for _ in run.epochs():
            for _ in run.batches([1, 2, 3]):
                pass
            run.validate({"loss": 1.0})
    assert seen.hooks.count("on_train_batch_end") == 5
    assert [event.partial for event in seen.of("on_fit_epoch_end")] == [False, True]
    assert (seen[-2].reason, seen[-2].step) == ("completed", 5)


@pytest.mark.parametrize("loader", [list(range(10)), None])
def test_accumulation_counts_groups_as_steps(bus: EventBus, seen: Seen, loader: Any) -> None:
    """4, 4 and 2 batches are three steps, also when the loader does not know that it ends."""
    with track(bus, epochs=1) as run:
        for _ in run.epochs():
            due = [run.is_update_due for _ in run.batches(loader or iter(range(10)), accumulate=4)]
    assert [index for index, is_due in enumerate(due) if is_due] == ([3, 7, 9] if loader else [3, 7])
    assert (run.step, seen[-2].step) == (3, 3)


def test_batches_without_epochs_are_an_epoch_each(bus: EventBus, seen: Seen) -> None:
    with track(bus, max_steps=4) as run:
        for _ in run.batches([1, 2, 3]):
            pass
        run.validate({"loss": 1.0})
        for _ in run.batches([1, 2, 3]):
            pass
    first = ["on_train_epoch_start", *BATCH, *BATCH, *BATCH, "on_train_epoch_end", *VAL, "on_fit_epoch_end"]
    assert seen.hooks == [*BEGIN, *first, "on_train_epoch_start", *BATCH, *EPOCH_END, *END]
    assert [event.epoch for event in seen.of("on_train_epoch_start")] == [0, 1]


def test_two_loaders_in_one_epoch_are_a_mistake(bus: EventBus) -> None:
    with pytest.raises(RuntimeError, match=r"training part of epoch 0 is over.*itertools\.chain"), track(bus) as run:
        for _ in run.epochs():
            for _ in run.batches([1]):
                pass
            for _ in run.batches([2]):
                pass


def test_resuming_goes_on_counting(bus: EventBus, seen: Seen) -> None:
    with track(bus, epochs=4, start_epoch=2, step=20) as run:
        epochs = list(run.epochs())
        assert run.step == 20
    assert epochs == [2, 3]
    assert (seen.of("on_train_start")[0].start_epoch, seen.of("on_train_start")[0].step) == (2, 20)
    assert seen[-1].reason == "completed"


def test_saved_before_validated_still_follows_the_epoch(bus: EventBus, seen: Seen) -> None:
    with track(bus, epochs=1) as run:
        for _ in run.epochs():
            for _ in run.batches([1]):
                pass
            run.saved("last.pt")
            run.validate({"loss": 1.0})
    assert seen.hooks[-6:] == [*VAL, "on_fit_epoch_end", "on_model_save", *END]
    assert seen.of("on_model_save")[0].bytes is None


def test_saved_in_the_middle_of_the_batches_is_told_at_once(bus: EventBus, seen: Seen) -> None:
    with track(bus, epochs=1) as run:
        for _ in run.epochs():
            for _ in run.batches([1]):
                run.saved("step.pt")
    assert seen.hooks[4:7] == ["on_train_batch_start", "on_model_save", "on_train_batch_end"]


def test_a_file_that_was_saved_is_told_even_when_the_epoch_fails(bus: EventBus, seen: Seen) -> None:
    with pytest.raises(ValueError, match="late"), track(bus, epochs=1) as run:
        for _ in run.epochs():
            for _ in run.batches([1]):
                pass
            run.saved("last.pt")
            raise ValueError("late")
    assert seen.hooks[-5:] == ["on_fit_epoch_end", "on_model_save", "on_exception", *END]


def test_log_outside_of_a_batch_and_of_other_values(bus: EventBus, seen: Seen) -> None:
    with track(bus, epochs=1) as run:
        for _ in run.epochs():
            for _ in run.batches([1]):
                run.log(loss=1, note="first")
                run.log(loss=2)
            run.log(f1=0.5)
    logs = [(event.values, event.step) for event in seen.of("on_log")]
    assert logs == [({"note": "first"}, 0), ({"f1": 0.5}, 1)]
    assert seen.of("on_train_batch_end")[0].metrics == {"loss": 2.0}


def test_averages_every_fifty_steps(bus: EventBus, seen: Seen) -> None:
    with track(bus, epochs=1, optimizer=Optimizer(0.1)) as run:
        for _ in run.epochs():
            for batch in run.batches(range(120)):
                run.log(loss=batch)
    assert [(e.step, e.values) for e in seen.of("on_log")] == [
        (50, {"train/loss": 24.5, "lr/pg0": 0.1}),
        (100, {"train/loss": 74.5, "lr/pg0": 0.1}),
    ]


def test_a_schedule_of_ones_own_is_told_once_per_epoch(bus: EventBus, seen: Seen) -> None:
    optimizer = Optimizer(1.0)
    with track(bus, epochs=2, optimizer=optimizer) as run:
        for _ in run.epochs():
            for _ in run.batches([1, 2]):
                optimizer.param_groups[0]["lr"] *= 0.5
    assert [(e.old, e.new, e.reason) for e in seen.of("on_lr_change")] == [
        ((1.0,), (0.25,), "schedule"), ((0.25,), (0.0625,), "schedule"),
    ]  # fmt: skip


def test_a_monitor_that_no_metric_has(bus: EventBus, seen: Seen, caplog: pytest.LogCaptureFixture) -> None:
    """It fails at the first validated epoch, naming the nearest; a run that never validates says so at its end."""
    with (
        pytest.raises(ValueError, match=r"monitor='val_los' is no metric.*'val/loss'"),
        track(bus, epochs=2, monitor="val_los") as run,
    ):
        for _ in run.epochs():
            run.validate({"loss": 1.0})
    assert seen[-1].reason == "failed"
    assert seen.hooks.count("on_fit_epoch_end") == 1
    with track(bus, epochs=1, monitor="val/loss") as run:
        list(run.epochs())
    assert "never had its monitored metric 'val/loss'" in caplog.text


def test_a_run_that_nobody_would_hear_is_refused() -> None:
    """On a closed bus, and on the copy of one that arrived so, a run would go on without its hooks; it says so."""
    bus = EventBus()
    bus.close()
    for deaf in (bus, pickle.loads(pickle.dumps(bus))):
        with pytest.raises(EventBusError, match=r"This bus is closed .* callbacks included\. Start it"), track(deaf):
            pass
        with deaf, track(deaf, epochs=1) as run:
            assert list(run.epochs()) == [0]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform does not fork")
def test_a_run_in_a_process_that_was_forked_after_its_bus_was_made_is_refused() -> None:
    """As a notebook does that trains in forked processes: the bus of the parent would hear nothing there."""
    done = run_script("""
        import multiprocessing
        bus = EventBus()
        bus.subscribe(print, "on_train_start")

        def train():
            try:
                with track(bus, epochs=1):
                    say("trained in silence")
            except EventBusError as error:
                say(error)
            own = EventBus()
            own.subscribe(lambda event: say(event.hook), "on_train_start")
            with track(own, epochs=1):
                pass

        worker = multiprocessing.get_context("fork").Process(target=train)
        worker.start()
        worker.join(20)
    """)
    assert (done.code, done.err) == (0, "")
    assert done.out == [
        "This bus was made before a fork and is inert in this process. Make an EventBus in the process that uses it.",
        "on_train_start",
    ]


def test_it_works_without_torch_or_numpy() -> None:
    """A service that only tracks needs neither."""
    code = (
        "import sys\n"
        "from eventbus import EventBus, track\n"
        "with track(EventBus(), epochs=1) as run:\n"
        "    for _ in run.epochs():\n"
        "        for _ in run.batches([[1, 2]]): run.log(loss=1)\n"
        "assert not {'torch', 'numpy'} & set(sys.modules)\n"
        "print(run.step)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert (done.stdout, done.stderr) == ("1\n", "")


# ------------------------------------------------------------------------------------------------------- numbers


def test_means_are_weighted_and_skip_what_is_missing() -> None:
    means = Means()
    means.add({"loss": 1.0}, 3)
    means.add({"loss": 5.0, "f1": 0.5}, 1)
    assert means.running() == means.means() == {"loss": 2.0, "f1": 0.5}
    doubled = means.means(lambda sums: {name: (2 * total, weight) for name, (total, weight) in sums.items()})
    assert doubled == {"loss": 4.0, "f1": 1.0}


def test_names_are_qualified_once() -> None:
    assert qualified("val", {"loss": 1, "coco/map": 2}) == {"val/loss": 1, "coco/map": 2}


@pytest.mark.parametrize("value", ["x", None, [1.0]])
def test_what_is_no_number(value: Any) -> None:
    with pytest.raises(TypeError, match="is no number; give a number or a one-element tensor"):
        number(value)


@pytest.mark.parametrize(
    ("metric", "mode", "value", "fitness"),
    [
        ("val/loss", "auto", 2.0, -2.0), ("val/error_rate", "auto", 2.0, -2.0), ("val/rmse", "auto", 2.0, -2.0),
        ("val/accuracy", "auto", 2.0, 2.0), ("val/map50", "auto", 2.0, 2.0), ("val/accuracy", "min", 2.0, -2.0),
        ("val/loss", "max", 2.0, 2.0),
    ],
)  # fmt: skip
def test_lower_is_better_for_losses_and_errors(metric: str, mode: Any, value: float, fitness: float) -> None:
    judge = Fitness(metric, mode)
    judge.judge({metric: value}, validated=True)
    assert judge.current == fitness
    assert judge.value({metric: value}) == value


def test_best_goes_on_after_nan_and_from_a_saved_state() -> None:
    judge = Fitness("val/f1")
    told = []
    for value in (math.nan, 0.5, 0.5, 0.75, math.nan, 0.25):
        judge.judge({"val/f1": value}, validated=True)
        told.append((judge.is_best, judge.best))
    assert told == [(False, None), (True, 0.5), (False, 0.5), (True, 0.75), (False, 0.75), (False, 0.75)]
    resumed, other = Fitness("val/f1"), Fitness("val/loss")
    for one in (resumed, other):
        one.load_state_dict(judge.state_dict())
    assert (resumed.best, other.best) == (0.75, None)


def test_an_event_that_nobody_hears_is_not_even_made() -> None:
    """Once that is known; and whoever subscribes later, or publishes too late, is told as ever."""
    made: list[int] = []

    class Dear(Event):
        def __post_init__(self) -> None:
            made.append(1)

    bus = EventBus(autostart=False)
    run = Progress(bus, Plan())
    for _ in range(3):
        run.publish(Dear)
    assert len(made) == 1
    heard: list[Event] = []
    subscription = bus.subscribe(heard.append, Dear)
    run.publish(Dear)
    assert len(heard) == 1
    subscription.close()
    run.publish(Dear)
    made.clear()
    run.publish(Dear)
    assert made == []
    bus.close()
    run.publish(Dear)
    assert "1 events were published after close" in bus.report()
