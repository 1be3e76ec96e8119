"""The bus side on asyncio or uvloop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import TYPE_CHECKING, Any

from eventbus.loop import measured
from eventbus.notices import logger

if TYPE_CHECKING:
    from typing import Self

    from eventbus.executor import DaemonExecutor

__all__ = ["AsyncioHost"]


class AsyncioHost:
    """The asyncio (or uvloop) loop that runs in this thread."""

    @staticmethod
    def runs_here() -> bool:
        """Whether such a loop runs in this thread."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return False
        return True

    def __init__(self, name: str = "in the running asyncio loop", executor: DaemonExecutor | None = None) -> None:
        self.loop = asyncio.get_running_loop()
        self.ident = threading.get_ident()
        self.name = name
        self._executor = executor
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(
        self, run: Callable[[], Coroutine[Any, Any, None]], *, name: str, on_hold: Callable[[float], None]
    ) -> None:
        async def stepped() -> None:
            await measured(run(), on_hold)

        task = self.loop.create_task(stepped(), name=name)
        self._tasks.add(task)  # the loop itself holds tasks weakly
        task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception):  # workers tell their handlers' errors: this is one of ours
            logger.error("%s ended: %r", task.get_name(), error, exc_info=error)

    def call(self, fn: Callable[[], object]) -> None:
        """Call it on the loop, soon; from any thread."""
        try:
            self.loop.call_soon_threadsafe(fn)
        except RuntimeError:  # the loop is closed: asking first would be a race
            pass

    def lend_thread(self, fn: Callable[[], None]) -> bool:
        """Run `fn` in a thread that exists already; False when there is none to be had."""
        return self._executor is not None and self._executor.lend(fn)

    def scope(self) -> _AsyncioScope:
        return _AsyncioScope()

    def waker(self) -> _AsyncioWaker:
        return _AsyncioWaker(self.loop, self.ident)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def checkpoint(self) -> None:
        await asyncio.sleep(0)

    def is_closed(self) -> bool:
        """Whether the loop was closed, maybe under tasks that nobody told."""
        return self.loop.is_closed()

    def holder(self) -> str | None:
        """The name of the task that is in the middle of a step; from any thread."""
        task = asyncio.current_task(self.loop)
        return task.get_name() if task is not None else None

    def is_ours(self, error: BaseException, *, overdue: bool = False) -> bool:
        """Whether the loop's owner asked for it, who cancels all tasks at once; not we, and not a handler itself."""
        if isinstance(error, GeneratorExit):  # a handler's own, unless the loop was dropped with its tasks in it
            try:
                return asyncio.current_task() not in self._tasks
            except RuntimeError:
                return True
        return isinstance(error, asyncio.CancelledError) and all(t.cancelling() for t in self._tasks if not t.done())

    def forgives(self, error: BaseException, scope: _AsyncioScope) -> bool:
        """Take back a cancellation that neither we nor the loop's owner asked for."""
        if not isinstance(error, asyncio.CancelledError) or scope.cancel_called or self.is_ours(error):
            return False
        scope.uncancel()
        return True

    def interrupt(self, error: KeyboardInterrupt) -> None:
        """Let a KeyboardInterrupt that left a handler leave the loop too."""
        raise error

    def cancel_tasks(self) -> None:
        for task in tuple(self._tasks):
            task.cancel()


class _AsyncioScope:
    __slots__ = ("_task", "cancel_called")

    def __init__(self) -> None:
        self.cancel_called = False

    def cancel(self) -> None:
        if not self.cancel_called:
            self.cancel_called = True
            self._task.cancel()

    def uncancel(self) -> None:
        """Take back every cancellation of the task."""
        while self._task.uncancel():
            pass

    def __enter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None  # noqa: S101  # workers are tasks
        self._task = task
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while error is None and self._task.uncancel():
            pass  # this scope's request has done its work, and those of a handler that cancelled itself


class _AsyncioWaker:
    __slots__ = ("_future", "_ident", "_loop", "_woken")

    def __init__(self, loop: asyncio.AbstractEventLoop, ident: int) -> None:
        self._loop = loop
        self._ident = ident
        self._future: asyncio.Future[None] | None = None
        self._woken = False

    async def wait(self, timeout: float | None = None) -> None:
        if not self._woken:
            self._future = future = self._loop.create_future()
            timer = None if timeout is None else self._loop.call_later(timeout, self._release)
            try:
                await future
            finally:
                self._future = None
                if timer is not None:
                    timer.cancel()
        self._woken = False

    def wake(self) -> None:
        try:
            if threading.get_ident() == self._ident:
                self._awaken()
            else:
                self._loop.call_soon_threadsafe(self._awaken)
        except RuntimeError:  # the loop is closed: asking first would be a race
            pass

    def _awaken(self) -> None:
        self._woken = True
        self._release()

    def _release(self) -> None:
        if self._future is not None and not self._future.done():
            self._future.set_result(None)
