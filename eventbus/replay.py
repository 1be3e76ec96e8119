"""``python -m eventbus replay``: deliver the events of a journal once more, with the numbers they had."""

from __future__ import annotations

import inspect
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from importlib import import_module
from importlib.metadata import entry_points
from itertools import islice
from pathlib import PurePath
from typing import Any
from urllib.parse import urlsplit

import anyio

from eventbus.errors import ReplayError, SinkGone, SinkUnavailable
from eventbus.event import Event
from eventbus.filters import Filter
from eventbus.redaction import hide_credentials
from eventbus.sink import Sink

__all__ = ["replay", "target_of"]

#: Sinks that can be named by the scheme of a URL or the suffix of a file; a package adds its own.
_GROUP = "trainbus.replay"
_BATCH = 256
_PAUSE_S = 1.0
_PAUSE_MOST_S = 30.0

_Write = Callable[[list[Event]], Awaitable[object]]


def target_of(text: str) -> Any:
    """The sink or function that ``--to`` names; raises `ReplayError`.

    A URL or a file name whose scheme or suffix a sink has claimed (``https://…``, ``events.jsonl``), or
    ``module:name`` of a sink, a function of one event, or a class of sinks that takes no argument.
    """
    claimed = {point.name: point for point in entry_points(group=_GROUP)}
    kind = urlsplit(text).scheme if "://" in text else PurePath(text).suffix.removeprefix(".")
    if kind in claimed:
        return claimed[kind].load()(text)
    module, _, name = text.partition(":")
    if "://" in text or not name:
        known = ", ".join(sorted(claimed)) or "none, is trainbus installed?"
        raise ReplayError(
            f"Nothing takes events to {hide_credentials(text)!r}. Give a URL or file of a known kind ({known}), or "
            "module:name of a sink or function."
        )
    sys.path.insert(0, "")  # as `python -c` has it: modules of the current directory are found
    try:
        target = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ReplayError(f"{text} cannot be imported: {error}.") from error
    return target() if isinstance(target, type) else target


async def replay(events: Iterable[Event], target: Any, *, hooks: Iterable[str] = ()) -> tuple[int, int]:
    """Deliver events to a sink or a function; returns how many were delivered, and how many failed.

    Without `hooks` a sink gets those it asks for, and a function all. A sink that is not available is asked again,
    with pauses from 1 s to 30 s; one whose receiver wants no more raises `ReplayError`.
    """
    asked = tuple(hooks) or (tuple([target.hooks] if isinstance(target.hooks, str) else target.hooks)
                             if isinstance(target, Sink) else ())  # fmt: skip
    filter = Filter(*asked)
    wanted = (event for event in events if filter.hears(type(event), event.hook))
    first = next(wanted, None)
    if first is None:
        return 0, 0
    delivered = failed = 0
    async with _opened(target, first) as (write, most):
        for batch in _batches(first, wanted, most):
            if await _deliver(batch, write):
                delivered += len(batch)
            else:
                failed += len(batch)
    return delivered, failed


@asynccontextmanager
async def _opened(target: Any, first: Event) -> AsyncIterator[tuple[_Write, int]]:
    """What writes a batch, and how many events that is at most."""
    if isinstance(target, Sink):
        bind = getattr(target, "bind", None)
        if bind is not None:
            bind(run=first.run or "", rank=first.rank or 0)
        await _insist(target.open)
        try:
            yield target.write, min(getattr(target, "max_batch", 1), _BATCH)
        finally:
            await target.aclose()
    elif callable(target):

        async def call(batch: list[Event]) -> None:
            answer = target(batch[0])
            if inspect.isawaitable(answer):
                await answer

        yield call, 1
    else:
        raise ReplayError(f"{target!r} is neither a sink nor a function of one event.")


def _batches(first: Event, others: Iterator[Event], most: int) -> Iterator[list[Event]]:
    batch = [first, *islice(others, most - 1)]
    while batch:
        yield batch
        batch = list(islice(others, most))


async def _deliver(batch: list[Event], write: _Write) -> bool:
    try:
        await _insist(lambda: write(batch))
    except SinkGone as error:
        raise ReplayError(f"The receiver wants no more events: {hide_credentials(str(error))}.") from error
    except Exception as error:  # noqa: BLE001  # the others may still arrive
        _complain(f"{batch[0].hook}, event {batch[0].seq}: {type(error).__name__}: {error}")
        return False
    return True


async def _insist(io: Callable[[], Awaitable[object]]) -> None:
    """Do it, again and again while the receiver is not available."""
    pause_s = _PAUSE_S
    while True:
        try:
            await io()
            return
        except SinkUnavailable as error:
            _complain(f"not available, trying again in {pause_s:g} s: {error}")
            await anyio.sleep(pause_s)
            pause_s = min(2 * pause_s, _PAUSE_MOST_S)


def _complain(text: str) -> None:
    print(hide_credentials(text), file=sys.stderr)
