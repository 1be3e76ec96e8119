"""The errors of `sinks`, in the tree of `eventbus`.

::

    EventBusError
    ├── SinkUnavailable    a file cannot be opened or written now: the bus keeps the events and asks again
    ├── SinkGone           a webhook answered 410: the bus closes the subscription
    └── WebhookError       an event was given up and lies in `WebhookSink.dead_letters`
"""

from __future__ import annotations

from eventbus.errors import EventBusError

__all__ = ["WebhookError"]


class WebhookError(EventBusError):
    """An event that a webhook did not take."""

    def __init__(self, origin: str, hook: str, message_id: str, attempts: int, reason: str) -> None:
        tried = "1 attempt" if attempts == 1 else f"{attempts} attempts"
        super().__init__(
            f"{origin} did not take {hook} ({message_id}) in {tried}: {reason}. "
            "It is kept in the sink's dead_letters; await sink.resend() sends it again."
        )
