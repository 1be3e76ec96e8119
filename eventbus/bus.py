"""The bus: register subscribers, publish events, start and stop."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from operator import iadd
from threading import Thread, get_ident, main_thread
from time import perf_counter, sleep
from typing import TYPE_CHECKING, Any, TypeVar

import anyio

from eventbus import exits, handling
from eventbus.control import Control
from eventbus.device import Slots
from eventbus.errors import WouldBlockError
from eventbus.events import Event, UnknownEvent
from eventbus.failures import Failures
from eventbus.identity import find_attempt, find_rank, find_run
from eventbus.inline import run_hooks
from eventbus.log import HANDOFF, Entry, Log
from eventbus.loop import current_host
from eventbus.marks import Detach, Flush
from eventbus.redaction import SECRET_KEYS, Redaction
from eventbus.registry import Attachment, Registry, SubscriberInfo
from eventbus.route import Route
from eventbus.runner import CloseReport, Runner
from eventbus.snapshot import COPIES, EVENT, NOTE, Draft, Snapshot
from eventbus.stats import SubscriberStats, table
from eventbus.stream import Stream, Waiting
from eventbus.subscription import Queued, Subscription

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

    from eventbus.cursor import Cursor
    from eventbus.sink import Sink

__all__ = ["EventBus"]

F = TypeVar("F", bound=Callable[..., Any])
E = TypeVar("E", bound=Event)


class EventBus:
    """Fans typed events out to subscribers without holding up who publishes them.

    ``run`` and ``rank`` stamp the events that bring none. A bus that nobody started starts a loop in a thread of its
    own at the first publish that a queued subscriber hears, unless ``autostart=False``; events then wait, within the
    bounds of each subscriber. ``exit_timeout`` (seconds) is for delivering what is left at interpreter exit.
    ``redact`` holds regular expressions; a text or container whose key matches one is hidden.
    """

    def __init__(
        self,
        *,
        run: str | None = None,
        rank: int | None = None,
        autostart: bool = True,
        exit_timeout: float = 10.0,
        redact: Iterable[str] = SECRET_KEYS,
    ) -> None:
        self._run = run if run is not None else find_run()
        self._rank = rank if rank is not None else find_rank()
        self._attempt = find_attempt()
        self._autostart = autostart
        self._exit_timeout = exit_timeout
        self._redact = tuple(redact)
        self._redaction = Redaction(self._redact)
        self._slots = Slots()
        self._snapshots: dict[type[Event], Snapshot] = {}
        self._log = Log(self._admit)
        self._registry = Registry(self)
        self._failures = Failures(self)
        self._routes: dict[type[Event], Route | None] = {}
        self._runner: Runner | None = None
        self._starting = False
        self._refuses = False
        self._forks = exits.fork_count()
        self._abandoned: set[Thread] = set()
        self._interrupted = 0
        self._too_late = 0
        self._report = CloseReport(True, {})
        #: Ask the run to stop, pause, save or change a setting, from anywhere.
        self.control = Control(publish=self.publish)

    # --------------------------------------------------------------------------------------------- registration

    def on(self, *hooks: str | type[Event], **options: Any) -> Callable[[F], F]:
        """Subscribe the decorated function; it is returned unchanged. See `subscribe`."""

        def register(fn: F) -> F:
            self.subscribe(fn, *hooks, **options)
            return fn

        return register

    def subscribe(self, fn: Callable[[Any], Any], *hooks: str | type[Event], **options: Any) -> Subscription:
        """Subscribe a callable of one event to hooks: names, ``*`` patterns, event classes; none = every event.

        A ``def`` runs inline on the publishing thread, an ``async def`` on the bus loop, a ``def`` with
        ``run_in="thread"`` in a thread of its own. The options are those of `eventbus.Options`. Raises
        `UnknownHookError` or `SubscriptionError` where the mistake is made.
        """
        return self._registry.add(fn, hooks, options)

    def attach(self, target: Sink | object, **options: Any) -> Subscription | Attachment:
        """Subscribe a sink, or every method of an object that is named like a hook."""
        from eventbus.sink import Sink

        if isinstance(target, Sink):
            return self._registry.add_sink(target, options)
        return self._registry.add_object(target, options)

    def off(self, fn_or_name: object) -> None:
        """Close the subscriptions of a callable, sink or object, or the one with this name."""
        for subscription in self._registry.find(fn_or_name):
            subscription.close()

    def hears(self, event: type[Event]) -> bool:
        """Whether anybody listens to this class: ask before you work out what only subscribers need."""
        try:
            return self._routes[event] is not None
        except KeyError:
            return any(s.filter.hears(event, event.hook) for s in self._registry.all())

    def describe(self) -> list[SubscriberInfo]:
        """Who is subscribed, in the order of registration."""
        return self._registry.describe()

    # --------------------------------------------------------------------------------------------------- publish

    def publish(self, event: Event) -> None:
        """Log the event and run its inline hooks; never waits for anybody else. The caller's object is not changed."""
        try:
            route = self._routes[event.__class__]
        except KeyError:
            route = self._find_route(event)
        if route is None:
            return
        try:
            if route.careful or exits._forks != self._forks:
                self._publish_carefully(route, event)
                return
            log = self._log
            draft = route.draft(event)
            log.buffer.extend(map(iadd, (draft,), log.numbers))  # `Log.append`, without the call
            if log.asleep:
                log.rouse()
            elif len(log.buffer) > HANDOFF:
                log.feed(most=64)  # the loop is held: keep the hand-off buffer bounded
            if route.hooks:
                self._run_hooks(route, draft)
        except KeyboardInterrupt:
            self._interrupted += 1
            raise

    def _publish_carefully(self, route: Route, event: Event) -> None:
        """The longer way: other ranks, subscribers that block or raise, events that only inline hooks hear."""
        if exits.fork_count() != self._forks:
            return
        queued = route.is_queued_for(event, self._rank)
        if queued:
            self._ensure_started()
        refused = self._wait_for_room(route.blocking) if queued else ()
        draft = route.draft(event)
        draft[NOTE] = (get_ident(), refused)
        if queued:
            self._log.append(draft)
            if self._log.asleep:
                self._log.rouse()
            elif len(self._log) > HANDOFF:
                self._log.feed(most=64)
        else:
            draft += next(self._log.numbers)
        if route.hooks:
            self._run_hooks(route, draft)

    def _run_hooks(self, route: Route, draft: Draft) -> None:
        snapshot = route.snapshot
        stamp = snapshot.stamp if draft[COPIES] is None else snapshot.stamp_lazily
        run_hooks(self, route.hooks, stamp(draft, self._run, self._rank, self._attempt))

    def _find_route(self, event: Event) -> Route | None:
        """Work out where a class goes, and remember it until a registration changes."""
        if not isinstance(event, Event):
            raise TypeError(f"publish takes an eventbus.Event, not {type(event).__qualname__}. Subclass eventbus.Event.")
        if exits.fork_count() != self._forks:
            return None
        if self._failures.due:
            self._failures.raise_due(event)
        if self._refuses:
            self._count_too_late(event)
            return None
        routes, cls = self._routes, event.__class__  # fetched before the table is read: a change replaces them
        heard = [s for s in self._registry.all() if s.filter.hears(cls, event.hook)]
        route = Route(heard, self._snapshot(cls), rank=self._rank) if heard else None
        if route is not None and route.is_queued_for(event, self._rank):
            self._ensure_started()
        if cls is not UnknownEvent and not self._failures.due:
            routes[cls] = route
        return route

    def _reroute(self) -> None:
        """Forget where events go: a registration or the state of the bus has changed."""
        self._routes = {}

    def _snapshot(self, cls: type[Event]) -> Snapshot:
        snapshot = self._snapshots.get(cls)
        if snapshot is None:
            snapshot = self._snapshots[cls] = Snapshot(cls, self._redaction, self._slots)
        return snapshot

    def _admit(self, draft: Draft) -> Entry:
        """On the bus side: the entry that cursors hold, with the event as subscribers see it."""
        cls = draft[EVENT].__class__
        snapshot = self._snapshots[cls]
        event = snapshot.stamp(draft, self._run, self._rank, self._attempt)
        entry = Entry(event, event.seq, snapshot.size(event), cls.shed, cls if cls is not UnknownEvent else event.hook)
        if draft[NOTE] is not None:
            entry.thread, entry.refused_by = draft[NOTE]
        return entry

    def _wait_for_room(self, blocking: tuple[Cursor, ...]) -> tuple[Cursor, ...]:
        """Wait for subscribers with ``overflow="block"``; returns those for which it was in vain."""
        refused = []
        on_loop = self._runner is not None and self._runner.is_loop_thread()
        for cursor in blocking:
            until = perf_counter() + (0.0 if on_loop else cursor.options.block_timeout)
            while cursor.queued() + len(self._log) >= cursor.maxsize:
                if perf_counter() >= until:
                    if cursor.queued() >= cursor.maxsize:
                        refused.append(cursor)
                    break
                self._log.rouse()
                sleep(0.0005)
        return tuple(refused)

    def _count_too_late(self, event: Event) -> None:
        self._too_late += 1
        self._failures.notices.say(
            logging.WARNING, "closed", "%s was published after the bus was closed, and is dropped.", event.hook, once=True
        )  # fmt: skip

    # -------------------------------------------------------------------------------------------------- pulling

    def stream(
        self, *hooks: str | type[E], run: str | None = None, when: Callable[[E], object] | None = None,
        maxsize: int = 1024, overflow: str = "drop_oldest",
    ) -> Stream[E]:  # fmt: skip
        """Events as an async iterator on the caller's loop: ``async with bus.stream("on_log") as events:``."""
        return Stream(lambda: self._pull("stream", hooks, run=run, when=when, maxsize=maxsize, overflow=overflow))

    def wait_for(
        self, hook: str | type[E], *, run: str | None = None, when: Callable[[E], object] | None = None,
        timeout: float | None = None,
    ) -> Waiting:  # fmt: skip
        """The next event of a hook, to be awaited; subscribes now. Raises `TimeoutError` after `timeout` seconds."""
        return Waiting(self._pull("wait_for", (hook,), run=run, when=when, once=True), timeout)

    def _pull(self, label: str, hooks: tuple[str | type[Event], ...], **given: Any) -> Queued:
        from eventbus.filters import Filter
        from eventbus.options import Options

        subscriber = self._registry.enter(
            None, f"{label} {' '.join(h if isinstance(h, str) else h.hook for h in hooks)}", "stream", Filter(*hooks),
            Options.of(label, given),
        )  # fmt: skip
        assert isinstance(subscriber, Queued)  # noqa: S101
        return subscriber

    # ----------------------------------------------------------------------------------------------- start, stop

    def __enter__(self) -> Self:
        """Start a loop in a thread of the bus's own."""
        if self._runner is None:
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
        host = current_host()
        former = self._runner
        if former is not None:
            former.take_over()
            await former.leave(10.0)
        self._runner = runner = Runner(self, explicit=True)
        self._open()
        runner.start_here(host)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with anyio.CancelScope(shield=True):
            await self._aclose_quietly(10.0)
        self._close_with(error, self._failures.take_due())

    def flush(self, timeout: float = 10.0) -> bool:
        """Wait until all that was published before is settled; False when the time (seconds) is over first."""
        if exits.fork_count() != self._forks:
            return True
        self._check_may_wait("flush", "await bus.aflush()")
        flush = Flush(self._log)
        self._log.mark(flush)
        if self._runner is None:
            self._log.catch_up()
            timeout = 0.0
        done = flush.completion.wait(timeout)
        self._log.flushed(flush)
        return done

    async def aflush(self, timeout: float = 10.0) -> bool:
        """`flush` for a coroutine, on any loop."""
        self._check_not_handling("aflush")
        flush = Flush(self._log)
        self._log.mark(flush)
        if self._runner is None:
            self._log.catch_up()
            timeout = 0.0
        done = await flush.completion.wait_in_task(current_host().waker(), timeout)
        self._log.flushed(flush)
        return done

    def close(self, timeout: float = 10.0) -> CloseReport:
        """Deliver what is pending, close the sinks, stop; returns within `timeout` + 1 s, with what was left.

        Idempotent, from any thread. Later publishes are dropped and counted; the bus can be started again.
        """
        if exits.fork_count() != self._forks:
            return self._report
        self._check_may_wait("close", "await bus.aclose()")
        self._close_with(None, self._close_quietly(timeout))
        return self._report

    async def aclose(self, timeout: float = 10.0) -> CloseReport:
        """`close` for a coroutine, on any loop."""
        self._check_not_handling("aclose")
        await self._aclose_quietly(timeout)
        self._close_with(None, self._failures.take_due())
        return self._report

    def _close_quietly(self, timeout: float) -> BaseException | None:
        runner = self._runner
        if runner is None:
            self._close_unstarted()
        else:
            runner.request_close(timeout)
            self._report = runner.wait_closed(timeout)
        return self._failures.take_due()

    async def _aclose_quietly(self, timeout: float) -> None:
        runner = self._runner
        if runner is None:
            self._close_unstarted()
            return
        runner.request_close(timeout)
        await runner.closed.wait_in_task(current_host().waker(), timeout + 0.5)
        self._report = runner.wait_closed(-1.0) if not runner.closed.is_set() else runner.report

    def _close_unstarted(self) -> None:
        """Close a bus whose subscribers nobody served."""
        if self._refuses:
            return
        self._refuse_events()
        self._log.catch_up()
        left = {}
        for subscriber in self._log.subscribers:
            if subscriber.cursor.pending:
                left[subscriber.name] = subscriber.cursor.pending
            subscriber.cursor.drop_all("closed")
        self._report = CloseReport(not left, left)

    def _close_with(self, in_flight: BaseException | None, due: BaseException | None) -> None:
        if due is None:
            return
        if in_flight is None:
            raise due
        in_flight.add_note(f"a subscriber failed meanwhile: {type(due).__name__}: {due}")

    def _ensure_started(self) -> None:
        """Start a loop of our own, unless there is one. Claiming the start is one step, so two publishers start one."""
        if self._runner is not None or not self._autostart or self._starting:
            return
        self._starting = True
        try:
            self._start_own(explicit=False)
        except RuntimeError as error:  # Python 3.12 starts no thread once the interpreter exits
            self._failures.notices.say(logging.WARNING, "start", "The bus cannot start its loop: %s", error, once=True)
        finally:
            self._starting = False

    def _start_own(self, *, explicit: bool) -> None:
        self._runner = runner = Runner(self, explicit=explicit)
        self._open()
        runner.start_own()

    def _open(self) -> None:
        self._refuses = False
        self._reroute()
        exits.running.add(self)

    def _refuse_events(self) -> None:
        self._refuses = True
        self._reroute()

    def _runner_ended(self, runner: Runner) -> None:
        if self._runner is runner:
            self._runner = None
            self._report = runner.report
        self._refuse_events()
        exits.running.discard(self)

    def _exit_begin(self) -> None:
        if self._runner is not None:
            self._runner.request_close(self._exit_timeout, patience_s=self._exit_timeout / 2)

    def _exit_end(self, started_s: float) -> None:
        runner = self._runner
        if runner is None:
            return
        report = runner.wait_closed(self._exit_timeout - (perf_counter() - started_s))
        if not report.ok:
            logging.getLogger("eventbus").warning("At exit these events were not delivered: %s", dict(report.left))

    def _check_may_wait(self, call: str, instead: str) -> None:
        if self._runner is not None and self._runner.is_loop_thread():
            raise WouldBlockError(f"bus.{call}()", "this is the thread of the loop that must serve it", f"Use {instead}.")
        self._check_not_handling(call)

    def _check_not_handling(self, call: str) -> None:
        running = handling.handler.get()
        if running is not None and running.bus is self and running.event is not None:
            raise WouldBlockError(
                f"bus.{call}()", f"it would wait for the event that {running.name!r} is handling here",
                "Call it outside of a subscriber.",
            )  # fmt: skip

    # ------------------------------------------------------------------------------------------- for the bus side

    def _close_subscription(self, subscription: Subscription, reason: str) -> None:
        if subscription.is_closed:
            return
        subscription.is_closed = True
        if exits.fork_count() != self._forks:
            return
        self._registry.remove(subscription)
        self._reroute()
        if isinstance(subscription, Queued):
            self._log.mark(Detach(self._log, subscription, reason))
            if self._runner is None:
                self._log.feed()

    def _spent(self, subscriber: Queued) -> None:
        """A subscriber with ``once=True`` has got its event; called by the feeder."""
        self._registry.remove(subscriber)
        self._reroute()
        self._log.detach(subscriber)
        subscriber.cursor.end()

    def _ended(self, subscriber: Queued) -> None:
        runner = self._runner
        if runner is not None:
            runner.ended(subscriber)

    def _lost_loop(self) -> None:
        """The host's loop ended under the bus: nothing can be delivered any more."""
        runner = self._runner
        if runner is not None:
            runner.lose_loop()

    def _abandoned_threads(self) -> set[Thread]:
        self._abandoned = {thread for thread in self._abandoned if thread.is_alive()}
        return self._abandoned

    def _is_hosted_in_main(self) -> bool:
        runner = self._runner
        return runner is not None and runner.own is None and get_ident() == main_thread().ident

    # ------------------------------------------------------------------------------------------------ identity

    @property
    def run(self) -> str:
        """The run id for events that bring none."""
        return self._run

    @run.setter
    def run(self, run: str) -> None:
        self._run = run

    @property
    def rank(self) -> int:
        """The rank for events that bring none; queued subscribers hear rank 0 unless they ask for more."""
        return self._rank

    @rank.setter
    def rank(self, rank: int) -> None:
        self._rank = rank
        self._reroute()

    # ------------------------------------------------------------------------------------------------ observation

    def stats(self) -> dict[str, SubscriberStats]:
        """The counts of every open subscription, all that was published before this call included."""
        if exits.fork_count() == self._forks:
            self._log.catch_up()
        return {s.name: s.read() for s in self._registry.all()}

    def report(self) -> str:
        """A table for people."""
        stats = self.stats()
        kinds = {s.name: s.kind for s in self._registry.all()}
        lines = [table((name, kinds.get(name, ""), s) for name, s in stats.items())]
        if self._too_late:
            lines.append(f"{self._too_late} events were published after close.")
        if self._interrupted:
            lines.append(f"{self._interrupted} publishes were interrupted by Ctrl-C.")
        return "\n".join(lines)

    def __repr__(self) -> str:
        where = self._runner.where if self._runner is not None else "closed" if self._refuses else "not started"
        return f"<EventBus run={self._run!r} rank={self._rank} {where}, {len(self._registry.all())} subscribers>"


