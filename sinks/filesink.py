"""What the file sinks share: events to the file of their run and rank, opened once, a bounded number at a time."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from contextlib import suppress
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar

from eventbus.errors import SinkUnavailable
from eventbus.filters import is_for_real
from sinks.paths import PathTemplate
from sinks.threads import IOThread, finish

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from eventbus.events import Event

__all__ = ["FileSink", "Writer"]

_MOST_OPEN = 16
Row = TypeVar("Row")
_Row_contra = TypeVar("_Row_contra", contravariant=True)


class Writer(Protocol[_Row_contra]):
    """One open file."""

    async def write(self, rows: Sequence[_Row_contra], /) -> None:
        """Write all of the rows, or raise OSError and write none."""

    async def aclose(self) -> None:
        """Close the file."""


class FileSink(ABC, Generic[Row]):
    """Writes events as rows; a subclass says what a row is and how a file is opened.

    A file that cannot be opened or written raises `SinkUnavailable`; it is opened anew at the next try. A batch that
    was written to some of its files only is not written to those again when the bus repeats it. A trial validation
    before a training (phase "sanity") is left out, unless it is attached with a `when` of one's own, or with None.
    """

    options: ClassVar[Mapping[str, Any]] = MappingProxyType({"maxsize": 100_000, "timeout": 60.0, "when": is_for_real})
    max_batch = 10_000

    def __init__(
        self, path: str | os.PathLike[str], hooks: str | Iterable[str], *, flush_interval: float = 1.0
    ) -> None:
        if not flush_interval >= 0:
            raise ValueError(f"flush_interval must be 0 or more seconds, not {flush_interval!r}.")
        self.hooks = (hooks,) if isinstance(hooks, str) else tuple(hooks)
        self.flush_interval = flush_interval
        self._template = PathTemplate(path)
        self._bound: tuple[str, int] | None = None
        self._opened_at: float | None = None
        self._writers: OrderedDict[Path, Writer[Row]] = OrderedDict()
        self._half_done: dict[tuple[Path, object], Event] = {}
        self._thread = IOThread()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._template.text!r})"

    def __getstate__(self) -> dict[str, Any]:
        fresh: dict[str, Any] = {"_opened_at": None, "_writers": OrderedDict(), "_half_done": {}, "_thread": IOThread()}
        return {**self.__dict__, **fresh}

    def bind(self, *, run: str, rank: int) -> None:
        """Name the run and rank whose file `open` opens; the bus does so before the first one."""
        self._bound = (run, rank)

    async def open(self) -> None:
        """Open the file, so that a path that cannot work is known at the start."""
        await finish(self._open())

    async def write(self, events: Sequence[Event], /) -> None:
        """Append `events`, all or (raising `SinkUnavailable`) none."""
        await finish(self._write(events))

    async def aclose(self) -> None:
        """Close every file; `open` may follow."""
        self._opened_at = None
        self._half_done.clear()
        try:
            await finish(self._close_all())
        finally:
            self._thread.end()

    # ------------------------------------------------------------------------------------------ for subclasses

    @abstractmethod
    def _rows(self, events: Sequence[Event]) -> Sequence[Row]: ...

    @abstractmethod
    async def _open_file(self, path: Path) -> Writer[Row]: ...

    # ------------------------------------------------------------------------------------------------ inside

    async def _open(self) -> None:
        with suppress(OSError, RuntimeError):  # left open by a loop that died: RuntimeError
            await self._close_all()
        self._thread.end()  # that of another process, perhaps
        self._opened_at = self._opened_at or time.time()
        if self._bound is not None or self._template.is_fixed:
            path = self._template.fill(*(self._bound or (None, None)))
            try:
                await self._writer(path)
            except OSError as error:
                raise self._unavailable("open", path, error) from error

    async def _write(self, events: Sequence[Event]) -> None:
        rows = self._rows(events)
        for path, indices in self._by_path(events).items():
            is_all = len(indices) == len(events)
            try:
                writer = await self._writer(path)
                await writer.write(rows if is_all else [rows[index] for index in indices])
            except OSError as error:
                await self._drop(path)
                raise self._unavailable("write", path, error) from error
            if not is_all:
                self._half_done |= {(path, _identity(events[index])): events[index] for index in indices}
        self._half_done.clear()

    def _by_path(self, events: Sequence[Event]) -> dict[Path, Sequence[int]]:
        """The indices of the events that go to each file, in order."""
        if not self._half_done:
            places = {(event.run, event.rank) for event in events} if not self._template.is_fixed else {(None, None)}
            if len(places) == 1:
                return {self._path(*places.pop()): range(len(events))}
        found: dict[Path, list[int]] = {}
        for index, event in enumerate(events):
            path = self._path(event.run, event.rank)
            if (path, _identity(event)) not in self._half_done:
                found.setdefault(path, []).append(index)
        return dict(found)

    def _path(self, run: str | None, rank: int | None) -> Path:
        bound_run, bound_rank = self._bound or (None, None)
        return self._template.fill(bound_run if run is None else run, bound_rank if rank is None else rank)

    async def _writer(self, path: Path) -> Writer[Row]:
        if path not in self._writers:
            if len(self._writers) >= _MOST_OPEN:
                await self._drop(next(iter(self._writers)))
            self._writers[path] = await self._open_file(path)
        self._writers.move_to_end(path)
        return self._writers[path]

    async def _drop(self, path: Path) -> None:
        writer = self._writers.pop(path, None)
        if writer is not None:
            with suppress(OSError):
                await writer.aclose()

    async def _close_all(self) -> None:
        failed: tuple[Path, OSError] | None = None
        while self._writers:
            path, writer = self._writers.popitem()
            try:
                await writer.aclose()
            except OSError as error:
                failed = (path, error)
        if failed is not None:
            raise self._unavailable("close", *failed) from failed[1]

    def _unavailable(self, action: str, path: Path, error: OSError) -> SinkUnavailable:
        return SinkUnavailable(f"{type(self).__name__} cannot {action} {path}: {error.strerror or error}")


def _identity(event: Event) -> object:
    return (event.run, event.rank, event.attempt, event.seq) if event.seq else id(event)
