"""Rows, and the clocks that fill them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from eventbus import TrainBatchEnd

#: What a training loop publishes for each batch: one metric, one learning rate.
EVENT = TrainBatchEnd(epoch=0, batch=1, global_batch=1, step=1, metrics={"loss": 0.5}, lr=(0.1,), batch_size=32)


@dataclass(frozen=True)
class Row:
    """One line of the table: a figure of ours, the reference's in the same run, and what was aimed at."""

    what: str
    ours: str
    reference: str
    ratio: str
    aim: str
    holds: bool | None


def ratio_row(
    what: str, ours: float, reference: float, aim: str, *, unit: str, most: float = 0, least: float = 0
) -> Row:
    """A row whose aim is a ratio of ours to the reference: at most `most`, or at least `least`."""
    ratio = ours / reference
    holds = ratio <= most if most else ratio >= least
    return Row(what, show(ours, unit), show(reference, unit), f"{ratio:.2f} ×", aim, holds)


def limit_row(what: str, ours: float, aim: str, *, unit: str, most: float) -> Row:
    """A row with a limit of its own and no reference."""
    return Row(what, show(ours, unit), "–", "–", aim, ours <= most)


def show(value: float, unit: str) -> str:
    if unit == "s":
        for factor, name in ((1e9, "ns"), (1e6, "µs"), (1e3, "ms")):
            if value * factor < 1000:
                return f"{value * factor:.3g} {name}"
        return f"{value:.3g} s"
    return f"{value:,.0f} {unit}"


def per_call(call: Callable[[], object], number: int, repeat: int = 7) -> float:
    """Seconds for one call, the best of several rounds."""
    best = float("inf")
    for _ in range(repeat):
        started = time.perf_counter()
        for _ in range(number):
            call()
        best = min(best, (time.perf_counter() - started) / number)
    return best


def paced(call: Callable[[], object], *, every_s: float, number: int) -> list[float]:
    """Seconds of each call, one every `every_s` beside Python work."""
    times = []
    for _ in range(number):
        work_until(time.perf_counter() + every_s)
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return times


def work_until(end_s: float) -> None:
    """Python work, as between two publishes of a training loop."""
    while time.perf_counter() < end_s:
        sum(range(100))


def at(times: list[float], share: float) -> float:
    """The quantile of sorted times."""
    return times[min(int(len(times) * share), len(times) - 1)]
