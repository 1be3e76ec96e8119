"""Which event is being handled here: by a queued subscriber (per task or thread), or by an inline hook (per thread)."""

from __future__ import annotations

import threading
from contextvars import ContextVar
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from eventbus.events import Event
    from eventbus.publish import Publisher

__all__ = ["Handler", "current_event", "handler", "inline"]


class Handler(Protocol):
    """A delivery, as seen from inside the handler that it runs, or a stream from inside its block."""

    @property
    def name(self) -> str: ...
    @property
    def bus(self) -> Publisher | None: ...
    @property
    def event(self) -> Event | None: ...


#: The delivery whose worker runs here, or the stream whose block does. Set once for each, so that no delivery of an
#: event pays for it.
handler: ContextVar[Handler | None] = ContextVar("trainbus_handler", default=None)


class _Inline(threading.local):
    """The events whose inline hooks run on this thread, outermost first, with the names of the hooks."""

    def __init__(self) -> None:
        self.stack: list[tuple[Event, str]] = []


inline = _Inline()


def current_event() -> Event | None:
    """The event whose handler is running in this thread or task, or None outside of any."""
    if inline.stack:
        return inline.stack[-1][0]
    running = handler.get()
    return running.event if running is not None else None
