"""What one chaotic run does, as plain data drawn from a seed: printed with a failure, and drawn again to replay it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random

from eventbus import Event
from eventbus.delivery import GRACE_S

__all__ = ["EVENTS", "Action", "Echo", "Mark", "Publishing", "Scenario", "Step", "Sub", "draw"]


class Step(Event, hook="chaos_step", shed=True):
    """One that may be dropped first; `who` published it as number `n`."""

    who: int
    n: int


class Mark(Event, hook="chaos_mark"):
    """One that may not be shed."""

    who: int
    n: int


class Echo(Event, hook="chaos_echo", shed=True):
    """One that a subscriber publishes while it handles another, or a finaliser."""

    who: int
    n: int


EVENTS = {event.hook: event for event in (Step, Mark, Echo)}
_HOOKS = (("chaos_step",), ("chaos_mark",), ("chaos_step", "chaos_mark"), ("chaos_*",), ())
HOSTS = ("own", "own", "asyncio", "uvloop", "trio")

_ASYNC = ("fast", "fast", "slow", "raises", "exits", "odd", "cancels", "cancels_itself", "hangs", "stubborn", "blocks",
          "burns", "publishes", "leaves", "invites")  # fmt: skip
_THREAD = ("fast", "fast", "slow", "raises", "exits", "odd", "hangs", "burns", "publishes", "leaves", "invites")
_SINK = ("fast", "fast", "slow", "raises", "odd", "unavailable", "gone", "hangs", "slow_open", "fails_open",
         "hangs_open", "burns")  # fmt: skip
_INLINE = ("fast", "raises", "publishes", "leaves", "invites", "burns")
_PROCESS = ("fast", "fast", "slow", "raises", "exits", "hangs", "dies", "stops")
BEHAVIOURS = {"async": _ASYNC, "thread": _THREAD, "sink": _SINK, "inline": _INLINE, "process": _PROCESS}
_KINDS = ("async", "async", "async", "thread", "thread", "sink", "inline")
_LOSSY = ("drop_oldest", "drop_newest", "latest")
_LOSSLESS = ("spill", "spill", "durable", "durable")
#: Those that outlive a timeout on purpose, and get a short one.
HANGING = frozenset({"hangs", "stubborn", "hangs_open", "stops"})
#: Those for which events may wait for long.
_HOLDING = HANGING | {"unavailable", "fails_open"}


@dataclass(frozen=True)
class Sub:
    """One subscriber."""

    name: str
    kind: str
    behaviour: str
    hooks: tuple[str, ...]
    overflow: str = "drop_oldest"
    maxsize: int = 1024
    timeout: float | None = None
    retries: int = 0
    every: int = 1
    once: bool = False
    when: str = ""
    on_error: str = "isolate"
    disable_after: int = 5
    retry_after: float = 30.0
    durable: bool = False
    block_timeout: float = 0.05
    #: How often it misbehaves: with each `period`-th event it sees, so many times.
    budget: int = 0
    period: int = 1
    max_batch: int = 1
    flush_interval: float = 0.0
    #: How long it hangs where it does.
    hang_s: float = 0.0


@dataclass(frozen=True)
class Publishing:
    """One publishing thread: so many events, with a pause after each `burst` of them."""

    count: int
    burst: int
    pause_s: float


@dataclass(frozen=True)
class Action:
    """What another thread does once so many events were published."""

    at: int
    what: str
    #: A time limit in seconds, or which subscriber.
    seconds: float = 0.0
    index: int = 0


@dataclass(frozen=True)
class Scenario:
    """One run, whole."""

    seed: int
    host: str
    explicit: bool
    #: Threads change places as often as they can.
    eager: bool
    #: An inline hook that hears everything, so that the number of each event is known.
    witness: bool
    #: It keeps a journal, and some subscribers spill or are durable.
    journal: bool
    #: Nobody reads `stats`, which hands events on: all of them have to arrive by themselves.
    quiet: bool
    publishing: tuple[Publishing, ...]
    subs: tuple[Sub, ...]
    #: Subscribed only while it runs.
    guests: tuple[Sub, ...]
    actors: tuple[tuple[Action, ...], ...]
    flush_s: float | None
    close_s: float
    #: How many events are published when it is closed; None = when all are.
    close_at: int | None

    @property
    def events(self) -> int:
        return sum(publishing.count for publishing in self.publishing)

    @property
    def is_benign(self) -> bool:
        """Whether every event is settled in time, as long as it is served at all."""
        return not any(sub.behaviour in _HOLDING or sub.kind == "process" for sub in (*self.subs, *self.guests))


def draw(seed: int) -> Scenario:
    """The scenario of a seed."""
    random = Random(seed)
    flood, journal = random.random() < 0.08, random.random() < 0.3
    kinds = _KINDS + ("process",) * 3 if random.random() < 0.12 and not flood else _KINDS
    publishing = tuple(_publishing(random, flood=flood) for _ in range(random.choice((1, 1, 2, 3, 4, 8))))
    events = sum(p.count for p in publishing)
    policies = _LOSSY * 2 + _LOSSLESS * journal
    if not flood:  # in which each event would wait for room
        policies += ("block",)
    subs = tuple(_sub(random, f"s{i}", kinds, policies) for i in range(random.randint(1, 9)))
    guests = tuple(_sub(random, f"g{i}", kinds, policies) for i in range(4))
    return Scenario(
        seed=seed,
        host=random.choice(HOSTS),
        explicit=random.random() < 0.5,
        eager=random.random() < 0.4,
        witness=random.random() < 0.3,
        journal=journal,
        quiet=random.random() < 0.5,
        publishing=publishing,
        subs=subs,
        guests=guests,
        actors=tuple(_actions(random, events, lifecycle=i == 0) for i in range(random.randint(1, 3))),
        flush_s=random.choice((None, 0.01, 3.0)),
        close_s=random.choice((0.05, 0.5, 3.0, 5.0)),
        close_at=random.randrange(events) if random.random() < 0.2 else None,
    )


def _publishing(random: Random, *, flood: bool) -> Publishing:
    if flood:
        return Publishing(count=5000, burst=5000, pause_s=0.0)
    return Publishing(
        count=random.choice((5, 60, 200, 500)),
        burst=random.choice((1, 7, 50, 500)),
        pause_s=random.choice((0.0, 0.0001, 0.001, 0.005)),
    )


def _sub(random: Random, name: str, kinds: tuple[str, ...], policies: tuple[str, ...]) -> Sub:
    kind = random.choice(kinds)
    behaviour = random.choice(BEHAVIOURS[kind])
    common = {
        "name": name,
        "kind": kind,
        "behaviour": behaviour,
        "hooks": random.choice(_HOOKS),
        "every": random.choice((1, 1, 1, 1, 3)),
        "once": random.random() < 0.05,
        "when": random.choice(("", "", "", "", "even", "raises")),
        "on_error": random.choices(("isolate", "disable", "raise"), (80, 14, 0 if kind == "sink" else 6))[0],
        "disable_after": random.choice((1, 2, 3)),
        "retry_after": random.choice((0.01, 0.1, 1.0)),
        "budget": random.choice((1, 3, 6)),
        "period": random.choice((1, 2, 10)),
    }
    if kind == "inline":
        return Sub(**common)
    hanging = behaviour in HANGING
    policy = random.choice(policies)
    timeout = random.choice((0.03, 0.1)) if hanging else 30.0
    given_up = timeout + GRACE_S + random.uniform(-0.005, 0.02)  # about when the clock gives it up
    return Sub(
        **common,
        hang_s=random.choice((0.2, given_up, given_up, math.inf)) if hanging else 0.2,
        overflow="spill" if policy == "durable" else policy,
        durable=policy == "durable",
        maxsize=random.choice((1, 10, 1024, 100_000)),
        timeout=timeout,
        retries=random.choice((0, 0, 0, 1, 2)),
        block_timeout=random.choice((0.001, 0.005, 0.02)),
        max_batch=random.choice((1, 7, 1000)),
        flush_interval=random.choice((0.0, 0.005, 0.1)),
    )


_WHATS = ("flush", "stats", "health", "report", "describe", "subscribe", "close_sub", "off", "widen", "collect", "bury",
          "fork", "kill_child", "stop_child")  # fmt: skip


def _actions(random: Random, events: int, *, lifecycle: bool) -> tuple[Action, ...]:
    """One thread's actions; only the first such thread restarts the bus."""
    whats = (*_WHATS, "restart") if lifecycle and random.random() < 0.3 else _WHATS
    actions = [
        Action(
            at=random.randrange(events),
            what=random.choice(whats),
            seconds=random.choice((0.001, 0.02, 0.3)),
            index=random.randrange(1000),
        )
        for _ in range(random.randint(0, 8))
    ]
    return tuple(sorted(actions, key=lambda action: action.at))
