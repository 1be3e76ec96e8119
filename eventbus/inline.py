"""Runs the inline hooks of one event on the publishing thread, in order."""

from __future__ import annotations

import logging
from time import perf_counter
from typing import TYPE_CHECKING

from eventbus.errors import PublishRecursionError
from eventbus.failures import ABOUT_US
from eventbus.handling import inline

if TYPE_CHECKING:
    from eventbus.events import Event
    from eventbus.publish import Publisher
    from eventbus.subscription import InlineHook

__all__ = ["run_hooks"]

_DEEPEST = 40
_SLOW_S = 0.05


def run_hooks(bus: Publisher, hooks: tuple[InlineHook, ...], event: Event) -> None:
    """Run each hook; the first error of one with ``on_error="raise"`` is raised after the last hook has run."""
    if len(inline.stack) >= _DEEPEST:
        raise PublishRecursionError([name for _, name in inline.stack])
    to_raise: Exception | None = None
    for hook in hooks:
        if hook.options.run is not None and hook.options.run != event.run:
            continue
        if hook.options.rank not in (None, "all", event.rank):
            continue
        if isinstance(event, ABOUT_US) and event.subscriber == hook.name:
            continue  # nobody is told of its own failure
        error = _run_one(bus, hook, event)
        if error is not None and hook.options.on_error == "raise" and to_raise is None:
            error.add_note(f"raised by inline subscriber {hook.name!r} on {event.hook}")
            to_raise = error
    if to_raise is not None:
        raise to_raise


def _run_one(bus: Publisher, hook: InlineHook, event: Event) -> Exception | None:
    started = perf_counter()
    depth = len(inline.stack)
    try:
        inline.stack.append((event, hook.name))
        error = hook.run(event)
    finally:
        del inline.stack[depth:]
    took_s = perf_counter() - started
    if took_s > _SLOW_S:
        bus._failures.notices.say(
            logging.WARNING,
            f"slow {hook.name}",
            "Inline subscriber %r held the publishing thread for %.0f ms on %s. Make it an async def, or add "
            'run_in="thread", and training will not wait for it.',
            hook.name,
            1000 * took_s,
            event.hook,
            once=True,
        )
    if isinstance(error, PublishRecursionError):
        raise error  # isolated at each of its levels it would be tried again there, by every hook
    if hook.conditions is not None and hook.conditions.spent:
        hook.close()
    if error is not None:
        bus._failures.hook_failed(hook, event, error)
    return error
