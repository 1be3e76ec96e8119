"""Requests to a run: who they reach, how they are answered, and that asking never waits."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from eventbus import Control, ControlApplied, Event, EventBus, FitEpochEnd, TrainEpochStart, WouldBlockError, track

if TYPE_CHECKING:
    from collections.abc import Iterator


class Optimizer:
    def __init__(self, *rates: float) -> None:
        self.param_groups: list[dict[str, Any]] = [{"lr": rate} for rate in rates]


@pytest.fixture
def bus() -> Iterator[EventBus]:
    bus = EventBus(run="test")
    yield bus
    bus.close()


def answers(bus: EventBus) -> list[ControlApplied]:
    told: list[ControlApplied] = []
    bus.subscribe(told.append, "on_control")
    return told


# ------------------------------------------------------------------------------------------------ finding a run


def test_without_a_run_the_answer_comes_at_once() -> None:
    published: list[Event] = []
    request = Control(publish=published.append).stop("now", requester="me")
    answer = request.result()
    assert answer is published[0]
    assert (answer.accepted, answer.detail, answer.reason, answer.requester) == (False, "no run is active", "now", "me")
    assert (answer.request_id, answer.action) == (request.id, "stop")


def test_the_only_active_run_is_meant_when_none_is_named() -> None:
    control = Control(publish=lambda event: None)
    inbox = control.open("a")
    request = control.pause()
    assert inbox.take() == [request]
    assert (request.run, request.action, request.done) == ("a", "pause", False)
    assert inbox.take() == []


def test_several_runs_are_named_in_the_refusal() -> None:
    control = Control(publish=lambda event: None)
    one, two = control.open("b"), control.open("a")
    assert control.stop().result().detail == "several runs are active ('a', 'b'): say which with run="
    assert control.stop(run="c").result().detail == "run 'c' is not active; active: 'a', 'b'"
    request = control.stop(run="a")
    assert (one.take(), two.take()) == ([], [request])
    assert control.runs == ("b", "a")


def test_one_run_that_is_active_twice_is_refused() -> None:
    control = Control(publish=lambda event: None)
    control.open("a"), control.open("a")
    assert control.stop().result().detail == "several runs are active ('a'): say which with run="
    assert control.stop(run="a").result().detail == "run 'a' is active 2 times: give each its own run="


def test_the_run_of_the_event_being_handled_is_meant(bus: EventBus) -> None:
    """Also when another one is the only active run: a late handler of a run that ended must not stop the next."""
    inbox = bus.control.open("second")
    told: list[Any] = []
    bus.subscribe(lambda event: told.append(bus.control.stop("from a hook")), "on_train_epoch_start")
    bus.publish(TrainEpochStart(epoch=0, step=0, run="first"))
    bus.publish(TrainEpochStart(epoch=0, step=0, run="second"))
    assert told[0].result().detail == "run 'first' is not active; active: 'second'"
    assert inbox.take() == [told[1]]


def test_an_async_subscriber_means_the_run_of_its_event(bus: EventBus) -> None:
    inboxes = {run: bus.control.open(run) for run in ("a", "b")}

    @bus.on("on_fit_epoch_end")
    async def stop(event: FitEpochEnd) -> None:
        bus.control.stop("enough")

    bus.publish(FitEpochEnd(epoch=0, run="b"))
    assert inboxes["b"].wait(10)
    assert [request.reason for request in inboxes["b"].take()] == ["enough"]
    assert inboxes["a"].take() == []


# --------------------------------------------------------------------------------------------------- the answer


def test_a_request_dies_with_its_run() -> None:
    published: list[Any] = []
    control = Control(publish=published.append)
    inbox = control.open("a")
    requests = [control.stop(), control.save()]
    inbox.close()
    assert [request.result(0).detail for request in requests] == ["the run ended"] * 2
    assert [event.request_id for event in published] == [request.id for request in requests]
    assert control.stop(run="a").result().detail == "run 'a' is not active, and no other is"


def test_a_raising_hook_leaves_no_request_without_an_answer() -> None:
    def fail(event: Event) -> None:
        raise ValueError("hook")

    control = Control(publish=fail)
    inbox = control.open("a")
    requests = [control.stop(), control.save()]
    with pytest.raises(ValueError, match="hook"):
        inbox.close()
    assert all(request.done for request in requests)


def test_another_thread_waits_for_the_answer() -> None:
    control = Control(publish=lambda event: None)
    inbox = control.open("a")
    request = control.stop()
    got: list[ControlApplied] = []
    threads = [threading.Thread(target=lambda: got.append(request.result(10))) for _ in range(3)]
    for thread in threads:
        thread.start()
    inbox.answer(inbox.take()[0], step=7, detail="done")
    for thread in threads:
        thread.join(10)
    assert [(answer.step, answer.detail, answer.accepted) for answer in got] == [(7, "done", True)] * 3


def test_waiting_on_the_thread_of_the_run_raises_at_once() -> None:
    """Only that thread can answer, so waiting there would never end, with a timeout or without."""
    control = Control(publish=lambda event: None)
    inbox = control.open("a")
    request = control.stop()
    for timeout in (None, 60.0):
        with pytest.raises(WouldBlockError, match=r"this thread runs the training that answers it.*on_control"):
            request.result(timeout)
    inbox.answer(inbox.take()[0])
    assert request.result().accepted


def test_waiting_too_long_is_a_timeout() -> None:
    control = Control(publish=lambda event: None)
    control.open("a")
    request = control.save()
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            request.result(0.01)
        except TimeoutError as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    thread.join(10)
    assert str(errors[0]) == "Run 'a' did not answer 'save' within 0.01 s."


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.anyio
async def test_awaiting_on_either_loop() -> None:
    """The loop that awaits is woken from the thread of the run; a second await gives the same answer."""
    control = Control(publish=lambda event: None)
    ready = threading.Event()

    def run() -> None:
        inbox = control.open("a")
        ready.set()
        inbox.wait(10)
        for request in inbox.take():
            inbox.answer(request, step=3)

    thread = threading.Thread(target=run)
    thread.start()
    ready.wait(10)
    request = control.stop()
    with anyio.fail_after(10):
        answer = await request
    assert (answer.step, await request) == (3, answer)
    thread.join(10)


@pytest.mark.anyio
async def test_an_await_that_is_cancelled_leaves_the_request_alone() -> None:
    control = Control(publish=lambda event: None)
    inbox = control.open("a")
    request = control.stop()
    with anyio.move_on_after(0.01):
        await request
    inbox.answer(request, detail="late")
    assert (await request).detail == "late"


@pytest.mark.asyncio
async def test_a_loop_that_is_gone_does_not_disturb_the_run() -> None:
    control = Control(publish=lambda event: None)
    inbox = control.open("a")
    request = control.stop()

    async def give_up() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(_awaited(request), 0.01)

    await asyncio.to_thread(asyncio.run, give_up())
    inbox.answer(request)
    assert request.done


async def _awaited(request: Any) -> ControlApplied:
    return await request  # type: ignore[no-any-return]


def test_asking_and_closing_at_once_answers_everything_exactly_once() -> None:
    """Eight threads ask while the run takes, answers and ends: each request has one answer, and nothing hangs."""
    published: list[Any] = []
    control = Control(publish=published.append)
    inbox = control.open("a")
    requests: list[Any] = []
    start = threading.Barrier(9)

    def ask() -> None:
        start.wait(10)
        requests.extend(control.stop(run="a") for _ in range(500))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    start.wait(10)
    for _ in range(200):
        for request in inbox.take():
            inbox.answer(request)
    inbox.close()
    for thread in threads:
        thread.join(10)
    assert len(requests) == 4000
    assert all(request.done for request in requests)
    assert sorted(event.request_id for event in published) == sorted(request.id for request in requests)


def test_a_signal_handler_may_ask_in_the_middle_of_anything() -> None:
    """Asking takes no lock, so a handler that interrupts a request of the same thread cannot hang."""
    control = Control(publish=lambda event: None)
    inbox = control.open("a")
    count = 0

    def handler(number: int, frame: Any) -> None:
        nonlocal count
        count += 1
        control.stop("signal")

    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
    try:
        asked = 0
        while count < 50:
            control.save()
            asked += 1
            inbox.wait(0)
            for request in inbox.take():
                inbox.answer(request)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert asked > 0


def test_a_request_is_read_only() -> None:
    request = Control(publish=lambda event: None).stop()
    with pytest.raises(AttributeError):
        request.action = "save"


def test_set_lr_takes_one_of_two_forms() -> None:
    control = Control(publish=lambda event: None)
    with pytest.raises(TypeError, match=r"a value .* or scale=, and not both"):
        control.set_lr()
    with pytest.raises(TypeError, match="not both"):
        control.set_lr(0.1, scale=2)


# --------------------------------------------------------------------------------------- what a run does with it


def run_with(bus: EventBus, ask: Any, *, batches: int = 4, **options: Any) -> int:
    """Train, asking once in the second batch; returns how many batches there were."""
    done = 0
    with track(bus, epochs=1, **options) as run:
        for _ in run.epochs():
            for batch in run.batches(range(batches)):
                done += 1
                if batch == 1:
                    ask()
    return done


def test_stop_ends_the_run_before_the_next_batch(bus: EventBus) -> None:
    told = answers(bus)
    assert run_with(bus, lambda: bus.control.stop("enough")) == 2
    assert [(a.action, a.accepted, a.step, a.reason) for a in told] == [("stop", True, 2, "enough")]


@pytest.mark.parametrize(
    ("ask", "rates"),
    [
        (lambda c: c.set_lr(0.5), [0.5, 0.5]),
        (lambda c: c.set_lr([0.5, 0.25]), [0.5, 0.25]),
        (lambda c: c.set_lr(scale=0.1), [0.01, 0.02]),
        (lambda c: c.set_lr(0), [0.0, 0.0]),
    ],
)
def test_set_lr_sets_the_rate_of_each_group(bus: EventBus, ask: Any, rates: list[float]) -> None:
    optimizer = Optimizer(0.1, 0.2)
    told, changes = answers(bus), []
    bus.subscribe(changes.append, "on_lr_change")
    run_with(bus, lambda: ask(bus.control), optimizer=optimizer)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx(rates)
    assert told[0].accepted
    assert (changes[0].reason, changes[0].old) == ("control", (0.1, 0.2))
    assert changes[0].new == pytest.approx(tuple(rates))


@pytest.mark.parametrize(
    ("ask", "detail"),
    [
        (lambda c: c.set_lr(-1), "a learning rate must be finite and not negative, not -1.0"),
        (lambda c: c.set_lr(float("nan")), "a learning rate must be finite and not negative, not nan"),
        (lambda c: c.set_lr("fast"), "a learning rate must be a number, not 'fast'"),
        (lambda c: c.set_lr([0.1]), "1 learning rates for 2 parameter groups"),
        (lambda c: c.set_lr(scale=-2), "scale must be finite and not negative, not -2.0"),
        (lambda c: c.set("momentum", 1), "there is no setting 'momentum'; it has: epochs, log_every, max_steps"),
        (lambda c: c.set("epochs", 0), "epochs must be a whole number of at least 1, not 0"),
        (lambda c: c.resume(), "the run is not paused"),
        (lambda c: c.save(), "this loop writes its checkpoints itself"),
    ],
)
def test_what_cannot_be_done_is_answered_with_why(bus: EventBus, ask: Any, detail: str) -> None:
    optimizer = Optimizer(0.1, 0.2)
    told = answers(bus)
    assert run_with(bus, lambda: ask(bus.control), optimizer=optimizer) == 4
    assert [(a.accepted, a.detail) for a in told] == [(False, detail)]
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2]


def test_set_lr_without_an_optimizer_is_refused(bus: EventBus) -> None:
    told = answers(bus)
    run_with(bus, lambda: bus.control.set_lr(0.1))
    assert (told[0].accepted, told[0].detail) == (
        False, "this run has no optimizer to set it in: give track(optimizer=)",
    )  # fmt: skip


def test_a_setting_can_be_changed_while_the_run_goes_on(bus: EventBus) -> None:
    told, epochs = answers(bus), []
    with track(bus, epochs=5) as run:
        for epoch in run.epochs():
            epochs.append(epoch)
            bus.control.set("epochs", 2)
    assert epochs == [0, 1]
    assert told[0].detail == "epochs = 2"


def test_a_paused_run_obeys_other_requests_and_goes_on_at_resume(bus: EventBus) -> None:
    """pause holds the run between two batches; set_lr is applied meanwhile; resume lets it go on."""
    optimizer = Optimizer(0.1)
    told, held = answers(bus), threading.Event()
    bus.subscribe(lambda event: held.set() if event.action == "pause" else None, "on_control")

    def elsewhere() -> None:
        held.wait(10)
        order.append(bus.control.set_lr(0.5, run="test").result(10).action)
        order.append("resuming")
        bus.control.resume(run="test").result(10)

    order: list[str] = []
    thread = threading.Thread(target=elsewhere)
    thread.start()
    with track(bus, epochs=1, optimizer=optimizer) as run:
        for _ in run.epochs():
            for batch in run.batches(range(3)):
                order.append(f"batch {batch} at {optimizer.param_groups[0]['lr']}")
                if batch == 0:
                    bus.control.pause()
    thread.join(10)
    assert order == ["batch 0 at 0.1", "set_lr", "resuming", "batch 1 at 0.5", "batch 2 at 0.5"]
    assert [answer.action for answer in told] == ["pause", "set_lr", "resume"]


def test_a_paused_run_can_be_stopped(bus: EventBus) -> None:
    def both() -> None:
        bus.control.pause()
        bus.control.stop()

    assert run_with(bus, both) == 2


def test_ctrl_c_gets_a_paused_run_out(bus: EventBus) -> None:
    held = threading.Event()
    bus.subscribe(lambda event: held.set(), "on_control")
    thread = threading.Thread(target=lambda: held.wait(10) and os.kill(os.getpid(), signal.SIGINT))
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        run_with(bus, lambda: bus.control.pause())
    thread.join(10)


def test_requests_behind_one_whose_hook_fails_are_answered(bus: EventBus) -> None:
    def fail(event: Any) -> None:
        raise ValueError("hook")

    bus.subscribe(fail, "on_lr_change", on_error="raise")
    requests: list[Any] = []

    def ask() -> None:
        requests.extend([bus.control.set_lr(0.5), bus.control.stop()])

    with pytest.raises(ValueError, match="hook"):
        run_with(bus, ask, optimizer=Optimizer(0.1))
    assert [request.result(0).accepted for request in requests] == [False, False]
