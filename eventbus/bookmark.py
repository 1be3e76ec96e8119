"""A bookmark: how far a durable subscriber has come, as a number on disk that survives a killed process."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from urllib.parse import quote, unquote

__all__ = ["Bookmark", "bookmarks_in"]

_BYTES = 8


class Bookmark:
    """The `seq` up to which every event of one durable subscriber is settled."""

    __slots__ = ("_words", "path")

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("r+b") as file:
            self._words = memoryview(mmap.mmap(file.fileno(), _BYTES)).cast("Q")

    @classmethod
    def open(cls, directory: Path, name: str, seq: int) -> Bookmark:
        """The bookmark of this subscriber, made at `seq` if there is none."""
        path = _path(directory, name)
        if not _is_whole(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            fresh = path.with_suffix(".new")
            fresh.write_bytes(seq.to_bytes(_BYTES, "little"))
            os.replace(fresh, path)
        return cls(path)

    @property
    def seq(self) -> int:
        seq: int = self._words[0]
        return seq

    def advance(self, seq: int) -> None:
        """One aligned store: whoever kills the process leaves the old number or the new one."""
        self._words[0] = seq

    @staticmethod
    def forget(directory: Path, name: str) -> None:
        """Remove the bookmark of this subscriber, if there is one: nobody comes back to it."""
        _path(directory, name).unlink(missing_ok=True)


def bookmarks_in(directory: Path) -> dict[str, int]:
    """Every durable subscriber that was ever here, by name, and how far it has come."""
    paths = sorted((directory / "subscribers").glob("*.seq"))
    return {
        unquote(path.stem): int.from_bytes(path.read_bytes()[:_BYTES], "little") for path in paths if _is_whole(path)
    }


def _path(directory: Path, name: str) -> Path:
    return directory / "subscribers" / f"{quote(name, safe='')}.seq"


def _is_whole(path: Path) -> bool:
    try:
        return path.stat().st_size >= _BYTES
    except FileNotFoundError:
        return False
