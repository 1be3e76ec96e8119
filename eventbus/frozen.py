"""Read-only containers, and how any value becomes one."""

from __future__ import annotations

import enum
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import msgspec

from eventbus.device import Copies, Deferred

if TYPE_CHECKING:
    from eventbus.event import Event

__all__ = [
    "NUMBERS",
    "PLAIN",
    "DeviceDict",
    "FrozenDict",
    "device_class",
    "freeze",
    "known",
    "plain_key",
    "resolve",
    "waits",
    "weigh",
]

E = TypeVar("E", bound="Event")

#: Exact types that nobody can change.
PLAIN = frozenset({float, int, str, bool, type(None)})
#: Those of them that hold no text.
NUMBERS = PLAIN - {str}
#: Modules whose classes nobody can change; told by name, so that none of them is imported for it.
_IMMUTABLE_MODULES = frozenset({"datetime", "decimal", "fractions", "pathlib", "uuid", "zoneinfo"})
_DEEPEST = 16


class FrozenDict(dict[Any, Any]):
    """A dict that cannot be changed; it pickles, encodes and compares as a dict. Change a copy: ``dict(frozen)``."""

    __slots__ = ()

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise TypeError("An event is read-only, since every subscriber shares it; change a copy: dict(event.metrics).")

    __setitem__ = __delitem__ = __ior__ = update = setdefault = pop = popitem = clear = _refuse

    def __reduce__(self) -> tuple[type[FrozenDict], tuple[dict[Any, Any]]]:
        return FrozenDict, (dict(self),)

    def __copy__(self) -> FrozenDict:
        return self

    def __deepcopy__(self, memo: object) -> FrozenDict:
        return self


class DeviceDict(FrozenDict):
    """What an inline hook gets while numbers are on a GPU: reading a key waits for that number, and only that does."""

    __slots__ = ()

    def __getitem__(self, key: Any) -> Any:
        return resolve(super().__getitem__(key))

    def get(self, key: Any, default: Any = None) -> Any:
        return resolve(super().get(key, default))

    def __iter__(self) -> Iterator[Any]:
        return super().__iter__()  # its own, so that dict(), ** and | ask for each value instead of taking them raw

    def items(self) -> Any:
        return _all(self).items()

    def values(self) -> Any:
        return _all(self).values()

    def __eq__(self, other: object) -> bool:
        return _all(self) == other

    def __ne__(self, other: object) -> bool:
        return _all(self) != other

    __hash__ = None  # type: ignore[assignment]

    def __or__(self, other: Any) -> Any:
        return _all(self) | other

    def copy(self) -> dict[Any, Any]:
        return _all(self)

    def __reduce__(self) -> tuple[type[FrozenDict], tuple[dict[Any, Any]]]:
        return FrozenDict, (_all(self),)

    def __repr__(self) -> str:
        return repr(_all(self))


def device_class(cls: type[E], names: Iterable[str]) -> type[E]:
    """`cls` for inline hooks, with numbers of these fields on a GPU: reading one waits for it, nothing else does."""

    def field(name: str) -> property:
        raw = getattr(cls, name)
        return property(lambda event: resolve(raw.__get__(event)))

    def reduced(event: E) -> Any:
        return cls(**{name: getattr(event, name) for name in cls.__struct_fields__}).__reduce__()

    namespace = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__reduce__": reduced}
    namespace |= {name: field(name) for name in names}
    kind: type[E] = type(msgspec.Struct).__new__(  # past the table of events, where it is the same event
        type(cls), cls.__name__, (cls,), namespace, frozen=True, kw_only=True, tag_field="hook", tag=cls.hook
    )
    return kind


def _all(mapping: DeviceDict) -> dict[Any, Any]:
    return {key: mapping[key] for key in mapping}


def freeze(value: Any, copies: Copies, depth: int = 0) -> Any:
    """The state of `value` now, read-only: containers rebuilt, one-element tensors and arrays as Python numbers.

    A CUDA number becomes a `Deferred` in `copies`. Larger tensors and foreign objects become a text naming their
    type, and are not held. So does what raises when it is read: a tensor inside of a transform, a GPU after an error.
    """
    kind = type(value)
    if kind in PLAIN:
        return value
    try:
        if isinstance(value, bytes | enum.Enum) or _is_immutable(kind):
            return value
        if depth >= _DEEPEST:
            return f"<{_type_name(value)}: nested deeper than {_DEEPEST}>"
        number = _number(value, copies)
        return _container(value, copies, depth + 1) if number is None else number
    except Exception as error:  # noqa: BLE001  # whatever a foreign object raises
        return f"<{_type_name(value)}: {type(error).__name__}>"


def _is_immutable(kind: type) -> bool:
    return any(base.__module__.partition(".")[0] in _IMMUTABLE_MODULES for base in kind.__mro__)


def _container(value: Any, copies: Copies, depth: int) -> Any:
    if isinstance(value, Mapping):
        return FrozenDict({plain_key(key): freeze(item, copies, depth) for key, item in value.items()})
    if isinstance(value, Sequence | AbstractSet) and not isinstance(value, str | bytes | memoryview | range):
        if isinstance(value, bytearray):
            return bytes(value)
        return tuple(freeze(item, copies, depth) for item in value)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, range):
        return tuple(value) if len(value) <= 1024 else repr(value)
    if isinstance(value, bool | int | float):
        return float(value) if isinstance(value, float) else int(value)
    if isinstance(value, msgspec.Struct):
        return FrozenDict({f: freeze(getattr(value, f), copies, depth) for f in value.__struct_fields__})
    if is_dataclass(value) and not isinstance(value, type):
        return FrozenDict({f.name: freeze(getattr(value, f.name), copies, depth) for f in fields(value)})
    return f"<{_type_name(value)}>"


def plain_key(key: Any) -> Any:
    """A key that holds nothing foreign."""
    return key if type(key) in PLAIN else str(key) if isinstance(key, str | int | float) else f"<{_type_name(key)}>"


def _number(value: Any, copies: Copies) -> Any:
    """A tensor or array of one element as a number, a larger one as a text; None when it is neither."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        if value.numel() != 1 or value.is_meta:
            return f"<{_type_name(value)} {str(value.dtype).removeprefix('torch.')}{list(value.shape)}>"
        return copies.add(value) if value.is_cuda else value.item()
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray | numpy.generic):
        if value.size != 1:
            return f"<{_type_name(value)} {value.dtype}{list(value.shape)}>"
        item = value.item()
        return item if type(item) in PLAIN else str(item)
    return None


def _type_name(value: object) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def resolve(value: Any) -> Any:
    """The value with every `Deferred` in it read."""
    if isinstance(value, Deferred):
        return value.value()
    if isinstance(value, dict) and waits(value):
        return FrozenDict({key: resolve(item) for key, item in dict.items(value)})
    if isinstance(value, tuple) and waits(value):
        return tuple(resolve(item) for item in value)
    return value


def known(value: Any) -> Any:
    """The value with every `Deferred` in it that was not read yet as NaN."""
    if isinstance(value, Deferred):
        return value.known()
    if isinstance(value, dict) and waits(value):
        return FrozenDict({key: known(item) for key, item in dict.items(value)})
    if isinstance(value, tuple) and waits(value):
        return tuple(known(item) for item in value)
    return value


def waits(value: Any) -> bool:
    """Whether there is a `Deferred` in it."""
    if isinstance(value, dict):
        return any(waits(item) for item in dict.values(value))
    return isinstance(value, Deferred) or (isinstance(value, tuple) and any(waits(item) for item in value))


def weigh(value: Any) -> int:
    """About how many bytes a frozen value holds."""
    if isinstance(value, str | bytes):
        return 60 + len(value)
    if isinstance(value, Mapping):
        return 100 + sum(60 + weigh(key) + weigh(item) for key, item in value.items())
    if isinstance(value, tuple):
        return 60 + sum(8 + weigh(item) for item in value)
    return 32
