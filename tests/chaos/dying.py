"""One process that publishes to a journal until it ends in the way it was told; `lives` starts it and judges it.

``python -m tests.chaos.dying DIRECTORY LIFE PLAN``; what returned and what was received is in files that outlive it.
"""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from eventbus import Event, EventBus
from tests.chaos.scenario import Step

__all__ = ["Tally"]

_WORDS = 16
#: The word that says that the main thread publishes no more.
_OVER = 15


class Tally:
    """How many publishes of each thread have returned, in a file that outlives the process."""

    def __init__(self, path: Path) -> None:
        with path.open("a+b") as file:
            file.truncate(_WORDS * 8)
            self.words = memoryview(mmap.mmap(file.fileno(), _WORDS * 8)).cast("Q")

    @property
    def is_over(self) -> bool:
        """Whether the main thread publishes no more: it may end at any moment."""
        return bool(self.words[_OVER])

    def end(self) -> None:
        self.words[_OVER] = 1

    def count(self) -> int:
        return sum(self.words[:_OVER])


class Notes:
    """What a subscriber got, a line for each event, written at once."""

    def __init__(self, directory: Path, name: str, life: int) -> None:
        self._file = os.open(directory / f"got-{name}", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._life = life

    def note(self, event: Any) -> None:
        os.write(self._file, f"{self._life} {event.seq} {event.who} {event.n}\n".encode())


class NotingSink:
    """A sink that notes each batch, and is slow with some of them."""

    hooks = ("chaos_step",)
    options: dict[str, Any] = {}
    max_batch = 20

    def __init__(self, notes: Notes) -> None:
        self._notes = notes

    async def open(self) -> None: ...

    async def write(self, events: Any) -> None:
        for event in events:
            self._notes.note(event)
        await asyncio.sleep(0.001)

    async def aclose(self) -> None: ...


def subscribe(bus: EventBus, directory: Path, life: int, durable: dict[str, str]) -> None:
    """Subscribe one that is served at exit only, and the durable ones: kind by name."""
    for name, kind in {"plain": "async", **durable}.items():
        notes = Notes(directory, name, life)
        options: dict[str, Any] = {"durable": True} if name != "plain" else {"maxsize": 1_000_000}
        if kind == "sink":
            bus.attach(NotingSink(notes), name=name, maxsize=50, **options)
        elif kind == "thread":
            bus.subscribe(_thread_handler(notes), Step, name=name, run_in="thread", **{"maxsize": 50, **options})
        else:
            bus.subscribe(_async_handler(notes), Step, name=name, **{"maxsize": 50, **options})


def _async_handler(notes: Notes) -> Any:
    async def handle(event: Event) -> None:
        notes.note(event)
        if event.seq % 50 == 0:
            await asyncio.sleep(0.001)
        if event.seq % 70 == 0:
            raise ValueError

    return handle


def _thread_handler(notes: Notes) -> Any:
    def handle(event: Event) -> None:
        notes.note(event)
        if event.seq % 50 == 0:
            time.sleep(0.001)

    return handle


class Publishing:
    """Publishes from the main thread and from others."""

    def __init__(self, bus: EventBus, tally: Tally, plan: dict[str, Any]) -> None:
        self._bus = bus
        self._tally = tally
        self._plan = plan
        self._armed = False

    def start(self) -> list[threading.Thread]:
        threads = [
            threading.Thread(target=self.publish, args=(who,), daemon=True) for who in range(1, self._plan["threads"])
        ]
        for thread in threads:
            thread.start()
        return threads

    def publish(self, who: int) -> None:
        """Publish, and note what returned; a Ctrl-C strikes nowhere else."""
        for n in range(self._plan["count"]):
            if self._publish_one(who, n):
                self._tally.words[who] = n + 1
            if n % 100 == 99:
                time.sleep(self._plan["pause_s"])

    def _publish_one(self, who: int, n: int) -> bool:
        event = Step(who=self._plan["life"] * 100 + who, n=n)
        try:
            self._armed = who == 0
            self._bus.publish(event)
            self._armed = False
        except KeyboardInterrupt:
            return False
        return True

    def strike(self, number: int, frame: object) -> None:
        if self._armed:
            self._armed = False
            raise KeyboardInterrupt


def main() -> None:
    """Live."""
    directory, life, plan = Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
    bus = EventBus(run="lives", journal=directory / "journal")
    subscribe(bus, directory, life, plan["durable"])
    tally = Tally(directory / f"returned-{life}")
    publishing = Publishing(bus, tally, plan)
    signal.signal(signal.SIGINT, publishing.strike)
    os.write(1, b"ready\n")
    threads = publishing.start()
    publishing.publish(0)
    tally.end()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for thread in threads:
        thread.join()
    ending = plan["ending"]
    if ending == "close":
        assert bus.close(60.0).ok
    elif ending == "raise":
        raise LookupError("the model")
    elif ending == "os_exit":
        os._exit(0)
    elif ending == "kill":
        time.sleep(60.0)  # whoever was to kill it is late


if __name__ == "__main__":
    main()
