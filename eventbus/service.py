"""Starting and stopping the bus: blocks, flush, close, and the end of the process."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from threading import Thread, get_ident, main_thread
from time import perf_counter
from typing import TYPE_CHECKING

from eventbus import exits, handling
from eventbus.errors import EventBusError, WouldBlockError
from eventbus.loop import current_host
from eventbus.marks import Flush
from eventbus.options import is_seconds
from eventbus.publish import Publisher
from eventbus.runner import CloseReport, Runner
from eventbus.subscription import Queued

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

__all__ = ["Service"]


class Service(Publisher):
    """The half of the bus that gives its subscribers a loop to run on, and ends it in time."""

    def __init__(
        self, *, run: str | None, rank: int | None, redact: Iterable[str], autostart: bool, exit_timeout: float
    ) -> None:
        super().__init__(run=run, rank=rank, redact=redact)
        self._autostart = autostart
        if exit_timeout != 0 and not is_seconds(exit_timeout):
            raise ValueError(f"exit_timeout is a finite number of seconds, not {exit_timeout!r}.")
        self._exit_timeout = exit_timeout
        self._runner: Runner | None = None
        self._starting = False
        self._abandoned: set[Thread] = set()
        self._report = CloseReport(True, {})

    def __enter__(self) -> Self:
        """Start a loop in a thread of the bus's own."""
        self._check_not_inert()
        self._check_not_importing()
        if self._runner is None or not self._runner.is_started:
            self._start_own(explicit=True)
        else:
            self._runner.take_over()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close_with(error, self._close_quietly(10.0))

    async def __aenter__(self) -> Self:
        """Run on the asyncio or trio loop that runs here; an automatic start is drained and moved here."""
        self._check_not_inert()
        self._check_not_importing()
        host = current_host()
        self._complete_start()
        self._open_journal()
        runner = Runner(self, explicit=True, is_hosted=True)
        while self._runner is not runner:
            former = self._runner
            if former is not None:
                former.take_over()
                await former.leave(10.0)
            # Without a call between: else a publish in another thread starts a loop that nobody knows any more.
            if self._runner is former:
                self._runner = runner
                self._refuses = False
        try:
            self._open()
            runner.start_here(host)
        except BaseException:  # a Ctrl-C: the bus is as if it had never been started
            runner.never_started()
            self._runner = None
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        import anyio  # here: only who runs the bus on a loop of the host's needs it

        with anyio.CancelScope(shield=True):
            await self._aclose_quietly(10.0)
        self._close_with(error, self._failures.take_due())

    def flush(self, timeout: float = 10.0) -> bool:
        """Wait until all that was published before is settled; False when the time (seconds) is over first."""
        if self._is_inert():
            return True
        self._check_may_wait("flush", "await bus.aflush()")
        self._complete_start()
        flush = Flush(self._log)
        self._log.mark(flush)
        if self._runner is None:
            timeout = 0.0  # what waits now waits for a start
        done = flush.completion.wait(timeout)
        self._log.flushed(flush)
        return done

    async def aflush(self, timeout: float = 10.0) -> bool:
        """`flush` for a coroutine, on any loop."""
        if self._is_inert():
            return True
        self._check_not_handling("aflush")
        self._complete_start()
        flush = Flush(self._log)
        self._log.mark(flush)
        if self._runner is None:
            timeout = 0.0  # what waits now waits for a start
        done = await flush.completion.wait_in_task(current_host().waker(), timeout)
        self._log.flushed(flush)
        return done

    def close(self, timeout: float = 10.0) -> CloseReport:
        """Deliver what is pending, close the sinks, stop; returns within `timeout` + 1 s, with what was left.

        Idempotent, from any thread. Later publishes are dropped and counted; the bus can be started again.
        """
        if self._is_inert():
            return self._report
        self._check_may_wait("close", "await bus.aclose()")
        self._close_with(None, self._close_quietly(timeout))
        return self._report

    async def aclose(self, timeout: float = 10.0) -> CloseReport:
        """`close` for a coroutine, on any loop."""
        if self._is_inert():
            return self._report
        self._check_not_handling("aclose")
        await self._aclose_quietly(timeout)
        self._close_with(None, self._failures.take_due())
        return self._report

    def _close_quietly(self, timeout: float) -> BaseException | None:
        if self._is_inert():
            return None
        runner = self._runner_to_close()
        if runner is not None:
            runner.request_close(timeout)
            self._report = runner.wait_closed(timeout)
        return self._failures.take_due()

    async def _aclose_quietly(self, timeout: float) -> None:
        if self._is_inert():
            return
        runner = self._runner_to_close()
        if runner is None:
            return
        runner.request_close(timeout)
        await runner.closed.wait_in_task(current_host().waker(), timeout + 0.5)
        self._report = runner.wait_closed(-1.0) if not runner.closed.is_set() else runner.report

    def _runner_to_close(self) -> Runner | None:
        """What serves the subscribers; when nothing does, the bus is closed here, and None returned."""
        self._complete_start()
        if self._runner is None and not self._refuses:
            self._refuse_events()
            if self._runner is None:  # else a publish that was under way has started it after all
                self._close_unstarted()
        return self._runner

    def _close_unstarted(self) -> None:
        """Close a bus whose subscribers nobody served, and which takes no events any more."""
        self._log.catch_up()
        left = {}
        for subscriber in self._log.served():
            if subscriber.cursor.pending:
                left[subscriber.name] = subscriber.cursor.pending
        self._log.give_up("closed")
        for subscriber in self._log.subscribers:
            subscriber.cursor.end()  # who reads a stream waits no longer
        self._close_journal()
        self._report = CloseReport(not left, left)
        self._failures.tell_last_losses()

    def _close_with(self, in_flight: BaseException | None, due: BaseException | None) -> None:
        if due is None:
            return
        if in_flight is None:
            raise due
        in_flight.add_note(f"a subscriber failed meanwhile: {type(due).__name__}: {due}")

    def _not_recorded(self) -> None:
        if self._runner is None:  # else the pump tells
            self._failures.tell_losses()

    def _is_served(self) -> bool:
        return self._runner is not None or not self._autostart

    def _is_loop_thread(self) -> bool:
        return self._runner is not None and self._runner.is_loop_thread()

    def _ensure_started(self) -> None:
        """Start a loop of our own, unless there is one. Claiming the start is one step, so two publishers start one."""
        if self._starting or self._refuses or (self._runner is None and not self._autostart):
            return
        if self._runner is not None and (self._runner.is_started or self._runner.is_hosted):
            return
        self._check_not_importing()
        self._starting = True
        try:
            self._start_own(explicit=False)
        finally:
            self._starting = False

    def _start_own(self, *, explicit: bool) -> None:
        fresh = Runner(self, explicit=explicit)
        if explicit:
            self._open_journal()
            self._log.reopen()  # here already: a flush that follows waits for what was missed
            self._refuses = False
        # Tests and a store without a call between: of several starters one comes first, and none after a close.
        if self._runner is None and not self._refuses:
            self._runner = fresh
        runner = self._runner
        if runner is None or runner.is_hosted:  # closed meanwhile, or being started on a host's loop
            return
        self._open()
        runner.explicit |= explicit
        runner.start_own()

    def _complete_start(self) -> None:
        """Make up for a start in which a Ctrl-C struck."""
        if self._runner is not None and not self._runner.is_started:
            self._ensure_started()

    def _open_journal(self) -> None:
        """Before any event is taken: else it would be in no journal."""
        if self._journal is not None:
            self._journal.open()

    def _open(self) -> None:
        self._reroute()
        exits.running.add(self)

    def _refuse_events(self) -> None:
        self._refuses = True
        self._reroute()

    def _runner_ended(self, runner: Runner) -> None:
        if self._runner is not runner:
            return
        self._runner = None
        self._report = runner.report
        self._refuse_events()
        self._close_journal()
        exits.running.discard(self)

    def _close_journal(self) -> None:
        if self._journal is not None:
            self._log.tidy()
            self._journal.close()
            self._log.tidy()

    def _exit_begin(self) -> None:
        if self._runner is not None:
            self._runner.request_close(self._exit_timeout, patience_s=self._exit_timeout / 2)

    def _remember_at_exit(self) -> None:
        exits.running.add(self)

    def _exit_end(self, started_s: float) -> None:
        runner = self._runner
        if runner is None:
            self._close_journal()
            self._failures.tell_last_losses()
            return
        report = runner.wait_closed(self._exit_timeout - (perf_counter() - started_s))
        if not report.ok:
            logging.getLogger("eventbus").warning("At exit these events were not delivered: %s", dict(report.left))

    def _check_not_inert(self) -> None:
        if self._is_inert():
            raise EventBusError(
                "This bus was made before a fork and is inert in this process. Make an EventBus in the process that "
                "uses it."
            )

    def _check_takes_events(self) -> None:
        """Refuse a run that nobody would hear: what steers it, its callbacks among them, hears by this bus too."""
        self._check_not_inert()
        if self._refuses:
            raise EventBusError(
                "This bus is closed (a copy of one arrives closed): a run on it would be heard by nobody, callbacks "
                "included. Start it, as by `with bus:`, or take another EventBus."
            )

    def _check_not_importing(self) -> None:
        if exits.is_importing():
            raise EventBusError(
                "A bus starts while the child process of a subscriber imports this code. Put what the script does "
                'below `if __name__ == "__main__":`; a module that is imported must start no bus.'
            )

    def _check_may_wait(self, call: str, instead: str) -> None:
        if self._is_loop_thread():
            raise WouldBlockError(
                f"bus.{call}()", "this is the thread of the loop that must serve it", f"Use {instead}."
            )
        self._check_not_handling(call)

    def _check_not_handling(self, call: str) -> None:
        running = handling.handler.get()
        if running is not None and running.bus is self and running.event is not None:
            raise WouldBlockError(
                f"bus.{call}()", f"it would wait for the event that {running.name!r} is handling here",
                "Call it outside of a subscriber.",
            )  # fmt: skip

    # ------------------------------------------------------------------------------------------- for the bus side

    def _ended(self, subscriber: Queued) -> None:
        runner = self._runner
        if runner is not None:
            runner.ended(subscriber)

    def _lost_loop(self) -> None:
        """The host's loop ended under the bus: nothing can be delivered any more."""
        runner = self._runner
        if runner is not None and not self._is_inert():
            runner.lose_loop()

    def _forked(self) -> None:
        """In the forked copy: deliver nothing, also where the loop came along. Takes no lock."""
        if self._runner is not None:
            self._runner.halt()
        if self._journal is not None:
            self._journal.forked()

    def _is_closing(self) -> bool:
        runner = self._runner
        return runner is None or runner.is_closing

    def _abandoned_threads(self) -> set[Thread]:
        for thread in tuple(self._abandoned):
            if not thread.is_alive():
                self._abandoned.discard(thread)
        return self._abandoned

    def _is_hosted_in_main(self) -> bool:
        runner = self._runner
        return runner is not None and runner.own is None and get_ident() == main_thread().ident
