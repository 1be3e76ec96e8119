"""Reading a journal: the events of any process, dead or alive, in the order of their numbers."""

from __future__ import annotations

from collections.abc import Iterator
from os import PathLike
from pathlib import Path

from msgspec.structs import replace

from eventbus.codec import decode, decode_unknown
from eventbus.entry import PARTIAL
from eventbus.errors import DecodeError, JournalError
from eventbus.event import Event
from eventbus.segment import AMENDS, Record, first_seq, scan, segments_in

__all__ = ["event_of", "read_journal", "records"]


def read_journal(directory: str | PathLike[str], *, after: int = 0) -> Iterator[Event]:
    """The events of a journal in the order of their `seq`, those up to `after` left out.

    It may be in use. What is torn (by a power failure, never by a killed process) is skipped; a number that was
    still on a GPU when its process was killed is NaN. Raises `JournalError` when there is no journal.
    """
    path = Path(directory)
    if not path.is_dir():
        raise JournalError(path, "is no directory", "Give the directory of EventBus(journal=…).")
    return (event_of(record) for record in records(path, after=after))


def event_of(record: Record) -> Event:
    """The event with its number; one that does not fit its class, which has changed since, as an `UnknownEvent`."""
    try:
        event = decode(record.data, "msgpack")
    except DecodeError:
        event = decode_unknown(record.data, "msgpack")
    return replace(event, seq=record.seq)


def records(directory: Path, *, after: int, before: int | None = None) -> Iterator[Record]:
    """The records with ``after < seq < before``, each once and as complete as it is known."""
    paths = segments_in(directory)
    for index, path in enumerate(paths):
        if index + 1 < len(paths) and first_seq(paths[index + 1]) <= after + 1:
            continue
        amended = _Amendments(paths[index:])
        for record in scan(path):
            if record.flags & AMENDS or record.seq <= after:
                continue
            if before is not None and record.seq >= before:
                return
            yield amended.get(record) if record.flags & PARTIAL else record


class _Amendments:
    """The records that bring the numbers of partial ones, found in these segments when they are asked for."""

    def __init__(self, paths: list[Path]) -> None:
        self._paths = iter(paths)
        self._found: dict[int, Record] = {}

    def get(self, partial: Record) -> Record:
        while partial.seq not in self._found:
            path = next(self._paths, None)
            if path is None:
                return partial
            self._found |= {record.seq: record for record in scan(path) if record.flags & AMENDS}
        return self._found.pop(partial.seq)
