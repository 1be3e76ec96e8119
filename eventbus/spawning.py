"""A child process as its parent holds it: started afresh, spoken to over a socket without ever waiting for it."""

from __future__ import annotations

import fcntl
import math
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from time import perf_counter, sleep
from typing import TYPE_CHECKING

from eventbus.wire import EventClass, Frames, FromChild, ToChild, frame, from_child

if TYPE_CHECKING:
    from eventbus.entry import Entry

__all__ = ["Bell", "Child"]

#: The child's end of the socket, there.
FD = 3
_READ = 256 * 1024
#: How much longer than the timeout a child may say nothing at all, in seconds.
_SILENCE_S = 1.0
#: How long a child may take to import what it serves, at least; and to end after its last word.
_IMPORTING_S = 60.0
_ENDING_S = 10.0
_REAP_S = 5.0
#: Held off until the child has handlers for them: who stops the parent, with Ctrl-C or a scheduler's SIGTERM, wants
#: what is left to be delivered.
_HELD_OFF = (signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM))
_CODE = "import sys; sys.path[:] = {path!r}; from eventbus.child import main; main({fd}, {parent})"


class Bell:
    """Wakes a thread that waits in `select`; rung by anybody, at any time.

    It is closed with the last reference to it, so that no late ring goes to a file that got its number.
    """

    def __init__(self) -> None:
        self.fd, self._ringer = os.pipe()
        os.set_blocking(self.fd, False)
        os.set_blocking(self._ringer, False)

    def ring(self) -> None:
        try:
            os.write(self._ringer, b"!")
        except OSError:  # full: it rings
            pass

    def hush(self) -> None:
        try:
            os.read(self.fd, 4096)
        except OSError:
            pass

    def wait(self, seconds: float) -> None:
        poll = select.poll()
        poll.register(self.fd, select.POLLIN)
        poll.poll(1000.0 * seconds)
        self.hush()

    def __del__(self) -> None:
        os.close(self.fd)
        os.close(self._ringer)


class Child:
    """One child process, from its start to its end; used by one thread, but for `kill` and `forget`.

    It is started with `posix_spawn`: unlike fork it takes no copy of this process with its threads and its GPU, and
    unlike `subprocess` and `multiprocessing` it still works while the interpreter of Python 3.12 exits.
    """

    def __init__(self, bell: Bell) -> None:
        self._bell = bell
        self._out = bytearray()
        self._frames = Frames()
        self._status: int | None = None
        self.started_s = self.heard_s = perf_counter()
        #: When the event that is being handled was begun; None while none is.
        self.begun_s: float | None = None
        self.is_ready = False
        #: Its end of the socket is closed, or it has ended.
        self.is_gone = False
        self.has_said_bye = False
        #: How it was told to end.
        self.told_to_end: str | None = None
        #: The classes it was told of.
        self.known: set[type] = set()
        self.hurried_to = 0
        #: The event that took too long, for which it was killed.
        self.overdue: Entry | None = None
        #: Why it cannot import what it is to serve.
        self.broken: BaseException | None = None
        self._fd, theirs = _socket_pair()
        try:
            self.pid = _spawn(theirs)
        except BaseException:
            self.forget()
            raise
        finally:
            os.close(theirs)

    # ------------------------------------------------------------------------------------------------- speaking

    def put(self, message: ToChild) -> None:
        self._out += frame(message)

    def tell_class(self, kind: type) -> None:
        """Tell it where an event class is defined, before the first event of it."""
        if kind not in self.known:
            self.known.add(kind)
            self.put(EventClass(kind.__module__, kind.__qualname__))

    def write(self) -> None:
        """Send as much as goes at once; a stopped child takes none of it."""
        while self._out and not self.is_gone:
            try:
                sent = os.write(self._fd, memoryview(self._out)[:_READ])
            except BlockingIOError:
                return
            except OSError:  # it is gone: what it has said last can still be read
                self._out.clear()
                return
            del self._out[:sent]

    def wait(self, seconds: float) -> bool:
        """Wait until it speaks or the bell rings, or it takes more of what it is sent; whether it has spoken."""
        poll = select.poll()
        poll.register(self._fd, select.POLLIN | (select.POLLOUT if self._out else 0))
        poll.register(self._bell.fd, select.POLLIN)
        ready = dict(poll.poll(max(1000.0 * seconds, 0.0)))
        if self._bell.fd in ready:
            self._bell.hush()
        if not ready and self._has_ended():  # a process that was forked meanwhile may hold its end of the socket
            self.is_gone = True
        return bool(ready.get(self._fd, 0) & ~select.POLLOUT)

    def read(self) -> Iterator[FromChild]:
        """What it has said."""
        while True:
            try:
                data = os.read(self._fd, _READ)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self.is_gone = True
                return
            self.heard_s = perf_counter()
            for message in self._frames.cut(data):
                yield from_child.decode(message)

    def deadline_s(self, timeout_s: float, *, is_owing: bool, minds_itself: bool) -> float:
        """When it has taken too long, by `perf_counter`; one that minds the time of a call has to speak, no more."""
        if not self.is_ready:
            return self.started_s + max(_IMPORTING_S, timeout_s)
        if self.has_said_bye:
            return self.heard_s + _ENDING_S
        if self.begun_s is not None and not minds_itself:
            return self.begun_s + timeout_s
        return self.heard_s + timeout_s + _SILENCE_S if is_owing else math.inf

    # --------------------------------------------------------------------------------------------------- ending

    def kill(self) -> None:
        """End it now, stopped or not. From any thread."""
        if self._status is None:
            try:
                os.kill(self.pid, signal.SIGKILL)
            except OSError:
                pass

    def bury(self) -> None:
        """See to it that it has ended, and leave nothing of it."""
        until = perf_counter() + _REAP_S
        if not self.has_said_bye:
            self.kill()
        while not self._has_ended():
            if perf_counter() > until:
                self.kill()
                if perf_counter() > until + _REAP_S:  # it hangs in the kernel
                    break
            sleep(0.001)
        self.forget()

    def forget(self) -> None:
        """Close this end of the socket. In a forked copy of the parent too, where it must not stay open."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def end(self) -> str:
        """How it ended, in words."""
        if self._status is None:
            return "its process does not end"
        code = os.waitstatus_to_exitcode(self._status) if self._status >= 0 else None
        if code is None:
            return "its process ended"
        if code >= 0:
            return f"its process ended with exit code {code}"
        try:
            return f"its process ended with signal {-code} ({signal.Signals(-code).name})"
        except ValueError:
            return f"its process ended with signal {-code}"

    def _has_ended(self) -> bool:
        if self._status is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # somebody else waits for all children of this process
                pid, status = self.pid, -1
            if pid:
                self._status = status
        return self._status is not None


def _socket_pair() -> tuple[int, int]:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    return ours.detach(), theirs.detach()


def _spawn(fd: int) -> int:
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # what multiprocessing uses too
    code = _CODE.format(path=sys.path, fd=FD, parent=os.getpid())
    away = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, FD + 1)  # a number other than the one it gets there
    try:
        return os.posix_spawn(
            sys.executable, [sys.executable, *flags, "-c", code], os.environ,
            file_actions=[(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0), (os.POSIX_SPAWN_DUP2, away, FD)],
            setsigmask=_HELD_OFF,
        )  # fmt: skip
    finally:
        os.close(away)
