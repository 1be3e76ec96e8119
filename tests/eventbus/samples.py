"""Events that stand for any other in the tests of the bus, and what must always hold for the counts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from eventbus import Event

if TYPE_CHECKING:
    from collections.abc import Mapping

    from eventbus import EventBus, SubscriberStats

__all__ = ["Beat", "Load", "Tick", "assert_balanced", "is_balanced"]


class Tick(Event, shed=True):
    """One that may be dropped first under overload."""

    n: int = 0
    thread: int = 0


class Beat(Event):
    """One that may not be shed."""

    n: int = 0
    thread: int = 0


class Load(Event, shed=True):
    """One with values of any kind."""

    n: int = 0
    value: Any = None


def is_balanced(stats: SubscriberStats) -> bool:
    settled = stats.delivered + stats.failed + stats.timed_out + stats.dropped
    return stats.matched == settled + stats.pending and sum(stats.dropped_by.values()) == stats.dropped


def assert_balanced(bus: EventBus) -> Mapping[str, SubscriberStats]:
    stats = bus.stats()
    for name, counts in stats.items():
        assert is_balanced(counts), (name, counts)
    return stats
