"""G11: start methods, loaders, pools and forks at bad moments: inert in the child, going on in the parent."""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING

import pytest

from tests.eventbus.scripts import run

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform does not fork")
needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")

#: That a process with threads forks is what these tests are about, and Python warns of it since 3.12; torch warns of
#: more workers than cores.
FORKS = ("-W", "error", "-W", "ignore::DeprecationWarning", "-W", "ignore:This DataLoader will create:UserWarning")

_BUS = """
import gc, multiprocessing
bus = EventBus()

async def hear(event):  # importable, so that it travels
    say("heard", multiprocessing.current_process().name, event.step)

def make(state):
    bus.subscribe(hear, "on_log")
    if state != "not started":
        bus.publish(Log(step=0))
    if state == "closed":
        bus.close()
"""


def heard(state: str, *steps: int) -> list[str]:
    """What the parent hears of what it publishes, in whatever state its bus was before."""
    before = [] if state == "not started" else [0]
    return [f"heard MainProcess {step}" for step in [*before, *(() if state == "closed" else steps)]]


STATES = pytest.mark.parametrize("state", ["not started", "running", "closed"])
METHODS = pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])

# ------------------------------------------------------------------------------------------------- start methods

_LOADER = """
import torch

class Numbers(torch.utils.data.Dataset):
    def __init__(self, bus):
        self.bus = bus

    def __len__(self):
        return 16

    def __getitem__(self, index):
        self.bus.publish(Log(step=100 + index))
        gc.collect()
        return float(index)

if __name__ == "__main__":
    method, state = sys.argv[1:]
    make(state)
    loader = torch.utils.data.DataLoader(
        Numbers(bus), batch_size=2, num_workers=4, timeout=60,
        multiprocessing_context=method, persistent_workers=method != "spawn",
    )
    for epoch in range(2 if method != "spawn" else 1):
        assert sum(batch.sum().item() for batch in loader) == 120.0
        bus.publish(Log(step=1 + epoch))
    del loader
    say("done")
"""


@needs_torch
@pytest.mark.parametrize(  # elsewhere each worker imports torch, which takes long
    "method", ["fork", *(pytest.param(method, marks=pytest.mark.long) for method in ("forkserver", "spawn"))]
)
@STATES
def test_G11_a_data_loader_completes_its_epochs(method: str, state: str, tmp_path: Path) -> None:
    """Four workers over a dataset that holds the bus, publishes and collects garbage: no hang, nothing twice."""
    done = run(_BUS + _LOADER, method, state, options=FORKS, path=tmp_path / "script.py", timeout=120.0)
    assert done.code == 0, done.err
    steps = [1] if method == "spawn" else [1, 2]
    assert sorted(done.out) == sorted([*heard(state, *steps), "done"])
    assert set(done.err.splitlines()) <= {"on_log was published after the bus was closed, and is dropped."}


_POOLS = {
    "multiprocessing.Pool": """
        with multiprocessing.get_context(method).Pool(2, initializer=begin, initargs=(bus,)) as pool:
            results = pool.map(work, range(6))
    """,
    "ProcessPoolExecutor": """
        from concurrent.futures import ProcessPoolExecutor
        context = multiprocessing.get_context(method)
        with ProcessPoolExecutor(2, mp_context=context, initializer=begin, initargs=(bus,)) as pool:
            results = list(pool.map(work, range(6)))
    """,
}


@METHODS
@pytest.mark.parametrize("pool", _POOLS)
def test_G11_a_pool_of_processes_works_beside_a_running_bus(pool: str, method: str, tmp_path: Path) -> None:
    """Its workers hold the bus, publish and collect garbage, and end when the pool does."""
    done = run(
        _BUS
        + """
def begin(given):
    global theirs
    theirs = given

def work(n):
    theirs.publish(Log(step=100 + n))
    gc.collect()
    return n * n

if __name__ == "__main__":
    method = sys.argv[1]
    make("running")
"""
        + "    if True:"
        + _POOLS[pool]
        + """
    bus.publish(Log(step=1))
    assert results == [n * n for n in range(6)]
    say("done")
""",
        method,
        options=FORKS,
        path=tmp_path / "script.py",
    )
    assert done.code == 0, done.err
    assert sorted(done.out) == sorted([*heard("running", 1), "done"])
    assert set(done.err.splitlines()) <= {"on_log was published after the bus was closed, and is dropped."}


# ----------------------------------------------------------------------------------------------------- bad moments

_BUSY = """
import gc
bus, counted, stop = EventBus(), [], threading.Event()

@bus.on("on_log", maxsize=10_000_000, max_bytes=1 << 40)
async def hear(event):
    counted.append(event.seq)

@bus.on("on_log", run_in="thread", every=50)
def in_a_thread(event): ...

async def nothing(event): ...

def publish():
    while not stop.is_set():
        bus.publish(Log(step=0))
        time.sleep(0.0001)

def flush():
    while not stop.is_set():
        bus.flush(1.0)

def subscribe():
    while not stop.is_set():
        bus.subscribe(nothing, "on_log", name="passing").close()

def open_and_close():
    while not stop.is_set():
        with EventBus() as other:
            other.subscribe(nothing, "on_log")
            other.publish(Log(step=0))

threads = [threading.Thread(target=target) for target in [publish] * 4 + [flush, subscribe, open_and_close]]
for thread in threads:
    thread.start()
for number in range(int(sys.argv[1])):
    time.sleep(0.002)
    child = os.fork()
    if not child:
        bus.publish(Log(step=99))
        ok = bus.flush(5.0), bus.close(5.0).ok
        bus.stats(), bus.describe(), bus.report(), repr(bus)
        if number % 5 == 0:
            grandchild = os.fork()
            if not grandchild:
                bus.publish(Log(step=98))
                gc.collect()
                sys.exit(0)
            ok += (os.waitpid(grandchild, 0)[1] == 0,)
        del hear, bus, threads
        gc.collect()
        if number % 2:
            sys.exit(0 if all(ok) else 1)
        os._exit(0 if all(ok) else 1)
    deadline = time.monotonic() + 20
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            raise SystemExit(f"child {number} hangs")
        time.sleep(0.001)
    assert ended[1] == 0, (number, ended)
stop.set()
for thread in threads:
    thread.join()
assert bus.close().ok
assert counted == sorted(set(counted))
say("done", len(counted) > 0)
"""


@pytest.mark.parametrize("forks", [12, pytest.param(100, marks=pytest.mark.long)])
def test_G11_forks_while_others_publish_subscribe_flush_and_close(forks: int) -> None:
    """Whatever the others were in the middle of: child and grandchild use the copy and end; so does the parent."""
    done = run(_BUSY, str(forks), options=FORKS, timeout=240.0)
    assert (done.code, done.out) == (0, ["done True"]), done.err
    assert done.err == ""


@pytest.mark.parametrize("end", ["sys.exit(5)", "os._exit(5)"])
def test_G11_a_fork_in_the_middle_of_an_inline_hook(end: str) -> None:
    """The child leaves from inside of the dispatch; the other hooks of that event run in the parent, once."""
    done = run(
        f"""
        bus = EventBus()

        @bus.on("on_log")
        async def queued(event):
            say("queued", event.step)

        @bus.on("on_log", priority=1)
        def forks(event):
            child = os.fork()
            if not child:
                bus.publish(Log(step=99))
                {end}
            say("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

        @bus.on("on_log")
        def after(event):
            say("after", event.step)

        bus.publish(Log(step=1))
        bus.flush()
        """,
        options=FORKS,
    )
    assert done.code == 0
    assert "Traceback" not in done.err  # it may say that the hook took long
    assert sorted(done.out) == ["after 1", "child 5", "queued 1"]


def test_G11_a_child_runs_no_exit_hook_of_its_parents_bus_and_no_finaliser_waits() -> None:
    """It ends while the parent's sink is still busy, far sooner than an exit hook would give up (5 s)."""
    done = run(
        """
        import gc
        bus = EventBus()

        class Slow:
            hooks = ()
            options = {}
            async def open(self): ...
            async def write(self, events):
                while not ended.is_set():
                    await asyncio.sleep(0.01)
            async def aclose(self): say("closed", os.getpid() == parent)

        parent, ended = os.getpid(), threading.Event()
        bus.attach(Slow())
        bus.publish(Log(step=1))
        started = time.monotonic()
        child = os.fork()
        if not child:
            del bus
            gc.collect()
            sys.exit(0)
        say("child", os.waitpid(child, 0)[1], time.monotonic() - started < 4.0)
        ended.set()
        """,
        options=FORKS,
    )
    assert (done.code, done.err) == (0, "")
    assert done.out == ["child 0 True", "closed True"]


def test_G11_a_bus_that_was_not_started_warns_nobody_of_its_threads() -> None:
    """Since Python 3.12 a fork beside threads warns; a bus has none before its first awaited event."""
    done = run("""
        bus = EventBus()

        @bus.on("on_log")
        async def hear(event):
            say("heard", event.step)

        child = os.fork()
        if not child:
            bus.publish(Log(step=0))
            os._exit(0)
        os.waitpid(child, 0)
        bus.publish(Log(step=1))
    """)
    assert (done.code, done.out, done.err) == (0, ["heard 1"], "")
