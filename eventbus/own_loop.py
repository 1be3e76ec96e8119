"""A loop in a thread of the bus's own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio

    from eventbus.asyncio_host import AsyncioHost

__all__ = ["OwnLoop"]


class OwnLoop:
    """An asyncio loop (uvloop where installed) in a daemon thread of the bus's own.

    Daemon, since a stuck handler must not keep the process; its executor threads are started beforehand, since
    Python 3.12 starts none at exit.
    """

    def __init__(self, main: Callable[[AsyncioHost], Coroutine[Any, Any, None]]) -> None:
        self._main = main
        self.host: AsyncioHost | None = None
        self.ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="trainbus-loop", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        # imported here, in its own thread: a process that only registers, or a forked worker, needs none of it
        import asyncio

        from eventbus.executor import DaemonExecutor

        loop = _new_loop()
        executor = DaemonExecutor()
        loop.set_default_executor(executor)
        asyncio.set_event_loop(None)
        try:
            loop.run_until_complete(self._hosted())
        finally:
            self.ready.set()
            _finish(loop)
            executor.shutdown(wait=False)

    async def _hosted(self) -> None:
        from eventbus.asyncio_host import AsyncioHost

        self.host = AsyncioHost("in a thread of its own")
        self.ready.set()
        await self._main(self.host)

    def is_current(self) -> bool:
        return threading.current_thread() is self._thread

    def join(self, timeout: float) -> bool:
        """Wait for the thread to end; False when something holds it."""
        if not self.is_current():
            self._thread.join(max(timeout, 0.0))
        return not self._thread.is_alive()


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        import asyncio

        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


def _finish(loop: asyncio.AbstractEventLoop) -> None:
    """Close a loop, giving what still runs on it one chance to end."""
    import asyncio

    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if tasks:
        loop.run_until_complete(asyncio.wait(tasks, timeout=0.1))
    for task in asyncio.all_tasks(loop):
        task._log_destroy_pending = False  # type: ignore[attr-defined]  # abandoned and already reported
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()
