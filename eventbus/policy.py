"""Which cursor a subscriber gets, by what its options say of overload and of failures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from eventbus.cursor import BlockCursor, Cursor, LatestCursor, NewestCursor

if TYPE_CHECKING:
    from eventbus.events import Event
    from eventbus.journal import Journal
    from eventbus.options import Options

__all__ = ["cursor_for"]

_KINDS: Mapping[str, type[Cursor]] = {"latest": LatestCursor, "drop_newest": NewestCursor, "block": BlockCursor}


def cursor_for(
    options: Options, journal: Journal | None, admits: Callable[[Event], bool], rewind: Callable[[int], None]
) -> Cursor:
    """The cursor for these options; one that reads the journal asks `admits` of each event from `rewind` on."""
    kind: type[Cursor] = _KINDS.get(options.overflow, Cursor)
    about: tuple[Any, ...] = ()
    if journal is not None and options.overflow == "spill":
        from eventbus.durable import DurableCursor
        from eventbus.spill import SpillCursor

        kind, about = (DurableCursor, (journal, admits, rewind)) if options.durable else (SpillCursor, (journal,))
    if options.on_error == "disable":
        from eventbus.guard import guarded

        kind = guarded(kind)
    return kind(options, *about)
