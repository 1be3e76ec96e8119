"""``python -m benchmarks``: the table that the README quotes. Run it on an idle machine."""

from __future__ import annotations

import os
import platform
import sys
from datetime import UTC, datetime
from types import ModuleType

from benchmarks import delivering, files, importing, journal, loop, publishing, training, worst_day
from benchmarks.measure import Row

_PARTS = {
    part.__name__.removeprefix("benchmarks."): part
    for part in (publishing, journal, delivering, files, training, loop, worst_day, importing)
}


def main(names: list[str]) -> None:
    """Measure the named parts, or all of them."""
    parts: list[ModuleType] = [_PARTS[name] for name in names] if names else list(_PARTS.values())
    machine = f"{os.cpu_count()} cores, {platform.machine()}"
    print(f"{datetime.now(UTC):%Y-%m-%d}, Python {platform.python_version()}, {machine}")
    print()
    print("| what | ours | reference | ratio | aim | |")
    print("|---|---|---|---|---|---|")
    for part in parts:
        row: Row
        for row in part.rows():
            holds = "" if row.holds is None else "yes" if row.holds else "no"
            print(f"| {row.what} | {row.ours} | {row.reference} | {row.ratio} | {row.aim} | {holds} |", flush=True)


main(sys.argv[1:])
