"""The journal: every event of a bus on disk before `publish` returns, for whoever comes back after a kill.

A directory with segments of events, a bookmark for each durable subscriber, and a lock of the process that writes.
It is the one log on disk: spilled and durable subscribers, `replay` and `tail` are places in it.

`append` numbers an event, copies it into the current segment and hands it on to the log in one block of statements
without a call: the GIL lets nothing come in between, so the order on disk, the order of the numbers and the order of
the log are one, with several threads publishing and whatever signal strikes. Nothing in that block allocates an
object that the garbage collector tracks either: on Python 3.11 that may run a finaliser.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from typing import Any
from zlib import crc32

from eventbus.bookmark import Bookmark, bookmarks_in
from eventbus.errors import JournalError
from eventbus.notices import logger
from eventbus.segment import (
    AMENDS,
    FIRST,
    LOW,
    PRIME,
    WORD,
    Record,
    Segment,
    files_in,
    first_seq,
    number_of,
    path_of,
    repair,
    segments_in,
)
from eventbus.snapshot import PLACE, Draft

__all__ = ["Journal"]

#: The size of a segment: some 40,000 events of a training loop.
_SEGMENT_BYTES = 8 << 20
#: How much goes nowhere while the disk takes nothing, before it is tried again.
_NOWHERE_BYTES = 1 << 20
#: How long closing waits for files to be made and removed, in seconds.
_KEEPER_S = 0.3


class Journal:
    """The journal of one bus; `open` it before `append`. From any thread."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        #: The number of the next event.
        self.next_seq = 1
        #: What it was when the journal was opened.
        self.opened_at = 1
        #: What could not be written, told by the log.
        self.errors: deque[tuple[str, JournalError]] = deque()
        self._segment = Segment.nowhere(0)
        self._lock: int | None = None
        self._keeper: threading.Thread | None = None
        self._spares: deque[Segment] = deque()
        self._numbers = count(1)
        #: Since which event nothing is written, because the disk takes nothing; 0 = all is.
        self._lost_from = 0
        #: The segments on disk: the number of the first event, and the file.
        self._segments: list[list[Any]] = []
        self._jobs: SimpleQueue[Callable[[], object] | None] = SimpleQueue()

    @property
    def is_open(self) -> bool:
        return self._lock is not None

    @property
    def lost_from(self) -> int:
        """Since which event nothing is written, because the disk takes nothing; 0 = all is written."""
        return self._lost_from

    # ----------------------------------------------------------------------------------------- opening and closing

    def open(self) -> None:
        """Take the directory, mend what a killed process left, and begin a new segment; once until `close`."""
        if self.is_open:
            return
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._lock = _lock(self.directory)
            self._mend()
            fresh = self._create(0)
        except BaseException as error:
            self._unlock()
            if not isinstance(error, OSError):
                raise
            raise JournalError(
                self.directory, f"cannot be written ({error.strerror})", "Give a directory on a local disk."
            ) from error
        self.opened_at = self.next_seq
        fresh.begin(self.next_seq)
        self._segments.append([self.next_seq, fresh.path])
        self._lost_from = 0
        self._segment = fresh
        self._start_keeper()

    def _mend(self) -> None:
        last = 0
        for path in files_in(self.directory):
            seq, torn = repair(path)
            last = max(last, seq)
            if torn:
                logger.warning("Journal %s: %d torn bytes were cut off behind event %d.", path, torn, seq)
        paths = segments_in(self.directory)
        self._segments = [[first_seq(path), path] for path in paths]
        self._numbers = count(max(map(number_of, paths), default=0) + 1)
        self.next_seq = max([self.next_seq, last + 1, *(seq + 1 for seq in bookmarks_in(self.directory).values())])

    def close(self) -> None:
        """Give back what was reserved, and the directory. Later events are numbered and go nowhere."""
        if not self.is_open:
            return
        self._stop_keeper()
        nowhere = Segment.nowhere(0)
        last, self._segment = self._segment, nowhere
        if self._lost_from:
            self._tell("gap", f"lacks the events {self._lost_from} to {self.next_seq - 1}", "The disk took no more.")
        _quietly(last.seal)
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    #: In a forked copy: let go of the directory, which the other process goes on using.
    forked = _unlock

    def __del__(self) -> None:
        self._jobs.put(None)
        self._unlock()

    # ----------------------------------------------------------------------------------------------------- writing

    def append(self, draft: Draft, data: bytes, buffer: deque[Draft], flags: int = 0) -> None:
        """Number the event and write it; then, in the same instant, hand it on in `buffer`.

        `draft` gets its place, and the number as its last item, for which it has room.
        """
        size = len(data)
        need, check = (size + 23) >> 3, crc32(data)
        item = iter((draft,))
        while True:
            segment = self._segment
            at = segment.end
            end = at + need
            if end > segment.limit:
                self._roll(segment, need)
                continue
            start = (at << 3) + 16
            payload = slice(start, start + size)
            # From here on without a call, a loop or a new container.
            if segment is self._segment and segment.end == at:
                seq = self.next_seq
                self.next_seq = seq + 1
                segment.end = end
                segment.view[payload] = data
                tag = flags | seq
                segment.words[at + 1] = tag
                segment.words[at] = (check ^ tag % PRIME) << 32 | size
                draft[-1] = seq
                draft[PLACE] = segment.base and segment.base | at
                buffer += item
                return

    def number(self, draft: Draft, buffer: deque[Draft]) -> None:
        """Number what is no event and is not written, and hand it on in `buffer`."""
        item = iter((draft,))
        seq = self.next_seq
        self.next_seq = seq + 1
        draft[-1] = seq
        buffer += item

    def amend(self, seq: int, data: bytes) -> int:
        """Write an event again, now that its numbers have left the GPU; returns its place, 0 when it has none."""
        size, check, need, tag = len(data), crc32(data), (len(data) + 23) >> 3, AMENDS | seq
        while True:
            segment = self._segment
            at = segment.end
            end = at + need
            if end > segment.limit:
                self._roll(segment, need)
                continue
            payload = slice((at << 3) + 16, (at << 3) + 16 + size)
            if segment is self._segment and segment.end == at:
                segment.end = end
                segment.view[payload] = data
                segment.words[at + 1] = tag
                segment.words[at] = (check ^ tag % PRIME) << 32 | size
                return segment.base and segment.base | at

    def _roll(self, full: Segment, need: int) -> None:
        """Go on in a new segment. Of several threads that come here one puts its own in place, nobody waits."""
        fresh = self._next_segment(need)
        place: list[Any] = [0, fresh.path]
        item = iter((place,) if fresh.path is not None else ())
        # Without a call, a loop or a new container, as in `append`.
        if self._segment is full:
            seq = self.next_seq
            fresh.words[2] = seq
            fresh.words[3] = seq ^ WORD
            place[0] = seq
            self._segment = fresh
            self._segments += item
        else:
            if fresh.path is not None:
                self._spares.append(fresh)
            return
        if full.path is not None:
            self._jobs.put(partial(_quietly, full.seal))
        if fresh.path is not None:
            self._jobs.put(partial(_quietly, partial(self._prepare, self._spares)))

    def _next_segment(self, need: int) -> Segment:
        """A segment with room for so many words: the prepared one, a new one, or one that goes nowhere."""
        nowhere_bytes = max(_NOWHERE_BYTES, (need + FIRST) << 3)
        if not self.is_open:
            return Segment.nowhere(nowhere_bytes)
        try:
            fresh = self._spares.popleft() if self._spares else self._create(need)
            if fresh.limit < FIRST + need:
                self._spares.append(fresh)
                fresh = self._create(need)
        except IndexError:  # another thread took the last spare
            return self._next_segment(need)
        except OSError as error:
            if not self._lost_from:
                self._lost_from = self.next_seq
                self._tell(
                    "full", f"takes no more ({error.strerror}): events from {self.next_seq} on are not in it",
                    "They are again once there is space.",
                )  # fmt: skip
            return Segment.nowhere(nowhere_bytes)
        if self._lost_from:
            lost, self._lost_from = self._lost_from, 0
            self._tell("gap", f"lacks the events {lost} to {self.next_seq - 1}", "It goes on now.")
        return fresh

    def _tell(self, what: str, problem: str, remedy: str) -> None:
        self.errors.append((f"journal {what}", JournalError(self.directory, problem, remedy)))

    def _create(self, need: int) -> Segment:
        size = max(_SEGMENT_BYTES, (need + FIRST) << 3)
        for number in self._numbers:
            with suppress(FileExistsError):
                return Segment.create(path_of(self.directory, number), size)
        raise AssertionError  # there is always another number

    def retry(self) -> None:
        """Try the disk again if it took nothing."""
        if self._lost_from and self.is_open:
            self._roll(self._segment, 0)

    # ----------------------------------------------------------------------------------------------------- reading

    def read(self, place: int, opened: Segment | None) -> tuple[Record, Segment]:
        """The record at a place; with the segment that is open for that, `opened` if it is the right one."""
        if opened is None or opened.base != place & ~LOW:
            opened = Segment.reopen(path_of(self.directory, place >> 32))
        return opened.read(place & LOW), opened

    def complain(self, problem: str) -> None:
        """Have the log tell what went wrong with a file of the journal, and will be tried again."""
        self._tell(problem, problem, "It is tried again.")

    def bookmark(self, name: str, seq: int) -> Bookmark:
        """Where a durable subscriber is; one that is new is at `seq`."""
        return Bookmark.open(self.directory, name, seq)

    def forget(self, name: str) -> None:
        """A durable subscriber does not come back."""
        _quietly(partial(Bookmark.forget, self.directory, name))

    # ----------------------------------------------------------------------------------------------------- keeping

    def release(self, up_to: int) -> None:
        """Remove the segments that every durable subscriber is past, of those whose last event is not after this."""
        if len(self._segments) > 1 and self.is_open:
            self._jobs.put(partial(_quietly, partial(self._remove, up_to)))

    def _remove(self, up_to: int) -> None:
        bookmarks = bookmarks_in(self.directory)
        if not bookmarks:  # nobody is past anything
            return
        done = min(up_to, *bookmarks.values())
        while len(self._segments) > 1 and self._segments[1][0] <= done + 1:
            self._segments[0][1].unlink(missing_ok=True)
            del self._segments[0]

    def _prepare(self, spares: deque[Segment]) -> None:
        """Make the next segment before it is needed: making a file may take as long as the disk likes."""
        if not spares:
            spares.append(self._create(0))

    def _start_keeper(self) -> None:
        self._jobs = SimpleQueue()
        self._jobs.put(partial(_quietly, partial(self._prepare, self._spares)))
        self._keeper = threading.Thread(target=_keep, args=(self._jobs,), name="trainbus-journal", daemon=True)
        try:
            self._keeper.start()
        except RuntimeError:  # the interpreter exits: segments are made when they are needed, and mended by the next
            self._keeper = None

    def _stop_keeper(self) -> None:
        """Have it end, so that nobody writes to the directory when the journal is closed; not on a disk that hangs."""
        self._jobs.put(None)
        if self._keeper is not None:
            self._keeper.join(_KEEPER_S)
        self._spares, spares = deque(), self._spares  # a new one: it may be about to fill the old one
        for spare in spares:
            if spare.path is not None:
                _quietly(spare.path.unlink)


def _keep(jobs: SimpleQueue[Callable[[], object] | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # hold nothing of the journal while idle


def _quietly(work: Callable[[], object]) -> None:
    """Keeping order on a disk that fails: the next process will."""
    try:
        work()
    except (OSError, JournalError) as error:
        logger.debug("journal: %s", error)


def _lock(directory: Path) -> int:
    """Take the lock of a directory for as long as the file is open; whatever ends the process gives it back."""
    handle = os.open(directory / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        import fcntl
    except ImportError:  # Windows: on one's honour
        return handle
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(handle, 20).decode() or "another process"
        os.close(handle)
        raise JournalError(
            directory, f"is in use by process {holder}",
            'Close that bus first, or give each its own directory: journal="journal/{run}-{rank}".',
        ) from None  # fmt: skip
    os.truncate(handle, 0)
    os.write(handle, str(os.getpid()).encode())
    return handle
