"""Delivery to sinks: in batches, opened and closed with the bus, and never cancelled in the middle of their IO."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from time import perf_counter
from typing import TYPE_CHECKING

from eventbus import handling
from eventbus.delivery import Delivery, backoff_s
from eventbus.errors import SinkGone, SinkUnavailable
from eventbus.log import hears_rank
from eventbus.sink import Batch, Sink

if TYPE_CHECKING:
    from eventbus.entry import Entry
    from eventbus.loop import Host
    from eventbus.service import Service
    from eventbus.subscription import Queued

__all__ = ["SinkDelivery"]

#: A batch is written when it holds this many bytes, whatever its `flush_interval`: some 256 KiB of JSON, since an
#: event in memory counts for about two and a half times its text. Each write costs a change of threads and back.
BATCH_BYTES = 640 * 1024
_UNAVAILABLE_MOST_S = 30.0


class SinkDelivery(Delivery):
    """Drives one sink: `open`, `write` in batches, `aclose` after the last one.

    Each call runs in a task of its own, so that the timeout of a delivery leaves it alone: the delivery counts as
    timed out, the next call waits for the late one (no longer than the timeout again), and a late success is counted.
    """

    kind = "sink"

    def __init__(self, subscriber: Queued, bus: Service, host: Host) -> None:
        super().__init__(subscriber, bus, host)
        self._sink: Sink = subscriber.fn
        self._most = int(getattr(self._sink, "max_batch", 1))
        self._gather_s = float(getattr(self._sink, "flush_interval", 0.0))
        self._waker = host.waker()
        self._opened = False
        #: A write that outlived its delivery, and how many events it has.
        self._late: tuple[_Call, int] | None = None
        #: What is being written.
        self._batch: list[Entry] = []
        self._at_rest = False
        self.cursor.wake = self._waker.wake

    def start(self) -> None:
        self.host.spawn(self._run, name=f"trainbus {self.name}", on_hold=self.held)

    @property
    def at_rest(self) -> bool:
        """Whether its worker has ended, and closed the sink."""
        return self._at_rest

    def cut(self, reason: str) -> None:
        """Drop what waits; what runs is not interrupted, and the sink is closed after it if the loop lasts so long."""
        self.stopping = True
        if self._batch:
            self.cursor.drop_batch(self._batch, reason)
        self.cursor.drop_all(reason)
        self._waker.wake()

    def check(self, now_s: float) -> float:
        """The clock of a sink is in `_finish`: nothing here is ever interrupted."""
        return self.deadline_s

    async def _run(self) -> None:
        handling.handler.set(self)
        with self.watched():
            await self._serve()

    async def _serve(self) -> None:
        subscriber = self.subscriber
        if hears_rank(subscriber.options.rank, self.bus.rank, "") and await self._open():
            self._opened = True
        while not self.stopping and await self._gather():
            batch = self._take()
            if not batch:  # it may be looking through a long journal
                await self.host.checkpoint()
            elif self._opened or await self._open_for(batch):
                await self._write(batch)
        if self._opened:
            await self._late_is_over()
            await self._close()
        self._at_rest = True
        if not self.ended and not self.stopping:
            self.finished()

    async def _gather(self) -> bool:
        """Wait until a batch is due; False when no event will come."""
        cursor = self.cursor
        while not cursor.queued():
            if cursor.ended or self.stopping:
                return False
            await self._pause(0, None)
        until = perf_counter() + self._gather_s
        while cursor.bytes < BATCH_BYTES and cursor.queued() < self._most and not self._is_hurried():
            left_s = until - perf_counter()
            if left_s <= 0:
                break
            await self._pause(BATCH_BYTES, left_s)
        return True

    def _is_hurried(self) -> bool:
        """Whether somebody waits for what is pending: a flush, or the end."""
        return self.cursor.ended or self.stopping or self.cursor.on_settled is not None

    async def _pause(self, wake_bytes: int, seconds: float | None) -> None:
        """Wait until so many bytes are pending (0: any event), the time is over, or somebody hurries us."""
        cursor = self.cursor
        cursor.wake_bytes = wake_bytes
        cursor.waiting = True
        over = cursor.ended or self.stopping or (self._is_hurried() if wake_bytes else cursor.queued())
        if not over:
            await self._waker.wait(seconds)
        cursor.waiting = False

    def _take(self) -> list[Entry]:
        """What is written next: all that waits, within the bounds of a batch."""
        batch: list[Entry] = []
        self._batch = batch
        entry = self.cursor.take()
        if entry is not None and self.subscriber.is_closed:
            self.cursor.drop(entry, "unsubscribed")
            return batch
        take_more, most, size = self.cursor.take_more, self._most, 0
        while entry is not None:
            batch.append(entry)
            size += entry.size
            if size >= BATCH_BYTES or len(batch) >= most:
                break
            entry = take_more()
        return batch

    async def _open(self) -> bool:
        """Open the sink, again and again with growing pauses; False when the bus stops first."""
        attempt = 0
        call: _Call | None = None
        while not (self.stopping or self.ended):
            if call is None or call.done:  # one that takes too long is waited for, not begun again
                call = self._start(self._bound_open)
            await self._finish(call, self.timeout_s)
            if call.ok:
                if attempt:
                    self.subscriber.trouble = None
                return True
            attempt += 1
            self.bus._failures.told(self.subscriber, None, call.error or TimeoutError("took too long to open"))
            if self.cursor.ended and attempt > 1:
                return False
            await self._sulk(attempt)
        return False

    async def _bound_open(self) -> None:
        bind = getattr(self._sink, "bind", None)
        if bind is not None:
            bind(run=self.bus.run, rank=self.bus.rank)
        await self._sink.open()

    async def _open_for(self, batch: list[Entry]) -> bool:
        self._opened = await self._open()
        if not self._opened and not self._leave(batch):
            self.cursor.settle_batch(batch, "failed")
        return self._opened

    async def _write(self, batch: list[Entry]) -> None:
        if not await self._late_is_over():
            self._count_late(batch)
            return
        attempt = 0
        events = Batch(batch)
        while True:
            started = perf_counter()
            call = await self._finish(self._start(lambda: self._sink.write(events)), self.timeout_s)
            self.cursor.took(perf_counter() - started)
            if call.ok:
                self.cursor.settle_batch(batch, "delivered")
                return
            if not call.done:
                self._late = (call, len(batch))
                self._count_late(batch)
                return
            assert call.error is not None  # noqa: S101
            attempt += 1
            if not await self._try_again(call.error, attempt):
                self._give_up(batch, call.error)
                return

    async def _try_again(self, error: BaseException, attempt: int) -> bool:
        """Pause before the same events are written again; False when that is over."""
        if isinstance(error, SinkUnavailable):
            self.bus._failures.told(self.subscriber, None, error)
            if self.stopping or self.ended or self.subscriber.is_closed or (self.cursor.ended and attempt > 1):
                return False
            await self._sulk(attempt)
            return not self.ended
        final = (
            self.stopping
            or self.subscriber.is_closed
            or not isinstance(error, Exception)
            or isinstance(error, SinkGone)
        )
        if final or attempt > self.subscriber.options.retries:
            return False
        self.cursor.retried += 1
        await self.host.sleep(backoff_s(attempt))
        return True

    async def _sulk(self, attempt: int) -> None:
        """Wait for a sink to become available: 1 s, doubling up to 30 s, cut short when the bus closes."""
        until = perf_counter() + min(2.0 ** (attempt - 1), _UNAVAILABLE_MOST_S)
        while not (self.cursor.ended or self.stopping) and (left_s := until - perf_counter()) > 0:
            self.cursor.waiting = True
            self.cursor.wake_bytes = 1 << 62
            await self._waker.wait(left_s)
            self.cursor.waiting = False

    def _leave(self, batch: list[Entry]) -> bool:
        """Leave what a durable sink could not take to the next start; False for any other."""
        if not self.subscriber.options.durable or self.subscriber.is_closed:
            return False
        self.left = self.cursor.pending
        self.cursor.drop_batch(batch, "closed")
        self.cursor.drop_all("closed")
        return True

    def _give_up(self, batch: list[Entry], error: BaseException) -> None:
        if isinstance(error, SinkUnavailable) and self._leave(batch):
            return
        self.bus._failures.owe(self.subscriber, batch[0], error)
        if self.cursor.settle_batch(batch, "failed"):
            self.bus._failures.told(self.subscriber, batch[-1], error)
        if isinstance(error, SinkGone):
            self.bus._failures.gone(self.subscriber, batch[-1], error)

    async def _late_is_over(self) -> bool:
        """Wait for IO that outlived its delivery, so that at most one call runs; False while it does not end."""
        if self._late is None:
            return True
        call, count = self._late
        await self._finish(call, self.timeout_s)
        if not call.done:
            return False
        self._late = None
        if call.ok:
            self.cursor.late_ok += count
        return True

    def _count_late(self, batch: list[Entry]) -> None:
        """The delivery has timed out; its IO goes on, and the next one waits for it."""
        error = self._timeout_error()
        self.bus._failures.owe(self.subscriber, batch[0], error)
        if self.cursor.settle_batch(batch, "timed_out"):
            self.bus._failures.told(self.subscriber, batch[-1], error)

    async def _close(self) -> None:
        call = await self._finish(self._start(self._sink.aclose), self.timeout_s)
        if not call.ok:
            self.bus._failures.told(self.subscriber, None, call.error or TimeoutError("took too long to close"))

    def _start(self, io: Callable[[], Awaitable[object]]) -> _Call:
        call = _Call(io, self._waker.wake)
        self.host.spawn(call.run, name=f"trainbus {self.name} io", on_hold=self.held)
        return call

    async def _finish(self, call: _Call, seconds: float) -> _Call:
        until = perf_counter() + seconds
        while not call.done and not self.ended and (left_s := until - perf_counter()) > 0:
            await self._waker.wait(left_s)
        return call


class _Call:
    """One call of a sink's method, in a task of its own."""

    __slots__ = ("_done", "_io", "done", "error", "ok")

    def __init__(self, io: Callable[[], Awaitable[object]], done: Callable[[], None]) -> None:
        self._io = io
        self._done = done
        self.done = self.ok = False
        self.error: BaseException | None = None

    async def run(self) -> None:
        try:
            await self._io()
        except BaseException as error:  # noqa: BLE001  # isolation is the job
            self.error = error
        else:
            self.ok = True
        self.done = True
        self._done()
