"""What a sink is: the protocol between the bus and the code that takes events out of the process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, overload, runtime_checkable

from eventbus.codec import encode

if TYPE_CHECKING:
    from eventbus.entry import Entry
    from eventbus.events import Event

__all__ = ["Batch", "Sink", "encoded"]


@runtime_checkable
class Sink(Protocol):
    """Takes events out of the process; `EventBus.attach` drives it, always on one loop and one call at a time.

    The bus calls `open` when it starts (again after a failure, with growing pauses), `write` with one or more
    events in the order of their `seq`, and `aclose` once, after the last `write`. `write` returns when the events
    are delivered. It may raise `SinkUnavailable` (keep these events and ask again later), `SinkGone` (the
    receiver wants no more: the subscription is closed), or anything else (these events count as failed).

    A `write` is never cancelled: one that outlives its timeout counts as timed out and ends in the background.
    So its IO must have limits of its own.

    Three attributes are optional: ``max_batch: int = 1``, the most events of one `write`; ``flush_interval:
    float = 0.0``, the seconds for which a batch may gather (ended early by 256 KiB, by `flush` and by `close`);
    and a method ``bind(*, run: str, rank: int)``, called before the first `open`.
    """

    #: The hooks it hears; empty = every event.
    hooks: Sequence[str]
    #: Its own defaults for the options of `EventBus.subscribe`.
    options: Mapping[str, Any]

    async def open(self) -> None: ...

    async def write(self, events: Sequence[Event], /) -> None: ...

    async def aclose(self) -> None: ...


class Batch(Sequence["Event"]):
    """The events of one `Sink.write`; `json` encodes each once for all sinks of the bus."""

    __slots__ = ("_entries",)

    def __init__(self, entries: Sequence[Entry]) -> None:
        self._entries = entries

    @overload
    def __getitem__(self, index: int, /) -> Event: ...
    @overload
    def __getitem__(self, index: slice, /) -> Batch: ...
    def __getitem__(self, index: int | slice, /) -> Event | Batch:
        if isinstance(index, slice):
            return Batch(self._entries[index])
        return self._entries[index].event

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Event]:
        return (entry.event for entry in self._entries)

    @property
    def json(self) -> list[bytes]:
        """One JSON object per event, without line ends."""
        return [entry.encoded or entry.json for entry in self._entries]


def encoded(events: Sequence[Event]) -> list[bytes]:
    """One JSON object per event: the bytes the bus shares where it has them, else encoded here."""
    return events.json if isinstance(events, Batch) else [encode(event) for event in events]
