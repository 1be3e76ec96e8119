"""The options of a subscription, checked where they are given."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import msgspec
from msgspec.structs import replace

from eventbus.errors import SubscriptionError
from eventbus.events import Event
from eventbus.filters import nearest

__all__ = ["Kind", "Options", "Overflow", "is_async", "is_seconds", "kind_of"]

Kind = Literal["inline", "async", "thread", "process", "sink", "stream"]
Overflow = Literal["drop_oldest", "drop_newest", "latest", "block", "spill"]

_MIB = 1024 * 1024
_TIMEOUT_S: Mapping[Kind, float] = {
    "async": 10.0,
    "thread": 300.0,
    "process": 300.0,
    "sink": 60.0,
    "stream": math.inf,
    "inline": math.inf,
}
_QUEUE_OPTIONS = ("timeout", "maxsize", "max_bytes", "overflow", "block_timeout", "retries", "durable")


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """How one subscriber is served. Times are in seconds, sizes in bytes; None = the default of its kind."""

    every: int = 1
    every_s: float | None = None
    when: Callable[[Any], object] | None = None
    once: bool = False
    run: str | None = None
    rank: int | Literal["all"] | None = None
    name: str | None = None
    priority: int = 0
    run_in: Literal["thread", "process"] | None = None
    timeout: float | None = None
    maxsize: int = 1024
    max_bytes: int = 64 * _MIB
    overflow: Overflow = "drop_oldest"
    block_timeout: float = 1.0
    retries: int = 0
    on_error: Literal["isolate", "disable", "raise"] = "isolate"
    disable_after: int = 5
    retry_after: float = 30.0
    durable: bool = False
    #: The names of those that were given, not left at their default.
    given: frozenset[str] = frozenset()

    @classmethod
    def of(cls, subscriber: str, given: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> Options:
        """Check the options `given` for a subscriber; `defaults` are a sink's own."""
        known = [name for name in cls.__struct_fields__ if name != "given"]
        for option in (*(defaults or ()), *given):
            if option not in known:
                near = nearest(option, known)
                hint = f"Did you mean {near}=?" if near else f"The options are {', '.join(known)}."
                raise SubscriptionError(subscriber, f"got an unknown option {option!r}", hint)
        options = cls(**{**(defaults or {}), **given}, given=frozenset(given))
        options._check_ranges(subscriber)
        options._check_breaker(subscriber)
        return options._made_durable(subscriber) if options.durable else options

    def _check_ranges(self, subscriber: str) -> None:
        for option, fits, rule in (
            ("every", _is_int(self.every, 1), "a whole number from 1"),
            ("every_s", self.every_s is None or is_seconds(self.every_s), "a number of seconds above 0"),
            ("when", self.when is None or _is_question(self.when), "a plain function of the event"),
            ("once", isinstance(self.once, bool), "True or False"),
            ("run", self.run is None or isinstance(self.run, str), "a run id"),
            ("rank", self.rank in (None, "all") or _is_int(self.rank, 0), '"all" or a rank from 0'),
            ("name", self.name is None or _is_text(self.name), "a text"),
            ("priority", _is_int(self.priority, -(1 << 63)), "a whole number (higher runs first)"),
            ("run_in", self.run_in in (None, "thread", "process"), '"thread" or "process"'),
            ("timeout", self.timeout is None or is_seconds(self.timeout), "a finite number of seconds above 0"),
            ("maxsize", _is_int(self.maxsize, 1), "a whole number of events from 1"),
            ("max_bytes", _is_int(self.max_bytes, 1), "a whole number of bytes from 1"),
            ("overflow", self.overflow in get_args(Overflow), "one of " + ", ".join(map(repr, get_args(Overflow)))),
            ("block_timeout", is_seconds(self.block_timeout), "a finite number of seconds above 0"),
            ("retries", _is_int(self.retries, 0), "a whole number from 0"),
            ("durable", isinstance(self.durable, bool), "True or False"),
            ("on_error", self.on_error in ("isolate", "disable", "raise"), '"isolate", "disable" or "raise"'),
            ("disable_after", _is_int(self.disable_after, 1), "a whole number of failures in a row, from 1"),
            ("retry_after", is_seconds(self.retry_after), "a finite number of seconds above 0"),
        ):
            if not fits:
                value = getattr(self, option)
                raise SubscriptionError(subscriber, f"got {option}={value!r}", f"{option} is {rule}.")

    def _check_breaker(self, subscriber: str) -> None:
        for option in ("disable_after", "retry_after"):
            if option in self.given and self.on_error != "disable":
                raise SubscriptionError(
                    subscriber, f"is never disabled, so {option}= means nothing to it", 'Add on_error="disable".'
                )

    def _made_durable(self, subscriber: str) -> Options:
        """A durable subscriber loses nothing, and is known by its name to the next process."""
        if self.name is None:
            raise SubscriptionError(subscriber, "is durable and has no name", "Give it name=: it is found again by it.")
        if "overflow" in self.given and self.overflow != "spill":
            raise SubscriptionError(
                subscriber, f"is durable and has overflow={self.overflow!r}", 'Leave overflow= out: it is "spill".'
            )
        return replace(self, overflow="spill")

    def check_journal(self, subscriber: str) -> None:
        """Refuse what only a bus with a journal can do, on one that has none."""
        asked = "durable=True" if self.durable else 'overflow="spill"' if self.overflow == "spill" else None
        if asked:
            raise SubscriptionError(
                subscriber, f"has {asked}, and the bus has no journal", "Give it one: EventBus(journal=DIRECTORY)."
            )

    def check_inline(self, subscriber: str) -> None:
        """Refuse what only a queue can do."""
        for option in _QUEUE_OPTIONS:
            if option in self.given:
                raise SubscriptionError(
                    subscriber,
                    f"is a def and runs inline, so {option}= means nothing to it",
                    'Make it an async def, or add run_in="thread" or run_in="process".',
                )

    def timeout_s(self, kind: Kind) -> float:
        """The time limit of one attempt in seconds."""
        return _TIMEOUT_S[kind] if self.timeout is None else self.timeout

    def shown(self) -> dict[str, Any]:
        """What differs from the defaults, for `describe`."""
        plain = Options()
        return {
            name: getattr(self, name)
            for name in self.__struct_fields__
            if name not in ("name", "priority", "given") and getattr(self, name) != getattr(plain, name)
        }

    def same_as(self, other: Options) -> bool:
        """Whether a second registration of one callable asks for the same service."""
        named_alike = self.name is None or other.name is None or self.name == other.name
        unnamed = (replace(options, name=None, given=frozenset()) for options in (self, other))
        return named_alike and next(unnamed) == next(unnamed)


def kind_of(fn: Callable[..., Any], options: Options, subscriber: str) -> Kind:
    """How a callable is served, decided once: inline, on the bus loop, in a thread, or in a process."""
    _check_signature(fn, subscriber)
    if options.run_in == "process":
        return "process"
    if is_async(fn):
        if options.run_in is not None:
            raise SubscriptionError(
                subscriber,
                f"is a coroutine function; it cannot run in a {options.run_in}",
                f'Remove run_in="{options.run_in}" or make it a def.',
            )
        return "async"
    if options.run_in == "thread":
        return "thread"
    options.check_inline(subscriber)
    return "inline"


def is_async(fn: Callable[..., Any]) -> bool:
    """Whether calling it gives a coroutine."""
    while hasattr(fn, "func") and not inspect.isroutine(fn):  # functools.partial
        fn = fn.func
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(getattr(fn, "__call__", None))  # noqa: B004


def _check_signature(fn: Callable[..., Any], subscriber: str) -> None:
    try:
        inspect.signature(fn).bind(Event())
    except TypeError as error:
        raise SubscriptionError(
            subscriber, f"cannot take one event ({error})", "Give it exactly one required parameter, the event."
        ) from None
    except ValueError:  # a builtin without a signature, e.g. list.append: taken at its word
        return
    if _is_generator(fn):
        raise SubscriptionError(subscriber, "is a generator: calling it would run nothing", "Remove its yield.")


def _is_generator(fn: Callable[..., Any]) -> bool:
    inner = inspect.unwrap(fn)
    forms = (inner, getattr(inner, "__call__", None))  # noqa: B004
    return any(inspect.isgeneratorfunction(form) or inspect.isasyncgenfunction(form) for form in forms)


def _is_question(when: object) -> bool:
    """Whether it can be asked about an event, and answers at once."""
    if not callable(when) or is_async(when) or _is_generator(when):
        return False
    try:
        inspect.signature(when).bind(Event())
    except TypeError:
        return False
    except ValueError:  # a builtin without a signature
        return True
    return True


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != ""


def _is_int(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_seconds(value: object) -> bool:
    """Whether it is a finite time above 0."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
