"""A clock that tests move, for what the bus does after a while."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

__all__ = ["Clock"]


class Clock:
    """Takes the place of `monotonic` and `time` in some modules, and goes on only when it is moved."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
        self._moved_s = 0.0
        for name in modules:
            module = importlib.import_module(name)
            for function in {"monotonic", "time"} & set(vars(module)):
                monkeypatch.setattr(module, function, self._stopped(getattr(module, function)()))

    def _stopped(self, now_s: float) -> Callable[[], float]:
        return lambda: now_s + self._moved_s

    def move(self, seconds: float) -> None:
        self._moved_s += seconds
