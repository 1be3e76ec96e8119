"""Delivery to blocking functions: ``run_in="thread"``, one thread for each subscriber."""

from __future__ import annotations

import math
import threading
from queue import Empty, SimpleQueue
from time import perf_counter
from typing import TYPE_CHECKING

from eventbus import handling
from eventbus.delivery import Delivery, backoff_s

if TYPE_CHECKING:
    from eventbus.entry import Entry
    from eventbus.loop import Host
    from eventbus.service import Service
    from eventbus.subscription import Queued

__all__ = ["MOST_ABANDONED", "ThreadDelivery"]

#: How many threads of one bus may hang in calls that outlived their timeout.
MOST_ABANDONED = 16


class ThreadDelivery(Delivery):
    """Calls a ``def`` in a daemon thread of its own, so that one subscriber's calls never overlap or change thread.

    A call cannot be stopped. One that outlives its timeout keeps its thread and the subscriber goes on in a new one;
    when too many threads hang, further events are dropped with reason "no_thread" until one of them ends.
    """

    kind = "thread"

    def __init__(self, subscriber: Queued, bus: Service, host: Host) -> None:
        super().__init__(subscriber, bus, host)
        self._wakes: SimpleQueue[None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self.cursor.wake = self._wake
        self._wakes = SimpleQueue()
        if len(self.bus._abandoned_threads()) >= MOST_ABANDONED:
            self._refuse()
            return
        self._thread = threading.Thread(
            target=self._run, args=(self.generation, self._wakes), name=f"trainbus {self.name}", daemon=True
        )
        try:
            self._thread.start()
        except RuntimeError:  # once the interpreter exits, Python 3.12 starts no thread
            run, mine, wakes = self._run, self.generation, self._wakes
            if not self.host.lend_thread(lambda: run(mine, wakes)):
                self.host.spawn(self._run_here, name=f"trainbus {self.name}", on_hold=self.held)

    def abandon(self) -> None:
        if self._thread is not None:
            self.bus._abandoned.add(self._thread)
        super().abandon()

    def _wake(self) -> None:
        self._wakes.put(None)

    def _refuse(self) -> None:
        """Drop what comes; look at each of it whether a thread has become free."""
        self.cursor.wake = self._refuse
        if len(self.bus._abandoned_threads()) < MOST_ABANDONED and not self.stopping:
            self.start()
            return
        self.cursor.waiting = True  # first: what comes from now on calls this again
        self.cursor.shed_all("no_thread")
        if self.cursor.ended and not self.ended:
            self.finished()

    def _run(self, mine: int, wakes: SimpleQueue[None]) -> None:
        handling.handler.set(self)
        with self.watched():
            while self.generation == mine and not self.stopping:
                entry = self.cursor.take()
                if entry is not None:
                    self._deliver(entry, mine, wakes)
                elif not self._wait(wakes):
                    break
            if self.generation == mine and not self.stopping:
                self.finished()

    async def _run_here(self) -> None:
        """Call it on the loop itself: there is no thread left, and soon no loop either."""
        mine, waker = self.generation, self.host.waker()
        self.cursor.wake = waker.wake
        handling.handler.set(self)
        with self.watched():
            while self.generation == mine and not (self.stopping or (self.cursor.ended and not self.cursor.queued())):
                entry = self.cursor.take()
                if entry is not None:
                    self._deliver(entry, mine, self._wakes)
                self.cursor.waiting = True
                if not (self.cursor.queued() or self.cursor.ended or self.stopping):
                    await waker.wait()
                self.cursor.waiting = False
                await self.host.checkpoint()
            if self.generation == mine and not self.stopping:
                self.finished()

    def _wait(self, wakes: SimpleQueue[None]) -> bool:
        cursor = self.cursor
        cursor.waiting = True
        if not cursor.queued() and not cursor.ended and not self.stopping:
            wakes.get()
        cursor.waiting = False
        return bool(cursor.queued()) or not (cursor.ended or self.stopping)

    def _deliver(self, entry: Entry, mine: int, wakes: SimpleQueue[None]) -> None:
        if self.subscriber.is_closed:
            self.cursor.drop(entry, "unsubscribed")
            return
        for attempt in range(1, self.subscriber.options.retries + 2):
            started = perf_counter()
            self.deadline_s = started + self.timeout_s
            try:
                self.subscriber.fn(entry.event)
            except BaseException as error:  # noqa: BLE001  # isolation is the job
                if self.generation != mine:
                    return
                self.deadline_s = math.inf
                if isinstance(error, Exception) and self._may_retry(attempt):
                    self.cursor.retried += 1
                    _pause(wakes, backoff_s(attempt))
                    continue
                self._end(entry, error, perf_counter() - started)
                return
            if self.generation == mine:
                self.deadline_s = math.inf
                self._end(entry, None, perf_counter() - started)
            return

    def _may_retry(self, attempt: int) -> bool:
        over = self.overdue or self.stopping or self.subscriber.is_closed
        return attempt <= self.subscriber.options.retries and not over

    def _end(self, entry: Entry, error: BaseException | None, seconds: float) -> None:
        overdue, self.overdue = self.overdue, False
        if overdue:  # it ended while the clock made up its mind
            self._timed_out(entry)
        elif error is not None:
            self._failed(entry, error)
        else:
            self.cursor.deliver(entry, seconds)


def _pause(wakes: SimpleQueue[None], seconds: float) -> None:
    try:
        wakes.get(timeout=seconds)
    except Empty:
        pass
