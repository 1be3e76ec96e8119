"""Where the bus side runs: a loop in a thread of the bus's own, or the running asyncio or trio loop of a host.

Both hosts offer the same five things: start a task, a scope that can be cancelled, a pause, a checkpoint, and a
`Waker` that any thread may use. Tasks belong to the loop and not to the task that started the bus, so that a
cancelled host still drains.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Coroutine, Generator
from contextlib import AbstractContextManager
from time import perf_counter
from types import TracebackType, coroutine
from typing import TYPE_CHECKING, Any, Protocol

from eventbus.errors import EventBusError

if TYPE_CHECKING:
    from typing import Self


__all__ = ["Host", "Scope", "Waker", "current_host", "measured"]


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
    def lend_thread(self, fn: Callable[[], None]) -> bool: ...
    def scope(self) -> AbstractContextManager[Any]: ...
    def waker(self) -> Waker: ...
    async def sleep(self, seconds: float) -> None: ...
    async def checkpoint(self) -> None: ...
    def is_closed(self) -> bool: ...
    def holder(self) -> str | None: ...
    def forgives(self, error: BaseException, scope: Any) -> bool: ...
    def is_ours(self, error: BaseException, *, overdue: bool = False) -> bool: ...
    def interrupt(self, error: KeyboardInterrupt) -> None: ...


def current_host() -> Host:
    """The asyncio or trio loop that runs here. One that runs was imported, so nothing is imported to find none."""
    if "trio" in sys.modules:
        from eventbus.trio_host import TrioHost

        if TrioHost.runs_here():
            return TrioHost()
    if "asyncio" in sys.modules:
        from eventbus.asyncio_host import AsyncioHost

        if AsyncioHost.runs_here():
            return AsyncioHost()
    raise EventBusError("No asyncio or trio loop runs in this thread. Use `with bus:` for a loop of the bus's own.")


@coroutine
def measured(step: Coroutine[Any, Any, None], on_hold: Callable[[float], None]) -> Generator[Any, Any, None]:
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
