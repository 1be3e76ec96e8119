"""Files that a crash left torn: what is whole stays in place, the rest is set aside and not lost."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, BinaryIO

import msgspec

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["mend", "set_aside"]

_CHUNK = 64 * 1024


def mend(path: Path) -> None:
    """Make a file of JSON lines end with a whole one. It works on bytes: a cut may lie inside a character."""
    if not path.is_file():
        return
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        start = _last_line_end(file, size)
        file.seek(start)
        tail = file.read()
    if not tail:
        return
    if _is_whole(tail):  # only its line end was lost
        with open(path, "ab") as file:
            file.write(b"\n")
    else:
        set_aside(path, start)


def _last_line_end(file: BinaryIO, size: int) -> int:
    while size > 0:
        start = max(0, size - _CHUNK)
        file.seek(start)
        found = file.read(size - start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        size = start
    return 0


def _is_whole(line: bytes) -> bool:
    try:
        return isinstance(msgspec.json.decode(line), dict)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False


def set_aside(path: Path, start: int) -> None:
    """Move the bytes of `path` from `start` on, which a crash left torn, to the end of ``<path>.torn``."""
    with open(path, "r+b") as file, open(f"{path}.torn", "ab") as torn:
        file.seek(start)
        torn.write(file.read() + b"\n")
        torn.flush()
        file.truncate(start)
