"""What a subscriber sees of an event: its state at publish, stamped with number, time, run and rank.

`publish` must copy what the training loop is about to change, and nothing else: the numbers and texts of a frozen
event cannot change. So each event class gets functions of its own, generated once per bus: *draft*, run by the
publisher, copies the containers; *stamp*, run on the bus side, builds the event that subscribers see. Generic code
that looks at every field of every event costs three times as much as all the rest of `publish`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from time import time
from typing import TYPE_CHECKING, Any, get_type_hints

from msgspec.structs import replace

from eventbus.codec import pack
from eventbus.device import Copies, Slots
from eventbus.entry import Entry
from eventbus.event import Event, UnknownEvent
from eventbus.frozen import NUMBERS, PLAIN, DeviceDict, FrozenDict, device_class, freeze, known, resolve, waits, weigh
from eventbus.redaction import HIDDEN

if TYPE_CHECKING:
    from eventbus.redaction import Redaction

__all__ = ["COPIES", "EVENT", "NOTE", "PLACE", "SEQ", "TIME", "Draft", "Snapshot", "known_draft", "resolve_draft"]

_COMMON = frozenset(Event.__struct_fields__)


#: An event on its way through the log: the event as published, its Unix time, the copies of its numbers that are
#: still on a GPU (or None), a `Note` (or None), its place in the journal (0 = none), the captured values, and last its
#: number. A list, because one C call can then number it and append it to the log.
Draft = list[Any]

EVENT, TIME, COPIES, NOTE, PLACE, CAPTURED, SEQ = 0, 1, 2, 3, 4, 5, -1


class Snapshot:
    """The functions of one event class.

    - ``draft(event)``: the event with what has to be copied now, for the log.
    - ``stamp(draft, run, rank, attempt)``: the event that subscribers see.
    - ``admit(draft, run, rank, attempt)``: the same as the log keeps it, with about how many bytes it holds.
    - ``record(draft, run, rank, attempt)``: the same as msgpack, without its number; for the journal.
    """

    __slots__ = ("_device_class", "_kept", "_plain", "_redaction", "_slots", "admit", "draft", "record", "stamp")

    draft: Callable[[Event], Draft]
    stamp: Callable[[Draft, str, int, int], Event]
    admit: Callable[[Draft, str, int, int], Entry]
    record: Callable[[Draft, str, int, int], bytes]

    def __init__(self, cls: type[Event], redaction: Redaction, slots: Slots) -> None:
        self._redaction = redaction
        self._slots = slots
        self._device_class: type[Event] | None = None
        hints = _hints(cls)
        own = [name for name in cls.__struct_fields__ if name not in _COMMON]
        #: Fields of plain numbers and texts, which cannot change; the others are captured.
        self._plain = [name for name in own if hints[name] in _UNEXPECTED]
        self._kept = [name for name in own if hints[name] not in _UNEXPECTED]
        scope: dict[str, Any] = {
            "Entry": Entry, "FrozenDict": FrozenDict, "HIDDEN": HIDDEN, "KIND": cls, "PLAIN": PLAIN, "SHED": cls.shed,
            "clean": redaction.container, "draft_slowly": self._draft_slowly, "harmless": redaction.harmless,
            "hide": redaction.hide, "NUMBERS": NUMBERS, "pack": pack,
            "replace": replace, "tidy": self._tidy, "time": time, "weigh": weigh, "weigh_plain": self._weigh_plain,
        }  # fmt: skip
        kind = "stamped.hook" if cls is UnknownEvent else "KIND"
        source = _draft_source(self._kept, hints) + self._stamp_source(hints) + self._admit_source(hints, kind)
        source += self._record_source(hints)
        # Compiled first: to run a text makes CPython forget, at exit, that the script ended by Ctrl-C (its exit code).
        code = compile("\n".join(source), f"<snapshot of {cls.__qualname__}>", "exec")
        exec(code, scope)  # noqa: S102  # made of field names only, which are identifiers
        self.draft, self.stamp, self.admit, self.record = (scope[f] for f in ("draft", "stamp", "admit", "record"))

    def stamp_lazily(self, draft: Draft, run: str, rank: int, attempt: int) -> Event:
        """The event for an inline hook while numbers are on a GPU: reading one waits for it, nothing else does."""
        event = self.stamp(draft, run, rank, attempt)
        waiting = {name: value for name in self._kept if waits(value := getattr(event, name))}
        containers = {name: DeviceDict(value) for name, value in waiting.items() if isinstance(value, dict)}
        if len(containers) == len(waiting):
            return replace(event, **containers)
        if self._device_class is None:
            self._device_class = device_class(type(event), self._kept)
        return self._device_class(**{f: getattr(event, f) for f in event.__struct_fields__} | containers)

    def _draft_slowly(self, event: Event) -> Draft:
        copies = Copies(self._slots)
        captured = [freeze(getattr(event, name), copies) for name in self._kept]
        if copies:
            copies.record()
        bare = replace(event, **dict.fromkeys(self._kept))  # while it waits in the log it holds no tensor, no graph
        return [bare, time(), copies if copies else None, None, 0, *captured]

    def _tidy(self, event: Event) -> Event:
        """Make the plain fields plain where the publisher put something else, and hide credentials in their URLs."""
        copies = Copies(self._slots)
        frozen = {name: freeze(getattr(event, name), copies) for name in self._plain}
        return replace(event, **{name: self._redaction.container(resolve(value)) for name, value in frozen.items()})

    def _weigh_plain(self, event: Event) -> int:
        return sum(weigh(getattr(event, name)) for name in self._plain)

    def _stamp_source(self, hints: dict[str, Any]) -> list[str]:
        fields = [f"{name}={self._cleaned(hints, i)}" for i, name in enumerate(self._kept)]
        return [
            "def stamp(draft, run, rank, attempt):",
            "    event = draft[0]",
            f"    if {self._oddity(hints)}:",
            "        event = tidy(event)",
            *self._replace_source("return ", hints, fields),
        ]

    def _admit_source(self, hints: dict[str, Any], kind: str) -> list[str]:
        """`stamp` once more, inlined: a call for each event is what the bus side has most of."""
        texts = [f"len(event.{name} or '')" for name in self._plain if hints[name] in (str, str | None)]
        kept = [f"(100 * len(v{i}) if type(v{i}) in SIZED else weigh(v{i}))" for i in range(len(self._kept))]
        return [
            "SIZED = (FrozenDict, tuple)" if all(hints[n] in _NUMBERS for n in self._kept) else "SIZED = ()",
            "def admit(draft, run, rank, attempt):",
            "    event = draft[0]",
            f"    if {self._oddity(hints)}:",
            "        event = tidy(event)",
            "        size = 400 + weigh_plain(event)",
            "    else:",
            f"        size = {' + '.join(['400', *texts])}",
            *(f"    v{i} = {self._cleaned(hints, i)}" for i in range(len(self._kept))),
            *self._replace_source("stamped = ", hints, [f"{name}=v{i}" for i, name in enumerate(self._kept)]),
            f"    return Entry(stamped, draft[-1], {' + '.join(['size', *kept])}, SHED, {kind}, draft[4])",
        ]

    def _record_source(self, hints: dict[str, Any]) -> list[str]:
        """`stamp` once more, without making read-only what is encoded at once."""
        plain = [self._cleaned(hints, index) for index in range(len(self._kept))]
        fields = [f"{name}={value.removeprefix('FrozenDict')}" for name, value in zip(self._kept, plain, strict=True)]
        return [
            "def record(draft, run, rank, attempt):",
            "    event = draft[0]",
            f"    if {self._oddity(hints)}:",
            "        event = tidy(event)",
            *self._replace_source("stamped = ", hints, fields, "0"),
            "    return pack(stamped)",
        ]

    def _cleaned(self, hints: dict[str, Any], index: int) -> str:
        name = self._kept[index]
        return _cleaned(hints[name], f"draft[{CAPTURED + index}]", is_secret=self._redaction.is_secret(name))

    def _oddity(self, hints: dict[str, Any]) -> str:
        return " or ".join(f"({_UNEXPECTED[hints[n]].format(f'event.{n}')})" for n in self._plain) or "False"

    def _replace_source(self, lead: str, hints: dict[str, Any], fields: list[str], seq: str = "draft[-1]") -> list[str]:
        secret = [n for n in self._plain if hints[n] in (str, str | None) and self._redaction.is_secret(n)]
        return [
            f"    {lead}replace(",
            f"        event, seq={seq}, time=event.time or draft[1], run=run if event.run is None else event.run,",
            "        rank=rank if event.rank is None else event.rank, attempt=event.attempt or attempt,",
            f"        {', '.join([*fields, *(f'{name}=HIDDEN' for name in secret)])}",
            "    )",
        ]


def resolve_draft(draft: Draft) -> None:
    """Read the numbers that were on a GPU; called when they have arrived, or are given up."""
    draft[CAPTURED:SEQ] = [resolve(value) for value in draft[CAPTURED:SEQ]]
    draft[COPIES] = None


def known_draft(draft: Draft) -> Draft:
    """A copy of it with NaN for the numbers that are still on a GPU; waits for none."""
    return [*draft[:CAPTURED], *map(known, draft[CAPTURED:SEQ]), draft[SEQ]]


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


def _cleaned(hint: Any, value: str, *, is_secret: bool) -> str:
    """The expression for a captured value with its secrets hidden; metrics with known keys take the short way."""
    if is_secret:
        return f"hide({value})"
    if hint == _METRICS:
        return f"FrozenDict({value}) if type({value}) is dict and harmless.issuperset({value}) else clean({value})"
    return value if hint in (*_NUMBERS, float, float | None) else f"clean({value})"


def _hints(cls: type[Event]) -> dict[str, Any]:
    try:
        return get_type_hints(cls)
    except NameError:  # a name that only a type checker can see: every field is then captured
        return dict.fromkeys(cls.__struct_fields__, Any)


def _draft_source(kept: list[str], hints: dict[str, Any]) -> list[str]:
    lines = ["def draft(event):"]
    for index, name in enumerate(kept):
        value, plain = f"v{index}", "NUMBERS" if hints[name] in _NUMBERS else "PLAIN"
        lines += [
            f"    {value} = event.{name}",
            f"    if type({value}) is dict:",
            f"        {value} = {value}.copy()",
            f"        for x in {value}.values():",
            f"            if type(x) is not float and type(x) not in {plain}:",
            "                return draft_slowly(event)",
            f"    elif type({value}) is tuple:",
            f"        for x in {value}:",
            f"            if type(x) is not float and type(x) not in {plain}:",
            "                return draft_slowly(event)",
            f"    elif type({value}) not in PLAIN:",  # a FrozenDict too: anybody may have made it
            "        return draft_slowly(event)",
        ]
    captured = ", ".join(f"v{index}" for index in range(len(kept)))
    return [*lines, f"    return [event, time(), None, None, 0, {captured}]"]
