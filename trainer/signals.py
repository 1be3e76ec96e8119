"""Signals that end a training cleanly: installed only when asked, and only for as long as the training lasts."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable
from types import FrameType, TracebackType
from typing import Any, Self

__all__ = ["StopSignals"]


class StopSignals:
    """While it lasts, each of these signals asks for a stop; a handler that was there before is called too.

    Ctrl-C twice interrupts at once, as it does without this. Raises `RuntimeError` off the main thread, where
    Python installs no handlers.
    """

    def __init__(self, signals: Iterable[signal.Signals | int], ask: Callable[[str], object]) -> None:
        self._signals = tuple(signal.Signals(number) for number in signals)
        self._ask = ask
        self._former: dict[int, Any] = {}
        self._was_asked = False

    def __enter__(self) -> Self:
        if self._signals and threading.current_thread() is not threading.main_thread():
            names = ", ".join(number.name for number in self._signals)
            raise RuntimeError(f"signals=({names}) works only where fit() runs on the main thread.")
        for number in self._signals:
            self._former[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, former in self._former.items():
            signal.signal(number, former if former is not None else signal.SIG_DFL)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Ask, which takes no lock and writes nothing, then go on to the handler that was there before."""
        former, is_second = self._former[number], self._was_asked
        self._was_asked = True
        self._ask(f"signal {signal.Signals(number).name}")
        if callable(former) and (is_second or former is not signal.default_int_handler):
            former(number, frame)
