"""The child's end of the socket to its parent: a thread that reads, and the main thread that writes."""

from __future__ import annotations

import os
import select
import threading
from collections import deque
from time import sleep
from typing import TYPE_CHECKING, Protocol

from eventbus.wire import Frames, FromChild, ToChild, frame, to_child

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Link"]

#: How long a child without a parent may go on, in seconds.
_ORPHAN_S = 3.0
_LOOK_MS = 1000
_READ = 256 * 1024


class Listener(Protocol):
    """Who serves with what arrives."""

    def hear(self, messages: Sequence[ToChild], /) -> None: ...
    def orphaned(self) -> None: ...


class Link:
    """Speaks with the parent; without one it ends the process."""

    def __init__(self, fd: int, parent: int) -> None:
        self._fd = fd
        self._parent = parent
        self._frames = Frames()
        self._arrived: deque[ToChild] = deque()
        self._out = bytearray()

    def put(self, message: FromChild) -> None:
        """Say it with the next `send`."""
        self._out += frame(message)

    def send(self) -> None:
        """Say now what was put; waits while the parent is stopped."""
        try:
            while self._out:
                del self._out[: os.write(self._fd, self._out)]
        except OSError:  # there is no parent: the thread that reads sees to it
            self._out.clear()

    def first(self) -> ToChild:
        """Wait for the first message; called before `listen`."""
        while not self._arrived:
            self._read()
        return self._arrived.popleft()

    def listen(self, listener: Listener) -> None:
        """Have a thread hear what the parent says, and see when it is gone."""
        threading.Thread(target=self._listen, args=(listener,), name="trainbus link", daemon=True).start()

    def _listen(self, listener: Listener) -> None:
        try:
            while True:
                self._read()
                messages = list(self._arrived)
                self._arrived.clear()
                if messages:
                    listener.hear(messages)
        except EOFError:
            listener.orphaned()
            sleep(_ORPHAN_S)
        finally:
            os._exit(1)

    def _read(self) -> None:
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        while not poll.poll(_LOOK_MS):
            if os.getppid() != self._parent:  # a process that it forked may hold its end of the socket
                raise EOFError
        try:
            data = os.read(self._fd, _READ)
        except OSError:
            data = b""
        if not data:
            raise EOFError
        self._arrived.extend(map(to_child.decode, self._frames.cut(data)))
