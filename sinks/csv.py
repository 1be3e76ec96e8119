"""Events to a table: one row each."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from eventbus.sink import encoded
from sinks.cells import cells
from sinks.filesink import FileSink
from sinks.table import Table

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from eventbus.events import Event

__all__ = ["CSVSink"]


class CSVSink(FileSink[dict[str, str]]):
    """Appends each event to `path` as one row, its fields and metrics as columns; an empty cell is a missing value.

    A column that appears later is added to the whole file. A resumed run goes on below the rows it finds and
    replaces those of the epochs (batches, steps) that it runs again; no other row is touched. Meant for what
    happens once per epoch: a resumed file of a million rows takes seconds to open and some 100 MB.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        hooks: str | Iterable[str] = "on_fit_epoch_end",
        *,
        flush_interval: float = 1.0,
    ) -> None:
        super().__init__(path, hooks, flush_interval=flush_interval)

    def _rows(self, events: Sequence[Event]) -> Sequence[dict[str, str]]:
        return [cells(line) for line in encoded(events)]

    async def _open_file(self, path: Path) -> Table:
        table = Table(path, self._opened_at or time.time(), self._thread)
        await table.open()
        return table
