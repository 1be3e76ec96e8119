"""A request to a run, and the answer to it, without a lock: a signal handler may interrupt any line here."""

from __future__ import annotations

import os
import threading
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from eventbus.errors import WouldBlockError
from eventbus.loop import current_host

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping

    from eventbus.events import ControlApplied

__all__ = ["SIGNAL", "Outcome", "Request"]

#: Who asks when a signal does: the run that it stops was interrupted.
SIGNAL = "signal"


class Outcome:
    """The answer to a request, once there is one, and who waits for it."""

    __slots__ = ("_waiting", "answer", "owner")

    def __init__(self) -> None:
        self.answer: ControlApplied | None = None
        #: The thread that answers it at its next safe point; None when it was answered at once.
        self.owner: int | None = None
        self._waiting: deque[Callable[[], None]] = deque()

    def settle(self, answer: ControlApplied) -> None:
        """Give the answer, once, and wake who waits."""
        self.answer = answer
        with suppress(IndexError):
            while True:
                self._waiting.popleft()()

    def call_when_settled(self, wake: Callable[[], None]) -> None:
        """Call `wake` once, from the thread that answers, or here when the answer is there."""
        self._waiting.append(wake)
        if self.answer is not None:  # settled in between: whoever takes `wake` out of the deque calls it, once
            self.settle(self.answer)

    def forget(self, wake: Callable[[], None]) -> None:
        """Stop waiting."""
        with suppress(ValueError, IndexError):  # already taken, or another thread takes one right now
            self._waiting.remove(wake)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Request:
    """Something asked of a run; read `result` from another thread, or ``await`` it on any asyncio or trio loop.

    Either gives the `ControlApplied` event that answers it: look at its `accepted` and `detail`.
    """

    id: str = field(default_factory=lambda: os.urandom(6).hex())
    #: "stop", "pause", "resume", "save", "set_lr" or "set".
    action: str
    run: str | None = None
    reason: str = ""
    #: Who asked, in words; None when not told. A run that is stopped by "signal" ends as "interrupted".
    requester: str | None = None
    #: What the action needs: `value` or `scale` of "set_lr", `name` and `value` of "set".
    arguments: Mapping[str, Any] = field(default_factory=dict)
    outcome: Outcome = field(default_factory=Outcome, repr=False)

    @property
    def done(self) -> bool:
        """Whether it is answered."""
        return self.outcome.answer is not None

    def result(self, timeout: float | None = None) -> ControlApplied:
        """Wait for the answer, at most `timeout` seconds (None: until the run answers or ends).

        Raises `TimeoutError` when it takes longer, and `WouldBlockError` at once on the thread of the run itself,
        which answers only after it has left the code that asks (an inline hook, the body of the loop).
        """
        outcome = self.outcome
        if outcome.answer is None:
            self._refuse_to_wait_for_oneself()
            settled = threading.Lock()
            settled.acquire()
            outcome.call_when_settled(settled.release)
            if not settled.acquire(timeout=-1 if timeout is None else max(timeout, 0.0)):
                outcome.forget(settled.release)
                raise TimeoutError(f"Run {self.run!r} did not answer {self.action!r} within {timeout} s.")
        return _given(outcome)

    def _refuse_to_wait_for_oneself(self) -> None:
        if self.outcome.owner == threading.get_ident():
            raise WouldBlockError(
                f"Request.result() of {self.action!r}",
                "this thread runs the training that answers it",
                "Read it after the next batch, listen to on_control, or ask from another thread.",
            )

    def __await__(self) -> Generator[Any, Any, ControlApplied]:
        return self._settled().__await__()

    async def _settled(self) -> ControlApplied:
        outcome = self.outcome
        if outcome.answer is None:
            waker = current_host().waker()
            outcome.call_when_settled(waker.wake)
            try:
                await waker.wait()
            finally:
                outcome.forget(waker.wake)
        return _given(outcome)


def _given(outcome: Outcome) -> ControlApplied:
    assert outcome.answer is not None  # noqa: S101  # waiters are only woken by an answer
    return outcome.answer
