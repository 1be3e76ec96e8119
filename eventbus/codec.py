"""Events to bytes and back: strict JSON (RFC 8259), or msgpack.

An event is one flat object whose tag is ``"hook"``. Two things differ from what msgspec does by itself: non-finite
floats are the strings ``"NaN"``, ``"Infinity"`` and ``"-Infinity"`` (msgspec writes null, and nobody would see that
the loss diverged), and a value without a JSON form becomes a marker instead of an error (`eventbus.plain`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from math import isfinite
from types import NoneType
from typing import Any, Literal, TypeAlias

import msgspec

from eventbus.errors import DecodeError
from eventbus.events import EVENTS, Event, UnknownEvent

__all__ = ["decode", "decode_unknown", "encode", "pack"]

_Format: TypeAlias = Literal["json", "msgpack"]

_to_json = msgspec.json.Encoder().encode
_to_msgpack = msgspec.msgpack.Encoder().encode
_astuple = msgspec.structs.astuple

_UNTAGGED = frozenset((Event, UnknownEvent))  # the classes whose hook msgspec does not write
_COMMON = Event.__struct_fields__
_SCALARS = frozenset((bool, int, str, NoneType))
_STR = frozenset((str,))
# The strings that stand for a number: a non-finite float in JSON, an integer beyond 64 bit in msgpack.
_NUMBER_AS_TEXT = re.compile(rb'"(?:NaN|-?Infinity)"|\d{19}')


def encode(event: Event, format: _Format = "json") -> bytes:
    """Return `event` as one JSON object (or msgpack map), without a line end. It never raises for what is in it.

    Paths, enums, dates, numpy scalars, small arrays and the like are written in their JSON form; what has none
    becomes the string ``<unencodable KEY: TYPE>``.
    """
    try:
        if format == "json" and type(event) not in _UNTAGGED:
            data = _to_json(event)
            # count, not in: bytes.__contains__ first tries its operand as a number, which costs as much as encoding
            nulls = data.count(b"null")
            if not nulls or nulls == _astuple(event).count(None) or _is_plain(_astuple(event)):
                return data
    except Exception:  # noqa: BLE001  # whatever a value does, its event is written
        pass
    write: Callable[[Any], bytes] = _module(format).encode
    try:
        return _encode_carefully(event, write=write, binary=format == "msgpack")
    except RecursionError:  # called on the last frames of the stack: what needs none is written
        return write({"hook": event.hook, "seq": event.seq})


def pack(event: Event) -> bytes:
    """Return `event` as msgpack, the short way where there is one; for a frozen event, as the bus stamps it."""
    try:
        if type(event) not in _UNTAGGED:
            return _to_msgpack(event)
    except Exception:  # noqa: BLE001  # what msgspec does not know
        pass
    return encode(event, "msgpack")


def _module(format: str) -> Any:
    if format not in ("json", "msgpack"):
        raise ValueError(f"There is no format {format!r}. Use 'json' or 'msgpack'.")
    return getattr(msgspec, format)


def _encode_carefully(event: Event, *, write: Callable[[Any], bytes], binary: bool) -> bytes:
    record = _tagged(event) if type(event) in _UNTAGGED else event
    try:
        data = write(record)  # first: it ends where a container contains itself, and _is_plain would not
        if isinstance(record, dict):
            if binary or _is_plain(record.values()):  # as it was read: msgpack of others may have keys of any type
                return data
        elif _is_plain(_astuple(record)):
            return data
    except Exception:  # noqa: BLE001
        pass
    from eventbus.plain import to_plain  # here: most processes never meet a value that needs it

    plain = to_plain(record, binary=binary)
    if not isinstance(plain, dict):
        raise RecursionError  # the one reason for which the event itself becomes a marker
    return write(plain)


def _is_plain(values: Iterable[Any]) -> bool:
    """Say whether msgspec writes `values` without a loss: finite floats, str keys, no foreign types."""
    groups = [values]
    for group in groups:  # grows while it is read; a recursive function would end before msgspec does
        for value in group:
            kind = type(value)
            if kind in _SCALARS:
                continue
            if kind is float:
                if not isfinite(value):
                    return False
            elif issubclass(kind, dict):
                if not _STR.issuperset(map(type, dict.keys(value))):
                    return False
                groups.append(dict.values(value))
            elif issubclass(kind, (list, tuple)):
                groups.append(value)
            else:
                return False
    return True


def _tagged(event: Event) -> dict[str, Any]:
    """Return the flat object of an event whose class has no tag; what a bus stamped since wins over `fields`."""
    fields = event.fields if isinstance(event, UnknownEvent) else {}
    try:
        record = {"hook": event.hook, **fields} | {"hook": event.hook}
        for name, default in zip(_COMMON, Event.__struct_defaults__, strict=True):
            value = getattr(event, name)
            if value != default and record.get(name) != value:
                record[name] = value
    except Exception:  # noqa: BLE001  # foreign values, even here
        return {"hook": event.hook, "fields": fields, **{name: getattr(event, name) for name in _COMMON}}
    return record


def decode(data: bytes, format: _Format = "json") -> Event:
    """Return the event that `encode` wrote; a type that is not defined here comes back as `UnknownEvent`.

    Fields that this version's class does not have are ignored. Anything else that does not fit raises `DecodeError`.
    An event with a marker where its class wants another type is an `UnknownEvent` too, so nothing of it is lost.
    """
    protocol = _module(format)
    try:
        hook = protocol.decode(data, type=_Tag).hook
        cls = EVENTS.get(hook)
        return _unknown(protocol.decode(data)) if cls is None else _decode_known(data, cls, protocol)
    except DecodeError:
        raise
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise DecodeError(f"These {len(data)} bytes are no {format} event: {error}.") from error


def decode_unknown(data: bytes, format: _Format = "json") -> UnknownEvent:
    """The same without looking at its class."""
    return _unknown(_module(format).decode(data))


class _Tag(msgspec.Struct):
    hook: str


def _decode_known(data: bytes, cls: type[Event], protocol: Any) -> Event:
    read: Callable[..., Event] = protocol.decode
    try:
        try:
            return read(data, type=cls, dec_hook=_from_plain)
        except msgspec.ValidationError:
            if not _NUMBER_AS_TEXT.search(data):
                raise
            return read(data, type=cls, strict=False, dec_hook=_from_plain)
    except (msgspec.ValidationError, NameError, TypeError) as error:  # the latter two: annotations nobody can resolve
        from eventbus.plain import MARKER

        if MARKER.encode() in data:
            return _unknown(protocol.decode(data))
        raise DecodeError(f"{cls.hook} does not fit {cls.__module__}.{cls.__qualname__}: {error}.") from error


def _from_plain(cls: type, value: Any) -> Any:
    from pathlib import PurePath

    if issubclass(cls, PurePath):
        return cls(value)
    if cls is object:  # any value is one
        return value
    raise TypeError(f"{cls.__module__}.{cls.__qualname__} cannot be read from its plain form")


def _unknown(record: dict[str, Any]) -> UnknownEvent:
    hook = record.pop("hook")
    common = {name: record[name] for name, kinds in _COMMON_KINDS.items() if type(record.get(name)) in kinds}
    return UnknownEvent(hook=hook, fields=record, **common)


_COMMON_KINDS: Mapping[str, tuple[type, ...]] = {
    "seq": (int,),
    "time": (float, int),
    "run": (str,),
    "rank": (int,),
    "attempt": (int,),
}
