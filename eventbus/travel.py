"""How a bus travels: by `pickle` to another process, by `deepcopy` beside the original.

What arrives is stopped, holds the same registrations, and never starts by itself. Loop, threads, locks, streams and
what was published stay behind. The registrations are the state of the pickle and not its arguments, since their
callables may hold the bus they are registered on.
"""

from __future__ import annotations

import copy
import pickle
import threading
from typing import TYPE_CHECKING, Any

import msgspec

from eventbus.errors import NotPicklableError
from eventbus.identity import find_rank

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from eventbus.bus import EventBus
    from eventbus.filters import Filter
    from eventbus.options import Kind, Options
    from eventbus.subscription import Subscription

__all__ = ["deepcopied", "reduced", "register"]


class Registration(msgspec.Struct, frozen=True):
    """What travels of one subscription."""

    fn: Any
    name: str
    kind: Kind
    filter: Filter
    options: Options


class _Probing(threading.local):
    """The buses whose registrations this thread tries to pickle, one by one, to name the one that cannot travel."""

    def __init__(self) -> None:
        self.buses: set[int] = set()


_probing = _Probing()


def reduced(bus: EventBus) -> tuple[Any, ...]:
    """What `pickle` needs; raises `NotPicklableError` naming the subscriber that cannot travel."""
    if id(bus) in _probing.buses:  # a subscriber holds the bus it is registered on
        return object, ()
    registrations = _registrations(bus)
    _probing.buses.add(id(bus))
    try:
        for registration in registrations:
            _probe(registration)
    finally:
        _probing.buses.discard(id(bus))
    return _stopped, (type(bus), _settings(bus), bus._journal_directory), registrations


def deepcopied(bus: EventBus, memo: dict[int, Any]) -> EventBus:
    """The same registrations on a stopped bus: functions are shared, sinks and objects with methods are copied."""
    twin = memo[id(bus)] = _stopped(type(bus), _settings(bus), bus._journal_directory)
    register(twin, [_twin(registration, memo) for registration in _registrations(bus)])
    return twin


def register(bus: EventBus, registrations: Iterable[Registration]) -> None:
    """Enter what has travelled on a stopped bus, under the same names."""
    for r in registrations:
        bus._registry.enter(r.fn, r.name, r.kind, r.filter, r.options)


def _stopped(kind: type[EventBus], settings: Mapping[str, Any], journal: str | None) -> EventBus:
    bus = kind(**settings, autostart=False)
    if journal is not None:
        bus._bind_journal(journal)  # opened by a start, when the original does not use it any more
    bus._refuse_events()
    return bus


def _settings(bus: EventBus) -> dict[str, Any]:
    """The settings of a bus; a rank that it was not given is found anew where it arrives."""
    rank = bus.rank if bus.rank != find_rank() else None
    return {"run": bus.run, "rank": rank, "exit_timeout": bus._exit_timeout, "redact": bus._redact}


def _registrations(bus: EventBus) -> list[Registration]:
    return [_registration(s) for s in bus._registry.all() if s.kind != "stream"]


def _registration(subscription: Subscription) -> Registration:
    s = subscription
    return Registration(s.fn, s.name, s.kind, s.filter, s.options)


def _probe(registration: Registration) -> None:
    try:
        pickle.dumps(registration)
    except Exception as error:
        raise NotPicklableError(registration.name, _why(registration, error)) from error


def _twin(registration: Registration, memo: dict[int, Any]) -> Registration:
    try:
        fn = copy.deepcopy(registration.fn, memo)
    except Exception as error:
        raise NotPicklableError(registration.name, _why(registration, error)) from error
    return msgspec.structs.replace(registration, fn=fn)


def _why(registration: Registration, error: Exception) -> str:
    from eventbus.reference import where_defined  # here: it is only for saying what went wrong

    for what, fn in ("is", registration.fn), ("has a when= that is", registration.options.when):
        where = where_defined(fn)
        if where is not None:
            return f"{what} {where}"
    return f"does not pickle ({type(error).__name__}: {error})"
