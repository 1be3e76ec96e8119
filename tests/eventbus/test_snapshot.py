"""G8: what a subscriber sees is the state at publish, in plain read-only Python, and nothing of it is kept alive."""

from __future__ import annotations

import copy
import datetime
import gc
import pickle
import threading
import weakref
from collections import OrderedDict
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventbus import Event, EventBus, FrozenDict, TrainBatchEnd, TrainEnd, UnknownEvent, decode, encode
from tests.eventbus.samples import Load


def seen(event: Event, *, inline: bool = False) -> Any:
    """The event as a subscriber sees it."""
    bus = EventBus(run="r", redact=())
    got: list[Event] = []
    if inline:
        bus.subscribe(got.append)
    else:

        async def subscriber(event: Event) -> None:
            got.append(event)

        bus.subscribe(subscriber)
    bus.publish(event)
    assert bus.flush()
    bus.close()
    return got[0]


@pytest.mark.parametrize("inline", [True, False])
def test_G8_a_later_change_of_the_publishers_containers_is_not_seen(inline: bool) -> None:
    """The training loop goes on with its dict and list while subscribers read the event."""
    bus = EventBus()
    got: list[Any] = []
    if inline:
        bus.subscribe(got.append)
    else:

        async def later(event: Event) -> None:
            got.append(event)

        bus.subscribe(later)
    metrics, nested = {"loss": 1.0}, {"rates": [0.1, {"deep": [1]}]}
    bus.publish(TrainBatchEnd(epoch=0, batch=0, step=1, metrics=metrics))
    bus.publish(Load(value=nested))
    metrics["loss"] = 2.0
    nested["rates"][1]["deep"].append(2)  # type: ignore[index,call-overload]
    nested["rates"].clear()
    bus.flush()
    bus.close()
    assert got[0].metrics == {"loss": 1.0}
    assert got[1].value == {"rates": (0.1, {"deep": (1,)})}


def test_G8_the_publishers_event_is_not_changed() -> None:
    """Subscribers get a stamped copy."""
    event = TrainBatchEnd(epoch=0, batch=0, step=1, metrics={"loss": 1.0})
    stamped = seen(event)
    assert (event.seq, event.time, event.run, event.rank) == (0, 0.0, None, None)
    assert stamped.seq > 0
    assert stamped.time > 1e9
    assert (stamped.run, stamped.rank) == ("r", 0)


@pytest.mark.parametrize("inline", [True, False])
def test_G8_containers_are_read_only_and_say_so(inline: bool) -> None:
    """Nobody can change what the others see."""
    event = seen(Load(value={"a": [1], "b": {"c": 2}}), inline=inline)
    for change in (
        lambda: event.value.__setitem__("a", 3),
        lambda: event.value["b"].update(c=3),
        lambda: event.value.pop("a"),
        lambda: event.value.clear(),
        lambda: event.value.setdefault("z", 1),
        lambda: event.value.__delitem__("a"),
        lambda: event.value.__ior__({"z": 1}),
        lambda: event.value.popitem(),
    ):
        with pytest.raises(TypeError, match="read-only"):
            change()
    with pytest.raises(AttributeError):
        event.n = 3
    assert event.value == {"a": (1,), "b": {"c": 2}}


def test_G8_a_read_only_dict_pickles_copies_and_encodes_as_a_dict() -> None:
    event = seen(Load(value={"a": [1.5, {"b": None}]}))
    assert pickle.loads(pickle.dumps(event)) == event
    assert copy.deepcopy(event) == event
    assert copy.copy(event.value) == event.value
    assert isinstance(event.value, dict)
    assert decode(encode(event)).value == {"a": [1.5, {"b": None}]}  # type: ignore[attr-defined]
    changed = dict(event.value)
    changed["a"] = 2
    assert changed == {"a": 2}


class Weights:
    """A foreign object that must not be held."""


@pytest.mark.parametrize("where", ["value", "list", "dict"])
def test_G8_foreign_objects_become_a_text_and_are_not_held(where: str) -> None:
    """A queue full of events keeps no model alive."""
    weights = Weights()
    gone = weakref.ref(weights)
    bus = EventBus(autostart=False)

    async def subscriber(event: Event) -> None: ...

    bus.subscribe(subscriber)
    bus.publish(Load(value={"value": weights, "list": [weights], "dict": {"key": weights}}[where]))
    bus.stats()
    del weights
    gc.collect()
    assert gone() is None
    bus.close()


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (OrderedDict(a=1), {"a": 1}),
        (MappingProxyType({"a": [1]}), {"a": (1,)}),
        ({1, 2}, (1, 2)),
        (bytearray(b"x"), b"x"),
        (range(3), (0, 1, 2)),
        (Path("a/b"), Path("a/b")),
        (datetime.date(2026, 1, 2), datetime.date(2026, 1, 2)),
        (Weights(), f"<{__name__}.Weights>"),
        (len, "<builtin_function_or_method>"),
        ({("a", 1): 2}, {"<tuple>": 2}),
    ],
)
def test_G8_other_containers_and_objects_have_a_plain_form(value: object, expected: object) -> None:
    assert seen(Load(value=value)).value == expected


def test_G8_a_container_that_contains_itself_ends() -> None:
    """A cycle is cut, not followed."""
    cycle: list[Any] = []
    cycle.append(cycle)
    assert "nested deeper" in str(seen(Load(value=cycle)).value)


class Hostile(dict[str, int]):
    """A mapping that cannot be read."""

    def items(self) -> Any:
        raise RuntimeError("no")


def test_G8_a_value_that_raises_when_read_does_not_reach_training() -> None:
    assert "RuntimeError" in seen(Load(value=Hostile(a=1))).value


class Unreadable(dict[str, int]):
    """One whose very class cannot be asked for."""

    @property
    def __class__(self) -> Any:
        raise RuntimeError("no")

    def items(self) -> Any:
        raise RuntimeError("no")


@pytest.mark.parametrize("inline", [True, False])
@pytest.mark.parametrize("kind", [Hostile, Unreadable])
def test_G8_a_value_that_raises_when_read_costs_itself_alone(kind: type[Any], inline: bool) -> None:
    """Beside it in a mapping, in a list or in a field, the others arrive, and so does the event."""
    hostile = kind(a=1)
    text = f"<{__name__}.{kind.__name__}: RuntimeError>"
    event = seen(TrainBatchEnd(epoch=0, batch=0, step=1, metrics={"bad": hostile, "loss": 0.5}), inline=inline)
    assert event.metrics == {"bad": text, "loss": 0.5}
    assert seen(Load(value=[hostile, 1, {"a": (hostile, 2)}]), inline=inline).value == (text, 1, {"a": (text, 2)})
    assert seen(TrainEnd(best_fitness=hostile, reason=hostile), inline=inline).reason == text


def test_G8_a_tensor_that_has_no_number_yet_costs_itself_alone() -> None:
    """Inside of a transform, or with fake tensors, a loss cannot be read; publishing it there raises nothing."""
    torch = pytest.importorskip("torch")
    from torch._subclasses.fake_tensor import FakeTensorMode

    events: list[Any] = []

    def squares(x: Any) -> Any:
        loss = (x * x).sum()
        events.append(seen(TrainBatchEnd(epoch=0, batch=0, step=1, metrics={"loss": loss, "lr": 0.1})))
        events.append(seen(TrainEnd(best_fitness=loss)))
        return loss

    torch.func.vmap(squares)(torch.ones(2, 3))
    with FakeTensorMode():
        squares(torch.ones(3))
    assert [event.metrics["lr"] for event in events[::2]] == [0.1, 0.1]
    assert all(str(event.metrics["loss"]).startswith("<torch.") for event in events[::2])
    assert all(str(event.best_fitness).startswith("<torch.") for event in events[1::2])


def test_G8_numpy_scalars_and_one_element_arrays_become_numbers() -> None:
    numpy = pytest.importorskip("numpy")
    event = TrainBatchEnd(
        epoch=0,
        batch=numpy.int64(7),
        step=1,
        metrics={"a": numpy.float32(0.5), "b": numpy.array([3]), "c": numpy.float64(2)},
    )
    got = seen(event)
    assert got.metrics == {"a": 0.5, "b": 3, "c": 2.0}
    assert [type(value) for value in got.metrics.values()] == [float, int, float]
    assert type(got.batch) is int
    assert seen(Load(value=numpy.zeros((2, 3)))).value == "<numpy.ndarray float64[2, 3]>"


def test_G8_tensors_become_numbers_or_a_text_and_keep_no_graph() -> None:
    """A loss that is published keeps neither itself nor what it was computed from."""
    torch = pytest.importorskip("torch")
    weights = torch.ones(3, requires_grad=True)
    loss = (weights * 2).sum()
    gone = weakref.ref(loss)
    bus = EventBus(autostart=False)
    got: list[Any] = []

    async def subscriber(event: Event) -> None:
        got.append(event)

    bus.subscribe(subscriber)
    bus.publish(TrainBatchEnd(epoch=0, batch=0, step=1, metrics={"loss": loss, "grid": torch.zeros(2, 2)}))
    del loss
    bus.stats()
    gc.collect()
    assert gone() is None
    with bus:
        bus.flush()
    assert got[0].metrics["loss"] == 6.0
    assert got[0].metrics["grid"] == "<torch.Tensor float32[2, 2]>"


def test_G8_ten_thousand_events_keep_no_tensor() -> None:
    torch = pytest.importorskip("torch")
    bus = EventBus()
    alive: list[Any] = []

    async def subscriber(event: Event) -> None: ...

    bus.subscribe(subscriber)
    for step in range(10_000):
        loss = torch.tensor(0.5)
        if step % 1000 == 0:
            alive.append(weakref.ref(loss))
        bus.publish(TrainBatchEnd(epoch=0, batch=step, step=step, metrics={"loss": loss}))
    del loss
    bus.flush()
    gc.collect()
    assert [ref() for ref in alive] == [None] * len(alive)
    bus.close()


@pytest.mark.parametrize("shape", ["number", "matrix"])
@pytest.mark.parametrize("container", [dict, FrozenDict])
def test_G8_a_held_loop_keeps_no_tensor(shape: str, container: type[dict[str, Any]]) -> None:
    """Not even the event as published, which waits until the bus side gets to it."""
    torch = pytest.importorskip("torch")
    weights = torch.ones(3, requires_grad=True)
    loss = (weights * 2).sum() if shape == "number" else weights * 2
    gone = weakref.ref(loss)
    held, release = threading.Event(), threading.Event()
    got: list[Any] = []
    bus = EventBus()

    async def hold(event: Event) -> None:
        held.set()
        release.wait(10)

    async def subscriber(event: Event) -> None:
        got.append(event)

    bus.subscribe(hold, Load)
    bus.subscribe(subscriber, TrainBatchEnd)
    bus.publish(Load())
    assert held.wait(5)
    bus.publish(TrainBatchEnd(epoch=0, batch=0, step=1, metrics=container(loss=loss), lr=(loss,)))
    del loss
    gc.collect()
    assert gone() is None
    release.set()
    assert bus.close().ok
    assert got[0].metrics["loss"] == (6.0 if shape == "number" else "<torch.Tensor float32[3]>")


def test_G8_a_read_only_dict_of_ones_own_is_looked_into_as_any_other() -> None:
    """A hook that adds to what it received makes one, and anything may be in it."""
    for inline in (True, False):
        got = seen(Load(value=FrozenDict(a=Weights(), b=FrozenDict(c=[1]))), inline=inline)
        assert got.value == {"a": f"<{__name__}.Weights>", "b": {"c": (1,)}}
        assert type(got.value["b"]) is FrozenDict


def test_G8_nothing_is_copied_when_nobody_listens() -> None:
    """A hook nobody hears costs no conversion."""

    class Counting(dict[str, float]):
        reads = 0

        def items(self) -> Any:
            Counting.reads += 1
            return super().items()

    EventBus().publish(TrainBatchEnd(epoch=0, batch=0, step=1, metrics=Counting(a=1.0)))
    assert Counting.reads == 0


def test_G8_one_conversion_serves_all_subscribers() -> None:
    """Five sinks share one event."""
    bus = EventBus()
    got: list[Event] = []
    for number in range(5):

        async def subscriber(event: Event) -> None:
            got.append(event)

        bus.subscribe(subscriber, name=f"s{number}")
    bus.publish(Load(value=[1]))
    bus.flush()
    bus.close()
    assert len(got) == 5
    assert len({id(event) for event in got}) == 1


def test_G8_an_event_of_an_unknown_type_can_be_published_again() -> None:
    """What another version wrote is passed on by its own hook."""
    bus = EventBus()
    got: list[Any] = []
    bus.subscribe(got.append, "on_*")
    bus.publish(UnknownEvent(hook="on_something_new", fields={"a": [1]}))
    assert got[0].hook == "on_something_new"
    assert got[0].fields == {"a": (1,)}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@given(JSON)
def test_G8_any_json_value_is_seen_as_it_was_and_read_only(value: Any) -> None:
    """Lists become tuples and dicts read-only dicts, all the way down, and nothing else changes."""
    got = seen(Load(value=value), inline=True).value
    assert thawed(got) == value


def thawed(value: Any) -> Any:
    if isinstance(value, dict):
        assert isinstance(value, FrozenDict)
        return {key: thawed(item) for key, item in value.items()}
    assert not isinstance(value, list)
    return [thawed(item) for item in value] if isinstance(value, tuple) else value
