"""Something that happens once, for which threads and tasks of any loop may wait."""

from __future__ import annotations

import threading
from time import perf_counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from eventbus.loop import Waker

__all__ = ["Completion"]


class Completion:
    """Set once, from any thread; waited for by threads with `wait` and by tasks with `wait_in_task`."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._wakers: list[Waker] = []

    def is_set(self) -> bool:
        return self._event.is_set()

    def set(self) -> None:
        self._event.set()
        for waker in tuple(self._wakers):
            waker.wake()

    def wait(self, timeout: float) -> bool:
        return self._event.wait(min(max(timeout, 0.0), threading.TIMEOUT_MAX))

    async def wait_in_task(self, waker: Waker, timeout: float) -> bool:
        """Wait on the loop that `waker` belongs to."""
        self._wakers.append(waker)
        until = perf_counter() + timeout
        while not self.is_set() and (left_s := until - perf_counter()) > 0:
            await waker.wait(left_s)
        return self.is_set()
