"""Who is subscribed: names, the same callable twice, objects with hook methods, and the list for people."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from types import MethodType
from typing import TYPE_CHECKING, Any

import msgspec

from eventbus.errors import NameTakenError, SubscriptionError
from eventbus.events import EVENTS
from eventbus.filters import Filter, nearest, unknown
from eventbus.marks import Attach, Widen
from eventbus.notices import logger
from eventbus.options import Kind, Options, kind_of
from eventbus.own_loop import load_loop
from eventbus.sink import Sink
from eventbus.subscription import InlineHook, Queued, Subscription, describe_fn

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from eventbus.events import Event
    from eventbus.main_script import MainScript
    from eventbus.publish import Publisher
    from eventbus.stats import SubscriberStats

__all__ = ["Attachment", "Registry", "SubscriberInfo"]


class SubscriberInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One line of `EventBus.describe`."""

    name: str
    kind: str
    hooks: tuple[str, ...]
    priority: int
    rank: str
    options: Mapping[str, Any]
    #: As in `EventBus.health`.
    state: str = "ok"


class Attachment:
    """The subscriptions of one attached object; as a context manager it closes at the end of the block."""

    def __init__(self, name: str, subscriptions: tuple[Subscription, ...]) -> None:
        self.name = name
        self.subscriptions = subscriptions

    def close(self) -> None:
        for subscription in self.subscriptions:
            subscription.close()

    @property
    def stats(self) -> dict[str, SubscriberStats]:
        return {subscription.name: subscription.stats for subscription in self.subscriptions}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Registry:
    """The open subscriptions of a bus, by name, in the order of registration.

    The lock only keeps two registrations apart; `publish` and closing never take it.
    """

    def __init__(self, bus: Publisher) -> None:
        self._bus = bus
        self._lock = threading.RLock()
        self._table: dict[str, Subscription] = {}

    def all(self) -> list[Subscription]:
        return list(self._table.values())

    def add(
        self, fn: Callable[..., Any], hooks: tuple[str | type[Event], ...], given: Mapping[str, Any]
    ) -> Subscription:
        """Register a callable; again with equal options, its hooks are united."""
        label, options, kind = _checked(fn, given)
        with self._lock:
            same = self._same(fn)
            if same is not None:
                return self._widen(same, Filter(*hooks), options)
            self._replace_cell(fn, label)
            return self.enter(fn, label, kind, Filter(*hooks), options)

    def add_sink(self, sink: Sink, given: Mapping[str, Any]) -> Subscription:
        label = str(given.get("name") or type(sink).__name__)
        options = Options.of(label, given, sink.options)
        _check_sink(sink, label, options)
        kind: Kind = "sink" if options.run_in is None else "process"
        if kind == "process":
            _check_importable(sink, label)
        hooks = (sink.hooks,) if isinstance(sink.hooks, str) else tuple(sink.hooks)
        with self._lock:
            same = self._same(sink)
            if same is not None:
                return self._widen(same, Filter(*hooks), options)
            return self.enter(sink, label, kind, Filter(*hooks), options)

    def add_object(self, target: object, given: Mapping[str, Any]) -> Attachment:
        """Register every method whose name is a hook; refuse a public ``on_…`` method that is none."""
        label = type(target).__name__
        methods = {
            name: getattr(target, name) for name in dir(type(target)) if name in EVENTS or name.startswith("on_")
        }
        hooks = {name: method for name, method in methods.items() if callable(method)}
        for name in hooks:
            if name not in EVENTS:
                raise unknown(name)
        if not hooks:
            hint = "Give a function to bus.subscribe()." if callable(target) else "See eventbus.EVENTS."
            raise SubscriptionError(label, "is no sink and has no method named like a hook", hint)
        for method in hooks.values():  # all of them before any is entered
            _checked(method, given)
        if "name" in given:
            label = given["name"]
        named = {hook: {**given, "name": f"{label}.{hook}"} if "name" in given else given for hook in hooks}
        return Attachment(label, tuple(self.add(method, (hook,), named[hook]) for hook, method in hooks.items()))

    def enter(self, fn: Any, label: str, kind: Kind, filter: Filter, options: Options) -> Subscription:
        """Enter a new subscription under a name that is free; it hears what is published from now on."""
        if kind != "inline" and self._bus._journal is None:
            options.check_journal(label)
        subscription = _make(kind, options)(self._bus, fn, label, kind, filter, options)
        if kind == "process" and isinstance(subscription, Queued):
            subscription.script = _prepare_process()
        number = 1
        while self._table.setdefault(subscription.name, subscription) is not subscription:
            if options.name is not None:
                raise NameTakenError(label)
            number += 1
            subscription.name = f"{label}#{number}"
        self._bus._reroute()
        if isinstance(subscription, Queued):
            self._bus._log.mark(Attach(self._bus._log, subscription))
        return subscription

    def remove(self, subscription: Subscription) -> bool:
        """Take it out of the table; without a lock, since a finaliser may do it."""
        found = self._table.get(subscription.name) is subscription
        if found:
            self._table.pop(subscription.name, None)
        return found

    def find(self, fn_or_name: object) -> list[Subscription]:
        """The subscriptions with this name, or of this callable, sink or object."""
        if isinstance(fn_or_name, str):
            found = [s for s in self.all() if s.name == fn_or_name]
        else:
            found = [
                s for s in self.all() if _is_same(s.fn, fn_or_name) or getattr(s.fn, "__self__", None) is fn_or_name
            ]
        if not found:
            label = fn_or_name if isinstance(fn_or_name, str) else describe_fn(fn_or_name)  # type: ignore[arg-type]
            near = nearest(label, self._table)
            hint = f"Did you mean {near!r}?" if near else "See describe() for those that are."
            raise SubscriptionError(label, "is not subscribed", hint)
        return found

    def describe(self, states: Mapping[str, str]) -> list[SubscriberInfo]:
        return [
            SubscriberInfo(
                name=s.name, kind=s.kind, hooks=s.filter.names, priority=s.options.priority,
                rank="all" if s.kind == "inline" and s.options.rank is None else str(s.options.rank or 0),
                options=s.options.shown(), state=states.get(s.name, "ok"),
            )
            for s in self.all()
        ]  # fmt: skip

    def _same(self, fn: object) -> Subscription | None:
        return next((s for s in self.all() if _is_same(s.fn, fn)), None)

    def _widen(self, same: Subscription, filter: Filter, options: Options) -> Subscription:
        if not same.options.same_as(options):
            raise SubscriptionError(
                same.name, "is registered already, with other options", "Close that subscription first: bus.off(fn)."
            )
        if filter != same.filter:
            same.filter = same.filter | filter
            self._bus._reroute()
            if isinstance(same, Queued):
                self._bus._log.mark(Widen(self._bus._log, same, same.filter))
        return same

    def _replace_cell(self, fn: Any, label: str) -> None:
        """A function of ``__main__`` defined again (a notebook cell run again) takes the place of the former one."""
        former = self._table.get(label)
        if former is None or "<" in getattr(fn, "__qualname__", "<"):
            return
        if getattr(fn, "__module__", "") == getattr(former.fn, "__module__", None) == "__main__" and (
            fn.__qualname__ == getattr(former.fn, "__qualname__", None)
        ):
            logger.info("Subscriber %r is defined again and replaces the former one.", label)
            self._bus._close_subscription(former, "unsubscribed", forget=False)


def _make(kind: Kind, options: Options) -> type[Subscription]:
    if kind != "inline":
        load_loop()
        return Queued
    if options.on_error == "disable":
        from eventbus.guard import GuardedHook  # here: few hooks are disabled

        return GuardedHook
    return InlineHook


def _prepare_process() -> MainScript | None:
    """Import what serves a process, here and not on the loop; say which script was started while that is known."""
    import eventbus.process  # noqa: F401
    from eventbus.main_script import main_script

    return main_script()


def _check_sink(sink: Sink, label: str, options: Options) -> None:
    most, gather_s = getattr(sink, "max_batch", 1), getattr(sink, "flush_interval", 0.0)
    if not isinstance(most, int) or most < 1:
        raise SubscriptionError(label, f"has max_batch = {most!r}", "It is a whole number of events from 1.")
    if not isinstance(gather_s, int | float) or not 0 <= gather_s < math.inf:
        raise SubscriptionError(label, f"has flush_interval = {gather_s!r}", "It is a number of seconds from 0.")
    if options.run_in == "thread":
        raise SubscriptionError(
            label, "is a sink, which runs on the bus loop or in a process", 'Remove run_in="thread", or use "process".'
        )


def _checked(fn: Any, given: Mapping[str, Any]) -> tuple[str, Options, Kind]:
    """The name, the options and the kind of a callable; raises `SubscriptionError` where they do not fit."""
    if not callable(fn):
        hint = "Attach a sink: bus.attach(sink)." if isinstance(fn, Sink) else "Give a function of one event."
        raise SubscriptionError(repr(fn), "cannot be called", hint)
    label = str(given.get("name") or describe_fn(fn))
    options = Options.of(label, given)
    kind = kind_of(fn, options, label)
    if kind == "process":
        _check_importable(fn, label)
    return label, options, kind


def _check_importable(target: Any, label: str) -> None:
    from eventbus.reference import check_importable  # here: few programs need it

    check_importable(target, label)


def _is_same(one: object, other: object) -> bool:
    return one is other or (isinstance(one, MethodType) and isinstance(other, MethodType) and one == other)
