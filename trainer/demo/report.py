"""What the demo found, in words."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from eventbus import CloseReport, SubscriberStats
from trainer.demo.digits import TimedTrainer
from trainer.demo.receiver import Received

__all__ = ["Findings", "print_findings"]

_LEAST_ACCURACY = 0.95
_MOST_RATIO = 1.05


@dataclass(frozen=True)
class Findings:
    """Everything the demo measured; times in seconds."""

    pairs: list[tuple[TimedTrainer, TimedTrainer]]
    inline_s: float
    stats: Mapping[str, SubscriberStats]
    table: str
    closed: CloseReport
    received: list[Received]
    losses_seen: int
    home: Path
    seconds: float


def print_findings(found: Findings) -> int:
    """Print them; 0 when the accuracy, the table and the receiver are as they should be."""
    holds = [_print_times(found), _print_accuracy(found), _print_table(found), _print_receiver(found)]
    print(f"\nFiles in {found.home}:")
    for path in sorted(found.home.rglob("*.*")):
        print(f"  {path.relative_to(found.home)}  {path.stat().st_size:,} bytes")
    print(f"\nThat took {found.seconds:.0f} s.")
    return 0 if all(holds) else 1


def _print_times(found: Findings) -> bool:
    plain = [s for without, _ in found.pairs for s in without.step_seconds]
    heard = [s for _, with_bus in found.pairs for s in with_bus.step_seconds]
    ratio = statistics.median(heard) / statistics.median(plain)
    print(f"training step without subscribers: {_milliseconds(plain)}")
    print(f"training step with the bus:        {_milliseconds(heard)}")
    print(f"ratio of the medians:              {ratio:.3f}  (aim: ≤ {_MOST_RATIO})")
    inline = found.inline_s / statistics.median(plain)
    print(f"the webhook as a plain callback:   {1000 * found.inline_s:.1f} ms a step, {inline:.0f} times slower\n")
    return True  # a busy machine makes any ratio; the others are facts


def _milliseconds(seconds: list[float]) -> str:
    ordered = sorted(seconds)
    p99 = ordered[int(0.99 * len(ordered))]
    return (
        f"{1000 * statistics.median(seconds):.3f} ms median, {1000 * statistics.fmean(seconds):.3f} mean, "
        f"{1000 * p99:.3f} p99, {len(seconds)} steps"
    )


def _print_accuracy(found: Findings) -> bool:
    accuracy = min(trainer.metrics["val/accuracy"] for pair in found.pairs for trainer in pair)
    print(f"validation accuracy: {accuracy:.3f}  (aim: ≥ {_LEAST_ACCURACY})\n")
    return accuracy >= _LEAST_ACCURACY


def _print_table(found: Findings) -> bool:
    print(found.table)
    balanced = all(
        s.matched == s.delivered + s.failed + s.timed_out + s.dropped + s.pending for s in found.stats.values()
    )
    print(
        f"matched = delivered + failed + timed out + dropped + pending: {'holds' if balanced else 'DOES NOT HOLD'}; "
        f"left at close: {dict(found.closed.left) or 'nothing'}\n"
    )
    return balanced and found.closed.ok


def _print_receiver(found: Findings) -> bool:
    signed = sum(request.is_signed for request in found.received)
    taken = [request.id for request in found.received if request.was_taken]
    failed = len(found.received) - len(taken)
    events = found.stats["webhook"].delivered
    print(
        f"receiver: {len(found.received)} requests, {signed} with a valid signature, {failed} answered with 503 and "
        f"sent again;\n          {len(set(taken))} different ids for {events} delivered events, "
        f"{len(taken) - len(set(taken))} twice"
    )
    return signed == len(found.received) and len(taken) == len(set(taken)) == events
