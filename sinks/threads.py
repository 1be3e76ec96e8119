"""Work that blocks, and work that must not be broken off, on asyncio and on trio."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
import anyio.to_thread

from eventbus.executor import DaemonExecutor

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

__all__ = ["IOThread", "finish", "in_thread", "on_asyncio"]

T = TypeVar("T")


def on_asyncio() -> bool:
    """Say whether the caller runs in an asyncio task (and not on trio, even if asyncio hosts it)."""
    try:
        return asyncio.current_task() is not None
    except RuntimeError:
        return False


async def in_thread(function: Callable[..., T], *args: object) -> T:
    """Run blocking `function` in a thread of the loop's own."""
    if on_asyncio():
        return await asyncio.get_running_loop().run_in_executor(None, function, *args)
    return await anyio.to_thread.run_sync(function, *args)


class IOThread:
    """The thread of one sink's own for its file IO, started when first needed.

    The threads of a loop are everybody's, and on a host's loop few: a handler whose blocking calls hang would keep
    every file waiting.
    """

    def __init__(self) -> None:
        self._executor: DaemonExecutor | None = None

    @property
    def executor(self) -> DaemonExecutor:
        """The thread, as asyncio takes it."""
        if self._executor is None:
            self._executor = DaemonExecutor(started=0)
        return self._executor

    async def run(self, function: Callable[..., T], *args: object) -> T:
        """Run blocking `function` in it."""
        if on_asyncio():
            return await asyncio.get_running_loop().run_in_executor(self.executor, function, *args)
        return await anyio.to_thread.run_sync(function, *args, limiter=anyio.CapacityLimiter(1))  # shared with nobody

    def end(self) -> None:
        """Let it end after what it was given; the next call starts another one."""
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown()


async def finish(work: Coroutine[Any, Any, T]) -> T:
    """Await `work` to its end even when cancelled, and only then be cancelled.

    What a thread has begun cannot be taken back: cancelled in the middle, a write would still happen after the
    caller was told that it did not, and an open would leave its file behind.
    """
    if not on_asyncio():
        with anyio.CancelScope(shield=True):
            return await work
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait([task])
    except asyncio.CancelledError:  # the cancellation wins; a failure of the work counts as seen
        await _ended(task)
        task.cancelled() or task.exception()
        raise
    return task.result()


async def _ended(task: asyncio.Task[Any]) -> None:
    # Only here, since the first use of a scope imports anyio's half for asyncio, 30 ms in which the loop stands still.
    with anyio.CancelScope(shield=True):
        while not task.done():
            try:
                await asyncio.wait([task])
            except asyncio.CancelledError:
                continue
