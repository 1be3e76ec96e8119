"""What the children of process subscribers run in the tests: they import it, and write down what they see."""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING, Any

from eventbus import Event, current_event

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = [
    "Chatter", "Job", "Lines", "Notebook", "Worker", "await_it", "count_chatter", "do", "do_slowly", "hang_awaiting",
    "note", "pids", "say_step", "seen",
]  # fmt: skip


class Job(Event):
    """Something for a child to do, and the file where it says so."""

    n: int = 0
    path: str = ""
    what: str = ""
    value: Any = None


class Chatter(Event, shed=True):
    """One that may be dropped."""

    n: int = 0


def note(path: str, *words: object) -> None:
    """Append a line, in one piece."""
    with open(path, "ab", buffering=0) as file:
        file.write((" ".join(map(str, words)) + "\n").encode())


def say_step(event: Any) -> None:
    """Say it on the standard output that the child has from its parent."""
    os.write(1, f"got {event.step}\n".encode())


def do(event: Job) -> None:
    """Say which event it is, and do what it asks for."""
    if isinstance(event, Chatter):
        return
    note(event.path, event.n, os.getpid())
    what, _, how = event.what.partition(" ")
    if what == "raise":
        raise LookupError(how)
    if what == "exit":
        raise SystemExit(3)
    if what == "end":
        os._exit(int(how))
    if what == "sleep":
        time.sleep(float(how))
    while what == "wait" and not os.path.exists(how):
        time.sleep(0.005)
    if what == "once" and not os.path.exists(how):
        note(how, "tried")
        raise LookupError("the first time")
    if what == "die once" and not os.path.exists(how):
        note(how, "tried")
        os._exit(1)
    if what == "look":
        note(event.path, type(event).__qualname__, repr(event.value), current_event() is event, "torch" in sys.modules)


def do_slowly(event: Job) -> None:
    """Do it, and take a while."""
    do(event)
    time.sleep(0.02)


async def await_it(event: Job) -> None:
    """Do it on a loop."""
    import asyncio

    await asyncio.sleep(0)
    do(event)


async def hang_awaiting(event: Job) -> None:
    """Do it, unless it asks for a long pause, and refuse to be cancelled."""
    import asyncio

    while event.what == "hang":
        try:
            await asyncio.sleep(10)
        except asyncio.CancelledError:
            pass
    do(event)


def count_chatter(event: Chatter) -> None:
    """Take next to no time."""


class Lines:
    """A sink that writes down its calls."""

    hooks = ("on_job",)
    options = {"maxsize": 100_000, "timeout": 5.0}
    max_batch = 1000
    flush_interval = 0.05

    def __init__(self, path: Path | str, fault: str = "") -> None:
        self.path = str(path)
        self.fault = fault

    def bind(self, *, run: str, rank: int) -> None:
        note(self.path, "bind", run, rank)

    async def open(self) -> None:
        note(self.path, "open", os.getpid())

    async def write(self, events: Sequence[Job]) -> None:
        from eventbus import SinkGone, SinkUnavailable

        note(self.path, "write", *(event.n for event in events))
        what = next((event.what for event in events if event.what), "")
        if what == "raise":
            raise LookupError("the disk")
        if what == "gone":
            raise SinkGone("the receiver")
        if what == "away" and not os.path.exists(self.fault):
            note(self.fault, "tried")
            raise SinkUnavailable("the receiver is away")
        if what == "block":
            time.sleep(60)
        if what == "await":
            import asyncio

            await asyncio.sleep(60)

    async def aclose(self) -> None:
        note(self.path, "close")


class Notebook:
    """An object with hook methods."""

    def __init__(self, path: Path | str) -> None:
        self.path = str(path)

    def on_log(self, event: Any) -> None:
        note(self.path, "log", event.step)


class Worker:
    """A callable with a state."""

    def __init__(self, path: Path | str) -> None:
        self.path = str(path)

    def __call__(self, event: Event) -> None:
        note(self.path, type(event).__name__)


def seen(path: Path) -> list[int]:
    """The numbers of the events that were noted, in order."""
    return [int(line.split()[0]) for line in path.read_text().splitlines()] if path.exists() else []


def pids(path: Path) -> list[int]:
    """The processes that noted them."""
    return [int(line.split()[1]) for line in path.read_text().splitlines()] if path.exists() else []
