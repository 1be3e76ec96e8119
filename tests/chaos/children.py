"""What a child process of a chaotic run serves; what it saw is in a file, since it may be killed at any moment."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

from eventbus import Event

if TYPE_CHECKING:
    from tests.chaos.subscribers import Book

__all__ = ["ChildHandler", "children", "read_back"]


class ChildHandler:
    """Behaves as it was told, in a process of its own; a new process begins again with its budget."""

    def __init__(self, path: Path, behaviour: str, budget: int, period: int, hang_s: float) -> None:
        self._path = path
        self._behaviour = behaviour
        self._left = budget
        self._period = period
        self._hang_s = min(hang_s, 60.0)
        self._seen = 0

    def __call__(self, event: Event) -> None:
        self._note("began", event)
        try:
            self._seen += 1
            if self._left and self._seen % self._period == 0:
                self._left -= 1
                self._misbehave()
        except BaseException:
            self._note("raised", event)
            raise
        self._note("returned", event)

    def _misbehave(self) -> None:
        if self._behaviour == "raises":
            raise ValueError
        if self._behaviour == "exits":
            raise SystemExit(3)
        if self._behaviour == "dies":
            os._exit(9)
        elif self._behaviour == "stops":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif self._behaviour in ("hangs", "slow"):
            time.sleep(self._hang_s if self._behaviour == "hangs" else 0.002)

    def _note(self, what: str, event: Event) -> None:
        line = f"{what} {event.seq} {getattr(event, 'who', -1)} {getattr(event, 'n', -1)} {event.hook}\n"
        with self._path.open("ab", buffering=0) as file:
            file.write(line.encode())


def read_back(book: Book, path: Path) -> None:
    """Write what the children noted into the book of their subscriber."""
    if not path.exists():
        return
    for line in path.read_text(encoding="utf-8").splitlines():
        what, seq, who, n, hook = line.split()
        if what == "began":
            book.calls.append((int(seq), int(who), int(n), hook))
        else:
            (book.returned if what == "returned" else book.raised).append(int(seq))


def children() -> list[int]:
    """The processes that serve subscribers of this one, where the system tells."""
    found = []
    for path in Path("/proc/self/task").glob("*/children"):
        try:
            found += [int(pid) for pid in path.read_text(encoding="ascii").split()]
        except OSError:  # the thread has ended
            pass
    return [pid for pid in found if b"eventbus.child" in _command(pid)]


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
