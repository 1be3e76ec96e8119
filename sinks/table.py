"""A CSV file that grows: rows at its end, columns when they first appear, rows in place of those of a lost attempt."""

from __future__ import annotations

import csv
import io
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple, TypeAlias

from sinks.cells import identity
from sinks.files import AppendFile
from sinks.mending import set_aside

if TYPE_CHECKING:
    from sinks.threads import IOThread

__all__ = ["Table"]

Row: TypeAlias = Mapping[str, str]


class Table:
    """One CSV file open for appending.

    Rows of earlier sessions (those older than `since`) make way for a new row with the same `identity`: a resumed
    run repeats the epochs after its checkpoint. New columns and replaced rows rewrite the file beside itself and
    rename it into place, so a reader and a crash find the old file or the new one.
    """

    def __init__(self, path: Path, since: float, thread: IOThread) -> None:
        self._path = path
        self._thread = thread
        self._since = since
        self._columns: list[str] = []
        self._known: dict[int, int] = {}  # identity of a row of an earlier session → where it begins
        self._file: AppendFile | None = None

    async def open(self) -> None:
        """Read what is there and open the file; raises OSError."""
        self._columns, self._known = await self._thread.run(_scan, self._path, self._since)
        self._file = await AppendFile.open(self._path, self._thread)

    async def write(self, rows: Sequence[Row]) -> None:
        """Add `rows`, or put them in place of older ones; all of them or (raising OSError) none."""
        if not rows:
            return
        if self._file is None:  # rewritten by the last write
            self._file = await AppendFile.open(self._path, self._thread)
        columns = list(dict.fromkeys([*self._columns, *(name for row in rows for name in row)]))
        added, replacing = self._sort(rows)
        if not self._columns:
            await self._file.append(_header(columns) + _text(columns, rows))
        elif columns == self._columns and not replacing:
            await self._file.append(_text(columns, added))
        else:
            self._known = await self._thread.run(self._rewrite, columns, added, replacing)
            file, self._file = self._file, None
            with suppress(OSError):  # the new file is in place
                await file.aclose()
        self._columns = columns

    async def aclose(self) -> None:
        """Close the file."""
        file, self._file = self._file, None
        if file is not None:
            await file.aclose()

    def _sort(self, rows: Sequence[Row]) -> tuple[list[Row], dict[int, list[Row]]]:
        added: list[Row] = []
        replacing: dict[int, list[Row]] = {}
        for row in rows:
            key = identity(row) if self._known else 0
            (replacing.setdefault(key, []) if key in self._known else added).append(row)
        return added, replacing

    def _rewrite(self, columns: list[str], added: list[Row], replacing: dict[int, list[Row]]) -> dict[int, int]:
        target = Path(os.path.realpath(self._path))
        beside = Path(f"{target}.tmp")
        try:
            with open(target, "rb") as old, open(beside, "wb") as new:
                known = self._copy(old, new, columns, replacing)
                new.write(_text(columns, added))
                new.flush()
                os.fsync(new.fileno())
            shutil.copymode(target, beside)
            os.replace(beside, target)
        except BaseException:
            with suppress(OSError):
                beside.unlink(missing_ok=True)
            raise
        return known

    def _copy(
        self, old: BinaryIO, new: BinaryIO, columns: list[str], replacing: Mapping[int, list[Row]]
    ) -> dict[int, int]:
        """Copy the old rows, the new ones in place of theirs; return where those begin that may still be replaced."""
        start = 0
        if columns == self._columns:  # what lies before the first replaced row stays as it is, unread
            start = min(self._known[key] for key in replacing)
            _copy_bytes(old, new, start)
        else:
            next(_records(old))
            new.write(_header(columns))
        waiting = dict(replacing)
        moved: dict[int, int] = {}
        for _, raw, fields in _records(old):
            key = identity(dict(zip(self._columns, fields, strict=False))) if self._known else None
            if key is not None and self._known.get(key, -1) >= start:
                moved.setdefault(key, new.tell())
            if key is not None and key in replacing:
                new.write(_text(columns, waiting.pop(key, [])))
            else:
                new.write(_padded(raw, len(columns) - len(fields)))
        return {key: place for key, place in (self._known | moved).items() if key not in replacing}


# ------------------------------------------------------------------------------------------------------ reading


class _Found(NamedTuple):
    columns: list[str]
    known: dict[int, int]


def _scan(path: Path, since: float) -> _Found:
    """Read the columns of `path` and where the rows older than `since` begin; set a torn last row aside."""
    known: dict[int, int] = {}
    columns: list[str] = []
    if not path.is_file():
        return _Found(columns, known)
    last = (0, b"\n")
    with open(path, "rb") as file:
        for offset, raw, fields in _records(file):
            last = (offset, raw)
            if not columns:
                columns = [fields[0].removeprefix("\ufeff"), *fields[1:]] if fields else []
                continue
            row = dict(zip(columns, fields, strict=False))
            if not _is_time(row.get("time", "")) or float(row["time"]) < since:
                known.setdefault(identity(row), offset)
    start, raw = last
    if _is_torn(raw):
        set_aside(path, start)
        columns = columns if start else []
        known = {key: place for key, place in known.items() if place < start}
    return _Found(columns, known)


def _records(file: BinaryIO) -> Iterator[tuple[int, bytes, list[str]]]:
    """Yield each record from here on: where it begins, its bytes, its fields (a quoted field may span lines)."""
    taken: list[bytes] = []

    def lines() -> Iterator[str]:
        for line in file:
            taken.append(line)
            yield line.decode("utf-8", "surrogateescape")

    offset = file.tell()
    try:
        for fields in csv.reader(lines()):
            raw = b"".join(taken)
            taken.clear()
            yield offset, raw, fields
            offset += len(raw)
    except csv.Error as error:
        raise OSError(f"the row at byte {offset} is no CSV: {error}") from error


def _is_torn(raw: bytes) -> bool:
    """Say whether a last record lacks its end: the line's, or that of a quoted field."""
    if not raw.endswith(b"\n"):
        return True
    try:
        list(csv.reader(io.StringIO(raw.decode("utf-8", "surrogateescape"), newline=""), strict=True))
    except csv.Error:
        return True
    return False


def _is_time(text: str) -> bool:
    try:
        return float(text) > 0
    except ValueError:
        return False


# ------------------------------------------------------------------------------------------------------ writing


def _text(columns: Sequence[str], rows: Iterable[Row]) -> bytes:
    lines = io.StringIO(newline="")
    writer = csv.writer(lines, lineterminator="\n")
    writer.writerows([row.get(column, "") for column in columns] for row in rows)
    return lines.getvalue().encode("utf-8", "surrogateescape")


def _header(columns: Sequence[str]) -> bytes:
    return _text(columns, [dict(zip(columns, columns, strict=True))])


def _padded(raw: bytes, missing: int) -> bytes:
    if missing <= 0 or not raw.strip():
        return raw
    line = raw.rstrip(b"\r\n")
    return line + b"," * missing + raw[len(line) :]


def _copy_bytes(old: BinaryIO, new: BinaryIO, size: int) -> None:
    while size > 0:
        chunk = old.read(min(size, 1 << 20))
        if not chunk:
            raise OSError("the file became shorter while it was copied")
        new.write(chunk)
        size -= len(chunk)
