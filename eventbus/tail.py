"""``python -m eventbus tail``: the events of a journal as lines of JSON, also while they are written."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from time import sleep, time

from eventbus.codec import encode
from eventbus.entry import PARTIAL
from eventbus.event import Event
from eventbus.filters import Filter
from eventbus.recording import event_of, read_journal
from eventbus.segment import AMENDS, FIRST, Record, scan, segments_in

__all__ = ["follow", "heard", "tail"]

#: How often a journal is looked at for more, in seconds, and how long for numbers that are still on a GPU.
_LOOK_S = 0.2
_DEVICE_WAIT_S = 10.0


def tail(directory: Path, *, hooks: Iterable[str], last: int | None, after: int, keep_on: bool) -> None:
    """Print the events of these hooks to the standard output: the `last` ones, those after a number, or all."""
    events = heard(read_journal(directory, after=after), hooks)
    for event in events if last is None else deque(events, last):
        _print(event)
        after = max(after, event.seq)
    if keep_on:
        for event in heard(follow(directory, after), hooks):
            _print(event)
            sys.stdout.flush()


def heard(events: Iterable[Event], hooks: Iterable[str]) -> Iterator[Event]:
    """Those of these hooks (names, ``*`` patterns; none = every event)."""
    filter = Filter(*hooks)
    return (event for event in events if filter.hears(type(event), event.hook))


def follow(directory: Path, after: int, *, pause: Callable[[float], object] = sleep) -> Iterator[Event]:
    """The events with ``seq > after``, and without end those that come."""
    path: Path | None = None
    at = FIRST
    while True:
        for current, record in _from(directory, path, at):
            if current != path:
                path, at = current, FIRST
            whole = _completed(path, record)
            if whole is None:  # its numbers are on the way: look again
                break
            at = record.end
            if record.seq > after and not record.flags & AMENDS:
                after = record.seq
                yield event_of(whole)
        pause(_LOOK_S)


def _from(directory: Path, path: Path | None, at: int) -> Iterator[tuple[Path, Record]]:
    """The records from a word of a segment on, to the end of the last segment."""
    paths = segments_in(directory)
    for current in paths[paths.index(path) if path in paths else 0 :]:
        for record in scan(current, at if current == path else FIRST):
            yield current, record


def _completed(path: Path, record: Record) -> Record | None:
    """The record with all its numbers; None while some are on a GPU, and not for too long."""
    if not record.flags & PARTIAL:
        return record
    amended = next((r for r in scan(path, record.end) if r.seq == record.seq), None)
    return amended or (record if _is_over(record) else None)


def _is_over(record: Record) -> bool:
    return time() - event_of(record).time > _DEVICE_WAIT_S


def _print(event: Event) -> None:
    sys.stdout.write(encode(event).decode() + "\n")
