"""Runs a scenario and writes down what happened, for the oracle to judge."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import anyio

from eventbus import CloseReport, Event, EventBus, SubscriberStats, read_journal
from tests.chaos.children import children, read_back
from tests.chaos.scenario import EVENTS, Action, Publishing, Scenario, Sub
from tests.chaos.subscribers import RAISED, Book, handler_of
from tests.chaos.watching import Metronome, watched

__all__ = ["Life", "Publication", "Record", "Run", "run"]

#: How long anything may take that nothing holds up; far beyond what it does take.
PATIENCE_S = 30.0
_MOMENT_S = 0.05


@dataclass(frozen=True, slots=True)
class Publication:
    """One publish: who published, which of theirs, its hook, and when the call began and ended."""

    who: int
    n: int
    hook: str
    began: float
    ended: float
    #: It raised what a subscriber of an earlier event failed with, or an inline hook of this one: it may be lost.
    raised: bool = False


@dataclass
class Life:
    """One time during which the bus was open: when the calls that opened and closed it began and ended."""

    opening: float = 0.0
    opened: float = 0.0
    closing: float = float("inf")
    closed: float = float("inf")
    report: CloseReport | None = None


@dataclass
class Record:
    """What happened."""

    scenario: Scenario
    books: list[Book]
    publications: list[Publication] = field(default_factory=list)
    lives: list[Life] = field(default_factory=list)
    #: By subscriber: as close left them, and after every handler that hung has ended.
    stats: dict[str, SubscriberStats] = field(default_factory=dict)
    later: dict[str, SubscriberStats] = field(default_factory=dict)
    #: What is wrong already.
    faults: list[str] = field(default_factory=list)
    flushed: bool | None = None
    #: How many children were killed from outside.
    kills: int = 0
    #: What the journal holds in the end, by number.
    journal: list[tuple[int, Any]] = field(default_factory=list)
    took_s: float = 0.0


def run(scenario: Scenario) -> Record:
    """Run it from its first event to what is left of it."""
    started = perf_counter()
    with watched() as faults, TemporaryDirectory(prefix="chaos-") as directory:
        run = Run(scenario, Path(directory))
        with ExitStack() as stack:
            if scenario.eager:
                stack.callback(sys.setswitchinterval, sys.getswitchinterval())
                sys.setswitchinterval(1e-5)
            run.play()
        record = run.record
        if scenario.journal:
            record.journal = [(event.seq, event) for event in read_journal(Path(directory) / "journal")]
        bus = weakref.ref(run.bus)
        run.forget()
        del run
        gc.collect()
        if bus() is not None:
            record.faults.append("the closed bus is still held by somebody")
    record.faults += faults
    record.took_s = perf_counter() - started
    return record


class Run:
    """One run of a scenario."""

    def __init__(self, scenario: Scenario, directory: Path) -> None:
        self.scenario = scenario
        self.release = threading.Event()
        self._directory = directory
        journal = directory / "journal" if scenario.journal else None
        self.bus = EventBus(run=f"chaos-{scenario.seed}", exit_timeout=1.0, journal=journal)
        specs = (*scenario.subs, *scenario.guests)
        self.books = [Book(spec, 1000 + i) for i, spec in enumerate(specs)]
        self.record = Record(scenario, self.books, lives=[Life()])
        self._fns: dict[str, Any] = {}
        self._guests = iter(self.books[len(scenario.subs) :])
        self._bereaved = count()
        self._published_all = threading.Event()
        self._over = threading.Event()
        self._arrived: list[int] = []
        self._metronome = Metronome()
        #: Restarts that an actor asks the host for, each with what to set when it is done.
        self._requests: list[tuple[float, threading.Event]] = []
        self._held: list[tuple[float, float]] = []
        #: What other tests of this process left behind.
        self._others = ({*_our_threads()}, {*children()})
        #: The machine held up a close, which hands on what is left for a moment only: the rest waits for a start.
        self._was_held = False

    # ------------------------------------------------------------------------------------------- what others call

    def publish(self, who: int, n: int, hook: str) -> None:
        event = EVENTS[hook](who=who, n=n)
        began, raised = perf_counter(), True
        try:
            self.bus.publish(event)
            raised = False
        except RAISED:
            if not self._may_raise():
                raise
        finally:
            self.record.publications.append(Publication(who, n, hook, began, perf_counter(), raised))

    def notes_of(self, spec: Sub) -> Path:
        """Where the children of a subscriber write down what they see."""
        return self._directory / f"notes-{spec.name}"

    def subscribe(self, book: Book) -> None:
        """Subscribe it, or subscribe it to all its hooks if it is already."""
        began = perf_counter()
        spec = book.spec
        handler = self._fns.setdefault(spec.name, handler_of(book, self))
        book.subscription = self._enter(handler, spec, book)
        ended = perf_counter()
        for hook in EVENTS:
            if _hears(spec, hook):
                book.opened.setdefault(hook, (began, ended))

    def _enter(self, handler: Any, spec: Sub, book: Book) -> Any:
        options: dict[str, Any] = {"name": spec.name, "every": spec.every, "once": spec.once, "when": book.when()}
        options["on_error"] = spec.on_error
        if spec.on_error == "disable":
            options |= {"disable_after": spec.disable_after, "retry_after": spec.retry_after}
        if spec.kind != "inline":
            options |= {"overflow": spec.overflow, "maxsize": spec.maxsize, "timeout": spec.timeout}
            options |= {"retries": spec.retries, "block_timeout": spec.block_timeout, "durable": spec.durable}
        if spec.kind == "sink":
            return self.bus.attach(handler, **options)
        if spec.kind in ("thread", "process"):
            options["run_in"] = spec.kind
        return self.bus.subscribe(handler, *spec.hooks, **options)

    def close_book(self, book: Book) -> None:
        """Close its subscription."""
        subscription = book.subscription
        if subscription is not None:
            began = perf_counter()
            subscription.close()
            book.closed.append((began, perf_counter()))

    def invite(self) -> None:
        """Subscribe the next guest."""
        book = next(self._guests, None)
        if book is not None:
            self.subscribe(book)

    def hold(self, seconds: float, how: Callable[[float], None]) -> None:
        """Keep the thread, and say so: who waits for its loop is excused."""
        began = perf_counter()
        how(seconds)
        self._held.append((began, perf_counter()))

    # ------------------------------------------------------------------------------------------------ the whole of it

    def play(self) -> None:
        scenario = self.scenario
        with self._metronome:
            if scenario.host == "own":
                self._play_own()
            else:
                options = {"use_uvloop": scenario.host == "uvloop"} if scenario.host != "trio" else None
                backend = "trio" if scenario.host == "trio" else "asyncio"
                anyio.run(self._host, backend=backend, backend_options=options)
            self._settle()

    def _play_own(self) -> None:
        self._subscribe_all()
        if self.scenario.explicit:
            self.bus.__enter__()
        threads = self._start()
        if self.scenario.close_at is not None:
            self._reach(self.scenario.close_at)
            self._close(self.scenario.close_s)
        self._join(threads)
        if self._must_arrive():
            self._reach_all()
        self._look_arrived()
        self._flush_and_close()
        self._read(self.record.stats)

    async def _host(self) -> None:
        try:
            await self._play_hosted()
        finally:
            self.release.set()  # else the host itself would wait for handlers that hang

    async def _play_hosted(self) -> None:
        self._subscribe_all()
        await self.bus.__aenter__()
        threads = self._start()
        closes_at = self.scenario.close_at
        while any(thread.is_alive() for thread in threads):
            if self._requests:
                seconds, done = self._requests.pop()
                await self._aclose(seconds)
                self._begin_life()
                await self.bus.__aenter__()
                self.record.lives[-1].opened = perf_counter()
                done.set()
            if closes_at is not None and len(self.record.publications) >= closes_at:
                closes_at = None
                await self._aclose(self.scenario.close_s)
            await anyio.sleep(0.001)
        self._join(threads)
        until = perf_counter() + PATIENCE_S
        while self._must_arrive() and not self._all_arrived() and perf_counter() < until:
            await anyio.sleep(0.002)
        self._look_arrived()
        await self._aflush_and_close()
        self._read(self.record.stats)

    def _must_arrive(self) -> bool:
        """Whether every event has to reach who is quick and has room for all, though nobody asks for that."""
        restarts = any(action.what == "restart" for actions in self.scenario.actors for action in actions)
        return self.scenario.quiet and self.scenario.close_at is None and not restarts and not self._may_raise()

    def _all_arrived(self) -> bool:
        return len(self._arrived) >= self.scenario.events

    def _reach_all(self) -> None:
        until = perf_counter() + PATIENCE_S
        while not self._all_arrived() and perf_counter() < until:
            time.sleep(0.002)

    def _look_arrived(self) -> None:
        if self._must_arrive() and not self._all_arrived():
            self.record.faults.append(f"{len(self._arrived)} of {self.scenario.events} events arrived by themselves")

    def _subscribe_all(self) -> None:
        if self.scenario.witness:
            self.bus.subscribe(_witness, "chaos_*", name="witness")
        if self.scenario.quiet:
            arrived = self._arrived = []

            async def arrive(event: Event) -> None:
                arrived.append(event.seq)

            self.bus.subscribe(arrive, "chaos_step", "chaos_mark", name="arrive", maxsize=10**6)
        for book in self.books[: len(self.scenario.subs)]:
            self.subscribe(book)

    def _start(self) -> list[threading.Thread]:
        """Start who publishes, who acts, and who reads the counts all the while."""
        publishers = [
            self._thread(f"publisher {who}", self._publish_all, who, publishing)
            for who, publishing in enumerate(self.scenario.publishing)
        ]
        actors = [self._thread(f"actor {i}", self._act_all, actions) for i, actions in enumerate(self.scenario.actors)]
        self._reader = self._thread("reader", self._read_on)
        for thread in (self._reader, *actors, *publishers):
            thread.start()
        return [*publishers, *actors]

    def _thread(self, name: str, target: Callable[..., None], *args: Any) -> threading.Thread:
        def guarded() -> None:
            try:
                target(*args)
            except BaseException:
                self.record.faults.append(f"{name}: {traceback.format_exc()}")

        return threading.Thread(target=guarded, name=name, daemon=True)

    def _join(self, threads: list[threading.Thread]) -> None:
        until = perf_counter() + PATIENCE_S
        for thread in threads:
            thread.join(max(until - perf_counter(), 0.0))
            if thread.is_alive():
                self.record.faults.append(f"{thread.name} never ended; it is at\n{_stack(thread)}")

    def _publish_all(self, who: int, publishing: Publishing) -> None:
        for n in range(publishing.count):
            self.publish(who, n, "chaos_mark" if n % 4 == 3 else "chaos_step")
            if publishing.pause_s and n % publishing.burst == publishing.burst - 1:
                time.sleep(publishing.pause_s)

    def _reach(self, published: int) -> None:
        until = perf_counter() + PATIENCE_S
        most = min(published, self.scenario.events)
        while len(self.record.publications) < most and perf_counter() < until:
            time.sleep(0.0005)

    # ------------------------------------------------------------------------------------------------------- actions

    def _act_all(self, actions: tuple[Action, ...]) -> None:
        for action in actions:
            self._reach(action.at)
            getattr(self, f"_do_{action.what}")(action)

    def _do_flush(self, action: Action) -> None:
        self.bus.flush(action.seconds)

    def _do_stats(self, action: Action) -> None:
        self.bus.stats()

    def _do_health(self, action: Action) -> None:
        self.bus.health()

    def _do_report(self, action: Action) -> None:
        self.bus.report()

    def _do_describe(self, action: Action) -> None:
        self.bus.describe()

    def _do_collect(self, action: Action) -> None:
        gc.collect()

    def _do_subscribe(self, action: Action) -> None:
        self.invite()

    def _do_close_sub(self, action: Action) -> None:
        self.close_book(self.books[action.index % len(self.scenario.subs)])

    def _do_off(self, action: Action) -> None:
        book = self.books[action.index % len(self.scenario.subs)]
        began = perf_counter()
        try:
            self.bus.off(self._fns[book.spec.name])
        except ValueError:  # it has left already
            return
        finally:
            book.closed.append((began, perf_counter()))

    def _do_widen(self, action: Action) -> None:
        """Hear marks with the same callable, and the same options."""
        book = self.books[action.index % len(self.scenario.subs)]
        spec = book.spec
        if spec.when or spec.once or spec.durable or spec.kind == "sink" or book.closed:
            return
        began = perf_counter()
        try:
            widened = self._enter(self._fns[book.spec.name], _widened(book.spec), book)
        except ValueError:  # it has left meanwhile
            return
        if widened is book.subscription:
            book.opened.setdefault("chaos_mark", (began, perf_counter()))
        else:
            widened.close()
            book.is_muddled = True  # it left meanwhile, and came back: two subscriptions with one handler

    def _do_bury(self, action: Action) -> None:
        """Leave garbage whose finaliser publishes to whoever collects it."""
        for _ in range(3):
            _Grave(self.publish, next(self._bereaved))

    def _do_restart(self, action: Action) -> None:
        if self.scenario.host != "own":
            done = threading.Event()
            self._requests.append((action.seconds, done))
            done.wait(PATIENCE_S)
            return
        self._close(action.seconds)
        self._begin_life()
        self.bus.__enter__()
        self.record.lives[-1].opened = perf_counter()

    def _do_kill_child(self, action: Action) -> None:
        for child in children()[:1]:
            self.record.kills += 1
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)

    def _do_stop_child(self, action: Action) -> None:
        """Stop a child for a while; when it ends meanwhile, its parent has not waited for it yet."""
        for child in children()[:1]:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGSTOP)
                time.sleep(action.seconds)
                os.kill(child, signal.SIGCONT)

    def _do_fork(self, action: Action) -> None:
        """Fork a child that uses the bus in every way, and see it end."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # that threads run is the point
            child = os.fork()
        if child == 0:
            _live_as_child(self.bus)
        _, status = os.waitpid(child, 0)
        if status:
            what = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"code {os.WEXITSTATUS(status)}"
            self.record.faults.append(f"a forked child ended with {what}")

    # ------------------------------------------------------------------------------------------------- reading, ending

    def _read_on(self) -> None:
        turn = 0
        while not self._over.is_set():
            turn += 1
            for book in self.books:
                if book.subscription is not None:
                    self._check(book.spec.name, book.subscription.read())
            if turn % 16 == 0 and not self.scenario.quiet:
                for name, stats in self.bus.stats().items():
                    self._check(name, stats)
            time.sleep(0.0005)

    def _check(self, name: str, stats: SubscriberStats) -> None:
        settled = stats.delivered + stats.failed + stats.timed_out + stats.dropped
        if stats.matched != settled + stats.pending and len(self.record.faults) < 5:
            self.record.faults.append(f"{name}: the counts did not balance while it ran: {stats}")

    def _may_raise(self) -> bool:
        return any(book.spec.on_error == "raise" for book in self.books)

    def _begin_life(self) -> None:
        self.record.lives.append(Life(opening=perf_counter()))

    def _flush_s(self) -> float:
        """As long as planned; where it has to be complete, as long as it takes."""
        return PATIENCE_S if self.scenario.is_benign else self.scenario.flush_s or 0.0

    def _flush_and_close(self) -> None:
        if self.scenario.flush_s is not None:
            self.record.flushed = self.bus.flush(self._flush_s())
        self._close(self.scenario.close_s)

    async def _aflush_and_close(self) -> None:
        if self.scenario.flush_s is not None:
            self.record.flushed = await self.bus.aflush(self._flush_s())
        await self._aclose(self.scenario.close_s)

    def _close(self, seconds: float) -> None:
        began, life = perf_counter(), self.record.lives[-1]
        try:
            report = self.bus.close(seconds)
        except RAISED:
            report = self.bus._report
            if not self._may_raise():
                raise
        self._closed(life, began, seconds, report)

    async def _aclose(self, seconds: float) -> None:
        began, life = perf_counter(), self.record.lives[-1]
        try:
            report = await self.bus.aclose(seconds)
        except RAISED:
            report = self.bus._report
            if not self._may_raise():
                raise
        self._closed(life, began, seconds, report)

    def _closed(self, life: Life, began: float, seconds: float, report: CloseReport) -> None:
        """Note that it is closed; only what held up the machine, or the host's loop, excuses a close that is late."""
        now = perf_counter()
        lives = self.record.lives
        for hit in lives[lives.index(life) :]:  # another thread may close it too, and have started it anew
            hit.closing = min(hit.closing, began)
        if life.report is None:
            life.closed, life.report = now, report
        excused_s = self._metronome.worst_s(began, now)
        self._was_held |= excused_s > _MOMENT_S
        if self.scenario.host != "own":
            excused_s += sum(ended - at for at, ended in self._held if ended > began)
        if now - began > seconds + 1.0 + excused_s:
            self.record.faults.append(f"close({seconds:g}) took {now - began:.2f} s, {excused_s:.2f} s of it excused")

    def _read(self, into: dict[str, SubscriberStats]) -> None:
        for book in self.books:
            if book.subscription is not None:
                into[book.spec.name] = book.subscription.stats

    def _settle(self) -> None:
        """Let go what hangs, see every thread of the bus end, and read the counts again."""
        self.release.set()
        self._over.set()
        self._join([self._reader])
        until = perf_counter() + PATIENCE_S
        former_threads, former_children = self._others
        while (left := {*_our_threads()} - former_threads) and perf_counter() < until:
            time.sleep(0.001)
        if left:
            stacks = "\n".join(_stack(thread) for thread in left)
            self.record.faults.append(f"threads were left after the close: {[t.name for t in left]}\n{stacks}")
        gc.collect()
        late = any(p.ended > self.record.lives[0].closing for p in self.record.publications)
        if late or self.scenario.journal or self._was_held:
            self._drain()
        self._read(self.record.later)
        while (alive := {*children()} - former_children) and perf_counter() < until:
            time.sleep(0.005)
        if alive:
            self.record.faults.append(f"child processes were left: {alive}")
        for book in self.books:
            read_back(book, self.notes_of(book.spec))

    def _drain(self) -> None:
        """Settle what waits for the next start: what was published while the bus closed, and what is durable."""
        self._begin_life()
        self.bus.__enter__()
        self.record.lives[-1].opened = perf_counter()
        self._close(PATIENCE_S)

    def forget(self) -> None:
        """Hold nothing of the bus."""
        self._fns.clear()
        for book in self.books:
            book.subscription = None


def _witness(event: Event) -> None:
    """Makes every event one that an inline hook hears."""


def _hears(spec: Sub, hook: str) -> bool:
    return not spec.hooks or "chaos_*" in spec.hooks or hook in spec.hooks


def _widened(spec: Sub) -> Sub:
    return replace(spec, hooks=("chaos_mark",))


def _our_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("trainbus")]


def _stack(thread: threading.Thread) -> str:
    frame = sys._current_frames().get(thread.ident or 0)
    return "".join(traceback.format_stack(frame)) if frame is not None else f"{thread.name} has ended"


def _live_as_child(bus: EventBus) -> None:
    """In a forked child: nothing may hang, raise or be delivered."""
    code = 3
    try:
        signal.alarm(20)  # ends a child that hangs
        for n in range(10):
            bus.publish(EVENTS["chaos_step"](who=-2, n=n))
        bus.flush(0.1)
        bus.report()
        gc.collect()
        bus.close(0.1)
        code = 0
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(code)


class _Grave:
    """A cycle whose finaliser publishes."""

    def __init__(self, publish: Callable[[int, int, str], None], n: int) -> None:
        self._publish = publish
        self._n = n
        self.me = self

    def __del__(self) -> None:
        self._publish(2000, self._n, "chaos_echo")
