"""Where events of one class go, worked out once and kept until a registration changes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from eventbus.log import hears_rank
from eventbus.subscription import InlineHook, Queued, Subscription

if TYPE_CHECKING:
    from collections.abc import Iterable

    from eventbus.cursor import Cursor
    from eventbus.events import Event
    from eventbus.snapshot import Snapshot

__all__ = ["Route"]


class Route:
    """The subscribers of one event class, and what `publish` must know about them."""

    __slots__ = ("blocking", "careful", "draft", "hooks", "particular", "queued", "snapshot")

    def __init__(self, subscribers: Iterable[Subscription], snapshot: Snapshot, *, rank: int, journaled: bool) -> None:
        hooks = [s for s in subscribers if isinstance(s, InlineHook)]
        #: By priority, then registration.
        self.hooks = tuple(sorted(hooks, key=lambda hook: -hook.options.priority))
        self.queued = tuple(s for s in subscribers if isinstance(s, Queued))
        self.snapshot = snapshot
        self.draft = snapshot.draft
        self.blocking: tuple[Cursor, ...] = tuple(s.cursor for s in self.queued if s.options.overflow == "block")
        #: It has to be asked whether anybody is queued for an event, and who has to be waited for or told.
        self.particular = (
            not self.queued
            or rank != 0
            or bool(self.blocking)
            or any(s.options.on_error == "raise" for s in self.queued)
        )
        #: Something rare: `publish` takes its longer way.
        self.careful = self.particular or journaled

    def is_queued_for(self, event: Event, bus_rank: int) -> bool:
        """Whether any queued subscriber hears this event on this rank."""
        rank = bus_rank if event.rank is None else event.rank
        return any(hears_rank(s.options.rank, rank, event.hook) for s in self.queued)
