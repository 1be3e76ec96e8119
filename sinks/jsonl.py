"""Events to a file, one line of JSON each, and back."""

from __future__ import annotations

import gzip
import logging
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from eventbus.codec import decode
from eventbus.errors import DecodeError
from eventbus.events import Event
from eventbus.sink import encoded
from sinks.files import AppendFile
from sinks.filesink import FileSink
from sinks.mending import mend
from sinks.segments import Compressor, rotate, segments

if TYPE_CHECKING:
    from sinks.threads import IOThread

__all__ = ["JSONLEvents", "JSONLSink", "read_jsonl"]

_Fsync = Literal["never", "close", "always"]
_EVERY_HOOK_BUT_THE_INNER_STEPS = (
    "*",
    "!on_train_batch_start",
    "!on_after_backward",
    "!on_before_optimizer_step",
    "!optimizer_step",
    "!on_before_zero_grad",
    "!on_val_batch_start",
    "!on_val_image_end",
)

_log = logging.getLogger(__name__)


class JSONLSink(FileSink[bytes]):
    """Appends each event to `path` as one line of strict JSON, which `read_jsonl` turns into events again.

    A batch is one write, there whole or not at all. A line that a crash left torn is moved to ``<path>.torn`` when
    the file is opened again, and what follows starts on a line of its own. `fsync`: never (a power cut may cost the
    last seconds, a killed process costs nothing written), at close, or after every batch. At `rotate_bytes` (None:
    never) the file becomes ``<path>.0001`` and a new one begins; `compress` gzips those closed segments in a thread.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        hooks: str | Iterable[str] = _EVERY_HOOK_BUT_THE_INNER_STEPS,
        *,
        flush_interval: float = 1.0,
        fsync: _Fsync = "never",
        rotate_bytes: int | None = 1 << 30,
        compress: bool = False,
    ) -> None:
        super().__init__(path, hooks, flush_interval=flush_interval)
        if fsync not in get_args(_Fsync):
            raise ValueError(f"fsync must be one of {', '.join(map(repr, get_args(_Fsync)))}, not {fsync!r}.")
        if rotate_bytes is not None and not rotate_bytes > 0:
            raise ValueError(f"rotate_bytes must be a positive number of bytes or None, not {rotate_bytes!r}.")
        self.fsync = fsync
        self.rotate_bytes = rotate_bytes
        self.compress = compress

    def _rows(self, events: Sequence[Event]) -> Sequence[bytes]:
        return encoded(events)

    async def _open_file(self, path: Path) -> _Lines:
        compressor = Compressor(path) if self.compress else None
        lines = _Lines(path, self.fsync, self.rotate_bytes, compressor, self._thread)
        await lines.open()
        return lines


class _Lines:
    """One JSONL file open for appending, which rotates itself."""

    def __init__(
        self, path: Path, fsync: _Fsync, rotate_bytes: int | None, compressor: Compressor | None, thread: IOThread
    ) -> None:
        self._path = path
        self._fsync = fsync
        self._rotate_bytes = rotate_bytes
        self._compressor = compressor
        self._thread = thread
        self._file: AppendFile | None = None
        self._cannot_rotate = False

    async def open(self) -> AppendFile:
        await self._thread.run(mend, self._path)
        self._file = await AppendFile.open(self._path, self._thread)
        if self._compressor is not None:
            await self._thread.run(self._compressor.start)  # what the last process left
        return self._file

    async def write(self, lines: Sequence[bytes]) -> None:
        if lines:
            file = self._file or await self.open()
            await file.append(b"\n".join(lines) + b"\n", durable=self._fsync == "always")
            if self._rotate_bytes is not None and file.size_bytes >= self._rotate_bytes:
                await self._rotate(file)

    async def _rotate(self, file: AppendFile) -> None:
        # The lines are written: whatever fails now must not make the bus send them again.
        try:
            if self._fsync != "never":
                await file.sync()
            await self._thread.run(rotate, self._path)
        except OSError as error:
            if not self._cannot_rotate:
                _log.warning("%s cannot be rotated and grows on: %s", self._path, error.strerror or error)
            self._cannot_rotate = True
            return
        self._cannot_rotate = False
        self._file = None
        await _close_quietly(file)
        with suppress(OSError):  # else the next write opens it, and reports
            await self.open()

    async def aclose(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            try:
                if self._fsync != "never":
                    await file.sync()
            finally:
                await file.aclose()
        if self._compressor is not None:
            await self._thread.run(self._compressor.finish)


async def _close_quietly(file: AppendFile) -> None:
    try:
        await file.aclose()
    except OSError as error:
        _log.warning("A rotated file reported an error when it was closed: %s", error.strerror or error)


# ---------------------------------------------------------------------------------------------------- reading


class JSONLEvents(Iterable[Event]):
    """The events of a file in the order in which they were written; iterating reads it lazily, again each time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        #: How many lines could not be read in the last iteration; they were skipped.
        self.bad_lines = 0

    def __repr__(self) -> str:
        return f"JSONLEvents({str(self._path)!r})"

    def __iter__(self) -> Iterator[Event]:
        self.bad_lines = 0
        for file in _parts(self._path):
            yield from self._events_of(file)

    def _events_of(self, path: Path) -> Iterator[Event]:
        try:
            with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
                for line in file:
                    try:
                        if line.strip():
                            yield decode(line)
                    except DecodeError:
                        self.bad_lines += 1
        except (EOFError, gzip.BadGzipFile, zlib.error):  # the rest of a damaged segment
            self.bad_lines += 1


def read_jsonl(path: str | os.PathLike[str]) -> JSONLEvents:
    """Return the events that a `JSONLSink` wrote to `path`, those of its closed segments (also gzipped) first.

    Lines that are no event are skipped and counted in ``.bad_lines``. Raises FileNotFoundError where there is
    neither the file nor a segment of it.
    """
    found = Path(path)
    if not _parts(found):
        raise FileNotFoundError(f"There is no {found} and no segment of it.")
    return JSONLEvents(found)


def _parts(path: Path) -> list[Path]:
    return [*segments(path), *([path] if path.exists() else [])]
