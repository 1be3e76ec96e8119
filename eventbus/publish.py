"""Publishing: the hot path, from an event to the log and the inline hooks."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable
from operator import iadd
from threading import get_ident
from time import perf_counter, sleep
from typing import TYPE_CHECKING

from eventbus import exits
from eventbus.codec import pack
from eventbus.device import Slots
from eventbus.entry import PARTIAL, Entry, Note
from eventbus.events import Event, UnknownEvent
from eventbus.failures import ABOUT_US, Failures
from eventbus.identity import find_attempt, find_rank, find_run
from eventbus.inline import run_hooks
from eventbus.log import HANDOFF, Log
from eventbus.marks import Detach
from eventbus.redaction import Redaction
from eventbus.registry import Registry
from eventbus.route import Route
from eventbus.snapshot import COPIES, EVENT, NOTE, PLACE, Draft, Snapshot, known_draft
from eventbus.subscription import Queued, Subscription

if TYPE_CHECKING:
    from eventbus.cursor import Cursor
    from eventbus.journal import Journal

__all__ = ["Publisher"]


class Publisher(ABC):
    """The half of the bus that runs on the publishing threads."""

    def __init__(self, *, run: str | None, rank: int | None, redact: Iterable[str]) -> None:
        if isinstance(redact, str):
            raise TypeError(f"redact takes several patterns: redact=[{redact!r}].")
        self._run = find_run() if run is None else _checked_run(run)
        self._rank = find_rank() if rank is None else _checked_rank(rank)
        self._attempt = find_attempt()
        self._redact = tuple(redact)
        self._redaction = Redaction(self._redact)
        self._slots = Slots()
        self._snapshots: dict[type[Event], Snapshot] = {}
        self._log = Log(self._admit)
        self._journal: Journal | None = None
        self._journal_directory: str | None = None
        self._registry = Registry(self)
        self._failures = Failures(self)
        self._routes: dict[type[Event], Route | None] = {}
        #: The bus is closed.
        self._refuses = False
        self._forks = exits.fork_count()
        self._interrupted = 0
        self._too_late = 0

    def _is_inert(self) -> bool:
        """Whether this is the copy of a bus in a forked process: its loop and threads stayed in the other one."""
        return exits.fork_count() != self._forks

    @property
    def run(self) -> str:
        """The run id for events that bring none."""
        return self._run

    @run.setter
    def run(self, run: str) -> None:
        self._run = _checked_run(run)

    @property
    def rank(self) -> int:
        """The rank for events that bring none; queued subscribers hear rank 0 unless they ask for more."""
        return self._rank

    @rank.setter
    def rank(self, rank: int) -> None:
        self._rank = _checked_rank(rank)
        self._reroute()

    def publish(self, event: Event) -> None:
        """Log the event and run its inline hooks; never waits for anybody else. The caller's object is not changed."""
        try:
            try:
                route = self._routes[event.__class__]
            except KeyError:
                route = self._find_route(event)
            if route is None:
                return
            if route.careful or exits._forks != self._forks:
                publish = self._publish_carefully if route.particular else self._publish_recorded
                publish(route, event)
                return
            log = self._log
            draft = route.draft(event)
            log.buffer.extend(map(iadd, (draft,), log.numbers))  # `Log.append`, without the call
            if log.asleep:
                log.rouse()
            elif len(log.buffer) > HANDOFF:
                log.relieve()  # the loop is held, or too slow: keep the hand-off buffer bounded
            if route.hooks:
                self._run_hooks(route, draft)
        except BaseException as error:
            if not self._is_inert():
                self._log.interrupted()
                self._interrupted += isinstance(error, KeyboardInterrupt)
            raise

    def _publish_carefully(self, route: Route, event: Event) -> None:
        """The longer way: other ranks, subscribers that block or raise, events that only inline hooks hear."""
        if self._is_inert():
            return
        queued = route.is_queued_for(event, self._rank)
        if not (queued or route.hooks or self._journal is not None):
            return
        if queued:
            self._ensure_started()
        refused = self._wait_for_room(route.blocking) if queued and route.blocking else ()
        if self._refuses:  # closed while it waited
            self._count_too_late(event)
            return
        draft = route.draft(event)
        draft[NOTE] = Note(get_ident(), refused)
        if self._journal is not None:
            self._record(route.snapshot, draft, self._log.buffer if queued else deque())
        elif queued:
            self._log.append(draft)
        else:
            draft += next(self._log.numbers)
        if queued:
            if self._log.asleep:
                self._log.rouse()
            elif len(self._log) > HANDOFF:
                self._log.relieve()
        if route.hooks:
            self._run_hooks(route, draft)

    def _publish_recorded(self, route: Route, event: Event) -> None:
        """The way with a journal: the event is on disk before it is in the log."""
        if exits._forks != self._forks:
            return
        log = self._log
        draft = route.draft(event)
        self._record(route.snapshot, draft, log.buffer)
        if log.asleep:
            log.rouse()
        elif len(log.buffer) > HANDOFF:
            log.relieve()
        if route.hooks:
            self._run_hooks(route, draft)

    def _record(self, snapshot: Snapshot, draft: Draft, buffer: deque[Draft]) -> None:
        """Write the event to the journal as its subscribers will see it, and put it into the buffer of the log."""
        assert self._journal is not None  # noqa: S101
        draft.append(0)  # room for its number
        flags = 0
        try:
            if draft[COPIES] is None:
                data = snapshot.record(draft, self._run, self._rank, self._attempt)
            else:
                draft[NOTE] = draft[NOTE] or Note(get_ident())
                draft[NOTE].is_partial = True
                flags = PARTIAL
                data = snapshot.record(known_draft(draft), self._run, self._rank, self._attempt)
        except Exception as error:  # noqa: BLE001  # one odd event must not raise into the training
            self._log.errors.append((draft[EVENT].hook, error))
            self._journal.number(draft, buffer)
            return
        self._journal.append(draft, data, buffer, flags)
        if not draft[PLACE]:
            self._not_recorded()

    def _bind_journal(self, directory: str) -> None:
        """From the beginning, and before anybody subscribes: write every event to a journal, once that is open."""
        from pathlib import Path  # here, as the rest: most buses have none

        from eventbus.journal import Journal
        from eventbus.journaled_log import JournaledLog

        self._journal_directory = directory
        filled = directory.replace("{run}", self._run).replace("{rank}", str(self._rank))
        self._journal = Journal(Path(filled))
        self._log = JournaledLog(self._admit, self._journal)

    def _run_hooks(self, route: Route, draft: Draft) -> None:
        snapshot = route.snapshot
        stamp = snapshot.stamp if draft[COPIES] is None else snapshot.stamp_lazily
        run_hooks(self, route.hooks, stamp(draft, self._run, self._rank, self._attempt))

    def _find_route(self, event: Event) -> Route | None:
        """Work out where a class goes, and remember it until a registration changes."""
        if not isinstance(event, Event):
            raise TypeError(
                f"publish takes an eventbus.Event, not {type(event).__qualname__}. Subclass eventbus.Event."
            )
        if self._is_inert():
            return None
        if self._failures.due:
            self._raise_due(event)
        routes, cls = self._routes, event.__class__  # fetched before the table is read: a change replaces them
        heard = [s for s in self._registry.all() if s.filter.hears(cls, event.hook)]
        journaled = self._journal is not None
        route = Route(heard, self._snapshot(cls), rank=self._rank, journaled=journaled) if heard or journaled else None
        if route is not None and route.is_queued_for(event, self._rank):
            self._ensure_started()
        if self._refuses:  # last, since it may be closed at this very moment
            self._count_too_late(event)
            return None
        asks_again = route is not None and not route.careful and not self._is_served()
        if cls is not UnknownEvent and not self._failures.due and not asks_again:
            routes[cls] = route
        return route

    def _raise_due(self, event: Event) -> None:
        """Raise what a subscriber of this thread's earlier event failed with; `event` itself is published before."""
        error = self._failures.take_due_at(event)
        if error is None:
            return
        try:
            self.publish(event)  # it may be an end that is owed
        except Exception as late:  # noqa: BLE001  # the earlier failure is the one to show
            error.add_note(f"while {event.hook} was published, a hook failed too: {type(late).__name__}: {late}")
        raise error

    def _ignores(self, cls: type[Event]) -> bool:
        """Whether publishing this class does nothing, so that an event need not be made; False until that is known."""
        return self._routes.get(cls, False) is None

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
        entry = self._snapshots[draft[0].__class__].admit(draft, self._run, self._rank, self._attempt)
        note: Note | None = draft[NOTE]
        if note is not None:
            entry.thread, entry.refused_by = note.thread, note.refused_by
            if note.is_partial and self._journal is not None:
                entry.place = self._journal.amend(entry.seq, pack(entry.event))
        return entry

    def _wait_for_room(self, blocking: tuple[Cursor, ...]) -> tuple[object, ...]:
        """Wait for subscribers with ``overflow="block"``; returns the tokens of those for which it was in vain."""
        refused: list[object] = []
        on_loop = self._is_loop_thread()
        self._log.feed()  # only what was handed on is weighed
        for cursor in blocking:
            until = perf_counter() + (0.0 if on_loop else cursor.options.block_timeout)
            while cursor.is_full(coming=len(self._log)) and not self._refuses:
                if on_loop:
                    self._log.feed()  # nobody else can meanwhile, and only what is fed can be too much
                if perf_counter() >= until:
                    if cursor.is_full():
                        refused.append(cursor.token)
                    break
                self._log.rouse()
                sleep(0.0005)
        return tuple(refused)

    def _count_too_late(self, event: Event) -> None:
        if isinstance(event, ABOUT_US):
            return
        self._too_late += 1
        self._failures.notices.say(
            logging.WARNING, "closed", "%s was published after the bus was closed, and is dropped.", event.hook,
            once=True,
        )  # fmt: skip

    def _close_subscription(self, subscription: Subscription, reason: str, *, forget: bool = True) -> None:
        if subscription.is_closed:
            return
        subscription.is_closed = True
        if self._is_inert():
            return
        self._registry.remove(subscription)
        self._reroute()
        if isinstance(subscription, Queued):
            if forget:
                subscription.cursor.forget()
            self._log.mark(Detach(self._log, subscription, reason))
        self._failures.part(subscription)

    def _spent(self, subscriber: Queued) -> None:
        """A subscriber with ``once=True`` has got its event; called by the feeder."""
        self._registry.remove(subscriber)
        self._reroute()
        self._log.detach(subscriber)
        subscriber.cursor.forget()
        subscriber.cursor.end()
        if subscriber.cursor.dropped:
            self._failures.parted.append(subscriber)

    @abstractmethod
    def _remember_at_exit(self) -> None:
        """Have what is not announced until then announced at the end of the process."""

    @abstractmethod
    def _ensure_started(self) -> None:
        """Start a loop of our own, unless there is one or it is not wanted."""

    @abstractmethod
    def _not_recorded(self) -> None:
        """The disk did not take an event: have that told."""

    @abstractmethod
    def _is_served(self) -> bool:
        """Whether the bus side runs, or is not to be started by a publish."""

    @abstractmethod
    def _is_loop_thread(self) -> bool:
        """Whether the bus side runs in this thread."""


def _checked_run(run: object) -> str:
    if not isinstance(run, str) or not run:
        raise TypeError(f"A run id is a text, not {run!r}.")
    return run


def _checked_rank(rank: object) -> int:
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 0:
        raise TypeError(f"A rank is a whole number from 0, not {rank!r}.")
    return rank
