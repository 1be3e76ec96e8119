"""The breaker of a subscriber with ``on_error="disable"``: off after so many failures in a row, tried again later.

::

    closed ──── `disable_after` failures in a row ────► open ──── `retry_after` seconds ────► half-open
      ▲                                                  ▲                                        │ the next event
      │                                                  └─────────────── it failed ──────────────┤ is the trial
      └────────────────────────────────────────────────────────────────── it was delivered ───────┘
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic, time
from typing import TYPE_CHECKING

from eventbus.events import TERMINAL

if TYPE_CHECKING:
    from eventbus.events import Event
    from eventbus.options import Options

__all__ = ["Breaker"]


class Breaker:
    """The failures in a row of one subscriber, and whether it is switched off.

    A terminal event is let through an open breaker as a trial of its own, whatever the time: a tracker that misses it
    shows the run as running for ever.
    """

    __slots__ = (
        "_limit",
        "_pause_s",
        "_retry_at_s",
        "announce",
        "announced",
        "failures",
        "is_open",
        "on_trial",
        "since",
    )

    def __init__(self, options: Options) -> None:
        self._limit = options.disable_after
        self._pause_s = options.retry_after
        self._retry_at_s = 0.0
        #: In a row. A call counts once, also when it was given a batch of events.
        self.failures = 0
        self.is_open = False
        #: It is half-open: something was let through to see whether it works again.
        self.on_trial = False
        #: When it opened, Unix time.
        self.since = 0.0
        #: Whether it was announced that it is open.
        self.announced = False
        #: Called when it closes, by who delivered the event.
        self.announce: Callable[[], object] = _nobody

    def failed(self) -> None:
        self.failures += 1
        if self.is_open or self.failures >= self._limit:
            if not self.is_open:
                self.since = time()
            self._retry_at_s = monotonic() + self._pause_s
            self.on_trial = False
            self.is_open = True

    def succeeded(self) -> None:
        self.failures = 0
        if self.is_open:
            self.is_open = self.on_trial = False
            self.announce()

    def admits(self, event: Event) -> bool:
        """Whether an event may wait for delivery: any, unless it is open; then those that it is tried with."""
        return not self.is_open or isinstance(event, TERMINAL) or self.tries()

    def tries(self) -> bool:
        """Whether an open breaker is half-open, or becomes it now."""
        if not self.on_trial and monotonic() < self._retry_at_s:
            return False
        self.on_trial = True
        return True

    def hasten(self) -> None:
        """Try it with the next event, whatever the time."""
        self._retry_at_s = 0.0

    def claims(self, event: Event) -> bool:
        """Whether an event is to be delivered here and now: any, unless it is open; then one trial at a time."""
        if not self.is_open or isinstance(event, TERMINAL):
            return True
        is_due = monotonic() >= self._retry_at_s
        if self.on_trial or not is_due:
            return False
        self.on_trial = True  # no call between the test and this: of several publishers one tries
        return True


def _nobody() -> None:
    """Nobody is told."""
