"""The default executor of the bus's own loop: daemon threads, some of them started beforehand.

`concurrent.futures` refuses work once the interpreter begins to exit, and Python 3.12 starts no thread then. Handlers
that use `aiofiles` or `asyncio.to_thread` must still be served while the exit hook delivers what is left.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar

__all__ = ["DaemonExecutor"]

_STARTED = 4
_MOST = 32

P = ParamSpec("P")
T = TypeVar("T")


class DaemonExecutor(ThreadPoolExecutor):
    """A thread pool whose threads never keep the process (asyncio demands the base class).

    `spare` threads more than the usual few are started beforehand, for `lend`.
    """

    def __init__(self, spare: int = 0) -> None:
        super().__init__(max_workers=_MOST)
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._idle_threads = 0
        self._started_threads = 0
        self._spare = spare

    def start(self) -> None:
        """Start the threads that are there from the beginning; again for those that a Ctrl-C prevented."""
        for _ in range(self._started_threads, _STARTED + self._spare):
            self._start_thread()

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()

        def job() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = fn(*args, **kwargs)
            except BaseException as error:  # noqa: BLE001  # the future carries it to who waits
                future.set_exception(error)
            else:
                future.set_result(result)

        if self._jobs.qsize() >= self._idle_threads and self._started_threads < _MOST:
            self._start_thread()
        if self._started_threads:
            self._jobs.put(job)
        else:  # no thread was started in time, and none can be any more
            job()
        return future

    def lend(self, fn: Callable[[], None]) -> bool:
        """Run `fn` in a thread that is started and idle; False when there is none."""
        if self._jobs.qsize() >= self._idle_threads:
            return False
        self._jobs.put(fn)
        return True

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        for _ in range(self._started_threads):
            self._jobs.put(None)

    def _start_thread(self) -> None:
        try:
            threading.Thread(target=self._work, name="trainbus-io", daemon=True).start()
        except RuntimeError:  # the interpreter is exiting: those that run have to do
            return
        self._started_threads += 1
        self._idle_threads += 1

    def _work(self) -> None:
        while True:
            job: Any = self._jobs.get()
            self._idle_threads -= 1
            if job is None:
                return
            job()
            del job  # hold nothing of it while idle
            self._idle_threads += 1
