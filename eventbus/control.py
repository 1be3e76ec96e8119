"""Requests to a running training: stop, pause, resume, save, set_lr, set.

Anybody asks through `Control`; the run that is meant takes the request from its `Inbox` at its next safe point
(between two batches) and answers it. Nothing here takes a lock, since a signal handler may ask while it interrupts
any other line of this module: appending to a deque, taking from it and `SimpleQueue.put` are atomic.
"""

from __future__ import annotations

import threading
from collections import deque
from contextlib import ExitStack, suppress
from itertools import count
from queue import Empty, SimpleQueue
from time import monotonic
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from eventbus.events import ControlApplied, Event
from eventbus.handling import current_event
from eventbus.request import Request

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["Control", "Inbox", "Request"]


class Inbox:
    """The requests to one run, made by `Control.open`; only the thread that opened it takes and answers them."""

    def __init__(self, run: str, publish: Callable[[Event], None], leave: Callable[[], object]) -> None:
        self.run = run
        self._owner = threading.get_ident()
        self._publish = publish
        self._leave = leave
        self._pending: deque[Request] = deque()
        self._bell: SimpleQueue[None] = SimpleQueue()
        self._closed = False

    def take(self) -> list[Request]:
        """Every request since the last call, oldest first. Called between any two batches, so free when empty."""
        if not self._pending:
            return []
        with suppress(Empty):  # bells first: the request of a bell is in `_pending` already, so none is lost
            while True:
                self._bell.get_nowait()
        return self._drain()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until there is something to take, at most `timeout` seconds; False when there is not."""
        deadline = None if timeout is None else monotonic() + timeout
        while not self._pending:
            try:
                self._bell.get(timeout=None if deadline is None else max(deadline - monotonic(), 0.0))
            except Empty:
                return False
        return True

    def has(self, action: str) -> bool:
        """Whether a request of this kind waits to be taken."""
        return any(request.action == action for request in self._pending.copy())

    def answer(self, request: Request, *, accepted: bool = True, step: int = 0, detail: str = "") -> None:
        """Tell whoever asked, then everybody (`on_control`)."""
        _answer(request, self._publish, accepted=accepted, step=step, detail=detail)

    def close(self) -> None:
        """End it: what waits is answered with ``accepted=False``, since a request dies with its run."""
        self._closed = True
        self._leave()
        self._refuse_pending()

    def post(self, request: Request) -> None:
        """Leave a request; from any thread, and from a signal handler."""
        request.outcome.owner = self._owner
        self._pending.append(request)
        self._bell.put(None)
        if self._closed:  # closed in between: whoever takes it out of the deque answers it, once
            self._refuse_pending()

    def _refuse_pending(self) -> None:
        with ExitStack() as answers:  # one whose on_control hook raises does not leave the others unanswered
            for request in reversed(self._drain()):
                answers.callback(self.answer, request, accepted=False, detail="the run ended")

    def _drain(self) -> list[Request]:
        taken: list[Request] = []
        with suppress(IndexError):
            while True:
                taken.append(self._pending.popleft())
        return taken


def _answer(
    request: Request, publish: Callable[[Event], None], *, accepted: bool, step: int = 0, detail: str = ""
) -> None:
    answer = ControlApplied(
        run=request.run,
        request_id=request.id,
        action=request.action,
        requester=request.requester,
        reason=request.reason,
        accepted=accepted,
        step=step,
        detail=detail,
    )
    request.outcome.settle(answer)
    publish(answer)


class Control:
    """Asks runs for something: from any thread, hook, async subscriber or signal handler, without waiting.

    ``run=None`` means the run of the event being handled, else the only active run. A request that finds no run
    is answered at once with ``accepted=False`` and why; any other at the run's next safe point, between two
    batches, or with "the run ended". `requester` says who asks, for people.
    """

    def __init__(self, publish: Callable[[Event], None]) -> None:
        self._publish = publish
        self._inboxes: dict[int, Inbox] = {}
        self._numbers = count()

    @property
    def runs(self) -> tuple[str, ...]:
        """The active runs, oldest first."""
        return tuple(inbox.run for inbox in self._inboxes.copy().values())

    def stop(self, reason: str = "", *, run: str | None = None, requester: str | None = None) -> Request:
        """End the run cleanly, before its next batch; as "interrupted" when `requester` is "signal"."""
        return self._ask("stop", reason, run, requester)

    def pause(self, reason: str = "", *, run: str | None = None, requester: str | None = None) -> Request:
        """Hold the run between two batches until `resume` or `stop`; other requests are applied meanwhile."""
        return self._ask("pause", reason, run, requester)

    def resume(self, reason: str = "", *, run: str | None = None, requester: str | None = None) -> Request:
        """Go on after a `pause`."""
        return self._ask("resume", reason, run, requester)

    def save(self, reason: str = "", *, run: str | None = None, requester: str | None = None) -> Request:
        """Write a checkpoint now; the answer's `detail` is its path, or why there is none."""
        return self._ask("save", reason, run, requester)

    def set_lr(
        self,
        value: float | Sequence[float] | None = None,
        *,
        scale: float | None = None,
        reason: str = "",
        run: str | None = None,
        requester: str | None = None,
    ) -> Request:
        """Set the learning rate of every parameter group, or of each (a list), or multiply them by `scale`."""
        if (value is None) == (scale is None):
            raise TypeError("set_lr takes a value (one, or one per parameter group) or scale=, and not both.")
        arguments = {"scale": scale} if value is None else {"value": value}
        return self._ask("set_lr", reason, run, requester, arguments)

    def set(
        self, name: str, value: Any, *, reason: str = "", run: str | None = None, requester: str | None = None
    ) -> Request:
        """Change a setting of the run; a name it does not have is answered with those it has."""
        return self._ask("set", reason, run, requester, {"name": name, "value": value})

    def open(self, run: str) -> Inbox:
        """Make a run of this thread active; the run closes what it gets when it ends."""
        number = next(self._numbers)
        inbox = Inbox(run, self._publish, lambda: self._inboxes.pop(number, None))
        self._inboxes[number] = inbox
        return inbox

    def _ask(
        self,
        action: str,
        reason: str,
        run: str | None,
        requester: str | None,
        arguments: Mapping[str, Any] = MappingProxyType({}),
    ) -> Request:
        wanted = run if run is not None else _run_being_handled()
        found = self._find(wanted)
        request = Request(
            action=action,
            run=found.run if isinstance(found, Inbox) else wanted,
            reason=reason,
            requester=requester,
            arguments=arguments,
        )
        if isinstance(found, Inbox):
            found.post(request)
        else:
            _answer(request, self._publish, accepted=False, detail=found)
        return request

    def _find(self, run: str | None) -> Inbox | str:
        """The inbox of the run that is meant, or why there is none."""
        active = tuple(self._inboxes.copy().values())  # copied first: other threads open and close runs
        if not active:
            return "no run is active" if run is None else f"run {run!r} is not active, and no other is"
        meant = active if run is None else [inbox for inbox in active if inbox.run == run]
        if len(meant) == 1:
            return meant[0]
        names = ", ".join(sorted({repr(inbox.run) for inbox in active}))
        if run is None:
            return f"several runs are active ({names}): say which with run="
        if meant:
            return f"run {run!r} is active {len(meant)} times: give each its own run="
        return f"run {run!r} is not active; active: {names}"


def _run_being_handled() -> str | None:
    event = current_event()
    return event.run if event is not None else None
