"""G15: a mistake raises where it is made, and its message says what to do."""

from __future__ import annotations

import functools
import math
import re
from typing import TYPE_CHECKING, Any

import pytest

from eventbus import (
    EVENTS,
    Event,
    EventBus,
    EventBusError,
    Log,
    NameTakenError,
    SubscriptionError,
    TrainBatchEnd,
    TrainEnd,
    UnknownHookError,
)
from tests.eventbus.samples import Beat, Tick
from tests.eventbus.scripts import run

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def hook(event: Event) -> None: ...


async def notify(event: Event) -> None: ...


class Sink:
    hooks: Sequence[str] = ()
    options: dict[str, Any] = {}

    async def open(self) -> None: ...
    async def write(self, events: Sequence[Event]) -> None: ...
    async def aclose(self) -> None: ...


@pytest.fixture
def bus() -> EventBus:
    return EventBus()


# -------------------------------------------------------------------------------------------------------- hooks


def ways(bus: EventBus) -> dict[str, Callable[[Any], object]]:
    """Every call that names a hook."""
    return {
        "on": bus.on,
        "subscribe": lambda name: bus.subscribe(hook, name),
        "stream": bus.stream,
        "wait_for": bus.wait_for,
    }


@pytest.mark.parametrize("way", ["on", "subscribe", "stream", "wait_for"])
@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("on_train_bach_end", "on_train_batch_end"),
        ("train_batch_end", "on_train_batch_end"),
        ("on_optimizer_stepp", "optimizer_step"),
        ("on_model_saved", "on_model_save"),
        ("on_train_epoch_begin", "on_train_epoch_start"),
        ("!on_lgo", "on_log"),
    ],
)
def test_G15_an_unknown_hook_raises_at_the_call_with_the_nearest_name(bus, way, wrong, right):
    """Nothing is registered, and the message holds what was probably meant."""
    with pytest.raises(UnknownHookError, match=f"no hook {wrong!r}. Did you mean {right!r}") as error:
        ways(bus)[way](wrong)
    assert error.value.nearest == right
    assert isinstance(error.value, ValueError)
    assert bus.describe() == []


@pytest.mark.parametrize(
    ("theirs", "framework", "ours"),
    [
        ("on_batch_end", "Keras", "on_train_batch_end"),
        ("on_epoch_begin", "Keras", "on_train_epoch_start"),
        ("on_epoch_end", "Keras", "on_fit_epoch_end"),
        ("on_train_begin", "Keras", "on_train_start"),
        ("after_train_iter", "mmengine", "on_train_batch_end"),
        ("before_run", "mmengine", "on_pretrain_routine_start"),
        ("on_training_end", "Lightning", "on_train_end"),
        ("on_validation_epoch_end", "Lightning", "on_val_end"),
        ("on_save_checkpoint", "Lightning", "on_model_save"),
        ("on_step_end", "Transformers", "on_train_batch_end"),
        ("on_evaluate", "Transformers", "on_val_end"),
        ("EPOCH_COMPLETED", "Ignite", "on_train_epoch_end"),
        ("batch_start", "Composer", "on_train_batch_start"),
        ("after_batch", "fastai", "on_train_batch_end"),
        ("before_fit", "fastai", "on_train_start"),
    ],
)
def test_G15_the_hooks_of_other_frameworks_are_known(bus, theirs, framework, ours):
    """Who comes from another framework is told what the hook is called here."""
    with pytest.raises(UnknownHookError, match=f"{framework} calls it that; here it is {ours!r}"):
        bus.on(theirs)
    assert ours in EVENTS


def test_G15_every_name_that_is_suggested_exists():
    """No hint leads to another mistake."""
    from eventbus.filters import _ELSEWHERE

    for names in _ELSEWHERE.values():
        assert set(names.values()) <= set(EVENTS)
        assert not set(names) & set(EVENTS)


def test_G15_a_name_like_nothing_else_says_where_to_look(bus):
    """Without a nearest name the message points at the list, and at how to define one's own."""
    with pytest.raises(UnknownHookError, match=r"EVENTS lists the known hooks; subclass eventbus.Event"):
        bus.on("zzz")
    with pytest.raises(UnknownHookError, match=re.escape("no hook 'zzz_*'")):
        bus.on("zzz_*")


@pytest.mark.parametrize("way", ["on", "subscribe", "stream", "wait_for"])
@pytest.mark.parametrize("wrong", [5, None, int, TrainEnd(epoch=0, step=0), ["on_log"], hook])
def test_G15_what_is_no_hook_at_all_raises_too(bus, way, wrong):
    """A number, a class of something else, an event instead of its class, a list; nothing is registered."""
    with pytest.raises(UnknownHookError):
        ways(bus)[way](wrong)
    assert bus.describe() == []


def test_G15_the_decorator_without_its_brackets_is_noticed(bus):
    """`@bus.on` on a function would register nothing and replace it; it raises and shows the right form."""
    with pytest.raises(UnknownHookError, match=re.escape("write @bus.on(")):

        @bus.on
        def forgotten(event: Event) -> None: ...


def test_G15_one_wrong_hook_among_right_ones_registers_none(bus):
    """A subscription is made as a whole, or not at all."""
    with pytest.raises(UnknownHookError):
        bus.subscribe(hook, "on_log", "on_lag")
    assert bus.describe() == []


# ----------------------------------------------------------------------------------------------------- handlers


def no_parameter() -> None: ...
def two_parameters(event: Event, trainer: object) -> None: ...
def keyword_only(*, event: Event) -> None: ...
def required_keyword(event: Event, *, trainer: object) -> None: ...


class Callable0:
    def __call__(self) -> None: ...


@pytest.mark.parametrize(
    "handler",
    [no_parameter, two_parameters, keyword_only, required_keyword, Callable0(), functools.partial(hook, None)],
)
@pytest.mark.parametrize("run_in", [None, "thread"])
def test_G15_a_handler_that_cannot_take_one_event_is_refused(bus, handler, run_in):
    """Its signature is looked at when it is registered, not when the first event comes."""
    with pytest.raises(SubscriptionError, match=r"cannot take one event .*exactly one required parameter"):
        bus.subscribe(handler, "on_log", run_in=run_in)
    assert bus.describe() == []


def variadic(*events: Event) -> None: ...
def with_default(event: Event, trainer: object = None) -> None: ...


class Callable1:
    def __call__(self, event: Event) -> None: ...


@pytest.mark.parametrize(
    "handler",
    [
        variadic,
        with_default,
        Callable1(),
        Callable1().__call__,
        functools.partial(two_parameters, trainer=1),
        [].append,
    ],
)
def test_G15_whatever_can_take_one_event_is_accepted(bus, handler):
    """Defaults, `*args`, callable objects, partials and builtins are fine."""
    bus.subscribe(handler, "on_log")
    bus.publish(Log(step=0))
    assert bus.stats().popitem()[1].delivered == 1


@pytest.mark.parametrize("handler", [None, "notify", 5, Sink()])
def test_G15_what_cannot_be_called_is_refused(bus, handler):
    """With a hint for a sink, which is attached."""
    hint = r"bus\.attach" if isinstance(handler, Sink) else "function of one event"
    with pytest.raises(SubscriptionError, match=f"cannot be called.*{hint}"):
        bus.subscribe(handler, "on_log")


def generator(event: Event) -> Any:
    yield event


async def async_generator(event: Event) -> Any:
    yield event


class CallableGenerator:
    def __call__(self, event: Event) -> Any:
        yield event


@pytest.mark.parametrize("handler", [generator, async_generator, CallableGenerator(), functools.partial(generator)])
def test_G15_a_generator_is_refused(bus, handler):
    """Calling it would run nothing of it."""
    with pytest.raises(SubscriptionError, match=r"is a generator: calling it would run nothing\. Remove its yield"):
        bus.subscribe(handler, "on_log")


def test_G15_run_in_has_to_fit_the_handler(bus):
    """A coroutine function cannot run in a thread, a sink brings its own way, and there is no such place as a GPU."""
    with pytest.raises(
        SubscriptionError, match=r'is a coroutine function; it cannot run in a thread. Remove run_in="th'
    ):
        bus.subscribe(notify, "on_log", run_in="thread")
    with pytest.raises(SubscriptionError, match=r"Subscriber 'Sink' is a sink.*Remove run_in=\"thread\""):
        bus.attach(Sink(), run_in="thread")
    with pytest.raises(SubscriptionError, match="got run_in='gpu'"):
        bus.subscribe(hook, "on_log", run_in="gpu")
    assert bus.describe() == []


@pytest.mark.parametrize("when", [notify, no_parameter, two_parameters, generator])
def test_G15_a_condition_that_cannot_be_asked_is_refused(bus, when):
    """`when` is a plain function of one event: a coroutine would always be true."""
    with pytest.raises(SubscriptionError, match=r"got when=.*a (plain )?function of the event"):
        bus.subscribe(notify, "on_log", when=when)
    with pytest.raises(SubscriptionError, match=r"got when=.*a (plain )?function of the event"):
        bus.stream("on_log", when=when)


# ------------------------------------------------------------------------------------------------------ options


@pytest.mark.parametrize(("wrong", "right"), [("overfow", "overflow"), ("time_out", "timeout"), ("retry", "retries")])
def test_G15_an_unknown_option_raises_with_the_nearest_one(bus, wrong, right):
    """Nothing is ignored in silence."""
    with pytest.raises(SubscriptionError, match=f"unknown option {wrong!r}. Did you mean {right}="):
        bus.subscribe(notify, "on_log", **{wrong: 1})
    with pytest.raises(SubscriptionError, match=f"'Sink' got an unknown option {wrong!r}"):
        bus.attach(Sink(), **{wrong: 1})
    with pytest.raises(SubscriptionError, match=r"unknown option 'zzz'. The options are every, "):
        bus.subscribe(notify, "on_log", zzz=1)
    assert bus.describe() == []


OUT_OF_RANGE = [
    *(("every", value) for value in (0, -1, 1.5, True, "2", None)),
    *(("every_s", value) for value in (0, -1.0, math.inf, math.nan, True, "1")),
    *(("when", value) for value in ("loss", 5, True)),
    *(("once", value) for value in (1, "yes", None)),
    *(("run", value) for value in (5, b"run", ["run"])),
    *(("rank", value) for value in (-1, "none", 1.0, True)),
    *(("name", value) for value in ("", 5, b"name")),
    *(("priority", value) for value in (1.5, "high", None, True)),
    *(("run_in", value) for value in ("loop", True, 1)),
    *(("timeout", value) for value in (0, -1, math.inf, math.nan, "10", True)),
    *(("maxsize", value) for value in (0, -1, 10.0, None, True)),
    *(("max_bytes", value) for value in (0, -1, 1e6, None)),
    *(("overflow", value) for value in ("sideways", None, True)),
    *(("block_timeout", value) for value in (0, -1, math.inf, None)),
    *(("retries", value) for value in (-1, 1.5, None, True)),
    *(("on_error", value) for value in ("ignore", None, True)),
]


@pytest.mark.parametrize(("option", "value"), OUT_OF_RANGE)
def test_G15_an_option_out_of_its_range_is_refused(bus, option, value):
    """With the value and the rule in the message; for functions, sinks and objects alike."""
    rule = rf"got {option}={re.escape(repr(value))}. {option} is "
    with pytest.raises(SubscriptionError, match=rule):
        bus.subscribe(notify, "on_log", **{option: value})
    with pytest.raises(SubscriptionError, match=rule):
        bus.attach(Sink(), **{option: value})

    class Callbacks:
        async def on_log(self, event: Log) -> None: ...

    with pytest.raises(SubscriptionError, match=rule):
        bus.attach(Callbacks(), **{option: value})
    assert bus.describe() == []


@pytest.mark.parametrize(
    "options",
    [{"maxsize": 0}, {"overflow": "sideways"}, {"run": 5}, {"when": 5}],
    ids=lambda options: next(iter(options)),
)
def test_G15_an_option_of_a_stream_is_checked_at_the_call(bus, options):
    """Not only once the stream is opened."""
    with pytest.raises(SubscriptionError, match=f"got {next(iter(options))}="):
        bus.stream("on_log", **options)


@pytest.mark.parametrize(
    "options",
    [
        {"timeout": 1.0}, {"maxsize": 10}, {"max_bytes": 1000}, {"overflow": "latest"}, {"block_timeout": 1.0},
        {"retries": 1},
    ],
    ids=lambda options: next(iter(options)),
)  # fmt: skip
def test_G15_what_only_a_queue_can_do_is_refused_for_an_inline_def(bus, options):
    """It would be without any effect there; the message names both ways to get a queue."""
    option = next(iter(options))
    with pytest.raises(
        SubscriptionError,
        match=rf'runs inline, so {option}= means nothing to it. Make it an async def, or add run_in="th',
    ):
        bus.subscribe(hook, "on_log", **options)
    bus.subscribe(hook, "on_log", run_in="thread", **options)
    bus.subscribe(notify, "on_log", **options)


@pytest.mark.parametrize(
    "options",
    [
        {"exit_timeout": -1.0}, {"exit_timeout": math.nan}, {"exit_timeout": math.inf}, {"exit_timeout": "10"},
        {"rank": -1}, {"rank": "0"}, {"rank": True}, {"run": 5}, {"run": ""},
        {"redact": "token"}, {"redact": ("(",)}, {"redact": (5,)},
    ],
    ids=repr,
)  # fmt: skip
def test_G15_an_option_of_the_bus_out_of_its_range_is_refused(options):
    """`EventBus(…)` checks what it is given, with the name of the option in the message."""
    with pytest.raises((TypeError, ValueError), match=next(iter(options))):
        EventBus(**options)


# -------------------------------------------------------------------------------------------- names, twice


def test_G15_an_explicit_name_that_is_taken_is_refused(bus):
    """Until the other one is closed; names that were found are made unique instead."""
    first = bus.subscribe(hook, "on_log", name="mine")
    with pytest.raises(NameTakenError, match="'mine' has the name of another open subscription"):
        bus.subscribe(notify, "on_log", name="mine")
    with pytest.raises(NameTakenError):
        bus.attach(Sink(), name="mine")
    first.close()
    bus.subscribe(notify, "on_log", name="mine")
    bus.attach(Sink())
    bus.attach(Sink())
    assert [info.name for info in bus.describe()] == ["mine", "Sink", "Sink#2"]


def test_G15_the_same_callable_again_is_the_same_subscription(bus):
    """Its hooks are united, and one event still reaches it once."""
    calls: list[str] = []

    def note(event: Event) -> None:
        calls.append(event.hook)

    first = bus.subscribe(note, Beat)
    assert bus.subscribe(note, Beat) is first
    assert bus.subscribe(note, "on_tick", "on_*eat") is first
    bus.publish(Beat())
    bus.publish(Tick())
    assert calls == ["on_beat", "on_tick"]


@pytest.mark.parametrize("options", [{"every": 2}, {"priority": 1}, {"when": hook}, {"once": True}])
def test_G15_the_same_callable_with_other_options_is_refused(bus, options):
    """Which of the two would count is nobody's guess."""
    bus.subscribe(hook, "on_log")
    with pytest.raises(SubscriptionError, match=r"registered already, with other options.*bus\.off"):
        bus.subscribe(hook, "on_train_end", **options)
    assert [info.hooks for info in bus.describe()] == [("on_log",)]


def test_G15_the_same_sink_again_is_the_same_subscription(bus):
    """Unless it is attached with other options."""
    sink = Sink()
    first = bus.attach(sink, maxsize=10)
    assert bus.attach(sink, maxsize=10) is first
    with pytest.raises(SubscriptionError, match="registered already, with other options"):
        bus.attach(sink, maxsize=20)


def test_G15_running_a_notebook_cell_again_replaces_its_function():
    """In `__main__` a function defined again takes the place of the former one, with a notice."""
    done = run("""
        import logging
        logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
        bus = EventBus()
        for cell in "first", "second":
            exec("@bus.on('on_log')\\ndef notify(event): say(" + repr(cell) + ")")
        bus.publish(Log(step=0))
        say([info.name for info in bus.describe()])
    """)
    assert (done.code, done.err) == (0, "")
    assert sorted(done.out) == [
        "Subscriber 'notify' is defined again and replaces the former one.", "['notify']", "second",
    ]  # fmt: skip


def test_G15_removing_what_is_not_there_raises_with_the_nearest_name(bus):
    """`off` with a wrong name does not pretend."""
    bus.subscribe(hook, "on_log", name="webhook")
    with pytest.raises(SubscriptionError, match=r"'webhok' is not subscribed. Did you mean 'webhook'"):
        bus.off("webhok")
    with pytest.raises(SubscriptionError, match=r"'notify' is not subscribed. See describe"):
        bus.off(notify)
    bus.off("webhook")
    assert bus.describe() == []


# ------------------------------------------------------------------------------------------------------ objects


def test_G15_an_object_with_a_misspelt_hook_method_is_refused_as_a_whole(bus):
    """Whatever begins with `on_` is meant as a hook; none of the others is registered either."""

    class Callbacks:
        def on_log(self, event: Log) -> None: ...
        def on_train_bach_end(self, event: TrainBatchEnd) -> None: ...

    with pytest.raises(UnknownHookError, match="Did you mean 'on_train_batch_end'"):
        bus.attach(Callbacks())
    assert bus.describe() == []


def test_G15_an_object_with_a_method_that_does_not_fit_is_refused_as_a_whole(bus):
    """A wrong signature or option in one of its methods leaves nothing half registered."""

    class Callbacks:
        def on_log(self, event: Log) -> None: ...
        def on_train_end(self, event: TrainEnd, trainer: object) -> None: ...
        def optimizer_step(self, event: Event) -> Any:
            yield event

    with pytest.raises(SubscriptionError, match=r"cannot take one event|is a generator"):
        bus.attach(Callbacks())
    assert bus.describe() == []


def test_G15_an_object_without_any_hook_is_refused(bus):
    """With a hint for what it is instead."""
    with pytest.raises(SubscriptionError, match="'object' is no sink and has no method named like a hook"):
        bus.attach(object())
    with pytest.raises(SubscriptionError, match=r"is no sink.*bus\.subscribe"):
        bus.attach(hook)


def test_G15_a_class_in_the_place_of_its_object_is_refused(bus):
    """Its methods would be called without an object."""

    class Callbacks:
        def on_log(self, event: Log) -> None: ...

    for wrong in Callbacks, Sink:
        with pytest.raises(
            SubscriptionError, match=rf"is a class. Attach an object of it: bus\.attach\({wrong.__name__}\("
        ):
            bus.attach(wrong)
    assert bus.describe() == []


def test_G15_an_object_with_a_name_gives_it_to_each_of_its_methods(bus):
    """One name for several subscriptions is no mistake: they are told apart by their hooks."""

    class Callbacks:
        def on_log(self, event: Log) -> None: ...
        async def on_train_end(self, event: TrainEnd) -> None: ...

    assert bus.attach(Callbacks(), name="mine").name == "mine"
    assert [info.name for info in bus.describe()] == ["mine.on_log", "mine.on_train_end"]
    with pytest.raises(NameTakenError, match=r"'mine\.on_log'"):
        bus.attach(Callbacks(), name="mine")


def test_G15_private_and_inherited_methods_of_an_object(bus):
    """What is private is left alone, what is inherited is a hook as well."""

    class Base:
        def on_log(self, event: Log) -> None: ...
        def _on_something_of_its_own(self) -> None: ...

    class Callbacks(Base):
        on_error = None

        def teardown(self, event: Event) -> None: ...

    bus.attach(Callbacks())
    assert {info.hooks for info in bus.describe()} == {("on_log",), ("teardown",)}


# ------------------------------------------------------------------------------------------------------ publish


@pytest.mark.parametrize("thing", [None, "on_log", {"hook": "on_log"}, 5, Log, Event, object()])
@pytest.mark.parametrize("state", ["silent", "heard", "closed"])
def test_G15_publishing_what_is_no_event_raises_in_every_state(bus, thing, state):
    """A name, a dict or an event's class instead of an event, also where nobody would have heard it."""
    if state != "silent":
        bus.subscribe(hook)
    if state == "closed":
        bus.close()
    with pytest.raises(TypeError, match=r"publish takes an eventbus\.Event, not .*Subclass eventbus\.Event"):
        bus.publish(thing)


def test_G15_all_errors_have_one_base():
    """`except EventBusError` catches what the bus raises about its use."""
    for error in SubscriptionError, UnknownHookError, NameTakenError:
        assert issubclass(error, EventBusError)
        assert issubclass(error, ValueError)
