"""The end of the process, and its copies: one exit hook for all running buses, and a count of forks."""

from __future__ import annotations

import atexit
import os
from time import perf_counter
from typing import TYPE_CHECKING
from weakref import WeakSet

if TYPE_CHECKING:
    from eventbus.service import Service

__all__ = ["fork_count", "is_importing", "running"]

#: Held weakly, so that no bus lives longer for being known here.
running: WeakSet[Service] = WeakSet()
_forks = 0
_IMPORTING = -1


def fork_count() -> int:
    """How many forks lie between this process and the one that imported the bus."""
    return _forks


def is_importing() -> bool:
    """Whether this is the child of a process subscriber and imports it, with what is around it."""
    return _forks == _IMPORTING


def begin_importing() -> None:
    """In the child of a process subscriber: what is imported now is there already in the process it belongs to."""
    global _forks
    _forks = _IMPORTING


def end_importing() -> None:
    """Make the buses that were made by the import inert, as those from before a fork are."""
    _forked()


def _forked() -> None:
    """In the child: every bus from before is inert, since its threads are not here. Takes no lock."""
    global _forks, running
    _forks += 1
    inherited, running = list(running), WeakSet()
    for bus in inherited:
        bus._forked()


def _at_exit() -> None:
    """Deliver what is left. Non-daemon threads have ended by now; the bus's own threads are daemons and still run."""
    buses = list(running)
    started = perf_counter()
    for bus in buses:
        bus._exit_begin()
    for bus in buses:
        bus._exit_end(started)


atexit.register(_at_exit)
if hasattr(os, "register_at_fork"):  # not on Windows, which does not fork
    os.register_at_fork(after_in_child=_forked)
