"""Signals that end a run, asked for by ``signals=``: one terminal event, everything delivered, and as it was after."""

# ruff: noqa: PT012  # the block that raises is the loop under test

from __future__ import annotations

import os
import signal
import threading
from typing import TYPE_CHECKING, Any

import pytest

from eventbus import Event, EventBus, track
from eventbus.lifecycle import Plan
from eventbus.progress import Progress
from eventbus.signals import signals_of
from tests.eventbus.scripts import run

if TYPE_CHECKING:
    from collections.abc import Iterator

USR1 = signal.SIGUSR1


def send(number: int = USR1) -> None:
    """Send this process a signal; its handler has run when this returns."""
    os.kill(os.getpid(), number)


@pytest.fixture
def bus() -> Iterator[EventBus]:
    bus = EventBus(run="test")
    yield bus
    bus.close()


@pytest.fixture
def seen(bus: EventBus) -> list[Any]:
    seen: list[Any] = []
    bus.subscribe(seen.append)
    return seen


@pytest.fixture
def former() -> Iterator[list[int]]:
    """A handler that was there before: what it heard."""
    heard: list[int] = []
    before = signal.signal(USR1, lambda number, frame: heard.append(number))
    yield heard
    signal.signal(USR1, before)


def end_of(seen: list[Any]) -> list[tuple[str, str]]:
    return [(e.hook, e.reason) for e in seen if e.hook in ("on_train_end", "teardown")]


INTERRUPTED = [("on_train_end", "interrupted"), ("teardown", "interrupted")]

# --------------------------------------------------------------------------------------------------- what it does


def test_a_signal_ends_the_iterators_after_the_step(bus: EventBus, seen: list[Any], former: list[int]) -> None:
    """The step is finished, `on_control` tells who asked, the former handler is called and is back afterwards."""
    handler = signal.getsignal(USR1)
    steps: list[int] = []
    with track(bus, epochs=3, signals=("SIGUSR1",)) as run:
        assert signal.getsignal(USR1) != handler
        for _ in run.epochs():
            for batch in run.batches(range(5)):
                if batch == 2:
                    send()
                    assert run.should_stop
                steps.append(batch)
    assert steps == [0, 1, 2]
    (control,) = [event for event in seen if event.hook == "on_control"]
    assert (control.action, control.requester, control.reason) == ("stop", "signal", "signal SIGUSR1")
    assert control.accepted
    assert end_of(seen) == INTERRUPTED
    assert (former, signal.getsignal(USR1)) == ([USR1], handler)


def test_a_loop_that_asks_should_stop_is_interrupted_too(bus: EventBus, seen: list[Any], former: list[int]) -> None:
    """Whoever leaves by ``break`` has obeyed the signal."""
    with track(bus, epochs=3, signals=(USR1,)) as run:
        for _ in run.epochs():
            send()
            if run.should_stop:
                break
    assert end_of(seen) == INTERRUPTED


@pytest.mark.parametrize("when", ["in the first hook", "while paused", "in the last hook"])
def test_a_signal_at_an_odd_moment_is_obeyed(when: str, bus: EventBus, seen: list[Any], former: list[int]) -> None:
    """Before the first step, while the run waits between two, and while its last epoch ends."""
    hook = {"in the first hook": "on_pretrain_routine_start", "while paused": "on_control"}.get(
        when, "on_fit_epoch_end"
    )
    bus.subscribe(lambda event: send(), hook, once=True)
    steps: list[int] = []
    with track(bus, epochs=1, signals=("SIGUSR1",)) as run:
        for _ in run.epochs():
            for batch in run.batches(range(3)):
                steps.append(batch)
                if when == "while paused":
                    bus.control.pause()
    assert len(steps) == {"in the first hook": 0, "while paused": 1}.get(when, 3)
    assert end_of(seen) == INTERRUPTED


def test_a_signal_before_the_run_begins_is_not_lost(bus: EventBus, seen: list[Any]) -> None:
    """It came between the handler and the first event: no epoch begins."""
    progress = Progress(bus, Plan(epochs=2))
    progress.interrupt("signal SIGTERM")
    with progress:
        progress.ready()
        assert list(progress.iterate_epochs()) == []
    assert end_of(seen) == INTERRUPTED
    assert [event.accepted for event in seen if event.hook == "on_control"] == [True]


def test_two_signals_are_one_stop(bus: EventBus, seen: list[Any], former: list[int]) -> None:
    """Schedulers send it to the group and to the process: the second one changes nothing."""
    with track(bus, epochs=1, signals=("SIGUSR1", "SIGUSR2")) as run:
        for _ in run.epochs():
            for _ in run.batches(range(3)):
                send()
                send(signal.SIGUSR2)
                send()
    assert [event.hook for event in seen].count("on_control") == 1
    assert end_of(seen) == INTERRUPTED
    assert former == [USR1, USR1]
    assert signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL


def test_two_runs_of_one_name_are_both_interrupted(bus: EventBus, seen: list[Any], former: list[int]) -> None:
    """The signal goes to the run that asked for it, and not by way of its name."""
    with track(bus, epochs=1, signals=("SIGUSR1",)) as outer, track(bus, epochs=1, signals=("SIGUSR1",)) as inner:
        send()
        assert outer.should_stop
        assert inner.should_stop
    assert end_of(seen) == INTERRUPTED * 2


def test_the_users_own_handler_may_interrupt_a_run(bus: EventBus, seen: list[Any]) -> None:
    """A stop whose requester is "signal" counts as one."""
    before = signal.signal(USR1, lambda *_: bus.control.stop("SIGUSR1", requester="signal"))
    try:
        with track(bus, epochs=1) as run:
            for _ in run.epochs():
                for _ in run.batches(range(3)):
                    send()
    finally:
        signal.signal(USR1, before)
    assert end_of(seen) == INTERRUPTED


def test_the_loader_that_the_signal_killed_is_no_failure(bus: EventBus, seen: list[Any], former: list[int]) -> None:
    """Worker processes get the signal as well; that they are gone ends the epoch, and nothing more."""

    def loader() -> Iterator[int]:
        yield 1
        send()
        raise RuntimeError("a worker was killed")

    with track(bus, epochs=2, signals=("SIGUSR1",)) as run:
        for _ in run.epochs():
            for _ in run.batches(loader()):
                ...
    assert end_of(seen) == INTERRUPTED
    assert [event.partial for event in seen if event.hook == "on_fit_epoch_end"] == [True]
    assert "on_exception" not in [event.hook for event in seen]


def test_a_loader_that_fails_without_a_signal_fails(bus: EventBus, seen: list[Any]) -> None:
    def loader() -> Iterator[int]:
        yield 1
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"), track(bus, epochs=2, signals=("SIGUSR1",)) as run:
        for _ in run.epochs():
            for _ in run.batches(loader()):
                ...
    assert end_of(seen) == [("on_train_end", "failed"), ("teardown", "failed")]


def test_a_dead_worker_does_not_strike_elsewhere_after_the_signal(bus: EventBus, former: list[int]) -> None:
    """Torch's handler of SIGCHLD raises wherever the main thread is; after a signal that must not be a checkpoint."""

    def raising(number: int, frame: Any) -> None:
        raise RuntimeError("a worker was killed")

    before = signal.signal(signal.SIGCHLD, raising)
    try:
        with track(bus, signals=("SIGUSR1",)):
            with pytest.raises(RuntimeError):
                send(signal.SIGCHLD)
            send()
            send(signal.SIGCHLD)
        assert signal.getsignal(signal.SIGCHLD) is raising
    finally:
        signal.signal(signal.SIGCHLD, before)


# ------------------------------------------------------------------------------------------------- not too much


def test_handlers_are_put_back_however_the_block_is_left(bus: EventBus, former: list[int]) -> None:
    handler = signal.getsignal(USR1)
    with pytest.raises(LookupError), track(bus, signals=("SIGUSR1",)):
        raise LookupError
    assert signal.getsignal(USR1) is handler
    bus.subscribe(failing, "on_train_start", on_error="raise")
    with pytest.raises(LookupError), track(bus, signals=("SIGUSR1",)):
        ...
    assert signal.getsignal(USR1) is handler


def failing(event: Event) -> None:
    raise LookupError


def test_a_handler_that_was_installed_meanwhile_stays(bus: EventBus, former: list[int]) -> None:
    """It may have chained ours, which then means what was there before."""
    handler = signal.getsignal(USR1)
    try:
        with track(bus, signals=("SIGUSR1",)):
            ours: Any = signal.getsignal(USR1)
            signal.signal(USR1, theirs := lambda number, frame: ours(number, frame))
        assert signal.getsignal(USR1) is theirs
        send()
        assert former == [USR1]
    finally:
        signal.signal(USR1, handler)


def test_nothing_is_handled_unless_asked(bus: EventBus) -> None:
    before = [signal.getsignal(number) for number in signal.valid_signals()]
    with track(bus):
        assert [signal.getsignal(number) for number in signal.valid_signals()] == before


def test_a_thread_is_told_where_signals_work(bus: EventBus, seen: list[Any]) -> None:
    """Nothing is published for a run that cannot have what it asks for."""
    errors: list[Exception] = []

    def work() -> None:
        try:
            with track(bus, signals=("SIGUSR1",)):
                ...
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(10)
    assert "signals=(SIGUSR1) works only on the main thread" in str(errors[0])
    assert "bus.control.stop" in str(errors[0])
    assert seen == []


@pytest.mark.parametrize(
    ("given", "error", "match"),
    [
        (("SIGTREM",), ValueError, r"'SIGTREM', which is no signal here\. Did you mean 'SIGTERM'\?"),
        (("term",), ValueError, r"Did you mean 'SIGTERM'\?"),
        ((4711,), ValueError, "4711, which is no signal here"),
        (("SIGKILL",), ValueError, "SIGKILL, which no process can handle"),
        ("SIGTERM", TypeError, r"signals=\('SIGTERM',\)"),
        (signal.SIGTERM, TypeError, r"signals=\(SIGTERM,\)"),
    ],
)
def test_what_is_no_signal_raises_where_it_is_given(
    given: Any, error: type[Exception], match: str, bus: EventBus
) -> None:
    with pytest.raises(error, match=match):
        track(bus, signals=given)


def test_signals_go_by_name_by_number_and_by_themselves() -> None:
    assert signals_of(["SIGTERM", signal.SIGTERM, int(signal.SIGTERM), "SIGINT"]) == (signal.SIGTERM, signal.SIGINT)


# ----------------------------------------------------------------------------------------------- whole processes

_TRAINING = """
    import dataclasses
    bus = EventBus(run="r", exit_timeout=1.0)

    @bus.on("on_train_end", "teardown", "on_exception")
    async def tell(event):
        await asyncio.sleep(0.05)
        say(event.hook, getattr(event, "reason", ""))

    def send(number=signal.SIGTERM):
        os.kill(os.getpid(), number)

    def train(at, steps=5):
        with track(bus, epochs=1, signals=("SIGTERM",)) as run:
            for _ in run.epochs():
                for step in run.batches(range(steps)):
                    if step == at:
                        send()
                    say("step", step)
"""
_END = ["on_train_end interrupted", "teardown interrupted"]


def test_G10_sigterm_ends_a_training_with_everything_delivered():
    """The terminal events arrive before the block is left; what the script does then is its own."""
    done = run(_TRAINING + '\n    train(at=1)\n    say("after")\n    sys.exit(143)')
    assert (done.code, done.err) == (143, "")
    assert done.out == ["step 0", "step 1", *_END, "after"]


def test_G10_a_second_sigterm_while_it_drains_does_not_kill():
    """Another one that comes while the subscribers get the last events changes nothing."""
    done = run(
        _TRAINING
        + """
    @bus.on("on_train_end")
    async def again(event):
        send()

    train(at=1)
    say("after")
    """
    )
    assert (done.code, done.err) == (0, "")
    assert done.out == ["step 0", "step 1", *_END, "after"]


def test_G10_a_signal_that_comes_too_late_still_ends_the_process():
    """It struck when the run had ended as planned: the process does not go on as if nothing had happened."""
    done = run(
        _TRAINING
        + """
    bus.subscribe(lambda event: send(), "teardown")
    with bus:
        train(at=None, steps=2)
    say("never")
    """
    )
    assert (done.code, done.err) == (128 + signal.SIGTERM, "")
    assert done.out == ["step 0", "step 1", "on_train_end completed", "teardown completed"]


def test_G10_a_ctrl_c_that_comes_too_late_raises():
    """The same with SIGINT, whose former handler raises KeyboardInterrupt."""
    done = run(
        _TRAINING
        + """
    bus.subscribe(lambda event: send(signal.SIGINT), "teardown")
    try:
        with track(bus, signals=("SIGINT",)):
            ...
    except KeyboardInterrupt:
        bus.flush()
        say("interrupted")
    """
    )
    assert (done.code, done.err) == (0, "")
    assert done.out == ["on_train_end completed", "teardown completed", "interrupted"]


def test_G10_sigterm_with_a_sink_that_hangs_ends_within_the_grace_time():
    """Draining, closing and the exit together stay far below the half minute of Kubernetes."""
    done = run(
        _TRAINING
        + """
    import eventbus.tracking
    eventbus.tracking._DRAIN_S = 0.5

    class Stuck:
        hooks = ()
        options = {"timeout": 60.0}
        async def open(self): ...
        async def write(self, events):
            await asyncio.sleep(60)
        async def aclose(self): ...

    bus.attach(Stuck(), name="stuck")
    ends()
    train(at=1)
    """
    )
    assert done.code == 0
    assert done.out == ["step 0", "step 1", *_END]
    assert "At exit these events were not delivered: {'stuck': " in done.err
    assert "Traceback" not in done.err
    assert done.took_to_end_s < 0.5 + 1.0 + 1.0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform does not fork")
@pytest.mark.parametrize("former", ["none", "a handler"])
def test_G11_a_process_forked_in_a_training_dies_of_the_signal_as_always(former):
    """Its copy of the handler does what was done before: `Process.terminate` and `Pool.terminate` depend on it."""
    done = run(
        _TRAINING
        + """
    if sys.argv[1] == "a handler":
        signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
    with track(bus, epochs=1, signals=("SIGTERM",)) as run:
        reads, writes = os.pipe()
        child = os.fork()
        if not child:
            os.write(writes, b"ready")
            for _ in range(200):
                time.sleep(0.05)  # one long sleep may begin right after the signal, and would not notice it
            os._exit(9)
        os.read(reads, 5)
        os.kill(child, signal.SIGTERM)
        say(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), run.should_stop)
    """,
        former,
        options=("-W", "error", "-W", "ignore::DeprecationWarning"),
    )
    assert (done.code, done.err) == (0, "")
    code = 7 if former == "a handler" else -signal.SIGTERM
    assert done.out == [f"{code} False", "on_train_end stopped", "teardown stopped"]


def test_a_handler_of_a_c_library_is_left_alone(bus: EventBus, monkeypatch: pytest.MonkeyPatch) -> None:
    """It could be neither called nor put back."""
    monkeypatch.setattr(signal, "getsignal", lambda number: None)
    run = track(bus, signals=("SIGUSR1",))
    with pytest.raises(RuntimeError, match="SIGUSR1 has a handler that was not installed by Python"):
        run.__enter__()
