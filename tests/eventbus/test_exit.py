"""G10: a script that never closes its bus still delivers at its end, and its end is not held up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from textwrap import dedent

import pytest

from tests.eventbus.scripts import PREAMBLE, ROOT, run

# ------------------------------------------------------------------------------------------------ all delivered


def test_G10_a_script_that_never_closes_delivers_everything():
    """Ten lines without a `close` are a whole program."""
    done = run("""
        bus = EventBus()

        @bus.on("on_train_batch_end")
        async def notify(event):
            await asyncio.sleep(0.001)
            say(event.step)

        for step in range(50):
            bus.publish(TrainBatchEnd(epoch=0, batch=step, step=step))
    """)
    assert (done.code, done.err) == (0, "")
    assert done.out == [str(step) for step in range(50)]


_EVERY_KIND = """
import aiofiles
from pathlib import Path

bus = EventBus()

@bus.on("on_train_batch_end")
async def in_a_task(event):
    await asyncio.sleep(0.002)
    say("task", event.step)

@bus.on("on_train_batch_end")
async def with_aiofiles(event):
    async with aiofiles.open(sys.argv[1], "a") as file:
        await file.write(f"{event.step}\\n")
    say("aiofiles", event.step)

@bus.on("on_train_batch_end")
async def to_thread(event):
    await asyncio.to_thread(time.sleep, 0.001)
    say("to_thread", event.step)

@bus.on("on_train_batch_end", run_in="thread")
def in_a_thread(event):
    time.sleep(0.001)
    say("thread", event.step)

class Lines:
    hooks = ("on_train_batch_end",)
    options = {}
    async def open(self): ...
    async def write(self, events):
        await asyncio.sleep(0.001)
        for event in events:
            say("sink", event.step)
    async def aclose(self):
        say("closed")

bus.attach(Lines())
"""


@pytest.mark.parametrize(("ending", "code"), [("pass", 0), ("sys.exit(3)", 3), ("raise LookupError('the model')", 1)])
def test_G10_every_kind_of_subscriber_gets_everything_however_the_script_ends(ending, code, tmp_path):
    """Async, aiofiles, to_thread, thread and sink subscribers hear all, at a normal end, sys.exit and a failure."""
    path = tmp_path / "lines"
    done = run(
        _EVERY_KIND + "for n in range(20):\n    bus.publish(TrainBatchEnd(epoch=0, batch=n, step=n))\n" + ending,
        str(path),
    )
    assert done.code == code
    for kind in "task", "aiofiles", "to_thread", "thread", "sink":
        assert [line for line in done.out if line.startswith(f"{kind} ")] == [f"{kind} {step}" for step in range(20)]
    assert path.read_text().split() == [str(step) for step in range(20)]
    assert done.out.count("closed") == 1
    if code == 1:
        assert done.err.count("Traceback") == 1
        assert done.err.splitlines()[-1] == "LookupError: the model"
    else:
        assert done.err == ""


def test_G10_the_lines_of_a_file_sink_are_all_there(tmp_path):
    """`JSONLSink` in a script without `close`: every event is a line, the last one included."""
    path = tmp_path / "{run}" / "events.jsonl"
    done = run(
        """
        from sinks.jsonl import JSONLSink
        bus = EventBus(run="r")
        bus.attach(JSONLSink(sys.argv[1]))
        for step in range(5000):
            bus.publish(TrainBatchEnd(epoch=0, batch=step, step=step, metrics={"loss": 0.5}))
        bus.publish(TrainEnd(epoch=0, step=5000))
        """,
        str(path),
    )
    assert (done.code, done.err) == (0, "")
    lines = (tmp_path / "r" / "events.jsonl").read_text().splitlines()
    assert len(lines) == 5001
    assert '"on_train_end"' in lines[-1]


def test_G10_a_bus_that_only_a_function_knew_delivers_too():
    """No subscriber depends on somebody holding the bus."""
    done = run("""
        import gc

        def train():
            bus = EventBus()

            @bus.on("on_log")
            async def notify(event):
                await asyncio.sleep(0.05)
                say(event.step)

            bus.publish(Log(step=1))
            bus.publish(Log(step=2))

        train()
        gc.collect()
    """)
    assert (done.code, done.out, done.err) == (0, ["1", "2"], "")


def test_G10_events_published_inside_asyncio_run_are_delivered_at_exit():
    """A bus that started by itself has a loop of its own, so that of the script may be gone."""
    done = run("""
        bus = EventBus()

        @bus.on("on_log")
        async def notify(event):
            await asyncio.sleep(0.05)
            say(event.step)

        async def main():
            bus.publish(Log(step=1))

        asyncio.run(main())
    """)
    assert (done.code, done.out, done.err) == (0, ["1"], "")


def test_G10_flush_before_an_exit_without_hooks_loses_nothing():
    """`os._exit` runs no exit hook; `flush` before it is enough."""
    done = run("""
        bus = EventBus()

        @bus.on("on_log")
        async def notify(event):
            await asyncio.sleep(0.01)
            say(event.step)

        for step in range(5):
            bus.publish(Log(step=step))
        bus.flush()
        os._exit(0)
    """)
    assert (done.code, done.out, done.err) == (0, ["0", "1", "2", "3", "4"], "")


def test_G10_a_clean_end_leaves_nothing_open():
    """In Python's development mode, with warnings as errors, the end of a script is silent."""
    done = run(
        """
        bus = EventBus()

        @bus.on("on_log")
        async def notify(event):
            await asyncio.to_thread(time.sleep, 0)
            say(event.step)

        with bus:
            bus.publish(Log(step=1))
        bus.publish(Log(step=2))
        """,
        options=("-X", "dev", "-W", "error"),
    )
    assert (done.code, done.out) == (0, ["1"])
    assert done.err == "on_log was published after the bus was closed, and is dropped.\n"


# --------------------------------------------------------------------------------------------- late publishers


@pytest.mark.parametrize("started", ["before", "not before"])
def test_G10_events_of_a_thread_that_outlives_the_main_one_are_delivered(started):
    """What a non-daemon thread publishes after the main thread has ended is heard, also when it is the first event."""
    done = run(
        """
        bus = EventBus()

        @bus.on("on_log")
        async def notify(event):
            await asyncio.sleep(0.01)
            say(event.step)

        def late():
            while threading.main_thread().is_alive():
                time.sleep(0.01)
            time.sleep(0.1)
            for step in range(1, 4):
                bus.publish(Log(step=step))

        if sys.argv[1] == "before":
            bus.publish(Log(step=0))
        threading.Thread(target=late).start()
        """,
        started,
    )
    assert (done.code, done.err) == (0, "")
    assert done.out == (["0"] if started == "before" else []) + ["1", "2", "3"]


@pytest.mark.parametrize("started", ["before", "not before"])
def test_G10_events_of_another_exit_hook_are_delivered(started):
    """An exit hook that was registered after the import runs before the bus's own, and may publish."""
    done = run(
        """
        bus = EventBus()

        @bus.on("on_log")
        async def notify(event):
            await asyncio.sleep(0.01)
            say("task", event.step)

        @bus.on("on_log")
        async def elsewhere(event):
            await asyncio.to_thread(say, "to_thread", event.step)

        @bus.on("on_log", run_in="thread")
        def in_a_thread(event):
            say("thread", event.step)

        if sys.argv[1] == "before":
            bus.publish(Log(step=0))
        atexit.register(bus.publish, Log(step=1))
        """,
        started,
    )
    steps = ["0", "1"] if started == "before" else ["1"]
    assert (done.code, done.err) == (0, "")
    for kind in "task", "to_thread", "thread":
        assert [line for line in done.out if line.startswith(f"{kind} ")] == [f"{kind} {step}" for step in steps]


def test_G10_daemon_threads_that_publish_for_ever_do_not_disturb_the_end():
    """Threads that go on publishing while the interpreter ends neither crash nor keep it."""
    done = run("""
        bus = EventBus(exit_timeout=2.0)

        @bus.on("on_log")
        async def notify(event): ...

        def flood():
            while True:
                bus.publish(Log(step=0))
                time.sleep(0)

        for _ in range(3):
            threading.Thread(target=flood, daemon=True).start()
        time.sleep(0.1)
        ends()
    """)
    assert done.code == 0
    assert "Traceback" not in done.err
    assert "Fatal" not in done.err
    assert done.took_to_end_s < 3.0


# -------------------------------------------------------------------------------------------------- in time


_STUCK = {
    "a sink that never returns": """
        class Stuck:
            hooks = ()
            options = {}
            async def open(self): ...
            async def write(self, events):
                while True:
                    try:
                        await asyncio.sleep(60)
                    except asyncio.CancelledError:
                        pass
            async def aclose(self): ...
        bus.attach(Stuck(), name="stuck")
    """,
    "a handler that blocks the loop": """
        @bus.on("on_log", name="stuck")
        async def stuck(event):
            time.sleep(60)
    """,
    "a thread that hangs": """
        @bus.on("on_log", run_in="thread", name="stuck")
        def stuck(event):
            time.sleep(60)
    """,
    "a thread of its executor that hangs": """
        @bus.on("on_log", name="stuck")
        async def stuck(event):
            await asyncio.to_thread(time.sleep, 60)
    """,
}


@pytest.mark.parametrize("what", _STUCK)
def test_G10_nothing_that_is_stuck_keeps_the_process(what):
    """The process ends within `exit_timeout` and a second more, names what was not delivered, and does not crash."""
    done = run("bus = EventBus(exit_timeout=0.5)" + dedent(_STUCK[what]) + "bus.publish(Log(step=1))\nends()\n")
    assert done.code == 0
    assert done.took_to_end_s < 0.5 + 1.0
    assert "Traceback" not in done.err
    assert "Fatal" not in done.err
    assert "At exit these events were not delivered: {'stuck': 1}" in done.err


def test_G10_the_end_waits_no_longer_when_nothing_gets_on():
    """A backlog that shrinks is waited for; one that does not is given up before the whole `exit_timeout`."""
    done = run("""
        bus = EventBus(exit_timeout=3.0)

        @bus.on("on_log", timeout=60.0)
        async def stuck(event):
            await asyncio.sleep(60)

        bus.publish(Log(step=1))
        ends()
    """)
    assert done.code == 0
    assert done.took_to_end_s < 2.8


def test_G10_many_stuck_buses_end_together():
    """Their times for exit run side by side, so that those that need a moment get it."""
    done = run("""
        async def stuck(event):
            await asyncio.sleep(60)

        async def slow(event):
            await asyncio.sleep(0.2)
            say("delivered")

        buses = [EventBus(exit_timeout=1.0) for _ in range(8)]
        for number, bus in enumerate(buses):
            bus.subscribe(slow if number % 2 else stuck, "on_log")
            bus.publish(Log(step=1))
        ends()
    """)
    assert (done.code, done.out) == (0, ["delivered"] * 4)
    assert done.took_to_end_s < 1.0 + 1.0


# ------------------------------------------------------------------------------------------------------ signals


def test_G10_a_running_bus_leaves_the_signals_of_the_process_alone():
    """No handler and no wake-up descriptor is installed: Ctrl-C and SIGTERM mean what they meant before."""
    done = run("""
        bus = EventBus()

        @bus.on("on_log")
        async def notify(event): ...

        before = [signal.getsignal(number) for number in signal.valid_signals()]
        with bus:
            bus.publish(Log(step=1))
            bus.flush()
            say([signal.getsignal(number) for number in signal.valid_signals()] == before)
            say(signal.set_wakeup_fd(-1))
    """)
    assert (done.code, done.out, done.err) == (0, ["True", "-1"], "")


def test_G10_sigterm_ends_the_process_as_it_always_did():
    """Without a handler of the script's own, SIGTERM kills at once, also with a backlog."""
    source = """
        bus = EventBus()

        @bus.on("on_log", timeout=60.0)
        async def slow(event):
            await asyncio.sleep(60)

        bus.publish(Log(step=1))
        say("ready")
        time.sleep(60)
    """
    process = subprocess.Popen([sys.executable, "-c", PREAMBLE + dedent(source)], cwd=ROOT, stdout=subprocess.PIPE)
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(1.0 + 1.0) == -signal.SIGTERM


def test_G10_a_script_that_turns_sigterm_into_an_exit_delivers_what_is_left():
    """`signal.signal(SIGTERM, lambda *_: sys.exit(…))` is all that a graceful end takes."""
    done = run("""
        bus = EventBus()

        @bus.on("on_log")
        async def notify(event):
            await asyncio.sleep(0.05)
            say(event.step)

        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        bus.publish(Log(step=1))
        os.kill(os.getpid(), signal.SIGTERM)
    """)
    assert (done.code, done.out, done.err) == (143, ["1"], "")
