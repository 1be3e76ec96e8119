"""How a process that fails leaves the others of its run: none is kept waiting, and each learns who failed and why.

In a collective of `torch.distributed` the others would wait for the missing one until it exits, or for the timeout of
the group (30 minutes unless told otherwise). So a process that fails

1. logs its error with the traceback, before anything else,
2. leaves a note in the store of the process group, which is no collective and waits for nobody,
3. shuts down its connections to the others, `GRACE_S` later, so that whatever collective they are in raises. Not when
   all have failed by themselves by then, of the same mistake for example: their group can go on being used.

A gloo group cannot be aborted (`ProcessGroup.abort` does nothing there), and lives as long as any model holds it: hence
the sockets. They are known by their two addresses, which two processes of the run both have. Where the system does not
list them (Windows), the others wait until the failed process exits. NCCL's are left alone.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import stat
import threading
import traceback
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import sleep
from typing import TYPE_CHECKING, Any

from torch import distributed

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["Connection", "Departure", "RankFailedError", "connections", "store_of_group"]

#: How long a process that failed stays connected (s): those that fail by themselves do so meanwhile.
GRACE_S = 1.0

#: How much of an error the others are told (characters).
_NOTE_SIZE = 500

#: The two ends of a TCP connection, this process's first.
Connection = tuple[tuple[str, int], tuple[str, int]]

_log = logging.getLogger("trainbus")


class RankFailedError(RuntimeError):
    """Another process of the run failed, which ends this one; the error that came of it here is its cause."""

    def __init__(self, rank: int, error: str) -> None:
        super().__init__(rank, error)
        self.rank = rank
        self.error = error

    def __str__(self) -> str:
        return f"Rank {self.rank} failed: {self.error} (its log has the traceback)"


@dataclass(frozen=True)
class Departure:
    """The way out of one training for one process, agreed on while all of them were there."""

    rank: int
    world_size: int
    #: The same in all processes, and another in every training.
    meeting: str
    #: Those to the other processes.
    connections: frozenset[Connection]
    #: That of the process group, which may be gone before this process has left.
    store: Any

    def leave(self, error: BaseException) -> RankFailedError | None:
        """Leave the others because of `error`; what to raise in its place when it came of another's failure."""
        if not _is_from_collective(error):
            _log.error("Rank %d failed, which ends the other processes too.", self.rank, exc_info=error)
            self._note(error)
            threading.Thread(target=self._leave_alone, name="trainbus-departure", daemon=True).start()
            return None
        self._disconnect()  # for those that wait for this process, and not for the one that failed
        first = self._read_note()
        if first is None:
            error.add_note("Another process of the run is gone without a word, or takes too long: look at its log.")
            return None
        return RankFailedError(*first)

    def _leave_alone(self) -> None:
        sleep(GRACE_S)
        if not self._have_all_failed():
            self._disconnect()

    def _disconnect(self) -> None:
        for connection, open_socket in _sockets():
            if connection in self.connections:
                with suppress(OSError):  # the other end was faster
                    open_socket.shutdown(socket.SHUT_RDWR)

    # ------------------------------------------------------------------------------------------------- the notes

    def _note(self, error: BaseException) -> None:
        told = "; ".join("".join(traceback.format_exception_only(error)).split("\n")).strip("; ")
        note = json.dumps([self.rank, told[:_NOTE_SIZE]])
        with suppress(RuntimeError):  # the store went with the process that served it
            self.store.compare_set(self._key("first"), "", note)
            self.store.add(self._key("count"), 1)

    def _read_note(self) -> tuple[int, str] | None:
        """The rank that failed first, and its error."""
        with suppress(RuntimeError):
            if self.store.check([self._key("first")]):
                rank, error = json.loads(self.store.get(self._key("first")))
                return rank, error
        return None

    def _have_all_failed(self) -> bool:
        with suppress(RuntimeError):
            return bool(self.store.add(self._key("count"), 0) == self.world_size)
        return False

    def _key(self, name: str) -> str:
        return f"trainbus/{self.meeting}/{name}"


def _is_from_collective(error: BaseException) -> bool:
    return isinstance(error, distributed.DistError) or (type(error) is RuntimeError and "gloo" in str(error))


def store_of_group() -> Any:
    """The store at which the processes of the default group met."""
    return distributed.distributed_c10d._get_default_store()


def connections() -> frozenset[Connection]:
    """The TCP connections of this process, but for those to the store of the process group."""
    store = store_of_group()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    port = getattr(store, "port", None)
    return frozenset(ends for ends, _ in _sockets() if port not in (ends[0][1], ends[1][1]))


def _sockets() -> Iterator[tuple[Connection, socket.socket]]:
    """Every connected TCP socket of this process, lent for one step of the iteration."""
    for number in _descriptors():
        with suppress(OSError):  # closed meanwhile, or not connected
            if not stat.S_ISSOCK(os.fstat(number).st_mode):
                continue
            lent = socket.socket(fileno=number)
            try:
                if lent.type == socket.SOCK_STREAM and lent.family in (socket.AF_INET, socket.AF_INET6):
                    yield (lent.getsockname()[:2], lent.getpeername()[:2]), lent
            finally:
                lent.detach()  # it is somebody else's to close


def _descriptors() -> Iterable[int]:
    for directory in (Path("/proc/self/fd"), Path("/dev/fd")):
        if directory.is_dir():
            return [int(name) for name in os.listdir(directory)]
    return ()
