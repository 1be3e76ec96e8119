"""`every`, `every_s`, `when` and `once`: which of the events it hears a subscriber gets."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from eventbus.events import Event
    from eventbus.options import Options

__all__ = ["Conditions"]


class Conditions:
    """The conditions of one subscriber, asked about each event it hears, in the order of the events.

    Exact under several threads: what is drawn or claimed is stored without a call in between. And exact across a
    Ctrl-C: a feeder that was interrupted asks about the last event again, and gets the same answer.
    """

    __slots__ = ("_claimed", "_counted", "_counts", "_due", "_last_s", "_options", "spent")

    def __init__(self, options: Options) -> None:
        self._options = options
        # By hook: how many there were, and the last one counted; when one was due last, and which that was.
        self._counts: dict[str, int] = {}
        self._counted: dict[str, int] = {}
        self._last_s: dict[str, float] = {}
        self._due: dict[str, int] = {}
        #: `once` is over, and this event was it.
        self.spent = False
        self._claimed = 0

    @classmethod
    def of(cls, options: Options) -> Conditions | None:
        """None for a subscriber that gets all it hears."""
        if options.every == 1 and options.every_s is None and options.when is None and not options.once:
            return None
        return cls(options)

    def admit(self, event: Event) -> bool:
        """Whether the subscriber gets this event; raises what its `when` raises."""
        options = self._options
        if self.spent and event.seq != self._claimed:
            return False
        if options.when is not None and not options.when(event):
            return False
        if options.every > 1 and self._count(event) % options.every:
            return False
        if options.every_s is not None and not self._is_due(event, options.every_s):
            return False
        return not options.once or self._claim(event)

    def rewind(self, seq: int) -> None:
        """What came after this event is asked about again: of its hooks, count and time from here."""
        for hook, last in tuple(self._counted.items()):
            if last > seq:
                self._counts[hook] = self._counted[hook] = 0
        for hook, last in tuple(self._due.items()):
            if last > seq:
                self._due.pop(hook)
                self._last_s.pop(hook)

    def _count(self, event: Event) -> int:
        """Which of its hook it is, from 1."""
        hook, counts = event.hook, self._counts
        counts.setdefault(hook, 0)
        if self._counted.get(hook) != event.seq:
            counts[hook] += 1
            number = counts[hook]
            self._counted[hook] = event.seq
            return number
        return counts[hook]

    def _is_due(self, event: Event, every_s: float) -> bool:
        hook, last_s = event.hook, self._last_s
        if self._due.get(hook) == event.seq:
            return True
        if hook in last_s and event.time - last_s[hook] < every_s:
            return False
        last_s[hook] = event.time
        self._due[hook] = event.seq
        return True

    def _claim(self, event: Event) -> bool:
        """Whether it is the one event of `once`."""
        if self.spent:
            return event.seq == self._claimed
        self._claimed = event.seq
        self.spent = True
        return True
