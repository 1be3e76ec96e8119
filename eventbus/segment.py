"""A segment: one file of the journal, a fixed stretch of disk into which events are copied through a memory mapping.

A copy into a mapping is in the page cache at once and survives the process, whatever kills it. A `write` would too,
but gives up the GIL, and beside a busy thread a publisher gets it back only milliseconds later.

::

    file    b"trainbus", version (u64), records, zeros up to the size that was reserved
    record  crc32 of the payload ^ seq (u32) << 32 | size of the payload in bytes (u32)
            flags (2 bits) << 62 | seq (62 bits)
            payload: the event as msgpack, filled up to a multiple of 8 bytes

The first word of a record is stored last, so a process that is killed leaves it whole or not there. The checksum is
for what a power failure leaves: any part of what was in the page cache.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

from eventbus.errors import JournalError

__all__ = [
    "AMENDS", "FIRST", "LOW",  "Record", "Segment", "first_seq", "path_of", "repair", "scan", "segments_in",
]  # fmt: skip

#: A flag of a record: the same event once more, with the numbers that were still on a GPU; see also `PARTIAL`.
AMENDS = 1 << 63
LOW = (1 << 32) - 1
_SEQ = (1 << 62) - 1
_MAGIC = b"trainbus" + (1).to_bytes(8, "little")
#: Where the first record begins, in words of 8 bytes.
FIRST = len(_MAGIC) >> 3
_SUFFIX = ".events"
#: How much of a segment is read to find its first event, as a rule.
_HEAD_BYTES = 4096


class Record(NamedTuple):
    """One event in a segment; `data` is msgpack in which the event has no `seq` yet."""

    seq: int
    flags: int
    data: bytes
    #: Where the next one begins, in words.
    end: int


class Segment:
    """A segment that is written to, or read at random; positions count words of 8 bytes.

    One without a file takes what the disk cannot: it is written to and forgotten.
    """

    __slots__ = ("base", "end", "limit", "path", "view", "words")

    def __init__(self, view: memoryview, path: Path | None = None) -> None:
        self.view = view
        self.words = view.cast("Q")
        self.path = path
        #: What is added to a word's index to make it a place in the whole journal; 0 = not on disk.
        self.base = number_of(path) << 32 if path is not None else 0
        self.end = FIRST
        self.limit = len(self.words)

    @classmethod
    def create(cls, path: Path, size_bytes: int) -> Segment:
        """Make a file of this size, all of it on disk, so that no later copy into it can meet a full disk."""
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o644)
        try:
            _reserve(handle, size_bytes)
            mapping = mmap.mmap(handle, size_bytes)
        except BaseException:
            path.unlink()
            raise
        finally:
            os.close(handle)
        mapping[: len(_MAGIC)] = _MAGIC
        return cls(memoryview(mapping), path)

    @classmethod
    def nowhere(cls, size_bytes: int) -> Segment:
        """Memory in place of a file."""
        return cls(memoryview(bytearray(size_bytes)))

    @classmethod
    def reopen(cls, path: Path) -> Segment:
        """Map one to read it; raises `OSError` when it is not there."""
        with path.open("rb") as file:
            return cls(memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)), path)

    def read(self, at: int) -> Record:
        """The record that begins at this word."""
        size, tag = self.words[at] & LOW, self.words[at + 1]
        start = (at + 2) << 3
        return Record(tag & _SEQ, tag & ~_SEQ, bytes(self.view[start : start + size]), at + ((size + 23) >> 3))

    def seal(self) -> None:
        """Give back what was reserved and not used; nobody writes here any more."""
        if self.path is not None:
            os.truncate(self.path, self.end << 3)


def path_of(directory: Path, number: int) -> Path:
    """The file of a segment."""
    return directory / f"{number:012}{_SUFFIX}"


def number_of(path: Path) -> int:
    """The number in the name of a segment's file; it says nothing about the order."""
    return int(path.stem)


def segments_in(directory: Path) -> list[Path]:
    """The segments of a journal in the order of their events; those without an event are left out."""
    found = []
    for path in directory.glob(f"[0-9]*{_SUFFIX}"):
        first = first_seq(path)
        if first:
            found.append((first, path))
    return [path for _, path in sorted(found)]


def first_seq(path: Path) -> int:
    """The number of the first event in a segment; 0 = it holds none."""
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
    except FileNotFoundError:
        return 0
    if not head.startswith(_MAGIC):
        return 0
    first = next(_records(head[len(_MAGIC) :], FIRST), None) or next(scan(path), None)
    return first.seq if first is not None else 0


def repair(path: Path) -> tuple[int, int]:
    """Cut off what follows the last whole record; returns the number of that event and how many bytes were torn.

    A segment without an event is removed. The zeros that were reserved for further events are not torn.
    """
    end, last = FIRST, 0
    for record in scan(path):
        end, last = record.end, max(last, record.seq)
    torn = path.read_bytes()[end << 3 :].rstrip(b"\0")
    if last:
        if path.stat().st_size > end << 3:
            os.truncate(path, end << 3)
    else:
        path.unlink()
    return last, len(torn)


def scan(path: Path, start: int = FIRST) -> Iterator[Record]:
    """Every whole record from this word on; what is torn is skipped.

    It reads the file and does not map it: a mapping would end the process where a writer cuts the file meanwhile.
    """
    try:
        with path.open("rb") as file:
            magic = file.read(len(_MAGIC))
            file.seek(start << 3)
            data = file.read()
    except FileNotFoundError:  # removed meanwhile: everybody is past it
        return
    if magic == _MAGIC:
        yield from _records(data, start)
    elif magic.startswith(_MAGIC[:8]):
        raise JournalError(path, "was written by another version of trainbus", "Read it with that version.")


def _records(data: bytes, offset: int) -> Iterator[Record]:
    """The whole records in what follows word number `offset`."""
    words = memoryview(data)[: len(data) & ~7].cast("Q")
    at = 0
    while at + 2 < len(words):
        record = _record(data, words, at, offset)
        if record is not None:
            yield record
            at = record.end - offset
        elif words[at]:
            at += 1
        else:  # nothing was written here: look where there is something, with one C call
            rest = data[at << 3 :]
            something = rest.lstrip(b"\0")
            if not something:
                return
            at += (len(rest) - len(something)) >> 3


def _record(data: bytes, words: memoryview, at: int, offset: int) -> Record | None:
    head, tag = words[at], words[at + 1]
    size, seq = head & LOW, tag & _SEQ
    end = at + ((size + 23) >> 3)
    if not size or end > len(words):
        return None
    start = (at + 2) << 3
    payload = data[start : start + size]
    if (crc32(payload) ^ seq) & LOW != head >> 32:
        return None
    return Record(seq, tag & ~_SEQ, payload, offset + end)


def _reserve(handle: int, size_bytes: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(handle, 0, size_bytes)
    else:  # macOS, Windows: written, since a file that was only made longer has nothing reserved
        os.write(handle, bytes(size_bytes))
