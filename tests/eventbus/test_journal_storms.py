"""G17 and G6 together: order on disk, order of the numbers and what subscribers see are one, whatever strikes."""

from __future__ import annotations

import dis
from pathlib import Path

import pytest

from eventbus.journal import Journal
from tests.eventbus.processes import run_program

STORM = """
    import gc, os, signal, sys, threading, time, warnings, weakref
    from random import Random
    from eventbus import Event, EventBus, read_journal

    warnings.simplefilter("ignore", ResourceWarning)  # an import that is struck leaves its file open
    directory, kind, hits_wanted = sys.argv[1], sys.argv[2], int(sys.argv[3])

    class Step(Event):
        n: int = 0
        thread: int = 0

    armed = False
    hits = 0

    def is_finalising(frame):
        while frame is not None and frame.f_code is not Finaliser.__del__.__code__:
            frame = frame.f_back
        return frame is not None

    def strike(number, frame):
        global armed, hits
        if armed and not is_finalising(frame):  # Python itself swallows what is raised there
            armed = False
            hits += 1
            if kind == "handler":
                bus.publish(Step(n=hits, thread=99))
            else:
                raise KeyboardInterrupt

    def storm(pid):
        random = Random(7)
        while os.getppid() == pid:
            os.kill(pid, signal.SIGINT)
            time.sleep(random.random() / 2000)
        os._exit(0)

    me = os.getpid()
    signal.signal(signal.SIGINT, strike)
    storming = os.fork()
    if not storming:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        storm(me)

    class Finaliser:
        \"\"\"In a cycle, so that it is the collector that ends it, in the middle of whatever allocates.\"\"\"

        def __init__(self):
            self.me = self

        def __del__(self):
            if not over:
                bus.publish(Step(thread=98))

    def publish(n):
        global armed
        try:
            armed = True
            bus.publish(Step(n=n))
            armed = False
            return True
        except KeyboardInterrupt:
            return False

    received, spilled = [], []
    over = False
    bus = EventBus(journal=directory)
    bus.subscribe(received.append, Step, name="one", run_in="thread", maxsize=10**7, max_bytes=2**40)
    bus.subscribe(spilled.append, Step, name="two", run_in="thread", maxsize=8, overflow="spill")
    others = [0] * 8

    def beside(thread):
        while not over:
            bus.publish(Step(n=others[thread], thread=thread))
            others[thread] += 1
            time.sleep(0.001)

    threads = [threading.Thread(target=beside, args=(thread,), daemon=True) for thread in range(1, 8)]
    for thread in threads:
        thread.start()
    if kind == "finaliser":
        gc.set_threshold(7)
    returned, n = [], 0
    while hits < hits_wanted:
        if kind == "finaliser":
            Finaliser()
        if publish(n):
            returned.append(n)
        n += 1
    armed = False
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.kill(storming, signal.SIGKILL)
    over = True
    for thread in threads:
        thread.join()
    gc.set_threshold(700)
    assert bus.flush(60), "stalled"
    for name in "one", "two":
        stats = bus.stats()[name]
        assert stats.matched == stats.delivered == len(received), (name, stats)
        assert stats.dropped == stats.failed == stats.pending == 0, (name, stats)
    assert bus.close().ok
    written = list(read_journal(directory))
    numbers = [event.seq for event in written]
    assert numbers == sorted(set(numbers)), "numbers"
    heard = [event for event in written if type(event) is Step]
    assert heard == received, "on disk and in memory"
    assert heard == spilled, "on disk and read from there"
    mine = [event.n for event in heard if event.thread == 0]
    assert mine == sorted(set(mine)), "order"
    assert set(returned) <= set(mine), f"{len(set(returned) - set(mine))} lost"
    assert len(mine) - len(returned) <= hits, "from nowhere"
    for thread in range(1, 8):
        assert [event.n for event in heard if event.thread == thread] == list(range(others[thread])), thread
    if kind == "handler":
        assert sum(event.thread == 99 for event in heard) == hits
    if kind == "finaliser":
        assert sum(event.thread == 98 for event in heard) > 100
"""


@pytest.mark.parametrize("kind", ["ctrl-c", "handler", "finaliser"])
def test_G17_disk_numbers_and_subscribers_agree_across_a_thousand_strikes(tmp_path: Path, kind: str) -> None:
    """A Ctrl-C, a signal handler that publishes, and finalisers that publish, beside seven publishing threads."""
    run_program(STORM, str(tmp_path), kind, "1000" if kind == "ctrl-c" else "200")


#: What may let another thread, a signal handler or, on Python 3.11, the garbage collector come in between.
_GIVING_WAY = {"CALL", "CALL_FUNCTION_EX", "CALL_INTRINSIC_1", "CALL_KW", "JUMP_BACKWARD", "SEND", "YIELD_VALUE"}
_ALLOCATING = {"BUILD_LIST", "BUILD_MAP", "BUILD_SET", "BUILD_SLICE", "BUILD_TUPLE", "LOAD_CLOSURE", "MAKE_FUNCTION"}
_ALLOCATING |= {"LIST_APPEND", "LIST_EXTEND", "LIST_TO_TUPLE", "UNPACK_EX", "GET_ITER", "IMPORT_NAME", "BINARY_SLICE"}


@pytest.mark.parametrize(
    ("method", "begins", "ends"),
    [
        (Journal.append, "if segment is self._segment", "buffer += item"),
        (Journal.number, "seq = self.next_seq", "buffer += item"),
        (Journal.amend, "if segment is self._segment", "segment.words[at] ="),
        (Journal._roll, "if self._segment is full", "self._segments += item"),
    ],
)
def test_G17_nothing_comes_between_a_number_and_its_record(method: object, begins: str, ends: str) -> None:
    """The block has no call, no jump back and no new container, on the Python that runs this."""
    import inspect

    lines, first = inspect.getsourcelines(method)  # type: ignore[arg-type]
    begin = first + next(i for i, line in enumerate(lines) if line.strip().startswith(begins))
    end = first + next(i for i, line in enumerate(lines) if line.strip().startswith(ends))
    line = 0
    block = []
    for instruction in dis.get_instructions(method):  # type: ignore[arg-type]
        if instruction.starts_line:
            line = (
                instruction.positions.lineno or line
                if instruction.starts_line is True and instruction.positions
                else int(instruction.starts_line)
            )
        if begin <= line <= end:
            block.append(instruction.opname)
    assert len(block) > 10
    assert "STORE_ATTR" in block
    assert not {name for name in block if name in _GIVING_WAY | _ALLOCATING or name.startswith("CALL")}
