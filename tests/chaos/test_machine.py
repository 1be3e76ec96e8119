"""A bus beside a model of it that is too simple to be wrong, through every order of calls that hypothesis thinks of."""

from __future__ import annotations

from collections import Counter
from tempfile import TemporaryDirectory
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from eventbus import EventBus, Subscription
from tests.chaos.scenario import EVENTS

_HOOKS = st.lists(st.sampled_from(sorted(EVENTS)), min_size=1, max_size=2, unique=True)
_POLICIES = ("drop_oldest", "drop_newest", "latest", "block", "spill", "durable")
#: So that much waits before a start, and much is published before a close.
_SELDOM = st.sampled_from((False, False, True))
_PATIENCE_S = 30.0


class Model:
    """What one subscriber should have got, and what waits for it."""

    def __init__(self, subscription: Subscription, got: list[int], hooks: set[str], options: dict[str, Any]) -> None:
        self.subscription = subscription
        self.got = got
        self.hooks = hooks
        self.is_inline = subscription.kind == "inline"
        self.overflow = options.get("overflow", "drop_oldest")
        self.maxsize = options.get("maxsize", 1024)
        self.durable = options.get("durable", False)
        self.every = options["every"]
        self.once = options["once"]
        self.is_open = True
        self.matched = 0
        #: The numbers of those that wait, with their hooks; of those that were handled; how many were dropped.
        self.waiting: list[tuple[int, str]] = []
        self.handled: list[int] = []
        #: Of a durable one: what a close left for the next start.
        self.left: list[tuple[int, str]] = []
        self.dropped = 0
        self._heard: Counter[str] = Counter()

    def hear(self, n: int, hook: str) -> None:
        """Match an event, if it is for this one, and keep the bounds."""
        if not self.is_open or hook not in self.hooks:
            return
        self._heard[hook] += 1
        if self._heard[hook] % self.every:
            return
        self.matched += 1
        if self.once:
            self.is_open = False
        if self.is_inline:
            self.handled.append(n)
        else:
            self._queue(n, hook)

    def _queue(self, n: int, hook: str) -> None:
        if self.overflow == "latest":
            before = len(self.waiting)
            self.waiting = [event for event in self.waiting if event[1] != hook]
            self.dropped += before - len(self.waiting)
        full = len(self.waiting) >= self.maxsize
        if full and (self.overflow == "block" or (self.overflow == "drop_newest" and EVENTS[hook].shed)):
            self.dropped += 1
            return
        self.waiting.append((n, hook))
        if full and self.overflow in ("drop_oldest", "latest"):
            self._shed()

    def _shed(self) -> None:
        """Drop the oldest that may be."""
        place = next((i for i, (_, hook) in enumerate(self.waiting) if EVENTS[hook].shed), None)
        if place is not None:
            del self.waiting[place]
            self.dropped += 1

    def settle(self) -> None:
        """Handle what waits."""
        self.handled += [n for n, _ in self.waiting]
        self.waiting.clear()

    def leave(self) -> None:
        """Close, or be closed with the bus: what waits is dropped."""
        self.dropped += len(self.waiting)
        if self.durable and self.is_open:
            self.left += self.waiting
        self.waiting = []

    def come_back(self) -> None:
        """The bus starts: who is durable has what it left."""
        self.matched += len(self.left)
        self.waiting = self.left + self.waiting
        self.left = []


class BusMachine(RuleBasedStateMachine):
    """One thread publishes; what waits is settled before anything is looked at, so that each outcome is certain."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = TemporaryDirectory(prefix="machine-")
        self.bus = EventBus(run="machine", autostart=False, journal=self.directory.name)
        self.models: list[Model] = []
        self.count = 0
        self.runs = False
        #: Whether it was closed and not started again.
        self.refuses = False

    @initialize(maxsize=st.integers(1, 3))
    def subscribe_each_policy(self, maxsize: int) -> None:
        for overflow in _POLICIES:
            self.subscribe("async", ["chaos_mark", "chaos_step"], 1, False, overflow, maxsize)

    @rule(
        kind=st.sampled_from(("async", "thread", "inline")),
        hooks=_HOOKS,
        every=st.sampled_from((1, 1, 2, 3)),
        once=st.sampled_from((False, False, True)),
        overflow=st.sampled_from(_POLICIES),
        maxsize=st.integers(1, 4),
    )
    def subscribe(self, kind: str, hooks: list[str], every: int, once: bool, overflow: str, maxsize: int) -> None:
        got: list[int] = []
        handler = _async_handler(got) if kind == "async" else _handler(got)
        options: dict[str, Any] = {"every": every, "once": once, "name": f"s{len(self.models)}"}
        if kind != "inline":
            options |= {"overflow": overflow, "maxsize": maxsize, "block_timeout": 0.001}
        if kind != "inline" and overflow == "durable":  # whose conditions would be asked again at the next start
            options |= {"overflow": "spill", "durable": True, "every": 1, "once": False}
        if kind == "thread":
            options["run_in"] = "thread"
        subscription = self.bus.subscribe(handler, *hooks, **options)
        self.models.append(Model(subscription, got, set(hooks), options))

    @precondition(lambda self: any(model.is_open and not model.durable for model in self.models))
    @rule(data=st.data(), hook=st.sampled_from(sorted(EVENTS)))
    def widen(self, data: st.DataObject, hook: str) -> None:
        """Subscribe a callable again, to one more hook; one that is durable would hear earlier ones of it, too."""
        open_ones = [model for model in self.models if model.is_open and not model.durable]
        model = data.draw(st.sampled_from(open_ones), label="model")
        subscription = model.subscription
        given = {name: getattr(subscription.options, name) for name in subscription.options.given}
        assert self.bus.subscribe(subscription.fn, hook, **given) is subscription
        model.hooks.add(hook)

    @rule(hooks=st.lists(st.sampled_from(sorted(EVENTS)), min_size=1, max_size=6))
    def publish(self, hooks: list[str]) -> None:
        for hook in hooks:
            self.count += 1
            self.bus.publish(EVENTS[hook](who=0, n=self.count))
            if not self.refuses:
                for model in self.models:
                    model.hear(self.count, hook)
            if self.runs:
                self.flush()

    @rule()
    def flush(self) -> None:
        done = self.bus.flush(_PATIENCE_S)
        if self.runs or not any(model.durable for model in self.models):  # which may have to look what it missed
            assert done == (self.runs or not any(model.waiting for model in self.models))
        if self.runs:
            for model in self.models:
                model.settle()

    @precondition(lambda self: any(model.is_open for model in self.models))
    @rule(data=st.data(), by_name=st.booleans())
    def leave(self, data: st.DataObject, by_name: bool) -> None:
        model = data.draw(st.sampled_from([model for model in self.models if model.is_open]), label="model")
        self.bus.off(model.subscription.name if by_name else model.subscription.fn)
        model.is_open = False
        model.leave()
        model.left = []

    @precondition(lambda self: not self.runs)
    @rule(now=_SELDOM)
    def start(self, now: bool) -> None:
        if not now:
            return
        self.bus.__enter__()
        self.runs, self.refuses = True, False
        for model in self.models:
            model.come_back()
        self.flush()

    @rule(now=_SELDOM)
    def close(self, now: bool) -> None:
        if not now:
            return
        report = self.bus.close(_PATIENCE_S)
        if self.refuses:
            return
        left = {m.subscription.name: len(m.waiting) for m in self.models if m.waiting}
        if not any(model.overflow == "latest" for model in self.models):  # of which more may wait than count
            assert (report.ok, dict(report.left)) == (not left, left)
        for model in self.models:
            model.leave()
        self.runs, self.refuses = False, True

    @invariant()
    def the_counts_are_those_of_the_model(self) -> None:
        stats = self.bus.stats()
        assert set(stats) == {model.subscription.name for model in self.models if model.is_open}
        for model in self.models:
            counts = model.subscription.stats
            failed = sum(n % 3 == 0 for n in model.handled)
            assert counts.matched == model.matched
            assert (counts.failed, counts.delivered) == (failed, len(model.handled) - failed)
            assert counts.dropped == sum(counts.dropped_by.values())
            assert counts.matched == counts.delivered + counts.failed + counts.dropped + counts.pending
            if model.overflow != "latest" or not model.waiting:
                assert (counts.dropped, counts.pending) == (model.dropped, len(model.waiting))

    @invariant()
    def everybody_got_what_was_for_them_in_order(self) -> None:
        for model in self.models:
            assert model.got == model.handled, (model.got, model.handled, model.subscription.stats)

    def teardown(self) -> None:
        self.bus.close(_PATIENCE_S)
        self.directory.cleanup()


def _async_handler(got: list[int]) -> Any:
    async def handle(event: Any) -> None:
        got.append(event.n)
        if event.n % 3 == 0:
            raise ValueError

    return handle


def _handler(got: list[int]) -> Any:
    def handle(event: Any) -> None:
        got.append(event.n)
        if event.n % 3 == 0:
            raise ValueError

    return handle


TestBusMachine = BusMachine.TestCase
TestBusMachine.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)
