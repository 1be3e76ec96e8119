"""Events per second into a file, beside the standard library's way to log off the hot thread."""

from __future__ import annotations

import json
import logging
import logging.handlers
import queue
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from benchmarks.measure import EVENT, Row, ratio_row
from eventbus import EventBus
from sinks import JSONLSink

_EVENTS = 50_000


def rows() -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        pairs = [(jsonl(Path(folder, f"{n}.jsonl")), queue_handler(Path(folder, f"{n}.log"))) for n in range(3)]
    ours, reference = max(a for a, _ in pairs), max(b for _, b in pairs)
    yield ratio_row(
        "JSONL, published to written and closed / QueueHandler + FileHandler",
        ours,
        reference,
        "≥ 5 ×",
        unit="/s",
        least=5,
    )


def jsonl(path: Path) -> float:
    bus = EventBus()
    bus.attach(JSONLSink(path))
    with bus:
        started = time.perf_counter()
        for _ in range(_EVENTS):
            bus.publish(EVENT)
        bus.flush(60)
        took = time.perf_counter() - started
    assert path.read_bytes().count(b"\n") == _EVENTS
    return _EVENTS / took


def queue_handler(path: Path) -> float:
    records: queue.SimpleQueue[logging.LogRecord] = queue.SimpleQueue()
    logger = logging.Logger("reference")
    logger.addHandler(logging.handlers.QueueHandler(records))  # type: ignore[arg-type]  # a SimpleQueue does
    handler = logging.FileHandler(path)
    listener = logging.handlers.QueueListener(records, handler)  # type: ignore[arg-type]
    listener.start()
    started = time.perf_counter()
    for _ in range(_EVENTS):
        logger.info(json.dumps(msgspec.structs.asdict(EVENT)))
    listener.stop()
    handler.close()
    return _EVENTS / (time.perf_counter() - started)
