"""A segment: one file of the journal, a fixed stretch of disk into which events are copied through a memory mapping.

A copy into a mapping is in the page cache at once and survives the process, whatever kills it. A `write` would too,
but gives up the GIL, and beside a busy thread a publisher gets it back only milliseconds later.

::

    file    b"trainbus", version (u32), its complement (u32), the number of the first event (u64), its complement (u64),
            records, zeros up to the size that was reserved
    record  crc32 of the payload ^ the second word modulo `PRIME` (u32) << 32 | size of the payload in bytes (u32)
            flags (2 bits) << 62 | seq (62 bits)
            payload: the event as msgpack, filled up to a multiple of 8 bytes

The first word of a record is stored last, so a process that is killed leaves it whole or not there. The checksums are
for what a power failure leaves: any part of what was in the page cache. The number of the first event stands in the
head since the first record may be one that amends an event of an earlier segment.
"""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

from eventbus.errors import JournalError

__all__ = [
    "AMENDS", "FIRST", "LOW", "PRIME", "WORD", "Record", "Segment", "files_in", "first_seq", "path_of", "repair",
    "scan", "segments_in",
]  # fmt: skip

#: A flag of a record: the same event once more, with the numbers that were still on a GPU; see also `PARTIAL`.
AMENDS = 1 << 63
LOW = (1 << 32) - 1
WORD = (1 << 64) - 1
#: Modulo this, any two words that differ in a bit differ.
PRIME = (1 << 32) - 5
_SEQ = (1 << 62) - 1
_VERSION = (1).to_bytes(4, "little") + (1 ^ LOW).to_bytes(4, "little")  # so that a damaged one is not taken for another
_MAGIC = b"trainbus" + _VERSION
#: Where the first record begins, in words of 8 bytes: behind the head.
FIRST = 4
_SUFFIX = ".events"
_SOMETHING = re.compile(rb"[^\0]")
_ZEROS = bytes(1 << 16)


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

    def begin(self, seq: int) -> None:
        """From this event on they are written here."""
        self.words[2] = seq
        self.words[3] = seq ^ WORD

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


def files_in(directory: Path) -> list[Path]:
    """The files of all segments, also of those that are prepared, in no order."""
    return [path for path in directory.glob(f"[0-9]*{_SUFFIX}") if path.stem.isdecimal()]


def segments_in(directory: Path) -> list[Path]:
    """The segments of a journal in the order of their events; those that are only prepared are left out."""
    found = [(first, not _is_empty(path), path) for path in files_in(directory) if (first := first_seq(path))]
    return [path for _, _, path in sorted(found)]


def first_seq(path: Path) -> int:
    """From which event on they are in this segment; 0 = nothing is yet."""
    try:
        with path.open("rb") as file:
            head = file.read(FIRST << 3)
    except FileNotFoundError:
        return 0
    first, complement = int.from_bytes(head[16:24], "little"), int.from_bytes(head[24:32], "little")
    if head.startswith(_MAGIC) and (first == complement ^ WORD or not (first or complement)):
        return first
    return next((record.seq for record in scan(path) if not record.flags & AMENDS), 0)


def _is_empty(path: Path) -> bool:
    """Whether it begins without a record: one that was passed over has the same first event as the next one."""
    try:
        with path.open("rb") as file:
            file.seek(FIRST << 3)
            return not file.read(8).strip(b"\0")
    except FileNotFoundError:
        return True


def repair(path: Path) -> tuple[int, int]:
    """Cut off what follows the last whole record; returns the number of that event and how many bytes were torn.

    A segment without an event is removed. The zeros that were reserved for further events are not torn.
    """
    end, last = FIRST, first_seq(path) - 1
    events = 0
    for record in scan(path):
        end, last, events = record.end, max(last, record.seq), events + 1
    data = path.read_bytes()
    torn = len(data[end << 3 :].rstrip(b"\0")) if _skip_zeros(data, end << 3) < len(data) else 0
    if not data.startswith(_MAGIC[:8]) and _skip_zeros(data, 0) < len(data):  # of another kind, or its head is torn
        return last, 0
    if events:
        if len(data) > end << 3:
            os.truncate(path, end << 3)
    else:
        path.unlink()
    return last, torn


def scan(path: Path, start: int = FIRST) -> Iterator[Record]:
    """Every whole record from this word on; what is torn is skipped.

    It reads the file and does not map it: a mapping would end the process where a writer cuts the file meanwhile.
    """
    try:
        with path.open("rb") as file:
            head = file.read(len(_MAGIC))
            file.seek(start << 3)
            data = file.read()
    except FileNotFoundError:  # removed meanwhile: everybody is past it
        return
    version, complement = int.from_bytes(head[8:12], "little"), int.from_bytes(head[12:16], "little")
    if head[:8] == _MAGIC[:8] and version == complement ^ LOW and head[8:] != _VERSION:
        raise JournalError(path, "was written by another version of trainbus", "Read it with that version.")
    yield from _records(data, start)


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
        else:  # nothing was written here: look where there is something
            at = _skip_zeros(data, at << 3) >> 3


def _skip_zeros(data: bytes, start: int) -> int:
    """Where the first byte that is not 0 is; most of a segment is zeros, and comparing blocks of them is fast."""
    while data[start : start + len(_ZEROS)] == _ZEROS:
        start += len(_ZEROS)
    something = _SOMETHING.search(data, start)
    return something.start() if something is not None else len(data)


def _record(data: bytes, words: memoryview, at: int, offset: int) -> Record | None:
    head, tag = words[at], words[at + 1]
    size, seq = head & LOW, tag & _SEQ
    end = at + ((size + 23) >> 3)
    if not size or end > len(words):
        return None
    start = (at + 2) << 3
    payload = data[start : start + size]
    if crc32(payload) ^ tag % PRIME != head >> 32:
        return None
    return Record(seq, tag & ~_SEQ, payload, offset + end)


def _reserve(handle: int, size_bytes: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(handle, 0, size_bytes)
    else:  # macOS, Windows: written, since a file that was only made longer has nothing reserved
        os.write(handle, bytes(size_bytes))
