"""The default executor of the bus's own loop: daemon threads, some of them started beforehand.

`concurrent.futures` refuses work once the interpreter begins to exit, and Python 3.12 starts no thread then. Handlers
that use `aiofiles` or `asyncio.to_thread` must still be served while the exit hook delivers what is left.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar

from eventbus import handling

__all__ = ["DaemonExecutor"]

_STARTED = 4
#: How many threads the calls of one subscriber may occupy, those that hang included.
_MOST_EACH = 32

P = ParamSpec("P")
T = TypeVar("T")


class _Job:
    """One call, and the subscriber on whose behalf it is made."""

    __slots__ = ("call", "future", "owner")

    def __init__(self, call: Callable[[], Any], future: Future[Any] | None, owner: object) -> None:
        self.call = call
        self.future = future
        self.owner = owner


class DaemonExecutor(ThreadPoolExecutor):
    """A thread pool whose threads never keep the process (asyncio demands the base class).

    The calls of one subscriber wait for each other when there are too many, and for nobody else's: a client that
    hangs for ever costs its own subscriber its threads, and the others none. `spare` threads more than those
    `started` beforehand are there for `lend`.
    """

    def __init__(self, spare: int = 0, *, started: int = _STARTED) -> None:
        super().__init__(max_workers=_MOST_EACH)
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        #: Held for a moment and never while foreign code runs.
        self._lock = threading.Lock()
        self._idle_threads = 0
        self._started_threads = 0
        self._beforehand = started + spare
        #: How many calls of each subscriber run or are about to, and those that wait for one of them to end.
        self._busy: Counter[object] = Counter()
        self._waiting: dict[object, deque[_Job]] = {}

    def start(self) -> None:
        """Start the threads that are there from the beginning; again for those that a Ctrl-C prevented."""
        for _ in range(self._started_threads, self._beforehand):
            self._start_thread(None)

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()

        def call() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = fn(*args, **kwargs)
            except BaseException as error:  # noqa: BLE001  # the future carries it to who waits
                future.set_exception(error)
            else:
                future.set_result(result)

        job = _Job(call, future, handling.handler.get())
        if self._may_run(job):
            self._run(job)
        return future

    def lend(self, fn: Callable[[], None]) -> bool:
        """Run `fn` in a thread that is started and idle; False when there is none."""
        with self._lock:
            if self._jobs.qsize() >= self._idle_threads:
                return False
            job = _Job(fn, None, object())
            self._busy[job.owner] += 1
            self._jobs.put(job)
        return True

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        for _ in range(self._started_threads):
            self._jobs.put(None)

    def _may_run(self, job: _Job) -> bool:
        """Whether its subscriber has a thread left; else it waits, and those given up meanwhile are forgotten."""
        with self._lock:
            if self._busy[job.owner] < _MOST_EACH:
                self._busy[job.owner] += 1
                return True
            waiting = self._waiting.setdefault(job.owner, deque())
            while waiting and waiting[0].future is not None and waiting[0].future.cancelled():
                waiting.popleft()
            waiting.append(job)
            return False

    def _run(self, job: _Job) -> None:
        """Give it to an idle thread, or to a new one."""
        with self._lock:
            is_served = self._jobs.qsize() < self._idle_threads
            if is_served:
                self._jobs.put(job)
        if is_served or self._start_thread(job):
            return
        if self._started_threads:
            self._jobs.put(job)
        else:  # no thread was started in time, and none can be any more
            job.call()
            self._ended(job.owner)

    def _ended(self, owner: object) -> None:
        """A call of this subscriber has ended: the next one that waits takes its place."""
        with self._lock:
            waiting = self._waiting.get(owner)
            job = waiting.popleft() if waiting else None
            if not waiting:
                self._waiting.pop(owner, None)
            if job is None:
                self._busy[owner] -= 1
                if not self._busy[owner]:
                    del self._busy[owner]
        if job is not None:
            self._run(job)

    def _start_thread(self, first: _Job | None) -> bool:
        """Start a thread that begins with this call; False when the interpreter starts none any more."""
        try:
            threading.Thread(target=self._work, args=(first,), name="trainbus-io", daemon=True).start()
        except RuntimeError:
            return False
        with self._lock:
            self._started_threads += 1
            self._idle_threads += first is None
        return True

    def _work(self, job: _Job | None) -> None:
        while True:
            if job is not None:
                job.call()
                owner = job.owner
                with self._lock:
                    self._idle_threads += 1
                job = None  # hold nothing of it while idle
                self._ended(owner)
                del owner
            job = self._jobs.get()
            with self._lock:
                self._idle_threads -= 1
            if job is None:
                return
