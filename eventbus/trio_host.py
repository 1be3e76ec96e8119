"""The bus side on trio."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Coroutine
from contextvars import copy_context
from typing import Any

import trio

from eventbus.loop import measured
from eventbus.notices import logger

__all__ = ["TrioHost"]


class TrioHost:
    """The trio loop that runs in this thread."""

    @staticmethod
    def runs_here() -> bool:
        """Whether such a loop runs in this thread."""
        return trio.lowlevel.in_trio_run()

    def __init__(self, name: str = "in the running trio loop") -> None:
        self.token = trio.lowlevel.current_trio_token()
        self.ident = threading.get_ident()
        self.name = name

    def spawn(
        self, run: Callable[[], Coroutine[Any, Any, None]], *, name: str, on_hold: Callable[[float], None]
    ) -> None:
        async def stepped() -> None:
            try:
                await measured(run(), on_hold)
            except Exception as error:  # noqa: BLE001  # out of a system task it would end the host's whole run
                logger.error("%s ended: %r", name, error, exc_info=error)

        # a system task is not under the host's cancel scopes, and a Ctrl-C never strikes in it; like one of asyncio's
        # it knows which event is being handled where it was started
        trio.lowlevel.spawn_system_task(stepped, name=name, context=copy_context())

    def call(self, fn: Callable[[], object]) -> None:
        try:
            self.token.run_sync_soon(fn)
        except trio.RunFinishedError:
            pass

    def lend_thread(self, fn: Callable[[], None]) -> bool:
        return False

    def scope(self) -> trio.CancelScope:
        return trio.CancelScope()

    def waker(self) -> _TrioWaker:
        return _TrioWaker(self.token, self.ident)

    async def sleep(self, seconds: float) -> None:
        await trio.sleep(seconds)

    async def checkpoint(self) -> None:
        await trio.lowlevel.checkpoint()

    def is_closed(self) -> bool:
        return False  # a trio loop cancels every task before it ends, so the pump knows already

    def holder(self) -> str | None:
        return None  # trio tells only its own thread

    def is_ours(self, error: BaseException, *, overdue: bool = False) -> bool:
        if isinstance(error, GeneratorExit):
            return not trio.lowlevel.in_trio_run()
        return isinstance(error, trio.Cancelled) and not overdue

    def forgives(self, error: BaseException, scope: trio.CancelScope) -> bool:
        """Nothing: on trio only a scope cancels, and its owner means it."""
        return False

    def interrupt(self, error: KeyboardInterrupt) -> None:
        """Hand a KeyboardInterrupt that left a handler to the host, as the Ctrl-C it stands for."""
        signal.raise_signal(signal.SIGINT)


class _TrioWaker:
    __slots__ = ("_event", "_ident", "_token")

    def __init__(self, token: trio.lowlevel.TrioToken, ident: int) -> None:
        self._token = token
        self._ident = ident
        self._event = trio.Event()

    async def wait(self, timeout: float | None = None) -> None:
        with trio.move_on_after(float("inf") if timeout is None else timeout):
            await self._event.wait()
        self._event = trio.Event()

    def wake(self) -> None:
        if threading.get_ident() == self._ident:
            self._event.set()
            return
        try:
            self._token.run_sync_soon(self._release, idempotent=True)
        except trio.RunFinishedError:
            pass

    def _release(self) -> None:
        self._event.set()
