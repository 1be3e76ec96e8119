"""What the bus does about a failure: count, log once, tell the other subscribers, and raise where it was asked to."""

from __future__ import annotations

import logging
import signal
import sys
import threading
from typing import TYPE_CHECKING

from eventbus import handling
from eventbus.delivery import Delivery
from eventbus.errors import SinkUnavailable
from eventbus.events import (
    Event,
    EventsDropped,
    ExceptionRaised,
    SubscriberDisabled,
    SubscriberErrorEvent,
    Teardown,
    TrainEnd,
)
from eventbus.notices import Notices, log
from eventbus.redaction import hide_credentials

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from eventbus.entry import Entry
    from eventbus.publish import Publisher
    from eventbus.subscription import InlineHook, Queued, Subscription

__all__ = ["ABOUT_US", "Failures"]

#: What the bus tells about itself.
ABOUT_US = (SubscriberErrorEvent, SubscriberDisabled, EventsDropped)
_TERMINAL = (ExceptionRaised, TrainEnd, Teardown)
_LONGEST_REASON = 200


class Failures:
    """The failures of one bus's subscribers."""

    def __init__(self, bus: Publisher) -> None:
        self._bus = bus
        self.notices = Notices()
        #: Errors of queued subscribers with ``on_error="raise"``, by the thread that published the event.
        self.due: dict[int, BaseException] = {}

    def told(self, subscriber: Queued, entry: Entry | None, error: BaseException) -> None:
        """A queued subscriber failed, or its sink cannot open or take events; called by its worker."""
        self._attempt(self._tell, subscriber, entry.event if entry is not None else None, error)

    def owe(self, subscriber: Queued, entry: Entry, error: BaseException) -> None:
        """Keep what is to be raised; called before the event is settled, so that a publish after `flush` raises it."""
        if subscriber.options.on_error != "raise" or subscriber.cursor.running is not entry:
            return
        error.add_note(f"raised by subscriber {subscriber.name!r} on {entry.event.hook}, event {entry.seq}")
        if self.due.setdefault(entry.thread, error) is not error:
            self.due[entry.thread].add_note(f"and subscriber {subscriber.name!r} failed on event {entry.seq} too")
        self._bus._reroute()

    def hook_failed(self, hook: InlineHook, event: Event, error: Exception) -> None:
        """An inline hook failed; called on the publishing thread."""
        if hook.options.on_error == "isolate":
            try:
                self._tell(hook, event, error)
            except Exception as raised:  # noqa: BLE001  # by foreign code, as in `_attempt`
                _complain(raised)

    def gone(self, subscriber: Queued, entry: Entry, error: BaseException) -> None:
        """A sink's receiver wants no more: switch the subscriber off."""
        self._bus._close_subscription(subscriber, "disabled")
        disabled = SubscriberDisabled(subscriber=subscriber.name, failed_hook=entry.event.hook, reason=_reason(error))
        self._attempt(self._bus.publish, disabled)

    def _tell(self, subscriber: Subscription, event: Event | None, error: BaseException) -> None:
        hook = event.hook if event is not None else "its sink"
        level = logging.WARNING if isinstance(error, SinkUnavailable) else logging.ERROR
        brief = isinstance(error, TimeoutError | SinkUnavailable) and error.__traceback__ is None
        count = self.notices.say(
            level, f"failed {subscriber.name}", "Subscriber %r failed on %s: %s", subscriber.name, hook, _reason(error),
            error=None if brief else error,
        )  # fmt: skip
        if count and not isinstance(event, ABOUT_US):
            self._bus.publish(
                SubscriberErrorEvent(
                    subscriber=subscriber.name, failed_hook=hook if event is not None else "", reason=_reason(error),
                    count=count,
                )
            )  # fmt: skip

    def _attempt(self, report: Callable[..., object], *about: object) -> None:
        """Log or publish something from the bus side; what foreign log handlers and hooks raise there ends nobody."""
        try:
            report(*about)
        except BaseException as error:  # noqa: BLE001
            _complain(error)

    def loop_held(self, subscriber: Queued, seconds: float) -> None:
        """A handler held the loop without awaiting."""
        self._attempt(self._tell_hold, subscriber, seconds)

    def _tell_hold(self, subscriber: Queued, seconds: float) -> None:
        self.notices.say(
            logging.WARNING, f"held {subscriber.name}",
            "Subscriber %r held the bus loop for %.0f ms without awaiting, and with it every other subscriber there. "
            'Make it a def with run_in="thread", or await what it waits for.',
            subscriber.name, 1000 * seconds, once=True,
        )  # fmt: skip

    def tell_losses(self) -> None:
        """Announce what was dropped since the last time, and what went wrong while feeding; called by the pump."""
        self._attempt(self._bus._log.tidy)
        self._attempt(self._tell_losses)

    def _tell_losses(self) -> None:
        errors = self._bus._log.errors
        while errors:
            name, error = errors.popleft()
            self.notices.say(logging.ERROR, f"feed {name}", "%s: %s", name, _reason(error), error=error)
        for subscriber in self._bus._log.subscribers:
            if subscriber.cursor.dropped > subscriber.drops_told:
                self._tell_drops(subscriber)

    def _tell_drops(self, subscriber: Queued) -> None:
        cursor = subscriber.cursor
        level = logging.ERROR if cursor.dropped_by["reserve"] else logging.WARNING
        by = ", ".join(f"{n} {reason}" for reason, n in cursor.dropped_by.items() if n)
        dropped = cursor.dropped
        if self.notices.say(
            level, f"dropped {subscriber.name}",
            "Subscriber %r is too slow: %d of its events were dropped so far (%s).", subscriber.name, dropped, by,
        ):  # fmt: skip
            count, subscriber.drops_told = dropped - subscriber.drops_told, dropped
            self._bus.publish(EventsDropped(subscriber=subscriber.name, reason=by, count=count))

    def raise_due(self, event: Event) -> None:
        """Raise what a subscriber with ``on_error="raise"`` failed with, for the thread that published that event.

        Not from a terminal event, which must reach the others; not inside another subscriber's handler, which is not
        who asked for it; and not from a finaliser or a signal handler, which would raise it into code that has
        nothing to do with it.
        """
        me = threading.get_ident()
        if me not in self.due or isinstance(event, _TERMINAL + ABOUT_US):
            return
        if isinstance(handling.handler.get(), Delivery) or _is_intruding(sys._getframe(1)):
            return
        error = self.due.pop(me)
        self._bus._reroute()
        raise error

    def take_due(self) -> BaseException | None:
        """What was never raised, for `close`."""
        error = None
        while self.due:
            error = self.due.popitem()[1]
        return error


def _is_intruding(frame: FrameType | None) -> bool:
    """Whether a finaliser or a signal handler is running in this thread."""
    handlers = {getattr(signal.getsignal(number), "__code__", None) for number in signal.valid_signals()} - {None}
    while frame is not None:
        if frame.f_code.co_name == "__del__" or frame.f_code in handlers:
            return True
        if frame.f_code.co_filename.endswith("weakref.py") and frame.f_code.co_name == "__call__":
            return True
        frame = frame.f_back
    return False


def _complain(error: BaseException) -> None:
    try:
        log(logging.ERROR, "Reporting a failure of a subscriber failed: %s", _reason(error), error=error)
    except BaseException:  # noqa: BLE001  # it is the log that fails
        pass


def _reason(error: BaseException) -> str:
    try:
        said = hide_credentials(str(error))
    except Exception:  # noqa: BLE001  # a broken __str__ hides nothing but itself
        said = ""
    text = f"{type(error).__name__}: {said}" if said else type(error).__name__
    return text if len(text) <= _LONGEST_REASON else text[: _LONGEST_REASON - 1] + "…"
