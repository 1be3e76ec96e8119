"""Signals that end a run cleanly: installed only when asked, and only for as long as the run lasts."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any, Self

__all__ = ["StopSignals", "signals_of"]

#: What no process can handle.
_NEVER = {"SIGKILL", "SIGSTOP"}


class StopSignals:
    """While it lasts, each of these signals asks for a stop; a handler that was there before is called too.

    The handler only sets a flag: it takes no lock and writes nothing. Ctrl-C twice interrupts at once, as it does
    without this. `is_heard` says at the end whether the run ended by the signal. One that came too late for that takes
    effect then: a handler that was there before has been called, Ctrl-C raises, and what would have killed the process
    ends it by ``SystemExit(128 + number)``, so that everything is closed on the way. Raises `RuntimeError` off the
    main thread, where Python installs no handlers.

    A scheduler signals the worker processes too. When they die of it, a handler of SIGCHLD (torch installs one that
    raises) must not strike in the middle of a checkpoint: from the first signal on, what it raises is lost.
    """

    def __init__(
        self, signals: Iterable[signal.Signals], ask: Callable[[str], object], is_heard: Callable[[], bool]
    ) -> None:
        self._signals = tuple(signals)
        self._ask = ask
        self._is_heard = is_heard
        self._former: dict[int, Any] = {}
        self._came: list[int] = []
        self._is_over = False
        self._pid = os.getpid()

    def __enter__(self) -> Self:
        self._check()
        for number in self._signals:
            self._former[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over = True
        for number in tuple(self._former):
            self._put_back(number)
        if self._came and error is None and not self._is_heard():
            self._catch_up(self._came[0])

    def _check(self) -> None:
        names = ", ".join(number.name for number in self._signals)
        if names and threading.current_thread() is not threading.main_thread():
            raise RuntimeError(
                f"signals=({names}) works only on the main thread, where Python handles signals. Run the training "
                "there, or have a handler there that asks: bus.control.stop('SIGTERM', requester='signal')."
            )
        for number in self._signals:
            if signal.getsignal(number) is None:
                raise RuntimeError(
                    f"{number.name} has a handler that was not installed by Python: it could be neither called nor put "
                    "back. Leave it out of signals=."
                )

    def _put_back(self, number: int) -> None:
        """Restore what was there before, unless somebody has put something else there meanwhile."""
        if signal.getsignal(number) in (self._handle, self._child_died):
            signal.signal(number, self._former[number])

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Ask, then go on to the handler that was there before."""
        if self._is_over or os.getpid() != self._pid:
            self._as_before(number, frame)
            return
        former, is_second = self._former[number], bool(self._came)
        self._came.append(number)
        if not is_second:
            self._quieten_children()
        self._ask(f"signal {signal.Signals(number).name}")
        if callable(former) and (is_second or former is not signal.default_int_handler):
            former(number, frame)

    def _quieten_children(self) -> None:
        child_died: int | None = getattr(signal, "SIGCHLD", None)  # Windows has none
        if child_died is not None and child_died not in self._former and callable(signal.getsignal(child_died)):
            self._former[child_died] = signal.signal(child_died, self._child_died)

    def _child_died(self, number: int, frame: FrameType | None) -> None:
        with suppress(Exception):  # the run ends anyway, and its loader finds out for itself
            self._former[number](number, frame)

    def _as_before(self, number: int, frame: FrameType | None) -> None:
        """Do what the signal did before: in a process forked meanwhile, and for who still calls this afterwards."""
        former = self._former[number]
        if callable(former):
            former(number, frame)
        elif former == signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    def _catch_up(self, number: int) -> None:
        """Let a signal that found nothing to stop take effect: the script must not go on as if there had been none."""
        former = self._former[number]
        if former is signal.default_int_handler:
            raise KeyboardInterrupt
        if former == signal.SIG_DFL:
            raise SystemExit(128 + number)


def signals_of(given: Iterable[str | int]) -> tuple[signal.Signals, ...]:
    """The signals that are meant: by name ("SIGTERM"), as `signal.Signals`, or by number.

    Raises `ValueError` or `TypeError` for what is none, or cannot be handled.
    """
    if isinstance(given, str | int):
        raise TypeError(f"signals= takes several: signals=({_shown(given)},).")
    return tuple(dict.fromkeys(_signal(one) for one in given))


def _signal(given: str | int) -> signal.Signals:
    try:
        found = signal.Signals[given] if isinstance(given, str) else signal.Signals(given)
    except (KeyError, ValueError):
        raise ValueError(f"signals= has {given!r}, which is no signal here.{_hint(given)}") from None
    if found.name in _NEVER:
        raise ValueError(f"signals= has {found.name}, which no process can handle.")
    return found


def _hint(given: object) -> str:
    from difflib import get_close_matches

    known = [number.name for number in signal.Signals]
    near = get_close_matches(f"SIG{str(given).upper().removeprefix('SIG')}", known, n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


def _shown(given: object) -> str:
    return given.name if isinstance(given, signal.Signals) else repr(given)
