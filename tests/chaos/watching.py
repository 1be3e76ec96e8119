"""What is watched from outside while a scenario runs: the log, uncaught errors, open files, and the machine's pace."""

from __future__ import annotations

import gc
import logging
import os
import re
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter, sleep
from typing import TYPE_CHECKING

import uvloop

if TYPE_CHECKING:
    from typing import Self

__all__ = ["Metronome", "watched"]

#: What the bus may say at level ERROR of subscribers that misbehave; also of an inline hook that is to raise and hears
#: what the bus says about itself.
_EXPECTED = re.compile(
    r"Subscriber '.*' (failed on|is too slow|is disabled after)|^[sg]\d: (Deliberate|Odd)"
    r"|Reporting a failure of a subscriber failed: Deliberate"
)
_BEAT_S = 0.005
#: How many times in turn a close waits for another thread to get a processor.
_HAND_OVERS = 3


@contextmanager
def watched() -> Iterator[list[str]]:
    """Everything that must not happen and raises nowhere, as texts."""
    faults: list[str] = []
    listener = _Listener(faults)
    loggers = [logging.getLogger(name) for name in ("eventbus", "asyncio", "trio")]
    hooks = (threading.excepthook, sys.unraisablehook)
    propagate = [logger.propagate for logger in loggers]
    for logger in loggers:
        logger.addHandler(listener)
        logger.propagate = False
    threading.excepthook = lambda args: faults.append(f"uncaught in {args.thread}: {_text(args.exc_value)}")
    sys.unraisablehook = lambda args: faults.append(f"unraisable in {args.object!r}: {_text(args.exc_value)}")
    uvloop.new_event_loop().close()  # the first one opens a pipe that stays
    gc.collect()
    files = _open_files()
    try:
        yield faults
        gc.collect()
    finally:
        threading.excepthook, sys.unraisablehook = hooks
        for logger, was in zip(loggers, propagate, strict=True):
            logger.removeHandler(listener)
            logger.propagate = was
    left = {file: where for file, where in _open_files().items() if file not in files}
    if left:
        faults.append(f"files were left open: {left}")


class _Listener(logging.Handler):
    def __init__(self, faults: list[str]) -> None:
        super().__init__(logging.ERROR)
        self._faults = faults

    def emit(self, record: logging.LogRecord) -> None:
        if record.name != "eventbus" or not _EXPECTED.search(record.getMessage()):
            error = record.exc_info[1] if record.exc_info else None
            self._faults.append(f"log of {record.name}: {record.getMessage()}\n{_text(error)}")


def _text(error: BaseException | None) -> str:
    return "".join(traceback.format_exception(error)) if error is not None else ""


def _open_files() -> dict[str, str]:
    """The open descriptors and what they are, where the system tells."""
    found = {}
    try:
        numbers = os.listdir("/proc/self/fd")
    except OSError:
        return found
    for number in numbers:
        try:
            found[number] = os.readlink(f"/proc/self/fd/{number}")
        except OSError:  # the one that listed them
            pass
    return found


class Metronome:
    """A thread that only sleeps: how late it wakes is how long the machine held up everybody."""

    def __init__(self) -> None:
        self._beats: list[tuple[float, float]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="metronome", daemon=True)

    def worst_s(self, since: float, until: float) -> float:
        """How long a few threads that wait for each other may have been held up between two moments, all together."""
        sleep(2 * _BEAT_S)
        return _HAND_OVERS * sum(late for at, late in self._beats if at >= since and at - late <= until and late > 0.02)

    def _beat(self) -> None:
        while not self._over.is_set():
            began = perf_counter()
            sleep(_BEAT_S)
            now = perf_counter()
            self._beats.append((now, now - began - _BEAT_S))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
