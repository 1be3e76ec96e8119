"""A module with a bus of its own, as people write them, that a child imports with the subscriber in it."""

from __future__ import annotations

from eventbus import EventBus
from tests.eventbus.served import Job, note

__all__ = ["bus", "publish_again"]

bus = EventBus(run="r")


@bus.on(Job, run_in="process")
def publish_again(event: Job) -> None:
    """Publish on the bus: in the child that is a copy, which delivers nothing."""
    note(event.path, event.n, "published")
    bus.publish(Job(n=event.n + 100, path=event.path))


@bus.on(Job)
async def listen(event: Job) -> None:
    """Hear it where the bus is."""
    note(event.path, event.n, "heard")
