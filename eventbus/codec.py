"""Events to bytes and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

if TYPE_CHECKING:
    from eventbus.events import Event


def encode(event: Event, format: Literal["json", "msgpack"] = "json") -> bytes:
    """Encode an event."""
    return msgspec.json.encode(event)
