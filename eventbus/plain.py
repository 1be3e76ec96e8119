"""Any Python value to plain JSON values: str, int, float, bool, None, and list and dict of these.

The slow half of `eventbus.codec`, for what msgspec cannot write or would write with a loss. It runs no code of a
foreign object that it can do without (no ``repr``, no ``str``, no unknown iterator) and never raises: what has no
JSON form becomes a marker that names its key and type, ``<unencodable config.model: torch.nn.Linear>``.
"""

from __future__ import annotations

import base64
import datetime
import enum
import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields as dataclass_fields
from types import NoneType, SimpleNamespace
from typing import Any, TypeAlias

import msgspec

from eventbus.device import Deferred

__all__ = ["MARKER", "to_plain"]

#: How every marker begins.
MARKER = "<unencodable "

_MAX_DEPTH = 100  # containers in containers; far below the interpreter's recursion limit
_MAX_ELEMENTS = 1_000  # a larger array is no metric, and its text would outweigh the rest of the log
_MAX_NAME = 200  # characters of a key or type name in a marker

# Where a value sits: (where its container sits, its key or index); a marker alone turns it into text.
_Place: TypeAlias = "tuple[_Place, str | int] | None"
_MISSING = object()


def to_plain(value: object, *, binary: bool = False) -> Any:
    """Return the plain form of `value`, for JSON, or with ``binary=True`` for msgpack.

    msgpack has non-finite floats and bytes of its own, but no integers beyond 64 bit (they become digits in a str).
    """
    return _Conversion(binary=binary).plain(value, None)


class _Conversion:
    """One conversion; it knows the containers around the current value, so that cycles and depth end."""

    def __init__(self, *, binary: bool) -> None:
        self._binary = binary
        self._around: set[int] = set()

    def plain(self, value: Any, place: _Place) -> Any:
        kind = type(value)
        try:
            if kind in _EXACT:
                return _EXACT[kind](self, value, place)
            for kinds, convert in _RULES:
                if issubclass(kind, kinds):
                    return convert(self, value, place)
            return self._foreign(value, place)
        except Exception:  # noqa: BLE001  # a foreign object may raise anything, and encoding never does
            return _marker(value, place)

    def _same(self, value: Any, place: _Place) -> Any:
        return value

    def _integer(self, value: int, place: _Place) -> int | str:
        number = int.__int__(value)
        if -(2**63) <= number < 2**64:
            return number
        digits = int.__str__(number)  # raises beyond the interpreter's limit of digits
        return digits if self._binary else number

    def _real(self, value: float, place: _Place) -> float | str:
        number = float.__float__(value)
        if self._binary or math.isfinite(number):
            return number
        return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"

    def _string(self, value: str, place: _Place) -> str:
        return _text(value)

    def _bytes(self, value: bytes | bytearray | memoryview, place: _Place) -> bytes | str:
        return bytes(value) if self._binary else base64.b64encode(value).decode()

    def _enum(self, value: enum.Enum, place: _Place) -> Any:
        return self.plain(value.value, place)

    def _path(self, value: os.PathLike[str], place: _Place) -> Any:
        return self.plain(os.fspath(value), place)

    def _mapping(self, value: Mapping[Any, Any], place: _Place) -> Any:
        # dict.items, as msgspec does: an overridden one is foreign code
        return self._entries(value, dict.items(value) if isinstance(value, dict) else value.items(), place)

    def _namespace(self, value: object, place: _Place) -> Any:
        return self._entries(value, vars(value).items(), place)

    def _struct(self, value: msgspec.Struct, place: _Place) -> Any:
        config = value.__struct_config__
        tag = [] if config.tag_field is None else [(config.tag_field, config.tag)]
        names = zip(value.__struct_encode_fields__, value.__struct_fields__, strict=True)
        entries = ((written, getattr(value, name)) for written, name in names)
        return self._entries(value, [*tag, *(entry for entry in entries if entry[1] is not msgspec.UNSET)], place)

    def _record(self, value: object, names: Iterable[str], place: _Place) -> Any:
        entries = ((name, getattr(value, name, _MISSING)) for name in names)
        return self._entries(value, (entry for entry in entries if entry[1] is not _MISSING), place)

    def _entries(self, container: object, entries: Iterable[tuple[Any, Any]], place: _Place) -> Any:
        def convert() -> dict[str, Any]:
            written: dict[str, Any] = {}
            for key, value in entries:
                name = self._key(key, place, number=len(written))
                written[name] = self.plain(value, (place, name))
            return written

        return self._inside(container, place, convert)

    def _items(self, value: Iterable[Any], place: _Place) -> Any:
        def convert() -> list[Any]:
            return [self.plain(item, (place, index)) for index, item in enumerate(value)]

        return self._inside(value, place, convert)

    def _inside(self, container: object, place: _Place, convert: Callable[[], Any]) -> Any:
        if id(container) in self._around:
            return _marker(container, place, " that contains itself")
        if len(self._around) >= _MAX_DEPTH:
            return _marker(container, place, f" nested deeper than {_MAX_DEPTH}")
        self._around.add(id(container))
        try:
            return convert()
        finally:
            self._around.remove(id(container))

    def _key(self, key: Any, place: _Place, *, number: int) -> str:
        if type(key) is str and key.isascii():
            return key
        plain = self.plain(key, (place, f"key {number}"))
        return plain if isinstance(plain, str) else msgspec.json.encode(plain).decode()

    def _time(self, value: datetime.date | datetime.time, place: _Place) -> str:
        if type(value).__module__ == "datetime":
            return _text(msgspec.to_builtins(value))
        kind = next(cls for cls in type(value).__mro__ if cls.__module__ == "datetime")
        return _text(kind.isoformat(value))  # type: ignore[attr-defined]  # a subclass may override it

    def _foreign(self, value: Any, place: _Place) -> Any:
        cls = type(value)
        if cls.__module__ in ("datetime", "decimal", "uuid"):
            return msgspec.to_builtins(value)
        if cls is Deferred:
            return self.plain(value.value(), place)
        if cls.__module__ == "torch" and cls.__name__ in ("device", "dtype"):
            return _text(str(value))
        if cls.__module__ == "argparse" and cls.__name__ == "Namespace":
            return self._namespace(value, place)
        if hasattr(cls, "__dataclass_fields__"):
            return self._record(value, [field.name for field in dataclass_fields(value)], place)
        if hasattr(cls, "__attrs_attrs__"):
            return self._record(value, [field.name for field in cls.__attrs_attrs__], place)
        if all(hasattr(cls, name) for name in ("dtype", "item", "shape", "tolist")):
            return self._array(value, place)
        return _marker(value, place)

    def _array(self, value: Any, place: _Place) -> Any:
        """Numpy, torch and their likes: one element is a number, a few on the CPU a list, more a marker."""
        shape = tuple(int(size) for size in value.shape)
        count = math.prod(shape)
        if count == 1:
            number = value.item()  # waits for the device, if it is on one: here nobody did before
            return self.plain(float(number) if type(number) is type(value) else number, place)
        device = getattr(value, "device", "cpu")
        if count <= _MAX_ELEMENTS and getattr(device, "type", device) == "cpu":
            return self.plain(value.tolist(), place)
        return _marker(value, place, f" of shape {shape}")


_Convert: TypeAlias = Callable[[_Conversion, Any, _Place], Any]

_EXACT: Mapping[type, _Convert] = {
    bool: _Conversion._same,
    NoneType: _Conversion._same,
    str: _Conversion._string,
    float: _Conversion._real,
    int: _Conversion._integer,
    list: _Conversion._items,
    tuple: _Conversion._items,
    dict: _Conversion._mapping,
}
_RULES: Sequence[tuple[tuple[type, ...], _Convert]] = (
    ((enum.Enum,), _Conversion._enum),  # before int and str: an IntEnum is both
    ((str,), _Conversion._string),
    ((float,), _Conversion._real),
    ((int,), _Conversion._integer),
    ((list, tuple, set, frozenset, deque), _Conversion._items),
    ((Mapping,), _Conversion._mapping),
    ((msgspec.Struct,), _Conversion._struct),
    ((bytes, bytearray, memoryview), _Conversion._bytes),
    ((os.PathLike,), _Conversion._path),
    ((datetime.date, datetime.time), _Conversion._time),
    ((SimpleNamespace,), _Conversion._namespace),
)


def _text(value: str) -> str:
    """Return `value` with its lone surrogates, which UTF-8 cannot carry, spelled out: ``\\udcff``."""
    if type(value) is str and value.isascii():
        return value
    return str.encode(value, "utf-8", "backslashreplace").decode()


def _marker(value: object, place: _Place, detail: str = "") -> str:
    return f"{MARKER}{_place_name(place)}: {_type_name(type(value))}{detail}>"


def _place_name(place: _Place) -> str:
    name = ""
    while place is not None and len(name) < _MAX_NAME:
        place, step = place
        link = "" if place is None or isinstance(step, int) else "."
        name = f"{link}{step if isinstance(step, str) else f'[{step}]'}{name}"
    return name if len(name) <= _MAX_NAME else "…" + name[-_MAX_NAME:]


def _type_name(cls: type) -> str:
    try:
        parts = [_text(part) for part in (cls.__module__, cls.__qualname__) if part != "builtins"]
        return ".".join(parts)[:_MAX_NAME]
    except Exception:  # noqa: BLE001  # a metaclass may answer with anything
        return "object"
