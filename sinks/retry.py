"""When a failed delivery is tried again."""

from __future__ import annotations

import math
import random
import time
from dataclasses import dataclass
from email.utils import parsedate_to_datetime

__all__ = ["Retry", "retry_after_s"]

_random = random.Random()  # of our own: drawing from the global one would change a seeded training


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """A schedule of attempts: one per delay, each after a random part of it ("full jitter").

    Every client waits a different time, so an endpoint that comes back is not run over by all at once.
    """

    #: The longest wait before each attempt, in seconds; its length is the number of attempts.
    delays_s: tuple[float, ...] = (0, 1, 5, 30, 120, 300)
    #: The longest that a receiver's ``Retry-After`` is followed, in seconds.
    cap_s: float = 300.0
    #: No attempt begins later than this many seconds after the first could.
    total_s: float = 600.0

    def __post_init__(self) -> None:
        """Refuse what is no schedule."""
        if not self.delays_s:
            raise ValueError("Retry needs at least one delay: each stands for one attempt.")
        for value in (*self.delays_s, self.cap_s, self.total_s):
            if not 0 <= value < math.inf:
                raise ValueError(f"Retry takes finite seconds of 0 or more, not {value!r}.")

    def pause_s(self, delay_s: float, asked_s: float | None) -> float:
        """Return the seconds to wait, where the receiver asked for `asked_s` or (None) for nothing."""
        return max(_random.uniform(0, delay_s), min(asked_s or 0.0, self.cap_s))


def retry_after_s(header: str | None) -> float | None:
    """Read ``Retry-After``, seconds (fractions too) or an HTTP date, as seconds from now; None if it is neither."""
    if header is None:
        return None
    try:
        seconds = float(header)
    except ValueError:
        seconds = _seconds_until(header)
    return max(0.0, seconds) if not math.isnan(seconds) else None


def _seconds_until(date: str) -> float:
    try:
        return parsedate_to_datetime(date).timestamp() - time.time()
    except (TypeError, ValueError, OverflowError):
        return math.nan
