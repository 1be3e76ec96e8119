"""An event as it arrives in another process: of its class where that is known there, and read-only as everywhere."""

from __future__ import annotations

from typing import Any

import msgspec

from eventbus.codec import decode
from eventbus.device import Copies, Slots
from eventbus.events import EVENTS, Event, UnknownEvent
from eventbus.frozen import PLAIN, freeze

__all__ = ["arrived"]


def arrived(data: bytes) -> Event:
    """The event that was encoded as msgpack, with tuples and read-only dicts as subscribers of the bus see them."""
    try:
        event = decode(data, "msgpack")
    except Exception:  # noqa: BLE001  # whatever an annotation does, the event arrives
        event = _as_published(data)
    copies = Copies(Slots())
    for name in event.__struct_fields__:
        value = getattr(event, name)
        if type(value) not in PLAIN:
            msgspec.structs.force_setattr(event, name, freeze(value, copies))
    return event


def _as_published(data: bytes) -> Event:
    """The event with fields of other types than its class says: whoever published it was not stopped either."""
    record: dict[str, Any] = msgspec.msgpack.decode(data)
    hook = str(record.pop("hook", "*"))
    cls = EVENTS.get(hook)
    if cls is None:
        return UnknownEvent(hook=hook, fields=record)
    try:
        return cls(**{name: record[name] for name in cls.__struct_fields__ if name in record})
    except Exception:  # noqa: BLE001  # a field is missing, or a __post_init__ objects
        return UnknownEvent(hook=hook, fields=record)
