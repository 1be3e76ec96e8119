"""Where the bus side runs: a loop in a thread of the bus's own, or the running asyncio or trio loop of a host.

Both hosts offer the same five things: start a task, a scope that can be cancelled, a pause, a checkpoint, and a
`Waker` that any thread may use. Tasks belong to the loop and not to the task that started the bus, so that a
cancelled host still drains.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Generator
from contextlib import AbstractContextManager
from time import perf_counter
from types import TracebackType, coroutine
from typing import TYPE_CHECKING, Any, Protocol

from eventbus.errors import EventBusError
from eventbus.executor import DaemonExecutor

if TYPE_CHECKING:
    from typing import Self

    import trio

__all__ = ["AsyncioHost", "Host", "OwnLoop", "Scope", "TrioHost", "Waker", "current_host"]


class Waker(Protocol):
    """Lets one task wait until any thread wakes it; a wake before the wait is not lost."""

    async def wait(self, timeout: float | None = None) -> None: ...

    def wake(self) -> None: ...


class Scope(Protocol):
    """What a delivery runs in, so that it can be stopped without stopping its worker."""

    cancel_called: bool

    def cancel(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None: ...


class Host(Protocol):
    """A loop that the bus side runs on."""

    ident: int
    name: str

    def spawn(
        self, run: Callable[[], Coroutine[Any, Any, None]], *, name: str, on_hold: Callable[[float], None]
    ) -> None: ...
    def call(self, fn: Callable[[], object]) -> None: ...
    def scope(self) -> AbstractContextManager[Any]: ...
    def waker(self) -> Waker: ...
    async def sleep(self, seconds: float) -> None: ...
    async def checkpoint(self) -> None: ...
    def is_ours(self, error: BaseException) -> bool: ...
    def interrupt(self) -> None: ...


class AsyncioHost:
    """The asyncio (or uvloop) loop that runs in this thread."""

    def __init__(self, name: str = "in the running asyncio loop") -> None:
        self.loop = asyncio.get_running_loop()
        self.ident = threading.get_ident()
        self.name = name
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(
        self, run: Callable[[], Coroutine[Any, Any, None]], *, name: str, on_hold: Callable[[float], None]
    ) -> None:
        async def stepped() -> None:
            await _measured(run(), on_hold)

        task = self.loop.create_task(stepped(), name=name)
        self._tasks.add(task)  # the loop itself holds tasks weakly
        task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # seen: workers tell their own errors

    def call(self, fn: Callable[[], object]) -> None:
        """Call it on the loop, soon; from any thread."""
        try:
            self.loop.call_soon_threadsafe(fn)
        except RuntimeError:  # the loop is closed: asking first would be a race
            pass

    def scope(self) -> _AsyncioScope:
        return _AsyncioScope()

    def waker(self) -> _AsyncioWaker:
        return _AsyncioWaker(self.loop, self.ident)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def checkpoint(self) -> None:
        await asyncio.sleep(0)

    def is_ours(self, error: BaseException) -> bool:
        """Whether the loop's owner asked for it, and it is not just an error of a handler."""
        try:
            task = asyncio.current_task()
        except RuntimeError:
            task = None
        if isinstance(error, GeneratorExit):  # a handler's own, unless the loop was dropped with its tasks in it
            return task not in self._tasks
        return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0

    def interrupt(self) -> None:
        """Nothing to do: a KeyboardInterrupt that leaves a task leaves the loop too."""

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

    def __enter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None  # noqa: S101  # workers are tasks
        self._task = task
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not self.cancel_called:
            return False
        return self._task.uncancel() == 0 and isinstance(error, asyncio.CancelledError)


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
        if threading.get_ident() == self._ident:
            self._woken = True
            self._release()
            return
        try:
            self._loop.call_soon_threadsafe(self._release_from_afar)
        except RuntimeError:  # the loop is closed: asking first would be a race
            pass

    def _release_from_afar(self) -> None:
        self._woken = True
        self._release()

    def _release(self) -> None:
        if self._future is not None and not self._future.done():
            self._future.set_result(None)


class TrioHost:
    """The trio loop that runs in this thread."""

    def __init__(self, name: str = "in the running trio loop") -> None:
        import trio

        self._trio = trio
        self.token = trio.lowlevel.current_trio_token()
        self.ident = threading.get_ident()
        self.name = name

    def spawn(
        self, run: Callable[[], Coroutine[Any, Any, None]], *, name: str, on_hold: Callable[[float], None]
    ) -> None:
        async def stepped() -> None:
            await _measured(run(), on_hold)

        # a system task is not under the host's cancel scopes, and a Ctrl-C never strikes in it
        self._trio.lowlevel.spawn_system_task(stepped, name=name)

    def call(self, fn: Callable[[], object]) -> None:
        try:
            self.token.run_sync_soon(fn)
        except self._trio.RunFinishedError:
            pass

    def scope(self) -> trio.CancelScope:
        return self._trio.CancelScope()

    def waker(self) -> _TrioWaker:
        return _TrioWaker(self._trio, self.token, self.ident)

    async def sleep(self, seconds: float) -> None:
        await self._trio.sleep(seconds)

    async def checkpoint(self) -> None:
        await self._trio.lowlevel.checkpoint()

    def is_ours(self, error: BaseException) -> bool:
        if isinstance(error, GeneratorExit):
            return not self._trio.lowlevel.in_trio_run()
        return isinstance(error, self._trio.Cancelled)

    def interrupt(self) -> None:
        """Hand a KeyboardInterrupt that left a handler to the host, as the Ctrl-C it stands for."""
        signal.raise_signal(signal.SIGINT)


class _TrioWaker:
    __slots__ = ("_event", "_ident", "_token", "_trio")

    def __init__(self, trio_module: Any, token: trio.lowlevel.TrioToken, ident: int) -> None:
        self._trio = trio_module
        self._token = token
        self._ident = ident
        self._event = trio_module.Event()

    async def wait(self, timeout: float | None = None) -> None:
        with self._trio.move_on_after(float("inf") if timeout is None else timeout):
            await self._event.wait()
        self._event = self._trio.Event()

    def wake(self) -> None:
        if threading.get_ident() == self._ident:
            self._event.set()
            return
        try:
            self._token.run_sync_soon(self._release, idempotent=True)
        except self._trio.RunFinishedError:
            pass

    def _release(self) -> None:
        self._event.set()


def current_host() -> Host:
    """The asyncio or trio loop that runs here."""
    if "trio" in sys.modules:
        import trio

        if trio.lowlevel.in_trio_run():
            return TrioHost()
    try:
        return AsyncioHost()
    except RuntimeError:
        raise EventBusError(
            "No asyncio or trio loop runs in this thread. Use `with bus:` for a loop of the bus's own."
        ) from None


@coroutine
def _measured(step: Coroutine[Any, Any, None], on_hold: Callable[[float], None]) -> Generator[Any, Any, None]:
    """Drive a worker and tell how long each of its steps held the loop."""
    send: Callable[[Any], Any] = step.send
    value: Any = None
    while True:
        started = perf_counter()
        try:
            waits_for = send(value)
        except StopIteration:
            return
        finally:
            held = perf_counter() - started
            if held > 0.01:
                on_hold(held)
        try:
            value = yield waits_for
            send = step.send
        except GeneratorExit:
            step.close()
            raise
        except BaseException as error:  # noqa: BLE001  # whatever is thrown in belongs to the worker
            value = error
            send = step.throw


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
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


def _finish(loop: asyncio.AbstractEventLoop) -> None:
    """Close a loop, giving what still runs on it one chance to end."""
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if tasks:
        loop.run_until_complete(asyncio.wait(tasks, timeout=0.1))
    for task in asyncio.all_tasks(loop):
        task._log_destroy_pending = False  # type: ignore[attr-defined]  # abandoned and already reported
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()
