"""What it costs to have every event on disk before `publish` returns, and what other ways of writing it would cost."""

from __future__ import annotations

import os
import sqlite3
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from benchmarks.measure import EVENT, Row, at, ratio_row, show
from eventbus import Event, EventBus
from eventbus.journal import Journal

_DATA = bytes(160)  # about what an event of a batch takes as msgpack
_CALLS = 15_000


async def ignore(event: Event) -> None:
    pass


def rows() -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        yield from publishing(Path(folder))
    with tempfile.TemporaryDirectory() as folder:
        yield from ways_to_write(Path(folder))


def publishing(folder: Path) -> Iterator[Row]:
    """The same publish on two buses, in turn, into the log and no further."""
    plain, kept = EventBus(autostart=False), EventBus(autostart=False, journal=folder)
    for bus in (plain, kept):
        bus.subscribe(ignore, type(EVENT))
    without, within = alternately(lambda: plain.publish(EVENT), lambda: kept.publish(EVENT))
    plain.close()
    kept.close()
    extra = at(within, 0.5) - at(without, 0.5)
    yield Row(
        "publish with a journal / without, median", show(at(within, 0.5), "s"), show(at(without, 0.5), "s"),
        f"+ {show(extra, 's')}", "≤ + 3 µs", extra <= 3e-6,
    )  # fmt: skip
    yield Row("the same, p99 of the publish", f"{at(within, 0.99) * 1e6:.3g} µs", f"{at(without, 0.99) * 1e6:.3g} µs",
              f"{at(within, 0.99) / at(without, 0.99):.2f} ×", "–", None)  # fmt: skip


def ways_to_write(folder: Path) -> Iterator[Row]:
    """One record: the mapped copy of the journal, a plain write, a row in SQLite; alone and beside a busy thread."""
    journal = Journal(folder / "journal")
    journal.open()
    draft: list[object] = [None, 0.0, None, None, 0, 0]
    buffer: deque[list[object]] = deque(maxlen=1)
    handle = os.open(folder / "plain", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    with sqlite3.connect(folder / "rows.sqlite", isolation_level=None) as database:
        database.execute("pragma journal_mode=wal")
        database.execute("pragma synchronous=off")  # what survives a killed process, as the others
        database.execute("create table events (seq integer primary key, data blob)")
        ways: dict[str, Callable[[], object]] = {
            "mapped": lambda: journal.append(draft, _DATA, buffer),
            "write": lambda: os.write(handle, _DATA),
            "SQLite": lambda: database.execute("insert into events (data) values (?)", (_DATA,)),
        }
        with burning(False):
            alone = alternately(*ways.values())
        with burning(True):
            beside = alternately(*ways.values(), calls=3_000)
    for name, share, times in (("alone, median", 0.5, alone), ("beside a busy thread, 99.8th of 100", 0.998, beside)):
        mapped, *others = (at(taken, share) for taken in times)
        for other, taken in zip(("os.write", "SQLite, WAL, synchronous=off"), others, strict=True):
            row = ratio_row(f"a record in the journal / {other}, {name}", mapped, taken, "–", unit="s", most=1)
            yield replace(row, holds=None)
    database.close()
    os.close(handle)
    journal.close()


def alternately(*ways: Callable[[], object], calls: int = _CALLS) -> list[list[float]]:
    """Seconds of each call, sorted, the ways taken in turn."""
    times: list[list[float]] = [[] for _ in ways]
    for _ in range(calls):
        for call, taken in zip(ways, times, strict=True):
            started = time.perf_counter()
            call()
            taken.append(time.perf_counter() - started)
    return [sorted(taken) for taken in times]


@contextmanager
def burning(wanted: bool) -> Iterator[None]:
    """A thread that computes in Python."""
    over = not wanted

    def burn() -> None:
        while not over:
            sum(range(100))

    thread = threading.Thread(target=burn)
    thread.start()
    try:
        yield
    finally:
        over = True
        thread.join()
