"""What a run does with control requests, between two batches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from eventbus.rates import Refused, rates_of, set_rates, wanted_rates
from eventbus.request import SIGNAL

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from eventbus.control import Inbox
    from eventbus.progress import Progress
    from eventbus.request import Request

__all__ = ["safe_point"]

#: How often a paused run looks whether another process asked for something (s); its own requests wake it at once.
_POLL_S = 0.2


def safe_point(run: Progress, inbox: Inbox) -> None:
    """Apply and answer what was asked since the last one; while paused, wait here for "resume" or "stop"."""
    _apply(run, inbox, run.share(inbox.take()))
    while run.is_paused and not run.is_stopped:
        inbox.wait(_POLL_S)
        _apply(run, inbox, run.share(inbox.take()))


def _apply(run: Progress, inbox: Inbox, requests: Sequence[Request]) -> None:
    try:
        for request in requests:
            _answer(run, inbox, request)
    except BaseException:
        for request in requests:
            if not request.done:
                inbox.answer(request, accepted=False, step=run.step, detail="the run failed meanwhile")
        raise


def _answer(run: Progress, inbox: Inbox, request: Request) -> None:
    try:
        detail = _ACTIONS[request.action](run, request)
    except Refused as why:
        inbox.answer(request, accepted=False, step=run.step, detail=str(why))
    else:
        inbox.answer(request, step=run.step, detail=detail)


def _stop(run: Progress, request: Request) -> str:
    run.is_stopped = True
    run.is_interrupted |= request.requester == SIGNAL
    run.stop_reason = run.stop_reason or request.reason
    return ""


def _pause(run: Progress, request: Request) -> str:
    was_paused, run.is_paused = run.is_paused, True
    return "it was paused already" if was_paused else ""


def _resume(run: Progress, request: Request) -> str:
    if not run.is_paused:
        raise Refused("the run is not paused")
    run.is_paused = False
    return ""


def _save(run: Progress, request: Request) -> str:
    return run.save()


def _set_lr(run: Progress, request: Request) -> str:
    if run.optimizer is None:
        raise Refused("this run has no optimizer to set it in: give track(optimizer=)")
    old = rates_of(run.optimizer)
    new = wanted_rates(old, request.arguments)
    set_rates(run.optimizer, new)
    run.rates_set(old, new)
    run.tell_rates("control")
    return ", ".join(f"{rate:g}" for rate in new)


def _set(run: Progress, request: Request) -> str:
    name, value = request.arguments["name"], request.arguments["value"]
    setter = run.settings.get(name)
    if setter is None:
        raise Refused(f"there is no setting {name!r}; it has: {', '.join(sorted(run.settings))}")
    try:
        setter(value)
    except (TypeError, ValueError) as why:
        raise Refused(str(why)) from why
    return f"{name} = {value!r}"


_ACTIONS: dict[str, Callable[[Progress, Request], str]] = {
    "pause": _pause,
    "resume": _resume,
    "save": _save,
    "set": _set,
    "set_lr": _set_lr,
    "stop": _stop,
}
