"""G13: registration at any time, from any thread; an event is seen by exactly those present when it was published."""

from __future__ import annotations

import gc
import threading
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventbus import Event, EventBus, NameTakenError, SubscriptionError, TrainBatchEnd, TrainEnd, ValEnd
from tests.eventbus.samples import Beat, Tick, assert_balanced
from tests.eventbus.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable


def collector(got: list[int]) -> Callable[[Event], Any]:
    async def handler(event: Event) -> None:
        got.append(event.n)  # type: ignore[attr-defined]

    return handler


@given(st.lists(st.sampled_from(["publish", "join", "leave"]), max_size=40))
def test_G13_a_queued_subscriber_sees_exactly_what_was_published_while_it_was_there(steps: list[str]) -> None:
    """Any sequence of joining, leaving and publishing, before anything is delivered."""
    bus = EventBus(autostart=False)
    present: list[tuple[Any, list[int], list[int]]] = []
    everyone: list[tuple[Any, list[int], list[int], bool]] = []
    for n, step in enumerate(steps):
        if step == "publish":
            bus.publish(Tick(n=n))
            for _, _, expected in present:
                expected.append(n)
        elif step == "join":
            got: list[int] = []
            present.append((bus.subscribe(collector(got), name=f"s{n}"), got, []))
        elif present:
            subscription, got, expected = present.pop(0)
            subscription.close()
            everyone.append((subscription, got, expected, True))
    with bus:
        assert bus.flush()
    for subscription, got, expected in present:
        assert got == expected
        assert subscription.stats.matched == len(expected)
    for subscription, got, expected, _ in everyone:
        assert got == [], "what waited when it left is dropped"
        stats = subscription.stats
        assert (stats.matched, stats.dropped_by.get("unsubscribed", 0)) == (len(expected), len(expected))


def test_G13_an_inline_hook_that_registers_another_during_dispatch_does_not_show_it_this_event() -> None:
    bus = EventBus()
    got: list[str] = []

    def second(event: Event) -> None:
        got.append("second")

    def first(event: Event) -> None:
        got.append("first")
        bus.subscribe(second, Beat)

    bus.subscribe(first, Beat)
    bus.publish(Beat())
    assert got == ["first"]
    bus.publish(Beat())
    assert got == ["first", "first", "second"]


def test_G13_a_hook_closed_during_dispatch_is_not_called_after_close_returned() -> None:
    """It was there when the event was published, so the event counts as matched, and dropped."""
    bus = EventBus()
    got: list[str] = []
    second = bus.subscribe(lambda event: got.append("second"), Beat, priority=-1)
    bus.subscribe(lambda event: second.close(), Beat)
    bus.publish(Beat())
    assert got == []
    assert second.stats.dropped_by == {"unsubscribed": 1}


def test_G13_closing_lets_the_running_delivery_end_and_drops_the_rest() -> None:
    bus = EventBus()
    begun, gate, got = threading.Event(), threading.Event(), []

    @bus.on(Tick, run_in="thread", name="slow")
    def handler(event: Tick) -> None:
        begun.set()
        gate.wait(5)
        got.append(event.n)

    with bus:
        for n in range(5):
            bus.publish(Tick(n=n))
        assert begun.wait(5)
        subscription = bus._registry.find("slow")[0]
        bus.off("slow")
        assert "slow" not in bus.stats()
        gate.set()
        until(lambda: got)
        until(lambda: subscription.stats.pending == 0)
    stats = subscription.stats
    assert got == [0]
    assert (stats.delivered, stats.dropped_by) == (1, {"unsubscribed": 4})


@pytest.mark.parametrize("how", ["subscription", "off by name", "off by function", "block", "handler", "thread"])
def test_G13_there_are_many_ways_to_leave_and_each_may_be_taken_twice(how: str) -> None:
    bus = EventBus()
    got: list[int] = []

    async def handler(event: Tick) -> None:
        got.append(event.n)
        if how == "handler":
            subscription.close()

    subscription = bus.subscribe(handler, Tick, name="me")
    bus.publish(Tick(n=0))
    assert bus.flush()
    leave: dict[str, Callable[[], object]] = {
        "subscription": subscription.close,
        "off by name": lambda: bus.off("me"),
        "off by function": lambda: bus.off(handler),
        "block": lambda: subscription.__exit__(None, None, None),
        "handler": lambda: None,
        "thread": lambda: in_thread(subscription.close),
    }
    leave[how]()
    subscription.close()
    bus.publish(Tick(n=1))
    bus.close()
    assert got == [0]
    assert subscription.is_closed


def in_thread(call: Callable[[], object]) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join(5)
    assert not thread.is_alive()


def test_G13_leaving_from_a_finaliser_is_safe() -> None:
    """Also when the garbage collector runs it in the middle of anything."""
    bus = EventBus()

    class Owner:
        def __init__(self) -> None:
            self.me = self  # only the garbage collector ends it
            self.subscription = bus.subscribe(self.hear, Tick)

        def hear(self, event: Tick) -> None: ...

        def __del__(self) -> None:
            self.subscription.close()

    for _ in range(50):
        owner = Owner()
        owner.subscription.close()  # the bus holds handlers strongly: an owner that is heard does not end
        bus.publish(Tick())
    del owner
    gc.collect()
    assert bus.stats() == {}


def test_G13_handlers_are_held_strongly() -> None:
    """A temporary object's bound method still receives."""

    class Logger:
        def __init__(self, got: list[int]) -> None:
            self.got = got

        def hear(self, event: Tick) -> None:
            self.got.append(event.n)

    bus, got = EventBus(), []
    bus.subscribe(Logger(got).hear, Tick)
    gc.collect()
    bus.publish(Tick(n=1))
    assert got == [1]


def test_G13_eight_threads_register_publish_and_leave_at_once() -> None:
    """Each thread's own subscriber sees all that its thread published while it was subscribed."""
    bus = EventBus()
    wrong: list[str] = []

    def work(me: int) -> None:
        for turn in range(30):
            got: list[int] = []

            def hook(event: Tick, got: list[int] = got) -> None:
                if event.thread == me:
                    got.append(event.n)

            with bus.subscribe(hook, Tick, name=f"{me}-{turn}"):
                for n in range(5):
                    bus.publish(Tick(n=n, thread=me))
            bus.publish(Tick(n=99, thread=me))
            if got != list(range(5)):
                wrong.append(f"{me}: {got}")

    threads = [threading.Thread(target=work, args=(me,)) for me in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert bus.stats() == {}


@pytest.mark.parametrize("kind", ["async", "thread"])
def test_G13_who_comes_and_goes_in_a_flood_sees_one_unbroken_stretch(kind: str) -> None:
    """From the first event published after registering to the last one before closing, and no other."""
    bus, over, current = EventBus(), threading.Event(), [0]
    wrong: list[object] = []

    def publish() -> None:
        while not over.is_set():
            current[0] += 1
            bus.publish(Tick(n=current[0]))

    def come_and_go(me: int) -> None:
        for turn in range(12):
            got: list[int] = []

            def block(event: Tick, got: list[int] = got) -> None:
                got.append(event.n)

            before, name = current[0], f"{me}-{turn}"
            if kind == "thread":
                subscription = bus.subscribe(block, Tick, name=name, run_in="thread", maxsize=10**6)
            else:
                subscription = bus.subscribe(collector(got), Tick, name=name, maxsize=10**6)
            present = current[0]
            until(lambda got=got: len(got) > 20)
            still_present = current[0]
            subscription.close()
            gone = current[0]
            until(lambda subscription=subscription: not subscription.stats.pending)
            first, last = got[0], got[0] + subscription.stats.matched - 1
            if not (before <= first <= present + 1 and still_present - 1 <= last <= gone):
                wrong.append((before, first, present, still_present, last, gone))
            if got != list(range(first, first + len(got))):
                wrong.append(got)

    publisher = threading.Thread(target=publish)
    publisher.start()
    guests = [threading.Thread(target=come_and_go, args=(me,)) for me in range(4)]
    for guest in guests:
        guest.start()
    for guest in guests:
        guest.join()
    over.set()
    publisher.join()
    assert wrong == []
    assert bus.stats() == {}
    bus.close()


def test_G13_many_threads_may_close_one_subscription_at_once() -> None:
    """Whoever is first closes it, and what waits is dropped once."""
    for _ in range(10):
        bus, gate, begun, errors = EventBus(), threading.Event(), threading.Event(), list[Exception]()

        async def hold(event: Tick, gate: threading.Event = gate, begun: threading.Event = begun) -> None:
            begun.set()
            gate.wait(5)

        subscription = bus.subscribe(hold, Tick)
        for n in range(6):
            bus.publish(Tick(n=n))
        assert begun.wait(5)
        start = threading.Barrier(8)

        def close(subscription: Any = subscription, start: threading.Barrier = start, errors: Any = errors) -> None:
            start.wait()
            try:
                subscription.close()
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=close) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        gate.set()
        bus.close()
        assert errors == []
        assert (subscription.stats.delivered, subscription.stats.dropped_by) == (1, {"unsubscribed": 5})


@pytest.mark.parametrize("queued", [True, False])
def test_G13_once_is_once_with_eight_publishing_threads(queued: bool) -> None:
    """However many threads publish, and removing itself twice is no error."""
    for _ in range(20):
        bus, calls = EventBus(), Counter[str]()

        async def queued_handler(event: Event, calls: Counter[str] = calls) -> None:
            calls["n"] += 1

        def inline_handler(event: Event, calls: Counter[str] = calls) -> None:
            calls["n"] += 1

        bus.subscribe(queued_handler if queued else inline_handler, Tick, once=True, name="one")
        barrier = threading.Barrier(8)

        def publish(bus: EventBus = bus, barrier: threading.Barrier = barrier) -> None:
            barrier.wait()
            bus.publish(Tick())

        threads = [threading.Thread(target=publish) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        bus.flush()
        bus.close()
        assert calls["n"] == 1


def test_G13_the_same_callable_with_equal_options_is_one_subscription_with_the_hooks_united() -> None:
    """One event reaches one callable at most once."""
    bus = EventBus()
    got: list[str] = []

    async def handler(event: Event) -> None:
        got.append(event.hook)

    first = bus.subscribe(handler, "on_val_end")
    assert bus.subscribe(handler, "on_val_*", "on_train_end") is first
    bus.publish(ValEnd())
    bus.publish(TrainEnd())
    bus.publish(TrainBatchEnd(epoch=0, batch=0, step=1))
    bus.close()
    assert got == ["on_val_end", "on_train_end"]


def test_G13_the_same_callable_with_other_options_is_refused() -> None:
    bus = EventBus()

    def handler(event: Event) -> None: ...

    bus.subscribe(handler, Tick)
    with pytest.raises(SubscriptionError, match=r"is registered already, with other options.*bus\.off"):
        bus.subscribe(handler, Beat, priority=3)


def test_G13_two_callables_of_one_name_keep_both_and_get_a_number() -> None:
    bus = EventBus()
    got: list[int] = []
    for n in range(3):

        def hook(event: Event, n: int = n) -> None:
            got.append(n)

        bus.subscribe(hook, Tick)
    bus.publish(Tick())
    assert got == [0, 1, 2]
    name = "test_G13_two_callables_of_one_name_keep_both_and_get_a_number.hook"
    assert list(bus.stats()) == [name, f"{name}#2", f"{name}#3"]


def test_G13_an_explicit_name_taken_twice_is_an_error_until_the_first_is_closed() -> None:
    bus = EventBus()
    first = bus.subscribe(lambda event: None, Tick, name="mine")
    with pytest.raises(NameTakenError, match="'mine'"):
        bus.subscribe(lambda event: None, Tick, name="mine")
    first.close()
    bus.subscribe(lambda event: None, Tick, name="mine")


def test_G13_describe_lists_who_hears_what() -> None:
    bus = EventBus()

    @bus.on("on_val_*", TrainEnd, priority=3, every=2)
    def hook(event: Event) -> None: ...

    @bus.on(run_in="thread", name="everything", rank="all")
    def everything(event: Event) -> None: ...

    one, two = bus.describe()
    assert (one.kind, one.hooks, one.priority, one.rank, dict(one.options)) == (
        "inline",
        ("on_val_*", "on_train_end"),
        3,
        "all",
        {"every": 2},
    )
    assert (two.name, two.kind, two.hooks, two.rank) == ("everything", "thread", ("*",), "all")


def test_G13_every_counts_per_hook_and_conditions_stay_exact_under_threads() -> None:
    """The nth, 2nth, … of each hook, whoever published it."""
    bus = EventBus()
    got: Counter[str] = Counter()

    async def handler(event: Event) -> None:
        got[event.hook] += 1

    bus.subscribe(handler, Tick, Beat, every=4)

    def publish() -> None:
        for n in range(100):
            bus.publish(Tick(n=n))
            if n % 2:
                bus.publish(Beat(n=n))

    threads = [threading.Thread(target=publish) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    bus.flush()
    assert_balanced(bus)
    bus.close()
    assert got == {"on_tick": 100, "on_beat": 50}
