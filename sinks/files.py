"""Files as sinks use them: appended to off the loop, whole or not at all.

On asyncio the IO goes through aiofiles, which does not know trio; there each call goes to a thread. Files are opened
without a buffer: a killed process loses nothing that `AppendFile.append` has returned for, a full disk is noticed by
the write itself, and a forked child has nothing left to flush.
"""

from __future__ import annotations

import errno
import os
import stat
from io import FileIO
from typing import TYPE_CHECKING, Protocol, cast

import aiofiles

from sinks.threads import on_asyncio

if TYPE_CHECKING:
    from pathlib import Path

    from sinks.threads import IOThread

__all__ = ["AppendFile"]


class _RawFile(Protocol):
    """What is used of a file of aiofiles, and given on trio."""

    async def write(self, data: bytes, /) -> int: ...
    async def tell(self) -> int: ...
    async def truncate(self, size: int | None = None, /) -> int: ...
    async def close(self) -> None: ...


class _OnTrio:
    """A file whose calls are made in the thread of its sink."""

    def __init__(self, raw: FileIO, thread: IOThread) -> None:
        self._raw = raw
        self._thread = thread

    async def write(self, data: bytes, /) -> int:
        return await self._thread.run(self._raw.write, data)

    async def tell(self) -> int:
        return await self._thread.run(self._raw.tell)

    async def truncate(self, size: int | None = None, /) -> int:
        return await self._thread.run(self._raw.truncate, size)

    async def close(self) -> None:
        await self._thread.run(self._raw.close)


class AppendFile:
    """One file open for appending, by one writer."""

    def __init__(self, raw: _RawFile, fd: int, thread: IOThread) -> None:
        self._raw = raw
        self._fd = fd
        self._thread = thread
        self.size_bytes = os.fstat(fd).st_size

    @classmethod
    async def open(cls, path: Path, thread: IOThread) -> AppendFile:
        """Open `path`, made together with its parents where it is missing; raises OSError."""
        await thread.run(_make_parents, path)
        if on_asyncio():
            file = await aiofiles.open(path, "ab", buffering=0, executor=thread.executor)
            return cls(cast("_RawFile", file), file.fileno(), thread)
        raw = await thread.run(FileIO, path, "ab")
        return cls(_OnTrio(raw, thread), raw.fileno(), thread)

    async def append(self, data: bytes, *, durable: bool = False) -> None:
        """Write `data` with one write, whole or not at all (then OSError); `durable`: and onto the disk."""
        written = await self._raw.write(data)
        try:
            if written < len(data):  # a nearly full disk takes a part and reports no error
                raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} ({written} of {len(data)} bytes written)")
            if durable:
                await self.sync()
        except OSError:
            await self._raw.truncate(await self._raw.tell() - written)
            raise
        self.size_bytes += written

    async def sync(self) -> None:
        """Put on the disk what was appended."""
        await self._thread.run(_sync, self._fd)

    async def aclose(self) -> None:
        """Close the file."""
        await self._raw.close()


def _make_parents(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)


def _sync(fd: int) -> None:
    if stat.S_ISREG(os.fstat(fd).st_mode):  # a pipe or a device cannot be synced
        os.fsync(fd)
