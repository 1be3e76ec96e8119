"""`run_in="process"`: a child per subscriber, whose end, hang or stop is nobody else's."""

from __future__ import annotations

import copy
import functools
import logging
import os
import pickle
import re
import signal
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from eventbus import ChildError, EventBus, Log, SubscriberErrorEvent, SubscriptionError, TrainBatchEnd, TrainEnd
from sinks.jsonl import JSONLSink, read_jsonl
from tests.eventbus.samples import Beat, assert_balanced, is_balanced
from tests.eventbus.scripts import run
from tests.eventbus.served import (
    Chatter,
    Job,
    Lines,
    Notebook,
    Worker,
    await_it,
    count_chatter,
    do,
    hang_awaiting,
    pids,
    seen,
)  # fmt: skip
from tests.eventbus.waiting import until as wait_until
from tests.eventbus.waiting import until_in_task

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.skipif(not hasattr(os, "posix_spawn"), reason="this platform has no posix_spawn")


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    return tmp_path / "notes"


@pytest.fixture
def bus() -> Iterator[EventBus]:
    made = EventBus(run="r")
    yield made
    made.close(5.0)


#: Starting a process takes long on a busy machine, and some of these tests start several.
until = functools.partial(wait_until, timeout=60.0)


def publish(bus: EventBus, notes: Path, *whats: str, first: int = 0) -> None:
    for n, what in enumerate(whats, first):
        bus.publish(Job(n=n, path=str(notes), what=what))


def is_running(pid: int) -> bool:
    """Whether a process is there that is no zombie."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def children() -> set[int]:
    tasks = [f"/proc/self/task/{task}/children" for task in os.listdir("/proc/self/task")]
    return {int(pid) for task in tasks if os.path.exists(task) for pid in Path(task).read_text().split()}


# ------------------------------------------------------------------------------------------------------ served


@pytest.mark.parametrize("handler", [do, await_it], ids=["def", "async def"])
def test_G3_a_function_in_a_process_gets_every_event_in_order(bus: EventBus, notes: Path, handler: Any) -> None:
    """One child for all of them, and not this process."""
    subscription = bus.subscribe(handler, Job, run_in="process")
    publish(bus, notes, *[""] * 1000)
    assert bus.flush(60.0)
    assert seen(notes) == list(range(1000))
    assert len(set(pids(notes))) == 1
    assert os.getpid() not in pids(notes)
    stats = subscription.stats
    assert (stats.matched, stats.delivered, stats.calls) == (1000, 1000, 1000)
    assert stats.max_s > 0
    assert bus.describe()[0].kind == "process"
    assert bus.close().ok
    assert not is_running(pids(notes)[0])


def test_G8_an_event_arrives_as_other_subscribers_see_it(bus: EventBus, notes: Path) -> None:
    """Its class, read-only dicts, tuples and NaN survive; torch is not imported for it."""
    value = {"a": (1, [2, float("nan")]), "b": {"c": None}, "d": b"bytes", "e": "NaN"}
    bus.subscribe(do, Job, run_in="process")
    bus.publish(Job(path=str(notes), what="look", value=value))
    assert bus.flush(60.0)
    shown = "{'a': (1, (2, nan)), 'b': {'c': None}, 'd': b'bytes', 'e': 'NaN'}"
    assert notes.read_text().splitlines()[1] == f"Job {shown} True False"


def test_G8_fields_that_do_not_fit_their_class_arrive_as_they_were_published(bus: EventBus, notes: Path) -> None:
    """Nobody checks types at publish, and the child's reading of the bytes must not either."""
    bus.subscribe(Worker(notes), "on_train_batch_end", run_in="process")
    bus.publish(TrainBatchEnd(epoch="zero", batch=0, step=1, metrics={"loss": "a text"}))  # type: ignore[arg-type]
    assert bus.flush(60.0)
    assert notes.read_text() == "TrainBatchEnd\n"


def test_an_event_whose_class_a_child_cannot_import_arrives_as_unknown(bus: EventBus, notes: Path) -> None:
    """A class inside a function has no name to import it by."""
    from eventbus import Event

    class Hidden(Event, hook="on_hidden_from_children"):
        n: int = 0

    bus.subscribe(Worker(notes), "on_hidden_from_children", run_in="process")
    bus.publish(Hidden(n=1))
    assert bus.flush(60.0)
    assert notes.read_text() == "UnknownEvent\n"


def test_an_object_with_hook_methods_runs_in_a_process(bus: EventBus, notes: Path) -> None:
    bus.attach(Notebook(notes), run_in="process")
    bus.publish(Log(step=7))
    assert bus.flush(60.0)
    assert notes.read_text() == "log 7\n"


def test_a_partial_runs_in_a_process(bus: EventBus, notes: Path) -> None:
    bus.subscribe(functools.partial(do), Job, run_in="process", name="partial")
    publish(bus, notes, "")
    assert bus.flush(60.0)
    assert seen(notes) == [0]


def test_conditions_are_asked_in_the_parent(bus: EventBus, notes: Path) -> None:
    """`when` may be anything, and `every` counts here."""
    bus.subscribe(do, Job, run_in="process", every=2, when=lambda event: event.n > 4)
    publish(bus, notes, *[""] * 12)
    assert bus.flush(60.0)
    assert seen(notes) == [6, 8, 10]


def test_once_ends_the_child_after_one_event(bus: EventBus, notes: Path) -> None:
    bus.subscribe(do, Job, run_in="process", once=True)
    publish(bus, notes, "", "", "")
    assert bus.flush(60.0)
    assert seen(notes) == [0]
    until(lambda: not is_running(pids(notes)[0]))


def test_a_bus_that_the_module_makes_is_inert_in_the_child(tmp_path: Path) -> None:
    """The copy neither delivers nor starts children of its own, whatever the function publishes."""
    from tests.eventbus import served_with_bus

    notes = tmp_path / "notes"
    served_with_bus.bus.publish(Job(n=1, path=str(notes)))
    served_with_bus.bus.close()
    assert sorted(notes.read_text().splitlines()) == ["1 heard", "1 published"]


# -------------------------------------------------------------------------------------------------- its failures


@pytest.mark.parametrize("handler", [do, await_it], ids=["def", "async def"])
def test_G4_an_exception_in_a_child_is_told_with_its_traceback(
    bus: EventBus, notes: Path, handler: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """It counts as failed, the child goes on, and the log shows where it happened."""
    told: list[SubscriberErrorEvent] = []
    bus.subscribe(told.append, SubscriberErrorEvent)
    bus.subscribe(handler, Job, run_in="process", name="bad")
    publish(bus, notes, "", "raise no such thing", "exit", "")
    assert bus.flush(60.0)
    assert seen(notes) == [0, 1, 2, 3]
    assert len(set(pids(notes))) == 1
    stats = assert_balanced(bus)["bad"]
    assert (stats.delivered, stats.failed) == (2, 2)
    assert told[0].reason == "ChildError: LookupError: no such thing"
    assert told[0].failed_hook == "on_job"
    (record,) = (r for r in caplog.records if r.levelno == logging.ERROR)
    assert record.exc_info is not None
    assert 'served.py", line' in "".join(getattr(record.exc_info[1], "__notes__", ()))


def test_on_error_raise_raises_from_the_next_publish(bus: EventBus, notes: Path) -> None:
    """With the traceback of the child as a note."""
    bus.subscribe(do, Job, run_in="process", on_error="raise", name="strict")
    publish(bus, notes, "raise no such thing")
    assert bus.flush(60.0)
    with pytest.raises(ChildError, match="LookupError: no such thing") as raised:
        publish(bus, notes, "", first=1)
    assert "raised by subscriber 'strict' on on_job" in str(raised.value.__notes__)
    assert "served.py" in str(raised.value.__notes__)


@pytest.mark.parametrize("handler", [do, await_it], ids=["def", "async def"])
def test_retries_try_again_in_the_child(bus: EventBus, notes: Path, tmp_path: Path, handler: Any) -> None:
    """In order: the events behind it wait."""
    subscription = bus.subscribe(handler, Job, run_in="process", retries=2)
    publish(bus, notes, "", f"once {tmp_path / 'tried'}", "")
    assert bus.flush(60.0)
    assert seen(notes) == [0, 1, 1, 2]
    stats = subscription.stats
    assert (stats.delivered, stats.failed, stats.retried) == (3, 0, 1)


@pytest.mark.parametrize("handler", [do, hang_awaiting], ids=["def", "async def"])
def test_G5_a_call_past_its_timeout_is_ended_with_its_process(bus: EventBus, notes: Path, handler: Any) -> None:
    """It alone counts as timed out, and the next ones are served by the next child, in order."""
    subscription = bus.subscribe(handler, Job, run_in="process", timeout=0.2)
    publish(bus, notes, "", "sleep 60" if handler is do else "hang", "", "")
    assert bus.flush(60.0)
    stats = subscription.stats
    assert (stats.delivered, stats.timed_out, stats.failed, stats.dropped) == (3, 1, 0, 0)
    assert [n for n in seen(notes) if n != 1] == [0, 2, 3]
    assert len(set(pids(notes))) == 2


def test_a_child_that_ends_in_an_event_fails_that_event_only(
    bus: EventBus, notes: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The reason says how it ended; what was sent and not begun goes to the next child."""
    subscription = bus.subscribe(do, Job, run_in="process", name="dies")
    publish(bus, notes, "", "end 5", "", "")
    assert bus.flush(60.0)
    assert seen(notes) == [0, 1, 2, 3]
    stats = subscription.stats
    assert (stats.delivered, stats.failed, stats.dropped) == (3, 1, 0)
    assert "its process ended with exit code 5" in caplog.text


def test_a_child_that_is_killed_in_an_event_is_followed_by_another(
    bus: EventBus, notes: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """SIGKILL from outside, as by the kernel when memory is short."""
    told: list[SubscriberErrorEvent] = []
    bus.subscribe(told.append, SubscriberErrorEvent)
    subscription = bus.subscribe(do, Job, run_in="process", name="dies")
    publish(bus, notes, "sleep 60", "", "")
    until(lambda: seen(notes))
    os.kill(pids(notes)[0], signal.SIGKILL)
    assert bus.flush(60.0)
    assert seen(notes) == [0, 1, 2]
    stats = subscription.stats
    assert (stats.delivered, stats.failed) == (2, 1)
    assert "its process ended with signal 9 (SIGKILL)" in caplog.text
    assert told[0].reason == "ChildError: its process ended with signal 9 (SIGKILL)"


def test_a_child_that_is_killed_while_idle_fails_nothing(bus: EventBus, notes: Path) -> None:
    subscription = bus.subscribe(do, Job, run_in="process")
    publish(bus, notes, "")
    assert bus.flush(60.0)
    os.kill(pids(notes)[0], signal.SIGKILL)
    until(lambda: not is_running(pids(notes)[0]))
    publish(bus, notes, "", first=1)
    assert bus.flush(60.0)
    assert seen(notes) == [0, 1]
    assert (subscription.stats.delivered, subscription.stats.failed) == (2, 0)


def test_an_event_that_ended_its_child_is_tried_again_where_it_may_be(
    bus: EventBus, notes: Path, tmp_path: Path
) -> None:
    subscription = bus.subscribe(do, Job, run_in="process", retries=1)
    publish(bus, notes, "end 1", "")
    assert bus.flush(60.0)
    assert seen(notes) == [0, 0, 1]
    stats = subscription.stats
    assert (stats.delivered, stats.failed, stats.retried) == (1, 1, 1)


def test_children_that_die_again_and_again_are_started_with_growing_pauses(bus: EventBus, notes: Path) -> None:
    """The pause doubles from 0.1 s, and starts anew once an event was done with."""
    bus.subscribe(do, Job, run_in="process")
    started = time.monotonic()
    publish(bus, notes, "end 1", "end 1", "end 1", "")
    assert bus.flush(60.0)
    assert time.monotonic() - started > 0.1 + 0.2 + 0.4
    assert len(set(pids(notes))) == 4


def test_a_module_that_fails_to_import_is_told_and_tried_again(
    bus: EventBus, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Events wait meanwhile; at the end they have failed, and the end is not held up."""
    notes, module = tmp_path / "notes", tmp_path / "broken_in_children.py"
    module.write_text("def handle(event):\n    open(event.path, 'a').write(f'{event.n} 0\\n')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import broken_in_children  # type: ignore[import-not-found]

    module.write_text("raise ImportError('no such library')\n")
    subscription = bus.subscribe(broken_in_children.handle, Job, run_in="process", name="broken")
    publish(bus, notes, "", "")
    until(lambda: "no such library" in caplog.text)
    assert subscription.stats.pending == 2
    module.write_text("def handle(event):\n    open(event.path, 'a').write(f'{event.n} 0\\n')\n")
    assert bus.flush(60.0)
    assert seen(notes) == [0, 1]


def test_G10_close_does_not_wait_for_a_child_that_cannot_start(
    bus: EventBus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "gone_in_children.py"
    module.write_text("def handle(event): ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import gone_in_children  # type: ignore[import-not-found]

    module.unlink()
    subscription = bus.subscribe(gone_in_children.handle, Job, run_in="process", name="gone")
    publish(bus, tmp_path / "notes", "", "")
    started = time.monotonic()
    report = bus.close(60.0)
    assert time.monotonic() - started < 30.0
    stats = subscription.stats
    assert report.ok
    assert (stats.failed, stats.pending) == (2, 0)


def test_a_subscriber_in_a_process_is_disabled_before_the_next_call(bus: EventBus, notes: Path) -> None:
    """Nothing is sent ahead that a failure would have kept back; the health says why."""
    bus.subscribe(do, Job, run_in="process", on_error="disable", disable_after=2, name="bad")
    publish(bus, notes, "raise x", "end 1", "", "")
    assert bus.flush(60.0)
    assert seen(notes) == [0, 1]
    stats = bus.stats()["bad"]
    assert (stats.failed, stats.dropped_by) == (2, {"disabled": 2})
    health = bus.health()["bad"]
    assert health.state == "disabled"
    assert "its process ended with exit code 1" in health.why


@pytest.mark.parametrize("options", [{"overflow": "spill"}, {"durable": True}])
def test_G10_a_close_says_what_a_disabled_process_has_not_got(
    notes: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    """Its failing trial ends it; what is kept for it is left, and dropped for the close and no other reason."""
    bus = EventBus(journal=tmp_path / "journal")
    bus.subscribe(do, Job, run_in="process", on_error="disable", disable_after=1, name="kept", **options)
    for n in range(6):
        bus.publish(Job(n=n, path=str(notes), what="raise always"))
    wait_until(lambda: bus.health()["kept"].state == "disabled")
    report = bus.close()
    stats = bus.stats()["kept"]
    assert report.left == {"kept": stats.dropped}
    assert stats.dropped == 6 - stats.failed > 0
    assert stats.dropped_by == {"closed": stats.dropped}


def test_G17_a_durable_subscriber_in_a_process_goes_on_where_it_was(notes: Path, tmp_path: Path) -> None:
    """Its events are in the journal when the bus ends without it, and none is lost or doubled."""
    bus = EventBus(run="r", journal=tmp_path / "journal")
    bus.subscribe(do, Job, run_in="process", durable=True, name="durable")
    publish(bus, notes, "", f"wait {notes}.go", *[""] * 50)
    until(lambda: len(seen(notes)) == 2)
    assert not bus.close(0.1).ok
    Path(f"{notes}.go").touch()
    with EventBus(run="r", journal=tmp_path / "journal") as again:
        again.subscribe(do, Job, run_in="process", durable=True, name="durable")
        assert again.flush(60.0)
    assert seen(notes) == [0, 1, *range(1, 52)]


# ------------------------------------------------------------------------------------------- stopped and killed


def test_G2_a_stopped_child_holds_up_neither_publish_nor_close(bus: EventBus, notes: Path) -> None:
    """SIGSTOP, a full pipe, 100,000 events: the queue stays within its bound, and close keeps its time."""
    subscription = bus.subscribe(count_chatter, Chatter, run_in="process", name="stopped")
    other: list[int] = []
    bus.subscribe(lambda event: other.append(event.n), Chatter, run_in="thread", maxsize=200_000, name="other")
    bus.publish(Chatter())
    assert bus.flush(60.0)
    (child,) = children()
    os.kill(child, signal.SIGSTOP)
    for n in range(1, 100_001):
        bus.publish(Chatter(n=n))
        if n % 10_000 == 0:
            assert is_balanced(subscription.stats)
    until(lambda: len(other) == 100_001)
    stats = subscription.stats
    assert stats.pending <= 1024 + 256
    assert stats.matched == 100_001
    assert not bus.flush(0.1)
    started = time.monotonic()
    report = bus.close(0.5)
    assert time.monotonic() - started < 1.5
    assert report.left == {"stopped": stats.pending}
    stats = subscription.stats
    assert is_balanced(stats)
    assert (stats.pending, stats.delivered) == (0, 1)
    until(lambda: not os.path.exists(f"/proc/{child}"))


def test_a_stopped_child_that_goes_on_again_goes_on_where_it_was(bus: EventBus, notes: Path) -> None:
    subscription = bus.subscribe(do, Job, run_in="process")
    publish(bus, notes, "")
    assert bus.flush(60.0)
    os.kill(pids(notes)[0], signal.SIGSTOP)
    publish(bus, notes, *[""] * 100, first=1)
    assert not bus.flush(0.05)
    os.kill(pids(notes)[0], signal.SIGCONT)
    assert bus.flush(60.0)
    assert seen(notes) == list(range(101))
    assert subscription.stats.delivered == 101


def test_a_child_that_is_stopped_for_longer_than_the_timeout_is_replaced(bus: EventBus, notes: Path) -> None:
    """It had begun nothing, so nothing has timed out: the next child gets all of it."""
    subscription = bus.subscribe(do, Job, run_in="process", timeout=0.2)
    publish(bus, notes, "")
    assert bus.flush(60.0)
    os.kill(pids(notes)[0], signal.SIGSTOP)
    publish(bus, notes, "", "", first=1)
    assert bus.flush(60.0)
    assert seen(notes) == [0, 1, 2]
    stats = subscription.stats
    assert (stats.delivered, stats.timed_out, stats.failed) == (3, 0, 0)


def test_events_larger_than_a_pipe_arrive(bus: EventBus, notes: Path) -> None:
    """A megabyte is written piece by piece, and never waited for."""
    subscription = bus.subscribe(do, Job, run_in="process")
    for n in range(5):
        bus.publish(Job(n=n, path=str(notes), value="x" * 1_000_000))
    assert bus.flush(60.0)
    assert seen(notes) == list(range(5))
    assert subscription.stats.delivered == 5


@pytest.mark.parametrize("overflow", ["drop_oldest", "drop_newest", "latest", "block"])
def test_G7_the_bounds_are_those_of_any_queue(bus: EventBus, notes: Path, overflow: str) -> None:
    """What a child is sent ahead is a small part of the queue, and with "latest" nothing."""
    subscription = bus.subscribe(
        do, Job, Chatter, run_in="process", overflow=overflow, maxsize=4, block_timeout=0.01, name="bounded"
    )
    publish(bus, notes, f"wait {notes}.go")
    until(lambda: seen(notes))
    for n in range(50):
        bus.publish(Chatter(n=n))
    stats = subscription.stats
    assert stats.pending <= 4 + 2
    assert is_balanced(stats)
    assert stats.dropped >= 50 - 6
    Path(f"{notes}.go").touch()


def test_latest_delivers_the_newest_that_came_while_one_was_handled(bus: EventBus, notes: Path) -> None:
    subscription = bus.subscribe(do, Job, run_in="process", overflow="latest")
    publish(bus, notes, f"wait {notes}.go")
    until(lambda: seen(notes))
    publish(bus, notes, *[""] * 20, first=1)
    assert subscription.stats.matched == 21
    Path(f"{notes}.go").touch()
    assert bus.flush(60.0)
    assert seen(notes) == [0, 20]
    stats = subscription.stats
    assert (stats.delivered, stats.dropped_by) == (2, {"coalesced": 19})


def test_G13_closing_the_subscription_lets_the_running_call_end_and_drops_the_rest(bus: EventBus, notes: Path) -> None:
    """What was sent ahead is dropped too, and the child ends."""
    subscription = bus.subscribe(do, Job, run_in="process")
    publish(bus, notes, f"wait {notes}.go", "", "", "")
    until(lambda: seen(notes))
    subscription.close()
    until(lambda: subscription.cursor.ended)  # type: ignore[attr-defined]
    Path(f"{notes}.go").touch()
    until(lambda: not is_running(pids(notes)[0]))
    stats = subscription.stats
    assert seen(notes) == [0]
    assert (stats.delivered, stats.dropped_by, stats.pending) == (1, {"unsubscribed": 3}, 0)


def test_G6_the_counts_balance_at_every_instant(bus: EventBus, notes: Path) -> None:
    """Read from another thread while children work, raise, die and are killed."""
    subscription = bus.subscribe(do, Job, run_in="process", maxsize=64)
    stop, wrong = threading.Event(), []

    def look() -> None:
        while not stop.is_set():
            stats = subscription.stats
            if not is_balanced(stats):
                wrong.append(stats)
            time.sleep(0.0005)

    thread = threading.Thread(target=look)
    thread.start()
    for n in range(300):
        what = "end 1" if n == 50 else "raise x" if n % 7 == 0 else ""
        bus.publish(Job(n=n, path=str(notes), what=what))
        if n == 100:
            until(lambda: len(pids(notes)) > 60)
            os.kill(pids(notes)[-1], signal.SIGKILL)
    assert bus.flush(60.0)
    stop.set()
    thread.join()
    assert not wrong
    assert seen(notes) == sorted(set(seen(notes)))
    stats = subscription.stats
    assert stats.matched == 300
    assert stats.delivered + stats.failed + stats.dropped == 300


# ------------------------------------------------------------------------------------------------------- sinks


def calls(path: Path) -> list[str]:
    return [line.split()[0] for line in path.read_text().splitlines()] if path.exists() else []


def written(path: Path) -> list[int]:
    lines = [line.split() for line in path.read_text().splitlines()]
    return [int(n) for line in lines if line[0] == "write" for n in line[1:]]


def test_a_sink_in_a_process_is_opened_written_in_batches_and_closed_there(bus: EventBus, notes: Path) -> None:
    subscription = bus.attach(Lines(notes), run_in="process")
    for n in range(3000):
        bus.publish(Job(n=n))
    assert bus.flush(60.0)
    assert written(notes) == list(range(3000))
    assert bus.close().ok
    names = calls(notes)
    assert names[:2] == ["bind", "open"]
    assert names[-1] == "close"
    assert names.count("open") == names.count("close") == 1
    assert names.count("write") < 100
    assert notes.read_text().startswith("bind r 0\n")
    stats = subscription.stats  # type: ignore[union-attr]
    assert (stats.matched, stats.delivered) == (3000, 3000)


def test_a_flush_does_not_wait_for_a_sink_to_gather(bus: EventBus, notes: Path) -> None:
    sink = Lines(notes)
    sink.flush_interval = 30.0
    bus.attach(sink, run_in="process")
    bus.publish(Job(n=1))
    assert bus.flush(5.0)
    assert written(notes) == [1]


def test_a_sink_that_fails_in_a_process_fails_its_batch(bus: EventBus, notes: Path) -> None:
    subscription = bus.attach(Lines(notes), run_in="process")
    bus.publish(Job(n=1, what="raise"))
    assert bus.flush(60.0)
    bus.publish(Job(n=2))
    assert bus.flush(60.0)
    stats = subscription.stats  # type: ignore[union-attr]
    assert (stats.delivered, stats.failed) == (1, 1)


def test_a_sink_whose_receiver_is_away_keeps_its_events(bus: EventBus, notes: Path, tmp_path: Path) -> None:
    told: list[SubscriberErrorEvent] = []
    bus.subscribe(told.append, SubscriberErrorEvent)
    subscription = bus.attach(Lines(notes, str(tmp_path / "tried")), run_in="process")
    bus.publish(Job(n=1, what="away"))
    assert bus.flush(60.0)
    assert written(notes) == [1, 1]
    assert subscription.stats.delivered == 1  # type: ignore[union-attr]
    assert told[0].reason == "SinkUnavailable: the receiver is away"


def test_a_sink_whose_receiver_wants_no_more_is_switched_off(bus: EventBus, notes: Path) -> None:
    subscription = bus.attach(Lines(notes), run_in="process")
    bus.publish(Job(n=1, what="gone"))
    until(lambda: subscription.is_closed)  # type: ignore[union-attr]
    until(lambda: "close" in calls(notes))
    assert subscription.stats.failed == 1  # type: ignore[union-attr]


@pytest.mark.parametrize("fault", ["block", "await"])
def test_G5_a_sink_that_takes_too_long_in_a_process_has_timed_out(bus: EventBus, notes: Path, fault: str) -> None:
    """One that awaits is left to end by itself; one that holds its loop is ended with its process."""
    subscription = bus.attach(Lines(notes), run_in="process", timeout=0.2)
    bus.publish(Job(n=1, what=fault))
    until(lambda: "write" in calls(notes))
    until(lambda: subscription.stats.timed_out == 1)  # type: ignore[union-attr]
    if fault == "block":
        bus.publish(Job(n=2))
        assert bus.flush(60.0)
        assert calls(notes).count("open") == 2
        assert written(notes) == [1, 2]


def test_a_killed_sink_is_opened_again_and_gets_what_was_not_written(bus: EventBus, notes: Path) -> None:
    sink = Lines(notes)
    sink.flush_interval = 30.0
    subscription = bus.attach(sink, run_in="process")
    until(lambda: "open" in calls(notes) or bus.publish(Job(n=1)))
    until(lambda: subscription.stats.pending)  # type: ignore[union-attr]
    os.kill(next(iter(children())), signal.SIGKILL)
    assert bus.flush(60.0)
    stats = subscription.stats  # type: ignore[union-attr]
    assert calls(notes).count("open") == 2
    assert stats.failed == 0
    assert stats.delivered == stats.matched == len(written(notes))


def test_a_file_sink_writes_from_a_process(bus: EventBus, tmp_path: Path) -> None:
    path = tmp_path / "{run}" / "events.jsonl"
    bus.attach(JSONLSink(path), run_in="process")
    for step in range(20_000):
        bus.publish(TrainBatchEnd(epoch=0, batch=step, step=step, metrics={"loss": 0.5}, lr=(0.1,)))
    bus.publish(TrainEnd(epoch=0, step=20_000))
    assert bus.close().ok
    events = list(read_jsonl(tmp_path / "r" / "events.jsonl"))
    assert [e.step for e in events] == list(range(20_001))  # type: ignore[attr-defined]


# ------------------------------------------------------------------------------------------------ what is refused


def local_function() -> Any:
    def handle(event: Any) -> None: ...

    return handle


class Unpicklable:
    """One that holds a lock."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def on_log(self, event: Any) -> None: ...


@pytest.mark.parametrize(
    ("handler", "why"),
    [
        (lambda event: None, "is a lambda"),
        (local_function(), r"is defined inside of a function \(local_function.<locals>.handle\)"),
        (Unpicklable().on_log, "does not pickle (TypeError: cannot pickle '_thread.lock' object)"),
        (functools.partial(lambda event: None), "does not pickle"),
    ],
    ids=["lambda", "local", "method", "partial"],
)
def test_G15_what_a_child_cannot_import_is_refused_at_registration(bus: EventBus, handler: Any, why: str) -> None:
    """By name, with what to do instead."""
    with pytest.raises(SubscriptionError) as raised:
        bus.subscribe(handler, "on_log", run_in="process", name="mine")
    said = str(raised.value)
    assert re.search(why, said) or why in said
    assert "Subscriber 'mine'" in said
    assert "top of an importable module" in said
    assert not bus.describe()


def test_G15_a_sink_that_cannot_travel_is_refused_at_registration(bus: EventBus, notes: Path) -> None:
    sink = Lines(notes)
    sink.lock = threading.Lock()  # type: ignore[attr-defined]
    with pytest.raises(SubscriptionError, match="does not pickle"):
        bus.attach(sink, run_in="process")


def test_G15_an_object_with_a_method_that_cannot_travel_is_refused_as_a_whole(bus: EventBus) -> None:
    with pytest.raises(SubscriptionError, match="does not pickle"):
        bus.attach(Unpicklable(), run_in="process")


def test_G15_a_coroutine_function_in_a_thread_is_still_refused(bus: EventBus) -> None:
    with pytest.raises(SubscriptionError, match="it cannot run in a thread"):
        bus.subscribe(await_it, Job, run_in="thread")
    with pytest.raises(SubscriptionError, match='run_in is "thread" or "process"'):
        bus.subscribe(do, Job, run_in="fork")


def test_G15_a_function_of_an_interactive_session_is_refused() -> None:
    done = run("""
        def handle(event): ...
        bus = EventBus()
        try:
            bus.subscribe(handle, "on_log", run_in="process")
        except SubscriptionError as error:
            say(error)
    """)
    assert done.err == ""
    assert "'handle' is defined in an interactive session" in done.out[0]
    assert "Put it into a module" in done.out[0]


_GUARDED = """
class Mine(Event):
    n: int = 0

bus = EventBus()

@bus.on("on_log", "on_mine", run_in="process")
def handle(event):
    say("handled", type(event).__name__)
"""


def test_a_function_of_a_script_with_the_usual_guard_runs_in_a_child(tmp_path: Path) -> None:
    """So do its own event classes; the script does nothing a second time."""
    done = run(
        _GUARDED
        + """
if __name__ == "__main__":
    say("once")
    bus.publish(Log(step=1))
    bus.publish(Mine(n=1))
""",
        path=tmp_path / "script.py",
    )
    assert (done.code, done.err) == (0, "")
    assert done.out == ["once", "handled Log", "handled Mine"]


def test_G15_a_function_of_a_script_without_the_guard_is_refused(tmp_path: Path) -> None:
    done = run(_GUARDED, path=tmp_path / "script.py")
    assert done.code == 1
    assert "SubscriptionError: Subscriber 'handle' is defined in" in done.err
    assert 'has no `if __name__ == "__main__":`' in done.err


def test_a_script_that_starts_its_bus_above_the_guard_starts_no_second_one_in_the_child(tmp_path: Path) -> None:
    """No chain of processes: the child's import raises, and the parent says so."""
    done = run(
        _GUARDED
        + """
bus.publish(Log(step=1))
if __name__ == "__main__":
    stats = bus.stats()["handle"]
    bus.close(60.0)
    say("main")
""",
        path=tmp_path / "script.py",
    )
    assert done.out == ["main"]
    assert "A bus starts while the child process of a subscriber imports this code" in done.err
    assert "below `if __name__ ==" in done.err


# -------------------------------------------------------------------------------------------------- to the end


_SERVED = """
from pathlib import Path
from tests.eventbus.served import Job, Lines, do, do_slowly, await_it
bus = EventBus()
notes = sys.argv[1]
"""


@pytest.mark.parametrize(("ending", "code"), [("pass", 0), ("sys.exit(3)", 3), ("raise LookupError('the model')", 1)])
def test_G10_a_script_that_never_closes_delivers_in_processes_too(ending: str, code: int, tmp_path: Path) -> None:
    """A def, an async def and a sink; the children are started, drained and ended while the interpreter exits."""
    done = run(
        _SERVED
        + """
bus.subscribe(do, Job, run_in="process")
bus.subscribe(await_it, Job, run_in="process")
bus.attach(Lines(notes + ".sink"), run_in="process")
for n in range(50):
    bus.publish(Job(n=n, path=notes))
"""
        + ending,
        str(tmp_path / "notes"),
    )
    assert done.code == code
    assert code == 1 or done.err == ""
    assert sorted(seen(tmp_path / "notes")) == sorted([*range(50), *range(50)])
    assert written(tmp_path / "notes.sink") == list(range(50))
    assert calls(tmp_path / "notes.sink")[-1] == "close"
    for pid in set(pids(tmp_path / "notes")):
        assert not is_running(pid)


def test_G10_an_exit_is_not_held_up_by_a_stopped_child(tmp_path: Path) -> None:
    """It is killed when the time is over."""
    done = run(
        _SERVED
        + """
bus._exit_timeout = 0.5
bus.subscribe(do, Job, run_in="process")
bus.publish(Job(n=0, path=notes))
bus.flush(60.0)
child = int(Path(notes).read_text().split()[1])
os.kill(child, signal.SIGSTOP)
bus.publish(Job(n=1, path=notes))
ends()
""",
        str(tmp_path / "notes"),
    )
    assert done.code == 0
    assert done.took_to_end_s < 3.0
    assert "not delivered: {'do': 1}" in done.err
    until(lambda: not is_running(pids(tmp_path / "notes")[0]))


def test_a_child_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    """SIGKILL of the parent: what was sent is handled, and no process is left, also where a forked one lives on."""
    notes = tmp_path / "notes"
    done = run(
        _SERVED
        + """
bus.subscribe(do, Job, run_in="process")
bus.attach(Lines(notes + ".sink"), run_in="process")
bus.publish(Job(n=0, path=notes))
bus.flush(60.0)
forked = os.fork()
if not forked:
    os.close(1)
    os.close(2)
    time.sleep(30)
    os._exit(0)
say(forked)
os.kill(os.getpid(), signal.SIGKILL)
""",
        str(notes),
        options=("-W", "ignore"),
    )
    assert done.code == -signal.SIGKILL
    child = pids(notes)[0]
    until(lambda: not is_running(child))
    until(lambda: calls(tmp_path / "notes.sink")[-1] == "close")
    assert is_running(int(done.out[0]))
    os.kill(int(done.out[0]), signal.SIGKILL)


def test_a_child_that_hangs_ends_too_when_its_parent_is_killed(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    done = run(
        _SERVED
        + """
bus.subscribe(do, Job, run_in="process")
bus.publish(Job(n=0, path=notes, what="sleep 60"))
while not Path(notes).exists():
    time.sleep(0.01)
os.kill(os.getpid(), signal.SIGKILL)
""",
        str(notes),
    )
    assert done.code == -signal.SIGKILL
    until(lambda: not is_running(pids(notes)[0]))


def test_a_ctrl_c_for_all_of_them_leaves_the_child_to_drain(tmp_path: Path) -> None:
    """SIGINT and SIGTERM to the whole process group: what was published before is delivered."""
    notes = tmp_path / "notes"
    done = run(
        _SERVED
        + """
os.setpgid(0, 0)
bus.subscribe(do_slowly, Job, run_in="process")
signal.signal(signal.SIGTERM, lambda *_: None)
for n in range(30):
    bus.publish(Job(n=n, path=notes))
os.killpg(0, signal.SIGTERM)
while not Path(notes).exists():
    time.sleep(0.01)
os.killpg(0, signal.SIGTERM)
os.killpg(0, signal.SIGINT)
time.sleep(5)
""",
        str(notes),
    )
    assert "KeyboardInterrupt" in done.err
    assert seen(notes) == list(range(30))


def test_G14_a_bus_starts_stops_and_starts_again(notes: Path) -> None:
    """Each start has a child of its own."""
    bus = EventBus()
    bus.subscribe(do, Job, run_in="process")
    for start in range(3):
        with bus:
            publish(bus, notes, "", first=start)
    assert seen(notes) == [0, 1, 2]
    assert len(set(pids(notes))) == 3
    assert not any(map(is_running, pids(notes)))


@pytest.mark.anyio
async def test_G14_process_subscribers_work_on_the_loop_of_a_host(notes: Path) -> None:
    """asyncio, uvloop and trio; an automatic start moves there with its events."""
    bus = EventBus()
    subscription = bus.subscribe(do, Job, run_in="process")
    publish(bus, notes, "", "")
    async with bus:
        publish(bus, notes, "", "raise x", first=2)
        assert await bus.aflush(60.0)
        assert seen(notes) == [0, 1, 2, 3]
        os.kill(pids(notes)[-1], signal.SIGSTOP)
        publish(bus, notes, "", first=4)
        os.kill(pids(notes)[-1], signal.SIGCONT)
        await until_in_task(lambda: subscription.stats.pending == 0)
    assert seen(notes) == [0, 1, 2, 3, 4]
    assert not any(map(is_running, pids(notes)))


def test_G11_a_forked_copy_leaves_the_child_alone(bus: EventBus, notes: Path) -> None:
    """It publishes nothing, ends, and the parent goes on with the same child."""
    done = run(
        _SERVED
        + """
bus.subscribe(do, Job, run_in="process")
bus.publish(Job(n=0, path=notes))
bus.flush(60.0)
if not os.fork():
    bus.publish(Job(n=100, path=notes))
    bus.close()
    sys.exit(0)
os.wait()
bus.publish(Job(n=1, path=notes))
""",
        str(notes),
        options=("-W", "ignore"),
    )
    assert (done.code, done.err) == (0, "")
    assert seen(notes) == [0, 1]
    assert len(set(pids(notes))) == 1


def test_G11_the_registration_travels(bus: EventBus, notes: Path) -> None:
    """By pickle and by deepcopy, before the start and while it runs."""
    bus.subscribe(do, Job, run_in="process", maxsize=7)
    publish(bus, notes, "")
    assert bus.flush(60.0)
    for twin in pickle.loads(pickle.dumps(bus)), copy.deepcopy(bus):
        (info,) = twin.describe()
        assert (info.kind, info.options["maxsize"], info.options["run_in"]) == ("process", 7, "process")
        with twin:
            publish(twin, notes, "", first=1)
    assert seen(notes) == [0, 1, 1]


def test_a_rank_other_than_0_starts_no_child_until_it_is_needed(notes: Path) -> None:
    """Eight ranks do not mean eight children."""
    with EventBus(rank=3) as bus:
        bus.subscribe(do, Job, run_in="process")
        bus.subscribe(Worker(notes), Beat, run_in="process", rank="all", name="all")
        publish(bus, notes, "")
        bus.publish(Beat())
        assert bus.flush(60.0)
        assert notes.read_text() == "Beat\n"
        assert len(children()) == 1


def test_the_output_of_a_child_is_the_output_of_the_program(tmp_path: Path) -> None:
    """What it prints comes out whole, at its end at the latest, and disturbs nothing."""
    done = run(
        """
        bus = EventBus()

        def handle(event):
            print("step", event.step)

        if __name__ == "__main__":
            bus.subscribe(handle, "on_log", run_in="process")
            for step in range(100):
                bus.publish(Log(step=step))
        """,
        path=tmp_path / "script.py",
    )
    assert (done.code, done.err) == (0, "")
    assert done.out == [f"step {step}" for step in range(100)]


def test_a_child_gets_no_file_and_no_input_of_its_parent(bus: EventBus, notes: Path) -> None:
    """A descriptor that a library left open over exec is closed; stdin is empty."""
    reading, writing = os.pipe()
    os.set_inheritable(writing, True)
    bus.subscribe(do, Job, run_in="process")
    publish(bus, notes, "")
    assert bus.flush(60.0)
    fds = {os.readlink(f"/proc/{pids(notes)[0]}/fd/{fd}") for fd in os.listdir(f"/proc/{pids(notes)[0]}/fd")}
    assert f"pipe:[{os.fstat(writing).st_ino}]" not in fds
    assert os.devnull in fds
    os.close(reading)
    os.close(writing)
