"""The bus: register subscribers, publish events, start and stop."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any, TypeVar, overload

from eventbus import travel
from eventbus.errors import SubscriptionError
from eventbus.events import Event
from eventbus.filters import Filter
from eventbus.options import Options
from eventbus.redaction import SECRET_KEYS
from eventbus.registry import Attachment, SubscriberInfo
from eventbus.service import Service
from eventbus.sink import Sink
from eventbus.stats import Row, SubscriberStats, table
from eventbus.stream import Stream, Waiting
from eventbus.subscription import Queued, Subscription

if TYPE_CHECKING:
    from eventbus.control import Control
    from eventbus.health import SubscriberHealth


__all__ = ["EventBus"]

F = TypeVar("F", bound=Callable[..., Any])
E = TypeVar("E", bound=Event)
E2 = TypeVar("E2", bound=Event)
R = TypeVar("R")


class EventBus(Service):
    """Fans typed events out to subscribers without holding up who publishes them.

    ``run`` and ``rank`` stamp the events that bring none. A bus that nobody started starts a loop in a thread of its
    own at the first publish that a queued subscriber hears, unless ``autostart=False``; events then wait, within the
    bounds of each subscriber. ``exit_timeout`` (seconds) is for delivering what is left at interpreter exit.
    ``redact`` holds regular expressions; a text or container whose key matches one is hidden.

    With ``journal=DIRECTORY`` (``{run}`` and ``{rank}`` are filled in) every published event is on disk before
    `publish` returns and outlives the process, whatever kills it; ``overflow="spill"`` and ``durable=True`` rest on
    it, `read_journal` and ``python -m eventbus`` read it. One bus at a time may write to a directory; raises
    `JournalError` when another does, or when it cannot be written. Use a local disk. See docs/journal.md.
    """

    def __init__(
        self,
        *,
        run: str | None = None,
        rank: int | None = None,
        journal: str | PathLike[str] | None = None,
        autostart: bool = True,
        exit_timeout: float = 10.0,
        redact: Iterable[str] = SECRET_KEYS,
    ) -> None:
        super().__init__(run=run, rank=rank, redact=redact, autostart=autostart, exit_timeout=exit_timeout)
        if journal is not None:
            self._bind_journal(fspath(journal))
            self._open_journal()
            self._open()
        self._controls: dict[str, Control] = {}

    # --------------------------------------------------------------------------------------------- registration

    @overload
    def on(self, hook: type[E], /, **options: Any) -> Callable[[Callable[[E], R]], Callable[[E], R]]: ...

    @overload
    def on(
        self, hook: type[E], other: type[E2], /, **options: Any
    ) -> Callable[[Callable[[E | E2], R]], Callable[[E | E2], R]]: ...

    @overload
    def on(self, *hooks: str | type[Event], **options: Any) -> Callable[[F], F]: ...

    # the ignore: mypy thinks that `*hooks` takes no positional-only `hook` where there is a `**options`
    def on(self, *hooks: str | type[Event], **options: Any) -> Callable[[F], F]:  # type: ignore[misc]
        """Subscribe the decorated function; it is returned unchanged. See `subscribe`."""
        Filter(*hooks)  # so that a wrong one raises here, a function in the place of the hooks among them

        def register(fn: F) -> F:
            self.subscribe(fn, *hooks, **options)
            return fn

        return register

    def subscribe(self, fn: Callable[[Any], Any], *hooks: str | type[Event], **options: Any) -> Subscription:
        """Subscribe a callable of one event to hooks: names, ``*`` patterns, event classes; none = every event.

        A ``def`` runs inline on the publishing thread, an ``async def`` on the bus loop, a ``def`` with
        ``run_in="thread"`` in a thread of its own, and either with ``run_in="process"`` in a child process, which must
        be able to import it. The options are those of `eventbus.Options`. Raises `UnknownHookError` or
        `SubscriptionError` where the mistake is made.
        """
        self._check_not_inert()
        return self._registry.add(fn, hooks, options)

    def attach(self, target: Sink | object, **options: Any) -> Subscription | Attachment:
        """Subscribe a sink, or every method of an object that is named like a hook.

        With ``run_in="process"`` a sink is opened, written and closed in a child process, and an object is pickled to
        one child for each of its methods.
        """
        self._check_not_inert()
        if isinstance(target, type):
            name = target.__name__
            raise SubscriptionError(name, "is a class", f"Attach an object of it: bus.attach({name}(…)).")
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
            heard = any(s.filter.hears(event, event.hook) for s in self._registry.all())
            return heard or self._journal is not None

    def describe(self) -> list[SubscriberInfo]:
        """Who is subscribed, in the order of registration."""
        return self._registry.describe({name: health.state for name, health in self.health().items()})

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the registrations; what is unpickled is stopped. Raises `NotPicklableError`, naming a subscriber."""
        return travel.reduced(self)

    def __setstate__(self, registrations: Any) -> None:
        travel.register(self, registrations)

    def __deepcopy__(self, memo: dict[int, Any]) -> EventBus:
        """A stopped bus with the same registrations."""
        return travel.deepcopied(self, memo)

    # -------------------------------------------------------------------------------------------------- pulling

    def stream(
        self, *hooks: str | type[E], run: str | None = None, when: Callable[[E], object] | None = None,
        maxsize: int = 1024, overflow: str = "drop_oldest",
    ) -> Stream[E]:  # fmt: skip
        """Events as an async iterator on the caller's loop: ``async with bus.stream("on_log") as events:``."""
        return Stream(self._puller("stream", hooks, run=run, when=when, maxsize=maxsize, overflow=overflow))

    def wait_for(
        self, hook: str | type[E], *, run: str | None = None, when: Callable[[E], object] | None = None,
        timeout: float | None = None,
    ) -> Waiting:  # fmt: skip
        """The next event of a hook, to be awaited; subscribes now. Raises `TimeoutError` after `timeout` seconds."""
        return Waiting(self._puller("wait_for", (hook,), run=run, when=when, once=True)(), timeout)

    def _puller(self, label: str, hooks: tuple[str | type[Event], ...], **given: Any) -> Callable[[], Queued]:
        """Check what is asked for now; subscribe when called."""
        filter, options = Filter(*hooks), Options.of(label, given)

        def subscribe() -> Queued:
            self._check_not_inert()
            subscriber = self._registry.enter(None, f"{label} {' '.join(filter.names)}", "stream", filter, options)
            assert isinstance(subscriber, Queued)  # noqa: S101
            return subscriber

        return subscribe

    # ---------------------------------------------------------------------------------- control and observation

    @property
    def control(self) -> Control:
        """Ask the run to stop, pause, save or change a setting, from anywhere."""
        try:
            return self._controls["control"]
        except KeyError:
            from eventbus.control import Control

            return self._controls.setdefault("control", Control(publish=self.publish))  # one, whoever else asks now

    def stats(self) -> dict[str, SubscriberStats]:
        """The counts of every open subscription, all that was published before this call included."""
        if not self._is_inert():
            self._log.catch_up()
        return {s.name: s.read() for s in self._registry.all()}

    def health(self) -> dict[str, SubscriberHealth]:
        """How every open subscription is: "ok", "failing", "disabled" or "stalled", since when, and why.

        From any thread; never waits and never raises. A subscriber whose worker is dead, stuck or behind a held loop
        is not "ok", however well it did before.
        """
        from eventbus.health import examine  # here: most processes never ask

        return {s.name: examine(s, self) for s in self._registry.all()}

    def report(self) -> str:
        """A table for people, and what they should know: who holds whom up, and who is not well."""
        from eventbus.health import remarks

        stats, health = self.stats(), self.health()
        kinds = {s.name: s.kind for s in self._registry.all()}
        rows = [Row(name, kinds.get(name, ""), health[name].state, s) for name, s in stats.items() if name in health]
        lines = [table(rows), *remarks(rows, health)]
        if self._too_late:
            lines.append(f"{self._too_late} events were published after close.")
        if self._interrupted:
            lines.append(f"{self._interrupted} publishes were interrupted by Ctrl-C.")
        return "\n".join(lines)

    def __repr__(self) -> str:
        where = self._runner.where if self._runner is not None else "closed" if self._refuses else "not started"
        return f"<EventBus run={self._run!r} rank={self._rank} {where}, {len(self._registry.all())} subscribers>"
