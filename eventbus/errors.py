"""The errors of `eventbus`, in one tree.

::

    EventBusError
    ├── UnknownHookError        (ValueError)    a hook that no event has
    ├── HookTakenError          (ValueError)    two event classes with one hook
    ├── SubscriptionError       (ValueError)    a handler or an option that does not fit
    │   └── NameTakenError                      an explicit name used twice
    ├── AlreadyStartedError     (RuntimeError)  a second explicit start
    ├── WouldBlockError         (RuntimeError)  waiting for what only the waiter can do
    ├── PublishRecursionError   (RuntimeError)  hooks that publish each other without end
    ├── NotPicklableError       (TypeError)     a subscriber that cannot be pickled or copied
    ├── DecodeError             (ValueError)    bytes that are no event
    ├── JournalError            (RuntimeError)  a journal that cannot be used
    ├── ReplayError                             a replay that cannot begin, or go on
    ├── ChildError                              what went wrong in, or ended, the child process of a subscriber
    ├── SinkUnavailable                         raised by a sink: keep these events, ask again later
    └── SinkGone                                raised by a sink: its receiver wants no more events
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from eventbus.events import Event

__all__ = [
    "AlreadyStartedError",
    "ChildError",
    "DecodeError",
    "EventBusError",
    "HookTakenError",
    "JournalError",
    "NameTakenError",
    "NotPicklableError",
    "PublishRecursionError",
    "ReplayError",
    "SinkGone",
    "SinkUnavailable",
    "SubscriptionError",
    "UnknownHookError",
    "WouldBlockError",
]


class EventBusError(Exception):
    """The base of every error this package raises."""


class UnknownHookError(EventBusError, ValueError):
    """A hook that no event has; the message gives the nearest real one."""

    def __init__(
        self, hook: str, nearest: str | None, elsewhere: str | None = None, *, hint: str | None = None
    ) -> None:
        self.hook = hook
        self.nearest = nearest
        if elsewhere is not None:
            hint = f"{elsewhere} calls it that; here it is {nearest!r}."
        elif nearest is not None:
            hint = f"Did you mean {nearest!r}?"
        elif hint is None:
            hint = "eventbus.EVENTS lists the known hooks; subclass eventbus.Event to define your own."
        super().__init__(f"There is no hook {hook!r}. {hint}")


class HookTakenError(EventBusError, ValueError):
    """Two different event classes with one hook."""

    def __init__(self, hook: str, taken: type[Event], wanted: type[Event]) -> None:
        super().__init__(
            f"Hook {hook!r} of {wanted.__module__}.{wanted.__qualname__} already belongs to "
            f"{taken.__module__}.{taken.__qualname__}. Rename the class or give it hook=."
        )


class SubscriptionError(EventBusError, ValueError):
    """A handler or an option that does not fit, found at registration."""

    def __init__(self, subscriber: str, problem: str, remedy: str) -> None:
        super().__init__(f"Subscriber {subscriber!r} {problem}. {remedy}")


class NameTakenError(SubscriptionError):
    """An explicit name used twice."""

    def __init__(self, name: str) -> None:
        super().__init__(name, "has the name of another open subscription", "Choose another name= or close the first.")


class AlreadyStartedError(EventBusError, RuntimeError):
    """A second explicit start."""

    def __init__(self, where: str) -> None:
        super().__init__(f"The bus already runs {where}. Close it before you start it elsewhere.")


class WouldBlockError(EventBusError, RuntimeError):
    """Waiting here would wait for the waiter itself."""

    def __init__(self, call: str, why: str, remedy: str) -> None:
        super().__init__(f"{call} would wait for ever: {why}. {remedy}")


class PublishRecursionError(EventBusError, RuntimeError):
    """Inline hooks that publish each other without end."""

    def __init__(self, chain: Sequence[str]) -> None:
        super().__init__(
            f"publish called itself {len(chain)} deep through inline hooks: {' → '.join(chain[-6:])}. "
            "An inline hook must not publish an event that leads back to itself."
        )


class NotPicklableError(EventBusError, TypeError):
    """A subscriber that cannot travel to another process, or be copied beside itself."""

    def __init__(self, subscriber: str, why: str) -> None:
        super().__init__(
            f"The bus cannot travel: subscriber {subscriber!r} {why}. "
            "Define it at the top of an importable module, or remove it with bus.off() before the bus travels."
        )


class DecodeError(EventBusError, ValueError):
    """Bytes that are no event."""


class JournalError(EventBusError, RuntimeError):
    """A journal that cannot be used: it belongs to a running bus, cannot be made, or is of another version."""

    def __init__(self, path: object, problem: str, remedy: str) -> None:
        super().__init__(f"Journal {str(path)!r} {problem}. {remedy}")


class ReplayError(EventBusError):
    """A replay whose target takes no events, or whose receiver wants no more."""


class ChildError(EventBusError):
    """What a subscriber with ``run_in="process"`` raised, in words; or how its process ended.

    The exception itself stays in the child; its traceback comes as a note.
    """


class SinkUnavailable(EventBusError):  # noqa: N818  # a state of the receiver, named as sinks speak of it
    """Raised by `Sink.open` or `Sink.write`: keep these events and ask again later, in order."""


class SinkGone(EventBusError):  # noqa: N818
    """Raised by `Sink.write`: the receiver wants no more events, so the subscription is closed."""
