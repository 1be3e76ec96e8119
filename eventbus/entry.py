"""One event in the log, as the cursors of all its subscribers share it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from eventbus.codec import encode

if TYPE_CHECKING:
    from eventbus.cursor import Cursor
    from eventbus.event import Event

__all__ = ["Entry"]


class Entry(msgspec.Struct, gc=False):
    """An event with what is worked out once for all subscribers; gone with the last of them."""

    event: Event
    seq: int
    size: int
    shed: bool
    #: What filters look at: the event's class, or the hook of an event whose class is unknown here.
    kind: Any
    #: The thread that published it, where somebody may have to be told.
    thread: int = 0
    #: Cursors with ``overflow="block"`` for which the publisher gave up waiting.
    refused_by: tuple[Cursor, ...] = ()
    encoded: bytes | None = None

    @property
    def json(self) -> bytes:
        """The event as JSON, encoded once for all sinks."""
        if self.encoded is None:
            self.encoded = encode(self.event)
        return self.encoded
