"""`every`, `every_s`, `when` and `once`: which of the events it hears a subscriber gets."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from eventbus.events import Event
    from eventbus.options import Options

__all__ = ["Conditions"]


class Conditions:
    """The conditions of one subscriber, asked about each event it hears, in the order of the events.

    Exact under several threads: a count is drawn, and `once` claimed, without a call in between.
    """

    __slots__ = ("_counts", "_last_s", "_options", "spent")

    def __init__(self, options: Options) -> None:
        self._options = options
        self._counts: dict[str, count[int]] = {}
        self._last_s: dict[str, float] = {}
        #: `once` is over.
        self.spent = False

    @classmethod
    def of(cls, options: Options) -> Conditions | None:
        """None for a subscriber that gets all it hears."""
        if options.every == 1 and options.every_s is None and options.when is None and not options.once:
            return None
        return cls(options)

    def admit(self, event: Event) -> bool:
        """Whether the subscriber gets this event; raises what its `when` raises."""
        options = self._options
        if self.spent or (options.when is not None and not options.when(event)):
            return False
        if options.every > 1 and next(self._counts.setdefault(event.hook, count(1))) % options.every:
            return False
        if options.every_s is not None and not self._is_due(event, options.every_s):
            return False
        if options.once:
            return self._claim()
        return True

    def _claim(self) -> bool:
        """Whether this thread is the one that gets the event of `once`; a test and a store without a call between."""
        if self.spent:
            return False
        self.spent = True
        return True

    def _is_due(self, event: Event, every_s: float) -> bool:
        if event.time - self._last_s.get(event.hook, float("-inf")) < every_s:
            return False
        self._last_s[event.hook] = event.time
        return True
