"""Prediction: what is yielded, what the hooks see, and an end whichever way the reader leaves."""

from __future__ import annotations

import gc
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.trainer.toys import Recorder, batches, make_trainer
from trainer import Trainer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from eventbus import EventBus

BATCH = ["on_predict_batch_start", "on_predict_postprocess_end", "on_predict_batch_end"]


def test_outputs_are_those_of_the_model(bus: EventBus) -> None:
    seen = Recorder(bus, "on_predict_*")
    trainer, data = make_trainer(bus), batches(2)
    outputs = list(trainer.predict(data))
    assert all(torch.equal(output, trainer.model(x)) for output, (x, _) in zip(outputs, data, strict=True))
    assert not outputs[0].requires_grad
    assert seen.hooks == ["on_predict_start", *BATCH, *BATCH, "on_predict_end"]
    assert [(event.batch, event.batch_size) for event in seen.of("on_predict_batch_end")] == [(0, 4), (1, 4)]
    assert seen.one("on_predict_end").batch == 2


def test_nothing_happens_before_the_first_batch_is_asked_for(bus: EventBus) -> None:
    seen = Recorder(bus)
    trainer = make_trainer(bus)
    outputs = trainer.predict(batches(2))
    assert seen.hooks == []
    del outputs
    assert seen.hooks == []
    assert not trainer.is_busy


def by_break(outputs: Iterator[Any]) -> None:
    for output in outputs:
        assert output.shape == (4, 1)
        assert torch.is_grad_enabled()
        break


def by_closing(outputs: Any) -> None:
    with closing(outputs):
        next(outputs)


def by_dropping(outputs: Iterator[Any]) -> None:
    next(outputs)


def by_garbage_collection(outputs: Iterator[Any]) -> None:
    next(outputs)
    cycle: list[Any] = [outputs]
    cycle.append(cycle)
    gc.disable()
    try:
        del outputs, cycle
    finally:
        gc.enable()


def by_an_exception(outputs: Iterator[Any]) -> None:
    with suppress(LookupError):
        for _ in outputs:
            raise LookupError


def by_throwing(outputs: Any) -> None:
    next(outputs)
    with pytest.raises(LookupError):
        outputs.throw(LookupError)


@pytest.mark.parametrize(
    "leave", [by_break, by_closing, by_dropping, by_garbage_collection, by_an_exception, by_throwing]
)
def test_the_end_is_told_whichever_way_the_reader_leaves(bus: EventBus, leave: Callable[[Any], None]) -> None:
    """`on_predict_end` comes once, with the number of batches that were predicted."""
    seen = Recorder(bus, "on_predict_*")
    trainer = make_trainer(bus)
    leave(trainer.predict(batches(5)))
    gc.collect()
    assert seen.hooks == ["on_predict_start", *BATCH, "on_predict_end"]
    assert seen.one("on_predict_end").batch == 1
    assert (trainer.is_busy, trainer.batch, trainer.results) == (False, None, None)


@pytest.mark.parametrize("place", ["loader", "model", "move"])
def test_a_failure_leaves_no_start_without_its_end(bus: EventBus, place: str) -> None:
    """The exception of the loader, the model or a batch reaches the reader as it is."""

    class Broken:
        shape = (4, 3)

        def to(self, device: Any) -> Any:
            raise LookupError("move")

    def loader() -> Iterator[Any]:
        yield from batches(1)
        if place == "loader":
            raise LookupError("loader")
        yield {"model": "no tensor", "move": Broken()}[place]

    class Fails(Trainer):
        def prediction_step(self, batch: Any) -> Any:
            if batch == "no tensor":
                raise LookupError("model")
            return super().prediction_step(batch)

    seen = Recorder(bus, "on_predict_*")
    trainer = make_trainer(bus, kind=Fails)
    with pytest.raises(LookupError, match=place):
        list(trainer.predict(loader()))
    begun = [] if place == "loader" else ["on_predict_batch_start", "on_predict_batch_end"]
    assert seen.hooks == ["on_predict_start", *BATCH, *begun, "on_predict_end"]
    assert seen.one("on_predict_end").batch == 1
    assert (trainer.is_busy, trainer.batch, trainer.model.training) == (False, None, True)


def test_a_hook_that_raises_when_the_reader_leaves_hides_nothing(bus: EventBus) -> None:
    """The reader's own exception goes on, with a note about the hook."""
    trainer = make_trainer(bus, on_callback_error="raise")
    trainer.add_callback("on_predict_end", lambda t: 1 / 0)
    outputs = trainer.predict(batches(2))
    next(outputs)
    with pytest.raises(LookupError) as caught:
        outputs.throw(LookupError("the reader's"))
    assert "ZeroDivisionError" in caught.value.__notes__[0]
    assert not trainer.is_busy


def test_a_callback_written_for_ultralytics_predictors_runs_unchanged(bus: EventBus) -> None:
    """It reads `predictor.batch` and `predictor.results`, and what it puts into `results` is what the reader gets."""
    seen: list[Any] = []

    def on_predict_postprocess_end(predictor: Any) -> None:
        seen.append((predictor.batch[0].shape, predictor.results.shape))

    def on_predict_batch_end(predictor: Any) -> None:
        images, _ = predictor.batch
        predictor.results = list(zip(predictor.results, images, strict=True))

    def on_predict_end(predictor: Any) -> None:
        seen.append(len(predictor.results))

    trainer = make_trainer(bus)
    for callback in (on_predict_postprocess_end, on_predict_batch_end, on_predict_end):
        trainer.add_callback(callback.__name__, callback)
    (pairs,) = trainer.predict(batches(1))
    assert seen == [((4, 3), (4, 1)), 4]
    assert torch.equal(trainer.model(pairs[0][1]), pairs[0][0])
    assert trainer.results is None


def test_two_predictions_at_once_keep_apart(bus: EventBus) -> None:
    trainer, first, second = make_trainer(bus), batches(2), batches(2, seed=1)
    pairs = list(zip(trainer.predict(first), trainer.predict(second), strict=True))
    assert [torch.equal(a, trainer.model(x)) for (a, _), (x, _) in zip(pairs, first, strict=True)] == [True, True]
    assert [torch.equal(b, trainer.model(x)) for (_, b), (x, _) in zip(pairs, second, strict=True)] == [True, True]
    assert not trainer.is_busy


def test_predicting_in_a_callback_leaves_the_batch_of_the_training_alone(bus: EventBus) -> None:
    trainer = make_trainer(bus)
    kept: list[bool] = []

    def predict(t: Trainer) -> None:
        before = t.batch
        list(t.predict(batches(2, seed=1)))
        kept.append(t.batch is before and t.model.training)

    trainer.add_callback("on_after_backward", predict)
    trainer.fit(batches(2), epochs=1)
    assert kept == [True, True]


def test_a_training_between_two_predicted_batches_keeps_the_bus_open() -> None:
    """A bus of the trainer's own is not closed under the prediction that still goes on."""
    trainer = make_trainer(None)
    ends: list[int] = []
    trainer.add_callback("on_predict_end", lambda t: ends.append(1))
    for _ in trainer.predict(batches(2)):
        trainer.fit(batches(1), epochs=1)
    assert ends == [1]
    trainer.bus.close()
