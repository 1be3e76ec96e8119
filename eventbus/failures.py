"""What the bus does about a failure: count, log once, tell the other subscribers, and raise where it was asked to."""

from __future__ import annotations

import logging
import signal
import sys
import threading
from collections import deque
from time import localtime, strftime
from typing import TYPE_CHECKING, TypeVar

from eventbus import handling
from eventbus.delivery import Delivery
from eventbus.errors import SinkUnavailable
from eventbus.events import TERMINAL, Event, EventsDropped, SubscriberDisabled, SubscriberErrorEvent
from eventbus.notices import Notices, log, reason
from eventbus.pulse import Trouble

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from types import FrameType

    from eventbus.entry import Entry
    from eventbus.publish import Publisher
    from eventbus.subscription import InlineHook, Queued, Subscription

__all__ = ["ABOUT_US", "Failures"]

_T = TypeVar("_T")

#: What the bus tells about itself.
ABOUT_US = (SubscriberErrorEvent, SubscriberDisabled, EventsDropped)
#: Drops with these reasons mean that the subscriber cannot keep up.
_SLOW = {"overflow", "reserve", "newest", "coalesced", "block_timeout"}


class Failures:
    """The failures of one bus's subscribers."""

    def __init__(self, bus: Publisher) -> None:
        self._bus = bus
        self.notices = Notices()
        #: Errors of queued subscribers with ``on_error="raise"``, by the thread that published the event.
        self.due: dict[int, BaseException] = {}
        #: Closed, and perhaps not all of their drops announced.
        self.parted: deque[Subscription] = deque()

    def told(self, subscriber: Queued, entry: Entry | None, error: BaseException) -> None:
        """A queued subscriber failed, or its sink cannot open or take events; called by its worker."""
        event = entry.event if entry is not None else None
        if event is None:
            self._attempt(self._note, subscriber, error)
        self._attempt(self._tell, subscriber, event, error)
        self.tell_breaker(subscriber, event)

    def owe(self, subscriber: Queued, entry: Entry, error: BaseException) -> None:
        """Note a failure, and keep what is to be raised.

        Called before the event is settled, so that after a `flush` the health tells it and a publish raises it.
        """
        if subscriber.cursor.running is not entry:
            return
        self._attempt(self._note, subscriber, error)
        if subscriber.options.on_error != "raise":
            return
        error.add_note(f"raised by subscriber {subscriber.name!r} on {entry.event.hook}, event {entry.seq}")
        if self.due.setdefault(entry.thread, error) is not error:
            self.due[entry.thread].add_note(f"and subscriber {subscriber.name!r} failed on event {entry.seq} too")
        self._bus._reroute()

    def hook_failed(self, hook: InlineHook, event: Event, error: Exception) -> None:
        """An inline hook failed; called on the publishing thread."""
        try:
            self._note(hook, error)
            if hook.options.on_error != "raise":
                self._tell(hook, event, error)
        except Exception as raised:  # noqa: BLE001  # by foreign code, as in `_attempt`
            _complain(raised)
        self.tell_breaker(hook, event)

    def gone(self, subscriber: Queued, entry: Entry, error: BaseException) -> None:
        """A sink's receiver wants no more: switch the subscriber off."""
        self._bus._close_subscription(subscriber, "disabled")
        disabled = SubscriberDisabled(subscriber=subscriber.name, failed_hook=entry.event.hook, reason=reason(error))
        self._attempt(self._bus.publish, disabled)

    def tell_breaker(self, subscription: Subscription, event: Event | None = None) -> None:
        """Announce that a subscriber was disabled (by failing on `event`), or works again, unless it was announced."""
        breaker = subscription.breaker
        if breaker is None or breaker.announced is breaker.is_open:
            return
        breaker.announced = breaker.is_open  # no call between: of several that tell it one comes first
        if breaker.announced:
            self._attempt(self._tell_disabled, subscription, event)
        else:
            self._attempt(self._tell_enabled, subscription)

    def _tell_disabled(self, subscription: Subscription, event: Event | None) -> None:
        options, trouble = subscription.options, subscription.trouble
        why = (
            f"{options.disable_after} failures in a row, the last: {trouble.why if trouble is not None else 'unknown'}"
        )
        log(
            logging.ERROR,
            "Subscriber %r is disabled after %s. What waits for it and what comes is dropped; it is tried again %s.",
            subscription.name, why, f"with the first event after {options.retry_after:g} s, and with the end of a run",
        )  # fmt: skip
        if not isinstance(event, SubscriberDisabled):  # one about who failed at one could go on for ever
            hook, count = event.hook if event is not None else "", options.disable_after
            self._bus.publish(
                SubscriberDisabled(subscriber=subscription.name, failed_hook=hook, reason=why, count=count)
            )

    def _tell_enabled(self, subscription: Subscription) -> None:
        since = strftime("%H:%M:%S", localtime(subscription.breaker.since)) if subscription.breaker is not None else ""
        log(
            logging.WARNING, "Subscriber %r works again; it had been disabled since %s. %d of its events were dropped.",
            subscription.name, since, subscription.counters.dropped_by["disabled"],
        )  # fmt: skip

    def _note(self, subscription: Subscription, error: BaseException) -> None:
        """Remember a failure for `EventBus.health`."""
        subscription.trouble = Trouble.after(subscription.trouble, reason(error), subscription.counters.delivered)

    def _tell(self, subscriber: Subscription, event: Event | None, error: BaseException) -> None:
        its = "its process" if subscriber.kind == "process" else "its sink"
        hook = event.hook if event is not None else its
        level = logging.WARNING if isinstance(error, SinkUnavailable) else logging.ERROR
        brief = isinstance(error, TimeoutError | SinkUnavailable) and error.__traceback__ is None
        count = self.notices.say(
            level, f"failed {subscriber.name}", "Subscriber %r failed on %s: %s", subscriber.name, hook, reason(error),
            error=None if brief else error,
        )  # fmt: skip
        if count and not isinstance(event, ABOUT_US):
            self._bus.publish(
                SubscriberErrorEvent(
                    subscriber=subscriber.name, failed_hook=hook if event is not None else "", reason=reason(error),
                    count=count,
                )
            )  # fmt: skip

    def _attempt(self, report: Callable[..., object], *about: object) -> None:
        """Log or publish something; what foreign log handlers and hooks raise on the bus side ends nobody.

        Of an inline hook it is told on the publishing thread, which gets a KeyboardInterrupt.
        """
        try:
            report(*about)
        except BaseException as error:
            if not isinstance(error, Exception) and about and getattr(about[0], "kind", "") == "inline":
                raise
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

    def tell_fault(self, error: BaseException) -> None:
        """Something of the bus's own failed."""
        self._attempt(self._tell_fault, error)

    def _tell_fault(self, error: BaseException) -> None:
        self.notices.say(
            logging.ERROR, f"fault {type(error).__name__}",
            "A fault of the event bus itself, which goes on; please report it: %s", reason(error), error=error,
        )  # fmt: skip

    def tell_losses(self) -> None:
        """Announce what was dropped since the last time, and what went wrong while feeding; called by the pump."""
        self._attempt(self._bus._log.tidy)
        self._attempt(self._tell_losses)

    def tell_last_losses(self) -> None:
        """Announce all that was dropped and not announced: no later interval can."""
        self._attempt(self._tell_losses)
        for subscription in (*self._bus._registry.all(), *self._bus._log.subscribers, *self._bus._log.leaving):
            self.tell_drops(subscription, last=True)

    def _tell_losses(self) -> None:
        for who, error in _drained(self._bus._log.errors):
            name = who if isinstance(who, str) else who.name
            self.notices.say(logging.ERROR, f"feed {name}", "%s: %s", name, reason(error), error=error)
            if not isinstance(who, str):  # its `when` raised
                self._note(who, error)
                self.tell_breaker(who)
        for subscriber in self._bus._log.subscribers:
            if subscriber.cursor.dropped > subscriber.drops_told_count:
                self.tell_drops(subscriber)
        for parted in list(_drained(self.parted)):
            is_over = parted.is_over  # asked first: what is dropped later is told later
            self.tell_drops(parted, last=True)
            if not is_over:
                self.parted.append(parted)

    def part(self, subscription: Subscription) -> None:
        """A subscription was closed: what is dropped for it is announced without waiting for the next interval."""
        self.parted.append(subscription)
        if self._bus._log.is_unserved():
            self._attempt(self._tell_losses)

    def tell_drops(self, subscription: Subscription, *, last: bool = False) -> None:
        """Announce what was dropped of a subscriber since the last time, once per interval; now, if it is the last."""
        if subscription.counters.dropped > subscription.drops_told_count:
            self._attempt(self._tell_drops, subscription, last)

    def _tell_drops(self, subscription: Subscription, last: bool) -> None:
        now, told = subscription.counters.dropped_by.copy(), subscription.drops_told
        news = {why: n - told.get(why, 0) for why, n in now.items() if n > told.get(why, 0)}
        key = f"lost {subscription.name}" if "reserve" in news else f"dropped {subscription.name}"
        if not news or not (last or self.notices.is_due(key)):
            return
        subscription.drops_told, subscription.drops_told_count = now, sum(now.values())
        if subscription.kind == "inline":  # the bus may have no loop that ends with the process
            self._bus._remember_at_exit()
        count, by = sum(news.values()), ", ".join(f"{n} {why}" for why, n in news.items())
        what = "is too slow" if not _SLOW.isdisjoint(news) else "is disabled" if "disabled" in news else "ends"
        if subscription.options.durable and news.keys() <= {"closed", "loop_closed"}:
            log(logging.INFO, "Subscriber %r goes on with %d events from the journal later.", subscription.name, count)
            return
        level = _level(news)
        self.notices.say(
            level, key, "Subscriber %r %s: %d of its events were dropped (%s), %d so far.",
            subscription.name, what, count, by, subscription.drops_told_count, now=last,
        )  # fmt: skip
        if level > logging.INFO:
            self._bus.publish(EventsDropped(subscriber=subscription.name, reason=by, count=count))

    def take_due_at(self, event: Event) -> BaseException | None:
        """What a subscriber with ``on_error="raise"`` failed with, for the thread that published what it failed at.

        Not from a terminal event, which must reach the others; not inside another subscriber's handler, which is not
        who asked for it; and not from a finaliser or a signal handler, which would raise it into code that has
        nothing to do with it.
        """
        me = threading.get_ident()
        if me not in self.due or isinstance(event, TERMINAL + ABOUT_US):
            return None
        if isinstance(handling.handler.get(), Delivery) or _is_intruding(sys._getframe(1)):
            return None
        error = self.due.pop(me)
        self._bus._reroute()
        return error

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


def _drained(queue: deque[_T]) -> Iterator[_T]:
    """What is there now; of several threads that ask, each item goes to one."""
    for _ in range(len(queue)):
        try:
            yield queue.popleft()
        except IndexError:
            return


def _level(dropped: Iterable[str]) -> int:
    """How loudly drops with these reasons are told. What one gave up by unsubscribing is no news for others."""
    if "reserve" in dropped:
        return logging.ERROR
    return logging.INFO if set(dropped) == {"unsubscribed"} else logging.WARNING


def _complain(error: BaseException) -> None:
    try:
        log(logging.ERROR, "Reporting a failure of a subscriber failed: %s", reason(error), error=error)
    except BaseException:  # noqa: BLE001  # it is the log that fails
        pass
