"""Millions of events from eight threads: the counts are exact and the memory stays flat.

``python -m tests.chaos.soak --events=10000000``
"""

from __future__ import annotations

import argparse
import sys
import threading
from pathlib import Path
from time import perf_counter

from eventbus import EventBus
from tests.chaos.scenario import Step

__all__ = ["soak"]

_THREADS = 8
#: So many events are published at once, then settled: no more wait than those who must lose nothing have room for.
_ROUND = 20_000
#: How much more memory the last rounds may take than the first ones; one entry in a thousand kept of 10⁷ is more.
_GROWTH_MIB = 8.0


class Receiver:
    """Counts what it gets, and looks at the order."""

    def __init__(self) -> None:
        self.count = 0
        self.last = [-1] * _THREADS
        self.faults: list[str] = []

    def take(self, event: Step) -> None:
        self.count += 1
        if event.n != self.last[event.who] + 1:
            self.faults.append(f"event {event.n} of thread {event.who} came after {self.last[event.who]}")
        self.last[event.who] = event.n

    async def take_on_loop(self, event: Step) -> None:
        self.take(event)


def soak(events: int) -> list[str]:
    """Publish so many events to subscribers of each kind and policy; returns what is wrong."""
    lossless, threaded = Receiver(), Receiver()
    faults: list[str] = []
    resident: list[float] = []
    with EventBus(run="soak") as bus:
        bus.subscribe(lossless.take_on_loop, Step, name="async", maxsize=_ROUND)
        bus.subscribe(threaded.take, Step, name="thread", run_in="thread", maxsize=_ROUND)
        for overflow in ("drop_oldest", "drop_newest", "latest"):
            bus.subscribe(_raising(), Step, name=overflow, overflow=overflow, maxsize=100)
        for number in range(events // _ROUND):
            _publish(bus, number)
            if not bus.flush(60.0):
                faults.append("a flush was not complete after a minute")
            resident.append(_resident_mib())
        total = events // _ROUND * _ROUND
        faults += [*_miscounts(bus, total), *lossless.faults, *threaded.faults]
    if (lossless.count, threaded.count) != (total, total):
        faults.append(f"of {total} events {lossless.count} and {threaded.count} were received")
    third = max(len(resident) // 3, 1)
    early, late = min(resident[:third]), min(resident[-third:])
    if late - early > _GROWTH_MIB:
        faults.append(f"resident memory grew from {early:.1f} to {late:.1f} MiB")
    return faults[:10]


def _raising() -> object:
    async def shun(event: Step) -> None:
        raise ValueError

    return shun


def _publish(bus: EventBus, number: int) -> None:
    each = _ROUND // _THREADS

    def publish(who: int) -> None:
        for n in range(each * number, each * (number + 1)):
            bus.publish(Step(who=who, n=n))

    threads = [threading.Thread(target=publish, args=(who,)) for who in range(_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _miscounts(bus: EventBus, total: int) -> list[str]:
    faults = []
    for name, s in bus.stats().items():
        settled = s.delivered + s.failed + s.timed_out + s.dropped
        if (s.matched, settled, s.pending, sum(s.dropped_by.values())) != (total, total, 0, s.dropped):
            faults.append(f"{name} should have matched and settled {total}: {s}")
        if name in ("async", "thread") and s.delivered != total:
            faults.append(f"{name} lost some of {total}: {s}")
    return faults


def _resident_mib() -> float:
    """How much memory of this process is resident; 0 where the system does not tell."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return 0.0
    return pages * 4096 / 2**20


def main() -> int:
    """Soak as long as asked, and say how it went."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.soak", description=__doc__)
    parser.add_argument("--events", type=int, default=10_000_000)
    events = parser.parse_args().events
    started = perf_counter()
    faults = soak(events)
    print(f"{events} events from {_THREADS} threads in {perf_counter() - started:.0f} s: {faults or 'exact'}")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
