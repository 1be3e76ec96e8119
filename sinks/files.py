"""Files as sinks use them: appended to off the loop, whole or not at all.

On asyncio the IO goes through aiofiles, on trio (which aiofiles does not know) through anyio. Files are opened
without a buffer: a killed process loses nothing that `AppendFile.append` has returned for, a full disk is noticed by
the write itself, and a forked child has nothing left to flush.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import TYPE_CHECKING, Protocol, cast

import aiofiles
import anyio

from sinks.threads import in_thread, on_asyncio

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

__all__ = ["AppendFile"]


class _RawFile(Protocol):
    """What aiofiles and anyio have in common."""

    async def write(self, data: bytes, /) -> int: ...
    async def tell(self) -> int: ...
    async def truncate(self, size: int | None = None, /) -> int: ...


class AppendFile:
    """One file open for appending, by one writer."""

    def __init__(self, raw: _RawFile, close: Callable[[], Awaitable[None]], fd: int, size_bytes: int) -> None:
        self._raw = raw
        self._close = close
        self._fd = fd
        self.size_bytes = size_bytes

    @classmethod
    async def open(cls, path: Path) -> AppendFile:
        """Open `path`, made together with its parents where it is missing; raises OSError."""
        await in_thread(_make_parents, path)
        if on_asyncio():
            file = await aiofiles.open(path, "ab", buffering=0)
            return cls(cast("_RawFile", file), file.close, file.fileno(), os.fstat(file.fileno()).st_size)
        other = await anyio.open_file(path, "ab", buffering=0)
        fd = other.wrapped.fileno()
        return cls(cast("_RawFile", other), other.aclose, fd, os.fstat(fd).st_size)

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
        await in_thread(_sync, self._fd)

    async def aclose(self) -> None:
        """Close the file."""
        await self._close()


def _make_parents(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)


def _sync(fd: int) -> None:
    if stat.S_ISREG(os.fstat(fd).st_mode):  # a pipe or a device cannot be synced
        os.fsync(fd)
