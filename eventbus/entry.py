"""One event in the log, as the cursors of all its subscribers share it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from eventbus.codec import encode

if TYPE_CHECKING:
    from eventbus.event import Event

__all__ = ["PARTIAL", "Entry", "Note"]


#: A flag in the journal: numbers of the event were still on a GPU.
PARTIAL = 1 << 62


class Note(msgspec.Struct, gc=False):
    """What is known about an event where `publish` takes its longer way."""

    #: The thread that published it, where somebody may have to be told.
    thread: int
    #: The tokens of cursors with ``overflow="block"`` for which the publisher gave up waiting.
    refused_by: tuple[object, ...] = ()
    #: Numbers of it were still on a GPU when it was written to the journal.
    is_partial: bool = False


class Entry(msgspec.Struct, gc=False):
    """An event with what is worked out once for all subscribers; gone with the last of them."""

    event: Event
    seq: int
    size: int
    shed: bool
    #: What filters look at: the event's class, or the hook of an event whose class is unknown here.
    kind: Any
    #: Where it is in the journal; 0 = it is not.
    place: int = 0
    #: The thread that published it, where somebody may have to be told.
    thread: int = 0
    #: The tokens of cursors with ``overflow="block"`` for which the publisher gave up waiting.
    refused_by: tuple[object, ...] = ()
    encoded: bytes | None = None

    @property
    def json(self) -> bytes:
        """The event as JSON, encoded once for all sinks."""
        if self.encoded is None:
            self.encoded = encode(self.event)
        return self.encoded
