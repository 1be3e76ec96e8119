"""What a subscriber sees of an event: its state at publish, stamped with number, time, run and rank.

`publish` must copy what the training loop is about to change, and nothing else: the numbers and texts of a frozen
event cannot change. So each event class gets functions of its own, generated once per bus: *capture*, run by the
publisher, copies the containers; *stamp*, run on the bus side, builds the event that subscribers see. Generic code
that looks at every field of every event costs three times as much as all the rest of `publish`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, get_type_hints

from msgspec.structs import replace

from eventbus.device import Copies, Slots
from eventbus.events import Event
from eventbus.frozen import PLAIN, DeviceDict, FrozenDict, freeze, resolve, weigh
from eventbus.redaction import HIDDEN

if TYPE_CHECKING:
    from eventbus.redaction import Redaction

__all__ = ["Awaited", "Snapshot"]

_COMMON = frozenset(Event.__struct_fields__)


class Awaited(tuple[Any, ...]):
    """Captured values of which some are still on their way from a GPU, in `copies`."""

    copies: Copies


class Snapshot:
    """The functions of one event class.

    - ``capture(event)``: the values that have to be copied now, as a tuple (an `Awaited` while some are on a GPU).
    - ``stamp(event, captured, seq, time, run, rank, attempt)``: the event that subscribers see.
    - ``size(event)``: about how many bytes a stamped event holds.
    """

    __slots__ = ("_kept", "_plain", "_redaction", "_slots", "capture", "size", "stamp")

    capture: Callable[[Event], tuple[Any, ...]]
    stamp: Callable[[Event, tuple[Any, ...], int, float, str, int, int], Event]
    size: Callable[[Event], int]

    def __init__(self, cls: type[Event], redaction: Redaction, slots: Slots) -> None:
        self._redaction = redaction
        self._slots = slots
        hints = _hints(cls)
        own = [name for name in cls.__struct_fields__ if name not in _COMMON]
        #: Fields of plain numbers and texts, which cannot change; the others are captured.
        self._plain = [name for name in own if hints[name] in _UNEXPECTED]
        self._kept = [name for name in own if hints[name] not in _UNEXPECTED]
        scope: dict[str, Any] = {
            "FrozenDict": FrozenDict, "HIDDEN": HIDDEN, "PLAIN": PLAIN, "capture_slowly": self._capture_slowly,
            "container": redaction.container, "metrics": redaction.metrics, "replace": replace, "tidy": self._tidy,
            "weigh": weigh,
        }  # fmt: skip
        source = _capture_source(self._kept) + self._stamp_source(hints) + self._size_source(hints)
        exec("\n".join(source), scope)  # noqa: S102  # made of field names only, which are identifiers
        self.capture, self.stamp, self.size = scope["capture"], scope["stamp"], scope["size"]

    def stamp_lazily(self, event: Event, captured: Awaited, *stamp: Any) -> Event:
        """The event for an inline hook while numbers are on a GPU: reading one waits for it, nothing else does."""
        now = tuple(FrozenDict() if isinstance(value, dict) else resolve(value) for value in captured)
        lazy = {n: DeviceDict(v) for n, v in zip(self._kept, captured, strict=True) if isinstance(v, dict)}
        return replace(self.stamp(event, now, *stamp), **lazy)

    def resolve(self, captured: Awaited) -> tuple[Any, ...]:
        """The captured values with every device number read."""
        return tuple(resolve(value) for value in captured)

    def _capture_slowly(self, event: Event) -> tuple[Any, ...]:
        copies = Copies(self._slots)
        captured = tuple(freeze(getattr(event, name), copies) for name in self._kept)
        if not copies:
            return captured
        copies.record()
        awaited = Awaited(captured)
        awaited.copies = copies
        return awaited

    def _tidy(self, event: Event) -> Event:
        """Make the plain fields plain where the publisher put something else, and hide credentials in their URLs."""
        copies = Copies(self._slots)
        frozen = {name: freeze(getattr(event, name), copies) for name in self._plain}
        return replace(event, **{name: self._redaction.container(resolve(value)) for name, value in frozen.items()})

    def _stamp_source(self, hints: dict[str, Any]) -> list[str]:
        unexpected = " or ".join(f"({_UNEXPECTED[hints[name]].format(name)})" for name in self._plain)
        fields = [f"{n}={_cleaner(hints[n])}(captured[{i}])" for i, n in enumerate(self._kept)]
        fields += [f"{n}=HIDDEN" for n in self._plain if hints[n] in (str, str | None) and self._redaction.is_secret(n)]
        return [
            "def stamp(event, captured, seq, time, run, rank, attempt):",
            *(f"    {name} = event.{name}" for name in self._plain),
            f"    if {unexpected or False}:",
            "        event = tidy(event)",
            "    return replace(",
            "        event, seq=seq, time=event.time or time, run=run if event.run is None else event.run,",
            f"        rank=rank if event.rank is None else event.rank, attempt=event.attempt or attempt, {', '.join(fields)}",
            "    )",
        ]

    def _size_source(self, hints: dict[str, Any]) -> list[str]:
        texts = [f"len(event.{name} or '')" for name in self._plain if hints[name] in (str, str | None)]
        kept = [f"100 * len(event.{n})" if hints[n] in _NUMBERS else f"weigh(event.{n})" for n in self._kept]
        return ["def size(event):", f"    return {' + '.join(['400', *texts, *kept])}"]


#: For each annotation of a plain field, when its value is not what was annotated (or is a URL).
_UNEXPECTED: dict[Any, str] = {
    int: "type({0}) is not int",
    bool: "type({0}) is not bool",
    str: "type({0}) is not str or '://' in {0}",
    int | None: "type({0}) is not int and {0} is not None",
    bool | None: "type({0}) is not bool and {0} is not None",
    str | None: "{0} is not None and (type({0}) is not str or '://' in {0})",
}
_METRICS = Mapping[str, float]
_NUMBERS = (_METRICS, tuple[float, ...])


def _cleaner(hint: Any) -> str:
    return "metrics" if hint == _METRICS else "" if hint in (*_NUMBERS, float, float | None) else "container"


def _hints(cls: type[Event]) -> dict[str, Any]:
    try:
        return get_type_hints(cls)
    except NameError:  # a name that only a type checker can see: every field is then captured
        return dict.fromkeys(cls.__struct_fields__, Any)


def _capture_source(kept: list[str]) -> list[str]:
    lines = ["def capture(event):"]
    for index, name in enumerate(kept):
        value = f"v{index}"
        lines += [
            f"    {value} = event.{name}",
            f"    if type({value}) is dict:",
            f"        {value} = {value}.copy()",
            f"        for x in {value}.values():",
            "            if type(x) is not float and type(x) not in PLAIN:",
            "                return capture_slowly(event)",
            f"    elif type({value}) is tuple:",
            f"        for x in {value}:",
            "            if type(x) is not float and type(x) not in PLAIN:",
            "                return capture_slowly(event)",
            f"    elif type({value}) not in PLAIN and type({value}) is not FrozenDict:",
            "        return capture_slowly(event)",
        ]
    return [*lines, f"    return ({''.join(f'v{index}, ' for index in range(len(kept)))})"]
