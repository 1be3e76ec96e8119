"""G15: a mistake fails where it is made, with an error that says what happened, to what, and what to do."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from eventbus import EVENTS, Event, EventBus, HookTakenError, SubscriptionError, TrainBatchEnd, UnknownHookError
from tests.eventbus.samples import Tick


def inline(event: Event) -> None: ...


async def coroutine(event: Event) -> None: ...


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("on_train_batch_ends", "on_train_batch_end"),
        ("on_model_saved", "on_model_save"),
        ("train_end", "on_train_end"),
        ("on_trian_start", "on_train_start"),
        ("on_batch_end", "on_train_batch_end"),
        ("on_epoch_begin", "on_train_epoch_start"),
        ("on_epoch_end", "on_fit_epoch_end"),
        ("after_train_iter", "on_train_batch_end"),
        ("on_training_end", "on_train_end"),
        ("on_validation_epoch_end", "on_val_end"),
        ("on_save", "on_model_save"),
        ("EPOCH_COMPLETED", "on_train_epoch_end"),
        ("on_teardown", "teardown"),
    ],
)
def test_G15_an_unknown_hook_raises_at_registration_with_the_nearest_real_name(wrong: str, right: str) -> None:
    bus = EventBus()
    for register in (lambda: bus.subscribe(inline, wrong), lambda: bus.on(wrong)(inline), lambda: bus.wait_for(wrong)):
        with pytest.raises(UnknownHookError, match=f"{wrong}.*{right}"):
            register()
    assert bus.describe() == []


def test_G15_names_of_other_frameworks_say_whose_they_are() -> None:
    with pytest.raises(UnknownHookError, match="Keras calls it that"):
        EventBus().subscribe(inline, "on_epoch_begin")
    with pytest.raises(UnknownHookError, match="mmengine calls it that"):
        EventBus().subscribe(inline, "before_train_iter")


def test_G15_every_name_that_an_error_suggests_exists() -> None:
    from eventbus.filters import _ELSEWHERE

    for names in _ELSEWHERE.values():
        assert set(names.values()) <= set(EVENTS)
        assert not set(names) & set(EVENTS)


@pytest.mark.parametrize("wrong", ["no_such_*", 3, None, int, object()])
def test_G15_what_is_no_hook_at_all_is_refused(wrong: Any) -> None:
    with pytest.raises(UnknownHookError):
        EventBus().subscribe(inline, wrong)


class Handlers:
    def none(self) -> None: ...
    def two(self, a: object, b: object) -> None: ...
    def keyword(self, *, event: object) -> None: ...
    def generator(self, event: object) -> Any:
        yield event

    async def asyncgen(self, event: object) -> Any:
        yield event


@pytest.mark.parametrize("name", ["none", "two", "keyword", "generator", "asyncgen"])
def test_G15_a_handler_that_cannot_take_an_event_is_refused_by_name(name: str) -> None:
    with pytest.raises(SubscriptionError, match=rf"'Handlers\.{name}' (cannot take one event|is a generator)"):
        EventBus().subscribe(getattr(Handlers(), name), Tick)


def test_G15_handlers_of_every_shape_that_can_take_an_event_are_taken() -> None:
    class Callable:
        def __call__(self, event: Event) -> None: ...

    class AsyncCallable:
        async def __call__(self, event: Event) -> None: ...

    def with_default(event: Event, more: int = 1) -> None: ...

    async def partial_of(extra: int, event: Event) -> None: ...

    bus = EventBus()
    handlers = (Callable(), AsyncCallable(), with_default, functools.partial(partial_of, 1), [].append, print)
    kinds = [bus.subscribe(handler, Tick).kind for handler in handlers]
    assert kinds == ["inline", "async", "inline", "async", "inline", "inline"]


def test_G15_what_cannot_be_called_is_refused() -> None:
    with pytest.raises(SubscriptionError, match="cannot be called"):
        EventBus().subscribe("on_train_end", Tick)  # type: ignore[arg-type]


def test_G15_a_coroutine_function_cannot_run_in_a_thread() -> None:
    message = r"'coroutine' is a coroutine function; it cannot run in a thread.*Remove run_in=.*or make it a def"
    with pytest.raises(SubscriptionError, match=message):
        EventBus().subscribe(coroutine, Tick, run_in="thread")


@pytest.mark.parametrize("option", ["timeout", "maxsize", "max_bytes", "overflow", "block_timeout", "retries"])
def test_G15_queue_options_on_an_inline_def_are_an_error(option: str) -> None:
    value: Any = "latest" if option == "overflow" else 5
    with pytest.raises(
        SubscriptionError, match=rf"runs inline, so {option}= means nothing.*async def.*run_in=\"thread\""
    ):
        EventBus().subscribe(inline, Tick, **{option: value})


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [("time_out", "timeout"), ("prio", "priority"), ("max_size", "maxsize"), ("journal", None)],
)
def test_G15_an_unknown_option_is_refused_with_the_nearest_one(wrong: str, hint: str | None) -> None:
    with pytest.raises(SubscriptionError, match=f"unknown option '{wrong}'.*{hint or ''}"):
        EventBus().subscribe(coroutine, Tick, **{wrong: 1})


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("every", 0), ("every", 1.5), ("every", True), ("every_s", 0), ("every_s", -1), ("when", 3), ("once", "yes"),
        ("run", 3), ("rank", "some"), ("rank", -1), ("name", ""), ("priority", "high"), ("run_in", "fork"),
        ("timeout", 0), ("timeout", float("inf")), ("timeout", float("nan")), ("maxsize", 0), ("maxsize", None),
        ("max_bytes", 0), ("overflow", "drop"), ("block_timeout", 0), ("retries", -1), ("durable", 1),
        ("on_error", "ignore"),
    ],
)  # fmt: skip
def test_G15_an_option_out_of_range_is_refused_and_says_what_fits(option: str, value: object) -> None:
    """What comes later (processes) is refused like anything unknown."""
    with pytest.raises(SubscriptionError, match=rf"got {option}=.*{option} is "):
        EventBus().subscribe(coroutine, Tick, **{option: value})


def test_G15_an_attached_object_with_a_misspelt_hook_method_is_refused_whole() -> None:
    class Logger:
        def on_train_end(self, event: Event) -> None: ...
        def on_train_batch_ended(self, event: Event) -> None: ...

    bus = EventBus()
    with pytest.raises(UnknownHookError, match=r"on_train_batch_ended.*on_train_batch_end"):
        bus.attach(Logger())
    assert bus.describe() == []


def test_G15_an_attached_object_hears_through_its_hook_methods() -> None:
    class Logger:
        on_gpu = True  # no method

        def __init__(self) -> None:
            self.got: list[str] = []

        def on_train_batch_end(self, event: TrainBatchEnd) -> None:
            self.got.append(event.hook)

        async def teardown(self, event: Event) -> None: ...

    bus, logger = EventBus(), Logger()
    with bus.attach(logger) as attachment:
        bus.publish(TrainBatchEnd(epoch=0, batch=0, step=1))
        assert {s.kind for s in attachment.subscriptions} == {"inline", "async"}  # type: ignore[union-attr]
    bus.publish(TrainBatchEnd(epoch=0, batch=0, step=1))
    assert logger.got == ["on_train_batch_end"]
    assert bus.describe() == []


def test_G15_an_object_without_hook_methods_is_refused() -> None:
    with pytest.raises(SubscriptionError, match="is no sink and has no method named like a hook"):
        EventBus().attach(object())


def test_G15_publishing_what_is_no_event_raises() -> None:
    with pytest.raises(TypeError, match=r"publish takes an eventbus\.Event, not dict"):
        EventBus().publish({"hook": "on_log"})  # type: ignore[arg-type]


def test_G15_removing_what_is_not_subscribed_gives_the_nearest_name() -> None:
    bus = EventBus()
    bus.subscribe(inline, Tick, name="uploader")
    with pytest.raises(SubscriptionError, match=r"'uploadr' is not subscribed.*'uploader'"):
        bus.off("uploadr")


def test_G15_two_classes_with_one_hook_are_an_error_naming_both() -> None:
    with pytest.raises(HookTakenError, match=r"on_train_end.*\.Mine.*TrainEnd"):

        class Mine(Event, hook="on_train_end"):
            pass


@pytest.mark.parametrize("field", ["seq", "time", "run", "rank", "attempt", "hook", "shed"])
def test_G15_a_field_named_like_one_that_every_event_has_is_refused(field: str) -> None:
    """It would be stamped over, or could not be read back."""
    with pytest.raises(TypeError, match=rf"Clash\.{field} has the name of something .* Rename the field"):
        type(Event)("Clash", (Event,), {"__annotations__": {field: str}, "__module__": __name__, field: "x"})
    assert "on_clash" not in EVENTS


def test_G15_hooks_of_ones_own_follow_the_rule() -> None:
    class GradSpikeHTTP2Seen(Event, shed=True):
        norm: float = 0.0

    class Renamed(Event, hook="on_other_name_of_mine"):
        pass

    assert (GradSpikeHTTP2Seen.hook, GradSpikeHTTP2Seen.shed) == ("on_grad_spike_http2_seen", True)
    assert Renamed.hook == "on_other_name_of_mine"
    with pytest.raises(AttributeError):
        GradSpikeHTTP2Seen(norm=1.0).norm = 2.0  # type: ignore[misc]
    with pytest.raises(TypeError):
        GradSpikeHTTP2Seen(1.0)  # type: ignore[misc]
