"""Work that blocks, and work that must not be broken off, on asyncio and on trio."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
import anyio.to_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

__all__ = ["finish", "in_thread", "on_asyncio"]

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
