"""Delivery to another process: ``run_in="process"``, one child for each subscriber, started anew when it dies."""

from __future__ import annotations

import math
import sys
import threading
from time import perf_counter, sleep
from typing import TYPE_CHECKING, Literal

from eventbus import handling
from eventbus.codec import encode
from eventbus.delivery import Delivery, backoff_s
from eventbus.errors import ChildError, SinkGone
from eventbus.flight import Flight
from eventbus.log import hears_rank
from eventbus.options import is_async
from eventbus.reference import dump
from eventbus.sink import Sink
from eventbus.sinks import BATCH_BYTES
from eventbus.spawning import Bell, Child
from eventbus.wire import (
    Begun,
    Broken,
    Bye,
    End,
    FromChild,
    Hurry,
    LateOk,
    Ready,
    Recovered,
    Retried,
    Sent,
    Settled,
    Start,
    Told,
)

if TYPE_CHECKING:
    from eventbus.entry import Entry
    from eventbus.loop import Host
    from eventbus.service import Service
    from eventbus.stats import Outcome
    from eventbus.subscription import Queued

__all__ = ["ProcessDelivery"]

#: How many events and bytes may be on their way to a child: a part of what the subscriber's queue holds, since what is
#: on its way is dropped no more.
_FLIGHT = 256
_FLIGHT_BYTES = 2 * BATCH_BYTES
_PART = 4
#: How long the answers of a child are gathered before they are read, in seconds: each look costs the GIL.
_PACE_S = 0.002
#: How often a child that says nothing is looked at, and a lack of file descriptors, in seconds.
_LOOK_S = 1.0
_PAUSE_S = 0.1
_NEVER = 1 << 62


class ProcessDelivery(Delivery):
    """Feeds a child process in batches from a daemon thread, which never waits for the child longer than it may.

    The child says when it begins an event and when it is done with it. One that takes too long, or dies, is followed
    by another after a pause that doubles from 0.1 s to 5 s. What it was handling has then failed or timed out; what
    was only sent is sent again. A sink is driven in the child as it is on a loop, its own time limits included.
    """

    kind = "process"

    def __init__(self, subscriber: Queued, bus: Service, host: Host) -> None:
        super().__init__(subscriber, bus, host)
        options = subscriber.options
        self._is_sink = isinstance(subscriber.fn, Sink)
        most = 2 * int(getattr(subscriber.fn, "max_batch", 1)) if self._is_sink else 1
        is_single = options.overflow == "latest" or options.on_error == "disable"  # what comes next may be another
        self._pace_s = 0.0 if is_single else _PACE_S
        self._flight = Flight(
            self.cursor,
            most=1 if is_single else max(1, min(max(_FLIGHT, most), options.maxsize // _PART)),
            most_bytes=min(_FLIGHT_BYTES, options.max_bytes // _PART),
        )
        self._bell: Bell | None = None
        self._child: Child | None = None
        #: How many children have died since one last got an event done.
        self._deaths = 0
        #: The last child could not import what it was to serve.
        self._is_failing = False
        self._at_rest = False

    def start(self) -> None:
        self.cursor.wake = self._wake
        mine = self.generation
        try:
            threading.Thread(target=self._run, args=(mine,), name=f"trainbus {self.name}", daemon=True).start()
        except RuntimeError:  # once the interpreter exits, Python 3.12 starts no thread
            if not self.host.lend_thread(lambda: self._run(mine)):
                self._refuse()

    @property
    def at_rest(self) -> bool:
        """Whether its child has ended."""
        return self._at_rest

    def check(self, now_s: float) -> float:
        """The thread that feeds the child looks at its clock."""
        return self.deadline_s

    def cut(self, reason: str) -> None:
        self.stopping = True
        self.generation += 1
        self._flight.cut(reason)
        if self._child is not None:
            self._child.kill()
        self.ended = True
        self._wake()

    def halt(self) -> None:
        super().halt()
        if self._child is not None:
            self._child.forget()

    def _wake(self) -> None:
        if self._bell is not None:
            self._bell.ring()

    def _refuse(self) -> None:
        """Drop what comes: there is no thread, and no process without one."""
        self._at_rest = True
        self.cursor.wake = self._refuse
        self.cursor.waiting = True
        self.cursor.shed_all("no_thread")
        if self.cursor.ended and not self.ended:
            self.finished()

    # ----------------------------------------------------------------------------------- in a thread of its own

    def _run(self, mine: int) -> None:
        handling.handler.set(self)
        try:
            with self.watched():
                bell = self._bell = self._make_bell(mine)
                if bell is not None:
                    self._serve_all(bell, mine)
                if self.generation == mine and not self.stopping:
                    if self.subscriber.is_closed:
                        self._drop_the_rest()
                    self.finished()
                else:
                    self._flight.give_back()
        finally:
            self._at_rest, self._bell = True, None

    def _make_bell(self, mine: int) -> Bell | None:
        """What wakes this thread; a process that has no free file descriptor for it is served once it has some."""
        while self._goes_on(mine):
            try:
                return Bell()
            except OSError as error:
                self.bus._failures.told(self.subscriber, None, error)
                if self.bus._is_closing():
                    self._give_up(error)
                if self.cursor.ended:
                    break
                sleep(_PAUSE_S)
        return None

    def _serve_all(self, bell: Bell, mine: int) -> None:
        if not hears_rank(self.subscriber.options.rank, self.bus.rank, ""):
            self._rest(bell, math.inf, until_event=True)
        is_over = False
        while not is_over and self._goes_on(mine):
            is_over = self._live(bell, mine)

    def _goes_on(self, mine: int) -> bool:
        """Whether a child is needed."""
        if self.generation != mine or self.stopping or self.subscriber.is_closed:
            return False
        return not self.cursor.ended or self._has_work() or self._is_sink

    def _has_work(self) -> bool:
        return len(self._flight) > 0 or self.cursor.queued() > 0

    def _drop_the_rest(self) -> None:
        """Of a closed subscription, drop what is still on its way here."""
        self._flight.settle(len(self._flight), "dropped", "unsubscribed")
        while not self.cursor.ended and not self.stopping:
            sleep(0.02)
        self.cursor.drop_all("unsubscribed")

    def _live(self, bell: Bell, mine: int) -> bool:
        """Serve with one child from its start to its end; whether it was the last one."""
        try:
            self._child = child = Child(bell)
        except OSError as error:
            return self._died(bell, error, None)
        try:
            self._serve(child, mine)
        finally:
            child.bury()
            self._child = None
        is_over = child.has_said_bye or (self.stopping and not self._flight.begun)
        if is_over or self.generation != mine:
            return True
        return self._died(bell, child.broken or ChildError(child.end()), child)

    def _serve(self, child: Child, mine: int) -> None:
        try:
            child.put(self._first_words())
        except Exception as error:  # noqa: BLE001  # an object that pickled when it was registered, and does no more
            child.broken = error
            return
        while not child.is_gone and self.generation == mine:
            if self._is_useless(child):
                child.has_said_bye = True
                child.kill()
            self._feed(child)
            child.write()
            if self._pause(child):
                sleep(self._pace_s)
            for message in child.read():
                self._hear(child, message)
            self._look_at_clock(child)

    def _is_useless(self, child: Child) -> bool:
        """Whether it need not even get ready."""
        if child.is_ready:
            return False
        unwanted = self.cursor.ended and not self._is_sink and not self._has_work()
        return unwanted or self.subscriber.is_closed or self.stopping

    # -------------------------------------------------------------------------------------------- what is said

    def _first_words(self) -> Start:
        fn, options = self.subscriber.fn, self.subscriber.options
        serve_as: Literal["def", "async", "sink"] = "sink" if self._is_sink else "async" if is_async(fn) else "def"
        return Start(
            dump(fn), serve_as, self.name, self.bus.run, self.bus.rank, options.rank, self.timeout_s, options.retries,
            max(options.retries - self._flight.tries, 0), sys.argv, self.subscriber.script,
        )  # fmt: skip

    def _feed(self, child: Child) -> None:
        """Send what there is room for, and what has become of the subscription."""
        if not child.is_ready:
            return
        while child.told_to_end is None and (entry := self._flight.take()) is not None:
            self._send(child, entry)
        how = self._how_to_end()
        if how is not None and child.told_to_end != how:
            child.told_to_end = how
            child.put(End(how))
        if self._is_hurried(child):
            child.hurried_to = self._flight.newest_seq
            child.put(Hurry())

    def _send(self, child: Child, entry: Entry) -> None:
        if isinstance(entry.kind, type) and entry.kind.__module__ != "eventbus.events":
            child.tell_class(entry.kind)
        child.put(Sent(entry.seq, entry.size, encode(entry.event, "msgpack")))

    def _how_to_end(self) -> Literal["ended", "unsubscribed", "moved"] | None:
        if self.stopping:
            return "moved"
        if self.subscriber.is_closed:
            return "unsubscribed"
        return "ended" if self.cursor.ended and not self.cursor.queued() else None

    def _is_hurried(self, child: Child) -> bool:
        """Whether a sink has to be told to gather no longer: somebody waits, or there is no room for more."""
        waits = self.cursor.on_settled is not None or (self.cursor.queued() and not self._flight.has_room())
        return bool(child.is_ready and self._is_sink and waits and self._flight.newest_seq > child.hurried_to)

    def _pause(self, child: Child) -> bool:
        """Wait for the child, an event, or the end of somebody's patience; whether the child has spoken."""
        cursor, now = self.cursor, perf_counter()
        may_feed = child.is_ready and child.told_to_end is None and self._flight.has_room()
        cursor.wake_bytes = 0 if may_feed else _NEVER
        cursor.waiting = True
        told = not child.is_ready or self._how_to_end() in (None, child.told_to_end)
        is_due = (may_feed and cursor.queued()) or not told or self._is_hurried(child)
        spoke = child.wait(0.0 if is_due else max(min(self._deadline_s(child) - now, _LOOK_S), 0.0))
        cursor.waiting = False
        return spoke

    # -------------------------------------------------------------------------------------------- what is heard

    def _hear(self, child: Child, message: FromChild) -> None:
        match message:
            case Begun(count):
                self._flight.begun = count
                child.begun_s = perf_counter() if count else None
            case Settled():
                self._settled(child, message)
            case Ready():
                child.is_ready = True
                if self._is_failing:
                    self._is_failing, self.subscriber.trouble = False, None
                for entry in self._flight.entries():
                    self._send(child, entry)
            case Retried():
                self.cursor.retried += 1
                self._flight.tries += 1
                child.begun_s = perf_counter() + backoff_s(self._flight.tries)
            case LateOk(count):
                self.cursor.late_ok += count
            case Told(trouble):
                self.bus._failures.told(self.subscriber, None, trouble.error())
            case Broken(trouble):
                child.broken = trouble.error()
            case Recovered():
                self.subscriber.trouble = None
            case Bye():
                child.has_said_bye = True

    def _settled(self, child: Child, told: Settled) -> None:
        self._deaths = 0
        child.begun_s = None
        if told.outcome == "delivered" or self._is_sink:
            self.cursor.took(told.seconds)
        self._settle(told.count, told.outcome, told.reason, told.trouble.error() if told.trouble is not None else None)

    def _settle(
        self, count: int, outcome: Outcome | Literal["dropped"], reason: str, error: BaseException | None
    ) -> None:
        entry = self._flight.oldest
        if entry is None:
            return
        if error is not None:
            self.bus._failures.owe(self.subscriber, entry, error)
        if self._flight.settle(count, outcome, reason) and error is not None:
            self.bus._failures.told(self.subscriber, entry, error)
            if isinstance(error, SinkGone):
                self.bus._failures.gone(self.subscriber, entry, error)

    # ---------------------------------------------------------------------------------------------- its clock

    def _deadline_s(self, child: Child) -> float:
        is_owing = len(self._flight) > 0 or child.told_to_end is not None
        return child.deadline_s(self.timeout_s, is_owing=is_owing, minds_itself=self._is_sink)

    def _look_at_clock(self, child: Child) -> None:
        if perf_counter() < self._deadline_s(child) or child.is_gone:
            return
        if child.is_ready and self._flight.begun:
            child.overdue = self._flight.oldest
        elif not child.has_said_bye:
            silent_s = perf_counter() - child.heard_s
            child.broken = ChildError(f"its process said nothing for {silent_s:.3g} s and was killed")
        child.kill()
        while not child.is_gone:  # what it said before that counts
            child.wait(_LOOK_S)
            for message in child.read():
                self._hear(child, message)

    # ---------------------------------------------------------------------------------------------- its death

    def _died(self, bell: Bell, error: BaseException, child: Child | None) -> bool:
        """Settle what it was handling; whether no other child is needed."""
        flight, begun = self._flight, self._flight.begun
        is_overdue = child is not None and child.overdue is not None
        if child is not None and child.overdue is not None:
            error = self._timeout_error(", and its process was killed")
            if flight.oldest is not child.overdue:  # it was done in the last moment, and the next one is not to blame
                begun = 0
        if not begun:
            if not is_overdue:
                self.bus._failures.told(self.subscriber, None, error)
        elif flight.tries < self.subscriber.options.retries:
            flight.tries += 1
            self.cursor.retried += 1
        else:
            self._settle(begun, "timed_out" if is_overdue else "failed", "", error)
        flight.begun = 0
        self._deaths += 1
        was_ready = child is not None and child.is_ready
        self._is_failing = not was_ready
        self._rest(bell, backoff_s(self._deaths), when_ended_s=backoff_s(1) if was_ready else 0.0)
        if not was_ready and (self.cursor.ended or self.bus._is_closing()):
            self._give_up(error)
        return self.cursor.ended and not self._has_work()

    def _give_up(self, error: BaseException) -> None:
        """No child will do, and the bus closes: what is left has failed."""
        while self._flight.take() is not None or len(self._flight):
            self._settle(len(self._flight), "failed", "", error)

    def _rest(self, bell: Bell, seconds: float, *, when_ended_s: float = 0.0, until_event: bool = False) -> None:
        """Pause before the next child; less when the bus closes."""
        since, cursor = perf_counter(), self.cursor
        while not (self.stopping or self.ended or self.subscriber.is_closed):
            is_over = cursor.ended or self.bus._is_closing()
            left_s = since + (min(seconds, when_ended_s) if is_over else seconds) - perf_counter()
            cursor.wake_bytes = 0 if until_event else _NEVER
            cursor.waiting = True
            if left_s > 0 and not (until_event and (cursor.queued() or cursor.ended)):
                bell.wait(min(left_s, _LOOK_S))
            else:
                break
        cursor.waiting = False
