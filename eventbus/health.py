"""The self-check of a bus: how each subscriber is, for `EventBus.health`, and what people should know of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from time import localtime, strftime, time
from typing import TYPE_CHECKING, Literal

import msgspec

from eventbus.subscription import Queued

if TYPE_CHECKING:
    from eventbus.delivery import Delivery
    from eventbus.loop import Host
    from eventbus.service import Service
    from eventbus.stats import Row
    from eventbus.subscription import Subscription

__all__ = ["SubscriberHealth", "examine", "remarks"]

#: How long a subscriber may take beyond twice its timeout until it counts as stalled, and how long a sink pauses
#: until it is asked again, in seconds.
_SLACK_S = 5.0
_SINK_PAUSE_S = 30.0
#: From how long on holding the loop, or the publishing thread, is worth a sentence, in seconds.
_HOLD_S = 0.05


class SubscriberHealth(msgspec.Struct, frozen=True, kw_only=True):
    """How one subscriber is, since when (Unix time in seconds), and why, where it is not "ok".

    "failing": the last event it was given failed or timed out, or its sink cannot open or take events.
    "disabled": ``on_error="disable"`` has switched it off.
    "stalled": its worker is dead; or events wait, and none was settled for longer than its limits allow: twice the
    `timeout` and 5 s, as often as `retries` lets it try, and for a sink or a process the 30 s after which it is asked
    or started again.
    """

    state: Literal["ok", "failing", "disabled", "stalled"] = "ok"
    since: float
    why: str = ""


def examine(subscription: Subscription, bus: Service) -> SubscriberHealth:
    """Look at one subscriber, from any thread. An "ok" one is so since it was registered, or failed last."""
    trouble, breaker = subscription.trouble, subscription.breaker
    if bus._is_inert():
        return SubscriberHealth(state="stalled", since=time(), why="this bus was made before a fork; it is inert here")
    if breaker is not None and breaker.is_open:
        last = f", the last: {trouble.why}" if trouble is not None else ""
        return SubscriberHealth(
            state="disabled", since=breaker.since, why=f"{breaker.failures} failures in a row{last}"
        )
    stalled = _stalled(subscription, bus) if isinstance(subscription, Queued) else None
    if stalled is not None:
        return stalled
    if trouble is None:
        return SubscriberHealth(since=subscription.since)
    if trouble.delivered == subscription.counters.delivered:
        return SubscriberHealth(state="failing", since=trouble.since, why=trouble.why)
    return SubscriberHealth(since=trouble.last)


def _stalled(subscriber: Queued, bus: Service) -> SubscriberHealth | None:
    runner = bus._runner
    pump = runner.pump if runner is not None else None
    delivery = pump.deliveries.get(subscriber) if pump is not None else None
    stuck_s = subscriber.pulse.stuck_s(subscriber.cursor)
    if subscriber.trouble is not None:  # an attempt that failed is no rest either
        stuck_s = min(stuck_s, time() - subscriber.trouble.last)
    if delivery is not None and delivery.death is not None and not delivery.ended:
        return SubscriberHealth(state="stalled", since=time() - stuck_s, why=f"its worker has ended: {delivery.death}")
    if stuck_s <= _patience_s(subscriber):
        return None
    why = f"{subscriber.cursor.pending} events wait, and none was settled for {stuck_s:.0f} s"
    if pump is None:
        why += "; the bus is not started"
    elif (held_by := _holder(pump.host, tuple(pump.deliveries.values()))) is not None:
        why += f"; {held_by if held_by != repr(subscriber.name) else 'it'} holds the bus loop without awaiting"
    return SubscriberHealth(state="stalled", since=time() - stuck_s, why=why)


def _patience_s(subscriber: Queued) -> float:
    """For how long it may settle nothing; see `SubscriberHealth`."""
    pause_s = _SINK_PAUSE_S if subscriber.kind in ("sink", "process") else 0.0
    return (2.0 * subscriber.timeout_s + _SLACK_S) * (1 + subscriber.options.retries) + pause_s


def _holder(host: Host, deliveries: Iterable[Delivery]) -> str | None:
    """Who is in the middle of a step on the loop: a subscriber, or a task of the host's own."""
    task = host.holder()
    if task is None:
        return None
    for name in [delivery.name for delivery in deliveries]:
        if task in (f"trainbus {name}", f"trainbus {name} io"):
            return repr(name)
    return f"task {task!r}"


def remarks(rows: Iterable[Row], health: Mapping[str, SubscriberHealth]) -> Iterator[str]:
    """What the table does not say: who held up the others or the training most, who is not well, and what to do."""
    queued = [row for row in rows if row.kind != "inline"]
    inline = [row for row in rows if row.kind == "inline"]
    longest = max(queued, key=lambda row: row.stats.hold_s, default=None)
    if longest is not None and longest.stats.hold_s >= _HOLD_S:
        yield (
            f"The bus loop was held longest by {longest.name!r}, for {1000 * longest.stats.hold_s:.0f} ms without "
            "awaiting, and with it every other subscriber there. " + _remedy(longest.kind)
        )
    slowest = max(inline, key=lambda row: row.stats.max_s, default=None)
    if slowest is not None and slowest.stats.max_s >= _HOLD_S:
        s = slowest.stats
        yield (
            f"The slowest inline hook is {slowest.name!r}: training waited for it {1000 * s.max_s:.0f} ms at worst, "
            f'{s.total_s:.1f} s in all. Make it an async def, or add run_in="thread".'
        )
    for name, found in health.items():
        if found.state != "ok":
            since = strftime("%H:%M:%S", localtime(found.since))
            yield f"Subscriber {name!r} is {found.state} since {since}: {found.why}."


def _remedy(kind: str) -> str:
    if kind == "sink":
        return "Its methods should await what they wait for."
    return 'Make it a def with run_in="thread", or await what it waits for.'
