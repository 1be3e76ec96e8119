"""G10: every way to end a script without `close`, times every kind of subscriber; and many such ends under load."""

from __future__ import annotations

import random
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from textwrap import dedent, indent

import pytest

from tests.eventbus.scripts import Finished, run

#: Where the tests run in the background of a shell, SIGINT is ignored from the start.
OBEY = "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
#: How a script ends, and with which exit code.
ENDINGS = {
    "normal end": ("pass", 0),
    "sys.exit": ("sys.exit(3)", 3),
    "exception": ("raise LookupError('the model')", 1),
    "Ctrl-C from itself": (OBEY + "os.kill(os.getpid(), signal.SIGINT)\ntime.sleep(5)", -signal.SIGINT),
    "Ctrl-C from outside": (
        OBEY
        + dedent("""
        import subprocess
        killer = subprocess.Popen(["sh", "-c", f"sleep 0.05; kill -INT {os.getpid()}"])
        try:
            while True:
                time.sleep(0.001)
        finally:
            killer.wait()
        """),
        -signal.SIGINT,
    ),
}

#: What subscribes; each says "got <step>" for every event. The test asks `LOSES` which of them may leave some.
SUBSCRIBERS = {
    "async": """
        @bus.on("on_log", name="it")
        async def it(event):
            await asyncio.sleep(0.001)
            say("got", event.step)
    """,
    "aiofiles": """
        import aiofiles
        @bus.on("on_log", name="it")
        async def it(event):
            async with aiofiles.open(os.devnull, "w") as file:
                await file.write("x")
            say("got", event.step)
    """,
    "to_thread": """
        @bus.on("on_log", name="it")
        async def it(event):
            await asyncio.to_thread(time.sleep, 0.001)
            say("got", event.step)
    """,
    "thread": """
        @bus.on("on_log", run_in="thread", name="it")
        def it(event):
            time.sleep(0.001)
            say("got", event.step)
    """,
    "process": """
        from tests.eventbus.served import say_step
        bus.subscribe(say_step, "on_log", run_in="process", name="it")
    """,
    "JSONL": """
        from sinks.jsonl import JSONLSink
        bus.attach(JSONLSink("/dev/stdout", hooks=["on_log"]), name="it")
    """,
    "stuck": """
        class Stuck:
            hooks = ("on_log",)
            options = {"timeout": 60.0}
            max_batch = 1
            async def open(self): ...
            async def write(self, events):
                if events[0].step == 5:
                    while True:
                        try:
                            await asyncio.sleep(60)
                        except asyncio.CancelledError:
                            pass
                say("got", events[0].step)
            async def aclose(self): ...
        bus.attach(Stuck(), name="it")
    """,
}
LOSES = {"stuck"}
#: Starting the killer, ending the interpreter, and the other processes that have the machine too, in seconds.
SLACK_S = 2.0
EVENTS = 20
ENDS = re.compile(r"Subscriber 'it' ends: \d+ of its events were dropped \(\d+ closed\), \d+ so far\.")
LEFT = re.compile(r"At exit these events were not delivered: \{'it': (\d+)\}")


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("kind", SUBSCRIBERS)
def test_G10_whatever_listens_and_however_the_script_ends(kind: str, ending: str) -> None:
    """All is delivered, or what is not is counted and named within `exit_timeout`; the exit code is the script's."""
    end, code = ENDINGS[ending]
    done = run(
        f"bus = EventBus(exit_timeout={0.5 if kind in LOSES else 10.0})\n"
        + dedent(SUBSCRIBERS[kind])
        + f"for n in range({EVENTS}):\n    bus.publish(Log(step=n))\n"
        + "ends()\n"
        + dedent(end)
    )
    got = [int(step) for line in done.out for step in re.findall(r'got (\d+)|"step":(\d+)', line)[0] if step]
    left = sum(int(count) for count in LEFT.findall(done.err))
    assert done.code == code
    assert got == list(range(EVENTS - left))
    assert left == (EVENTS - 5 if kind in LOSES else 0)
    assert_quiet(done, LEFT.sub("", ENDS.sub("", done.err)))
    if kind in LOSES:
        assert done.took_to_end_s < 0.5 + 1.0 + SLACK_S


def assert_quiet(done: Finished, err: str) -> None:
    """Nothing is on stderr but the traceback of the script's own end."""
    tracebacks = {0: 0, 3: 0}.get(done.code, 1)
    assert err.count("Traceback") == tracebacks, err
    assert not re.search("Exception ignored|Fatal|Segmentation", err), err
    if not tracebacks:
        assert not err.strip(), err
    elif done.code == 1:
        assert err.strip().endswith("LookupError: the model"), err
    else:
        assert err.strip().endswith("KeyboardInterrupt"), err


# ---------------------------------------------------------------------------------------------------- odd moments


def test_G10_an_exit_while_another_thread_closes() -> None:
    """The main thread ends in the middle of a `close` elsewhere: both wait for the same end, and nothing is lost."""
    done = run(
        """
        bus = EventBus()

        @bus.on("on_log")
        async def it(event):
            await asyncio.sleep(0.02)
            say("got", event.step)

        for n in range(20):
            bus.publish(Log(step=n))
        threading.Thread(target=lambda: say("closed", bus.close().ok), daemon=sys.argv[1] == "daemon").start()
        time.sleep(0.05)
        """,
        "daemon",
    )
    assert (done.code, done.err) == (0, "")
    assert [line for line in done.out if "got" in line] == [f"got {n}" for n in range(20)]


@pytest.mark.parametrize("where", ["with bus:", "no block"])
def test_G10_sys_exit_in_a_hook_ends_the_script(where: str) -> None:
    """`SystemExit` of an inline hook goes through, and what was published before is delivered, its event included."""
    body = """
    bus.publish(Log(step=0))
    bus.publish(TrainEnd(epoch=0, step=1))
    bus.publish(Log(step=2))
    """
    done = run(
        dedent("""
        bus = EventBus()
        bus.subscribe(lambda event: sys.exit(4), "on_train_end")

        @bus.on()
        async def it(event):
            await asyncio.sleep(0.01)
            say("got", event.step)
        """)
        + ("with bus:\n" + indent(dedent(body), "    ") if where == "with bus:" else dedent(body))
    )
    assert (done.code, done.err) == (4, "")
    assert done.out == ["got 0", "got 1"]


def test_G10_a_first_event_in_the_exit_hook_leaves_the_exit_code_of_ctrl_c_alone() -> None:
    """What is worked out once per event class is worked out there, and CPython still knows how the script ended."""
    done = run("""
        bus = EventBus()

        @bus.on()
        async def it(event):
            say("got", event.hook)
            if event.hook == "on_log":
                await asyncio.sleep(0.1)
                bus.publish(TrainEnd(epoch=0, step=0))

        bus.publish(Log(step=0))
        raise KeyboardInterrupt
    """)
    assert (done.code, done.out) == (-signal.SIGINT, ["got on_log", "got on_train_end"])


def test_G10_ctrl_c_while_the_exit_hook_delivers() -> None:
    """Somebody who cannot wait presses it again: the process ends, at once and without a crash."""
    done = run("""
        import subprocess
        bus = EventBus(exit_timeout=20.0)

        @bus.on("on_log", timeout=60.0)
        async def it(event):
            await asyncio.sleep(60)

        bus.publish(Log(step=0))
        bus.flush(0.05)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        subprocess.Popen(["sh", "-c", f"sleep 0.3; kill -INT {os.getpid()}"]).returncode = 0  # nobody waits for it
        ends()
    """)
    assert done.took_to_end_s < 5.0
    assert "KeyboardInterrupt" in done.err
    assert "Fatal" not in done.err


# --------------------------------------------------------------------------------------------------- under load

_LOAD = """
import random
from sinks.jsonl import JSONLSink

seed = random.Random(int(sys.argv[1]))
bus = EventBus(exit_timeout=0.6)

@bus.on("on_log")
async def task(event):
    await asyncio.sleep(0)

@bus.on("on_log", every=10)
async def to_thread(event):
    await asyncio.to_thread(time.sleep, 0.0005)

@bus.on("on_log", run_in="thread", every=10)
def thread(event):
    time.sleep(0.0005)

@bus.on("on_log", every=100, timeout=0.05)
async def late(event):
    await asyncio.sleep(seed.choice([0.01, 60]))

@bus.on("on_log")
def inline(event): ...

bus.attach(JSONLSink(os.devnull))

def publish():
    while True:
        bus.publish(Log(step=0, values={"loss": 0.5}))
        time.sleep(0)

for _ in range(3):
    threading.Thread(target=publish, daemon=True).start()
time.sleep(seed.random() * 0.2)
"""


def exit_under_load(seed: int) -> tuple[int, str]:
    """End a busy script in one of the ways; returns what is wrong with it, or nothing."""
    ending = random.Random(seed).choice(list(ENDINGS))
    end, code = ENDINGS[ending]
    done = run(dedent(_LOAD) + "ends()\n" + dedent(end), str(seed))
    wrong = []
    if done.code != code:
        wrong.append(f"exit code {done.code}, not {code}")
    if re.search("Exception ignored|Fatal|Segmentation", done.err):
        wrong.append("noise")
    if done.err.count("Traceback") != {0: 0, 3: 0}.get(code, 1):
        wrong.append("tracebacks")
    if done.took_to_end_s > 0.6 + 1.0 + SLACK_S:
        wrong.append(f"took {done.took_to_end_s:.1f} s")
    return seed, f"seed {seed}, {ending}: {', '.join(wrong)}\n{done.err}" if wrong else ""


@pytest.mark.parametrize("seed", range(8))
def test_G10_exits_under_load_are_clean(seed: int) -> None:
    """Threads publish flat out, every handler is busy: no interpreter error, and the exit code of the script."""
    assert exit_under_load(seed) == (seed, "")


@pytest.mark.long
def test_G10_200_exits_under_load_are_clean() -> None:
    """The same, often."""
    with ThreadPoolExecutor(2) as pool:
        wrong = [what for _, what in pool.map(exit_under_load, range(1000, 1200)) if what]
    assert not wrong, f"{len(wrong)} of 200:\n" + "\n".join(wrong)
