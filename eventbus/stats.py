"""What the bus counts for each subscriber, and the table for people."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from time import time
from typing import Literal, NamedTuple, TypeAlias

import msgspec

__all__ = ["Counters", "Outcome", "Row", "SubscriberStats", "table"]

#: What becomes of an event that is not dropped.
Outcome: TypeAlias = Literal["delivered", "failed", "timed_out"]

_RECENT_CALLS = 1024
_REASONS = (
    "overflow", "reserve", "newest", "coalesced", "block_timeout", "unsubscribed", "closed", "loop_closed",
    "no_thread", "interrupted", "disabled", "journal",
)  # fmt: skip


class SubscriberStats(msgspec.Struct, frozen=True, kw_only=True):
    """One subscriber at one instant: ``matched == delivered + failed + timed_out + dropped + pending``.

    Times are in seconds. `p99_s` is over the last 1,024 calls. `lag_s` is the age of the oldest pending event,
    `hold_s` the longest time for which the subscriber held its loop without awaiting.
    """

    matched: int = 0
    delivered: int = 0
    failed: int = 0
    timed_out: int = 0
    dropped: int = 0
    pending: int = 0
    dropped_by: Mapping[str, int] = {}
    retried: int = 0
    late_ok: int = 0
    calls: int = 0
    total_s: float = 0.0
    mean_s: float = 0.0
    p99_s: float = 0.0
    max_s: float = 0.0
    lag_s: float = 0.0
    hold_s: float = 0.0


class Counters:
    """The counts of one subscriber, each changed where the thing happens and none computed from the others.

    Every change is a block of statements without a call (or with one, as its last): under the GIL no other thread,
    signal handler or finaliser can come in between, so a reader sees the sum balance at any instant.
    """

    __slots__ = (
        "calls", "delivered", "dropped", "dropped_by", "failed", "hold_s", "late_ok", "matched", "max_s", "pending",
        "recent", "retried", "timed_out", "total_s",
    )  # fmt: skip

    def __init__(self) -> None:
        self.matched = self.delivered = self.failed = self.timed_out = self.dropped = self.pending = 0
        self.retried = self.late_ok = self.calls = 0
        self.total_s = self.max_s = self.hold_s = 0.0
        self.recent: deque[float] = deque(maxlen=_RECENT_CALLS)
        self.dropped_by = dict.fromkeys(_REASONS, 0)

    def took(self, seconds: float) -> None:
        """Note how long a call took."""
        self.calls += 1
        self.total_s += seconds
        if seconds > self.max_s:
            self.max_s = seconds
        self.recent.append(seconds)

    def read(self, oldest: float | None = None) -> SubscriberStats:
        """The counts now; `oldest` is the Unix time of the oldest pending event."""
        matched, delivered, failed, timed_out, dropped, pending = (
            self.matched, self.delivered, self.failed, self.timed_out, self.dropped, self.pending,
        )  # fmt: skip
        by = self.dropped_by.copy()
        recent = sorted(self.recent.copy())
        return SubscriberStats(
            matched=matched, delivered=delivered, failed=failed, timed_out=timed_out, dropped=dropped, pending=pending,
            dropped_by={reason: count for reason, count in by.items() if count},
            retried=self.retried, late_ok=self.late_ok, calls=self.calls, total_s=self.total_s,
            mean_s=self.total_s / self.calls if self.calls else 0.0,
            p99_s=recent[-(len(recent) // 100) - 1] if recent else 0.0,
            max_s=self.max_s, hold_s=self.hold_s, lag_s=max(time() - oldest, 0.0) if oldest and pending else 0.0,
        )  # fmt: skip


class Row(NamedTuple):
    """One line of the table."""

    name: str
    kind: str
    state: str
    stats: SubscriberStats


def table(rows: Iterable[Row]) -> str:
    """One line per subscriber: name, kind, state, counts, and how long it took."""
    head = ("subscriber", "kind", "state", "matched", "delivered", "failed", "timed out", "dropped", "pending",
            "total s", "mean ms", "p99 ms", "max ms", "held loop ms")  # fmt: skip
    lines = [head] + [
        (name, kind, state, *map(str, (s.matched, s.delivered, s.failed, s.timed_out, _dropped(s), s.pending)),
         f"{s.total_s:.1f}", *(f"{1000 * t:.2f}" for t in (s.mean_s, s.p99_s, s.max_s, s.hold_s)))
        for name, kind, state, s in rows
    ]  # fmt: skip
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.ljust(w) if i < 3 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )


def _dropped(stats: SubscriberStats) -> str:
    why = ", ".join(f"{count} {reason}" for reason, count in stats.dropped_by.items())
    return f"{stats.dropped} ({why})" if why else "0"
