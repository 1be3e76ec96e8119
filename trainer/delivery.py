"""The bus of a trainer, around whatever the trainer does: open while it is busy, delivered and closed after it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from eventbus.errors import WouldBlockError

if TYPE_CHECKING:
    from eventbus.bus import EventBus

__all__ = ["Delivery", "owed"]

_log = logging.getLogger("trainbus")


class Delivery:
    """Flushes a bus that was given; closes one that the trainer made, and opens it again when it is needed again.

    A training between two predicted batches only flushes: the prediction still needs the bus.
    """

    def __init__(self, bus: EventBus, *, is_own: bool, timeout_s: float) -> None:
        self._bus = bus
        self._is_own = is_own
        self._timeout_s = timeout_s
        self._is_closed = False
        self._depth = 0

    def __getstate__(self) -> dict[str, Any]:
        """A copy in another process does nothing yet; a bus of the trainer's own arrives closed, to be opened again."""
        return self.__dict__ | {"_is_closed": self._is_own or self._is_closed, "_depth": 0}

    @property
    def is_busy(self) -> bool:
        """Whether the trainer is doing something right now."""
        return self._depth > 0

    @contextmanager
    def session(self, *, is_training: bool = False) -> Iterator[None]:
        """While it lasts the trainer is busy; a training, and what had to open the bus again, ends with a delivery."""
        reopens = self._is_closed
        if reopens:
            self._bus.__enter__()
            self._is_closed = False
        self._depth += 1
        with owed(self._deliver if is_training or reopens else lambda: None):
            try:
                yield
            finally:
                self._depth -= 1

    def _deliver(self) -> None:
        try:
            if self._is_own and self._depth == 0:
                self._is_closed = True
                is_done = self._bus.close(self._timeout_s).ok
            else:
                is_done = self._bus.flush(self._timeout_s)
        except WouldBlockError:  # this thread runs the loop of the bus, which delivers once it is left
            return
        if not is_done:
            _log.warning("Not every event was delivered within %g s.", self._timeout_s)


@contextmanager
def owed(end: Callable[[], None]) -> Iterator[None]:
    """Call `end` whatever happens; after an error, what it raises does not take that error's place."""
    try:
        yield
    except BaseException as error:
        try:
            end()
        except Exception as late:  # noqa: BLE001  # the first error is the one to show
            error.add_note(f"while this went up, a hook failed too: {type(late).__name__}: {late}")
        raise
    end()
