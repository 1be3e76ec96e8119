"""A loop in a thread of the bus's own."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Coroutine
from time import sleep
from typing import TYPE_CHECKING, Any

from eventbus.executor import DaemonExecutor
from eventbus.notices import logger

if TYPE_CHECKING:
    import asyncio

    from eventbus.asyncio_host import AsyncioHost

__all__ = ["OwnLoop", "load_loop", "new_loop"]

#: How long to wait before a loop that could not be made is tried again, at first and at most, in seconds.
_PAUSE_S = 0.25
_PAUSE_MOST_S = 8.0


class OwnLoop:
    """An asyncio loop (uvloop where installed) in a daemon thread of the bus's own.

    Daemon, since a stuck handler must not keep the process. All threads are started by who starts the bus:
    once the main thread has ended, Python 3.12 starts none. When it is too late even for that, whoever closes the
    bus lends its own thread with `run_here`.
    """

    def __init__(self, main: Callable[[AsyncioHost], Coroutine[Any, Any, None]], *, spare_threads: int) -> None:
        load_loop()
        self._main = main
        self._executor = DaemonExecutor(spare_threads)
        self._thread: threading.Thread | None = None
        self._waits_for_a_thread = False
        #: Taken by the one thread that runs the loop.
        self._turn = deque([True])

    def start(self) -> None:
        """Start the thread; again when a Ctrl-C struck in here, and then only one of the two runs the loop."""
        self._executor.start()
        try:
            threading.Thread(target=self._run, name="trainbus-loop", daemon=True).start()
        except RuntimeError:
            self._waits_for_a_thread = True
            if threading.main_thread().is_alive():
                logger.warning("The bus can start no thread: what is published is delivered when it is closed.")

    def run_here(self) -> None:
        """Run the loop in this thread, until its end, unless it runs somewhere."""
        if not self._waits_for_a_thread:
            return
        self._waits_for_a_thread = False
        self._run(is_patient=False)

    def _run(self, *, is_patient: bool = True) -> None:
        if not self._turn:
            return
        self._turn.popleft()
        self._thread = threading.current_thread()
        loop = self._make_loop(is_patient)
        if loop is None:
            return
        loop.set_default_executor(self._executor)
        try:
            loop.run_until_complete(self._hosted())
        finally:
            _finish(loop)
            self._executor.shutdown(wait=False)

    def _make_loop(self, is_patient: bool) -> asyncio.AbstractEventLoop | None:
        """A loop, once the process has the files for one: a training that ran out of them is served later."""
        pause_s = _PAUSE_S
        while True:
            try:
                return new_loop()
            except OSError as error:
                again = f"tries again in {pause_s:g} s" if is_patient else "delivers nothing more"
                logger.error("The bus cannot make a loop and %s: %s", again, error)
                if not is_patient:
                    return None
            sleep(pause_s)
            pause_s = min(2 * pause_s, _PAUSE_MOST_S)

    async def _hosted(self) -> None:
        from eventbus.asyncio_host import AsyncioHost

        await self._main(AsyncioHost("in a thread of its own", self._executor))

    def is_current(self) -> bool:
        return threading.current_thread() is self._thread

    def join(self, timeout: float) -> bool:
        """Wait for the thread to end; False when something holds it."""
        if self._thread is None or self.is_current():
            return True
        self._thread.join(max(timeout, 0.0))
        return not self._thread.is_alive()


def load_loop() -> None:
    """Import what a loop needs, on behalf of who registers the first subscriber for one.

    Not in the loop's own thread: a process that is forked while another thread imports a module finds it locked for
    ever, and loaders fork right after the first events.
    """
    import eventbus.asyncio_host  # noqa: F401

    try:
        import uvloop  # noqa: F401
    except ImportError:
        pass


def new_loop() -> asyncio.AbstractEventLoop:
    """A loop of uvloop where that is installed, else of asyncio."""
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
