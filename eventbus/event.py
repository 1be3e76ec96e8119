"""What an event is: an immutable, typed record that knows its hook, and the table of all of them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, dataclass_transform

import msgspec

from eventbus.errors import HookTakenError

_WORD_START = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
#: Stamped by the bus, each with a meaning and a type of its own.
_TAKEN = frozenset({"seq", "time", "run", "rank", "attempt"})
_classes: dict[str, type[Event]] = {}

#: Every known hook and its event class, read-only; a user's own events join it when their class is defined.
EVENTS: Mapping[str, type[Event]] = MappingProxyType(_classes)


class _EventMeta(msgspec.StructMeta):
    """Makes each subclass of `Event` frozen and keyword-only, names its hook and enters it in the table."""

    def __new__(
        mcs,
        name: str,
        bases: tuple[type, ...],
        namespace: dict[str, Any],
        *,
        hook: str | None = None,
        shed: bool | None = None,
        **config: Any,
    ) -> Any:
        config |= {"frozen": True, "kw_only": True}
        if namespace.get("__qualname__") in ("Event", "UnknownEvent") and namespace["__module__"] == __name__:
            return super().__new__(mcs, name, bases, namespace, **config)
        _check_fields(name, namespace.get("__annotations__", {}))
        hook = hook or namespace.pop("hook", None) or "on_" + _WORD_START.sub("_", name).lower()
        namespace["hook"] = hook
        if shed is not None:
            namespace["shed"] = shed
        elif "shed" not in namespace:
            namespace["shed"] = False
        cls = super().__new__(mcs, name, bases, namespace, tag_field="hook", tag=hook, **config)
        _enter(cls, hook)  # type: ignore[arg-type]  # a class made by this metaclass is an Event
        return cls


def _check_fields(name: str, annotations: Mapping[str, Any]) -> None:
    """Refuse a field that would take the place of one that the bus fills in, or of what is the class's own."""
    for field, annotation in annotations.items():
        if field in _TAKEN or (field in ("hook", "shed") and "ClassVar" not in str(annotation)):
            raise TypeError(f"{name}.{field} has the name of something that every event has already. Rename the field.")


def _enter(cls: type[Event], hook: str) -> None:
    taken = _classes.get(hook)
    if taken is not None and (taken.__module__, taken.__qualname__) != (cls.__module__, cls.__qualname__):
        raise HookTakenError(hook, taken, cls)
    _classes[hook] = cls


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(msgspec.field,))
class Event(msgspec.Struct, frozen=True, kw_only=True, metaclass=_EventMeta):
    """The base of every event: an immutable, keyword-only, typed record.

    A subclass gets the hook ``on_`` + its name in snake case (a run of capitals is one word) unless ``hook=`` is
    given, and may be shed under overload only with ``shed=True``: ``class GradSpike(Event, shed=True): norm: float``.
    Running the same definition again replaces it; another class with a taken hook raises `HookTakenError`.
    """

    hook: ClassVar[str] = "*"
    shed: ClassVar[bool] = False

    #: Unique and increasing per bus, given by `EventBus.publish`; 0 = not published yet.
    seq: int = 0
    #: Unix time in seconds at publish; 0.0 = not published yet.
    time: float = 0.0
    #: The run this belongs to; None = take it from the bus.
    run: str | None = None
    #: The process of a distributed run; None = take it from the bus.
    rank: int | None = None
    #: How often this run was resumed or restarted before.
    attempt: int = 0


class UnknownEvent(Event):
    """An event whose type is not defined here, as `decode` returns it; it encodes unchanged."""

    hook: str = "*"  # type: ignore[misc]  # the one event whose hook is data, not its class
    fields: Mapping[str, Any] = {}
